#!/usr/bin/env bash
# skrl 2.1.1, PPO_RNN: the states that it stores for training are, from the second row on, those after the row.
#
# Input: one env without ends, a policy whose state counts the steps that it has seen. Before the rows it is 0, 1, 2, 3.
# (After the first step, the dicts of the initial and of the final states are one and the same object.)
#
# Seen:      stored states of the policy: [0.0, 2.0, 3.0, 4.0]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 skrl==2.1.1 gymnasium==1.4.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import gymnasium as gym, numpy as np, torch
from skrl.agents.torch.ppo import PPO_CFG, PPO_RNN
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer

class Ones(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.ones(1, np.float32), {}
    def step(self, action):
        return np.ones(1, np.float32), 1.0, False, False, {}

class Policy(CategoricalMixin, Model):
    outputs, mixin = 2, CategoricalMixin  # its state counts the steps that it has seen
    def __init__(self, env):
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device="cpu")
        self.mixin.__init__(self)
        self.net = torch.nn.Linear(1, self.outputs)
    def get_specification(self):
        return {"rnn": {"sequence_length": 1, "sizes": [(1, 1, 1)]}}
    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {"rnn": [inputs["rnn"][0] + 1]}

class Value(DeterministicMixin, Policy):
    outputs, mixin, __init__ = 1, DeterministicMixin, Policy.__init__

env = wrap_env(Ones(), wrapper="gymnasium", verbose=False)
cfg = PPO_CFG(rollouts=100)
cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
memory = RandomMemory(memory_size=4, device="cpu")
spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
agent = PPO_RNN(models={"policy": Policy(env), "value": Value(env)}, memory=memory, cfg=cfg, device="cpu", **spaces)
SequentialTrainer(env=env, agents=agent, cfg={"timesteps": 4, "disable_progressbar": True, "headless": True}).train()
states = memory.get_tensor_by_name("rnn_policy_0").flatten().tolist()
print("stored states of the policy:", states)
raise SystemExit(states != [0.0, 2.0, 3.0, 4.0])
PROGRAM
