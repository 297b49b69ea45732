"""Times contenders in turns in one process, so that load from other programs hits all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one contender, one value per turn."""

    name: str
    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.turns)


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    turns: int = 7,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time contenders: one warm-up call each, then ``turns`` rounds of ``calls`` calls each.

    For work of one thread, the clock ``time.thread_time`` leaves out what other programs take of the core.
    """
    for run in contenders.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, run in contenders.items():
            start = clock()
            for _ in range(calls):
                run()
            seconds[name].append((clock() - start) / calls)
    return {name: Timing(name, tuple(turn)) for name, turn in seconds.items()}


def waited(run: Callable[[], object]) -> Callable[[], None]:
    """Wrap a call so that it waits for the GPU, if there is one, before it returns."""

    def whole() -> None:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return whole


def ratio(a: Timing, b: Timing) -> float:
    """The median over turns of a's time over b's."""
    return statistics.median(x / y for x, y in zip(a.turns, b.turns, strict=True))


def table(header: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
