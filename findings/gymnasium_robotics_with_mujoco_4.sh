#!/usr/bin/env bash
# gymnasium-robotics 1.4.2, mujoco 4.0.0, Gymnasium 1.4.0, Python 3.11.
#
# `pip install gymnasium-robotics` brings mujoco 4.0.0, with which envs of its Fetch and kitchen families cannot be made: an
# assertion without a text compares a joint's type with mujoco's enums. With mujoco 3.3, they work. Adroit and the mazes
# work with both.
#
# Output:
#     FetchReach-v4: AssertionError
#     FrankaKitchen-v1: AssertionError
#     AdroitHandDoor-v1: made
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
"$venv/bin/pip" install -q gymnasium-robotics==1.4.2 mujoco==4.0.0 gymnasium==1.4.0
"$venv/bin/python" - <<'EOF'
import gymnasium as gym
import gymnasium_robotics  # registers its envs

outcomes = []
for name in ("FetchReach-v4", "FrankaKitchen-v1", "AdroitHandDoor-v1"):
    try:
        gym.make(name).reset(seed=0)
        outcomes.append("made")
    except AssertionError:
        outcomes.append("AssertionError")
    print(f"{name}: {outcomes[-1]}")
assert outcomes == ["AssertionError", "AssertionError", "made"]
EOF
