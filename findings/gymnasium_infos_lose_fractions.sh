#!/usr/bin/env bash
# Gymnasium 1.4.0, NumPy 2.4.6, Python 3.11.
#
# SyncVectorEnv makes the array of an info entry with the type of the first env's value. Where that is an int and another
# env's value is a float, the fraction is lost without a warning. With the envs in the other order, it is kept.
#
# Output:
#     infos 1 and 2.5: [1 2] int64
#     infos 2.5 and 1: [2.5 1. ] float64
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
"$venv/bin/pip" install -q gymnasium==1.4.0 numpy==2.4.6
"$venv/bin/python" - <<'EOF'
import gymnasium as gym
from gymnasium.vector import SyncVectorEnv


class Told(gym.Env):
    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, value):
        self.value = value

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {"value": self.value}


for values, expected in (((1, 2.5), [1, 2]), ((2.5, 1), [2.5, 1.0])):
    env = SyncVectorEnv([lambda value=value: Told(value) for value in values])
    column = env.reset()[1]["value"]
    print(f"infos {values[0]} and {values[1]}:", column, column.dtype)
    assert column.tolist() == expected
EOF
