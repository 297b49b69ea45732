#!/usr/bin/env bash
# zarr 3.1.6, h5py 3.16.0: an array that is cut to 2 rows and then grows again shows old rows instead of the fill value, as
# far as they lie in the chunk in which the cut fell. h5py gives the fill value.
#
# Input: 10 rows 0 to 9 in chunks of 4, fill value -1; cut to 2 rows, then grown to 10.
#
# Seen:      zarr [0, 1, 2, 3, -1, -1, -1, -1, -1, -1]
#            h5py [0, 1, -1, -1, -1, -1, -1, -1, -1, -1]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet zarr==3.1.6 h5py==3.16.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import h5py
import numpy as np
import zarr

def regrown(rows):
    rows[:] = np.arange(10)
    rows.resize((2,))
    rows.resize((10,))
    return rows[:].tolist()

seen = {"zarr": regrown(zarr.create_array("rows.zarr", shape=(10,), chunks=(4,), dtype="i4", fill_value=-1))}
with h5py.File("rows.h5", "w") as file:
    made = file.create_dataset("rows", shape=(10,), chunks=(4,), maxshape=(None,), dtype="i4", fillvalue=-1)
    seen["h5py"] = regrown(made)
for name, rows in seen.items():
    print(name, rows)
raise SystemExit(seen != {"zarr": [0, 1, 2, 3] + [-1] * 6, "h5py": [0, 1] + [-1] * 8})
PROGRAM
