"""Checksums of the bytes of a tensor, taken piece by piece: crc32 of small ones, XXH64 of large ones."""

import zlib
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from typing_extensions import override

#: Bytes from which on a tensor has the checksum that is several times as fast, and needs compiled code.
LARGE = 1 << 18


class Checksum(NamedTuple):
    """A checksum.

    Args:
        kind: ``"crc32"`` or ``"xxh64"``.
        value: the number.
    """

    kind: str
    value: int


class Running(ABC):
    """A checksum of the bytes so far."""

    kind: str

    @abstractmethod
    def update(self, data: memoryview) -> None:
        """Take more bytes."""

    @property
    @abstractmethod
    def value(self) -> int:
        """The number."""

    @property
    def checksum(self) -> Checksum:
        """The checksum of all bytes so far."""
        return Checksum(self.kind, self.value)


class Crc32(Running):
    """zlib's."""

    kind = "crc32"

    def __init__(self) -> None:
        self._value = 0

    @override
    def update(self, data: memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    @property
    @override
    def value(self) -> int:
        return self._value


class Xxh64(Running):
    """xxHash's with 64 bits, which keeps up with memory.

    >>> running = Xxh64()
    >>> running.update(memoryview(b"ab")), running.update(memoryview(b"c"))
    (None, None)
    >>> f"{running.value:x}"
    '44bc2cf5ad770999'
    """

    kind = "xxh64"

    def __init__(self) -> None:
        from flatroll.kernels.rows.checksum import new_state  # numba

        self._state = new_state()

    @override
    def update(self, data: memoryview) -> None:
        from flatroll.kernels.rows.checksum import absorb  # numba

        if len(data):
            absorb(self._state, np.frombuffer(data, np.uint8).ctypes.data, len(data))

    @property
    @override
    def value(self) -> int:
        from flatroll.kernels.rows.checksum import digest  # numba

        return int(digest(self._state))


KINDS: dict[str, type[Running]] = {kind.kind: kind for kind in (Crc32, Xxh64)}


def begin(size: int) -> Running:
    """The checksum that a tensor of so many bytes is written with, before its first byte.

    >>> begin(LARGE - 1).kind, begin(LARGE).kind
    ('crc32', 'xxh64')
    """
    return Xxh64() if size >= LARGE else Crc32()
