"""Reads NumPy's ``.npy`` format in chunks from untrusted streams."""

import math
from typing import IO, Any

import numpy as np

from flatroll.datasets.formats.episodes import naming
from flatroll.layout.export import Array

_LONGEST_HEADER = 10_000  # bytes, as NumPy's own limit


class ArrayStream:
    """An array ``[N, ...]`` in a stream, read row by row; never allocates memory that the data do not fill.

    Args:
        stream: at its beginning; a file, a member of an archive, or a decompressor.
        name: for errors.
        max_bytes: the array may have no more.

    Raises:
        ValueError: the stream does not begin as NumPy writes arrays, or claims more than ``max_bytes``.
        TypeError: objects, which would be pickled, or text.

    >>> import io
    >>> file = io.BytesIO()
    >>> np.save(file, np.arange(5))
    >>> file.seek(0)
    0
    >>> rows = ArrayStream(file, "steps", 100)
    >>> rows.shape, rows.read(2), rows.read(9)
    ((5,), array([0, 1]), array([2, 3, 4]))
    """

    def __init__(self, stream: IO[bytes], name: str, max_bytes: int) -> None:
        self.name = name
        self._stream = stream
        with naming(name):
            shape, fortran, self.dtype = read_header(stream)

        if self.dtype.kind not in "biufc":
            raise TypeError(f"{name} must hold numbers or bools, got {self.dtype}")
        if not shape or (fortran and len(shape) > 1):
            raise ValueError(
                f"{name} must store rows one after another (C order), got shape {shape}, fortran={fortran!r}"
            )

        self.shape = shape
        self.rows = next(iter(shape))
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        # Empty rows take no bytes in the file, but one value per row is allocated later.
        claimed = self.rows * max(1, self._row_bytes)
        if claimed > max_bytes:
            raise ValueError(
                f"{name} claims {claimed} bytes, the maximum is {max_bytes}: the file is damaged, or max_bytes is "
                "too small"
            )

        self._read = 0

    def read(self, rows: int) -> Array:
        """Return the next rows, at most ``rows``; ValueError if the stream ends too early."""
        count = min(rows, self.rows - self._read)
        values = np.empty((count, *self.shape[1:]), self.dtype)
        into = memoryview(values.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        done = 0
        while done < len(into):
            with naming(self.name):
                piece = self._stream.read(min(len(into) - done, 1 << 20))
            if not piece:
                raise ValueError(f"{self.name} ends after row {self._read}, its header says {self.rows} rows")
            into[done : done + len(piece)] = piece
            done += len(piece)

        self._read += count
        native: Array = values.astype(self.dtype.newbyteorder("="), copy=False)
        return native


def read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, Any]:
    """Return the shape that a stream claims, whether the order is Fortran's, and the dtype."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream, max_header_size=_LONGEST_HEADER)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream, max_header_size=_LONGEST_HEADER)
    raise ValueError(f"it has version {version} of the format, supported are 1.0 and 2.0")


def read_whole(stream: IO[bytes], name: str, max_bytes: int) -> Any:
    """Return the array that a stream holds, and nothing after it."""
    array = ArrayStream(stream, name, max_bytes)
    return array.read(array.rows)
