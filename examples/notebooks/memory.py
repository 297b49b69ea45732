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
# # A policy with a memory: recurrent PPO
#
# CartPole's observation contains the positions and velocities of cart and pole. If the velocities are hidden, one
# observation does not show which way the pole falls, so the policy needs memory. Here it is a GRU.

# %%
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictModule as Sampler
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.layout import describe, explain, run_starts, timeline_svg
from flatroll.modules import GRUModule, set_recurrent_mode
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum, as_vector_env


class Positions(gym.vector.VectorObservationWrapper):
    """Shows only the positions of cart and pole, relative to their limits."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.single_observation_space = gym.spaces.Box(-10, 10, (2,))
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, env.num_envs)

    def observations(self, observations: Any) -> Any:
        return observations[:, ::2] / np.array([2.4, 0.21], np.float32)


torch.set_num_threads(1)  # for small networks, multithreading only adds overhead
torch.manual_seed(0)
env: Any = RewardSum(Positions(as_vector_env(gym.make_vec("CartPole-v1", num_envs=32))))
env = gym.wrappers.vector.TransformReward(env, lambda reward: 0.1 * reward)  # values near 10, not 100

# %% [markdown]
# ## The agent
#
# Actor and critic share the GRU. You need not name its state: the module has default names, and the collector
# carries the state from step to step and resets it with each episode.

# %%
encoder = TensorDictModule(nn.Sequential(nn.Linear(2, 64), nn.Tanh()), ["observation"], ["embedding"])
gru = GRUModule(64, 64, in_key="embedding", out_key="features")
logits = TensorDictModule(nn.Linear(64, 2), ["features"], ["logits"])
choose = Sampler(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True)
value = TensorDictModule(nn.Linear(64, 1), ["features"], ["state_value"])

act: list[Any] = [encoder, gru, logits, choose]
judge: list[Any] = [encoder, gru, value]
actor, critic = ProbabilisticTensorDictSequential(*act), TensorDictSequential(*judge)
acting = actor.select_out_keys("action", "action_log_prob", ("next", "recurrent_state"))

# %% [markdown]
# ## A batch
#
# `recurrent_state` is the state before each step. With `compact_obs=True` the batch has neither next observations nor
# next states: inside a run, they are in the following row.

# %%
frames, steps = 32 * 64, 64
collector = Collector(
    env, acting, frames_per_batch=frames, total_frames=16 * frames, compact_obs=True, seed=0
)
batch = next(collector)
describe(batch)

# %%
timeline_svg(batch[:512], title="512 rows of the first batch: the pole falls soon")

# %% [markdown]
# Training does not step through time again. It runs the GRU over all runs at once, without padding, each from the
# state stored in its first row, and gets the same outputs as the collector.

# %%
with torch.no_grad(), set_recurrent_mode("recurrent"):
    now = actor.get_dist(batch.copy()).log_prob(batch["action"])
print(f"log-probabilities differ by {(now - batch['action_log_prob']).abs().max():.1e} at most")

# %% [markdown]
# ## Training
#
# `GAE` and the loss switch to recurrent mode automatically. The maximum slice length is the length of one env's part
# of a batch, so every slice is a complete run, and each sample has a quarter of the batch's runs.

# %%
gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, shifted=True)
loss = ClipPPOLoss(actor, value, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True)
weights = list(dict.fromkeys([*actor.parameters(), *critic.parameters()]))
optimizer = torch.optim.Adam(weights, lr=3e-3, eps=1e-5)
sampler = SliceSampler(slice_len=steps, fill=False)
buffer = ReplayBuffer(storage=LazyTensorStorage(frames), sampler=sampler)
returns: list[float] = []
curve: list[tuple[int, float]] = []

while True:
    gae(batch, final=collector.final)
    buffer.extend(batch)
    quarter = max(1, int(run_starts(batch).sum()) // 4)
    for _ in range(16):
        losses = loss(buffer.sample(steps * quarter))
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
        nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
    returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
    curve.append((collector.frames, float(np.mean(returns[-50:]))))
    if collector.frames == collector.total_frames:
        break
    batch = next(collector)

for seen, mean in curve[::5]:
    print(f"{seen:7,} steps: mean return of the last 50 episodes {mean:5.1f}")

# %% [markdown]
# A network of the same size without memory stays near 50. `python -m flatroll demo` trains until the mean return is
# 450; `--memoryless` trains the network without memory.

# %%
timeline_svg(batch[:512], color_by="advantage", title="512 rows of the last batch: longer episodes")

# %%
explain(batch, int(run_starts(batch).nonzero()[1]), final=collector.final)

# %%
collector.shutdown()
