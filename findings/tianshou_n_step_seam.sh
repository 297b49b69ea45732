#!/usr/bin/env bash
# Tianshou 2.0.1: a buffer that is saved within an episode and continued by a new collector, which resets the envs: n-step
# sums of the rows before run on into the next episode, since nothing marks the row where the first run stopped.
#
# Input: 3-step sums, gamma=1, values 0, one env, 1 reward a step, episodes of 4 steps; 2 rows, saved and loaded, 4 rows.
#
# Seen:      3-step return of the second row 3.0 (right: 1.0, its episode has no later row)
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 tianshou==2.0.1 gymnasium==1.4.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import gymnasium as gym, numpy as np, torch
from tianshou.algorithm.algorithm_base import Algorithm, Policy
from tianshou.data import Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv

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

class Zeros(Policy):
    def forward(self, batch, state=None, **kwargs):
        return Batch(act=np.zeros(len(batch.obs), int))

def collect(buffer, steps):
    policy = Zeros(action_space=Counter.action_space, observation_space=Counter.observation_space)
    collector = Collector(policy, DummyVectorEnv([lambda: Counter(4)]), buffer)
    collector.reset(reset_buffer=False)
    collector.collect(n_step=steps)

buffer = VectorReplayBuffer(20, 1)
collect(buffer, 2)
buffer.save_hdf5("buffer.hdf5")
buffer = VectorReplayBuffer.load_hdf5("buffer.hdf5")
collect(buffer, 4)
place = np.array([1])
zero = lambda buffer, places: torch.zeros(len(places))
batch = Algorithm.compute_nstep_return(buffer[place], buffer, place, zero, gamma=1.0, n_step=3)
print("3-step return of the second row", float(batch.returns[0]))
raise SystemExit(float(batch.returns[0]) != 3.0)
PROGRAM
