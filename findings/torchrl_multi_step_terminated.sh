#!/usr/bin/env bash
# TorchRL 0.14.1, MultiStepTransform: rows whose sum reaches the end of the episode keep terminated=False of their own step,
# so an estimator that reads the sample bootstraps from the terminal observation. The docstring says that done entries
# are left untouched.
#
# Input: one episode of 3 rows with reward 1, terminated; n_steps=3, gamma=1; the value of every observation is 100.
#
# Seen:      targets of rows 0 and 1 [103.0, 102.0] (right: [3.0, 2.0])
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 tensordict==0.14.3 torchrl==0.14.1 gymnasium==1.4.0 numpy
cd "$folder"
cat > program.py <<'PROGRAM'
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import MultiStepTransform
from torchrl.objectives.value import TD0Estimator

steps = torch.arange(6.0)[:, None]
end = torch.tensor([False, False, True] * 2)[:, None]
after = {"observation": steps + 1, "reward": torch.ones(6, 1), "done": end, "terminated": end}
batch = TensorDict({"observation": steps, "next": after}, [6])
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6), transform=MultiStepTransform(n_steps=3, gamma=1.0))
buffer.extend(batch)
value = TensorDictModule(lambda x: 100 + 0 * x, in_keys=["observation"], out_keys=["state_value"])
rows = TD0Estimator(gamma=1.0, value_network=value)(buffer[:])
seen = rows["value_target"].flatten()[:2].tolist()
print("targets", seen)
raise SystemExit(seen != [103.0, 102.0])
PROGRAM
"$folder/venv/bin/python" program.py
