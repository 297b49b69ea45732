# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Wrap your own env and check it
#
# This Gymnasium env has two common mistakes: it returns temperatures outside its observation space, and it uses NumPy's
# global random numbers, so a seed has no effect.

# %%
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from flatroll.layout import audit, timeline_svg
from flatroll.rollouts import Collector, MultiSyncCollector
from flatroll.wrappers import RewardSum, StepCounter
from flatroll.wrappers.testing import vector_env_problems


class Kettle(gym.Env[Any, Any]):
    """Heat water to 90 degrees and no further: the episode ends above 100, or after 40 steps."""

    observation_space: spaces.Space[Any] = spaces.Box(0, 100, (1,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.water, self.steps = self.begin(), 0
        return np.array([self.water], np.float32), {}

    def begin(self) -> float:
        """Return the initial temperature."""
        return np.random.uniform(10, 30)

    def step(self, action: Any) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self.water += 7 if action else -1
        self.steps += 1
        reward = 1 - abs(self.water - 90) / 90
        return np.array([self.water], np.float32), reward, self.water > 100, self.steps >= 40, {}


# %% [markdown]
# `vector_env_problems` steps the env with random actions and lists the problems that it finds.

# %%
for problem in vector_env_problems(gym.vector.SyncVectorEnv([Kettle] * 3)):
    print("-", problem)

# %% [markdown]
# It reports the first mistake. Some checks depend on others, so fix it and check again:


# %%
class WiderKettle(Kettle):
    """Has a space that contains its observations."""

    observation_space = spaces.Box(0, 110, (1,), np.float32)


print(vector_env_problems(gym.vector.SyncVectorEnv([WiderKettle] * 3)))


# %%
class GoodKettle(WiderKettle):
    """Uses its own random generator, which `reset(seed=...)` seeds."""

    def begin(self) -> float:
        return self.np_random.uniform(10, 30)


env = gym.vector.SyncVectorEnv([GoodKettle] * 3)
print(vector_env_problems(env))

# %% [markdown]
# Now wrap the env: step counts and returns become columns of every batch. `audit` checks the rows.

# %%
collector = Collector(RewardSum(StepCounter(env)), frames_per_batch=150, total_frames=300, seed=0)
batches = list(collector)
for batch in batches:
    assert audit(batch) == []
    ended = batch["next", "done"].squeeze(-1)
    print("returns:", [round(r, 1) for r in batch["next", "episode_reward"][ended].squeeze(-1).tolist()])

# %%
timeline_svg(batches[-1], color_by=("next", "reward"), title="Random heating: reward")

# %% [markdown]
# Slow envs can run in several processes. The function may be a lambda, and the env's class may be defined in this
# notebook. With a seed, the batches are the same in every run.

# %%
with MultiSyncCollector(
    lambda: gym.vector.SyncVectorEnv([GoodKettle] * 2),
    num_workers=2,
    frames_per_batch=100,
    total_frames=200,
    seed=0,
) as workers:
    for batch in workers:
        assert audit(batch) == []
        print("rows of each worker:", (batch["collector", "traj_ids"] >> 40).bincount().tolist())
