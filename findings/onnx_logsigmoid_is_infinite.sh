#!/usr/bin/env bash
# torch 2.13.0, onnxscript 0.7.2, onnxruntime 1.32.0: exported to ONNX, logsigmoid is the logarithm of a sigmoid, which is 0
# for a very negative number: the result is -inf instead of the number itself. softplus, which is the same with two signs,
# stays finite.
#
# Input: -200, through logsigmoid(x) and -softplus(-x). torch gives -200 for both.
#
# Seen:      logsigmoid: torch -200.0, onnxruntime -inf
#            softplus: torch -200.0, onnxruntime -200.0
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import onnxruntime
import torch
from torch.nn import functional as F

class Log(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
    def forward(self, x):
        return self.function(x)

x, seen = torch.tensor([-200.0]), []
for name, function in (("logsigmoid", F.logsigmoid), ("softplus", lambda x: -F.softplus(-x))):
    torch.onnx.export(Log(function), (x,), "log.onnx", input_names=["x"], dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession("log.onnx")
    seen.append((function(x).item(), session.run(None, {"x": x.numpy()})[0].item()))
    print(f"{name}: torch {seen[-1][0]}, onnxruntime {seen[-1][1]}")
raise SystemExit(seen != [(-200.0, -torch.inf), (-200.0, -200.0)])
PROGRAM
