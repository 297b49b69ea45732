"""Benchmarks a replay log: its bytes, what it costs a collector, and how long its rows take to be made again.

CartPole and ale-py's Pong with sticky actions in a SyncVectorEnv, whose envs can be stepped alone, and envpool's Pong,
whose envs cannot. Times of batches are processor times of all threads; contenders take turns batch by batch. Slices are
timed by the clock.

``python -m flatroll bench replay_log``; ``python -m benchmarks.bench_replay_log --rows 1000000`` for a whole run.
"""

import argparse
import importlib
import importlib.util
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.measure.timing import table
from flatroll.buffers import ReplayBuffer, SliceSampler
from flatroll.datasets import ReplayLog, ReplayLogStorage
from flatroll.rollouts import Collector

SLICE = 64


@dataclass(frozen=True)
class Task:
    """An env of which rows are logged.

    Attributes:
        name: in the tables.
        make: makes the vector env.
        by_function: whether the reader needs ``make``.
        num_envs: E.
        actions: number of actions.
        batch: rows of a batch.
        rows: of a short run.
        slices: how many are timed.
    """

    name: str
    make: Callable[[], Any]
    by_function: bool
    num_envs: int
    actions: int
    batch: int
    rows: int
    slices: int


@dataclass
class Measured:
    """What one run found.

    Attributes:
        rows: collected.
        size: bytes of the log.
        plain: processor seconds of each batch without the log.
        logged: processor seconds of each batch with it.
        again: processor seconds of collecting each batch without the log, in turns with ``made``.
        made: processor seconds of making each batch again.
        slices: seconds of each slice anywhere.
        samples: seconds of each sample of 4 slices of 16 rows of a buffer over the log; empty where envs cannot be
            stepped alone.
        bits: that differ, between rows with and without the log and rows made again.
    """

    rows: int = 0
    size: int = 0
    plain: list[float] = field(default_factory=list)
    logged: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    made: list[float] = field(default_factory=list)
    slices: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    bits: int = 0


def cartpole() -> Any:
    """Make CartPole, 64 envs."""
    return gym.make_vec("CartPole-v1", num_envs=64, vectorization_mode="sync")


def sticky_pong() -> Any:
    """Make ale-py's Pong, 8 envs, whose actions are repeated with a probability of 0.25."""
    gym.register_envs(importlib.import_module("ale_py"))
    return gym.make_vec("ALE/Pong-v5", num_envs=8, vectorization_mode="sync")


def pong() -> Any:
    """Make envpool's Pong, 8 envs."""
    import envpool

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return envpool.make_gymnasium("Pong-v5", num_envs=8, num_threads=1, seed=0)


#: Packages that tasks need besides Gymnasium's.
NEEDED = {"ale": "ale_py", "pong": "envpool"}

TASKS = {
    "cartpole": Task("CartPole x 64", cartpole, False, 64, 2, 4096, 65_536, 25),
    "ale": Task("sticky ALE Pong x 8", sticky_pong, False, 8, 6, 512, 20_480, 25),
    "pong": Task("envpool Pong x 8", pong, True, 8, 6, 512, 4_096, 3),
}


def random_actions(task: Task) -> Callable[[Any], Tensor]:
    """Return a policy whose actions are the same in each collector."""
    generator = torch.Generator().manual_seed(1)
    return lambda obs: torch.randint(task.actions, (task.num_envs,), generator=generator)


def collector_of(task: Task, rows: int, log: Path | None = None) -> Collector:
    """Return a collector of the task; all of them make the same rows."""
    seed = None if task.by_function else 0  # envpool takes its seed when it is made
    return Collector(
        task.make, random_actions(task), frames_per_batch=task.batch, total_frames=rows, seed=seed, log=log
    )


def timed(seconds: list[float], run: Callable[[], TensorDict]) -> TensorDict:
    """Return what ``run`` does, and note its processor time."""
    begun = time.process_time()
    result = run()
    seconds.append(time.process_time() - begun)
    return result


def differing_bits(rows: TensorDict, others: TensorDict) -> int:
    """Count the bits in which batches differ; all bits of columns that only one has."""
    count = 0
    for key in {*rows.keys(True, True), *others.keys(True, True)}:
        pair = [_bytes_of(batch.get(key, None)) for batch in (rows, others)]
        if pair[0].shape != pair[1].shape:
            count += 8 * max(part.size for part in pair)
        else:
            different = pair[0] ^ pair[1]
            count += int(np.unpackbits(different[different != 0]).sum())
    return count


def _bytes_of(column: Tensor | None) -> Any:
    if column is None:
        return np.zeros(0, np.uint8)
    return column.contiguous().reshape(-1).view(torch.uint8).numpy()


def collect(task: Task, rows: int, path: Path, found: Measured) -> None:
    """Collect with and without the log, in turns."""
    with collector_of(task, rows) as plain, collector_of(task, rows, path) as logged:
        batches: Iterator[TensorDict] = iter(plain)
        with_log: Iterator[TensorDict] = iter(logged)
        for turn in range(-(-rows // task.batch)):
            if turn % 2:
                first = timed(found.logged, lambda: next(with_log))
                second = timed(found.plain, lambda: next(batches))
            else:
                second = timed(found.plain, lambda: next(batches))
                first = timed(found.logged, lambda: next(with_log))
            found.bits += differing_bits(first, second)
            found.rows += len(first)


def make_again(task: Task, log: ReplayLog, found: Measured) -> None:
    """Make all rows again and collect them anew without a log, in turns."""
    with collector_of(task, len(log)) as plain:
        first = 0
        for batch in timed_batches(plain, found.again):
            end = first + len(batch)
            rows = timed(found.made, lambda first=first, end=end: log.rows(first, end))  # type: ignore[misc]
            found.bits += differing_bits(rows, batch)
            first = end


def timed_batches(collector: Collector, seconds: list[float]) -> Iterator[TensorDict]:
    """Yield a collector's batches, and note the processor time of each."""
    batches: Iterator[TensorDict] = iter(collector)
    while True:
        try:
            yield timed(seconds, lambda: next(batches))
        except StopIteration:
            return


def read_slices(task: Task, log: ReplayLog, found: Measured) -> None:
    """Read slices that begin anywhere, in random order."""
    draw = np.random.default_rng(0)
    for first in draw.integers(0, len(log) - SLICE, task.slices).tolist():
        begun = time.perf_counter()
        log.rows(first, first + SLICE)
        found.slices.append(time.perf_counter() - begun)


def sample(task: Task, log: ReplayLog, found: Measured) -> None:
    """Draw samples of a buffer over the log."""
    storage = ReplayLogStorage(log, cache_bytes=0)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=16), batch_size=SLICE)
    for _ in range(task.slices):
        begun = time.perf_counter()
        buffer.sample()
        found.samples.append(time.perf_counter() - begun)


def measure(task: Task, rows: int) -> Measured:
    """Log a run and read it."""
    found = Measured()
    with collector_of(task, task.batch) as collector:  # compiles
        next(iter(collector))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.replay"
        collect(task, rows, path, found)

        make = task.make if task.by_function else None
        with ReplayLog(path, create_env_fn=make) as log:
            found.size = log.stats()["bytes"]
            make_again(task, log, found)
            read_slices(task, log, found)
            if not task.by_function:
                sample(task, log, found)
    return found


def in_ms(seconds: list[float]) -> tuple[str, str]:
    """Return the median and the worst, in milliseconds."""
    if not seconds:
        return "-", "-"
    return f"{statistics.median(seconds) * 1e3:,.0f}", f"{max(seconds) * 1e3:,.0f}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, help="rows of each task; default 65,536, 20,480 and 4,096")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    costs: list[list[str]] = []
    reads: list[list[str]] = []
    for name in arguments.tasks:
        task = TASKS[name]
        package = NEEDED.get(name)
        if package is not None and not importlib.util.find_spec(package):
            print(f"({package} is not installed: no {task.name})")
            continue

        found = measure(task, arguments.rows or task.rows)
        micros = sum(found.plain) / found.rows * 1e6
        costs.append(
            [
                task.name,
                f"{found.rows:,}",
                f"{found.size / found.rows:.2f}",
                f"{micros:.1f}",
                f"{sum(found.logged) / sum(found.plain):.2f} x",
                f"{statistics.median(found.logged) / statistics.median(found.plain):.2f} x",
                f"{sum(found.made) / sum(found.again):.2f} x",
                f"{found.bits:,}",
            ]
        )
        reads.append([task.name, *in_ms(found.slices), *in_ms(found.samples)])

    header = ["env", "rows", "bytes a row", "collecting, µs a row", "with the log", "its median batch"]
    print(table([*header, "made again / collecting", "differing bits"], costs))
    print()
    names = [f"{SLICE} rows anywhere, ms", "worst", "sample of 4 slices of 16 rows, ms", "worst"]
    print(table(["env", *names], reads))


if __name__ == "__main__":
    main()
