#!/usr/bin/env bash
# safetensors 0.8.0, NumPy 2.4.6, torch 2.13.0: safetensors.numpy saves a transposed array without an error, in the order of
# its memory, and loads it with the numbers in other places. safetensors.torch refuses a transposed tensor.
#
# Input: the transpose of [[0, 1, 2], [3, 4, 5]].
#
# Seen:      saved [[0, 3], [1, 4], [2, 5]], loaded [[0, 1], [2, 3], [4, 5]]
#            torch: ValueError
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

saved = np.arange(6).reshape(2, 3).T
loaded = safetensors.numpy.load(safetensors.numpy.save({"rows": saved}))["rows"]
print(f"saved {saved.tolist()}, loaded {loaded.tolist()}")
try:
    safetensors.torch.save({"rows": torch.from_numpy(saved)})
    refused = False
except ValueError:
    refused = True
    print("torch: ValueError")
raise SystemExit(not (refused and loaded.tolist() == [[0, 1], [2, 3], [4, 5]]))
PROGRAM
