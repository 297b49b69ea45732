#!/usr/bin/env bash
# SuperSuit 3.11.0, pettingzoo_env_to_vec_env_v1: infos of the step that ends a game.
#
# Input: a game of two steps. Each info says whether a step or a reset made it.
#
# Seen:      terminated: [1 1] infos of the last step: [('reset', True), ('reset', False)]
# Expected:  'step 2': entries of the reset that follows take the place of those of the last step.
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet SuperSuit==3.11.0 pettingzoo==1.27.0 gymnasium==1.4.0
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import gymnasium as gym
import numpy as np
import pettingzoo
import supersuit

class Game(pettingzoo.ParallelEnv):
    """Two agents; a game of two steps. Each info says when it was made."""
    metadata = {"name": "game"}
    render_mode = None
    possible_agents = agents = ["a", "b"]

    def observation_space(self, agent):
        return gym.spaces.Box(0, 1, (1,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def each(self, value):
        return {agent: value for agent in self.agents}

    def reset(self, seed=None, options=None):
        self.at = 0
        return self.each(np.zeros(1, np.float32)), {agent: {"made": "reset"} for agent in self.agents}

    def step(self, actions):
        self.at += 1
        infos = {agent: {"made": f"step {self.at}", "won": agent == "a"} for agent in self.agents}
        return self.each(np.ones(1, np.float32)), self.each(1.0), self.each(self.at == 2), self.each(False), infos

env = supersuit.pettingzoo_env_to_vec_env_v1(Game())
env.reset()
env.step(np.zeros(2, int))
_, _, terminated, _, infos = env.step(np.zeros(2, int))
print("terminated:", terminated, "infos of the last step:", [(info["made"], info["won"]) for info in infos])
raise SystemExit(not (terminated.all() and [info["made"] for info in infos] == ["reset", "reset"]))
PROGRAM
