#!/usr/bin/env bash
# Gymnasium 1.4.0: two Dict spaces can be `==` and flatten the same observation in different orders. A Dict space sorts the
# keys of a plain dict, keeps those of an OrderedDict or of keyword arguments, and `==` does not look at the order.
#
# Input: Dict({"b": ..., "a": ...}) and Dict(b=..., a=...), the observation {"a": 1, "b": 0}.
# A policy trained with one of them reads permuted inputs with the other, and the check of the spaces passes.
#
# Seen:      equal: True
#            plain dict: ['a', 'b'] [0, 1, 1, 0]
#            keywords: ['b', 'a'] [1, 0, 0, 1]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gymnasium==1.4.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import gymnasium as gym
from gymnasium.spaces import Dict, Discrete

plain, keywords = Dict({"b": Discrete(2), "a": Discrete(2)}), Dict(b=Discrete(2), a=Discrete(2))
seen = [plain == keywords]
print("equal:", seen[0])
for name, space in (("plain dict", plain), ("keywords", keywords)):
    seen.append((list(space), gym.spaces.flatten(space, {"a": 1, "b": 0}).tolist()))
    print(f"{name}:", *seen[-1])
raise SystemExit(seen != [True, (["a", "b"], [0, 1, 1, 0]), (["b", "a"], [1, 0, 0, 1])])
PROGRAM
