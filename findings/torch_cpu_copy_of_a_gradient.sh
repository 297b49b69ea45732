#!/usr/bin/env bash
# torch 2.13.0: on the CPU, a gradient that was kept as p.grad.cpu() changes with the next module.to(...), module.half() or
# module.double(): in dtype, and in value where the new dtype has fewer digits. p.grad.detach(), which shares the same
# memory, stays as it was.
#
# Input: a linear layer, its gradient kept in three ways after backward(); then module.half().
# A test that compares a CPU with a GPU, net.to("cuda") after grad.cpu(), compares the second gradient with itself.
#
# Seen:      grad.cpu()      torch.float16, 0.333251953125
#            grad.detach()   torch.float32, 0.3333333432674408
#            clone           torch.float32, 0.3333333432674408
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import torch

net = torch.nn.Linear(1, 1)
net(torch.full((1, 1), 1 / 3)).sum().backward()

kept = {
    "grad.cpu()": net.weight.grad.cpu(),
    "grad.detach()": net.weight.grad.detach(),
    "clone": net.weight.grad.cpu().clone(),
}
net.half()

seen = {name: (str(grad.dtype), grad.item()) for name, grad in kept.items()}
for name, what in seen.items():
    print(f"{name:15s} {what}")

expected = {
    "grad.cpu()": ("torch.float16", 0.333251953125),
    "grad.detach()": ("torch.float32", 0.3333333432674408),
    "clone": ("torch.float32", 0.3333333432674408),
}
raise SystemExit(seen != expected)
PROGRAM
