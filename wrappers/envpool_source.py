"""The adapter for envpool in its synchronous mode."""

import warnings
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from typing_extensions import override

from flatroll.wrappers.arrays import Array, Tree, map_tree
from flatroll.wrappers.source import Capabilities, Info, Step, VectorSource


class EnvPoolSource(VectorSource):
    """Adapts envpool in sync mode, which returns new arrays at each step and autoresets in NEXT_STEP mode."""

    def __init__(self, env: Any) -> None:
        config: Any = getattr(env, "config", {})
        num_envs = int(config["num_envs"] if config else env.num_envs)
        batch = int((config and config.get("batch_size")) or num_envs)
        if batch != num_envs:
            raise ValueError(
                f"env must be an envpool in sync mode (batch_size == num_envs), got batch_size={batch} and "
                f"num_envs={num_envs}: an async pool returns other rows at every step. To overlap policy and envs step "
                "two sync pools in turn: Collector([pool_a, pool_b], ..., splits=2)"
            )
        with warnings.catch_warnings():
            # envpool makes its bounds from float64 numbers, and Gymnasium warns of the cast.
            warnings.filterwarnings("ignore", message=".*precision lowered by casting", category=UserWarning)
            # envpool's observation_space and action_space are the single ones.
            single = mend_bounds(env.observation_space), mend_bounds(env.action_space)
        capabilities = Capabilities(
            torch.device("cpu"),
            "numpy",
            fork_safe=False,
            both_flags=False,
            seedable=False,
            checks_range=False,
            exact_flags=True,
            overlaps=True,
        )
        super().__init__(env, num_envs, *single, capabilities)
        self._sent = False  # whether a step is under way
        self._shown: Tree = None  # the observations returned last, for the rows that a partial reset leaves

    @override
    def reset(self, seed: Any, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        if seed is not None:
            warnings.warn(
                "envpool takes its seed when it is made (envpool.make_gymnasium(..., seed=...)): "
                f"reset(seed={seed!r}) has no effect",
                stacklevel=4,
            )
        if options:
            raise ValueError(f"envpool takes no reset options but reset_mask, got {sorted(options)}")
        if self._sent:
            self.step(None)
        if rows is None:
            obs, info = self.env.reset()
            self._shown = _cast_discrete(obs, self.single_observation_space)
            return self._shown, info
        # envpool returns only the rows it reset, in order of their numbers.
        part, info = self.env.reset(options={"reset_mask": rows})
        part = _cast_discrete(part, self.single_observation_space)
        self._shown = map_tree(lambda whole, some: _scatter(some, rows, np.array(whole)), self._shown, part)
        whole: dict[str, Any] = {"env_id": np.arange(self.num_envs)}
        for key, value in info.items():
            if key != "env_id" and isinstance(value, np.ndarray) and value.shape[:1] == (int(rows.sum()),):
                whole[key] = _scatter(value, rows, np.zeros((self.num_envs, *value.shape[1:]), value.dtype))
                whole[f"_{key}"] = np.array(rows)  # Gymnasium's mask of the rows that have the entry
        return self._shown, whole

    @override
    def step(self, actions: Tree) -> Step:
        if not self._sent:
            self.send(actions)
        self._sent = False
        obs, reward, terminated, truncated, info = self.env.recv()
        # Kept without a copy: envpool's arrays are new at each step, and a partial reset copies before it writes.
        self._shown = obs = _cast_discrete(obs, self.single_observation_space)
        return obs, reward, terminated, truncated, info

    @override
    def send(self, actions: Tree) -> None:
        if not (isinstance(actions, np.ndarray) and actions.flags.c_contiguous):
            actions = map_tree(np.ascontiguousarray, actions)
        self.env.send(actions)
        self._sent = True

    @override
    def close(self) -> None:
        if self._sent:
            self.step(None)
        super().close()


def _scatter(some: Array, rows: Array, whole: Array) -> Array:
    """``whole`` ``[E, ...]`` with ``some`` ``[k, ...]`` written into the k rows where ``rows`` is True."""
    whole[rows] = some
    return whole


def _cast_discrete(obs: Tree, space: spaces.Space[Any]) -> Tree:
    """Discrete observations arrive as int32 where the space says int64."""
    if isinstance(space, spaces.Box):  # most often, so it is asked first
        return obs
    if isinstance(space, spaces.Dict):
        return {key: _cast_discrete(obs[key], child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_cast_discrete(obs[i], child) for i, child in enumerate(space.spaces))
    return obs.astype(space.dtype, copy=False) if isinstance(space, spaces.Discrete) else obs


def mend_bounds(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Replace bounds that envpool writes for "unbounded" Box spaces by infinite ones.

    Several envpool families declare ``low = finfo.tiny`` (the smallest *positive* number) and
    ``high = finfo.max`` where they mean no bound, so that no negative observation is inside.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: mend_bounds(child) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(tuple(mend_bounds(child) for child in space.spaces))
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    info = np.finfo(space.dtype)
    # The bounds were written as float32 even where the space is float64.
    tiny = np.isin(space.low, (info.tiny, np.finfo(np.float32).tiny))
    if not tiny.any():
        return space
    low = np.where(tiny, -np.inf, space.low).astype(space.dtype)
    huge = np.isin(space.high, (info.max, np.finfo(np.float32).max))
    high = np.where(huge, np.inf, space.high).astype(space.dtype)
    return spaces.Box(low, high, dtype=space.dtype.type)
