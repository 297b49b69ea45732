#!/usr/bin/env bash
# torch 2.13.0: share_memory_() of a tensor from torch.from_numpy ends the sharing with the array: the tensor moves to new
# memory, the array stays. Views that torch made before move along.
#
# Input: an array, its tensor, and a view of the tensor; share_memory_(), then a write through the tensor.
# So an env that goes on writing into its array is no longer seen by the processes that read the tensor.
#
# Seen:      before: array 1.0, view 1.0
#            after:  array 1.0, view 2.0
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

array = np.zeros(2)
tensor = torch.from_numpy(array)
view = tensor[:1]

tensor[0] = 1
before = array[0].item(), view[0].item()
tensor.share_memory_()
tensor[0] = 2
after = array[0].item(), view[0].item()

print(f"before: array {before[0]}, view {before[1]}")
print(f"after:  array {after[0]}, view {after[1]}")
raise SystemExit((before, after) != ((1.0, 1.0), (1.0, 2.0)))
PROGRAM
