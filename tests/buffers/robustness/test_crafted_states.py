"""A state is data, never trusted: it is refused with a Python error, and then nothing has changed, or it works."""

import subprocess
import sys
from pathlib import Path


def test_damaged_states_are_refused_or_work() -> None:
    """In a process of its own: what is wrong here ends it, or never ends."""
    script = Path(__file__).parents[2] / "support" / "crafted_states.py"
    found = subprocess.run([sys.executable, str(script), "8"], capture_output=True, text=True, timeout=200)
    assert found.returncode == 0 and found.stdout.endswith("all right\n"), found.stderr[-3000:]
