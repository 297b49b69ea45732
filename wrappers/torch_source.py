"""The adapter for GPU simulators and other duck-typed vector environments that return tensors.

Isaac Lab, mjlab, ManiSkill, Genesis, legged_gym and rsl_rl's `VecEnv` have no common base class. They share
`num_envs`, tensors and some behaviour: every step overwrites the reward and flag buffers and returns the same
`extras` dict, ended rows are reset in the same step, and a final observation may remain in `extras`.
"""

import inspect
import warnings
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.wrappers.arrays import Array, Tree, first_leaf, map_tree
from flatroll.wrappers.source import Capabilities, Info, Seed, Step, VectorSource, is_from

#: In how many steps that end episodes an entry in shared memory must keep its values to count as constant.
_FINALS_TO_CHECK = 3


class TorchSource(VectorSource):
    """A vector env that returns tensors, with one of three interfaces.

    ``step`` returns Gymnasium's 5-tuple, rsl_rl's ``(obs, reward, dones, extras)``, or legged_gym's ``(obs,
    privileged, reward, dones, extras)``, in which ``extras["time_outs"]`` says which dones are time-outs. The env
    must have ``num_envs``, ``step``, and spaces or rsl_rl's ``get_observations`` and ``num_actions``. Without
    ``reset`` (rsl_rl's ``VecEnv``) episodes begin in the env's current state. legged_gym's separate privileged
    observations become the entry ``"critic"`` of a Dict, beside ``"policy"``.
    """

    def __init__(
        self, env: Any, mode: AutoresetMode, device: torch.device | None, own_buffers: bool | str
    ) -> None:
        base = getattr(env, "unwrapped", env)
        self.env = env
        # These envs overwrite reward, flags and often observations at every step, so copy them.
        self._copies = bool(own_buffers)

        # What the env's reset takes.
        self._resets = hasattr(env, "reset")
        parameters = inspect.signature(env.reset).parameters if self._resets else {}
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._takes_seed = takes_all or "seed" in parameters
        self._takes_options = takes_all or "options" in parameters

        # Which simulator it is.
        self._is_maniskill = is_from("mani_skill", base)
        self._is_legged = hasattr(env, "get_privileged_observations")
        self._has_privileged = self._is_legged and env.get_privileged_observations() is not None

        # What is still to be checked.
        self._stepped = False
        self._shapes: Tree = None  # of the observations of the last reset
        self._check_step = True
        self._check_final = True
        self._finals_to_check = _FINALS_TO_CHECK

        # Until final observations have been checked: the last output of step, and what the caller got for it and for
        # the one before, which the env does not overwrite.
        self._shown: Tree = None
        self._copy: Tree = None
        self._before: Tree = None

        observation_space = _declared_space(env, "observation")
        seen = None
        if observation_space is None:
            seen = self._with_privileged(_get_observations(env))
        action_space = _declared_space(env, "action")
        if action_space is None:
            if not hasattr(env, "num_actions"):
                raise _no_space_error(env, "action")
            action_space = spaces.Box(-np.inf, np.inf, (int(env.num_actions),))

        self._device = device or _find_device(base, seen)
        capabilities = Capabilities(
            self._device,
            "torch",
            hides_final_obs=mode is AutoresetMode.SAME_STEP,
            partial_reset="env_ids" in parameters or self._is_maniskill,
            reuses_buffers=self._copies,
            seedable=self._takes_seed,
        )
        super().__init__(
            env, int(env.num_envs), observation_space or _make_space(seen), action_space, capabilities
        )

    @override
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        name = type(self.env).__name__
        arguments: dict[str, Any] = {}
        if seed is not None and self._takes_seed:
            arguments["seed"] = seed
        elif seed is not None:
            warnings.warn(
                f"{name}.reset takes no seed: reset(seed={seed!r}) has no effect; seed the env when you make it",
                stacklevel=4,
            )

        if rows is None:
            if options and self._takes_options:
                arguments["options"] = options
        else:
            # These envs expect row numbers; computing them syncs with the device.
            numbers = torch.as_tensor(rows, device=self._device).nonzero().squeeze(-1)
            if self._is_maniskill:
                arguments["options"] = {**(options or {}), "env_idx": numbers}
            else:
                arguments["env_ids"] = numbers

        if self._resets:
            result = self.env.reset(**arguments)
        else:
            if self._stepped:
                warnings.warn(
                    f"{name} has no reset: its running episodes continue and count as new ones", stacklevel=4
                )
            result = self.env.get_observations()

        obs = result
        info = None
        if isinstance(result, tuple):
            obs, info = result
        obs = self._with_privileged(_plain(obs))

        leaf = first_leaf(obs)
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{name} is not a gymnasium.vector.VectorEnv, so it must return tensors, got {type(leaf).__name__}: "
                "derive it from VectorEnv (without a device), or write a flatroll.wrappers.VectorSource"
            )
        if len(leaf) != self.num_envs:
            raise ValueError(
                f"observations must have one row for each of num_envs={self.num_envs} envs, got {len(leaf)} from "
                f"{name}: set its num_envs to the number of envs that it steps"
            )
        if leaf.device.type != self._device.type or self._device.index not in (None, leaf.device.index):
            raise ValueError(
                f"device={str(self._device)!r} was expected, but {name} returns tensors on "
                f"{str(leaf.device)!r}: pass as_vector_env(env, device={str(leaf.device)!r})"
            )

        self._shapes = _read_shapes(obs)
        self._check_step = True
        self._check_final = True
        self._finals_to_check = _FINALS_TO_CHECK
        owned = self._own(obs)
        self._copy = owned

        # (The second item is legged_gym's privileged observations; Genesis returns None.)
        if not isinstance(info, dict):
            info = {}
        return owned, dict(info)

    @override
    def step(self, actions: Tree) -> Step:
        self._stepped = True
        result = self.env.step(actions)

        if len(result) == 5 and not self._is_legged:
            obs, reward, terminated, truncated, extras = result
            # (Other interfaces' flags are computed, so they are new tensors.)
            if self._copies and not self.may_alias:
                terminated = terminated.clone()
                truncated = truncated.clone()
        elif len(result) in (4, 5):
            obs = result[0]
            reward, done, extras = result[-3:]

            # "dones" includes time-outs; only the others are terminations.
            done = done.bool()
            timed_out = extras.get("time_outs")
            if timed_out is None:
                truncated = torch.zeros_like(done)
            else:
                if timed_out.ndim != done.ndim:  # [E] and [E, 1] would broadcast to [E, E]
                    timed_out = timed_out.reshape(done.shape)
                truncated = timed_out.bool() & done
            terminated = done & ~truncated
            if self._has_privileged:
                obs = self._with_privileged(obs)
        else:
            raise TypeError(
                f"step must return (obs, reward, terminated, truncated, info) or (obs, reward, dones, extras), got "
                f"{len(result)} values from {type(self.env).__name__}: write a flatroll.wrappers.VectorSource"
            )

        if self._copies and not self.may_alias:
            reward = reward.clone()
        owned = self._own(obs)

        if self._check_final:
            self._shown = obs
            self._before = self._copy
            self._copy = owned

        if self._check_step:
            self._check_step = False
            self._refuse_other_shapes("step's observations", obs)
        return owned, reward, terminated, truncated, dict(extras)

    @override
    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Tree | None = None) -> Tree | None:
        """Return this step's final observations: ``(E, ...)``, (env_ids, values), or None.

        mjlab proposes the pairs as ``extras["terminal"]``; no release up to 1.6.0 returns them.
        """
        if given is None:
            given = info.get("final_obs", info.get("final_observation"))

        if given is not None:
            if self._check_final:
                self._refuse_other_shapes("the final observations", given)
                self._check_final = self._refuse_shared(_plain(given), ended)
                if not self._check_final:
                    self._shown = None
                    self._copy = None
                    self._before = None
            if self.may_alias:
                return _plain(given)
            return self._own(given)

        shown = info.get("terminal")
        if not isinstance(shown, dict) or "env_ids" not in shown:
            return None

        numbers = shown["env_ids"]
        # Only the rows of ended envs: write them into a copy of the step's observations.
        return map_tree(lambda o, rows: o.index_copy(0, numbers, rows), obs, _plain(shown["observations"]))

    def check_no_finals(self) -> None:
        """Do not compare the next final observations: those before them are not at hand."""
        self._check_final = False
        self._shown = self._copy = self._before = None

    def _refuse_other_shapes(self, name: str, obs: Tree) -> None:
        """Raise if the first step after a reset returns observations with other entries or shapes than the reset."""
        shapes = _read_shapes(_plain(obs))
        if shapes != self._shapes:
            raise ValueError(
                f"{name} must have the entries and shapes of those from reset, {self._shapes}, got {shapes} "
                f"from {type(self.env).__name__}: return all rows and entries in each"
            )

    def _refuse_shared(self, final: Tree, ended: Tensor) -> bool:
        """Raise if the reset has overwritten the final observations; return whether to check the next ones, too.

        Entries in the memory of the step's observations are lost, unless they never change, such as a goal: of those
        only more episodes tell.
        """
        undecided = False

        def look(one: Tensor, shown: Tensor, before: Tensor) -> None:
            nonlocal undecided
            if not one.data_ptr() == shown.data_ptr() != 0:
                return

            undecided = True
            if not torch.equal(shown[ended], before[ended]):
                raise ValueError(
                    f"the final observations of {type(self.env).__name__} are in the same memory as those that step "
                    "returns, so the reset has overwritten them: clone them before the reset"
                )

        map_tree(look, final, _plain(self._shown), self._before)

        if undecided and bool(ended.any()):
            self._finals_to_check -= 1
        return undecided and self._finals_to_check > 0

    def _with_privileged(self, obs: Tree) -> Tree:
        """Return the observations, with legged_gym's privileged ones if there are any."""
        if not self._has_privileged or isinstance(obs, dict | TensorDictBase):
            return obs
        return {"policy": obs, "critic": self.env.get_privileged_observations()}

    def _own(self, obs: Tree) -> Tree:
        if isinstance(obs, Tensor):
            if self._copies:
                return obs.clone()
            return obs

        tree = _plain(obs)
        if self._copies:
            return map_tree(Tensor.clone, tree)
        return tree


def _declared_space(env: Any, kind: str) -> spaces.Space[Any] | None:
    """Return the declared space of one row's ``"observation"`` or ``"action"``, or None."""
    declared = getattr(env, f"single_{kind}_space", None)
    if declared is not None:
        return _space_like(declared)
    if kind == "observation" and hasattr(env, "asymmetric_obs"):
        # get_observations of MuJoCo playground's wrapper resets all rows.
        sizes = {"state": env.num_obs}
        if env.asymmetric_obs:
            sizes["privileged_state"] = env.num_privileged_obs

        boxes: dict[str, spaces.Space[Any]] = {}
        for name, size in sizes.items():
            shape = (size,) if isinstance(size, int) else tuple(size)
            boxes[name] = spaces.Box(-np.inf, np.inf, shape)
        return spaces.Dict(boxes)
    return None


def _get_observations(env: Any) -> Tree:
    """Return the observations of rsl_rl's ``get_observations``."""
    if not hasattr(env, "get_observations"):
        raise _no_space_error(env, "observation")

    seen = env.get_observations()
    if isinstance(seen, tuple):
        seen = seen[0]
    return _plain(seen)


def _no_space_error(env: Any, kind: str) -> TypeError:
    """Return the error for an env without spaces."""
    return TypeError(
        f"env must have single_{kind}_space (a Gymnasium space of one env's {kind}), which "
        f"{type(env).__name__} lacks: set it on the env before you wrap it"
    )


def _make_space(seen: Tree) -> spaces.Space[Any]:
    """Return the space of one row of these observations."""
    if isinstance(seen, dict):
        return spaces.Dict({key: _make_space(value) for key, value in seen.items()})
    return _box(seen)


def _find_device(env: object, seen: Tree) -> torch.device:
    """Return the env's ``device``, or the device of its observations or other tensors."""
    device = getattr(env, "device", None)
    if device is not None:
        return torch.device(device)

    held = [first_leaf(seen), *getattr(env, "__dict__", {}).values()]
    devices = [value.device for value in held if isinstance(value, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _read_shapes(obs: Tree) -> Tree:
    return map_tree(lambda leaf: tuple(leaf.shape), obs)


def _plain(obs: Tree | TensorDictBase) -> Tree:
    """Convert a tensordict to a plain dict; return other trees unchanged."""
    if not isinstance(obs, Tensor) and isinstance(obs, TensorDictBase):
        return {key: _plain(value) for key, value in obs.items()}
    return obs


def _space_like(space: object) -> spaces.Space[Any]:
    """Convert another library's space object (mjlab has its own classes) to a Gymnasium space."""
    if isinstance(space, spaces.Space):
        return space

    children = getattr(space, "spaces", None)
    if isinstance(children, dict):
        return spaces.Dict({key: _space_like(child) for key, child in children.items()})

    shape = getattr(space, "shape", None)
    if shape is None:
        raise TypeError(f"env's spaces must be Gymnasium spaces or have a shape, got {type(space).__name__}")
    return spaces.Box(-np.inf, np.inf, tuple(shape))


def _box(sample: Tensor) -> spaces.Box:
    dtype = torch.zeros(0, dtype=sample.dtype).numpy().dtype
    if sample.dtype.is_floating_point:
        return spaces.Box(-np.inf, np.inf, tuple(sample.shape[1:]), dtype.type)

    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, tuple(sample.shape[1:]), dtype.type)
