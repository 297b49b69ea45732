#!/usr/bin/env bash
# Gymnasium 1.4.0: `==` of two Boxes allows for a relative difference of 1e-5 of the bounds, also where they are integers. So
# equal spaces do not contain the same numbers, and SyncVectorEnv takes envs with such spaces as envs of one kind.
#
# Input: Box(0, 10 ** 9) and Box(0, 10 ** 9 + 1000) of int64.
#
# Seen:      equal: True
#            upper bound of the second in both: [False, True]
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

high = 10**9 + 1000
boxes = gym.spaces.Box(0, 10**9, (1,), np.int64), gym.spaces.Box(0, high, (1,), np.int64)
seen = boxes[0] == boxes[1], [np.array([high]) in box for box in boxes]
print("equal:", seen[0])
print("upper bound of the second in both:", seen[1])
raise SystemExit(seen != (True, [False, True]))
PROGRAM
