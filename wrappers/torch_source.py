"""The source for GPU simulators and other vector environments that speak torch (duck-typed).

Isaac Lab, mjlab, ManiSkill, Genesis and rsl_rl's `VecEnv` have no base class in common; what they share is
`num_envs`, tensors, and habits: reward and flag buffers that are written into again at every step, one `extras`
dict for all steps, autoreset in the same step, and sometimes a final observation that lingers in `extras`.
"""

import inspect
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.wrappers.arrays import Array, Tree, first_leaf, map_tree, to_torch
from flatroll.wrappers.sources import Capabilities, Step
from flatroll.wrappers.spaces import ActionCheck


class TorchSource:
    """A vector env that returns tensors: 5-tuples, or rsl_rl's 4-tuples with ``extras["time_outs"]``.

    Args:
        env: the env; ``num_envs``, ``reset`` and ``step`` are all it must have, and spaces or rsl_rl's
            ``get_observations`` and ``num_actions``.
        device: its device; None reads ``env.device``.
        own_buffers: ``"auto"`` and True copy what the env returns; False trusts it to be fresh.
    """

    def __init__(
        self, env: Any, mode: AutoresetMode, device: torch.device | None, own_buffers: bool | str
    ) -> None:
        self.env = env
        self.num_envs = int(env.num_envs)
        base = getattr(env, "unwrapped", env)
        self._device = torch.device(device if device is not None else getattr(base, "device", "cpu"))
        self._copies = bool(own_buffers)
        parameters = inspect.signature(env.reset).parameters
        anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._takes_seed = anything or "seed" in parameters
        self._takes_options = anything or "options" in parameters
        self._takes_ids = "env_ids" in parameters
        self._takes_idx = type(base).__module__.startswith("mani_skill")
        self.single_observation_space = self._space("observation")
        self.single_action_space = self._space("action")
        self.capabilities = Capabilities(
            self._device,
            "torch",
            hides_final_obs=mode is AutoresetMode.SAME_STEP,
            partial_reset=self._takes_ids or self._takes_idx,
            reuses_buffers=self._copies,
            seedable=self._takes_seed,
        )

    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Tree, dict[str, Any]]:
        arguments = self._seeding(seed)
        if options and self._takes_options:
            arguments["options"] = options
        result = self.env.reset(**arguments)
        obs, info = result if isinstance(result, tuple) else (result, {})
        return self._owned(obs), dict(info)

    def reset_rows(
        self, mask: Array, options: dict[str, Any] | None = None, seed: Any = None
    ) -> tuple[Tree, dict[str, Any]]:
        """Reset the masked rows. These envs take row numbers, so this reads the mask on the host."""
        ids = torch.as_tensor(mask, device=self._device).nonzero().squeeze(-1)
        if self._takes_idx:
            obs, info = self.env.reset(seed=seed, options={**(options or {}), "env_idx": ids})
        else:
            result = self.env.reset(env_ids=ids, **self._seeding(seed))
            obs, info = result if isinstance(result, tuple) else (result, {})
        return self._owned(obs), dict(info)

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
            if self._copies:
                terminated, truncated = terminated.clone(), truncated.clone()
        if self._copies:
            reward = reward.clone()
        return self._owned(obs), reward, terminated, truncated, dict(extras)

    def final_obs(self, info: dict[str, Any], obs: Tree, done: Array) -> Tree | None:
        """The final observations of this step: dense, or as mjlab's env_ids and rows, or None if hidden."""
        given = info.get("final_obs", info.get("final_observation"))
        if given is not None:
            return self._owned(given)
        ended = info.get("terminal")
        if not isinstance(ended, dict) or "env_ids" not in ended:
            return None
        ids = ended["env_ids"]
        return map_tree(lambda o, rows: o.index_copy(0, ids, rows), obs, plain(ended["observations"]))

    def dense(self, given: Any, obs: Tree, done: Array) -> Tree:
        return self._owned(given)

    def _seeding(self, seed: Any) -> dict[str, Any]:
        if seed is None or self._takes_seed:
            return {} if seed is None else {"seed": seed}
        warnings.warn(
            f"{type(self.env).__name__}.reset takes no seed: reset(seed={seed!r}) has no effect; seed the env "
            "when you make it",
            stacklevel=5,
        )
        return {}

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()

    def _owned(self, obs: Any) -> Tree:
        tree = plain(obs)
        return map_tree(Tensor.clone, tree) if self._copies else tree

    def _space(self, kind: str) -> spaces.Space[Any]:
        declared = getattr(self.env, f"single_{kind}_space", None)
        if declared is not None:
            return space_like(declared)
        if kind == "action" and hasattr(self.env, "num_actions"):
            return spaces.Box(-np.inf, np.inf, (int(self.env.num_actions),))
        if kind == "observation" and hasattr(self.env, "get_observations"):
            seen = self.env.get_observations()
            tree = plain(seen[0] if isinstance(seen, tuple) else seen)
            if isinstance(tree, dict):
                return spaces.Dict({key: _box(value) for key, value in tree.items()})
            return _box(first_leaf(tree))
        raise TypeError(
            f"env must have single_{kind}_space (a Gymnasium space of one env's {kind}), and "
            f"{type(self.env).__name__} has none: set it on the env before you wrap it"
        )


class TorchView:
    """A NumPy source seen as a torch one: the same env, its arrays as tensors on ``device``."""

    def __init__(self, source: Any, device: torch.device | None) -> None:
        self.source = source
        self.env = source.env
        self.num_envs = source.num_envs
        self.single_observation_space = source.single_observation_space
        self.single_action_space = source.single_action_space
        self._device = device or torch.device("cpu")
        in_range = source.capabilities.checks_range
        self._check_actions = ActionCheck(
            source.single_action_space, source.num_envs, "numpy", check_range=not in_range
        )
        self.capabilities = replace(source.capabilities, framework="torch", device=self._device)

    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Tree, dict[str, Any]]:
        obs, info = self.source.reset(seed, options)
        return self._tensors(obs), info

    def reset_rows(
        self, mask: Array, options: dict[str, Any] | None = None, seed: Any = None
    ) -> tuple[Tree, dict[str, Any]]:
        obs, info = self.source.reset_rows(mask.cpu().numpy(), options, seed)
        return self._tensors(obs), info

    def step(self, actions: Tree) -> Step:
        obs, reward, terminated, truncated, info = self.source.step(self._check_actions(actions))
        self._seen = obs, np.asarray(terminated) | np.asarray(truncated)
        reward, terminated, truncated = (
            self._tensors(np.asarray(x)) for x in (reward, terminated, truncated)
        )
        return self._tensors(obs), reward, terminated, truncated, info

    def final_obs(self, info: dict[str, Any], obs: Tree, done: Array) -> Tree | None:
        given = self.source.final_obs(info, *self._seen) if self._seen[1].any() else self._seen[0]
        return None if given is None else self._tensors(given)

    def dense(self, given: Any, obs: Tree, done: Array) -> Tree:
        return self._tensors(self.source.dense(given, *self._seen))

    def close(self) -> None:
        self.source.close()

    def _tensors(self, tree: Tree) -> Tree:
        return map_tree(lambda x: to_torch(x, self._device), tree)


def plain(obs: Any) -> Tree:
    """A tensordict as a plain dict; other trees as they are."""
    if isinstance(obs, TensorDictBase):
        return {key: plain(value) for key, value in obs.items()}
    return obs


def space_like(space: Any) -> spaces.Space[Any]:
    """The Gymnasium space that says what a foreign space object says (mjlab has its own classes)."""
    if isinstance(space, spaces.Space):
        return space
    if isinstance(getattr(space, "spaces", None), dict):
        return spaces.Dict({key: space_like(child) for key, child in space.spaces.items()})
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
