"""`Memory`: a piece of memory without a name that processes share by its file descriptor."""

import mmap
import os
import sys
import tempfile
from typing import NoReturn

import psutil


class Memory:
    """Bytes that several processes read and write, named by nothing but a file descriptor.

    It cannot leak or clash: the system frees it when the last process that has it open or mapped is gone, killed or
    not. On Linux it is a ``memfd``, elsewhere a temporary file that is unlinked at once.

    A forked process has it as it is. Any other process gets it in a message of a `Channel`.

    Args:
        size: number of bytes, all 0 at first.

    Raises:
        MemoryError, OSError: there is no room for so much.

    >>> memory = Memory(16)
    >>> memory.map[3:5] = b"ab"
    >>> Memory.from_descriptor(os.dup(memory.fileno())).map[3:5]
    b'ab'
    """

    #: The mapped bytes. They stay as long as an array or tensor looks at them.
    map: mmap.mmap

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size is a number of bytes of at least 1, got {size}")
        descriptor = _anonymous_file(size)
        try:
            os.ftruncate(descriptor, size)
            self._open(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def from_descriptor(cls, descriptor: int) -> "Memory":
        """Map what another process made; the descriptor belongs to the result from here on."""
        memory = cls.__new__(cls)
        memory._open(descriptor)
        return memory

    def _open(self, descriptor: int) -> None:
        # The size is the file's own: no message from another process can make it larger than what is there.
        self.map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._descriptor = descriptor

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self.map)

    def fileno(self) -> int:
        """The file descriptor, open as long as this object lives."""
        return self._descriptor

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def __reduce__(self) -> NoReturn:
        raise TypeError("shared memory has no name that a pickle could hold: send it through a Channel")


def _anonymous_file(size: int) -> int:
    """Descriptor of an empty file that no folder lists; an error if ``size`` bytes will not fit there."""
    if sys.platform == "linux":
        free = int(psutil.virtual_memory().available)
        if size > free:
            raise MemoryError(f"{size:,} bytes of shared memory were asked for, {free:,} are free")
        return os.memfd_create("flatroll")  # a label for /proc: nothing can be opened by it
    with tempfile.TemporaryFile(prefix="flatroll") as file:
        disk = os.fstatvfs(file.fileno())
        free = disk.f_bavail * disk.f_frsize
        if size > free:  # a file with holes would end the process with SIGBUS when it is written to
            folder = tempfile.gettempdir()
            raise OSError(f"{size:,} bytes of shared memory were asked for, {free:,} are free in {folder}")
        return os.dup(file.fileno())
