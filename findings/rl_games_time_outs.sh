#!/usr/bin/env bash
# rl-games 1.6.5, PPO: returns of an episode that ends by a time limit.
#
# Input: two episodes of two steps, reward 0, gamma = tau = 1, the value of an observation is itself. The first episode,
# 10, 11 and at the end 12, ends by a time limit, so its rows are worth 12; the second terminates, 0.
#
# Seen:      returns: [11.0, 11.0, 0.0, 0.0]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 rl-games==1.6.5 gymnasium==1.4.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import gymnasium as gym
import torch
from rl_games.common import env_configurations, vecenv
from rl_games.common.ivecenv import IVecEnv
from rl_games.torch_runner import Runner
class Env(IVecEnv):
    steps = [(10.0, 0, False), (11.0, 1, True), (20.0, 0, False), (21.0, 1, False), (30.0, 0, False)]
    at = 0

    def reset(self):
        return torch.tensor([[self.steps[self.at][0]]])

    def step(self, actions):
        _, done, time_out = self.steps[self.at]
        self.at += 1
        return self.reset(), torch.zeros(1), torch.tensor([done]).byte(), {"time_outs": torch.tensor([time_out])}

    def get_env_info(self):
        return {"observation_space": gym.spaces.Box(0, 100, (1,)), "action_space": gym.spaces.Discrete(2)}
vecenv.register("env", lambda name, actors, **options: Env())
env_configurations.configurations["env"] = {"vecenv_type": "env", "env_creator": None}
mlp = {"units": [1], "activation": "relu", "initializer": {"name": "default"}}
network = {"name": "actor_critic", "separate": True, "space": {"discrete": None}, "mlp": mlp}
config = {"name": "env", "env_name": "env", "device": "cpu", "num_actors": 1, "horizon_length": 4, "minibatch_size": 4}
config |= {"gamma": 1.0, "tau": 1.0, "reward_shaper": {}, "normalize_advantage": False, "normalize_input": False}
config |= {"learning_rate": 0.0, "lr_schedule": None, "e_clip": 0.2, "clip_value": False, "entropy_coef": 0.0}
config |= {"mini_epochs": 1, "critic_coef": 1.0, "grad_norm": 1.0}
params = {"seed": 1, "algo": {"name": "a2c_discrete"}, "model": {"name": "discrete_a2c"}}
runner = Runner()
runner.load({"params": {**params, "network": network, "config": config}})
agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
for layer in (agent.model.a2c_network.critic_mlp[0], agent.model.a2c_network.value):  # the value is the observation
    layer.weight.data.fill_(1.0)
    layer.bias.data.zero_()
agent.set_eval()
agent.init_tensors()
agent.obs = agent.env_reset()
returns = agent.play_steps()["returns"].flatten().tolist()
print("returns:", returns)
raise SystemExit(returns != [11.0, 11.0, 0.0, 0.0])
PROGRAM
