#!/usr/bin/env bash
# cpprb 11.0.0, next_of: what save_transitions() and load_transitions() do with next observations at ends.
#
# Input: two episodes of 3 steps, observations 10, 11, 12 and at the end 13; then 20, 21, 22 and 23.
#
# Seen:      next_obs before:             [11, 12, 13, 21, 22, 23]
#            loaded, safe=True (default): [11, 12, 20, 21, 22, 23]
#            loaded, safe=False:          [11, 12, 13, 21, 22, 23]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet cpprb==11.0.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
from cpprb import ReplayBuffer

def filled():
    buffer = ReplayBuffer(8, {"obs": {}, "rew": {}}, next_of="obs")
    for episode in (10, 20):
        for step in range(3):
            buffer.add(obs=episode + step, next_obs=episode + step + 1, rew=1.0)
        buffer.on_episode_end()
    return buffer

def next_obs(buffer):
    return buffer.get_all_transitions()["next_obs"][:, 0].astype(int).tolist()

def loaded(safe):
    filled().save_transitions("rows.npz", safe=safe)
    buffer = ReplayBuffer(8, {"obs": {}, "rew": {}}, next_of="obs")
    buffer.load_transitions("rows.npz")
    return next_obs(buffer)

seen = next_obs(filled()), loaded(True), loaded(False)
print("next_obs before:            ", seen[0])
print("loaded, safe=True (default):", seen[1])
print("loaded, safe=False:         ", seen[2])
right = [11, 12, 13, 21, 22, 23]
raise SystemExit(not (seen[0] == seen[2] == right and seen[1] == [11, 12, 20, 21, 22, 23]))
PROGRAM
