#!/usr/bin/env bash
# NumPy 2.4.6: the float32 mean over the rows of [N, 2] adds one row after the other, without pairwise sums, so that it
# stops at 2 ** 24 rows. The mean over all, and torch's mean over the rows, are right.
#
# Input: 2 ** 25 rows of ones, which have the mean 1: the size of one large observation log, given to a normaliser.
#
# Seen:      numpy, mean(axis=0)   [0.5, 0.5]
#            numpy, mean()         1.0
#            torch, mean(0)        [1.0, 1.0]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy as np
import torch

rows = np.ones((2**25, 2), np.float32)
seen = rows.mean(axis=0).tolist(), float(rows.mean()), torch.from_numpy(rows).mean(0).tolist()
for name, mean in zip(("numpy, mean(axis=0)", "numpy, mean()", "torch, mean(0)"), seen):
    print(f"{name:21s} {mean}")
raise SystemExit(seen != ([0.5, 0.5], 1.0, [1.0, 1.0]))
PROGRAM
