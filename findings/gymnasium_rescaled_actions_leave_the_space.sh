#!/usr/bin/env bash
# Gymnasium 1.4.0: RescaleAction to [-1, 1] gives the env actions outside of the env's space. The action 1 is a valid one, but
# its image, rounded to float32, lies above the env's bound.
#
# Input: an env with the bounds 0.1 and 0.3; the action 1.
#
# Seen:      0.30000004172325134, in the env's space: False
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gymnasium==1.4.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import gymnasium as gym
import numpy as np

class Env(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Box(0.1, 0.3, (1,))
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.action = action
        return np.zeros(1, np.float32), 0.0, False, False, {}

env = gym.wrappers.RescaleAction(Env(), np.float32(-1), np.float32(1))
env.reset()
one = np.ones(1, np.float32)
assert one in env.action_space
env.step(one)
got = env.unwrapped.action
print(f"{got[0]}, in the env's space: {got in Env.action_space}")
raise SystemExit(got in Env.action_space)
PROGRAM
