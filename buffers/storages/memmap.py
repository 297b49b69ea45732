"""A storage in memory-mapped files, for buffers larger than memory or filled by several processes.

The storage comes first, then what it is made of: the column in a file, the lock between processes, names and space.
"""

import errno
import itertools
import math
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import Column, Columns, RowForm, TensorColumn
from flatroll.buffers.columns.frame_stack import FrameColumn
from flatroll.buffers.index.ring import Array, Follow, Ring
from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.buffers.storages.free_space import check_disk, check_memory, free_memory, refusal, shown_size
from flatroll.buffers.storages.next_pool import NextPool
from flatroll.buffers.storages.tensors import Encodings
from flatroll.layout.checks import check_device, check_flags, check_path, check_type
from flatroll.layout.keys import NestedKey, as_tuple

#: Errors of reserving space: the disk is full, or the file system cannot reserve.
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
# files next to those of the columns
_LOCK = "ring.lock"
_COUNTERS = "ring.counters"
_COUNTER_BYTES = 4096  # size of the ring's counters: one page


class LazyMemmapStorage(ColumnStorage):
    """Stores rows in one memory-mapped file per entry, created at the first ``extend``.

    The system caches used pages in memory and writes the rest to disk, so the buffer may be larger than the memory.
    Disk space is reserved in advance. Existing maps stay valid even after files are removed.

    A buffer with this storage can be passed to other processes, by ``fork`` or ``spawn``, after its first extend: all
    of them read and extend the same rows. This requires a stateless sampler and writer, and no trajectory index: not
    `SliceSampler` or ``compact_obs``. With these the buffer only works in the process that created it and raises in
    others.

    Args:
        max_size: number of rows; with ``ndim`` of 2 or more, of all lanes together, rounded up to whole steps.
        scratch_dir: folder of the files, made if it is not there; they stay. Default: a new folder among the
            temporary ones, which the process that made it removes when the storage is dropped or the process ends.
        device: only ``"cpu"``.
        ndim: number of batch dimensions, as in `LazyTensorStorage`.
        existsok: overwrite files in ``scratch_dir``; by default they are an error.
        compact_obs: as in `LazyTensorStorage`; ends of trajectories have a file of their own.
        frame_stack: as in `LazyTensorStorage`; the frames are in files, the numbers of each row's frames (4 bytes per
            frame of the stack) in memory, so only one process can use the buffer.
        codec: not for files: use `LazyTensorStorage`.
        auto_cleanup: remove the files when the storage is dropped or the process ends, default only temporary ones.
        compilable: see `Storage`.

    Raises:
        ValueError: another device, a ``codec``, ``max_size`` or ``ndim`` below 1.
        FileExistsError: ``scratch_dir`` holds the files of a storage (here or at the first extend).
        OSError: at the first extend, if the disk has no space for the rows. Nothing is left behind.

    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyMemmapStorage(10))
    >>> rows = buffer.extend(TensorDict({"a": torch.arange(4.0), "next": {"reward": torch.ones(4)}}, [4]))
    >>> buffer[:]["a"], sorted(path.name for path in buffer.storage.folder.glob("*.memmap"))
    (tensor([0., 1., 2., 3.]), ['a.memmap', 'next.reward.memmap'])
    """

    by_reference = True
    copies_rows = True

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compact_obs: bool = False,
        frame_stack: Mapping[NestedKey, int] | None = None,
        codec: Mapping[NestedKey, str] | None = None,
        auto_cleanup: bool | None = None,
        compilable: bool = False,
    ) -> None:
        if check_device("device", device).type != "cpu":
            raise ValueError(
                f"device must be 'cpu' for files, got {str(device)!r}: move samples with transform=lambda td: "
                f"td.to({str(device)!r}), or use LazyTensorStorage(device={str(device)!r})"
            )
        super().__init__(max_size, device=device, ndim=ndim, compact_obs=compact_obs)
        check_flags(existsok=existsok, compilable=compilable)
        if auto_cleanup is not None:
            check_flags(auto_cleanup=auto_cleanup)
        if codec is not None:
            check_type("codec", codec, Mapping, "a dict or None")
        if codec:
            raise ValueError(
                f"codec={dict(codec)!r} is not supported for files: use LazyTensorStorage(codec=...), whose "
                "rows take less memory, or leave it out"
            )

        self._encodings = Encodings(frame_stack)
        self.frame_stack = self._encodings.frame_stack
        self.shares = bool(self.frame_stack)

        if scratch_dir is None:
            self.scratch_dir = None
        else:
            self.scratch_dir = check_path("scratch_dir", scratch_dir).absolute()
        self.existsok = existsok
        if auto_cleanup is None:
            auto_cleanup = scratch_dir is None
        self.auto_cleanup = auto_cleanup

        self.folder: Path | None = None  # folder of the files, once they exist
        # uint8: the ring's counters in a file; None before the first extend.
        self._counters: Array | None = None
        self._unshareable: str | None = None  # name of a component that other processes cannot share
        self._has_buffer = False
        self._large = False  # whether most rows are likely to be on disk only

        if self.scratch_dir is not None:
            self._refuse_old([self.scratch_dir / _COUNTERS])

    @override
    def _allocate(self, like: RowForm) -> dict[NestedKey, Column]:
        size = self._encodings.row_bytes(like)
        instead = ["another scratch_dir"]
        if not self.compact_obs:
            instead.append("compact_obs=True")
        if not self.frame_stack:
            instead.append("frame_stack for images")

        names = file_names(like)
        old: list[Path] = []
        if self.scratch_dir is None:
            folder = Path(tempfile.gettempdir())
            made = True
        else:
            folder = self.scratch_dir
            made = not folder.exists()
            old = self._refuse_old(_files(folder, names.values()))

        # Old files are removed first and free their space: st_blocks counts 512-byte blocks in use.
        freed = sum(file.stat().st_blocks * 512 for file in old)
        check_disk(self.capacity, size, folder, instead, freed)

        if self.scratch_dir is None:
            folder = Path(tempfile.mkdtemp(prefix="flatroll-"))
        folder.mkdir(parents=True, exist_ok=True)
        own_folder = folder if made else None
        files = _files(folder, names.values())
        try:
            columns = self._create_files(like, folder, names, files)
        except BaseException as error:  # also Ctrl-C: leave no file behind
            remove_files(files, own_folder, os.getpid())
            if isinstance(error, OSError) and error.errno in FULL:
                available = f"the disk of {folder} is full ({error.strerror})"
                raise OSError(error.errno, refusal(self.capacity, size, available, instead)) from None
            raise

        self._large = self.capacity * size > free_memory(self.device)
        self.folder = folder
        if self.auto_cleanup:  # `files` is extended later when a pool of frames grows
            weakref.finalize(self, remove_files, files, own_folder, os.getpid())
        return columns

    def _create_files(
        self,
        like: RowForm,
        folder: Path,
        names: Mapping[NestedKey, str],
        files: list[Path],
    ) -> dict[NestedKey, Column]:
        """Create the files, after old ones of the same names are removed, and map the columns and the counters."""
        for file in files:
            file.unlink(missing_ok=True)  # other mappings of it stay valid

        for key, (dtype, shape) in like.items():  # reserve all space before anything is written
            if key not in self.frame_stack:
                reserve(folder / names[key], self.capacity * math.prod(shape) * dtype.itemsize)
        reserve(folder / _COUNTERS, _COUNTER_BYTES)
        (folder / _LOCK).touch(mode=0o600)

        columns: dict[NestedKey, Column] = {}
        for key, (dtype, shape) in like.items():
            path = folder / names[key]
            stack = self.frame_stack.get(key)
            if stack is None:
                columns[key] = MappedColumn(path, self.capacity, dtype, shape)
            else:
                make = partial(frames_in_file, path, itertools.count(), files)
                columns[key] = FrameColumn(self.capacity, stack, shape, dtype, make=make)

        self._counters = np.frombuffer(mapped_bytes(folder / _COUNTERS, _COUNTER_BYTES), np.uint8)
        return columns

    @override
    def _blank_column(self, key: NestedKey, dtype: torch.dtype, shape: torch.Size) -> Column:
        return self._encodings.column(key, 0, dtype, shape, self.device)

    def _refuse_old(self, files: Iterable[Path]) -> list[Path]:
        """Those of ``files`` that exist; FileExistsError if there are any, unless ``existsok``."""
        old = [file for file in files if file.exists()]
        if old and not self.existsok:
            raise FileExistsError(
                f"{old[0]} already exists: pass another scratch_dir, or existsok=True to overwrite such files"
            )
        return old

    @override
    def read_rows(
        self,
        slots: Tensor,
        follow: Follow | None = None,
        *,
        keys: frozenset[NestedKey] | None = None,
    ) -> Columns:
        if self._large:  # otherwise the rows are in memory anyway, and prefetching only costs time
            wanted = slots.numpy()
            if follow is not None:  # compact storage also reads the following rows, for next observations
                wanted = np.concatenate([wanted, follow.slots.numpy()])
            wanted = np.unique(wanted[wanted >= 0])

            for key, column in self.columns.items():
                if isinstance(column, MappedColumn) and (keys is None or key in keys):
                    column.prefetch(wanted)

        return super().read_rows(slots, follow, keys=keys)

    @override
    def write_lock(self) -> AbstractContextManager[Any]:
        # Held by one thread of one process at a time. The file exists from the first extend on.
        return FileLock(lambda: None if self.folder is None else self.folder / _LOCK)

    @override
    def use_ring(self, ring: Ring, alone: str | None, first: bool = False) -> None:
        if first and self._has_buffer:
            raise ValueError("the storage already belongs to another buffer: make one for each buffer")

        if alone is None and self.frame_stack:
            alone = "a frame_stack"
        self._unshareable = alone
        self._has_buffer = True

        # Move the ring's counters to the file, so that other processes see which rows are stored.
        if self._unshareable is None and self._counters is not None:
            ring.move(self._counters)

    @override
    def reattach(self, ring: Ring) -> None:
        if self._has_buffer and self._unshareable is None and self._counters is not None:
            ring.adopt(self._counters)

    @override
    def enter_process(self) -> None:
        if not self.columns:
            raise RuntimeError(
                "the storage has no files yet, so other processes would make their own: extend the buffer once "
                "before passing it on, or make it in the process that uses it"
            )

        if self._unshareable is not None:
            raise RuntimeError(
                f"the buffer has {self._unshareable}, which other processes cannot see: pass state_dict(), or "
                "share a buffer with RandomSampler, RoundRobinWriter and compact_obs=False"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A copy for another process maps the same files, which remain the owner's to remove.
        self.enter_process()  # raises if the copy would not work there
        return super().__getstate__() | {"_counters": None, "auto_cleanup": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        assert self.folder is not None
        self._counters = np.frombuffer(mapped_bytes(self.folder / _COUNTERS, _COUNTER_BYTES), np.uint8)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LazyMemmapStorage":
        """Return a separate copy in temporary files; TypeError if it has a frame stack. The buffer holds the lock."""
        if self.frame_stack:
            raise TypeError("frame stacks in files cannot be copied: load state_dict() into another buffer")

        other = LazyMemmapStorage(self.max_size, ndim=self.ndim, compact_obs=self.compact_obs)
        other.lanes = self.lanes
        other.structure = self.structure
        other._has_buffer = self._has_buffer
        other._unshareable = self._unshareable

        if self.columns:
            other.columns = other._allocate(self.tables(0)["like"])
            if self._counters is not None and other._counters is not None:
                other._counters[:] = self._counters

            pairs = [(self.columns, other.columns)]
            if self.pool is not None:
                other.pool = NextPool(list(self.pool.pairs))
                other.pool.allocate(other.columns, self.pool.lossy)
                pairs.append((self.pool.entries, other.pool.entries))

            for source, target in pairs:
                for key, column in source.items():
                    assert isinstance(column, TensorColumn)
                    target[key].load_state_dict({"values": column.data})

        return other

    @override
    def state_dict(self, rows: int, pool_rows: int = 0) -> dict[str, Any]:
        """Return the rows as copies in memory; MemoryError if they do not fit."""
        check_memory(rows, self.bytes_per_row, self.device, ())
        return super().state_dict(rows, pool_rows)


def _files(folder: Path, names: Iterable[str]) -> list[Path]:
    """All files of a storage, except further files of frames."""
    columns = [folder / name for name in names]
    pools = [column.with_suffix(".pool") for column in columns]
    return [*columns, *pools, folder / _COUNTERS, folder / _LOCK]


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
        # Only needed for `prefetch`: the tensor itself keeps the mapping alive.
        self._memory: mmap.mmap | None = None
        size = rows * math.prod(shape) * dtype.itemsize
        if size:
            self._memory = mapped_bytes(path, size)
            as_bytes = torch.from_numpy(np.frombuffer(self._memory, np.uint8))
            super().__init__(as_bytes.view(dtype).view(rows, *shape))
        else:  # an empty file cannot be mapped
            super().__init__(torch.empty((rows, *shape), dtype=dtype))

    @override
    def pool(self) -> "MappedColumn":
        # Next observations that no row holds go to a separate file next to the column's.
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
            self._memory = larger._memory
            self.data = larger.data

    def prefetch(self, slots: Array) -> None:
        """Ask the system to read the rows in ``slots`` (int64, ascending) from disk, all at once."""
        size = self.value_bytes
        if self._memory is None or not len(slots):
            return

        # One request for each group of rows less than a page apart, beginning at a page boundary.
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
    files.append(path)  # before it is created, so that a partly written file is removed as well

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

        self._thread.acquire()  # flock does not exclude threads of the same process
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

        file = self._file
        self._file = None
        if file is not None:
            # Closing alone is not enough if a fork has a copy of the descriptor.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

        self._thread.release()  # last, because the next thread sets _file


def file_names(keys: Iterable[NestedKey]) -> dict[NestedKey, str]:
    """Return a distinct file name for each key, even for keys that would give the same name.

    >>> file_names([("next", "observation"), "next.observation", "A", "a"])  # doctest: +NORMALIZE_WHITESPACE
    {('next', 'observation'): 'next.observation.memmap', 'next.observation': 'next%2Eobservation.memmap',
    'A': 'A.memmap', 'a': 'a~1.memmap'}
    """
    names: dict[NestedKey, str] = {}
    taken: set[str] = set()
    for key in keys:
        # "." joins the names of a nested key and "~" numbers equal stems, so names must contain neither.
        parts = [quote(part, safe="").replace(".", "%2E").replace("~", "%7E") for part in as_tuple(key)]
        stem = ".".join(parts)[:180]  # file names are limited to 255 bytes

        name = stem
        for number in itertools.count(1):
            if name.casefold() not in taken:  # some file systems ignore case
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
        if length < size:  # accessing memory beyond the end of the file would kill the process
            raise ValueError(f"{path} has {shown_size(length)}, expected {shown_size(size)}")
        return mmap.mmap(file, size)
    finally:
        os.close(file)  # the mapping stays valid


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is gone: the process that created the buffer has deleted it or ended. Keep the buffer "
            "there, or give LazyMemmapStorage a scratch_dir, whose files stay"
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
        with suppress(OSError):  # not empty: it contains files of the caller
            folder.rmdir()
