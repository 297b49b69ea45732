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
# # Your first rollout
#
# Step eight CartPole envs together. `rollout` returns all steps as one batch: one row per step, the rows of an
# episode in order, no padding.

# %%
import gymnasium as gym
import torch

from flatroll.layout import audit, describe, explain, timeline_svg
from flatroll.rollouts import rollout
from flatroll.wrappers import StepCounter

env = StepCounter(gym.make_vec("CartPole-v1", num_envs=8))
batch = rollout(env, num_steps=50, seed=0)
describe(batch)

# %% [markdown]
# `rollout` got no policy, so it took random actions. A *run* is a stretch of consecutive rows of one episode. Hover
# over a run to see its rows, its steps and how it ends.

# %%
timeline_svg(batch)

# %% [markdown]
# The numbers on the left are row numbers. `explain` describes one row. A run that is *cut* continues in the next batch.
# The next value is 0 only where the env *terminated* the episode.

# %%
last = int(batch["next", "terminated"].squeeze(-1).nonzero()[0])
explain(batch, last)

# %% [markdown]
# A batch is a tensordict: read its columns by key, and index its rows as in a tensor. Markers are columns, too.

# %%
ids = batch["collector", "traj_ids"]
episode = ids == ids[last]  # bool [N]: the rows of its trajectory
print(batch["step_count"][episode].squeeze(-1).tolist())
print(batch["observation"][episode].shape, batch["next", "reward"][episode].sum().item())

# %% [markdown]
# `audit` checks all rows. It finds nothing in this batch, and an error in a changed copy.

# %%
assert audit(batch) == []
broken = batch.clone()
broken["next", "done"][last] = False
for finding in audit(broken):
    print(finding)

# %% [markdown]
# A policy is any module or function from observations `[E, 4]` to actions `[E]`. This one pushes the cart to the side
# to which the pole leans, so its episodes are longer.


# %%
def lean(observation: torch.Tensor) -> torch.Tensor:
    """Push right where the angle plus a fraction of its velocity is positive."""
    return (observation[:, 2] + 0.3 * observation[:, 3] > 0).long()


better = rollout(env, lean, num_steps=200, seed=0)
timeline_svg(better, color_by=("collector", "traj_ids"))

# %%
ends = [int(rows["next", "terminated"].sum()) for rows in (batch, better)]
print(f"random actions ended {ends[0]} episodes in {len(batch)} steps, leaning {ends[1]} in {len(better)}")
env.close()
