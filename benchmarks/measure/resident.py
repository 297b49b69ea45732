"""Measures memory as the operating system counts it (Linux), all libraries included."""

import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_peak(call: Callable[[], object]) -> float:
    """Return the MB by which the process grows at a call's peak; NaN if the system does not report it.

    Freed memory that the allocator keeps for later is given back before, so that nothing is served from it unseen.
    Call the function once before, so that one-time setup is not part of the peak.
    """
    try:
        _trim()
        _CLEAR.write_text("5")  # reset the peak
        before = _kilobytes("VmRSS")
    except OSError:
        return float("nan")
    call()
    return (_kilobytes("VmHWM") - before) / 1024


class Growth(NamedTuple):
    """By how many bytes a process grew; NaN if the system does not report it.

    Attributes:
        bytes: as the process stands, with freed memory that the allocator keeps for later allocations.
        trimmed: after the allocator returned the whole pages of freed memory: what is in use.
    """

    bytes: float
    trimmed: float


def resident_growth(call: Callable[[], T]) -> tuple[T, Growth]:
    """Return the result of a call, and by how much the process grew with it.

    Call the function once before with less data, so that one-time setup is not counted. Measure in a process of its
    own (`alone`): memory freed by earlier work would be used again and not counted.
    """
    try:
        _trim()
        before = _kilobytes("VmRSS")
    except OSError:
        return call(), Growth(float("nan"), float("nan"))

    result = call()

    gc.collect()
    standing = _kilobytes("VmRSS")
    _trim()
    trimmed = _kilobytes("VmRSS")
    return result, Growth(1024.0 * (standing - before), 1024.0 * (trimmed - before))


def alone(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of a module in a new process, and return its result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args, kwargs)


def _trim() -> None:
    """Free what is unreachable, and return the allocator's free pages to the system; OSError without glibc."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _kilobytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])
