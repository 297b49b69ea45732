#!/usr/bin/env bash
# rsl-rl-lib 5.5.1, PPO: returns of an episode that ends by a time limit, and rows that minibatches leave out.
#
# Input: two episodes of two steps, reward 0, gamma = lambda = 1, the value of an observation is itself. The first episode,
# 10, 11 and at the end 12, ends by a time limit, so its rows are worth 12; the second terminates, 0.
#
# Seen:      returns: [11.0, 11.0, 0.0, 0.0]
#            rows drawn in 50 epochs of 3 minibatches: [10.0, 11.0, 20.0]    (of 10, 11, 20, 21)
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 rsl-rl-lib==5.5.1 tensordict==0.15.3 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict

def seen(value):
    return TensorDict({"policy": torch.tensor([[value]])}, batch_size=[1])

# Two episodes of two steps in one env, reward 0, a value function that returns its observation, gamma = lambda = 1. The
# observations are 10, 11 and, at the end, 12; then 20, 21, 22. The first episode ends by a time limit, so its steps are
# worth V(12) = 12 both; the second one terminates: 0.
groups = {"actor": ["policy"], "critic": ["policy"]}
gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
actor = MLPModel(seen(0.0), groups, "actor", 1, [1], "relu", distribution_cfg=gaussian)
critic = MLPModel(seen(0.0), groups, "critic", 1, [1], "relu")
for parameter in critic.parameters():
    parameter.data.fill_(float(parameter.dim() == 2))
agent = PPO(actor, critic, RolloutStorage("rl", 1, 4, seen(0.0), [1]), gamma=1.0, lam=1.0)
steps = [(10.0, False, False), (11.0, True, True), (20.0, False, False), (21.0, True, False)]
with torch.no_grad():
    for number, (observation, done, time_out) in enumerate(steps):
        agent.act(seen(observation))
        after = seen(steps[(number + 1) % 4][0])
        agent.process_env_step(after, torch.zeros(1), torch.tensor([done]), {"time_outs": torch.tensor([time_out])})
    agent.compute_returns(seen(30.0))
returns = agent.storage.returns.flatten().tolist()
print("returns:", returns)

# Of the same four rows, three minibatches draw three.
drawn = torch.cat([batch.observations["policy"] for batch in agent.storage.mini_batch_generator(3, 50)])
rows = sorted(set(drawn.flatten().tolist()))
print("rows drawn in 50 epochs of 3 minibatches:", rows)
raise SystemExit(not (returns == [11.0, 11.0, 0.0, 0.0] and rows == [10.0, 11.0, 20.0]))
PROGRAM
