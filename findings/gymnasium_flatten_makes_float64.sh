#!/usr/bin/env bash
# Gymnasium 1.4.0: FlattenObservation of a Dict with a Discrete and a float32 Box gives float64, since the one-hot code of a
# Discrete has int64, which float32 cannot hold. So does a float32 Box beside an int32 Box; beside uint8, float32 stays.
#
# Input: Dict spaces of a float32 Box and one more space.
#
# Seen:      with Discrete(3): float64
#            with an int32 Box: float64
#            with a uint8 Box: float32
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
from gymnasium.spaces import Box, Dict, Discrete

others = {
    "Discrete(3)": Discrete(3),
    "an int32 Box": Box(0, 9, (1,), np.int32),
    "a uint8 Box": Box(0, 9, (1,), np.uint8),
}
seen = []
for name, other in others.items():
    space = Dict({"position": Box(-1, 1, (2,), np.float32), "other": other})
    seen.append(str(gym.spaces.flatten(space, space.sample()).dtype))
    print(f"with {name}: {seen[-1]}")
raise SystemExit(seen != ["float64", "float64", "float32"])
PROGRAM
