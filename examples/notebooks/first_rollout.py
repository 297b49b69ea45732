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
# Eight CartPoles, stepped together. `rollout` returns what happened as one batch: a row for each step, the rows of
# each episode one below the other, no padding.

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
# `rollout` had no policy, so it took random actions. A *run* is a stretch of rows that belong together: an episode, or
# the part of one that the batch holds. Rest the pointer on a run: it tells its rows, its steps and how it ends.

# %%
timeline_svg(batch)

# %% [markdown]
# Numbers at the left are row numbers. What is the matter with one row? Ask it. A run that is *cut* goes on in the next
# batch; only where the env *terminated* the episode is the value of what comes after 0.

# %%
last = int(batch["next", "terminated"].squeeze(-1).nonzero()[0])
explain(batch, last)

# %% [markdown]
# A batch is a tensordict: it is read by key, and indexed by row like a tensor. Markers are columns, too.

# %%
ids = batch["collector", "traj_ids"]
episode = ids == ids[last]  # bool [N]: the rows of its trajectory
print(batch["step_count"][episode].squeeze(-1).tolist())
print(batch["observation"][episode].shape, batch["next", "reward"][episode].sum().item())

# %% [markdown]
# `audit` checks all rows against the layout's rules. Nothing is wrong here; and it finds what somebody breaks.

# %%
assert audit(batch) == []
broken = batch.clone()
broken["next", "done"][last] = False
for finding in audit(broken):
    print(finding)

# %% [markdown]
# With a policy: any module or function from observations `[E, 4]` to actions `[E]` will do. This one pushes the cart to
# where the pole leans, and its episodes are longer.


# %%
def lean(observation: torch.Tensor) -> torch.Tensor:
    """Right where the angle plus a little of its speed is positive."""
    return (observation[:, 2] + 0.3 * observation[:, 3] > 0).long()


better = rollout(env, lean, num_steps=200, seed=0)
timeline_svg(better, color_by=("collector", "traj_ids"))

# %%
ends = [int(rows["next", "terminated"].sum()) for rows in (batch, better)]
print(f"random actions ended {ends[0]} episodes in {len(batch)} steps, leaning {ends[1]} in {len(better)}")
env.close()
