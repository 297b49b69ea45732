"""Measures how many windows and bytes a second the owner of a buffer takes from 1 to 512 producers.

``python -m flatroll bench owner`` takes about four minutes; ``python -m benchmarks.workers.bench_owner --sizes "1 kB"
--producers 1 64`` measures some cells. A producer is a process that sends one prepared window again and again, as a
worker of a `MultiAsyncCollector` sends its rows; the owner stores them in a buffer with a trajectory index. All
share the cores of this machine, so the owner's processor time for a window, beside that of `extend` of a window of
its own, says what an owner with a core of its own can take.
"""

import argparse
import cProfile
import logging
import pstats
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.measure.timing import table
from benchmarks.workers.bench_handle import window
from benchmarks.workers.finding import cpu_of
from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.rollouts import MultiAsyncCollector
from flatroll.rollouts.workers.processes import Process, Processes
from flatroll.rollouts.workers.transport import READY, Job, Note, Ready
from flatroll.rollouts.workers.worker import Signals
from flatroll.sharing import Channel, Nursery
from flatroll.sharing.mailbox import Outbox

FLOATS, ROW_BYTES = 12, 63  # with marks, reward and trajectory id
SIZES = {"1 kB": 16, "10 kB": 160, "100 kB": 1_600, "1 MB": 16_000, "10 MB": 160_000}  # rows
PRODUCERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SECONDS, TURNS = 0.6, 3
MOST_BYTES = 3 * 2**30  # in slots of all producers; larger cells are left out
#: Functions whose time is shown by ``--profile``: their file and name.
PARTS = {
    "`extend`": ("buffers/replay_buffer.py", "extend"),
    "of it: copying rows": ("kernels/rows/gather.py", "copy"),
    "system calls: wait": ("selectors.py", "select"),
    "system calls: read": ("socket.py", "recv_fds"),
    "system calls: give a slot back": ("sharing/channel.py", "_write"),
    "messages to views of rows": ("sharing/mailbox.py", "open"),
    "views to a tensordict": ("layout/tensordict_seam.py", "nest"),
    "Ctrl-C held back": ("signal.py", "signal"),
}


def send_windows(channel: Channel, *, job: Job) -> None:
    """Send windows of the requested number of rows until the owner closes the channel."""
    channel.send(READY, Ready(None, ROW_BYTES))
    rows, _ = channel.receive("collect")
    outbox, frames = Outbox(channel, job.slots), 0
    columns: Mapping[Any, torch.Tensor] = made_window(rows, job.writer)
    while True:
        frames += rows
        outbox.put(columns, note=Note(frames, rows, (rows,), 0, 0.0, None))
        channel.feed()


def made_window(rows: int, writer: int) -> dict[Any, torch.Tensor]:
    """Columns of a window whose trajectory ids are the writer's own."""
    columns: dict[Any, torch.Tensor] = dict(window(rows, FLOATS).items(True, True))
    columns["collector", "traj_ids"] += writer << 40
    return columns


class Producers(Processes):
    """Processes that only send."""

    def start(self, job: Job) -> Process:
        worker = self.nursery.start(send_windows, name=f"producer {job.place}", job=job.without_parts())
        return Process(worker, Signals(), job.sync)


def buffer_of(rows: int) -> ReplayBuffer:
    """A buffer with a trajectory index that is full after some windows."""
    storage = LazyTensorStorage(max(4 * rows, 2**15))
    return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=16), batch_size=256)


def measure(rows: int, count: int, nursery: Nursery, profile: cProfile.Profile | None = None) -> list[float]:
    """Windows per second; processor seconds of the owner per window, and of ``extend`` of its own windows."""
    home = buffer_of(rows)
    local = [TensorDict(made_window(rows, writer), [rows]) for writer in range(4)]
    with MultiAsyncCollector(
        lambda: None,
        num_workers=count,
        frames_per_batch=rows,
        replay_buffer=buffer_of(rows),
        transport=Producers(count, nursery),
        start_timeout=None,
    ) as collector:
        for _ in range(4 * count + 20):
            next(collector)
        turns = []
        for _ in range(TURNS):
            windows, began, used = 0, time.perf_counter(), time.thread_time()
            if profile is not None:
                profile.enable()
            while time.perf_counter() - began < SECONDS / TURNS or windows < 3:
                next(collector)
                windows += 1
            if profile is not None:
                profile.disable()
            taken, used = time.perf_counter() - began, time.thread_time() - used
            extends = max(3, min(windows, round(0.05 / (used / windows))))
            turns.append([windows / taken, used / windows, cpu_of(home.extend, local, extends)])
    return [statistics.median(each) for each in zip(*turns, strict=True)]


def measure_threads(rows: int, count: int) -> float:
    """Windows per second that ``count`` threads of the owner's process store."""
    buffer, stop, done = buffer_of(rows), threading.Event(), [0] * count

    def store(number: int) -> None:
        own = TensorDict(made_window(rows, number), [rows])
        while not stop.is_set():
            buffer.extend(own)
            done[number] += 1

    threads = [threading.Thread(target=store, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    before, began = sum(done), time.perf_counter()
    time.sleep(SECONDS)
    rate = (sum(done) - before) / (time.perf_counter() - began)
    stop.set()
    for thread in threads:
        thread.join()
    return rate


def show_profile(rows: int, count: int, nursery: Nursery) -> None:
    """Print the shares of the owner's processor time."""
    profile = cProfile.Profile(time.thread_time)
    measure(rows, count, nursery, profile)
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    whole = sum(own for _, _, own, _, _ in stats.values())
    rows_of = []
    for name, (file, function) in PARTS.items():
        found = sum(
            s[3] for (path, _, called), s in stats.items() if path.endswith(file) and called == function
        )
        rows_of.append([name, f"{found / whole:.0%}"])
    print(f"\n{count} producers, {rows * ROW_BYTES:,} B a window\n")
    print(table(["part of the owner's processor time, with a profiler", ""], rows_of), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--producers", type=int, nargs="+", default=PRODUCERS)
    parser.add_argument("--threads", action="store_true", help="threads of the owner's process, instead")
    parser.add_argument("--profile", action="store_true", help="shares of the owner's time, instead")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.getLogger("flatroll.rollouts").setLevel(logging.ERROR)  # no word of few cores
    if args.threads:
        rates = [
            [f"{n}", *(f"{measure_threads(SIZES[s], n):,.0f}" for s in args.sizes)] for n in args.producers
        ]
        print(table(["threads: windows/s", *args.sizes], rates))
        return
    found: dict[tuple[str, int], list[float]] = {}
    with Nursery(preload=("benchmarks.workers.bench_owner",)) as nursery:
        for size in args.sizes:
            for count in args.producers:
                if 2 * count * SIZES[size] * ROW_BYTES > MOST_BYTES:
                    continue
                if args.profile:
                    show_profile(SIZES[size], count, nursery)
                else:
                    found[size, count] = measure(SIZES[size], count, nursery)
    if args.profile:
        return
    cells: dict[str, Callable[[str, list[float]], str]] = {
        "windows/s": lambda size, f: f"{f[0]:,.0f}",
        "MB/s": lambda size, f: f"{f[0] * SIZES[size] * ROW_BYTES / 1e6:,.0f}",
        "owner's processor time per window, µs": lambda size, f: f"{f[1] * 1e6:,.0f}",
        "the same over `extend`": lambda size, f: f"{f[1] / f[2]:.2f} x",
        "share of the time in which the owner works": lambda size, f: f"{min(1.0, f[0] * f[1]):.0%}",
    }
    for title, cell in cells.items():
        rows = [
            [
                f"{count}",
                *(cell(size, found[size, count]) if (size, count) in found else "" for size in args.sizes),
            ]
            for count in args.producers
        ]
        print(f"\n{title}:\n\n" + table(["producers", *args.sizes], rows), flush=True)


if __name__ == "__main__":
    main()
