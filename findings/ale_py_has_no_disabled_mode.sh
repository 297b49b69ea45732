#!/usr/bin/env bash
# ale-py 0.12.1, Gymnasium 1.4.0, Python 3.11.
#
# AtariVectorEnv takes an AutoresetMode, and its reset() has `options={"reset_mask": ...}`, which Gymnasium's mode DISABLED
# needs. AutoresetMode.DISABLED is refused all the same. In the other two modes, reset_mask works.
#
# Output:
#     DISABLED: Invalid autoreset_mode: Disabled
#     episode frames after a reset of the second env alone: [28, 0]
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
"$venv/bin/pip" install -q ale-py==0.12.1 gymnasium==1.4.0
"$venv/bin/python" - <<'EOF'
import ale_py
import numpy as np
from gymnasium.vector import AutoresetMode

try:
    ale_py.AtariVectorEnv("pong", 2, autoreset_mode=AutoresetMode.DISABLED)
    raise SystemExit("DISABLED is accepted now")
except ValueError as error:
    print("DISABLED:", error)
    assert str(error) == "Invalid autoreset_mode: Disabled"

env = ale_py.AtariVectorEnv("pong", 2, noop_max=0, use_fire_reset=False)
env.reset(seed=0)
for _ in range(7):
    env.step(np.zeros(2, np.int64))
_, info = env.reset(options={"reset_mask": np.array([False, True])})
frames = info["episode_frame_number"].tolist()
print("episode frames after a reset of the second env alone:", frames)
assert frames[0] > frames[1]
EOF
