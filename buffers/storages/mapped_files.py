"""Columns in memory-mapped files, and what goes with them: names, space on the disk, a lock between processes."""

import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.columns.base import TensorColumn
from flatroll.buffers.index.ring import Array
from flatroll.buffers.storages.free_space import shown_size
from flatroll.buffers.storages.item_kinds import row_bytes
from flatroll.layout.keys import NestedKey, as_tuple

#: What reserving space fails with where there is none, and where the file system cannot reserve.
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
_UNABLE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class MappedColumn(TensorColumn):
    """A column in a file. Copies by pickle map the same file.

    Args:
        path: the file, at least that long.
        rows: number of rows; :meth:`grow` makes the file, or adds rows at its end.
        dtype: of the values.
        shape: of one row's value.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     column = MappedColumn(pathlib.Path(folder) / "x.memmap", 0, torch.int16, torch.Size([2]))
    ...     column.grow(3)
    ...     column.write(1, torch.ones(1, 2, dtype=torch.int16))
    ...     column.take(torch.tensor([0, 1]))
    tensor([[0, 0],
            [1, 1]], dtype=torch.int16)
    """

    def __init__(self, path: Path, rows: int, dtype: torch.dtype, shape: torch.Size) -> None:
        self.path = path
        self._memory, data = mapped(path, rows, dtype, shape)
        super().__init__(data)

    def pool(self) -> "MappedColumn":
        """See `Column`; in a file of its own beside the column's."""
        return MappedColumn(pool_file(self.path), 0, self.dtype, self.shape)

    def grow(self, rows: int) -> None:
        """See `Column`; OSError if the disk has no space for it. Readers keep what they see."""
        if rows > len(self.data):
            try:
                reserve(self.path, rows * self.value_bytes)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                size = f"{rows} rows of {self.value_bytes} bytes"
                raise OSError(error.errno, f"the disk has no space for {size}", str(self.path)) from None
            self._memory, self.data = mapped(self.path, rows, self.dtype, self.shape)

    def ask(self, slots: Array) -> None:
        """Let the system fetch the rows in ``slots`` (int64, ascending) from disk, all at once and no others."""
        size = self.value_bytes
        if self._memory is None or not len(slots):
            return
        gaps = np.flatnonzero(np.diff(slots) > 1 + mmap.PAGESIZE // size)
        begins = slots[np.concatenate([[0], gaps + 1])] * size // mmap.PAGESIZE * mmap.PAGESIZE
        ends = (slots[np.concatenate([gaps, [len(slots) - 1]])] + 1) * size
        for begin, length in zip(begins.tolist(), (ends - begins).tolist(), strict=True):
            self._memory.madvise(mmap.MADV_WILLNEED, begin, length)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedColumn, (self.path, len(self.data), self.dtype, self.shape)


class FrameFiles:
    """Makes columns of frames, the first one in the file ``path``, further ones beside it; lists them in ``files``."""

    def __init__(self, path: Path, files: list[Path]) -> None:
        self._path, self._files = path, files
        self._made = 0

    def __call__(self, frames: int, shape: tuple[int, ...], dtype: torch.dtype) -> MappedColumn:
        """A column of so many frames of this shape."""
        path = self._path if not self._made else self._path.with_suffix(f".{self._made}.frames")
        self._made += 1
        self._files.append(path)
        column = MappedColumn(path, 0, dtype, torch.Size(shape))
        column.grow(frames)
        return column


class FileLock:
    """A lock between the threads of this process and, once there is a file, between processes.

    The system gives it back when its holder dies. The file is opened for each turn, so that a process that was
    forked while the lock was held does not hold it too.
    """

    def __init__(self, path: Callable[[], Path | None]) -> None:
        self._path = path
        self._thread = threading.Lock()
        self._file: int | None = None

    def __enter__(self) -> None:
        import fcntl  # POSIX only

        self._thread.acquire()
        try:
            path = self._path()
            if path is not None:
                self._file = _open(path)
                fcntl.flock(self._file, fcntl.LOCK_EX)
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *error: object) -> None:
        import fcntl

        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._give_back()

    def _give_back(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        self._thread.release()


def file_names(keys: Iterable[NestedKey]) -> dict[NestedKey, str]:
    """A file name per key; keys that look alike get different ones.

    >>> file_names([("next", "observation"), "next.observation", "A", "a"])  # doctest: +NORMALIZE_WHITESPACE
    {('next', 'observation'): 'next.observation.memmap', 'next.observation': 'next%2Eobservation.memmap',
    'A': 'A.memmap', 'a': 'a~1.memmap'}
    """
    names: dict[NestedKey, str] = {}
    taken: set[str] = set()
    for key in keys:
        parts = [quote(part, safe="").replace(".", "%2E").replace("~", "%7E") for part in as_tuple(key)]
        stem = name = ".".join(parts)[:180]  # file names have at most 255 bytes
        for number in itertools.count(1):
            if name.casefold() not in taken:  # some file systems take A for a
                break
            name = f"{stem}~{number}"
        taken.add(name.casefold())
        names[key] = f"{name}.memmap"
    return names


def pool_file(path: Path) -> Path:
    """The file of a column's pool."""
    return path.with_suffix(".pool")


def reserve(path: Path, size: int) -> None:
    """Make the file ``path`` at least ``size`` bytes long, of zeros, with space on the disk.

    Where the system cannot reserve space (macOS), the file only gets its length.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if size > os.fstat(file).st_size:
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file, 0, size)
                    return
            except OSError as error:
                if error.errno not in _UNABLE:
                    raise
            os.ftruncate(file, size)
    finally:
        os.close(file)


def mapped(path: Path, rows: int, dtype: torch.dtype, shape: torch.Size) -> tuple[mmap.mmap | None, Tensor]:
    """The first ``rows`` rows of a file that is long enough; None for no bytes at all."""
    size = rows * row_bytes(dtype, shape)
    if not size:
        return None, torch.empty((rows, *shape), dtype=dtype)
    memory = mapped_bytes(path, size)
    values = torch.from_numpy(np.frombuffer(memory, np.uint8))
    return memory, values.view(dtype).view(rows, *shape)


def mapped_bytes(path: Path, size: int) -> mmap.mmap:
    """The first ``size`` bytes of a file."""
    file = _open(path)
    try:
        there = os.fstat(file).st_size
        if there < size:
            raise ValueError(f"{path} has {shown_size(there)}, expected {shown_size(size)}")
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is gone: the process that made the buffer has dropped it or ended. Keep it there, or give "
            "LazyMemmapStorage a scratch_dir, whose files stay"
        ) from None


def remove_files(files: Sequence[Path], folder: Path | None, process: int) -> None:
    """Remove files, and the folder that was made for them; only in the process that made them."""
    if os.getpid() != process:
        return
    for file in files:
        with suppress(OSError):
            file.unlink(missing_ok=True)
    if folder is not None:
        with suppress(OSError):  # not empty: the caller's own files
            folder.rmdir()
