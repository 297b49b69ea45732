#!/usr/bin/env bash
# ap-gym 0.7.1, Python 3.11.
#
# `pip install ap-gym` gives a package that cannot be imported: a module that it imports needs aiohttp, which is no
# requirement of it. With aiohttp installed, the import works.
#
# Output:
#     import ap_gym: No module named 'aiohttp'
#     with aiohttp: 176 environments
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
"$venv/bin/pip" install -q ap-gym==0.7.1 gymnasium==1.4.0
"$venv/bin/python" - <<'EOF'
import subprocess
import sys

import gymnasium as gym

try:
    import ap_gym  # noqa: F401

    raise SystemExit("ap_gym is imported without aiohttp now")
except ModuleNotFoundError as error:
    print("import ap_gym:", error)
    assert error.name == "aiohttp"

subprocess.run([sys.executable, "-m", "pip", "install", "-q", "aiohttp"], check=True)
count = "import gymnasium as gym; known = len(gym.registry); import ap_gym; print(len(gym.registry) - known)"
made = subprocess.run([sys.executable, "-c", count], check=True, capture_output=True, text=True)
print("with aiohttp:", made.stdout.split()[-1], "environments")
assert int(made.stdout.split()[-1]) > 0
EOF
