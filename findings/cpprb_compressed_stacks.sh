#!/usr/bin/env bash
# cpprb 11.0.0, next_of and stack_compress together: next observations in a ring that has wrapped.
#
# Input: episodes of 1 to 5 steps in a ring of 11 rows, stacks of three frames, on_episode_end() after each. The
# documentation says that both options can be used together. Each next observation is looked at after each step.
#
# Seen:      together: 8 wrong, the first: (81, [80, 81, 90], [80, 81, 82])    (row, next_obs, right)
#            each alone: 0 wrong
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

def stack(episode, step):
    """The last three frames, the first one repeated; a frame is one number, the last dimension the stack."""
    return [[10 * episode + max(at, 0) for at in range(step - 2, step + 1)]]

def wrong(**options):
    columns = {"obs": {"shape": (1, 3)}, "rew": {}}
    if "next_of" not in options:
        columns["next_obs"] = {"shape": (1, 3)}
    buffer = ReplayBuffer(11, columns, **options)
    found = []
    for episode, length in enumerate((3, 1, 4, 2, 1, 5, 3, 1, 4, 2, 1, 5)):
        for step in range(length):
            name = 10 * episode + step
            buffer.add(obs=stack(episode, step), next_obs=stack(episode, step + 1), rew=name)
            if step == length - 1:
                buffer.on_episode_end()
            rows = buffer.get_all_transitions()
            for row, (after,) in zip(rows["rew"][:, 0].astype(int), rows["next_obs"]):
                right = stack(int(row) // 10, int(row) % 10 + 1)[0]
                if after.tolist() != right:
                    found.append((int(row), after.astype(int).tolist(), right))
    return found

both = wrong(next_of="obs", stack_compress="obs")
alone = wrong(next_of="obs") + wrong(stack_compress=("obs", "next_obs"))
print("together:", len(both), "wrong, the first:", both[0] if both else None)
print("each alone:", len(alone), "wrong")
raise SystemExit(not (both and not alone))
PROGRAM
