"""Columns in memory-mapped files, and what goes with them: names, space on the disk, a lock between processes."""

import errno
import itertools
import math
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
from typing_extensions import override

from flatroll.buffers.columns.base import TensorColumn
from flatroll.buffers.index.ring import Array
from flatroll.buffers.storages.free_space import shown_size
from flatroll.layout.keys import NestedKey, as_tuple

#: Error numbers of reserving space on a disk that has none, and on a file system that cannot reserve.
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class MappedColumn(TensorColumn):
    """A column in a memory-mapped file. Copies by pickle map the same file, in another process too.

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
        self._memory: mmap.mmap | None = (
            None  # kept for `prefetch`; the tensor keeps the mapping alive by itself
        )
        size = rows * math.prod(shape) * dtype.itemsize
        if size:
            self._memory = mapped_bytes(path, size)
            as_bytes = torch.from_numpy(np.frombuffer(self._memory, np.uint8))
            super().__init__(as_bytes.view(dtype).view(rows, *shape))
        else:  # no bytes can be mapped
            super().__init__(torch.empty((rows, *shape), dtype=dtype))

    @override
    def pool(self) -> "MappedColumn":
        # Next observations that no row holds go to a file of their own beside the column's.
        return MappedColumn(pool_file(self.path), 0, self.dtype, self.shape)

    @override
    def grow(self, rows: int) -> None:
        """Make the file at least ``rows`` rows long; OSError if the disk has no space for them.

        Who reads meanwhile keeps the shorter mapping of the same bytes.
        """
        if rows > len(self.data):
            try:
                reserve(self.path, rows * self.value_bytes)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                size = f"{rows} rows of {self.value_bytes} bytes"
                raise OSError(error.errno, f"the disk has no space for {size}", str(self.path)) from None
            larger = MappedColumn(self.path, rows, self.dtype, self.shape)
            self._memory, self.data = larger._memory, larger.data

    def prefetch(self, slots: Array) -> None:
        """Let the system fetch the rows in ``slots`` (int64, ascending) from disk, all at once and no others."""
        size = self.value_bytes
        if self._memory is None or not len(slots):
            return
        # One request per stretch of rows that are less than a page apart, from the start of its first page on.
        gaps = np.flatnonzero(np.diff(slots) > 1 + mmap.PAGESIZE // size)
        begins = slots[np.concatenate([[0], gaps + 1])] * size // mmap.PAGESIZE * mmap.PAGESIZE
        ends = (slots[np.concatenate([gaps, [len(slots) - 1]])] + 1) * size
        for begin, length in zip(begins.tolist(), (ends - begins).tolist(), strict=True):
            self._memory.madvise(mmap.MADV_WILLNEED, begin, length)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedColumn, (self.path, len(self.data), self.dtype, self.shape)


class FrameFiles:
    """Makes the files of a pool of frames, which grows by whole files.

    Args:
        path: the first file; further ones are beside it, numbered.
        files: the list to which each file is added, so that all are removed in the end.
    """

    def __init__(self, path: Path, files: list[Path]) -> None:
        self._path, self._files = path, files
        self._made = 0

    def __call__(self, frames: int, shape: tuple[int, ...], dtype: torch.dtype) -> MappedColumn:
        """A column of so many frames of this shape, in the next file."""
        path = self._path if not self._made else self._path.with_suffix(f".{self._made}.frames")
        self._made += 1
        self._files.append(path)  # first, so that a file of which only a part fits is removed, too
        column = MappedColumn(path, 0, dtype, torch.Size(shape))
        column.grow(frames)
        return column


class FileLock:
    """A lock between the threads of this process and, once ``path()`` gives a file, between processes.

    The system gives it back when its holder dies. The file is opened for each turn, so that a process that was
    forked while the lock was held does not hold it too.
    """

    def __init__(self, path: Callable[[], Path | None]) -> None:
        self._path = path
        self._thread = threading.Lock()
        self._file: int | None = None

    def __enter__(self) -> None:
        import fcntl  # POSIX only

        self._thread.acquire()  # flock does not keep the threads of one process apart
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
        self._thread.release()  # last: the next thread sets _file


def file_names(keys: Iterable[NestedKey]) -> dict[NestedKey, str]:
    """A file name per key; keys that look alike get different ones.

    >>> file_names([("next", "observation"), "next.observation", "A", "a"])  # doctest: +NORMALIZE_WHITESPACE
    {('next', 'observation'): 'next.observation.memmap', 'next.observation': 'next%2Eobservation.memmap',
    'A': 'A.memmap', 'a': 'a~1.memmap'}
    """
    names: dict[NestedKey, str] = {}
    taken: set[str] = set()
    for key in keys:
        # "." joins the names of a nested key and "~" numbers equal stems, so neither may be in a name.
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
    """The file for the pool of the column in ``path``."""
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
                if error.errno not in _CANNOT_RESERVE:
                    raise
            os.ftruncate(file, size)
    finally:
        os.close(file)


def mapped_bytes(path: Path, size: int) -> mmap.mmap:
    """The first ``size`` bytes of a file, shared with all who map it; ValueError if it is shorter."""
    file = _open(path)
    try:
        length = os.fstat(file).st_size
        if length < size:  # reading beyond the end of the file would kill the process
            raise ValueError(f"{path} has {shown_size(length)}, expected {shown_size(size)}")
        return mmap.mmap(file, size)
    finally:
        os.close(file)  # the mapping stays


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is gone: the process that made the buffer has dropped it or ended. Keep it there, or give "
            "LazyMemmapStorage a scratch_dir, whose files stay"
        ) from None


def remove_files(files: Sequence[Path], folder: Path | None, process: int) -> None:
    """Remove files, and the folder that was made for them; only in the process that made them.

    Who has a file mapped keeps its bytes: the system frees them with the last mapping.
    """
    if os.getpid() != process:  # a fork inherits the finalizer, but not the files
        return
    for file in files:
        with suppress(OSError):
            file.unlink(missing_ok=True)
    if folder is not None:
        with suppress(OSError):  # not empty: the caller's own files
            folder.rmdir()
