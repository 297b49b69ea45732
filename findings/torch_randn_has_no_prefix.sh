#!/usr/bin/env bash
# torch 2.13.0 on the CPU: with the same seed, torch.randn(15) and the first 15 numbers of torch.randn(16) have nothing in
# common: from 16 numbers on, the generator fills the tensor in another way. torch.rand has no such step.
#
# Input: one seed, 15 and 16 numbers.
# So one more env, or one more action dimension, can change the noise of all others.
#
# Seen:      randn: 0 of 15 numbers equal
#            rand: 15 of 15 numbers equal
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import torch

def drawn(draw, size):
    torch.manual_seed(0)
    return draw(size)[:15]

equal = {}
for draw in (torch.randn, torch.rand):
    equal[draw.__name__] = int((drawn(draw, 15) == drawn(draw, 16)).sum())
    print(f"{draw.__name__}: {equal[draw.__name__]} of 15 numbers equal")
raise SystemExit(equal != {"randn": 0, "rand": 15})
PROGRAM
