"""Compiled kernels that find or draw the rows at which slices start.

The index is the record ``state, capacity, fragments, chains`` (`flatroll.kernels.rows.records`).

This module imports numba: import it inside the function that needs it.
"""

import numpy as np

from flatroll.kernels.compiled import Array, Int, Records, compiled, helper
from flatroll.kernels.rows.records import Index
from flatroll.kernels.slices.links import (
    draw_chain,
    fragment_holding,
    fragment_stop,
    place,
    row_in_slot_0,
    row_slot,
)


@helper
def _nearest_mark(
    state: Records, capacity: Int, fragments: Records, last: Int, marks: Array, offset: Int, limit: Int
) -> Int:
    """Return the marked row nearest to ``offset``, searching from it to ``limit`` (in either direction).

    Rows are offsets in the chain whose last fragment is ``last``; -1 if there is none.
    """
    slot_0 = row_in_slot_0(state, capacity)
    step = 1 if limit >= offset else -1
    number = fragment_holding(state, fragments, last, offset)

    while True:
        f = fragments[place(state, fragments, number)]
        row = f.first + offset - f.offset

        # the row number just beyond the fragment, in the direction of the search
        if step > 0:
            stop = fragment_stop(state, fragments, number)
        else:
            stop = f.first - 1

        while row != stop:
            if marks[row_slot(row, slot_0, capacity)]:
                return offset
            if offset == limit:
                return -1
            row += step
            offset += step

        if step > 0:
            number += f.next
        else:
            number -= f.prev


@helper
def _marked_start(
    state: Records,
    capacity: Int,
    fragments: Records,
    chain: Records,
    marks: Array,
    uniform: float,
    length: Int,
    strict: bool,
) -> Int:
    """Return the slot of a marked row of ``chain``, -1 if it has none; see :func:`draw_marked`."""
    low = chain.dropped
    high = chain.total
    last = chain.last
    full = max(high - length, low)  # the last row with ``length`` rows from it on, as an offset
    if high <= low or (strict and high - low < length):
        return -1

    # the last mark at which a slice may begin: the first from which a slice reaches the end of the chain,
    # else the last one before it
    final = np.int64(-1)
    if not strict:
        final = _nearest_mark(state, capacity, fragments, last, marks, full, high - 1)
    if final < 0:
        final = _nearest_mark(state, capacity, fragments, last, marks, full, low)
    if final < 0:
        return -1

    # rows are drawn up to the mark after that one
    end = high
    if final + 1 < high:
        after = _nearest_mark(state, capacity, fragments, last, marks, final + 1, high - 1)
        if after >= 0:
            end = after

    drawn = low + min(np.int64(uniform * (end - low)), end - low - 1)
    at = _nearest_mark(state, capacity, fragments, last, marks, drawn, low)
    if at < 0:
        at = _nearest_mark(state, capacity, fragments, last, marks, drawn, final)

    f = fragments[place(state, fragments, fragment_holding(state, fragments, last, at))]
    return row_slot(f.first + at - f.offset, row_in_slot_0(state, capacity), capacity)


@compiled()
def draw_marked(
    index: Index, tree: Array, uniform: Array, length: Int, strict: bool, marks: Array, starts: Array
) -> Int:
    """Draw start slots of slices among those with ``marks[slot]``; return how many were found.

    A chain is drawn by weight (if it has no such row, the next chain is used), then a row uniformly, and the slice
    begins at the last mark up to that row, or at the chain's first mark if the ring has dropped that one. The last
    start is the first mark whose slice reaches the end of the chain, or with ``strict`` the last mark with ``length``
    rows; rows are drawn up to the mark after it.

    Args:
        tree: Fenwick tree of the chains' weights.
        uniform: float64 in [0, 1), two per slice.
        length, strict: rows per slice, and whether shorter slices are excluded.
        marks: bool ``[capacity]``, by slot.
        starts: int64, the result.
    """
    state, capacity, fragments, chains = index
    used = state[0].slots

    for j in range(len(starts)):
        c, _ = draw_chain(tree, uniform[2 * j])

        slot = np.int64(-1)
        for _ in range(used):
            slot = _marked_start(
                state, capacity, fragments, chains[c], marks, uniform[2 * j + 1], length, strict
            )
            if slot >= 0:
                break
            c += 1
            if c >= used:
                c = 0

        if slot < 0:
            return j
        starts[j] = slot

    return len(starts)


@compiled()
def slice_partition(
    index: Index, begin: Array, length: Int, again: bool, strict: bool, partition: Array
) -> Int:
    """Split each trajectory into slices that do not overlap; return the number of slices.

    Args:
        begin: rows of each chain before its first slice; a negative number leaves the chain out.
        length: rows per slice; the last one of a chain may be shorter.
        again: whether to add slices from the first one up to the end of the chain, and a slice of the rows before it.
        strict: whether slices shorter than ``length`` are left out.
        partition: int64 ``[2, n]``, becomes the first slot and the rows of each slice, in the order of their rows.
    """
    state, capacity, fragments, chains = index
    s = state[0]
    slot_0 = row_in_slot_0(state, capacity)
    count = 0

    for number in range(s.first, s.end):
        f = fragments[place(state, fragments, number)]
        if begin[f.chain] < 0:
            continue

        chain = chains[f.chain]
        # offsets of the fragment's first live row, of the row after its last one, and of the first slice
        low = max(f.offset, chain.dropped)
        high = f.offset + fragment_stop(state, fragments, number) - f.first
        at = chain.dropped + begin[f.chain]

        if again and not strict and low == chain.dropped and low < at:
            partition[0, count] = row_slot(f.first + low - f.offset, slot_0, capacity)
            partition[1, count] = at - low
            count += 1

        if again and at < low:
            # skip to the first slice that begins in this fragment
            at += (low - at + length - 1) // length * length

        while low <= at < high and not (strict and at + length > chain.total):
            partition[0, count] = row_slot(f.first + at - f.offset, slot_0, capacity)
            partition[1, count] = min(length, chain.total - at)
            count += 1
            if not again:
                break
            at += length

    return count


@helper
def _slots_between(
    state: Records, capacity: Int, fragments: Records, number: Int, low: Int, high: Int, slots: Array, at: Int
) -> Int:
    """Write the slots of the offsets ``low ... high`` of a chain to ``slots[at:]``; return the position after them.

    ``number`` is a fragment of the chain that holds ``high`` or a later offset.
    """
    if low > high:
        return at

    slot_0 = row_in_slot_0(state, capacity)
    number = fragment_holding(state, fragments, number, low)
    while True:
        f = fragments[place(state, fragments, number)]
        row = f.first + low - f.offset
        take = min(fragment_stop(state, fragments, number) - row, high - low + 1)

        for i in range(take):
            slots[at + i] = row_slot(row + i, slot_0, capacity)

        at += take
        low += take
        if low > high:
            return at
        number += f.next


@compiled()
def new_starts(index: Index, first: Int, length: Int, strict: bool, slots: Array) -> Int:
    """List the slots where slices of ``length`` rows can start only because of the rows from ``first`` on.

    Unless ``strict``, also the first row of each shorter chain that these rows lengthened. Return the number of slots.
    """
    state, capacity, fragments, chains = index
    s = state[0]

    # the fragment that holds row ``first``
    number = s.end - 1
    while number > s.first and fragments[place(state, fragments, number)].first > first:
        number -= 1
    count = 0

    while number < s.end:
        f = fragments[place(state, fragments, number)]
        chain = chains[f.chain]
        old = f.offset + max(first - f.first, 0)  # rows of the chain before these

        # a new row completes the slice that begins ``length - 1`` rows before it
        low = max(old - length + 1, chain.dropped)
        high = f.offset + fragment_stop(state, fragments, number) - f.first - length
        if not strict and chain.total - chain.dropped < length:
            low = chain.dropped
            high = chain.dropped

        count = _slots_between(state, capacity, fragments, number, low, high, slots, count)
        number += 1
    return count


@compiled()
def shortened_trajectories(index: Index, touched: Array, length: Int, slots: Array) -> Int:
    """List the first slots of ``touched`` trajectories with fewer than ``length`` rows; return the count."""
    state, capacity, fragments, chains = index
    count = 0
    for c in touched:
        chain = chains[c]
        if 0 < chain.total - chain.dropped < length:
            first = chain.dropped
            count = _slots_between(state, capacity, fragments, chain.last, first, first, slots, count)

    return count
