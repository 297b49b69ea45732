"""How processes are waited for."""

from multiprocessing.connection import wait as wait_for_any
from typing import Any


def wait_not_in_vain(things: Any, timeout: float | None = None) -> Any:
    """What stands for `multiprocessing.connection.wait` where nothing may wait until its limit is reached."""
    ready = wait_for_any(things, timeout)
    assert ready or timeout == 0, f"nothing came within {timeout} s"
    return ready
