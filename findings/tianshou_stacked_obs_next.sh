#!/usr/bin/env bash
# Tianshou 2.0.1: with stack_num the stacked next observation lacks the first observation of its episode, since it stacks
# next observations, and no row has the first one as its next.
#
# Input: one env whose observation counts the steps of its episode, stack_num=3; the first row of an episode.
#
# Seen:      obs [0.0, 0.0, 0.0] obs_next [1.0, 1.0, 1.0] (right: [0.0, 0.0, 1.0])
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 tianshou==2.0.1 gymnasium==1.4.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy as np
from tianshou.data import Batch, VectorReplayBuffer

buffer = VectorReplayBuffer(20, 1, stack_num=3)
for step in range(4):
    obs, later = np.array([[step]], float), np.array([[step + 1]], float)
    rest = {"act": np.zeros(1, int), "rew": np.ones(1), "truncated": np.zeros(1, bool), "info": Batch()}
    buffer.add(Batch(obs=obs, obs_next=later, terminated=np.array([step == 3]), **rest))
row = buffer[np.array([0])]
seen = row.obs[0, :, 0].tolist(), row.obs_next[0, :, 0].tolist()
print("obs", seen[0], "obs_next", seen[1])
raise SystemExit(seen != ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]))
PROGRAM
