#!/usr/bin/env bash
# Gymnasium 1.4.0: AsyncVectorEnv, which shares memory unless told otherwise, gives zeros ("00000") for each observation of a
# Text space. With shared_memory=False, and in SyncVectorEnv, the texts are right.
#
# Input: two envs whose observations are the text "abcde", in Text(5).
#
# Seen:      SyncVectorEnv: ('abcde', 'abcde')
#            AsyncVectorEnv, shared_memory=False: ('abcde', 'abcde')
#            AsyncVectorEnv: ('00000', '00000')
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
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

class Told(gym.Env):
    observation_space = gym.spaces.Text(5)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return "abcde", {}
    def step(self, action):
        return "abcde", 0.0, False, False, {}

seen = []
for name, made in (
    ("SyncVectorEnv", lambda: SyncVectorEnv([Told, Told])),
    ("AsyncVectorEnv, shared_memory=False", lambda: AsyncVectorEnv([Told, Told], shared_memory=False)),
    ("AsyncVectorEnv", lambda: AsyncVectorEnv([Told, Told])),
):
    envs = made()
    envs.reset()
    seen.append(tuple(envs.step([0, 0])[0]))
    print(f"{name}: {seen[-1]}")
    envs.close()
raise SystemExit(seen != [("abcde",) * 2, ("abcde",) * 2, ("00000",) * 2])
PROGRAM
