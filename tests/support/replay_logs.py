"""Envs whose rows are logged, and comparisons of rows, for the tests of `ReplayLog`."""

from collections.abc import Callable
from inspect import isclass, isfunction
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict
from torch import Tensor

from flatroll.datasets import ReplayLog
from flatroll.rollouts import Collector

MODES = ("NextStep", "SameStep", "Disabled")


def vector(
    name: str = "CartPole-v1", mode: str = "NextStep", kind: Any = "sync", envs: int = 3, **arguments: Any
) -> Any:
    return gym.make_vec(
        name, num_envs=envs, vectorization_mode=kind, vector_kwargs={"autoreset_mode": mode}, **arguments
    )


def collect(path: Path, env: Any, batches: int = 6, rows: int = 50, **arguments: Any) -> TensorDict:
    """Collect with a log; return all rows."""
    arguments.setdefault("seed", 7)
    with Collector(
        env, frames_per_batch=rows, total_frames=rows * batches, log=path, **arguments
    ) as collector:
        rows_of_all: TensorDict = cat(list(collector))
    return rows_of_all


def cat(parts: Any) -> Any:
    """Join batches; tensordict's types do not know that torch does."""
    return torch.cat(parts)


def by_trajectory(batch: Any) -> Any:
    """The rows in order of trajectories, which come in the order in which they began."""
    ids = batch["collector", "traj_ids"].tolist()
    began = {number: place for place, number in reversed(list(enumerate(ids)))}
    return batch[torch.tensor(sorted(range(len(ids)), key=lambda row: (began[ids[row]], row)))]


def as_bytes(column: Tensor) -> bytes:
    raw: bytes = column.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def assert_equal(rows: TensorDict, expected: TensorDict, *, more: bool = False) -> None:
    """All columns are equal bit by bit, in dtype and shape; with ``more``, rows may have further columns."""
    keys = set(expected.keys(True, True))
    if more:
        assert keys <= set(rows.keys(True, True))
    else:
        assert keys == set(rows.keys(True, True))
    for key in keys:
        assert rows[key].dtype == expected[key].dtype, key
        assert rows[key].shape == expected[key].shape, key
        assert as_bytes(rows[key]) == as_bytes(expected[key]), key


def check_slices(log: ReplayLog, expected: TensorDict, count: int = 8, **how: bool) -> None:
    """Everything in one call, in pieces, and random slices, in any order."""
    assert len(log) == len(expected)
    assert_equal(log.rows(), expected, **how)
    third = len(log) // 3
    pieces = [log[:third], log[third : 2 * third], log[2 * third :]]
    assert_equal(cat(pieces), expected, **how)

    draw = np.random.default_rng(0)
    for first in draw.integers(0, len(expected), count).tolist():
        end = min(first + int(draw.integers(1, 70)), len(expected))
        assert_equal(log.rows(first, end), expected[first:end], **how)


def check_log(path: Path, env: Any, **arguments: Any) -> TensorDict:
    """Collect from an env, or a function that makes it; the log makes the same rows again. Return them."""
    arguments = {"batches": 4, "rows": 48, **arguments}
    rows = collect(path, env, **arguments)
    create_env_fn = env if isfunction(env) or isclass(env) else None
    with ReplayLog(path, create_env_fn=create_env_fn) as log:
        assert log.kept == 0
        check_slices(log, rows, 3)
    return rows


class Walk(gym.Env[Any, Any]):
    """Draws in resets and in steps; the observation is (episode's draw, draw of the step, step)."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = gym.spaces.Discrete(3, start=4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        self.start = self.np_random.random()
        self.length = int(self.np_random.integers(1, 9))
        return self.shown(0.0), {"start": self.start}

    def step(self, action: Any) -> Any:
        assert 4 <= action < 7
        self.t += 1
        return self.shown(action * self.draw()), float(action), self.t == self.length, False, {"t": self.t}

    def draw(self) -> float:
        return float(self.np_random.random())

    def shown(self, value: float) -> Any:
        return np.array([self.start, value, self.t])


class Ignored(Walk):
    """Ignores the seed."""

    def draw(self) -> float:
        return float(np.random.default_rng().random())


def many(
    kind: Callable[[], gym.Env[Any, Any]], mode: str = "NextStep", vectorizer: Any = SyncVectorEnv
) -> Any:
    def make() -> Any:
        return vectorizer([kind] * 3, autoreset_mode=mode)

    return make
