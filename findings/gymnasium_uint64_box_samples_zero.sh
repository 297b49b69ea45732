#!/usr/bin/env bash
# Gymnasium 1.4.0, NumPy 2.4.6: a Box of uint64 with the whole range of the type samples only zeros, without a warning. With
# a quarter of the range, it samples multiples of 512 only: the numbers are drawn as float64.
#
# Input: Box(0, 2 ** 64 - 1) and Box(0, 2 ** 62), 1,000 numbers of each.
#
# Seen:      whole range: 1 different numbers, largest 0
#            a quarter: 1000 different numbers, multiples of 512: True
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

def sampled(high):
    return gym.spaces.Box(0, high, (1000,), np.uint64, seed=0).sample()

whole, part = sampled(2**64 - 1), sampled(2**62)
seen = len(set(whole.tolist())), int(whole.max()), len(set(part.tolist())), bool((part % np.uint64(512) == 0).all())
print(f"whole range: {seen[0]} different numbers, largest {seen[1]}")
print(f"a quarter: {seen[2]} different numbers, multiples of 512: {seen[3]}")
raise SystemExit(seen != (1, 0, 1000, True))
PROGRAM
