#!/usr/bin/env bash
# TorchRL 0.14.1, VecNormV2 over a SerialEnv: when one env is reset, the first observation of the episode that the other one
# is in is counted again.
#
# Input: two envs whose observation counts steps, episodes of 2 and 8 steps, decay=1; 6 steps of each.
#
# Seen:      observations counted 18 (right: 16, 2 at the first reset, 12 after steps, 2 at the resets of the first env)
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 tensordict==0.14.3 torchrl==0.14.1 gymnasium==1.4.0 numpy
cd "$folder"
cat > program.py <<'PROGRAM'
import gymnasium as gym
import numpy as np
from torchrl.envs import GymWrapper, SerialEnv, TransformedEnv, VecNormV2


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


if __name__ == "__main__":
    norm = VecNormV2(in_keys=["observation"], out_keys=["normed"], decay=1.0, reduce_batch_dims=True)
    envs = SerialEnv(2, [lambda: GymWrapper(Counter(2)), lambda: GymWrapper(Counter(8))])
    env = TransformedEnv(envs, norm)
    env.rollout(6, break_when_any_done=False)
    counted = int(norm._count["observation"])
    print("observations counted", counted)
    raise SystemExit(counted != 18)
PROGRAM
"$folder/venv/bin/python" program.py
