"""An open-addressing hash table of rows: compiled kernels.

A row is ``W`` 64-bit words. ``keys`` (int64 ``[capacity, W]``) holds the distinct rows in the order of their first
insertion, which numbers them, and ``hashes`` (uint64 ``[capacity]``) their hashes. ``table`` (int64 ``[2 ** k]``)
holds the numbers, -1 where it is empty; a row is looked for from the place ``hash & (2 ** k - 1)`` on, until its place
or an empty one is found. At most half of the places are taken.

This module imports numba: import it inside the function that needs it.
"""

from typing import Any

import numpy as np

from flatroll.kernels.compiled import Array, Int, compiled

# The steps of SplitMix64's output function (Steele, Lea and Flood 2014), and its odd increment.
_FIRST, _SECOND, _STEP = (np.uint64(x) for x in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))
_BITS_30, _BITS_27, _BITS_31 = np.uint64(30), np.uint64(27), np.uint64(31)


@compiled(inline="always")
def _mix(x: Any) -> Any:
    x = (x ^ (x >> _BITS_30)) * _FIRST
    x = (x ^ (x >> _BITS_27)) * _SECOND
    return x ^ (x >> _BITS_31)


@compiled()
def _hash_row(row: Array) -> Any:
    """The hash of one row: the mix of the sum of its words' mixes, each word with its position."""
    total, position = np.uint64(len(row)), np.uint64(0)
    for j in range(len(row)):
        position += _STEP
        total += _mix(np.uint64(row[j]) + position)
    return _mix(total)


@compiled()
def hash_rows(words: Array, hashes: Array) -> None:
    """Write the hash of each row of ``words`` (int64 ``[N, W]``) to ``hashes`` (uint64 ``[N]``)."""
    for i in range(len(words)):
        hashes[i] = _hash_row(words[i])


@compiled(inline="always")
def _same(a: Array, b: Array) -> Any:
    for j in range(len(a)):  # noqa: SIM110 (Numba compiles no generator into a plain loop)
        if a[j] != b[j]:
            return False
    return True


@compiled()
def find(table: Array, keys: Array, hashes: Array, words: Array, ids: Array) -> None:
    """Write the number of each row of ``words`` to ``ids``, -1 for an unknown one."""
    # The search stands in `insert`, too: as a function of its own, inlined or not, it takes 1.7 times as long.
    mask = np.uint64(len(table) - 1)
    for i in range(len(words)):
        wanted = _hash_row(words[i])
        place = np.int64(wanted & mask)
        while table[place] >= 0:
            at = table[place]
            if hashes[at] == wanted and _same(keys[at], words[i]):
                break
            place = (place + 1) & np.int64(mask)
        ids[i] = table[place]


@compiled()
def insert(table: Array, keys: Array, hashes: Array, count: Int, words: Array, ids: Array) -> Int:
    """Number the rows of ``words``: a known row gets its number, a new one is stored under the next number.

    Returns:
        the new count of rows. ``keys`` and half of ``table`` must hold ``count + len(words)`` rows.
    """
    mask = np.uint64(len(table) - 1)
    for i in range(len(words)):
        wanted = _hash_row(words[i])
        place = np.int64(wanted & mask)
        while table[place] >= 0:
            at = table[place]
            if hashes[at] == wanted and _same(keys[at], words[i]):
                break
            place = (place + 1) & np.int64(mask)
        if table[place] < 0:
            table[place] = count
            hashes[count] = wanted
            for j in range(words.shape[1]):
                keys[count, j] = words[i, j]
            count += 1
        ids[i] = table[place]
    return count


@compiled()
def rebuild(table: Array, hashes: Array, count: Int) -> None:
    """Enter the first ``count`` rows, all different, into an empty ``table``."""
    mask = np.uint64(len(table) - 1)
    for number in range(count):
        place = np.int64(hashes[number] & mask)
        while table[place] >= 0:
            place = (place + 1) & np.int64(mask)
        table[place] = number
