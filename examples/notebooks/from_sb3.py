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
# # From Stable-Baselines3
#
# This notebook has three parts: SB3's algorithm with flatroll's environments, SB3's names and flatroll's, and the same
# algorithm in your own loop. It needs `pip install "flatroll[sb3]"`.

# %% [markdown]
# ## 1. SB3's algorithm, any environment
#
# `FlatVecEnv` turns Gymnasium's vector envs, envpool and simulators that return torch tensors into a `VecEnv`. The rest
# of an SB3 program does not change.

# %%
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy

from flatroll.trainers.sb3 import FlatVecEnv

torch.set_num_threads(1)


def cartpoles(num_envs: int) -> gym.vector.VectorEnv:
    """Return CartPole envs that are stepped one after the other."""
    return gym.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")


settings: dict[str, Any] = {
    "n_steps": 64,
    "batch_size": 128,
    "n_epochs": 4,
    "learning_rate": 2e-3,
    "gae_lambda": 0.9,
}
model = PPO("MlpPolicy", FlatVecEnv(cartpoles(8)), seed=0, device="cpu", **settings)
model.learn(6144)
mean, deviation = evaluate_policy(model, FlatVecEnv(cartpoles(4)), n_eval_episodes=8)
print(f"SB3's PPO: return {mean:.0f} +- {deviation:.0f}")

# %% [markdown]
# When an episode ends, the step returns the first observation of the next episode, as with `DummyVecEnv`, and the true
# last observation in its info:

# %%
env = FlatVecEnv(cartpoles(2))
env.seed(0)
env.reset()
push = np.ones(2, np.int64)
observations, rewards, dones, infos = env.step(push)
while not dones.any():
    observations, rewards, dones, infos = env.step(push)
i = int(dones.argmax())
print("next episode begins at", np.asarray(observations)[i].round(2))
print("this one ended at     ", infos[i]["terminal_observation"].round(2), infos[i]["episode"]["l"], "steps")

# %% [markdown]
# ## 2. The same rows as a batch
#
# A batch has one row per step, with the observation and the next observation, so you do not need `infos`. The last
# row of an episode has its return.

# %%
from flatroll.layout import describe, timeline_svg
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import RewardSum

batch = rollout(RewardSum(cartpoles(8)), num_steps=64, seed=0)
describe(batch)

# %%
timeline_svg(batch, title="64 steps of 8 envs, random actions")

# %% [markdown]
# | SB3 | flatroll |
# |---|---|
# | `n_steps` of 8 envs | `frames_per_batch=8 * n_steps` |
# | `terminal_observation` | `batch["next", "observation"]` |
# | `TimeLimit.truncated` | `batch["next", "truncated"]` |
# | `infos[i]["episode"]["r"]` | `batch["next", "episode_reward"]`, where done |
# | `last_values` | not needed: GAE bootstraps where the batch cuts an episode |
#
# The complete table is in the documentation: "Coming from Stable-Baselines3".

# %% [markdown]
# ## 3. The algorithm in your own loop
#
# The settings are the same. `critic_coeff`, `loss_critic_type` and `normalize_advantage` are set to SB3's defaults.

# %%
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from flatroll.estimators import GAE, ClipPPOLoss

torch.manual_seed(0)


def network(outputs: int) -> nn.Sequential:
    """Two layers of 64, as in SB3's MlpPolicy."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


choose = ProbabilisticTensorDictModule(
    ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
)
act: list[Any] = [TensorDictModule(network(2), ["observation"], ["logits"]), choose]
actor = ProbabilisticTensorDictSequential(*act)
critic = TensorDictModule(network(1), ["observation"], ["state_value"])
gae = GAE(gamma=0.99, lmbda=0.9, value_network=critic)
loss = ClipPPOLoss(
    actor,
    critic,
    clip_epsilon=0.2,
    entropy_coeff=0.0,
    critic_coeff=0.5,
    loss_critic_type="l2",
    normalize_advantage=True,
)
optimizer = torch.optim.Adam(loss.parameters(), lr=2e-3, eps=1e-5)

collector = Collector(cartpoles(8), actor, frames_per_batch=512, total_frames=6144, seed=0)
for batch in collector:
    gae(batch)
    for _ in range(4):  # n_epochs
        for rows in torch.randperm(len(batch)).chunk(len(batch) // 128):  # batch_size
            losses = loss(batch[rows])
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)  # max_grad_norm
            optimizer.step()

# %% [markdown]
# Instead of `evaluate_policy`, call `rollout` with another env:

# %%
played = rollout(RewardSum(cartpoles(8)), actor, num_steps=500, seed=1, exploration_type="deterministic")
returns = played["next", "episode_reward"][played["next", "done"]]
print(f"our loop: return {returns.mean():.0f} +- {returns.std():.0f}")
