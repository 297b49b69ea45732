"""Tests with Ray itself: a cluster of three nodes on this machine, bounded in time."""

import faulthandler
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
SOURCE = Path(__file__).parents[2] / "src"


def pytest_collection_modifyitems(items):
    """Mark what stands in this folder, which hears of all tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ray)


@pytest.fixture(autouse=True)
def bounded():
    """End the process, with its traceback, if a test hangs."""
    faulthandler.dump_traceback_later(360, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def paths():
    """Let processes of Ray import flatroll and the helpers of tests."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", f"{SOURCE}:{SUPPORT}:{SUPPORT / 'clusters'}")
    yield
    patch.undo()
