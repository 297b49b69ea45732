"""Memory-mapped columns, and their file names, disk space and lock between processes."""

import errno
import itertools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from typing_extensions import override

from flatroll.buffers.columns.column import TensorColumn
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
        # Kept for `prefetch`; the tensor keeps the mapping alive by itself.
        self._memory: mmap.mmap | None = None
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
        return MappedColumn(self.path.with_suffix(".pool"), 0, self.dtype, self.shape)

    @override
    def grow(self, rows: int) -> None:
        """Enlarge the file to at least ``rows`` rows; OSError if the disk lacks space.

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
        """Ask the system to read the rows in ``slots`` (int64, ascending) from disk, all at once."""
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


def frames_in_file(
    first: Path,
    numbers: Iterator[int],
    files: list[Path],
    frames: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> MappedColumn:
    """A column of ``frames`` frames in the next file: ``first``, then numbered ones beside it; ``files`` gets it."""
    number = next(numbers)
    path = first.with_suffix(f".{number}.frames") if number else first
    files.append(path)  # before it is made, so that a file of which only a part fits is removed, too
    column = MappedColumn(path, 0, dtype, torch.Size(shape))
    column.grow(frames)
    return column


class FileLock:
    """A lock between threads and, once ``path()`` returns a file, between processes.

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
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        import fcntl

        file, self._file = self._file, None
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing would not do where a fork has a copy of the descriptor
            os.close(file)
        self._thread.release()  # last: the next thread sets _file


def file_names(keys: Iterable[NestedKey]) -> dict[NestedKey, str]:
    """Return a distinct file name for each key, even for keys that would give the same name.

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


def reserve(path: Path, size: int) -> None:
    """Enlarge the file ``path`` to at least ``size`` bytes of zeros, and reserve the disk space.

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
    """Map the first ``size`` bytes of a file, shared between processes; ValueError if it is shorter."""
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
    """Remove the files, and the folder created for them, but only in the process that created them.

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
