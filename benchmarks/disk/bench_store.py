"""Benchmarks `DiskStorage`: appending, warm and cold slices, images; over what the hardware can do, in one run.

``python -m benchmarks.disk.bench_store [--rows 2000000] [--folder PATH]``
"""

import argparse
import ctypes
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers import DiskStorage, LazyTensorStorage, ReplayBuffer, SliceSampler

EPISODE, GROUP = 200, 64  # rows of a trajectory, trajectories of a batch
SLICES, LENGTH = 32, 64


def make_batch(first: int, trajectories: int) -> TensorDict:
    """Trajectories of 200 rows of 94 bytes."""
    rows = trajectories * EPISODE
    step = torch.arange(rows) % EPISODE
    return TensorDict(
        {
            "observation": torch.randn(rows, 16),
            "action": torch.randint(8, (rows,)),
            "step_count": step.int().unsqueeze(1),
            "is_init": (step == 0).unsqueeze(1),
            "collector": {"traj_ids": first + torch.arange(rows) // EPISODE},
            "next": {"reward": torch.randn(rows, 1), "done": (step == EPISODE - 1).unsqueeze(1)},
        },
        [rows],
    )


def write_bytes(folder: Path, batches: list[TensorDict], synced: bool) -> None:
    """Append the columns of batches to one file each: what any log has to do at least."""
    keys = list(batches[0].keys(True, True))
    opened = [os.open(folder / str(i), os.O_CREAT | os.O_WRONLY, 0o600) for i in range(len(keys))]
    for batch in batches:
        for file, key in zip(opened, keys, strict=True):
            os.write(file, memoryview(batch.get(key).reshape(-1).view(torch.uint8).numpy()))
    for file in opened:
        if synced:
            os.fsync(file)
        os.close(file)


def write_maps(folder: Path, batches: list[TensorDict], synced: bool) -> None:
    """Append to memory-mapped columns that grow."""
    done: dict[Any, int] = {}
    for batch in batches:
        for i, (key, column) in enumerate(batch.items(True, True)):
            values, begin = column.reshape(-1).view(torch.uint8).numpy(), done.get(key, 0)
            with (folder / str(i)).open("r+b" if begin else "w+b") as file:
                file.truncate(begin + len(values))
                mapped = np.memmap(file, np.uint8, "r+", begin, (len(values),))
                mapped[:] = values
                if synced:
                    mapped.flush()
            done[key] = begin + len(values)


def write_disk(folder: Path, batches: list[TensorDict], synced: bool, **options: Any) -> None:
    storage = DiskStorage(10**9, folder, sync=synced, **options)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=LENGTH), batch_size=SLICES * LENGTH)
    for batch in batches:
        buffer.extend(batch)
    storage.close()


def write_each(folder: Path, batches: list[TensorDict], synced: bool) -> None:
    """One ``torch.save`` per trajectory, as RLinf's buffer does."""
    number = 0
    for batch in batches:
        for part in batch.split(EPISODE):
            torch.save(
                {str(key): value.clone() for key, value in part.items(True, True)}, folder / f"{number}.pt"
            )
            number += 1


def timed(work: Callable[..., Any], *arguments: Any) -> float:
    begin = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begin


def read_all(read: Callable[[Tensor], Any], drawn: list[Tensor]) -> None:
    for slots in drawn:
        read(slots)


def read_maps(maps: list[tuple[int, int, list[Tensor]]], slots: Tensor) -> None:
    for first, end, mapped in maps:
        inside = slots[(slots >= first) & (slots < end)] - first
        if len(inside):
            for column in mapped:
                column.index_select(0, inside)


def appends(folder: Path, rows: int) -> None:
    """Print how long it takes to write the rows, in turns."""
    batches = [make_batch(i * GROUP, GROUP) for i in range(rows // (GROUP * EPISODE))]
    few = batches[: max(1, len(batches) // 20)]
    size = sum(b.numel() for b in batches) * 94
    writers = {
        "write()": (write_bytes, batches),
        "growing maps": (write_maps, batches),
        "DiskStorage": (write_disk, batches),
        "one file each": (write_each, few),
    }
    for synced in (False, True):
        took: dict[str, list[float]] = {name: [] for name in writers}
        for turn in range(6):
            for name, (write, given) in writers.items():
                target = folder / f"{name}-{turn}"
                target.mkdir()
                seconds = timed(write, target, given, synced) / len(given)
                if turn:  # kernels are compiled in the first one
                    took[name].append(seconds)
                shutil.rmtree(target)
        median = statistics.median(took["DiskStorage"])
        rates = {
            name: statistics.median(a / b for a, b in zip(times, took["DiskStorage"], strict=True))
            for name, times in took.items()
        }
        print(
            f"append {size / 2**20:.0f} MiB, {'synced' if synced else 'not synced'}: "
            f"{size / len(batches) / median / 2**20:.0f} MiB/s, {GROUP / median:.0f} trajectories/s; "
            + ", ".join(f"{rate:.2f} x {name}" for name, rate in rates.items() if name != "DiskStorage")
        )


def forget(storage: DiskStorage) -> None:
    """Drop the pages of the files from memory."""
    system = ctypes.CDLL(None)
    for piece in storage._log.pieces.pieces:
        if piece.segment is not None:
            mapped = piece.segment._maps[0]
            system.madvise(
                ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(len(mapped)), 4
            )  # MADV_DONTNEED
    for file in Path(storage.path).glob("*.rows"):
        drop(file)


def drop(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def plain_maps(storage: DiskStorage) -> list[tuple[int, int, list[Tensor]]]:
    """The columns of each file, mapped as torch does it: the system reads ahead."""
    maps = []
    for piece in storage._log.pieces.pieces:
        assert piece.segment is not None
        file, header = Path(storage.path) / str(piece.segment.name), piece.segment.header
        data = torch.from_file(str(file), shared=False, size=header.size, dtype=torch.uint8)
        columns = [
            data[e.begin : e.begin + e.size].view(e.dtype).view(e.shape) for e in header.entries.values()
        ]
        maps.append((piece.first, piece.end, columns))
    return maps


def slices(folder: Path, rows: int) -> None:
    """Print how long 32 slices of 64 rows take, warm and cold."""
    write_disk(folder, [make_batch(i * GROUP, GROUP) for i in range(rows // (GROUP * EPISODE))], True)
    storage = DiskStorage(path=folder, read_only=True)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=LENGTH), batch_size=SLICES * LENGTH)
    memory = ReplayBuffer(
        storage=LazyTensorStorage(len(buffer)),
        sampler=SliceSampler(slice_len=LENGTH),
        batch_size=SLICES * LENGTH,
    )
    for first in range(0, len(buffer), 100_000):
        memory.extend(buffer[first : first + 100_000])
    columns = [column.data for column in memory.storage.columns.values()]  # type: ignore[attr-defined]
    index = memory.index
    assert index is not None
    drawn = [index.draw(SLICES, LENGTH, strict=True).slots for _ in range(50)]

    def by_column(slots: Tensor) -> list[Tensor]:
        return [column.index_select(0, slots) for column in columns]

    readers: dict[str, Callable[[Tensor], Any]] = {
        "disk": storage.read_rows,
        "memory": memory.storage.read_rows,
        "one call per column": by_column,
    }
    took: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(40):
        for name, read in readers.items():
            seconds = timed(read_all, read, drawn) / len(drawn)
            if turn:
                took[name].append(seconds)
    ratios = {
        name: statistics.median(d / m for d, m in zip(took["disk"], took[name], strict=True)) for name in took
    }
    print(
        f"warm slices {SLICES} x {LENGTH}: {statistics.median(took['disk']) * 1e3:.3f} ms, "
        f"{ratios['memory']:.2f} x LazyTensorStorage (one compiled call), "
        f"{ratios['one call per column']:.2f} x memory copy (one call per column)"
    )
    samples = [timed(buffer.sample) / timed(memory.sample) for _ in range(300)]
    print(f"whole samples: {statistics.median(samples):.2f} x LazyTensorStorage")

    cold: dict[str, list[float]] = {"disk": [], "plain map": []}
    for slots in drawn[:12]:
        forget(storage)
        cold["disk"].append(timed(storage.read_rows, slots))
        forget(storage)
        cold["plain map"].append(timed(read_maps, plain_maps(storage), slots))
    share = statistics.median(a / b for a, b in zip(cold["disk"], cold["plain map"], strict=True))
    print(
        f"cold slices, {len(storage._log.pieces.pieces)} files: {statistics.median(cold['disk']) * 1e3:.1f} ms, "
        f"{share:.3f} x a plain map"
    )


def images(folder: Path) -> None:
    """Print what stacks of a moving square, [4, 84, 84], take compressed."""
    rows = 2000
    frames = torch.zeros(rows + 4, 84, 84, dtype=torch.uint8)
    for i in range(rows + 4):
        y, x = i * 3 % 76, i * 7 % 76
        frames[i, y : y + 8, x : x + 8] = 200
        frames[i, i % 60 : i % 60 + 16, 2:4] = 120
    stacks = frames.unfold(0, 4, 1).permute(0, 3, 1, 2)[:rows].contiguous()
    done = (torch.arange(rows) % EPISODE == EPISODE - 1).unsqueeze(1)
    batch = TensorDict({"observation": stacks, "next": {"done": done}}, [rows])
    raw = stacks.numel()
    for name, options in (
        ("zstd", {"codec": {"observation": "zstd"}}),
        ("frames", {"frame_stack": {"observation": 4}}),
        ("plain", {}),
    ):
        target = folder / name
        write = timed(partial(write_disk, **options), target, list(batch.split(100)), False)
        storage = DiskStorage(path=target, read_only=True)
        ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=LENGTH), batch_size=LENGTH)
        slots = (torch.randint(rows - LENGTH, (SLICES, 1)) + torch.arange(LENGTH)).view(-1)
        ratios = [timed(storage.read_rows, slots) / timed(stacks.index_select, 0, slots) for _ in range(7)]
        print(
            f"images, {name}: {raw / write / 2**20:.0f} MiB/s, {storage.nbytes / raw * 100:.2f} % of the raw bytes, "
            f"read {statistics.median(ratios):.2f} x memory copy"
        )


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--folder", default=None, help="default: a temporary one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.folder) as path:
        folder = Path(path)
        appends(folder, given.rows)
        slices(folder / "slices", given.rows)
        images(folder / "images")


if __name__ == "__main__":
    main()
