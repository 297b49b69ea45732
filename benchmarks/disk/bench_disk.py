"""Times saves and loads of buffers beside torchrl's: ``python -m benchmarks.disk.bench_disk``.

Every number is a ratio of wall times in one run: medians over turns, each of which does everything once. Saves are
flushed to disk; loads go into new buffers, as in a resumed run. torchrl is left out if it is not installed, or with
``--alone``.
"""

import argparse
import importlib.util
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.measure.timing import table
from flatroll.buffers import H5StorageCheckpointer, LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.disk import files

EPISODE = 200
#: Of each line: the largest ratio that is good.
BUDGETS = {
    "full save / torchrl dumps + sync": 1.5,
    "save after 1 % new / full save, time": 1 / 8,
    "save after 1 % new / full save, bytes": 0.015,
    "load / torchrl loads": 1.5,
    "lock held by a save / extending what came": 2.0,
    "H5 save / native save": 4.0,
    "H5 load / native load": 4.0,
}


def batch(first: int, count: int) -> TensorDict:
    """Rows of 74 bytes: episodes of 200 steps."""
    row = torch.arange(first, first + count)
    observation = (row[:, None] + torch.arange(6)).float()
    done = (row % EPISODE == EPISODE - 1)[:, None]
    after = {"observation": observation + 1, "reward": observation[:, :1].clone(), "done": done}
    root = {"observation": observation, "action": row, "is_init": (row % EPISODE == 0)[:, None]}
    more = {"terminated": done.clone(), "truncated": torch.zeros_like(done)}
    return TensorDict({**root, "next": after | more, "collector": {"traj_ids": row // EPISODE}}, [count])


def made(rows: int, **options: Any) -> ReplayBuffer:
    """Create a buffer with this many rows and a slice sampler."""
    storage = LazyTensorStorage(rows)
    return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=16), batch_size=256, **options)


def timed(call: Callable[[], object]) -> float:
    """Wall time of a call."""
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def medians(turns: int, calls: Mapping[str, Callable[[int], float]]) -> dict[str, float]:
    """The median of what each call gives in so many turns, in which all are called one after the other; the first turn,
    in which kernels are compiled, does not count."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            took[name].append(call(turn))
    return {name: statistics.median(values[1:]) for name, values in took.items()}


class Counted:
    """Counts the bytes that are written."""

    def __init__(self) -> None:
        self.bytes, self._write = 0, files.write

    def __enter__(self) -> "Counted":
        def write(descriptor: int, data: Any) -> None:
            self.bytes += memoryview(data).nbytes
            self._write(descriptor, data)

        files.write = write
        return self

    def __exit__(self, *error: object) -> None:
        files.write = self._write


def filled(rows: int, **options: Any) -> ReplayBuffer:
    """A buffer that is full."""
    buffer = made(rows, **options)
    for first in range(0, rows, 10_000):
        buffer.extend(batch(first, 10_000))
    return buffer


def bytes_of_second_save(rows: int, folder: Path) -> float:
    """Bytes that a save after 1 % new rows writes, over those of the first save; the mean of ten."""
    buffer = filled(rows)
    with Counted() as full:
        buffer.dumps(folder)
    with Counted() as more:
        for _ in range(10):
            buffer.extend(batch(int(buffer.stats()["rows_written"]), rows // 100))
            buffer.dumps(folder)
    return more.bytes / 10 / full.bytes


def times(rows: int, turns: int, folder: Path, torchrl: bool) -> dict[str, float]:
    """Seconds that saves and loads take."""
    buffer, packed = filled(rows), filled(rows, checkpointer=H5StorageCheckpointer())
    buffer.dumps(folder / "again")
    packed.dumps(folder / "h5")

    def full(turn: int) -> float:
        path = folder / f"full-{turn}"
        seconds = timed(lambda: buffer.dumps(path))
        shutil.rmtree(path)
        return seconds

    def again(turn: int) -> float:
        some = []
        for _ in range(3):  # each takes a few syncs only, whose times differ much
            buffer.extend(batch(int(buffer.stats()["rows_written"]), rows // 100))
            some.append(timed(lambda: buffer.dumps(folder / "again")))
        return statistics.median(some)

    def load(turn: int) -> float:
        other = made(rows)
        return timed(lambda: other.loads(folder / "again"))

    def load_h5(turn: int) -> float:
        other = made(rows, checkpointer=H5StorageCheckpointer())
        return timed(lambda: other.loads(folder / "h5"))

    calls = {"full save": full, "1 % save": again, "load": load}
    if torchrl:
        calls |= of_torchrl(rows, folder)
    calls |= {"H5 save": lambda turn: timed(lambda: packed.dumps(folder / "h5")), "H5 load": load_h5}
    return medians(turns, calls)


def lock_held(rows: int, folder: Path) -> float:
    """How long a writer waits for a save, over extending what it wrote meanwhile."""
    buffer = filled(rows)
    buffer.dumps(folder / "held")
    held, taken = [0.0], buffer.write_lock

    class Watched:
        """The lock of writers, and how long the save has it."""

        def __enter__(self) -> None:
            taken.__enter__()
            self._since = time.perf_counter()

        def __exit__(self, *error: Any) -> None:
            if threading.current_thread() is saver:
                held[0] += time.perf_counter() - self._since
            taken.__exit__(*error)

    buffer.write_lock = Watched()
    extending, stop = 0.0, threading.Event()

    def save() -> None:
        buffer.dumps(folder / "held")
        stop.set()

    saver = threading.Thread(target=save)
    came = rows // 10
    parts = [batch(rows + first, 1000) for first in range(0, came, 1000)]
    for part in parts:  # what comes before the save, and what comes while it copies
        extending += timed(lambda part=part: buffer.extend(part))  # type: ignore[misc]
    saver.start()
    for part in parts:
        if stop.is_set():
            break
        extending += timed(lambda part=part: buffer.extend(part))  # type: ignore[misc]
    saver.join()
    return held[0] / extending


def of_torchrl(rows: int, folder: Path) -> dict[str, Callable[[int], float]]:
    """Calls that time torchrl's dumps with a sync, and its loads, of the same rows."""
    from torchrl.data import LazyTensorStorage as Storage
    from torchrl.data import ReplayBuffer as Buffer

    def new() -> Any:
        return Buffer(storage=Storage(rows), batch_size=256)

    buffer = new()
    for first in range(0, rows, 10_000):
        buffer.extend(batch(first, 10_000))
    buffer.dumps(folder / "torchrl")

    def dump(path: Path) -> None:
        buffer.dumps(path)
        for file in path.rglob("*"):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def save(turn: int) -> float:
        path = folder / f"torchrl-{turn}"
        seconds = timed(lambda: dump(path))
        shutil.rmtree(path)
        return seconds

    def load(turn: int) -> float:
        other = new()
        return timed(lambda: other.loads(folder / "torchrl"))

    return {"torchrl save": save, "torchrl load": load}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default a temporary one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    torchrl = not options.alone and importlib.util.find_spec("torchrl") is not None
    try:
        took = times(options.rows, options.turns, folder, torchrl)
        found = {
            "save after 1 % new / full save, time": took["1 % save"] / took["full save"],
            "save after 1 % new / full save, bytes": bytes_of_second_save(options.rows, folder / "bytes"),
            "lock held by a save / extending what came": lock_held(options.rows, folder),
            "H5 save / native save": took["H5 save"] / took["full save"],
            "H5 load / native load": took["H5 load"] / took["load"],
        }
        if torchrl:
            found["full save / torchrl dumps + sync"] = took["full save"] / took["torchrl save"]
            found["load / torchrl loads"] = took["load"] / took["torchrl load"]
    finally:
        shutil.rmtree(folder)
    lines = [
        [name, f"{found[name]:.3f}", f"{budget:.3f}"] for name, budget in BUDGETS.items() if name in found
    ]
    lines += [[f"{name} (s)", f"{seconds:.3f}", ""] for name, seconds in took.items()]
    print(table([f"{options.rows:,} rows of 74 bytes", "measured", "budget"], lines))


if __name__ == "__main__":
    main()
