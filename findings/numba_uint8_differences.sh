#!/usr/bin/env bash
# numba 0.68.1, NumPy 2.4.6: in a compiled loop, the difference of two uint8 numbers is computed in uint64. A pixel that gets
# darker by 2 has the difference 1.8e19 where the result is stored as a float; NumPy's loop gives 254.
#
# Input: two frames of two pixels, 3 and 9, then 5 and 5.
#
# Seen:      numpy [254.0, 4.0]
#            numba [1.8446744073709552e+19, 4.0]
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

def differences(frame, before, out):
    for pixel in range(len(frame)):
        out[pixel] = frame[pixel] - before[pixel]

seen = []
for name, function in (("numpy", differences), ("numba", numba.njit(differences))):
    out = np.zeros(2)
    with np.errstate(over="ignore"):
        function(np.array([3, 9], np.uint8), np.array([5, 5], np.uint8), out)
    print(name, out.tolist())
    seen.append(out.tolist())
raise SystemExit(seen != [[254.0, 4.0], [float(2**64 - 2), 4.0]])
PROGRAM
