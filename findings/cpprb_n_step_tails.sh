#!/usr/bin/env bash
# cpprb 11.0.0, n-step returns: the last rows of an episode.
#
# Input: one episode of 4 steps, 1 reward a step, gamma = 1, n = 3, next_obs of step t is 11 + t. Its documentation says
# that done of row t is 1 if any of the rows t to t + n - 1 is done. So row 1 must be done where the episode terminates, and
# a row of a truncated episode needs the next observation that its target bootstraps from: 14 in the rows 2 and 3.
#
# Seen:      terminated: rew  [3.0, 3.0, 2.0, 1.0]
#            terminated: done [0.0, 0.0, 1.0, 1.0]
#            truncated: next_obs [13.0, 14.0, 1.0, 1.0]
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

def stored(terminated):
    columns = {"obs": {}, "rew": {}, "next_obs": {}, "done": {}}
    buffer = ReplayBuffer(8, columns, Nstep={"size": 3, "gamma": 1.0, "rew": "rew", "next": "next_obs"})
    for step in range(4):
        done = float(terminated and step == 3)
        buffer.add(obs=10 + step, rew=1.0, next_obs=11 + step, done=done)
    buffer.on_episode_end()
    return {name: array[:, 0].tolist() for name, array in buffer.get_all_transitions().items()}

ended = stored(terminated=True)
cut = stored(terminated=False)
print("terminated: rew ", ended["rew"])
print("terminated: done", ended["done"])
print("truncated: next_obs", cut["next_obs"])
as_seen = ended["rew"] == [3, 3, 2, 1] and ended["done"] == [0, 0, 1, 1] and cut["next_obs"] == [13, 14, 1, 1]
raise SystemExit(not as_seen)
PROGRAM
