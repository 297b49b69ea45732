"""Benchmarks the growth of the trajectory index: the longest call while a buffer is filled, and its bytes per row.

Each ``extend`` is followed by a ``sample`` of slices; the first call of each, which compiles, is not counted. Thread
time, so that other programs on the machine are left out.

``python -m flatroll bench growth``
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from tensordict import TensorDict

from benchmarks.measure.timing import table
from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler

BATCH = 1000
MILLION = 1_000_000
CAPACITY = 10 * MILLION
UP_TO = (1, 2, 5, 10, 12)


class Case(NamedTuple):
    name: str
    length: Callable[[int], int]


CASES = (
    Case("1 row", lambda row: 1),
    Case("10 rows", lambda row: 10),
    Case("1,000 rows", lambda row: 1000),
    Case("1,000 rows for 2 M rows, then 1 row", lambda row: 1000 if row < 2 * MILLION else 1),
)


def batch_of(row: int, length: int) -> TensorDict:
    n = torch.arange(row, row + BATCH)
    done = (n % length == length - 1)[:, None]
    ids = n // length + CAPACITY * 100 * length  # other ids for another length
    return TensorDict({"x": n.float(), "next": {"done": done}, "collector": {"traj_ids": ids}}, [BATCH])


def fill(case: Case) -> list[list[str]]:
    """Fill a buffer beyond its capacity; return a row of the table for each of ``UP_TO`` million rows."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=SliceSampler(slice_len=4), batch_size=64
    )
    buffer.extend(batch_of(0, case.length(0)))
    buffer.sample()

    rows = []
    written = BATCH
    for millions in UP_TO:
        longest = {"extend": 0.0, "sample": 0.0}
        while written < millions * MILLION:
            batch = batch_of(written, case.length(written))
            written += BATCH
            start = time.thread_time()
            buffer.extend(batch)
            middle = time.thread_time()
            buffer.sample()
            end = time.thread_time()
            longest["extend"] = max(longest["extend"], middle - start)
            longest["sample"] = max(longest["sample"], end - middle)

        index = buffer.index
        assert index is not None
        weights = sum(part.nbytes for pair in index._weights.values() for part in pair)
        rows.append(
            [
                case.name,
                f"{millions} M",
                f"{longest['extend'] * 1e3:.1f}",
                f"{longest['sample'] * 1e3:.1f}",
                f"{(index.nbytes - weights) / len(buffer):.1f}",
                f"{weights / len(buffer):.1f}",
            ]
        )
    return rows


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    header = ["episodes of", "rows written", "longest extend, ms", "longest sample, ms"]
    header += ["index, bytes/row", "weights, bytes/row"]
    print(f"A ring of {CAPACITY:,} rows, extended by {BATCH:,} rows at a time, slices of 4 rows\n")
    print(table(header, [row for case in CASES for row in fill(case)]))


if __name__ == "__main__":
    main()
