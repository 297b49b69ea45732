#!/usr/bin/env bash
# Stable-Baselines3 2.9.2, NStepReplayBuffer: learning that goes on from a saved buffer resets the envs; n-step sums of the
# rows before run on into the next episode, since nothing marks the row where the first run stopped.
#
# Input: DQN, n_steps=3, gamma=1, one env, 1 reward a step, episodes of 4 steps; 2 rows, then the buffer is saved and
# loaded by a new model, 4 rows.
#
# Seen:      3-step reward of the second row 3.0 (right: 1.0, its episode has no later row)
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 stable-baselines3==2.9.2 gymnasium==1.4.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import gymnasium as gym, numpy as np
from stable_baselines3 import DQN

class Counter(gym.Env):
    observation_space = gym.spaces.Box(-1, 99, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def __init__(self, length):
        self.length = length
    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.array([0], np.float32), {}
    def step(self, action):
        self.t += 1
        return np.array([self.t], np.float32), 1.0, self.t == self.length, False, {}

def model():
    return DQN("MlpPolicy", Counter(4), n_steps=3, gamma=1.0, learning_starts=1000, buffer_size=20, device="cpu")

first = model()
first.learn(2)
first.save_replay_buffer("buffer.pkl")
second = model()
second.load_replay_buffer("buffer.pkl")
second.learn(4, reset_num_timesteps=False)
sample = second.replay_buffer._get_samples(np.array([1]))
seen = float(sample.observations[0, 0]), float(sample.rewards[0, 0])
print("3-step reward of the second row", seen[1])
raise SystemExit(seen != (1.0, 3.0))
PROGRAM
