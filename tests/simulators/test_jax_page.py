"""The page about JAX simulators runs where they are: `make test` skips its blocks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_blocks_of_the_page() -> None:
    for name in ("brax", "gymnax", "jumanji", "navix"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/test_docs.py", "-k", "jax"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout
