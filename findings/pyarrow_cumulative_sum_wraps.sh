#!/usr/bin/env bash
# pyarrow 26.0.1, NumPy 2.4.6: compute.sum of uint8 numbers is computed in uint64, compute.cumulative_sum stays in uint8 and
# wraps around without an error. Its last number is not the sum. In NumPy both use uint64.
#
# Input: four rewards of 100, stored as uint8.
#
# Seen:      pyarrow: sum 400, cumulative sum [100, 200, 44, 144]
#            numpy:   sum 400, cumulative sum [100, 200, 300, 400]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyarrow==26.0.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy as np
import pyarrow
import pyarrow.compute as pc

rewards = np.full(4, 100, np.uint8)
column = pyarrow.array(rewards)
arrow = pc.sum(column).as_py(), pc.cumulative_sum(column).to_pylist()
plain = int(rewards.sum()), rewards.cumsum().tolist()
print(f"pyarrow: sum {arrow[0]}, cumulative sum {arrow[1]}")
print(f"numpy:   sum {plain[0]}, cumulative sum {plain[1]}")
raise SystemExit((arrow, plain) != ((400, [100, 200, 44, 144]), (400, [100, 200, 300, 400])))
PROGRAM
