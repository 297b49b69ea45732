"""Tiny and huge windows, no room in /dev/shm, a REPL and a notebook; long: ``python tests/support/extremes.py``."""

import sys
from pathlib import Path

import pytest
from extremes import FOUND, large_windows, notebook, repl, tiny_windows, without_shared_folder

from flatroll.sharing import Nursery


def test_tiny_windows(nursery: Nursery) -> None:
    found = tiny_windows(nursery, 1000)
    assert found["wrong"] == 0 and abs(found["descriptors"]) <= 4


def test_large_windows(nursery: Nursery) -> None:
    found = large_windows(nursery, 20)
    assert found["wrong"] == 0 and found["MB"] >= 19


def test_what_was_typed_at_a_prompt_goes_to_workers() -> None:
    assert FOUND in repl()


def test_what_was_typed_in_a_notebook_goes_to_workers(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    assert FOUND in notebook(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts are Linux's")
def test_nothing_is_needed_in_dev_shm() -> None:
    found = without_shared_folder()
    if found is None:
        pytest.skip("nobody may mount a folder here")
    assert FOUND in found
