#!/usr/bin/env bash
# torch 2.13.0, NumPy 2.4.6, jax 0.10.2: all three sort nan to the end, but in the sorted numbers, torch.searchsorted puts a
# nan behind the nans that are there, numpy and jax put it before them. So `sorted[place]` is out of range with torch only.
#
# Input: the sorted numbers 1, 2, nan, nan; searched are nan and 3.
#
# Seen:      numpy [2, 2]
#            jax   [2, 2]
#            torch [4, 4]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 jax==0.10.2
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import jax.numpy as jnp
import numpy as np
import torch

numbers, wanted = [float("nan"), 1.0, float("nan"), 2.0], [float("nan"), 3.0]
seen = {
    "numpy": np.searchsorted(np.sort(numbers), wanted).tolist(),
    "jax": jnp.searchsorted(jnp.sort(jnp.array(numbers)), jnp.array(wanted)).tolist(),
    "torch": torch.searchsorted(torch.tensor(numbers).sort().values, torch.tensor(wanted)).tolist(),
}
for name, places in seen.items():
    print(f"{name:5s} {places}")
raise SystemExit(seen != {"numpy": [2, 2], "jax": [2, 2], "torch": [4, 4]})
PROGRAM
