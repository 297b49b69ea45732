#!/usr/bin/env bash
# ap-gym 0.7.1, Gymnasium 1.4.0, Python 3.11.
#
# `pip install ap-gym` gives a package that cannot be imported: it imports Pillow and aiohttp, which are no requirements of
# it. With both, the import registers 176 environments.
#
# Output:
#     No module named 'PIL'
#     No module named 'aiohttp'
#     176 environments
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
"$venv/bin/pip" install -q ap-gym==0.7.1 gymnasium==1.4.0
"$venv/bin/python" - <<'EOF'
import subprocess
import sys

COUNT = """
import gymnasium as gym
known = len(gym.registry)
try:
    import ap_gym
    print(len(gym.registry) - known, "environments")
except ModuleNotFoundError as error:
    print(error)
"""
outcomes = []
for packages in ([], ["pillow"], ["aiohttp"]):
    if packages:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *packages], check=True)
    made = subprocess.run([sys.executable, "-c", COUNT], check=True, capture_output=True, text=True)
    outcomes.append(made.stdout.strip().splitlines()[-1])
print(*outcomes, sep="\n")
assert outcomes == ["No module named 'PIL'", "No module named 'aiohttp'", "176 environments"]
EOF
