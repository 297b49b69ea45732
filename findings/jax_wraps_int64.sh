#!/usr/bin/env bash
# jax 0.10.2 without x64, torch 2.13.0, NumPy 2.4.6: int64 numbers from torch (through DLPack) or NumPy become int32 without
# a warning, and those above 2 ** 31 wrap around. One would expect an error, as for the Python number.
#
# Input: the int64 number 2 ** 31 + 5, e.g. the number of a row or of an episode.
#
# Seen:      from_dlpack(torch): -2147483643 int32, warnings: 0
#            asarray(numpy): -2147483643 int32, warnings: 0
#            asarray(Python's int): OverflowError
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 jax==0.10.2
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import warnings

import jax.numpy as jnp
import torch

number = 2**31 + 5
tensor = torch.tensor([number])
seen = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for name, array in (("from_dlpack(torch)", jnp.from_dlpack(tensor)), ("asarray(numpy)", jnp.asarray(tensor.numpy()))):
        seen.append((array.item(), str(array.dtype), len(caught)))
        print(f"{name}: {seen[-1][0]} {seen[-1][1]}, warnings: {seen[-1][2]}")
try:
    jnp.asarray(number)
    seen.append("made")
except OverflowError:
    seen.append("OverflowError")
print("asarray(Python's int):", seen[-1])
raise SystemExit(seen != [(5 - 2**31, "int32", 0)] * 2 + ["OverflowError"])
PROGRAM
