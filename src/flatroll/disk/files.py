"""All file operations: the other modules of this package access files only through these functions.

A test replaces them one by one: it records a save, replays the record up to any point, and makes any operation fail.
Therefore other modules call ``files.write(...)`` and do not import the functions by name.
"""

import ctypes
import errno
import fcntl
import io
import mmap
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Buffer, override

#: Suffix of a file being written. A leftover file with it comes from a process that died.
TEMPORARY = ".temporary"
# Maximum bytes per read or write call: Linux truncates longer ones at 2 GiB.
_AT_ONCE = 1 << 30
_SYSTEM = ctypes.CDLL(None)  # the C library
_ADDRESS = ctypes.c_void_p
# AT_FDCWD and the exchange flag for renameat2 (Linux) and renameatx_np (macOS).
_THIS_FOLDER = -100 if sys.platform == "linux" else -2
_EXCHANGE = 2


def make_folder(path: Path, *, synced: bool) -> None:
    """Make a folder and its missing parents, which survive a power loss if ``synced``; NotADirectoryError if one of
    them is a file."""
    if path.is_dir():
        return
    if path.exists():
        raise NotADirectoryError(
            errno.ENOTDIR, "a file already has the name of this folder: choose another name", str(path)
        )

    make_folder(path.parent, synced=synced)
    with suppress(FileExistsError):
        os.mkdir(path)
    if synced:
        sync_folder(path.parent)


def create(path: Path) -> int:
    """Make a new file and return its descriptor, open for writing; FileExistsError if there is one."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: Buffer) -> None:
    """Write all bytes of ``data`` where the last write ended."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest[:_AT_ONCE]) :]


def sync(descriptor: int) -> None:
    """Sync the contents of a file to disk."""
    if sys.platform == "darwin":  # on macOS fsync leaves them in the disk's cache
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Close a descriptor."""
    os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a file atomically."""
    os.rename(source, target)


def replace(source: Path, target: Path, old: Path) -> None:
    """Replace a folder with another one; the replaced folder is renamed to ``old``.

    At once where the system exchanges names. Elsewhere a crash between two renames leaves ``old`` alone.
    """
    function = "renameat2" if sys.platform == "linux" else "renameatx_np"
    swap = getattr(_SYSTEM, function, None)
    names = os.fsencode(source), os.fsencode(target)

    if swap is not None and not swap(_THIS_FOLDER, names[0], _THIS_FOLDER, names[1], _EXCHANGE):
        rename(source, old)
    else:
        rename(target, old)
        rename(source, target)


def link(source: Path, target: Path) -> None:
    """Hard-link a file."""
    os.link(source, target)


def remove(path: Path) -> None:
    """Remove a file; existing maps stay valid."""
    os.unlink(path)


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(path: Path) -> None:
    """Sync a file, or a folder with all its contents, to disk."""
    for one in [*path.rglob("*"), path]:
        descriptor = os.open(one, os.O_RDONLY | os.O_CLOEXEC)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)


def lock(path: Path) -> int:
    """Create a file if needed, lock it and return the descriptor; BlockingIOError if it is locked.

    The system gives the lock back when the descriptor and its copies in forked processes are closed; see `unlock`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def unlock(descriptor: int) -> None:
    """Release a lock, even if other processes have copies of the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def names(path: Path) -> list[str]:
    """List the names in a folder, sorted; names of subfolders end in ``/``."""
    with os.scandir(path) as entries:
        return sorted(entry.name + "/" * entry.is_dir(follow_symlinks=False) for entry in entries)


def open_to_read(path: Path) -> tuple[int, int]:
    """Open a file and return its descriptor and size; OSError if it is a link, a pipe or a device."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "not a regular file", str(path))
    return descriptor, status.st_size


def read_into(descriptor: int, position: int, target: Buffer) -> None:
    """Fill ``target`` with the bytes of a file from ``position`` on; EOFError if it ends before."""
    rest = memoryview(target).cast("B")
    while rest:
        count = os.preadv(descriptor, [rest[:_AT_ONCE]], position)
        if not count:
            raise EOFError("the file ends too early")
        rest = rest[count:]
        position = position + count


def map_file(descriptor: int, size: int) -> Tensor:
    """Map the first ``size`` bytes of a file as uint8 ``[size]``, copy-on-write.

    No descriptor stays open, as it does with Python's own `mmap` (before 3.13).
    """
    # Map the open file: the name may belong to another one by now.
    mapped = torch.from_file(f"/dev/fd/{descriptor}", shared=False, size=size, dtype=torch.uint8)
    # Access is random: readahead would read unused pages.
    _SYSTEM.madvise(ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(size), mmap.MADV_RANDOM)
    return mapped


def will_need(mapped: Tensor, begin: int, length: int) -> None:
    """Ask the system to read bytes of a map from disk without waiting for them; ``begin`` is the start of a page."""
    address = ctypes.c_void_p(mapped.data_ptr() + begin)
    _SYSTEM.madvise(address, ctypes.c_size_t(length), mmap.MADV_WILLNEED)


def in_memory(mapped: Tensor, begin: int) -> bool:
    """Return whether the page of a map at ``begin`` is in memory."""
    resident = ctypes.c_ubyte(1)  # default if the system does not report it
    _SYSTEM.mincore(_ADDRESS(mapped.data_ptr() + begin), 1, ctypes.byref(resident))
    return bool(resident.value & 1)


def publish(folder: Path, name: str, chunks: Iterable[Buffer], *, synced: bool, named: bool = True) -> None:
    """Write a file atomically: an interrupted write leaves no file.

    Args:
        folder: folder of the file.
        name: an unused name.
        chunks: the bytes.
        synced: flush the file to disk before returning.
        named: also flush its name; if False, call `sync_folder` once for several files.

    Raises:
        OSError: the disk is full or failed. The file is removed: a retry must write it again, since the system may
            drop what a failed fsync did not write.
    """
    temporary = folder / f"{name}{TEMPORARY}"
    path = folder / name
    made = [temporary]

    try:
        descriptor = create(temporary)
        try:
            for chunk in chunks:
                write(descriptor, chunk)
            if synced:
                sync(descriptor)
        finally:
            close(descriptor)
        rename(temporary, path)
        made.append(path)
        if synced and named:
            sync_folder(folder)
    except BaseException:
        for leftover in made:
            with suppress(OSError):
                remove(leftover)
        raise


class SteadyFile(io.RawIOBase):
    """A new file for a library with random access that cannot handle disk errors.

    HDF5 keeps objects of a file that it could not write, and touches freed memory later: the process ends. So the first
    error is kept for `check`. What is written from then on stays in memory and can be read back; call `check` often.
    The file is locked, which tells it from one that was left by a process that died.

    Args:
        path: of the file.
    """

    _descriptor = -1  # until the file is locked

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._descriptor = lock(path)
        self._position = 0
        self._end = 0
        self._failure: BaseException | None = None
        self._unwritten: list[tuple[int, bytes]] = []  # offsets and bytes written since the failure, in order

    def check(self) -> None:
        """Raise the first recorded error."""
        if self._failure is not None:
            raise self._failure

    def sync(self) -> None:
        """Return once the contents are on the disk."""
        sync(self._descriptor)

    @override
    def close(self) -> None:
        if not self.closed and self._descriptor >= 0:
            close(self._descriptor)
        super().close()

    @override
    def readable(self) -> bool:
        return True

    @override
    def writable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        self._position = begin + offset
        return self._position

    @override
    def tell(self) -> int:
        return self._position

    @override
    def truncate(self, size: int | None = None, /) -> int:
        self._end = self._position if size is None else size
        if self._failure is None:
            with self._recording():
                os.ftruncate(self._descriptor, self._end)
        return self._end

    @override
    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes

        if self._failure is None:
            with self._recording():
                os.lseek(self._descriptor, self._position, os.SEEK_SET)
                write(self._descriptor, data)

        if self._failure is not None:
            self._unwritten.append((self._position, bytes(data)))

        self._position += size
        self._end = max(self._end, self._position)
        return size

    @override
    def readinto(self, target: Any, /) -> int:
        first = self._position
        view = memoryview(target).cast("B")
        view = view[: max(0, self._end - first)]
        view[:] = bytes(len(view))

        done = 0
        with self._recording():
            while done < len(view):
                got = os.preadv(self._descriptor, [view[done:]], first + done)
                if not got:
                    break
                done += got

        for at, data in self._unwritten:  # the part of [at, at + size) that is inside the view
            begin = max(at, first)
            end = min(at + len(data), first + len(view))
            if begin < end:
                view[begin - first : end - first] = data[begin - at : end - at]

        self._position += len(view)
        return len(view)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Record an error instead of raising it."""
        try:
            yield
        except BaseException as error:  # also Ctrl-C, which would leave HDF5 in a partial state
            self._failure = self._failure or error
