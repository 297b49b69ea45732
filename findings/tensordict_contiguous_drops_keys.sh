#!/usr/bin/env bash
# tensordict 0.15.3: of a lazy stack whose parts have different keys, contiguous() and to_tensordict() silently lose the keys
# that not all parts have. clone() keeps them, and to_dict() raises an error.
#
# Input: a lazy stack of two rows, one with a and b, one with a and c.
#
# Seen:      clone [['a', 'b'], ['a', 'c']]
#            contiguous [['a'], ['a']]
#            to_tensordict [['a'], ['a']]
#            to_dict RuntimeError
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
from tensordict import TensorDict, lazy_stack

rows = [TensorDict({"a": torch.ones(1), other: torch.ones(1)}, [1]) for other in "bc"]
stack = lazy_stack(rows)
seen = {}
for name in ("clone", "contiguous", "to_tensordict", "to_dict"):
    try:
        made = getattr(stack, name)()
        seen[name] = [sorted(part.keys()) for part in made.unbind(0)]
    except RuntimeError:
        seen[name] = "RuntimeError"
    print(name, seen[name])
kept, lost = [["a", "b"], ["a", "c"]], [["a"], ["a"]]
raise SystemExit(list(seen.values()) != [kept, lost, lost, "RuntimeError"])
PROGRAM
