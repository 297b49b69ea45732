#!/usr/bin/env bash
# gymnasium-sudoku 0.3.5, Gymnasium 1.4.0, Python 3.11.
#
# reset(seed=...) seeds Python's and NumPy's global generators, and boards are drawn from them. So envs in one process are
# not independent: a reset of one changes the boards of another, and the program's own random numbers repeat.
#
# Output:
#     random numbers after each reset(seed=5) equal: True
#     second board, alone and with another env beside it, equal: False
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
"$venv/bin/pip" install -q gymnasium-sudoku==0.3.5 gymnasium==1.4.0
"$venv/bin/python" - <<'EOF'
import random

import gymnasium as gym
import gymnasium_sudoku  # registers its envs
import numpy as np


def second_board(beside):
    env, other = gym.make("sudoku-v0"), gym.make("sudoku-v0")
    env.reset(seed=5)
    drawn = random.random() if not beside else None
    if beside:
        other.reset(seed=6)
    return env.reset()[0].copy(), drawn


(alone, one), (again, two), (changed, _) = second_board(False), second_board(False), second_board(True)
print("random numbers after each reset(seed=5) equal:", one == two)
print("second board, alone and with another env beside it, equal:", np.array_equal(alone, changed))
assert one == two and np.array_equal(alone, again) and not np.array_equal(alone, changed)
EOF
