"""Measures a call's peak memory as the operating system counts it (Linux), all libraries included."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_peak(call: Callable[[], object]) -> float:
    """Return the MB by which the process grows at a call's peak; NaN if the system does not report it.

    Freed memory that the allocator keeps for later is given back before, so that nothing is served from it unseen.
    Call the function once before, so that one-time setup is not part of the peak.
    """
    try:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        _CLEAR.write_text("5")  # reset the peak
        before = _kilobytes("VmRSS")
    except OSError:
        return float("nan")
    call()
    return (_kilobytes("VmHWM") - before) / 1024


def _kilobytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])
