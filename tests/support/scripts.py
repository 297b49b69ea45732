"""Runs a program of this folder in a process of its own: what is wrong there ends the process, or never ends."""

import os
import sys
from pathlib import Path

from interpreters import run

FOLDER = Path(__file__).parent


def run_script(name: str, *arguments: object, seconds: float = 200) -> None:
    """Run ``python tests/support/NAME.py ARGUMENTS``, which ends with the line "all right" if nothing was wrong."""
    done = run(
        [sys.executable, FOLDER / f"{name}.py", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(FOLDER)])},
        timeout=seconds,
    )
    right = done.returncode == 0 and done.stdout.endswith("all right\n")
    assert right, done.stdout[-3000:] + done.stderr[-3000:]
