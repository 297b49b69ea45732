"""Benchmarks a shared buffer: windows and samples through a handle, against one process and a queue of pickles.

``python -m flatroll bench handle``
"""

import multiprocessing
import pickle
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.measure.timing import table
from flatroll.buffers import BufferHandle, LazyTensorStorage, ReplayBuffer, SliceSampler

TURNS, SAMPLE = 9, 256
BATCHES = 8  # in turn: a window that was just collected is in no cache near the processor
SHAPES = {
    "4,096 rows of 56 B": (4096, 7, 40),
    "256 rows of 56 kB": (256, 14_000, 20),
}  # rows, floats, windows


def window(rows: int, floats: int) -> TensorDict:
    """A window of trajectories of 64 rows; ids and flags aside, ``floats`` numbers per row."""
    ends = torch.arange(1, rows + 1).remainder(64).eq(0)[:, None]
    ids = torch.arange(rows) // 64
    later = {"reward": torch.ones(rows, 1), "done": ends, "terminated": ends}
    columns = {"observation": torch.rand(rows, floats), "is_init": ends.roll(1, 0)}
    return TensorDict({**columns, "collector": {"traj_ids": ids}, "next": TensorDict(later, [rows])}, [rows])


def buffer_of(rows: int) -> ReplayBuffer:
    """A buffer with a trajectory index that is full after eight windows."""
    return ReplayBuffer(
        storage=LazyTensorStorage(8 * rows), sampler=SliceSampler(slice_len=16), batch_size=SAMPLE
    )


def work(pipe: Connection, handle: BufferHandle, batches: list[TensorDict]) -> None:
    """The other process: executes commands and answers with the processor time used."""
    torch.set_num_threads(1)
    while True:
        way, count = pipe.recv()
        start = time.process_time()
        for i in range(count):
            batch = batches[i % len(batches)]
            if way == "handle":
                handle.extend(batch)
            elif way == "queue":
                pipe.send_bytes(pickle.dumps(batch))
            elif way == "sample":
                handle.sample()
            else:
                len(handle)
        pipe.send(time.process_time() - start)


def timed(pipe: Connection, way: str, count: int, meanwhile: Callable[[], object]) -> tuple[float, float]:
    """Processor time per call here and there, in seconds."""
    start = time.process_time()
    pipe.send((way, count))
    meanwhile()
    there = pipe.recv()
    return (time.process_time() - start) / count, there / count


def measure(rows: int, floats: int, count: int) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of the two tables: what a window costs, and what a sample costs."""
    batches = [window(rows, floats) for _ in range(BATCHES)]
    local, shared, queued = buffer_of(rows), buffer_of(rows), buffer_of(rows)
    pipe, theirs = multiprocessing.get_context("fork").Pipe()
    arguments = theirs, shared.handle(), batches
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments, daemon=True)
    process.start()

    def take() -> None:
        for _ in range(count):
            queued.extend(pickle.loads(pipe.recv_bytes()))

    def alone(call: Callable[[TensorDict], Any]) -> tuple[float, float]:
        start = time.process_time()
        for i in range(count):
            call(batches[i % BATCHES])
        return (time.process_time() - start) / count, 0.0

    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "extend, one process": lambda: alone(local.extend),
        "extend, handle": lambda: timed(pipe, "handle", count, lambda: None),
        "extend, queue of pickled TensorDicts": lambda: timed(pipe, "queue", count, take),
        "sample, one process": lambda: alone(lambda _: local.sample()),
        "sample, handle": lambda: timed(pipe, "sample", count, lambda: None),
        "sample, no rows: len(handle)": lambda: timed(pipe, "len", count, lambda: None),
    }
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            found = way()
            if turn:  # the first one warms up
                turns[name].append(found)
    process.kill()
    process.join()

    def over(name: str, other: str, here: bool = False) -> float:
        """Median over turns of a way's time, of the owner alone or of both, over another's."""
        pairs = zip(turns[name], turns[other], strict=True)
        return statistics.median((a[0] if here else sum(a)) / sum(b) for a, b in pairs)

    tables: tuple[list[list[str]], list[list[str]]] = ([], [])
    for name, taken in turns.items():
        kind, _, label = name.partition(", ")
        here, there = (statistics.median(times) * 1e6 for times in zip(*taken, strict=True))
        other = "extend, queue of pickled TensorDicts" if kind == "extend" else "sample, one process"
        ratios = [over(name, f"{kind}, one process", here=True), over(name, other)]
        tables[kind == "sample"].append(
            [label, f"{here:,.0f}", f"{there:,.0f}", *(f"{r:.2f} x" for r in ratios)]
        )
    return tables


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    for title, shape in SHAPES.items():
        windows, samples = measure(*shape)
        print(f"**A window of {title} into a buffer with a trajectory index, processor time**\n")
        costs = ["owner, µs", "worker, µs", "owner over one process"]
        print(table(["way", *costs, "both over the queue"], windows) + "\n")
        print(f"**A sample of {SAMPLE} such rows in slices of 16, processor time**\n")
        print(table(["way", *costs, "both over one process"], samples) + "\n")


if __name__ == "__main__":
    main()
