"""An open-addressing hash table of rows: compiled kernels.

A row is ``W`` 64-bit words. ``keys`` (int64 ``[capacity, W]``) holds the distinct rows, numbered in the order of their
first insertion, and ``hashes`` (uint64 ``[capacity]``) their hashes. ``table`` (int32 or int64 ``[2 ** k]``) holds the
numbers plus one, 0 in empty entries, so that new memory is an empty table; a row is searched from entry
``hash & (2 ** k - 1)`` on, until its entry or an empty one is found. At most half of the entries are used. Kernels take
the record ``table, keys, hashes``.

This module imports numba: import it inside the function that needs it.
"""

from typing import Any, TypeAlias

import numpy as np

from flatroll.kernels.compiled import Array, Int, compiled, helper

# The steps of SplitMix64's output function (Steele, Lea and Flood 2014), and its odd increment.
_FIRST, _SECOND, _STEP = (np.uint64(x) for x in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))
_BITS_30 = np.uint64(30)
_BITS_27 = np.uint64(27)
_BITS_31 = np.uint64(31)
_BITS_32 = np.uint64(32)

# Floating-point numbers of 4 and 8 bytes as words: the sign bit, infinity, and the NaN that torch writes.
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_LOW = np.uint64(0xFFFFFFFF)
_SIGN_4, _INF_4, _NAN_4 = (np.uint64(x) for x in (0x80000000, 0x7F800000, 0x7FC00000))
_SIGN_8, _INF_8, _NAN_8 = (np.uint64(x) for x in (1 << 63, 0x7FF << 52, 0xFFF << 51))

Tables: TypeAlias = tuple[Array, Array, Array]


@compiled(inline="always")
def _mix(x: np.uint64) -> Any:
    x = (x ^ (x >> _BITS_30)) * _FIRST
    x = (x ^ (x >> _BITS_27)) * _SECOND
    return x ^ (x >> _BITS_31)


@helper
def _hash_row(row: Array) -> Any:
    """Return the hash of one row: the mix of the sum of its words' mixes, each word with its position."""
    total = np.uint64(len(row))
    position = np.uint64(0)
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


@compiled(inline="always")
def _plain_word(word: np.uint64, floats: int) -> Any:
    """Return a word of ``floats``-byte numbers with -0.0 replaced by 0.0 and all NaNs by one; unchanged if it is 0."""
    if floats == 8:
        if word == _SIGN_8:
            return _ZERO
        if word & ~_SIGN_8 > _INF_8:
            return _NAN_8
        return word

    if floats == 4:
        low = word & _LOW
        high = word >> _BITS_32
        if low & ~_SIGN_4 > _INF_4:
            low = _NAN_4
        elif low == _SIGN_4:
            low = _ZERO

        if high & ~_SIGN_4 > _INF_4:
            high = _NAN_4
        elif high == _SIGN_4:
            high = _ZERO

        return low | high << _BITS_32
    return word


@compiled()
def number_rows(
    tables: Tables,
    count: Int,
    words: Array,
    floats: Int,
    extend: bool,
    ids: Array,
    row_hashes: Array,
) -> Int:
    """Write the number of each row of ``words`` to ``ids`` and its hash to ``row_hashes``.

    A known row gets its number. A new one is stored under the next number if ``extend``, else it gets -1. ``floats``
    is the size in bytes of the floating-point numbers in the words, 0 if there are none to normalise.

    Returns:
        the new number of rows. With ``extend``, ``keys`` and half of ``table`` must have room for
        ``count + len(words)`` rows.
    """
    table, keys, hashes = tables
    mask = np.uint64(len(table) - 1)
    row = np.empty(words.shape[1], np.int64)

    for i in range(len(words)):
        for j in range(len(row)):
            row[j] = np.int64(_plain_word(np.uint64(words[i, j]), floats))
        wanted = _hash_row(row)

        place = wanted & mask
        at = np.int64(table[place]) - 1
        while at >= 0 and not (hashes[at] == wanted and _same(keys[at], row)):
            place = (place + _ONE) & mask
            at = np.int64(table[place]) - 1

        if extend and at < 0:
            at = np.int64(count)
            table[place] = at + 1
            hashes[count] = wanted
            for j in range(len(row)):
                keys[count, j] = row[j]
            count += 1

        ids[i] = at
        row_hashes[i] = wanted
    return count


@compiled()
def number_edges(
    states: Tables,
    pairs: Tables,
    edges: Tables,
    counts: Array,
    now: tuple[Array, Int],
    later: tuple[Array, Int],
    pair_words: Array,
    made: Array,
) -> Int:
    """Number the states of N transitions, their pairs of state and action, and the transitions themselves.

    Args:
        states, pairs, edges: the tables of each, with room for 2 N, N and N rows.
        counts: int64 ``[3]``, the numbers of states, pairs and edges; updated.
        now, later: words of the states before and after (int64 ``[N, W]``), each with ``floats`` of
            :func:`number_rows`.
        pair_words: int64 ``[N, 1 + A]``, words of the actions; column 0 becomes the state's number.
        made: int64 ``[5, N]``, becomes the numbers of each row's source, target, pair and edge, and in its last row
            the first row of each new edge.

    Returns:
        the number of new edges.
    """
    words_now, floats_now = now
    words_later, floats_later = later

    rows = len(words_now)
    before = counts[2]
    hashes = np.empty(rows, np.int64)
    words = np.empty((rows, 2), np.int64)

    counts[0] = number_rows(states, counts[0], words_now, floats_now, True, made[0], hashes)
    counts[0] = number_rows(states, counts[0], words_later, floats_later, True, made[1], hashes)

    pair_words[:, 0] = made[0]
    counts[1] = number_rows(pairs, counts[1], pair_words, 0, True, made[2], hashes)

    words[:, 0] = made[2]
    words[:, 1] = made[1]

    counts[2] = number_rows(edges, counts[2], words, 0, True, made[3], hashes)

    new = 0
    for i in range(rows):
        if made[3, i] == before + new:  # numbers follow the order of first occurrence
            made[4, new] = i
            new += 1

    return new


@compiled()
def count_edges(numbers: Array, rewards: Array, before: Int, new: Int, made: Array, reward: Array) -> None:
    """Record ``new`` edges from number ``before`` on, and count the N transitions.

    Args:
        numbers: int64 ``[4, room]``: source, target, pair and count of each edge.
        rewards: float64 ``[room]``, the sum of its rewards.
        made: from :func:`number_edges`.
        reward: float64 ``[N]``.
    """
    for j in range(new):
        for k in range(3):
            numbers[k, before + j] = made[k, made[4, j]]
        numbers[3, before + j] = 0
        rewards[before + j] = 0.0

    for i in range(made.shape[1]):
        numbers[3, made[3, i]] += 1
        rewards[made[3, i]] += reward[i]


@compiled()
def rebuild(table: Array, hashes: Array, count: Int) -> None:
    """Enter the first ``count`` rows, all different, into an empty ``table``."""
    mask = np.uint64(len(table) - 1)
    for number in range(count):
        place = np.int64(hashes[number] & mask)
        while table[place]:
            place = (place + 1) & np.int64(mask)
        table[place] = number + 1
