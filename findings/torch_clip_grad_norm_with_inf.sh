#!/usr/bin/env bash
# torch 2.13.0: where one number of one gradient is infinite, clip_grad_norm_ sets all finite gradients of all parameters
# to 0, and the infinite one to nan. A step after it leaves the other parameters as they are, and nothing is nan there: the
# loss of an update goes unseen.
#
# Input: two parameters, gradients [1, inf] and [1, 1], max_norm 1.
#
# Seen:      gradients after it: [0.0, nan] [0.0, 0.0]
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

parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
parameters[0].grad = torch.tensor([1.0, float("inf")])
parameters[1].grad = torch.ones(2)
torch.nn.utils.clip_grad_norm_(parameters, 1.0)

first, second = (parameter.grad.tolist() for parameter in parameters)
print("gradients after it:", first, second)
raise SystemExit(not (str(first) == "[0.0, nan]" and second == [0.0, 0.0]))
PROGRAM
