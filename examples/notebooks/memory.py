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
# CartPole shows where cart and pole are and how fast they move. Hide the speeds, and one observation no longer says
# which way the pole falls: a policy has to remember the last ones. Here a GRU does.

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
    """Shows the positions of cart and pole, as shares of their limits."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.single_observation_space = gym.spaces.Box(-10, 10, (2,))
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, env.num_envs)

    def observations(self, observations: Any) -> Any:
        return observations[:, ::2] / np.array([2.4, 0.21], np.float32)


torch.set_num_threads(1)  # the networks are small: two threads would wait for each other
torch.manual_seed(0)
env: Any = RewardSum(Positions(as_vector_env(gym.make_vec("CartPole-v1", num_envs=32))))
env = gym.wrappers.vector.TransformReward(env, lambda reward: 0.1 * reward)  # values near 10, not 100

# %% [markdown]
# ## The agent
#
# Actor and critic share the GRU. Nothing says where its state is kept: the module has default names, and the
# collector asks for them, carries the state from step to step and resets it with each episode.

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
# `recurrent_state` is the state before each step. With `compact_obs=True` neither next observations nor next states are
# in the batch: inside a run, they stand in the row below.

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
# Training does not step through time once more. It runs the GRU over all runs at once, without padding, each from the
# state stored in its first row, and gets what the collector got.

# %%
with torch.no_grad(), set_recurrent_mode("recurrent"):
    now = actor.get_dist(batch.copy()).log_prob(batch["action"])
print(f"log-probabilities differ by {(now - batch['action_log_prob']).abs().max():.1e} at most")

# %% [markdown]
# ## Training
#
# `GAE` and the loss switch to runs by themselves. A slice is as long as one env's part of a batch, so each sample is a
# quarter of the batch's runs, long and short.

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
# A network of the same size without memory stays near 50. `python -m flatroll demo` trains on until 450, and with
# `--memoryless` shows the difference.

# %%
timeline_svg(batch[:512], color_by="advantage", title="512 rows of the last batch: longer episodes")

# %%
explain(batch, int(run_starts(batch).nonzero()[1]), final=collector.final)

# %%
collector.shutdown()
