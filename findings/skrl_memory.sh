#!/usr/bin/env bash
# skrl 2.1.1, RandomMemory: sequences over the write head, passes, and loading.
#
# Input: rows 0, 1, 2 ... of one env in a memory of 10 rows; after 13 of them it holds 3 to 12.
#
# Seen:      sequences that join the newest row with the oldest: [[11, 12, 3], [12, 3, 4]]
#            rows of a pass in 4 minibatches: [0, 1, 2, 3, 4, 5, 6, 7]
#            loaded: len 0 all NaN: True
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 skrl==2.1.1 gymnasium==1.4.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import tempfile
from pathlib import Path
import torch
from skrl.memories.torch import RandomMemory

def filled(size, steps):
    memory = RandomMemory(memory_size=size, num_envs=1, device="cpu")
    memory.create_tensor(name="obs", size=1)
    for step in range(steps):
        memory.add_samples(obs=torch.tensor([[float(step)]]))
    return memory

def numbers(tensor):
    return [int(number) for number in tensor.flatten()]

# One episode of 13 steps in a memory of 10: the rows are 3, 4 ... 12, the newest lies before the oldest.
drawn = filled(10, 13).sample(["obs"], batch_size=100, sequence_length=3)[0][0].view(-1, 3)
joined = sorted(sequence for sequence in map(numbers, drawn) if sequence[2] != sequence[0] + 2)

# A pass over 10 rows in 4 minibatches.
passed = [number for batch in filled(10, 10).sample_all(["obs"], mini_batches=4) for number in numbers(batch[0])]

# A memory that is saved and loaded by another one.
loaded = filled(10, 0)
with tempfile.TemporaryDirectory() as folder:
    filled(10, 10).save(folder)
    loaded.load(str(next(Path(folder).rglob("*.pt"))))
after = loaded.sample_all(["obs"])[0][0]

print("sequences that join the newest row with the oldest:", joined)
print("rows of a pass in 4 minibatches:", passed)
print("loaded: len", len(loaded), "all NaN:", bool(after.isnan().all()))
as_seen = joined == [[11, 12, 3], [12, 3, 4]] and passed == list(range(8)) and after.isnan().all()
raise SystemExit(not as_seen)
PROGRAM
