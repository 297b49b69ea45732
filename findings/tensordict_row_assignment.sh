#!/usr/bin/env bash
# tensordict 0.15.3: `rows[0] = row` takes a row with other keys. Columns that the row lacks keep the old row's values, so
# that the result is a mixture of two rows; a column that only the row has is made, with 0 in all other rows.
#
# Input: three rows of reward 1 and done True; one row of reward 5 and weight 7 is written to the first.
# torch.stack and torch.cat refuse such pairs.
#
# Seen:      reward [5.0, 1.0, 1.0], done [True, True, True], weight [7.0, 0.0, 0.0]
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

rows = TensorDict({"reward": torch.ones(3), "done": torch.ones(3, dtype=torch.bool)}, [3])
rows[0] = TensorDict({"reward": torch.tensor(5.0), "weight": torch.tensor(7.0)}, [])

seen = {name: column.tolist() for name, column in rows.items()}
print(", ".join(f"{name} {column}" for name, column in seen.items()))
expected = {"reward": [5.0, 1.0, 1.0], "done": [True, True, True], "weight": [7.0, 0.0, 0.0]}
raise SystemExit(seen != expected)
PROGRAM
