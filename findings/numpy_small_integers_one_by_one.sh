#!/usr/bin/env bash
# NumPy 2.4.6: four uint8 or int16 numbers in one call of Generator.integers are others than in four calls, with equal seeds.
# For int32, int64 and float32 they are the same.
#
# Input: the same seed, integers below 100, size=4 or four calls.
# So actions drawn for a vector of envs differ from those drawn env by env, if they are stored in a small type.
#
# Seen:      uint8: equal False
#            int16: equal False
#            int32: equal True
#            int64: equal True
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy as np

seen = {}
for name in ("uint8", "int16", "int32", "int64"):
    together = np.random.default_rng(0).integers(0, 100, size=4, dtype=name).tolist()
    rng = np.random.default_rng(0)
    alone = [int(rng.integers(0, 100, dtype=name)) for _ in range(4)]
    seen[name] = together == alone
    print(f"{name}: equal {seen[name]}")
raise SystemExit(list(seen.values()) != [False, False, True, True])
PROGRAM
