"""Compiled kernels that update the trajectory index: drop overwritten rows, link and publish new ones.

A write calls :func:`claim` (its slots are no longer readable), :func:`link` (what does each fragment continue?) and,
once its rows are copied, :func:`publish`. The index is the record ``state, capacity, fragments, chains``
(`flatroll.kernels.rows.records`); ``table`` is the hash table of its trajectories' ids (`ENTRY`).

This module imports numba: import it inside the function that needs it.
"""

from typing import TypeAlias

import numpy as np

from flatroll.kernels.compiled import Array, Int, Records, compiled, helper
from flatroll.kernels.rows.raw_memory import ask, compare_bytes
from flatroll.kernels.rows.records import Compare, Index, Way
from flatroll.kernels.slices.links import fragment_stop, place

NewFragments: TypeAlias = tuple[Int, Array, Array, Array, Array, Array, Array, Array, Array]


@helper
def _entry(table: Records, key: Int) -> Int:
    """Return the position of ``key`` in the hash table, or of the unused entry where it belongs."""
    mask = len(table) - 1
    # the upper half of the product with 2**64 over the golden ratio, which spreads consecutive keys
    at = np.int64(np.uint64(key) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)) & mask

    # linear probing: on to the next entry until one is unused
    while table[at].chain != 0 and table[at].id != key:
        at = (at + 1) & mask
    return at


@compiled()
def rehash(table: Records, chains: Records, larger: Records) -> Int:
    """Copy the id-table entries of open stored trajectories into ``larger``; return their number."""
    used = 0
    for i in range(len(table)):
        c = table[i].chain - 1
        # another trajectory may have reused the entry's chain
        if c >= 0 and chains[c].id == table[i].id and chains[c].open and chains[c].total > chains[c].dropped:
            larger[_entry(larger, table[i].id)] = table[i]
            used += 1
    return used


@compiled()
def claim(index: Index, rows: Int, spare: Array, touched: Array) -> Int:
    """Drop the rows that the next ``rows`` rows (at most ``capacity``) overwrite.

    Args:
        rows: number of rows that will be written.
        spare: the free pool entries; those of dropped fragments are appended.
        touched: filled with the chains that lose rows.

    Returns:
        number of ``touched`` chains.
    """
    state, capacity, fragments, chains = index
    s = state[0]

    # after the write the oldest row is ``capacity`` rows before the end
    head = max(s.head, s.written + rows - capacity)
    s.head = head

    count = 0
    while s.first < s.end:
        f = fragments[place(state, fragments, s.first)]
        stop = fragment_stop(state, fragments, s.first)
        lost = min(head, stop) - f.first
        if lost <= 0:
            break

        chain = chains[f.chain]
        # fragments of a chain are dropped in order, so all its rows before these are dropped as well
        chain.dropped = f.offset + lost
        touched[count] = f.chain
        count += 1

        if head < stop:
            break
        s.first += 1
        if s.first == s.base + len(fragments):
            s.base = s.first

        if f.pool >= 0:
            spare[s.spare] = f.pool
            s.spare += 1
        if chain.dropped == chain.total:
            s.live -= 1
            s.open -= chain.open
            chain.open = 0
            chain.total = 0
            chain.dropped = 0
            # put the chain slot in front of the list of free ones
            chain.last = s.free
            s.free = f.chain + 1
    return count


@helper
def _compare(index: Index, new: NewFragments, compare: Compare, found: Array) -> Int:
    """Compare the first row of each new fragment with the next values of the row that it continues, for `link`.

    ``found[3, j]``, the slot of the stored row that fragment j continues, becomes the index of its next value, in
    storage or in the batch.
    """
    state, _, fragments, chains = index
    _, firsts, lasts, joined, _, _, _, _, _ = new
    pairs, source, compared, pool = compare
    before = found[0]
    agree = found[2]
    stands = found[3]

    # find the next values of all rows, and prefetch them before comparing one
    for j in range(len(joined)):
        if before[j] >= 0:
            if pool:
                stands[j] = fragments[place(state, fragments, chains[before[j]].last)].pool
            for k in range(len(pairs)):
                ask(pairs[k, 0] + stands[j] * pairs[k, 1])
        elif before[j] < -1:
            stands[j] = -2 - before[j]
            if not pool:
                stands[j] = lasts[stands[j]]

    wrong = 0
    for j in range(len(joined)):
        if before[j] == -1 or (joined[j] and not pool):
            continue

        agree[j] = 1
        for k in range(len(pairs)):
            size = pairs[k, 1]
            later = source[pairs[k, 3]]
            if before[j] >= 0:
                later = pairs[k, 0]
            if compare_bytes(later + stands[j] * size, source[pairs[k, 2]] + firsts[j] * size, size):
                agree[j] = 0
                if k < compared:
                    agree[j] = -1
                    wrong += not joined[j]
                break

    return wrong


@compiled()
def link(
    index: Index, table: Records, new: NewFragments, compare: Compare, seen: Records, found: Array
) -> Int:
    """Find what each new fragment continues, and whether its first row equals the next values of the row before it.

    A fragment continues the last one of its id (without ids: the newest row) unless that one was done, this one is
    ``is_init``, the step count (if there is one) is not consecutive, or the write drops the last one's rows.

    Args:
        new: the fields of `flatroll.buffers.index.fragments.Fragments`, of n fragments. The rows are at most
            ``capacity``, and may be claimed already; ids and step counts are empty if there are none.
        compare: ``pairs, source, compared, pool``:
            pairs: int64 ``[P, 4]``, columns to compare, byte by byte: the address of the stored next values, the bytes
                of a row, and the indices in ``source`` of the batch's values and of its next values.
            source: int64, addresses of columns of the batch.
            compared: number of leading pairs that must be equal; a fragment with one that differs counts in the result.
            pool: whether the stored next values are indexed by pool entry instead of slot, and those of the batch by
                fragment.
        seen: an empty hash table of ids, at most half full with the ids of these fragments.
        found: int64 ``[4, n]``, becomes ``before, slots, agree``, and a row to work in:
            before: the chain that a fragment continues, ``-2 - i`` for fragment i of the same write, or -1 for a new
                trajectory.
            slots: the slot of the stored row that it continues, -1 for none.
            agree: 1 if all pairs are equal, 0 if one differs, -1 if one of the ``compared`` differs. Joined fragments
                are only compared with ``pool``.

    Returns:
        number of fragments, without joined ones, that differ in a ``compared`` pair.
    """
    state, capacity, fragments, chains = index
    rows, _, _, joined, ids, init, done, step_first, step_last = new
    before = found[0]
    slots = found[1]
    agree = found[2]
    stands = found[3]

    s = state[0]
    head = s.written + rows - capacity  # the oldest row after the write, if it drops any

    for j in range(len(joined)):
        before[j] = -1
        slots[j] = -1
        agree[j] = 0
        if joined[j]:
            before[j] = -2 - (j - 1)
        elif not init[j]:
            # candidates: chain c of the index, or fragment i of this write, which is the newer one
            c = np.int64(-1)
            i = np.int64(-1)
            if len(ids):
                known = table[_entry(table, ids[j])].chain - 1
                if known >= 0 and chains[known].id == ids[j]:
                    c = known
                i = seen[_entry(seen, ids[j])].chain - 1
            elif j == 0:
                c = s.newest - 1

            if i >= 0:
                if not done[i] and (len(step_first) == 0 or step_first[j] == step_last[i] + 1):
                    before[j] = -2 - i
            elif c >= 0 and chains[c].open and chains[c].total > chains[c].dropped:  # noqa: SIM102
                if len(step_first) == 0 or step_first[j] == chains[c].step:
                    row = fragment_stop(state, fragments, chains[c].last) - 1
                    if row >= head:
                        before[j] = c
                        slots[j] = row % capacity

        stands[j] = slots[j]
        if len(ids):  # the last fragment of each id within this write: fragment + 1 in the field ``chain``
            at = _entry(seen, ids[j])
            seen[at].id = ids[j]
            seen[at].chain = j + 1

    return _compare(index, new, compare, found)


@compiled()
def keep(
    state: Records, spare: Array, before: Array, agree: Array, pool: Array, kept: Array, released: Array
) -> tuple[Int, Int]:
    """Take a free pool entry for each new fragment's last row, unless the next row holds its next values.

    Args:
        spare: the free pool entries.
        before, agree: what :func:`link` found, int64 ``[n]``.
        pool: int64 ``[n]``, becomes the entry of each fragment, -1 for none.
        kept: int64 ``[n]``, becomes the fragments with an entry.
        released: int64 ``[n]``, becomes the chains whose last row needs its entry no longer.

    Returns:
        the number of fragments with an entry, and the number of released chains, -1 if too few entries were free and
        none was taken.
    """
    s = state[0]
    pool[:] = 0
    count = 0
    free = 0

    for j in range(len(before)):
        if agree[j] > 0 and before[j] < -1:
            pool[-2 - before[j]] = -1
        elif agree[j] > 0 and before[j] >= 0:
            released[free] = before[j]
            free += 1

    for j in range(len(before)):
        if pool[j] == 0:
            kept[count] = j
            count += 1

    if count > s.spare:
        return count, -1
    s.spare -= count
    s.taken += count
    for k in range(count):
        pool[kept[k]] = spare[s.spare + k]
    return count, free


@helper
def _new_chain(state: Records, chains: Records, ids: Array, j: Int) -> Int:
    """Create an empty chain for fragment ``j`` in a free slot of ``chains``; return the slot."""
    s = state[0]
    if s.free:
        # take the first slot of the linked list of free slots; its ``last`` is the next free one
        c = s.free - 1
        s.free = chains[c].last
    else:
        c = s.slots
        s.slots += 1

    chain = chains[c]
    chain.id = ids[j] if len(ids) else s.created
    chain.total = 0
    chain.dropped = 0
    chain.open = 0
    chain.last = -1
    s.created += 1
    s.live += 1
    return c


@helper
def _attach(state: Records, fragments: Records, chains: Records, c: Int, row: Int, pool: Int) -> None:
    """Lengthen the last fragment of chain ``c`` if ``row`` comes right after it, else link a new one to it.

    A fragment whose last row has a pool entry is not lengthened: the entry belongs to a fragment's last row.
    """
    s = state[0]
    chain = chains[c]
    number = s.end
    last = chain.last

    if 0 <= last == number - 1 and fragments[place(state, fragments, last)].pool < 0:
        fragments[place(state, fragments, last)].pool = pool
        return

    s.end += 1
    f = fragments[place(state, fragments, number)]
    f.first = row
    f.offset = chain.total
    f.chain = c
    f.pool = pool
    f.prev = 0
    f.jump = 0
    f.span = 0
    f.next = 0
    chain.last = number
    if last < 0:
        return

    before = fragments[place(state, fragments, last)]
    distance = number - last
    before.next = distance
    f.prev = distance
    f.jump = distance
    f.span = 1

    # Myers' rule: two consecutive jumps of the same length become one jump over both
    far = last - before.jump
    if far >= s.first:
        further = fragments[place(state, fragments, far)]
        if further.span == before.span:
            f.jump = number - (far - further.jump)
            f.span = 2 * before.span + 1


@compiled()
def publish(
    index: Index,
    table: Records,
    new: NewFragments,
    before: Array,
    pool: Array,
    spare: Array,
    released: Array,
    touched: Array,
) -> None:
    """Add rows, whose columns are already copied, to the index, fragment by fragment.

    Args:
        index, table: with room for the new fragments, chains and ids.
        new: as for :func:`link`.
        before: what each fragment continues, from :func:`link`.
        pool: pool entry with the next observation of each fragment's last row, -1 for none; empty without a pool.
        spare: the free pool entries; released ones are appended.
        released: chains whose last row releases its pool entry, because the row that continues it has the same values.
        touched: filled with the chain of each fragment.
    """
    state, _, fragments, chains = index
    rows, firsts, _, _, ids, _, done, _, step_last = new
    s = state[0]

    for c in released:
        f = fragments[place(state, fragments, chains[c].last)]
        spare[s.spare] = f.pool
        s.spare += 1
        f.pool = -1

    for j in range(len(firsts)):
        c = before[j]
        if c < -1:
            c = touched[-2 - c]  # the chain that an earlier fragment of this write got
        elif c == -1:
            c = _new_chain(state, chains, ids, j)
        chain = chains[c]
        entry = pool[j] if len(pool) else -1
        _attach(state, fragments, chains, c, s.written + firsts[j], entry)

        # the fragment's length: up to the next one, or to the end of the write
        stop = firsts[j + 1] if j + 1 < len(firsts) else rows
        chain.total += stop - firsts[j]

        is_open = 0 if done[j] else 1
        s.open += is_open - chain.open
        chain.open = is_open

        if len(step_last):
            chain.step = step_last[j] + 1

        if len(ids):
            at = _entry(table, ids[j])
            s.ids += table[at].chain == 0
            table[at].id = ids[j]
            table[at].chain = c + 1

        touched[j] = c
        s.newest = c + 1

    # last, because readers may read all rows before ``written``
    s.written += rows


@compiled()
def rebuild(index: Index, spare: Array, saved: tuple[Array, Array, Array, Array, Array, Array]) -> None:
    """Fill empty tables with checked fragments of closed chains; ``state`` has the right head and written.

    Args:
        index: its tables are empty, with room for all fragments and chains.
        spare: filled with the free pool entries.
        saved: the fields of `flatroll.buffers.index.saved_tables.SavedFragments`.
    """
    state, _, fragments, chains = index
    firsts, chain, pool, ids, free, free_entries = saved
    s = state[0]
    s.first = 0
    s.end = 0
    s.base = 0
    s.live = 0
    s.open = 0
    s.newest = 0
    s.ids = 0
    for c in range(len(ids)):
        chains[c].id = ids[c]
        chains[c].last = -1

    for j in range(len(firsts)):
        c = chain[j]
        s.live += chains[c].total == 0
        _attach(state, fragments, chains, c, firsts[j], pool[j])
        stop = firsts[j + 1] if j + 1 < len(firsts) else s.written
        chains[c].total += stop - firsts[j]

        if j == 0:  # the oldest fragment may have lost rows
            chains[c].dropped = s.head - firsts[j]

    s.slots = len(ids)
    # each free slot holds 1 + the next one in its ``last``, 0 at the end
    s.free = 0
    for i in range(len(free) - 1, -1, -1):
        chains[free[i]].last = s.free
        s.free = free[i] + 1

    s.spare = len(free_entries)
    spare[: s.spare] = free_entries


@compiled()
def weigh(
    chains: Records,
    touched: Array,
    count: Int,
    weight: Array,
    tree: Array,
    way: Way,
) -> None:
    """Update the weights of the trajectories ``touched``, and the Fenwick tree of all weights.

    A chain of n live rows (with ``strict``: at least ``length``) weighs 1, or with ``start`` the number of
    possible starts of a slice of ``length`` rows, ``n - length + 1 + span``, at least 1.

    Args:
        chains: table of the index.
        touched, count: chains that have changed, and how many of them to update.
        weight: int64, weight of each chain; updated.
        tree: int64, the Fenwick tree (see `flatroll.kernels.slices.links.draw_chain`); updated.
        way: ``length, start, strict, span``:
            length: rows per slice.
            start: whether a chain weighs as many as it has possible starts, instead of 1.
            strict: whether chains shorter than a slice weigh 0.
            span: rows by which slices may extend beyond a chain, both ends together.
    """
    length, start, strict, span = way
    least = length if strict else 1
    for k in range(count):
        c = touched[k]
        n = chains[c].total - chains[c].dropped
        now = np.int64(0)
        if n >= least:
            now = np.int64(1)
            if start:
                now = np.int64(max(n - length + 1 + span, 1))

        change = now - weight[c]
        if change:
            weight[c] = now
            # the tree counts from 1; adding the lowest bit of ``at`` leads to the next sum that contains the weight
            at = c + 1
            while at < len(tree):
                tree[at] += change
                at += at & -at
