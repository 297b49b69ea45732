#!/usr/bin/env bash
# skrl 2.1.1, PPO with its default configuration: the return of a row that ends by a time limit continues with the
# rewards of the next episode.
#
# Input: one env, 1 reward a step, truncated after 2 steps; gamma = lambda = 1, a value network that is 0 everywhere.
# Of a rollout of 4 steps (two episodes), every episode is worth 2 at its first and 1 at its last step.
#
# Seen:      time_limit_bootstrap=False (default) [4.0, 3.0, 2.0, 1.0]
#            time_limit_bootstrap=True            [2.0, 1.0, 2.0, 1.0]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 skrl==2.1.1 gymnasium==1.4.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import gymnasium as gym, torch
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer

class Ones(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}
    def step(self, action):
        return self.observation_space.high, 1.0, False, False, {}

class Policy(CategoricalMixin, Model):
    def __init__(self, env):
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device="cpu")
        CategoricalMixin.__init__(self)
        self.net = torch.nn.Linear(1, 2)
    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {}

class Zero(DeterministicMixin, Policy):
    def __init__(self, env):
        Policy.__init__(self, env)
        DeterministicMixin.__init__(self)
    def compute(self, inputs, role):
        return 0 * self.net(inputs["observations"])[:, :1], {}

def returns(**setting):
    env = wrap_env(gym.wrappers.TimeLimit(Ones(), 2), verbose=False)
    cfg = PPO_CFG(rollouts=4, discount_factor=1.0, gae_lambda=1.0, learning_epochs=1, mini_batches=1, **setting)
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    models = {"policy": Policy(env), "value": Zero(env)}
    memory = RandomMemory(memory_size=4, device="cpu")
    agent = PPO(models=models, memory=memory, cfg=cfg, device="cpu", **spaces)
    SequentialTrainer(env=env, agents=agent, cfg={"timesteps": 4, "disable_progressbar": True, "headless": True}).train()
    return agent.memory.get_tensor_by_name("returns").flatten().tolist()

seen = returns(), returns(time_limit_bootstrap=True)
print("default", seen[0], "time_limit_bootstrap=True", seen[1])
raise SystemExit(seen != ([4.0, 3.0, 2.0, 1.0], [2.0, 1.0, 2.0, 1.0]))
PROGRAM
