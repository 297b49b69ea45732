"""A seed may be an integer of NumPy wherever a seed is taken, and gives the rows of Python's integer."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from flatroll.datasets import TrajectoryReplayBuffer
from flatroll.rollouts import Collector, GroupCollector, MultiCollector, bootstrap_mean, evaluate, rollout
from flatroll.wrappers import PettingZooSource, as_vector_env
from flatroll.wrappers.testing import ScriptedGame, check_vector_env

WHOLE = [np.int64, np.int32, np.uint8]


def cart_poles(kind: type[Any] = SyncVectorEnv) -> Any:
    return kind([lambda: gym.make("CartPole-v1")] * 2)


def collect(seed: Any) -> Any:
    collector = Collector(cart_poles(), frames_per_batch=8, total_frames=16, seed=seed)
    rows = next(iter(collector))
    assert collector.set_seed(seed) == seed + 2
    return torch.cat([rows["observation"], next(iter(collector))["observation"]])


def of_groups(seed: Any) -> Any:
    groups = PettingZooSource.groups(ScriptedGame(), {"a": ["a0"], "b": ["a1", "a2"]})
    return GroupCollector(groups, steps_per_batch=4, seed=seed).rollout()["b"]["action"]


def of_workers(seed: Any) -> Any:
    collector = MultiCollector(
        lambda: gym.make("CartPole-v1"),
        num_workers=1,
        sync=True,
        frames_per_batch=4,
        total_frames=4,
        seed=seed,
    )
    with collector:
        return next(iter(collector))["observation"]


def in_workers(seed: Any) -> Any:
    env = cart_poles(AsyncVectorEnv)
    try:
        return as_vector_env(env).reset(seed=seed)[0]
    finally:
        env.close()


USES: dict[str, Callable[[Any], Any]] = {
    "rollout": lambda seed: rollout(gym.make("CartPole-v1"), num_steps=5, seed=seed)["observation"],
    "evaluate": lambda seed: evaluate(cart_poles(), None, episodes=3, seed=seed).returns,
    "interval": lambda seed: bootstrap_mean(torch.arange(5.0), seed=seed),
    "collector": collect,
    "groups": of_groups,
    "workers": of_workers,
    "trajectories": lambda seed: TrajectoryReplayBuffer(seed=seed).seed,
    "reset": lambda seed: as_vector_env(cart_poles()).reset(seed=seed)[0],
    "reset of workers": in_workers,
    "reset of a list": lambda seed: as_vector_env(cart_poles()).reset(seed=[seed, None])[0][0],
    "reset of an array": lambda seed: as_vector_env(cart_poles()).reset(seed=np.array([seed, seed]))[0],
    "reset of a tuple": lambda seed: as_vector_env(cart_poles()).reset(seed=(seed, seed))[0],
    "check": lambda seed: check_vector_env(cart_poles(), steps=20, seed=seed),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_seed_of_numpy_is_python_s(use: Callable[[Any], Any]) -> None:
    right = use(3)
    for whole in WHOLE[:1] if use is of_workers else WHOLE:
        found = use(whole(3))
        assert np.array_equal(np.asarray(found), np.asarray(right))
