#!/usr/bin/env bash
# tensordict 0.15.3: half() and to(torch.float16) of a tensordict convert integers and bools as well, other than those of
# torch.nn.Module, which convert floating-point numbers only. Row numbers above 2048 are rounded.
#
# Input: rewards, a done and the row number 2049.
#
# Seen:      tensordict: float16 float16 float16, row 2048
#            module: float16 bool int64, row 2049
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tensordict==0.15.3 torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import torch
from tensordict import TensorDict

columns = {"reward": torch.ones(1), "done": torch.ones(1, dtype=torch.bool), "row": torch.tensor([2049])}
module = torch.nn.Module()
for name, column in columns.items():
    module.register_buffer(name, column)

seen = []
for name, halved in (("tensordict", TensorDict(columns, [1]).half()), ("module", dict(module.half().named_buffers()))):
    types = [str(halved[key].dtype).removeprefix("torch.") for key in columns]
    seen.append((types, int(halved["row"])))
    print(f"{name}:", *types[:2], f"{types[2]}, row {seen[-1][1]}")
raise SystemExit(seen != [(["float16"] * 3, 2048), (["float16", "bool", "int64"], 2049)])
PROGRAM
