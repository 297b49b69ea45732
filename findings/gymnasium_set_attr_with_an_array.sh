#!/usr/bin/env bash
# Gymnasium 1.4.0: set_attr of a vector env deals a list or a tuple out, one value for each env. An array with one number for
# each env is not dealt out: every env gets the whole array.
#
# Input: two envs, the values 1 and 2.
#
# Seen:      list: [1, 2]
#            array: [[1, 2], [1, 2]]
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

envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1").unwrapped] * 2)
seen = []
for name, values in (("list", [1, 2]), ("array", np.array([1, 2]))):
    envs.set_attr("gravity", values)
    seen.append([np.asarray(value).tolist() for value in envs.get_attr("gravity")])
    print(f"{name}: {seen[-1]}")
raise SystemExit(seen != [[1, 2], [[1, 2], [1, 2]]])
PROGRAM
