"""Compiled kernels that draw slices of trajectories, walk along them (the slots of their rows, in time order) and mark
their ends.

The index is the tables ``state, fragments, chains`` (`flatroll.kernels.rows.records`) of a ring of ``capacity`` rows.
Kernels with arguments ``follow`` and ``patch`` also find the next observation of each row: ``follow[i]`` becomes the
slot of the row after row i in its trajectory, -1 if there is none; if the next observation is in the pool instead,
``patch[:, k]`` becomes (i, pool entry), and the kernel returns the number of patches. With an empty ``follow`` this is
skipped.

This module imports numba: import it inside the function that needs it.
"""

import numpy as np

from flatroll.kernels.compiled import Array, Int, Records, compiled
from flatroll.kernels.rows.raw_memory import ask, flags, numbers
from flatroll.kernels.slices.links import (
    draw_chain,
    fragment_stop,
    place,
    row_in_slot_0,
    row_slot,
    rows_in_slots,
    step_back,
)


@compiled()
def _write_next(
    state: Records,
    fragments: Records,
    capacity: Int,
    slot_0: Int,
    number: Int,
    next_row: Int,
    stop: Int,
    position: Int,
    follow: Array,
    patch: Array,
    patched: Int,
) -> Int:
    """Write the next row of the row at ``position`` to ``follow`` and ``patch``; return the number of patches so far.

    The row belongs to fragment ``number``, which ends at row ``stop``; ``next_row`` is the row number after it.
    """
    f = fragments[place(state, fragments, number)]
    if next_row < stop:
        follow[position] = row_slot(next_row, slot_0, capacity)
        return patched

    # the last row of its fragment: the trajectory continues with the first row of the next fragment, if there is one
    later = fragments[place(state, fragments, number + f.next)].first
    if f.next:
        follow[position] = row_slot(later, slot_0, capacity)
    else:
        follow[position] = -1

    if f.pool < 0:
        return patched
    patch[0, patched] = position
    patch[1, patched] = f.pool
    return patched + 1


@compiled()
def _ask_for(state: Records, fragments: Records, number: Int) -> None:
    """Prefetch fragment ``number`` and its end, which are read one round later."""
    address = np.int64(fragments.ctypes.data) + place(state, fragments, number) * fragments.itemsize
    ask(address)
    # the last byte of the next fragment's ``first``, which may be in the next cache line
    ask(address + fragments.itemsize + 7)


@compiled()
def walk(
    state: Records,
    capacity: Int,
    fragments: Records,
    number: Array,
    offset: Array,
    left: Array,
    at: Array,
    slots: Array,
    follow: Array,
    patch: Array,
) -> Int:
    """Write the slots of slice j (``left[j]`` rows from ``offset[j]``) to ``slots[at[j]:]``; return the patch count.

    All slices advance by one fragment per round and prefetch the next one, so that their cache misses overlap.

    Args:
        number: the last fragment of each slice's chain; changed.
        offset: first row of each slice, as an offset in its chain; changed.
        left: rows of each slice, all of them live; changed.
        at: first position of each slice; changed.
        slots: int64 ``[rows]``, the result.
        follow, patch: see above.
    """
    # back to the fragments that hold the offsets, one link per round
    pending = len(number)
    while pending:
        pending = 0
        for j in range(len(number)):
            target = step_back(state, fragments, number[j], offset[j])
            pending += target != number[j]
            number[j] = target
            _ask_for(state, fragments, target)

    # forward, one fragment per round
    patched = 0
    begin = at.copy()
    slot_0 = row_in_slot_0(state, capacity)

    pending = len(number)
    while pending:
        pending = 0
        for j in range(len(number)):
            rows = left[j]
            if rows == 0:
                continue

            k = number[j]
            first = at[j]
            f = fragments[place(state, fragments, k)]
            row = f.first + offset[j] - f.offset
            stop = fragment_stop(state, fragments, k)
            take = min(stop - row, rows)

            # consecutive row numbers are in consecutive slots of the ring
            slot = row_slot(row, slot_0, capacity)
            slots[first] = slot
            for i in range(first + 1, first + take):
                slot += 1
                if slot == capacity:
                    slot = 0
                slots[i] = slot

            if len(follow):
                # follow: the next slot in the sample, also for the row before this fragment; its last row is
                # set below
                if first > begin[j]:
                    follow[first - 1] = slots[first]
                for i in range(first, first + take - 1):
                    follow[i] = slots[i + 1]
                last = first + take - 1
                if rows > take and f.pool >= 0:
                    patch[0, patched] = last
                    patch[1, patched] = f.pool
                    patched += 1

                if rows == take:  # otherwise the next round sets it, without a cache miss
                    patched = _write_next(
                        state, fragments, capacity, slot_0, k, row + take, stop, last, follow, patch, patched
                    )

            left[j] = rows - take
            offset[j] += take
            at[j] = first + take
            number[j] = k + f.next

            if rows > take:
                _ask_for(state, fragments, k + f.next)
                pending += 1

    return patched


@compiled()
def draw(
    state: Records,
    capacity: Int,
    fragments: Records,
    chains: Records,
    tree: Array,
    uniform: Array,
    length: Int,
    start: bool,
    early: Int,
    late: Int,
    slots: Array,
    firsts: Array,
    lasts: Array,
    follow: Array,
    patch: Array,
) -> tuple[Int, Int]:
    """Draw a slice for each entry of ``firsts``: a trajectory by weight, then a start row in it.

    Args:
        tree: Fenwick tree of the chains' weights (`flatroll.kernels.slices.publishing.weigh`), of positive sum.
        uniform: float64 in [0, 1), two per slice.
        length: rows per slice; fewer if the chain is shorter.
        start: whether the remainder within the weight selects the start; else it is drawn uniformly.
        early, late: rows by which slices may extend before and after the chain; missing rows are left out.
        slots: int64, becomes the slots of the rows; room for ``length`` rows per slice.
        firsts, lasts: int64, become the first and last position of each slice in ``slots``.
        follow, patch: see above.

    Returns:
        rows, patches.
    """
    count = len(firsts)
    number = np.empty(count, np.int64)
    offset = np.empty(count, np.int64)
    left = np.empty(count, np.int64)
    at = 0

    for j in range(count):
        c, rest = draw_chain(tree, uniform[2 * j])
        chain = chains[c]
        live = chain.total - chain.dropped
        places = max(live - length + 1 + early + late, 1)

        # first row of the slice, counted from the chain's first live row; negative where it reaches before it
        if start:
            begin = rest - early
        else:
            begin = min(np.int64(uniform[2 * j + 1] * places), places - 1) - early
        stop = min(begin + length, live)
        begin = max(begin, 0)
        take = stop - begin

        number[j] = chain.last
        offset[j] = chain.dropped + begin
        left[j] = take
        firsts[j] = at
        at += take
        lasts[j] = at - 1

    patched = walk(state, capacity, fragments, number, offset, left, firsts.copy(), slots, follow, patch)
    return at, patched


@compiled()
def mark(init: Int, done: Int, terminated: Int, truncated: Int, firsts: Int, lasts: Int, count: Int) -> None:
    """Mark ``count`` slices: set ``init`` at ``firsts``, ``done`` at ``lasts``, ``truncated`` there if not
    ``terminated``. All are addresses of bool columns or int64 positions; a ``done`` of 0 skips the ends."""
    begin = numbers(firsts, count)
    end = numbers(lasts, count)
    far = np.int64(1) << np.int64(62)  # positions are valid, so sizes are not checked
    starts = flags(init, far)
    stops = flags(done, far)
    final = flags(terminated, far)
    cut = flags(truncated, far)

    for j in range(count):
        if init:
            starts[begin[j]] = True
        if done:
            stops[end[j]] = True
            if not final[end[j]]:
                cut[end[j]] = True


@compiled()
def slices_from(
    state: Records,
    capacity: Int,
    fragments: Records,
    chains: Records,
    starts: Array,
    lengths: Array,
    slots: Array,
    firsts: Array,
    lasts: Array,
    follow: Array,
    patch: Array,
) -> tuple[Int, Int]:
    """List the slots of slices of up to ``lengths`` rows from ``starts`` on; return the numbers of rows and patches.

    The other arguments are as for :func:`draw`. If start j is not a stored row, or its length is below 1, nothing
    is listed, and (-1 - j, 0) is returned.
    """
    count = len(starts)
    rows, number = rows_in_slots(state, capacity, fragments, starts)
    offset = np.empty(count, np.int64)
    left = np.empty(count, np.int64)

    at = 0
    for j in range(count):
        if starts[j] < 0 or starts[j] >= capacity or rows[j] >= state[0].written or lengths[j] < 1:
            return -1 - j, 0

        f = fragments[place(state, fragments, number[j])]
        offset[j] = f.offset + rows[j] - f.first
        left[j] = min(chains[f.chain].total - offset[j], lengths[j])
        firsts[j] = at
        at += left[j]
        lasts[j] = at - 1

    patched = walk(state, capacity, fragments, number, offset, left, firsts.copy(), slots, follow, patch)
    return at, patched


@compiled()
def follow_rows(
    state: Records, capacity: Int, fragments: Records, slots: Array, follow: Array, patch: Array
) -> Int:
    """Find the next observation of each row in ``slots``; fill ``follow`` and ``patch``; return the patch count."""
    slot_0 = row_in_slot_0(state, capacity)
    patched = 0
    rows, numbers = rows_in_slots(state, capacity, fragments, slots)

    for i in range(len(slots)):
        stop = fragment_stop(state, fragments, numbers[i])
        patched = _write_next(
            state, fragments, capacity, slot_0, numbers[i], rows[i] + 1, stop, i, follow, patch, patched
        )
    return patched


@compiled()
def ahead_rows(state: Records, capacity: Int, fragments: Records, slots: Array, ahead: Array) -> None:
    """Write the slots of the row in ``slots[i]`` and of the rows that follow it to ``ahead[i]``.

    ``ahead`` is int64 ``[len(slots), steps]``; -1 from the first row that is not stored.
    """
    slot_0 = row_in_slot_0(state, capacity)
    rows, numbers = rows_in_slots(state, capacity, fragments, slots)

    for i in range(len(slots)):
        row = rows[i]
        number = numbers[i]
        stop = fragment_stop(state, fragments, number)

        for j in range(ahead.shape[1]):
            if row == stop:
                # on to the first row of the fragment that continues the trajectory
                distance = fragments[place(state, fragments, number)].next
                if distance == 0:
                    ahead[i, j:] = -1
                    break
                number += distance
                row = fragments[place(state, fragments, number)].first
                stop = fragment_stop(state, fragments, number)

            ahead[i, j] = row_slot(row, slot_0, capacity)
            row += 1


@compiled()
def extents(
    state: Records, capacity: Int, fragments: Records, chains: Records, slots: Array, found: Array
) -> None:
    """Fill ``found`` (int64 ``[3, N]``) for the stored rows in ``slots`` (``[N]``).

    It becomes each row's position among the stored rows of its trajectory, the number of these, and its chain.
    """
    rows, numbers = rows_in_slots(state, capacity, fragments, slots)

    for i in range(len(slots)):
        f = fragments[place(state, fragments, numbers[i])]
        chain = chains[f.chain]
        found[0, i] = f.offset + rows[i] - f.first - chain.dropped
        found[1, i] = chain.total - chain.dropped
        found[2, i] = f.chain
