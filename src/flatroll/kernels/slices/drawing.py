"""Compiled kernels that draw slices of trajectories, walk along them (the slots of their rows, in time order) and mark
their ends.

The index is the record ``state, capacity, fragments, chains`` (`flatroll.kernels.rows.records`). Chosen slices are the
record ``slices, firsts, lasts``: `SLICE` records for :func:`walk`, and the first and last position (int64) of each
slice in the list of all rows.

Kernels with arguments ``follow`` and ``patch`` also find the next observation of each row: ``follow[i]`` becomes the
slot of the row after row i in its trajectory, -1 if there is none; if the next observation is in the pool instead,
``patch[:, k]`` becomes (i, pool entry), and the kernel returns the number of patches. With an empty ``follow`` this is
skipped.

This module imports numba: import it inside the function that needs it.
"""

from typing import TypeAlias

import numpy as np

from flatroll.kernels.compiled import Array, Int, Records, compiled, helper
from flatroll.kernels.rows.raw_memory import ask, flag_at, number_at, set_flag
from flatroll.kernels.rows.records import Index
from flatroll.kernels.slices.links import (
    draw_chain,
    fragment_stop,
    place,
    row_in_slot_0,
    row_slot,
    rows_in_slots,
    step_back,
)

Rule: TypeAlias = tuple[Int, bool, Int, Int]
Chosen: TypeAlias = tuple[Records, Array, Array]


@helper
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
    if next_row < stop:
        follow[position] = row_slot(next_row, slot_0, capacity)
        return patched

    # the last row of its fragment: the trajectory continues with the first row of the next fragment, if there is one
    f = fragments[place(state, fragments, number)]
    if f.next:
        later = fragments[place(state, fragments, number + f.next)].first
        follow[position] = row_slot(later, slot_0, capacity)
    else:
        follow[position] = -1

    if f.pool < 0:
        return patched
    patch[0, patched] = position
    patch[1, patched] = f.pool
    return patched + 1


@helper
def _ask_for(state: Records, fragments: Records, number: Int) -> None:
    """Prefetch fragment ``number`` and its end, which are read one round later."""
    address = np.int64(fragments.ctypes.data) + place(state, fragments, number) * fragments.itemsize
    ask(address)
    # the last byte of the next fragment's ``first``, which may be in the next cache line
    ask(address + fragments.itemsize + 7)


@compiled()
def walk(index: Index, slices: Records, firsts: Array, slots: Array, follow: Array, patch: Array) -> Int:
    """Write the slots of each slice's rows, all of them live, to ``slots``; return the patch count.

    All slices advance by one fragment per round and prefetch the next one, so that their cache misses overlap.

    Args:
        slices: `SLICE` records, at least one per entry of ``firsts``; changed.
        firsts: int64, first position of each slice.
        slots: int64 ``[rows]``, the result.
        follow, patch: see above.
    """
    state, capacity, fragments, _ = index
    slot_0 = row_in_slot_0(state, capacity)

    # back to the fragments that hold the offsets, one link per round
    pending = len(firsts)
    while pending:
        pending = 0
        for j in range(len(firsts)):
            s = slices[j]
            target = step_back(state, fragments, s.number, s.offset)
            pending += target != s.number
            s.number = target
            _ask_for(state, fragments, target)

    # forward, one fragment per round
    patched = 0
    pending = len(firsts)
    while pending:
        pending = 0
        for j in range(len(firsts)):
            s = slices[j]
            if s.left == 0:
                continue

            first = s.at
            f = fragments[place(state, fragments, s.number)]
            row = f.first + s.offset - f.offset
            stop = fragment_stop(state, fragments, s.number)
            end = first + min(stop - row, s.left)

            # consecutive row numbers are in consecutive slots of the ring
            slot = row_slot(row, slot_0, capacity)
            for i in range(first, end):
                slots[i] = slot
                slot += 1
                if slot == capacity:
                    slot = 0

            s.offset += end - first
            s.left -= end - first
            s.at = end

            if len(follow):
                # follow: the next slot in the sample, also for the row before this fragment
                if first > firsts[j]:
                    follow[first - 1] = slots[first]
                for i in range(first, end - 1):
                    follow[i] = slots[i + 1]

                if s.left == 0:
                    row += end - first
                    patched = _write_next(
                        state,
                        fragments,
                        capacity,
                        slot_0,
                        s.number,
                        row,
                        stop,
                        end - 1,
                        follow,
                        patch,
                        patched,
                    )
                elif f.pool >= 0:  # the next round sets ``follow`` of the last row, without a cache miss
                    patch[0, patched] = end - 1
                    patch[1, patched] = f.pool
                    patched += 1

            if s.left:
                s.number += f.next
                _ask_for(state, fragments, s.number)
                pending += 1

    return patched


@compiled()
def choose(
    index: Index, tree: Array, uniform: Array, rule: Rule, rows: Int, so_far: tuple[Int, Int], chosen: Chosen
) -> tuple[Int, Int]:
    """Choose slices until they have ``rows`` rows: for each a trajectory by weight, then a start row in it.

    Args:
        tree: Fenwick tree of the chains' weights (`flatroll.kernels.slices.publishing.weigh`), of positive sum.
        uniform: float64 in [0, 1), two per slice.
        rule: ``length, start, early, late``:
            length: rows per slice; fewer if the chain is shorter, and if there are too many rows with the last one.
            start: whether the remainder within the weight selects the start; else it is drawn uniformly.
            early, late: rows by which slices may extend before and after the chain; missing rows are left out.
        rows: number of rows that are enough; fewer are chosen if ``uniform`` runs out.
        so_far: numbers of slices and of rows that earlier calls chose.
        chosen: see above, filled from the next slice on; room for one per pair in ``uniform``.

    Returns:
        numbers of slices and of rows, including those of earlier calls.
    """
    state, _, fragments, chains = index
    length, start, early, late = rule
    count, at = so_far
    slices, firsts, lasts = chosen

    # Draw all trajectories and prefetch them before reading one: there may be more than the caches hold.
    drawn = len(uniform) // 2
    for j in range(drawn):
        c, rest = draw_chain(tree, uniform[2 * j])
        slices[count + j].number = c
        slices[count + j].offset = rest
        ask(np.int64(chains.ctypes.data) + c * chains.itemsize)

    for j in range(drawn):
        if at >= rows:
            break
        s = slices[count]
        chain = chains[s.number]
        live = chain.total - chain.dropped
        places = max(live - length + 1 + early + late, 1)

        # first row of the slice, counted from the chain's first live row; negative where it reaches before it
        if start:
            begin = s.offset - early
        else:
            begin = min(np.int64(uniform[2 * j + 1] * places), places - 1) - early
        stop = min(begin + length, live)
        begin = max(begin, 0)

        s.number = chain.last
        s.offset = chain.dropped + begin
        s.left = min(stop - begin, rows - at)
        s.at = at
        _ask_for(state, fragments, s.number)

        firsts[count] = at
        at += s.left
        lasts[count] = at - 1
        count += 1

    return count, at


@compiled()
def mark(init: Int, done: Int, terminated: Int, truncated: Int, firsts: Int, lasts: Int, count: Int) -> None:
    """Mark ``count`` slices: set ``init`` at ``firsts``, ``done`` at ``lasts``, ``truncated`` there if not
    ``terminated``. All are addresses of bool columns or int64 positions; a ``done`` of 0 skips the ends."""
    for j in range(count):
        if init:
            set_flag(init, number_at(firsts, j))
        if done:
            end = number_at(lasts, j)
            set_flag(done, end)
            if not flag_at(terminated, end):
                set_flag(truncated, end)


@compiled()
def slices_from(index: Index, starts: Array, lengths: Array, chosen: Chosen) -> Int:
    """Lay out slices of up to ``lengths`` rows from the slots ``starts`` on; return the number of their rows.

    ``chosen`` is filled. If start j is not a stored row, or its length is below 1, -1 - j is returned.
    """
    state, capacity, fragments, chains = index
    slices, firsts, lasts = chosen
    rows, number = rows_in_slots(state, capacity, fragments, starts)

    at = 0
    for j in range(len(starts)):
        if starts[j] < 0 or starts[j] >= capacity or rows[j] >= state[0].written or lengths[j] < 1:
            return -1 - j

        f = fragments[place(state, fragments, number[j])]
        s = slices[j]
        s.number = number[j]
        s.offset = f.offset + rows[j] - f.first
        s.left = min(chains[f.chain].total - s.offset, lengths[j])
        s.at = at
        firsts[j] = at
        at += s.left
        lasts[j] = at - 1

    return at


@compiled()
def follow_rows(index: Index, slots: Array, follow: Array, patch: Array) -> Int:
    """Find the next observation of each row in ``slots``; fill ``follow`` and ``patch``; return the patch count."""
    state, capacity, fragments, _ = index
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
def ahead_rows(index: Index, slots: Array, ahead: Array) -> None:
    """Write the slots of the row in ``slots[i]`` and of the rows that follow it to ``ahead[i]``.

    ``ahead`` is int64 ``[len(slots), steps]``; -1 from the first row that is not stored.
    """
    state, capacity, fragments, _ = index
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
def extents(index: Index, slots: Array, found: Array) -> None:
    """Fill ``found`` (int64 ``[3, N]``) for the stored rows in ``slots`` (``[N]``).

    It becomes each row's position among the stored rows of its trajectory, the number of these, and its chain.
    """
    state, capacity, fragments, chains = index
    rows, numbers = rows_in_slots(state, capacity, fragments, slots)

    for i in range(len(slots)):
        f = fragments[place(state, fragments, numbers[i])]
        chain = chains[f.chain]
        found[0, i] = f.offset + rows[i] - f.first - chain.dropped
        found[1, i] = chain.total - chain.dropped
        found[2, i] = f.chain
