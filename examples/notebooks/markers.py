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
# # Markers in a plain loop
#
# The marker wrappers need no collector and no buffer. They are Gymnasium vector wrappers that only add entries to
# `info`, so they work with any vector env and any trainer.

# %%
import gymnasium as gym
import numpy as np

from flatroll.wrappers import InitTracker, RewardSum, StepCounter, TrajId

env = gym.make_vec("CartPole-v1", num_envs=4)
env = RewardSum(InitTracker(StepCounter(TrajId(env))))

obs, info = env.reset(seed=0)
print({name: info[name].tolist() for name in ("is_init", "step_count", "traj_ids", "episode_reward")})

# %% [markdown]
# `is_init`, `step_count` and `traj_ids` describe the returned observation, `episode_reward` the step just made. With
# them, a plain loop can log episodes without its own counters, in every autoreset mode.

# %%
rng = np.random.default_rng(0)
episodes = []
before = info
for _ in range(200):
    obs, reward, terminated, truncated, info = env.step(rng.integers(0, 2, size=4))
    for i in np.flatnonzero(np.logical_or(terminated, truncated)):
        length, total = before["step_count"][i] + 1, info["episode_reward"][i]
        episodes.append((int(before["traj_ids"][i]), int(length), float(total)))
    before = info

print(f"{len(episodes)} episodes")
for episode, length, total in episodes[:5]:
    print(f"episode {episode:2d}: {length:3d} steps, return {total:5.1f}")

# %% [markdown]
# CartPole's reward is 1 in every step, so return and length must be equal. The step in which the env only
# resets (Gymnasium's default mode has one after every episode) is not counted.

# %%
assert all(length == total for _, length, total in episodes)

# %% [markdown]
# To get tensors, call `rollout`: it returns the transitions as a flat batch, trajectory after trajectory. `timeline`
# shows where each trajectory begins and how it ends.

# %%
from flatroll.layout import timeline
from flatroll.rollouts import rollout

batch = rollout(gym.make_vec("CartPole-v1", num_envs=4), num_steps=60, seed=0)
print(batch.batch_size, "rows,", int(batch["next", "done"].sum()), "episodes ended")
axes = timeline(batch)

# %%
env.close()
