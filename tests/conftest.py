"""What each test finds as the one before it did."""

import multiprocessing

import pytest


@pytest.fixture(autouse=True)
def start_method() -> None:
    """Processes start as Python starts them: torchrl, once imported, has them all spawned, with seconds of imports."""
    if multiprocessing.get_start_method(allow_none=True) is not None:
        multiprocessing.set_start_method(None, force=True)
