"""Sources around sources: one gives a NumPy env's arrays as tensors, one its floating observations in another dtype."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from flatroll.wrappers.arrays import ActionCheck, Array, Tree, map_tree, to_torch
from flatroll.wrappers.source import Capabilities, Info, Step, VectorSource


class SourceView(VectorSource):
    """Base of sources that show another source's env in another form."""

    def __init__(
        self, source: VectorSource, observation_space: spaces.Space[Any], capabilities: Capabilities
    ) -> None:
        self._source = source
        action_space = source.single_action_space
        super().__init__(source.env, source.num_envs, observation_space, action_space, capabilities)
        self.stepped = source.stepped

    @override
    def send(self, actions: Tree) -> None:
        self._source.send(actions)

    @override
    def close(self) -> None:
        self._source.close()


class TorchView(SourceView):
    """Adapts a NumPy env so that its arrays are returned as tensors on ``device``."""

    def __init__(self, source: VectorSource, device: torch.device | None) -> None:
        self._device = device or torch.device("cpu")
        space, native = source.single_action_space, source.capabilities
        self._check_actions = ActionCheck(
            space, source.num_envs, "numpy", check_range=not native.checks_range
        )
        capabilities = replace(native, framework="torch", device=self._device)
        super().__init__(source, source.single_observation_space, capabilities)

    @override
    def reset(self, seed: Any, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        mask = None if rows is None else rows.cpu().numpy()
        obs, info = self._source.reset(seed, options, mask)
        return self._tensors(obs), info

    @override
    def step(self, actions: Tree) -> Step:
        obs, reward, terminated, truncated, info = self._source.step(self._check_actions(actions))
        terminated, truncated = np.asarray(terminated), np.asarray(truncated)
        self._seen = obs, terminated | truncated  # in NumPy, as the source's final_obs wants them
        flags = (self._tensors(np.asarray(x)) for x in (reward, terminated, truncated))
        return self._tensors(obs), *flags, info

    @override
    def send(self, actions: Tree) -> None:
        self._source.send(self._check_actions(actions))

    @override
    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Any = None) -> Tree | None:
        shown, done = self._seen
        # Where no episode ended nobody reads them: any tree of the right shapes will do.
        needed = given is not None or done.any()
        final = self._source.final_obs(info, shown, done, given) if needed else shown
        return None if final is None else self._tensors(final)

    def _tensors(self, tree: Tree) -> Tree:
        return map_tree(lambda leaf: to_torch(leaf, self._device), tree)


class DtypeView(SourceView):
    """Adapts an env so that its floating observations have ``dtype``; all others stay as they are."""

    def __init__(self, source: VectorSource, dtype: torch.dtype) -> None:
        if dtype not in (torch.float16, torch.float32, torch.float64):
            raise ValueError(
                f"dtype must be torch.float16, torch.float32 or torch.float64 (of floating observations), got {dtype!r}"
            )
        self._dtype = dtype
        self._np_dtype = np.dtype(str(dtype).removeprefix("torch."))
        space = _cast_space(source.single_observation_space, self._np_dtype)
        super().__init__(source, space, source.capabilities)

    @override
    def reset(self, seed: Any, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        obs, info = self._source.reset(seed, options, rows)
        return map_tree(self._cast, obs), info

    @override
    def step(self, actions: Tree) -> Step:
        self._seen, reward, terminated, truncated, info = self._source.step(actions)
        return map_tree(self._cast, self._seen), reward, terminated, truncated, info

    @override
    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Any = None) -> Tree | None:
        # The source compares them with what it returned itself.
        final = self._source.final_obs(info, self._seen, ended, given)
        return None if final is None else map_tree(self._cast, final)

    def _cast(self, leaf: Array) -> Array:
        if isinstance(leaf, Tensor):
            return leaf.to(self._dtype) if leaf.is_floating_point() else leaf
        leaf = np.asarray(leaf)
        return leaf.astype(self._np_dtype, copy=False) if leaf.dtype.kind == "f" else leaf


def _cast_space(space: spaces.Space[Any], dtype: np.dtype[Any]) -> spaces.Space[Any]:
    """The space of the observations after the cast."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _cast_space(child, dtype) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(tuple(_cast_space(child, dtype) for child in space.spaces))
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f" or space.dtype == dtype:
        return space
    with np.errstate(over="ignore"):  # a bound beyond the dtype's range is none: infinite
        return spaces.Box(space.low.astype(dtype), space.high.astype(dtype), dtype=dtype.type)
