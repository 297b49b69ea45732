"""A `DiskStorage` of many files: how many there are, and what open ones cost.

    python tests/buffers/storages/disk/test_many_files.py 10000

opens a folder of so many files, samples and evicts.
"""

import gc
import inspect
import os
import sys
import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict

from flatroll.buffers import DiskStorage, RandomSampler, ReplayBuffer
from flatroll.disk import Folder, files
from flatroll.disk.segments import encode_segment


def rows_of(first: int, count: int) -> TensorDict:
    return TensorDict({"row": torch.arange(first, first + count).unsqueeze(1)}, [count])


def open_files(folder: Path) -> tuple[int, int]:
    """How many files of a folder this process maps, and how many descriptors it has."""
    maps = sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())
    return maps, len(os.listdir("/proc/self/fd"))


def check_many_files(folder: Path, count: int) -> None:
    """Each file is mapped while somebody reads, has no descriptor, and is let go with the storage or when it goes."""
    first = DiskStorage(count, folder, sync=False, segment_bytes=1)
    ReplayBuffer(storage=first, sampler=RandomSampler()).extend(rows_of(0, 1))
    first.close()
    thread = first._log.thread
    if (
        thread is not None
    ):  # it may still find out that there is nothing to write, and has the files mapped so long
        thread.join(600)
    reader = Folder(folder)
    reader.recover()
    for row in range(1, count):  # as `Folder.append` does, which counts the files each time
        name = reader.segments[0].name._replace(first=row, end=row + 1, number=row + 1)
        chunks = encode_segment(name, [{"row": torch.tensor([[row]])}])[1]
        files.publish(folder, str(name), chunks, synced=False)
    del first, reader, thread
    gc.collect()
    before = open_files(folder)
    assert before[0] == 0
    for _ in range(2):
        storage = DiskStorage(count, folder, sync=False, segment_bytes=1)
        buffer = ReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=512)
        index = torch.randint(count, (1000,))
        assert torch.equal(buffer[index]["row"][:, 0], index)
        assert open_files(folder) == (count, before[1] + 1)  # the lock
        for _ in range(20):
            buffer.sample()
        assert open_files(folder) == (count, before[1] + 1)
        storage.close()
        del buffer, storage
        gc.collect()
        assert open_files(folder) == before
    storage = DiskStorage(count, folder, sync=False, segment_bytes=1)
    buffer = ReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=512)
    for row in range(count, count + 20, 2):  # files go as others come
        buffer.extend(rows_of(row, 2))
        storage.flush()
    storage.close()
    del buffer
    gc.collect()
    assert abs(open_files(folder)[0] - count) <= 2
    assert len(os.listdir(folder)) <= count + 5  # lock, 2 versions, 2 files that only the older one names


def test_many_files(tmp_path: Path) -> None:
    check_many_files(tmp_path, 60)


def test_a_million_trajectories_are_few_files(tmp_path: Path) -> None:
    """400 at most for 10^6 trajectories of 18.8 kB: here a thousandth of both the rows and a file's size."""
    whole = inspect.signature(DiskStorage).parameters["segment_bytes"].default
    storage = DiskStorage(10**9, tmp_path, sync=False, segment_bytes=whole // 1000)
    buffer = ReplayBuffer(storage=storage, sampler=RandomSampler())
    for _ in range(20):  # 50 trajectories of 100 rows of 188 bytes
        buffer.extend(TensorDict({"x": torch.zeros(5_000, 188, dtype=torch.uint8)}, [5_000]))
    storage.close()
    assert len(os.listdir(tmp_path)) <= 400


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        check_many_files(Path(path), int(sys.argv[1]))
