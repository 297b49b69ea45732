"""What a part of the benchmark of workers found, against its budget, and how idle the machine was meanwhile."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch


@dataclass(frozen=True)
class Finding:
    """A measured number and its upper (or lower) bound; without a bound it is only shown for comparison."""

    what: str
    number: float
    unit: str = "x"
    most: float | None = None
    least: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """ "met", "missed", or nothing without a bound."""
        if self.most is None and self.least is None:
            return ""
        met = self.number <= self.most if self.most is not None else self.number >= (self.least or 0)
        return "met" if met else "**missed**"

    def cells(self) -> list[str]:
        """What, budget, measured, verdict, note."""
        bound = f"≤ {self.most:g} {self.unit}" if self.most is not None else ""
        bound = f"≥ {self.least:g} {self.unit}" if self.least is not None else bound
        digits = 0 if abs(self.number) >= 100 else 1 if abs(self.number) >= 10 else 2
        return [self.what, bound, f"{self.number:,.{digits}f} {self.unit}", self.verdict, self.note]


@dataclass
class Load:
    """How many cores this machine has, and how many of them others used, in the mean; processes that are waited for."""

    cores: int
    others: float = 0.0

    @staticmethod
    @contextmanager
    def measured() -> Iterator["Load"]:
        """Measure over a ``with`` block, in which all children of this process end."""
        load, began, before, ours = Load(psutil.cpu_count() or 1), time.perf_counter(), _busy(), _own()
        yield load
        load.others = max(0.0, (_busy() - before) - (_own() - ours)) / (time.perf_counter() - began)

    def text(self) -> str:
        """Such as "1.9 of 2"."""
        return f"{self.cores - self.others:.1f} of {self.cores}"


def _busy() -> float:
    """Seconds in which cores of the machine have worked."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own() -> float:
    """Seconds of the processor that this process and its ended children have taken."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def cpu_of(call: Callable[[Any], Any], things: list[Any], count: int) -> float:
    """Processor seconds of this thread for each call, over ``count`` calls with these things in turn."""
    start = time.thread_time()
    for i in range(count):
        call(things[i % len(things)])
    return (time.thread_time() - start) / count


def copy_all(tensors: list[torch.Tensor], places: list[torch.Tensor]) -> None:
    """Copy the bytes of these tensors, which is what shared memory costs at least."""
    for tensor, place in zip(tensors, places, strict=True):
        place.copy_(tensor)
