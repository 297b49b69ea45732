#!/usr/bin/env bash
# panda-gym 3.0.7, Gymnasium 1.4.0, Python 3.11.
#
# reset() without a seed draws a new one from the system, instead of going on with the generator that reset(seed=...) made.
# So a seed fixes the first episode only: from the second on, two runs with equal seeds differ. The docstring of
# gymnasium.Env.reset says that the generator stays as it is where no seed is passed.
#
# Output (the numbers of the second episodes vary):
#     goals of the first episodes equal: True
#     goals of the second episodes equal: False
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
"$venv/bin/pip" install -q panda-gym==3.0.7 gymnasium==1.4.0
"$venv/bin/python" - <<'EOF'
import gymnasium as gym
import numpy as np
import panda_gym  # registers its envs


def goals():
    env = gym.make("PandaReach-v3")
    first = env.reset(seed=5)[0]["desired_goal"].copy()
    second = env.reset()[0]["desired_goal"].copy()
    env.close()
    return first, second


one, other = goals(), goals()
first, second = (np.array_equal(*pair) for pair in zip(one, other))
print("goals of the first episodes equal:", first)
print("goals of the second episodes equal:", second)
assert first and not second
EOF
