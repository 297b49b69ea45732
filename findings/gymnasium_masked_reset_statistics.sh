#!/usr/bin/env bash
# Gymnasium 1.4.0, vector RecordEpisodeStatistics: a reset by a mask wipes the statistics of the envs that run on.
# The inner env takes "reset_mask" out of the options, so the wrapper believes that all envs were reset.
#
# Input: two envs, 1 reward a step, episodes of 2 and 3 steps, AutoresetMode.DISABLED; the first is reset after step 2.
#
# Seen:      return and length of the second env after its third step 1.0 1 (right: 3.0 3)
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
from gymnasium.wrappers.vector import RecordEpisodeStatistics

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

makers = [lambda: Counter(2), lambda: Counter(3)]
envs = RecordEpisodeStatistics(gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.DISABLED))
envs.reset()
for _ in range(2):
    _, _, terminated, _, _ = envs.step(np.zeros(2, int))
envs.reset(options={"reset_mask": terminated})
info = envs.step(np.zeros(2, int))[4]
seen = float(info["episode"]["r"][1]), int(info["episode"]["l"][1])
print("return and length of the second env", *seen)
raise SystemExit(seen != (1.0, 1))
PROGRAM
