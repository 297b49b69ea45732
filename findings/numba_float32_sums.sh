#!/usr/bin/env bash
# numba 0.68.1, NumPy 2.4.6: np.sum and np.mean of a float32 array give other values in a compiled function. NumPy adds in
# pairs, numba one after the other in float32, so that the sum of ones stops at 2 ** 24.
#
# Input: 2 ** 25 float32 ones.
#
# Seen:      sum:  numpy 33554432.0, numba 16777216.0
#            mean: numpy 1.0, numba 0.5
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numba==0.68.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import numba
import numpy as np

@numba.njit
def compiled(values):
    return np.sum(values), np.mean(values)

ones = np.ones(2**25, np.float32)
plain = [float(np.sum(ones)), float(np.mean(ones))]
fast = [float(value) for value in compiled(ones)]
print(f"sum:  numpy {plain[0]}, numba {fast[0]}")
print(f"mean: numpy {plain[1]}, numba {fast[1]}")
raise SystemExit((plain, fast) != ([2.0**25, 1.0], [2.0**24, 0.5]))
PROGRAM
