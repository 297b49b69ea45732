"""Helpers of the index kernels: convert row numbers to slots, and follow links between fragments.

The tables and their terms are described in `flatroll.kernels.rows.records`. These functions check nothing: fragment
numbers are those of live fragments, offsets those of live rows. They are compiled into each kernel that calls them.

This module imports numba: import it inside the function that needs it.
"""

import numpy as np

from flatroll.kernels.compiled import Array, Int, Records, helper


@helper
def place(state: Records, fragments: Records, number: Int) -> Int:
    """Return the index of live fragment ``number`` in the table."""
    # live numbers are less than a table's length above the oldest one, which is less than that above ``base``
    at = number - state[0].base
    if at < len(fragments):
        return at
    return at - len(fragments)


@helper
def fragment_stop(state: Records, fragments: Records, number: Int) -> Int:
    """Return the row number after the last row of fragment ``number``."""
    s = state[0]
    # a fragment ends where the next one begins, the newest one at the last row written
    if number + 1 < s.end:
        return fragments[place(state, fragments, number + 1)].first
    return s.written


@helper
def row_in_slot_0(state: Records, capacity: Int) -> Int:
    """Return the number of the row that slot 0 held when the oldest row was written, for :func:`row_slot`."""
    return state[0].head - state[0].head % capacity


@helper
def row_slot(row: Int, slot_0: Int, capacity: Int) -> Int:
    """Return the slot of a stored row, ``row % capacity``, without a division (see :func:`row_in_slot_0`)."""
    slot = row - slot_0
    # live rows are at most ``capacity`` rows behind the head, so subtracting the capacity once is enough
    if slot < capacity:
        return slot
    return slot - capacity


@helper
def step_back(state: Records, fragments: Records, number: Int, offset: Int) -> Int:
    """Follow one link from fragment ``number`` back to the one that has ``offset``; stay if it has it."""
    f = fragments[place(state, fragments, number)]
    if f.offset <= offset:
        return number
    far = number - f.jump
    # jump only to a live fragment that is still after the offset
    if f.jump and far >= state[0].first and fragments[place(state, fragments, far)].offset > offset:
        return far
    return number - f.prev


@helper
def fragment_holding(state: Records, fragments: Records, number: Int, offset: Int) -> Int:
    """Find the fragment that contains row ``offset`` of the trajectory whose last fragment is ``number``."""
    nearer = step_back(state, fragments, number, offset)
    while nearer != number:
        number = nearer
        nearer = step_back(state, fragments, nearer, offset)
    return number


@helper
def rows_in_slots(state: Records, capacity: Int, fragments: Records, slots: Array) -> tuple[Array, Array]:
    """Return the row numbers in ``slots`` and the fragments that contain them; int64, one per slot.

    All searches advance together, so that their cache misses overlap.
    """
    head = state[0].head
    base = state[0].base
    size = len(fragments)

    # the first row number at or after the head that falls into the slot
    rows = head + (slots - head) % capacity

    # Live fragments lie in one stretch of the table, or in two if they go on at its start (see `place`). A row is
    # looked up among the left[j] ones from index at[j] on.
    oldest = state[0].first - base
    ahead = min(state[0].end - base, size) - oldest
    behind = max(state[0].end - base - size, 0)

    at = np.full(len(slots), oldest)
    left = np.full(len(slots), ahead)
    if behind:
        for j in range(len(rows)):
            if rows[j] >= fragments[0].first:
                at[j] = 0
                left[j] = behind

    # Binary search for the last fragment whose first row is not after the row. It has no branch, which random rows
    # would mispredict every second time: a difference shifted by 63 is all ones if it is negative, else 0. No address
    # depends on another comparison, which the compiler would make a branch.
    most = max(ahead, behind)
    while most > 1:
        for j in range(len(rows)):
            half = left[j] >> 1
            beyond = rows[j] - fragments[at[j] + half].first >> 63
            at[j] += half & ~beyond
            left[j] -= half
        most -= most >> 1

    numbers = at + base
    for j in range(len(rows)):
        if at[j] < oldest:
            numbers[j] += size
    return rows, numbers


@helper
def draw_chain(tree: Array, uniform: float) -> tuple[Int, Int]:
    """Draw a trajectory by weight with ``uniform`` in [0, 1); return it and the remainder within its weight.

    ``tree`` is a Fenwick tree: entry i, counted from 1, is the sum of the ``i & -i`` weights up to and with weight i.
    """
    size = len(tree) - 1  # a power of two, so tree[size] is the sum of all
    total = tree[size]
    rest = min(np.int64(uniform * total), total - 1)

    c = 0
    step = size // 2
    # the first c weights sum up to at most the hit; each step tries to add ``step`` weights more
    while step:
        if tree[c + step] <= rest:
            c += step
            rest -= tree[c]
        step //= 2

    return c, rest
