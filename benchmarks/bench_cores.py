"""Benchmarks large samples with one thread and with two, beside a copy, and what two threads would gain in a scan.

``python -m flatroll bench cores``

Times are wall time. torch's OpenMP threads spin for milliseconds after each torch operation that they share, and take
the core that a second thread of ours needs. Therefore this program runs itself with ``OMP_WAIT_POLICY=passive``, which
lets them sleep; the second table shows the difference.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_gae import GAMMA, LMBDA, RUN, Data, compiled
from benchmarks.bench_slices import filled
from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.buffers.columns.column import TensorColumn
from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.kernels import scan
from flatroll.kernels.rows.host_memory import host_memory
from flatroll.kernels.scan import machine_code
from flatroll.kernels.threads import run_blocks

POLICY = "OMP_WAIT_POLICY"
SLICE, STACKS = 64, 20_000

Run = Callable[[], object]


def on_threads(runs: Mapping[str, Run], turns: int, before: Run | None = None) -> list[str]:
    """Time calls with one thread of torch and with two: milliseconds of each, and the median ratio of a turn."""
    cells = []
    for run in runs.values():

        def call(threads: int, run: Run = run) -> object:
            torch.set_num_threads(threads)
            return run()

        if before is None:
            times = take_turns({"1": lambda: call(1), "2": lambda: call(2)}, turns)
        else:
            times = take_turns(
                {"rest": before, "1": lambda: call(1), "more": before, "2": lambda: call(2)}, turns
            )
        one, two = times["1"], times["2"]
        cells += [f"{1e3 * one.median:.2f}", f"{1e3 * two.median:.2f}", f"{ratio(two, one):.2f}"]
    return cells


def headings(first: list[str], names: list[str]) -> list[str]:
    """Name three columns for each call."""
    return first + [title for name in names for title in (f"{name}, 1 thread, ms", "2 threads", "2 / 1")]


def blocks(rows: int) -> list[int]:
    """Bounds of four blocks for each of torch's threads."""
    count = 4 * torch.get_num_threads()
    return [rows * block // count for block in range(count + 1)]


def scan_in_blocks(data: Data, touched: bool) -> Run:
    """Return a call of GAE's loop in blocks of whole runs, into new memory or into memory used before."""
    columns = data.reward, data.value, data.next_value, data.terminated, data.done
    arrays = [column.numpy().ravel() for column in columns]
    rows, ends = len(arrays[0]), arrays[-1]
    numbers = [np.full(1, number, np.float32) for number in (GAMMA, GAMMA * LMBDA)]
    factors = [np.ndarray(rows, np.float32, number, strides=(0,)) for number in numbers]
    used = [np.zeros(rows, np.float32) for _ in range(2)]
    by_rows = machine_code(scan._residual_loop)
    in_lanes = machine_code(scan._lane_loop)

    def block(every: list[Any], i: int, j: int) -> None:
        part = [array[i:j] for array in every]
        lasts = None
        if rows >= scan._LANE_ROWS:
            lasts = scan.find_lanes(part[-3])

        first, second, *columns = part
        given = tuple(columns[:5])
        results = columns[5:]
        if lasts is None:
            by_rows(first, second, given, *results)
        else:
            in_lanes(first[0], second[0], given, *results, lasts)

    def run() -> object:
        every = [*factors, *arrays, *(used if touched else [np.empty(rows, np.float32) for _ in range(2)])]
        cuts = [first + int(ends[first:].argmax()) + 1 for first in blocks(rows)[1:-1]]
        bounds = sorted({0, *cuts, rows}) if torch.get_num_threads() > 1 else [0, rows]
        return run_blocks(partial(block, every), bounds, torch.get_num_threads())

    return run


def scans(sizes: list[int], before: Run | None = None) -> str:
    """Time GAE's loop over numbers of rows, beside one pass over the same memory."""
    cells = []
    for rows in sizes:
        data = Data.of(rows, rows // RUN)
        arrays = [
            x.numpy().ravel() for x in (data.reward, data.value, data.next_value, data.terminated, data.done)
        ]

        def one_pass(arrays: list[Any] = arrays) -> object:
            every = [*arrays, *(np.empty(len(arrays[0]), np.float32) for _ in range(2))]
            bounds = blocks(len(arrays[0]))
            return run_blocks(
                lambda i, j: compiled(*[array[i:j] for array in every]), bounds, torch.get_num_threads()
            )

        runs = {"new": scan_in_blocks(data, False), "used": scan_in_blocks(data, True), "one pass": one_pass}
        cells.append([f"{rows:,}", *on_threads(runs, 7 if rows > 10**6 else 25, before)])
    return table(headings(["rows"], ["GAE's loop", "into used memory", "one pass"]), cells)


def copy_of(size: int) -> Run:
    """Return a call that copies ``size`` bytes to new memory, in blocks."""
    source = host_memory(size, torch.uint8, ()).fill_(1).numpy()

    def run() -> object:
        target = host_memory(size, torch.uint8, ()).numpy()

        def copy(first: int, stop: int) -> None:
            np.copyto(target[first:stop], source[first:stop])

        return run_blocks(copy, blocks(size), torch.get_num_threads())

    return run


def samples() -> str:
    """Time reading slices, single rows and stacks of images from a storage, beside a copy of as many bytes."""
    buffer, _ = filled(1_000_000)
    images = ReplayBuffer(storage=LazyTensorStorage(STACKS))
    pixels = torch.randint(256, (1000, 4, 84, 84), dtype=torch.uint8)
    for _ in range(0, STACKS, len(pixels)):
        images.extend(pixels)

    def slices(count: int) -> Tensor:
        return (torch.randint(999_000, (count, 1)) + torch.arange(SLICE)).flatten()

    cases: list[tuple[str, ReplayBuffer, Callable[[int], Tensor], list[int]]] = [
        (f"slices of {SLICE}", buffer, slices, [64, 256, 1024, 8192]),
        ("rows", buffer, lambda count: torch.randint(10**6, (count,)), [8192, 65_536, 524_288]),
        ("stacks", images, lambda count: torch.randint(STACKS, (count,)), [64, 256, 1024, 4096]),
    ]
    cells = []
    for (what, source, draw, _), count in [(case, count) for case in cases for count in case[-1]]:
        storage = source.storage
        assert isinstance(storage, ColumnStorage)
        drawn = itertools.cycle([draw(count) for _ in range(8)])
        size = sum(column.nbytes for column in storage.read_rows(draw(count)).values())
        columns = [column.data for column in storage.columns.values() if isinstance(column, TensorColumn)]

        def one_by_one(drawn: Iterator[Tensor] = drawn, columns: list[Tensor] = columns) -> object:
            slots = next(drawn)
            return [column.index_select(0, slots) for column in columns]

        runs: dict[str, Run] = {
            "read_rows": lambda s=storage, d=drawn: s.read_rows(next(d)),  # type: ignore[misc]
            "index_select": one_by_one,
            "copy": copy_of(size),
        }
        cells.append([f"{count:,} {what}", f"{size / 1e6:.1f}", *on_threads(runs, 7 if size > 5e7 else 15)])
    return table(headings(["rows read", "MB"], ["storage", "`index_select`", "a copy"]), cells)


def main() -> None:
    """Print the tables."""
    if os.environ.get(POLICY) is None:
        for policy in ("passive", "active"):
            subprocess.run(
                [sys.executable, "-m", "benchmarks.bench_cores"],
                env={**os.environ, POLICY: policy},
                check=True,
            )
        return
    torch.manual_seed(0)
    if os.environ[POLICY] == "passive":
        print("Samples\n")
        print(samples())
        print(
            f"\nGAE's loop in blocks, which the library does not do: runs of {RUN} rows on average, float32\n"
        )
        print(scans([10**k for k in range(3, 8)]), flush=True)
        return
    numbers = torch.randn(2_000_000)

    def shared_operation() -> object:
        torch.set_num_threads(2)
        return numbers.exp()

    print("\nEach call right after a torch operation on two threads, which then spin\n")
    print(scans([10**6, 10**7], shared_operation))


if __name__ == "__main__":
    main()
