#!/usr/bin/env bash
# datasets 5.2.0 (Hugging Face), NumPy 2.4.6: with the format "numpy", a column of numbers has its own type where one row is
# read, and float32 or int64 where several are. So a time in seconds loses its fraction in batches only.
#
# Input: a float64, a float16 and a uint8 column of two rows.
#
# Seen:      dataset[0]: float64 float16 uint8, time 1700000000.25
#            dataset[:]: float32 float32 int64, time 1700000000.0
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import datasets
from datasets import Dataset, Features, Value

rows = {"time": [1.7e9 + 0.25, 1.7e9 + 0.5], "half": [1.5, 2.5], "pixel": [200, 201]}
types = Features(time=Value("float64"), half=Value("float16"), pixel=Value("uint8"))
dataset = Dataset.from_dict(rows, features=types).with_format("numpy")

one, many = dataset[0], dataset[:]
seen = [str(one[name].dtype) for name in rows], float(one["time"])
batch = [str(many[name].dtype) for name in rows], float(many["time"][0])
print("dataset[0]:", *seen[0][:2], f"{seen[0][2]}, time {seen[1]}")
print("dataset[:]:", *batch[0][:2], f"{batch[0][2]}, time {batch[1]}")
expected = ["float64", "float16", "uint8"], 1700000000.25
raise SystemExit((seen, batch) != (expected, (["float32", "float32", "int64"], 1700000000.0)))
PROGRAM
