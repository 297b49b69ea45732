"""Batches for the tests of this folder."""

from collections.abc import Callable

import gymnasium as gym
import pytest
from tensordict import TensorDict

from flatroll.rollouts import rollout


@pytest.fixture
def make_rollout() -> Callable[..., TensorDict]:
    """A flat marked batch of CartPole."""

    def make(num_steps: int = 100, seed: int = 0, **options: object) -> TensorDict:
        return rollout(gym.make_vec("CartPole-v1", num_envs=2), num_steps=num_steps, seed=seed, **options)

    return make
