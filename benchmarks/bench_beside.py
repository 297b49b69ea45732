"""Benchmarks readers beside writers: one thread samples a full buffer while another extends it.

Rows per second count the time within the calls. "Alone" is each call without the other thread.

``python -m flatroll bench beside``
"""

import itertools
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from benchmarks.measure.timing import table
from flatroll.buffers import LazyTensorStorage, RandomSampler, ReplayBuffer, SliceSampler

SLICES, LENGTH, ROWS = 32, 64, 256
OBS, ACT = 17, 6
EPISODE = 500
BATCH = 1024
SECONDS = 6.0


class Case(NamedTuple):
    """A buffer, its sampler, and how fast the writer writes (rows per second, None: as fast as it can)."""

    name: str
    frames: bool
    slices: bool
    capacity: int
    rate: float | None = None


CASES = (
    Case("state, 256 rows", frames=False, slices=False, capacity=100_000),
    Case("state, 32 x 64", frames=False, slices=True, capacity=100_000),
    Case("frames, 32 x 64", frames=True, slices=True, capacity=50_000),
    Case("frames, 32 x 64, writer at 50,000 rows/s", frames=True, slices=True, capacity=50_000, rate=50_000),
)


def batches(frames: bool, count: int) -> list[TensorDict]:
    """Return ``count`` consecutive batches of one env."""
    made = []
    pixels = torch.randint(256, (257, 84, 84), dtype=torch.uint8)
    state = torch.randn(EPISODE + 1, OBS)

    for number in range(count):
        row = torch.arange(number * BATCH, (number + 1) * BATCH)
        step = row % EPISODE
        now = state[step]
        later = state[step + 1]
        if frames:
            now = pixels[row % 257]
            later = pixels[(row + 1) % 257]

        done = (step == EPISODE - 1)[:, None]
        after = {"observation": later, "reward": torch.rand(BATCH, 1)}
        flags = {"done": done, "terminated": torch.zeros_like(done), "truncated": done.clone()}
        root = {"observation": now, "action": torch.rand(BATCH, ACT), "is_init": (step == 0)[:, None]}
        ids = {"traj_ids": row // EPISODE}
        made.append(TensorDict({**root, "next": {**after, **flags}, "collector": ids}, [BATCH]))

    return made


def filled(case: Case) -> tuple[ReplayBuffer, Callable[[], object]]:
    """Return a full buffer, and a call that extends it by the next batch."""
    sampler = RandomSampler()
    size = ROWS
    if case.slices:
        sampler = SliceSampler(slice_len=LENGTH)  # type: ignore[assignment]
        size = SLICES * LENGTH

    storage = LazyTensorStorage(case.capacity, compact_obs=case.frames)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=size)

    # The number of batches times their rows is a multiple of EPISODE and of 257, so ids and frames continue.
    few = batches(case.frames, 125 if not case.frames else 8)
    turns = itertools.cycle(few)
    rounds = itertools.count()

    def extend() -> object:
        batch = next(turns)
        # New ids for each batch that is written again: trajectories are cut where a batch ends.
        batch["collector", "traj_ids"] += 1_000 * (next(rounds) + 1)
        return buffer.extend(batch)

    while len(buffer) < case.capacity:
        extend()
    return buffer, extend


def repeat(call: Callable[[], object], until: Callable[[], bool], rest: float = 0.0) -> list[float]:
    """Call until ``until`` says so; return the seconds of each call. Each takes at least ``rest`` seconds."""
    seconds = []
    while not until():
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        seconds.append(took)
        if rest > took:
            time.sleep(rest - took)
    return seconds


def for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def beside(case: Case) -> list[str]:
    """Time each call alone and beside the other; return a row of the table."""
    buffer, extend = filled(case)
    size = buffer.batch_size or 1
    buffer.sample()
    rest = 0.0
    if case.rate is not None:
        rest = BATCH / case.rate

    read_alone = repeat(buffer.sample, for_seconds(SECONDS / 3))
    write_alone = repeat(extend, for_seconds(SECONDS / 3))

    stop = threading.Event()
    writes: list[list[float]] = []
    writer = threading.Thread(target=lambda: writes.append(repeat(extend, stop.is_set, rest)))
    writer.start()
    try:
        reads = repeat(buffer.sample, for_seconds(SECONDS))
    finally:
        stop.set()
        writer.join()

    return [
        case.name,
        rows_per_second(BATCH, write_alone),
        rows_per_second(BATCH, writes[0]),
        rows_per_second(size, read_alone),
        rows_per_second(size, reads),
        micros(statistics.median(reads)),
        micros(percentile(reads)),
        f"{percentile(reads) / statistics.median(reads):.1f}",
    ]


def rows_per_second(rows: int, seconds: list[float]) -> str:
    return f"{rows * len(seconds) / sum(seconds) / 1000:,.0f} k"


def percentile(seconds: list[float], share: float = 0.99) -> float:
    ordered = sorted(seconds)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def micros(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"


def main(*names: Any) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    header = [
        "rows/s",
        "extend alone",
        "extend beside",
        "sample alone",
        "sample beside",
        "its median, µs",
        "its p99, µs",
        "p99 / median",
    ]
    print(table(header, [beside(case) for case in CASES]))


if __name__ == "__main__":
    main()
