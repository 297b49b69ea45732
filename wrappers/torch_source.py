"""The adapter for GPU simulators and other vector environments that return tensors (duck-typed).

Isaac Lab, mjlab, ManiSkill, Genesis and rsl_rl's `VecEnv` have no base class in common; what they share is
`num_envs`, tensors, and habits: reward and flag buffers that are written into again at every step, one `extras`
dict for all steps, autoreset in the same step, and sometimes a final observation that lingers in `extras`.
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
from flatroll.wrappers.source import Capabilities, Info, Seed, Step, VectorSource


class TorchSource(VectorSource):
    """A vector env that returns tensors: 5-tuples, or rsl_rl's 4-tuples with ``extras["time_outs"]``.

    It must have ``num_envs``, ``reset``, ``step``, and spaces or rsl_rl's ``get_observations`` and ``num_actions``.
    """

    def __init__(
        self, env: Any, mode: AutoresetMode, device: torch.device | None, own_buffers: bool | str
    ) -> None:
        base = getattr(env, "unwrapped", env)
        self._device = torch.device(device if device is not None else getattr(base, "device", "cpu"))
        # These envs overwrite reward, flags and often observations at every step: what they return is copied.
        self._copies = bool(own_buffers)
        parameters = inspect.signature(env.reset).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._takes_seed = takes_all or "seed" in parameters
        self._takes_options = takes_all or "options" in parameters
        self._is_maniskill = type(base).__module__.startswith("mani_skill")
        capabilities = Capabilities(
            self._device,
            "torch",
            hides_final_obs=mode is AutoresetMode.SAME_STEP,
            partial_reset="env_ids" in parameters or self._is_maniskill,
            reuses_buffers=self._copies,
            seedable=self._takes_seed,
        )
        single = _space_of(env, "observation"), _space_of(env, "action")
        super().__init__(env, int(env.num_envs), *single, capabilities)

    @override
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        arguments: dict[str, Any] = {}
        if seed is not None and self._takes_seed:
            arguments["seed"] = seed
        elif seed is not None:
            warnings.warn(
                f"{type(self.env).__name__}.reset takes no seed: reset(seed={seed!r}) has no effect; seed the env "
                "when you make it",
                stacklevel=4,
            )
        if rows is None:
            if options and self._takes_options:
                arguments["options"] = options
        else:
            # These envs take row numbers: counting them waits for the device.
            numbers = torch.as_tensor(rows, device=self._device).nonzero().squeeze(-1)
            if self._is_maniskill:
                arguments["options"] = {**(options or {}), "env_idx": numbers}
            else:
                arguments["env_ids"] = numbers
        result = self.env.reset(**arguments)
        obs, info = result if isinstance(result, tuple) else (result, {})
        if not isinstance(first_leaf(_plain(obs)), Tensor):
            got = type(first_leaf(_plain(obs))).__name__
            raise TypeError(
                f"{type(self.env).__name__} is no gymnasium.vector.VectorEnv, so it must return tensors, got {got}: "
                "derive it from VectorEnv (without a device), or write a flatroll.wrappers.VectorSource"
            )
        return self._owned(obs), dict(info)

    @override
    def step(self, actions: Tree) -> Step:
        result = self.env.step(actions)
        if len(result) == 4:
            obs, reward, done, extras = result
            done = done.bool()
            # rsl_rl: "dones" holds the time-outs too; only the rest are ends of the task.
            timed_out = extras.get("time_outs")
            truncated = torch.zeros_like(done) if timed_out is None else timed_out.bool() & done
            terminated = done & ~truncated
        else:
            obs, reward, terminated, truncated, extras = result
            if self._copies:  # (the flags of a 4-tuple are computed, and new already)
                terminated, truncated = terminated.clone(), truncated.clone()
        if self._copies:
            reward = reward.clone()
        return self._owned(obs), reward, terminated, truncated, dict(extras)

    @override
    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Tree | None = None) -> Tree | None:
        """Return this step's final observations: ``(E, ...)``, mjlab's (env_ids, values), or None."""
        if given is None:
            given = info.get("final_obs", info.get("final_observation"))
        if given is not None:
            return self._owned(given)
        shown = info.get("terminal")
        if not isinstance(shown, dict) or "env_ids" not in shown:
            return None
        numbers = shown["env_ids"]
        # Rows of the ended envs only, written into a copy of the observations that the step returned.
        return map_tree(lambda o, rows: o.index_copy(0, numbers, rows), obs, _plain(shown["observations"]))

    def _owned(self, obs: Tree) -> Tree:
        tree = _plain(obs)
        return map_tree(Tensor.clone, tree) if self._copies else tree


def _space_of(env: Any, kind: str) -> spaces.Space[Any]:
    """The space of one row's ``"observation"`` or ``"action"``: declared, or read off rsl_rl's attributes."""
    declared = getattr(env, f"single_{kind}_space", None)
    if declared is not None:
        return _space_like(declared)
    if kind == "action" and hasattr(env, "num_actions"):
        return spaces.Box(-np.inf, np.inf, (int(env.num_actions),))
    if kind == "observation" and hasattr(env, "get_observations"):
        seen = env.get_observations()
        tree = _plain(seen[0] if isinstance(seen, tuple) else seen)
        if isinstance(tree, dict):
            return spaces.Dict({key: _box(value) for key, value in tree.items()})
        return _box(first_leaf(tree))
    raise TypeError(
        f"env must have single_{kind}_space (a Gymnasium space of one env's {kind}), and "
        f"{type(env).__name__} has none: set it on the env before you wrap it"
    )


def _plain(obs: Tree | TensorDictBase) -> Tree:
    """A tensordict as a plain dict; other trees as they are."""
    if isinstance(obs, TensorDictBase):
        return {key: _plain(value) for key, value in obs.items()}
    return obs


def _space_like(space: object) -> spaces.Space[Any]:
    """The Gymnasium space that says what a foreign space object says (mjlab has its own classes)."""
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
