#!/usr/bin/env bash
# ale-py 0.12.1, Gymnasium 1.4.0, Python 3.11.
#
# AtariVectorEnv writes its autoreset mode into `self.metadata`, which is the dict of the class gymnasium.vector.VectorEnv.
# So each new AtariVectorEnv changes the declared mode of all others, and of every vector env without metadata of its own.
# Its attribute `autoreset_mode` stays right. One would expect a dict for each env.
#
# Output:
#     mode of the first env, before and after another was made: SameStep -> NextStep
#     its attribute autoreset_mode: SameStep
#     VectorEnv.metadata: NextStep
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
"$venv/bin/pip" install -q ale-py==0.12.1 gymnasium==1.4.0
"$venv/bin/python" - <<'EOF'
import ale_py
from gymnasium.vector import AutoresetMode, VectorEnv

first = ale_py.AtariVectorEnv("pong", 1, autoreset_mode=AutoresetMode.SAME_STEP)
before = first.metadata["autoreset_mode"]
ale_py.AtariVectorEnv("pong", 1)
after = first.metadata["autoreset_mode"]
print("mode of the first env, before and after another was made:", before.value, "->", after.value)
print("its attribute autoreset_mode:", first.autoreset_mode.value)
print("VectorEnv.metadata:", VectorEnv.metadata["autoreset_mode"].value)
assert (before, after) == (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP)
assert first.autoreset_mode is AutoresetMode.SAME_STEP and first.metadata is VectorEnv.metadata
EOF
