#!/usr/bin/env bash
# Gymnasium 1.4.0, vector NormalizeReward: the return so far runs over the ends of episodes, and is dropped in the row
# that terminates, before that row counts.
#
# Input: one env, 1 reward a step, episodes of 3 steps, gamma = 1, AutoresetMode.NEXT_STEP; two episodes.
#
# Seen:      returns so far [1.0, 2.0, 1.0, 2.0, 3.0, 1.0] (right: [1.0, 2.0, 3.0, 1.0, 2.0, 3.0])
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gymnasium==1.4.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import gymnasium as gym, numpy as np
from gymnasium.wrappers.vector import NormalizeReward

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

envs = NormalizeReward(gym.vector.SyncVectorEnv([lambda: Counter(3)]), gamma=1.0)
envs.reset()
seen = []
for step in range(7):
    envs.step(np.zeros(1, int))
    if step != 3:  # that step only resets
        seen.append(float(envs.accumulated_reward[0]))
print("returns so far", seen)
raise SystemExit(seen != [1.0, 2.0, 1.0, 2.0, 3.0, 1.0])
PROGRAM
