#!/usr/bin/env bash
# skrl 2.1.1, sequential trainer over Gymnasium's vector envs: what its memory and its statistics hold at ends.
#
# Input: two envs with episodes of two steps; the observation is 10 * episode + step, so an episode's last one is 12, 22 ...
#
# Seen:      NEXT_STEP (default): (observation, next) [[10, 11], [11, 12], [12, 20], ...] lengths [2, 3]
#            SAME_STEP:           (observation, next) [[10, 11], [11, 20], [20, 21], ...] lengths [2, 2, 2]
# Expected:  no row [12, 20], which is a reset, and no length of 3; in SAME_STEP [11, 12].
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
from skrl.agents.torch.dqn import DQN, DQN_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer
class Env(gym.Env):
    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    episode = 0  # each has two steps; the observation is 10 * episode + step
    def reset(self, *, seed=None, options=None):
        self.episode, self.at = self.episode + 1, 0
        return np.array([10 * self.episode], np.float32), {}
    def step(self, action):
        self.at += 1
        return np.array([10 * self.episode + self.at], np.float32), 1.0, self.at == 2, False, {}

class Network(DeterministicMixin, Model):
    def __init__(self, env):
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device="cpu")
        DeterministicMixin.__init__(self)
        self.net = torch.nn.Linear(1, 2)
    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {}

def rows(mode):
    env = wrap_env(gym.vector.SyncVectorEnv([Env, Env], autoreset_mode=mode), verbose=False)
    cfg = DQN_CFG(learning_starts=100, random_timesteps=100)
    cfg.experiment.checkpoint_interval, cfg.experiment.write_interval = 0, 1000
    memory = RandomMemory(memory_size=6, num_envs=2, device="cpu")
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    agent = DQN(models={"q_network": Network(env), "target_q_network": Network(env)}, memory=memory, cfg=cfg, device="cpu", **spaces)
    SequentialTrainer(env=env, agents=agent, cfg={"timesteps": 6, "disable_progressbar": True, "headless": True}).train()
    columns = [memory.get_tensor_by_name(name)[:, 0, 0].int() for name in ("observations", "next_observations")]
    return torch.stack(columns, 1).tolist(), [int(np.ravel(length)[0]) for length in agent._track_timesteps][::2]

seen = rows(gym.vector.AutoresetMode.NEXT_STEP), rows(gym.vector.AutoresetMode.SAME_STEP)
print("NEXT_STEP (default): (observation, next)", seen[0][0], "lengths", seen[0][1])
print("SAME_STEP:           (observation, next)", seen[1][0], "lengths", seen[1][1])
raise SystemExit(not ([12, 20] in seen[0][0] and seen[0][1] == [2, 3] and [11, 20] in seen[1][0]))
PROGRAM
