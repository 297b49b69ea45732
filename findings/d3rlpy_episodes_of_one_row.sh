#!/usr/bin/env bash
# d3rlpy 2.8.1, collect(): an episode of one step is joined with the one after it (fit_online() writes in the same way).
#
# Input: an env with episodes of 2, 1, 2, 1 ... steps, all terminated; the observation is 10 * episode + step.
#
# Seen:      episodes of collect:    [[0, 1], [10, 20, 21], [30, 40, 41]] terminated: [True, True, True]
#            episodes of MDPDataset: [[0, 1], [10], [20, 21]]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 d3rlpy==2.8.1
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import gymnasium as gym
import numpy as np
import d3rlpy

class Env(gym.Env):
    """Episodes of 2, 1, 2 ... steps that terminate; the observation is 10 * episode + step."""
    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    episode = -1

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.at = 0
        return np.array([10 * self.episode], np.float32), {}

    def step(self, action):
        self.at += 1
        length = (2, 1)[self.episode % 2]
        return np.array([10 * self.episode + self.at], np.float32), 1.0, self.at == length, False, {}

env = Env()
buffer = d3rlpy.dataset.create_fifo_replay_buffer(limit=100, env=env)
d3rlpy.algos.DiscreteRandomPolicyConfig().create().collect(env, buffer, n_steps=8, show_progress=False)
collected = [episode.observations[:, 0].astype(int).tolist() for episode in buffer.episodes]
terminals = [bool(episode.terminated) for episode in buffer.episodes]

columns = np.array([[0], [1], [10], [20], [21]], np.float32)
ends = np.array([0, 1, 1, 0, 1], np.float32)
actions = np.zeros(5, np.int64)
dataset = d3rlpy.dataset.MDPDataset(columns, actions, np.ones(5, np.float32), ends)
logged = [episode.observations[:, 0].astype(int).tolist() for episode in dataset.episodes]
print("episodes of collect:   ", collected, "terminated:", terminals)
print("episodes of MDPDataset:", logged)
raise SystemExit(not (collected[:2] == [[0, 1], [10, 20, 21]] and logged == [[0, 1], [10], [20, 21]]))
PROGRAM
