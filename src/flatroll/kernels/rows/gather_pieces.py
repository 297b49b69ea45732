"""Copies rows of many columns that stand in several pieces of memory, such as mapped files, in one compiled call.

This module imports numba: import it inside the function that needs it.
"""

import numpy as np

from flatroll.kernels.compiled import Array, Int, compiled
from flatroll.kernels.rows.raw_memory import ask, copy_bytes, numbers

_AHEAD = 16  # stretches between asking for one and copying it
_LINES = 64  # cache lines asked for per stretch; the hardware foresees the rest of a longer one


@compiled()
def gather_pieces(
    firsts: Array, source: Array, ends: Array, size: Array, unit: Array, rows: Array, target: Array
) -> Int:
    """Copy row ``rows[i]`` of each of K columns to row i of the one at address ``target[k]``.

    Args:
        firsts: int64 ``[P + 1]``, ascending: piece p holds the rows ``firsts[p] ... firsts[p + 1] - 1``.
        source: int64 ``[P, K]``, address of each column in each piece.
        ends: int64 ``[P, K]``: 0 where each row has one value. Else the address of an int64 per row of the piece:
            the number of values up to and with that row, whose own are the last ones of these.
        size: int64 ``[K]``, bytes to copy per row.
        unit: int64 ``[K]``, bytes of a value where there are ``ends``.
        rows: int64 ``[N]``, numbers of rows.
        target: int64 ``[K]``, addresses of the copies.

    Returns:
        the position of a row that is in no piece, with nothing copied, or -1.
    """
    pieces = len(firsts) - 1
    # Neighbouring rows of a piece make a stretch; all row numbers are checked here.
    stretches = np.empty((len(rows), 4), np.int64)  # piece, first row in it, first position, rows
    count, piece, before = 0, 0, np.int64(-2)
    for i in range(len(rows)):
        row = rows[i]
        if row < firsts[0] or row >= firsts[pieces]:
            return i
        if row < firsts[piece] or row >= firsts[piece + 1]:
            piece, above = 0, pieces
            while above - piece > 1:
                middle = (piece + above) // 2
                if firsts[middle] <= row:
                    piece = middle
                else:
                    above = middle
            before = np.int64(-2)
        if row != before + 1:
            stretches[count, 0], stretches[count, 1] = piece, row - firsts[piece]
            stretches[count, 2], stretches[count, 3] = i, 0
            count += 1
        stretches[count - 1, 3] += 1
        before = row
    # Column by column; before a stretch is copied, one that is _AHEAD stretches later in that order is asked for.
    asked, following = 0, 0  # column and stretch to ask for next
    for k in range(-1, len(size)):
        for j in range(count if k >= 0 else min(_AHEAD, len(size) * count)):
            if asked < len(size):
                p = stretches[following, 0]
                if ends[p, asked] == 0:
                    first = source[p, asked] + stretches[following, 1] * size[asked]
                    for line in range(min(stretches[following, 3] * size[asked] + 63 >> 6, _LINES)):
                        ask(first + 64 * line)
                following += 1
                if following == count:
                    asked, following = asked + 1, 0
            if k < 0:
                continue
            p, first, position, length = stretches[j]
            to = target[k] + position * size[k]
            if ends[p, k] == 0:
                copy_bytes(to, source[p, k] + first * size[k], length * size[k])
                continue
            counts = numbers(ends[p, k] + 8 * first, length)
            for i in range(length):
                copy_bytes(to + i * size[k], source[p, k] + counts[i] * unit[k] - size[k], size[k])
    return -1
