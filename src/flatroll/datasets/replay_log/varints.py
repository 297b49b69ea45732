"""Varints: whole numbers as 7 bits a byte (LEB128), so that small ones take one byte."""

import numpy as np
import numpy.typing as npt

from flatroll.disk.tensor_file import DamagedFileError

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_BITS = 7
_MORE = 128  # the bit of a byte that another one follows
_LONGEST = 10  # bytes of a number of 64 bits


def encode_varints(numbers: npt.ArrayLike) -> bytes:
    """Return numbers ``[n]`` of int64 as bytes; the nearer to 0, the fewer.

    >>> encode_varints([0, -1, 63, 64]).hex(" ")
    '00 01 7e 80 01'
    """
    signed = np.asarray(numbers, np.int64)
    # Zigzag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
    values = ((signed << 1) ^ (signed >> 63)).view(np.uint64)

    # Column k has bits 7 k to 7 k + 6 of each number, and all above them in ``left``.
    shifts = np.arange(0, _BITS * _LONGEST, _BITS, dtype=np.uint64)
    left = values[:, None] >> shifts
    is_used = left > 0
    is_used[:, 0] = True
    table = (left & np.uint64(_MORE - 1)).astype(np.uint8)
    table[:, :-1] |= is_used[:, 1:] * np.uint8(_MORE)
    return table[is_used].tobytes()


def decode_varints(data: Bytes, count: int | None = None) -> tuple[Ints, int]:
    """Return the first ``count`` numbers that `encode_varints` wrote, or all, and the bytes that they take.

    Raises:
        DamagedFileError: they are fewer, or one has more than 64 bits.

    >>> decode_varints(np.frombuffer(encode_varints([5, -300, 2**62]) + b"rest", np.uint8), 3)
    (array([                  5,                -300, 4611686018427387904]), 13)
    """
    if count is not None:
        data = data[: count * _LONGEST]
    ends = np.flatnonzero(data < _MORE) + 1
    if count is None:
        count = len(ends)
        if len(data) and (not count or ends[-1] != len(data)):
            raise DamagedFileError("the last number of the log is cut")
    if count > len(ends):
        raise DamagedFileError("the log has fewer numbers than it says")
    if not count:
        return np.zeros(0, np.int64), 0

    ends = ends[:count]
    begins = np.concatenate([[0], ends[:-1]])
    lengths = ends - begins
    if lengths.max() > _LONGEST:
        raise DamagedFileError("a number of the log has more than 64 bits")

    used = int(ends[-1])
    places = np.arange(used) - np.repeat(begins, lengths)
    parts = (data[:used] & (_MORE - 1)).astype(np.uint64) << (_BITS * places).astype(np.uint64)
    values = np.add.reduceat(parts, begins)
    half = (values >> np.uint64(1)).view(np.int64)
    numbers: Ints = half ^ -(values & np.uint64(1)).view(np.int64)
    return numbers, used
