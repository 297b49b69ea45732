"""Compiled kernels of the trajectory index: link fragments, drop overwritten ones, draw slices through them.

The tables and their terms are described in `flatroll.kernels.rows.records`.

This module imports numba: import it inside the function that needs it. All kernels are in one file because
numba's cache does not notice a change in a callee that stands in another file.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatroll.kernels.rows.raw_memory import ask
from flatroll.kernels.scans.scan import compiled

Array = NDArray[Any]
Int = Any  # a 64-bit integer of NumPy's or Python's
Records = Any  # a structured array: its entries' fields are attributes, which no type checker knows


@compiled()
def _entry(table: Records, key: Int) -> Int:
    """Position of ``key`` in the hash table, or of the unused entry where it belongs."""
    mask = len(table) - 1
    at = np.int64(np.uint64(key) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)) & mask
    while table[at].chain != 0 and table[at].id != key:
        at = (at + 1) & mask
    return at


@compiled()
def rehash(table: Records, chains: Records, larger: Records) -> Int:
    """Copy the entries of open live trajectories into ``larger``; how many they are."""
    used = 0
    for i in range(len(table)):
        c = table[i].chain - 1
        if c >= 0 and chains[c].id == table[i].id and chains[c].open and chains[c].total > chains[c].dropped:
            larger[_entry(larger, table[i].id)] = table[i]
            used += 1
    return used


@compiled()
def _stop(state: Records, fragments: Records, number: Int) -> Int:
    """Row number after the last row of fragment ``number``."""
    s = state[0]
    return fragments[(number + 1) & (len(fragments) - 1)].first if number + 1 < s.end else s.written


@compiled()
def claim(
    state: Records,
    capacity: Int,
    rows: Int,
    fragments: Records,
    chains: Records,
    spare: Array,
    touched: Array,
) -> Int:
    """Drop the rows that the next ``rows`` rows overwrite; how many ``touched`` chains there are."""
    s = state[0]
    head = s.head = max(s.head, s.written + rows - capacity)
    count = 0
    while s.first < s.end:
        f = fragments[s.first & (len(fragments) - 1)]
        stop = _stop(state, fragments, s.first)
        gone = min(head, stop) - f.first
        if gone <= 0:
            break
        chain = chains[f.chain]
        chain.dropped = f.offset + gone
        touched[count] = f.chain
        count += 1
        if head < stop:
            break
        s.first += 1
        if f.pool >= 0:
            spare[s.spare] = f.pool
            s.spare += 1
        if chain.dropped == chain.total:
            s.live -= 1
            s.open -= chain.open
            chain.open = chain.total = chain.dropped = 0
            chain.last = s.free
            s.free = f.chain + 1
    return count


@compiled()
def link(
    state: Records,
    chains: Records,
    table: Records,
    joined: Array,
    ids: Array,
    init: Array,
    done: Array,
    step_first: Array,
    step_last: Array,
    before: Array,
) -> None:
    """Find what each new fragment continues; changes nothing but ``before``.

    ``before[j]`` becomes the chain it continues, or ``-2 - i`` for fragment i of the same write, or -1 for a new
    trajectory. A fragment continues the last one of its id (without ids: the newest row) unless that one was
    done, this one is_init, or the step count (where there is one) does not go on.
    """
    s = state[0]
    count = len(before)
    size = 4
    while size < 2 * len(ids):
        size *= 2
    seen: Records = np.zeros(size, table.dtype)
    for j in range(count):
        before[j] = -1
        if joined[j]:
            before[j] = -2 - (j - 1)
        elif not init[j]:
            c, i = np.int64(-1), np.int64(-1)
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
                    before[j] = c
        if len(ids):
            at = _entry(seen, ids[j])
            seen[at].id = ids[j]
            seen[at].chain = j + 1


@compiled()
def _begin(state: Records, chains: Records, ids: Array, j: Int) -> Int:
    """A fresh chain for fragment ``j``."""
    s = state[0]
    if s.free:
        c = s.free - 1
        s.free = chains[c].last
    else:
        c = s.slots
        s.slots += 1
    chain = chains[c]
    chain.id = ids[j] if len(ids) else s.created
    chain.total = chain.dropped = chain.open = 0
    chain.last = -1
    s.created += 1
    s.live += 1
    return c


@compiled()
def _attach(state: Records, fragments: Records, chains: Records, c: Int, row: Int, pool: Int) -> None:
    """Lengthen the last fragment of chain ``c`` if ``row`` comes right after it, else link a new one to it."""
    s = state[0]
    mask = len(fragments) - 1
    chain = chains[c]
    number, last = s.end, chain.last
    if 0 <= last == number - 1 and fragments[last & mask].pool < 0:
        fragments[last & mask].pool = pool
        return
    s.end += 1
    f = fragments[number & mask]
    f.first, f.offset, f.chain, f.pool = row, chain.total, c, pool
    f.prev = f.jump = f.span = f.next = 0
    chain.last = number
    if last < 0:
        return
    before = fragments[last & mask]
    before.next = f.prev = f.jump = number - last
    f.span = 1
    far = last - before.jump
    if far >= s.first and fragments[far & mask].span == before.span:
        f.jump = number - (far - fragments[far & mask].jump)
        f.span = 2 * before.span + 1


@compiled()
def publish(
    state: Records,
    fragments: Records,
    chains: Records,
    table: Records,
    rows: Int,
    firsts: Array,
    ids: Array,
    done: Array,
    step_last: Array,
    before: Array,
    pool: Array,
    spare: Array,
    released: Array,
    touched: Array,
) -> None:
    """Enter ``rows`` copied rows: fragment j begins at ``firsts[j]`` of them and continues ``before[j]``.

    The last rows of the chains ``released`` give back their pool entries: the rows that continue them agree.
    """
    s = state[0]
    for c in released:
        f = fragments[chains[c].last & (len(fragments) - 1)]
        spare[s.spare] = f.pool
        s.spare += 1
        f.pool = -1
    for j in range(len(firsts)):
        c = before[j]
        if c < -1:
            c = touched[-2 - c]
        elif c == -1:
            c = _begin(state, chains, ids, j)
        chain = chains[c]
        _attach(state, fragments, chains, c, s.written + firsts[j], pool[j] if len(pool) else -1)
        chain.total += (firsts[j + 1] if j + 1 < len(firsts) else rows) - firsts[j]
        going = 0 if done[j] else 1
        s.open += going - chain.open
        chain.open = going
        if len(step_last):
            chain.step = step_last[j] + 1
        if len(ids):
            at = _entry(table, ids[j])
            s.ids += table[at].chain == 0
            table[at].id = ids[j]
            table[at].chain = c + 1
        touched[j] = c
        s.newest = c + 1
    s.written += rows


@compiled()
def weigh(
    chains: Records,
    touched: Array,
    count: Int,
    weight: Array,
    tree: Array,
    length: Int,
    start: bool,
    strict: bool,
    span: Int,
) -> None:
    """Bring the weights of ``touched`` chains, and the Fenwick tree over them, up to date.

    A chain of n live rows (with ``strict``: at least ``length``) weighs 1, or with ``start`` the places of a slice
    of ``length`` rows, ``n - length + 1 + span``, at least 1.
    """
    least = length if strict else 1
    for k in range(count):
        c = touched[k]
        n = chains[c].total - chains[c].dropped
        now = np.int64(0)
        if n >= least:
            now = np.int64(max(n - length + 1 + span, 1) if start else 1)
        change = now - weight[c]
        if change:
            weight[c] = now
            at = c + 1
            while at < len(tree):
                tree[at] += change
                at += at & -at


@compiled()
def _back(state: Records, fragments: Records, number: Int, offset: Int) -> Int:
    """One link back from fragment ``number`` towards the one that holds ``offset``, or ``number`` if it does."""
    mask = len(fragments) - 1
    f = fragments[number & mask]
    if f.offset <= offset:
        return number
    far = number - f.jump
    if f.jump and far >= state[0].first and fragments[far & mask].offset > offset:
        return far
    return number - f.prev


@compiled()
def _base(state: Records, capacity: Int) -> Int:
    """Number of the row in slot 0 when the head was written: one division per call instead of one per fragment."""
    return state[0].head - state[0].head % capacity


@compiled()
def _slot(row: Int, base: Int, capacity: Int) -> Int:
    """Slot of a live row; ``base`` saves a division per row."""
    slot = row - base
    return slot if slot < capacity else slot - capacity


@compiled()
def _after(
    fragments: Records,
    capacity: Int,
    base: Int,
    number: Int,
    row: Int,
    stop: Int,
    at: Int,
    follow: Array,
    patch: Array,
    patched: Int,
) -> Int:
    """Say what follows the row before ``row``, of fragment ``number`` that ends at ``stop``; patches so far.

    ``follow[at]`` becomes the slot of the next row or -1. If the next observation stands in the pool, the row is
    entered in ``patch`` as (position, entry).
    """
    f = fragments[number & (len(fragments) - 1)]
    if row < stop:
        follow[at] = _slot(row, base, capacity)
        return patched
    later = fragments[(number + f.next) & (len(fragments) - 1)].first
    follow[at] = _slot(later, base, capacity) if f.next else -1
    if f.pool < 0:
        return patched
    patch[0, patched] = at
    patch[1, patched] = f.pool
    return patched + 1


@compiled()
def _ask_for(fragments: Records, number: Int) -> None:
    """Begin to load fragment ``number`` and where it ends, to be read one round later."""
    address = np.int64(fragments.ctypes.data) + (number & (len(fragments) - 1)) * fragments.itemsize
    ask(address)
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
    """Write the slots of ``left[j]`` rows from ``offset[j]`` on to ``slots[at[j]:]``, for each j; patches.

    ``number[j]`` is the last fragment of the chain. All slices advance by one fragment per round, so that they
    wait for memory together, not one after another, and ask for it one round ahead. ``follow`` and ``patch``,
    where ``follow`` has room, are as in :func:`_after`.
    """
    mask = len(fragments) - 1
    pending = len(number)
    while pending:
        pending = 0
        for j in range(len(number)):
            target = _back(state, fragments, number[j], offset[j])
            pending += target != number[j]
            number[j] = target
            _ask_for(fragments, target)
    patched = 0
    begin = at.copy()
    base = state[0].head - state[0].head % capacity
    pending = len(number)
    while pending:
        pending = 0
        for j in range(len(number)):
            rows = left[j]
            if rows == 0:
                continue
            k, first = number[j], at[j]
            f = fragments[k & mask]
            row = f.first + offset[j] - f.offset
            stop = _stop(state, fragments, k)
            take = min(stop - row, rows)
            slot = _slot(row, base, capacity)
            slots[first] = slot
            for i in range(first + 1, first + take):
                slot += 1
                if slot == capacity:
                    slot = 0
                slots[i] = slot
            if len(follow):
                if first > begin[j]:
                    follow[first - 1] = slots[first]
                for i in range(first, first + take - 1):
                    follow[i] = slots[i + 1]
                last = first + take - 1
                if rows > take and f.pool >= 0:
                    patch[0, patched] = last
                    patch[1, patched] = f.pool
                    patched += 1
                if rows == take:  # elsewhere what follows is there in the next round, without waiting for it
                    patched = _after(
                        fragments, capacity, base, k, row + take, stop, last, follow, patch, patched
                    )
            left[j] = rows - take
            offset[j] += take
            at[j] = first + take
            number[j] = k + f.next
            if rows > take:
                _ask_for(fragments, k + f.next)
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
    """Draw a slice for each of ``firsts``, from ``uniform`` (float64 in [0, 1), two per slice); rows, patches.

    A chain is drawn by weight; its slice takes the place where the weight was hit (``start``) or any, uniformly.
    Places reach ``early`` rows before the chain and ``late`` rows after it; what is not there is left out. Slice j
    takes positions ``firsts[j] ... lasts[j]`` of ``slots``.
    """
    count = len(firsts)
    number, offset, left = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    at = 0
    size = len(tree) - 1  # a power of two, so tree[size] is the sum
    total = tree[size]
    for j in range(count):
        rest = min(np.int64(uniform[2 * j] * total), total - 1)
        c, step = 0, size // 2
        while step:
            if tree[c + step] <= rest:
                c += step
                rest -= tree[c]
            step //= 2
        chain = chains[c]
        live = chain.total - chain.dropped
        places = max(live - length + 1 + early + late, 1)
        begin = (rest if start else min(np.int64(uniform[2 * j + 1] * places), places - 1)) - early
        stop = min(begin + length, live)
        begin = max(begin, 0)
        take = stop - begin
        number[j], offset[j], left[j], firsts[j] = chain.last, chain.dropped + begin, take, at
        at += take
        lasts[j] = at - 1
    patched = walk(state, capacity, fragments, number, offset, left, firsts.copy(), slots, follow, patch)
    return at, patched


@compiled()
def _found(state: Records, capacity: Int, fragments: Records, slots: Array) -> tuple[Array, Array]:
    """Numbers of the live rows in ``slots``, and of the fragments that hold them.

    All searches advance together, so that they wait for memory together.
    """
    mask = len(fragments) - 1
    first, end, head = state[0].first, state[0].end, state[0].head
    rows = head + (slots - head) % capacity
    numbers = np.full(len(slots), first)
    step = np.int64(1)
    while step < end - first:
        step *= 2
    while step:
        for j in range(len(rows)):
            later = numbers[j] + step
            if later < end and fragments[later & mask].first <= rows[j]:
                numbers[j] = later
        step //= 2
    return rows, numbers


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
    """As :func:`draw`, for slices of up to ``lengths`` rows that begin in the slots ``starts``; rows, patches."""
    count = len(starts)
    rows, number = _found(state, capacity, fragments, starts)
    offset, left = np.empty(count, np.int64), np.empty(count, np.int64)
    at = 0
    for j in range(count):
        f = fragments[number[j] & (len(fragments) - 1)]
        offset[j] = f.offset + rows[j] - f.first
        left[j] = min(chains[f.chain].total - offset[j], lengths[j])
        firsts[j] = at
        at += left[j]
        lasts[j] = at - 1
    patched = walk(state, capacity, fragments, number, offset, left, firsts.copy(), slots, follow, patch)
    return at, patched


@compiled()
def _holder(state: Records, fragments: Records, number: Int, offset: Int) -> Int:
    """The fragment that holds ``offset``, in the chain that ends with fragment ``number``."""
    nearer = _back(state, fragments, number, offset)
    while nearer != number:
        number, nearer = nearer, _back(state, fragments, nearer, offset)
    return number


@compiled()
def _seek(
    state: Records,
    capacity: Int,
    fragments: Records,
    last: Int,
    marks: Array,
    offset: Int,
    limit: Int,
) -> Int:
    """The marked row nearest to ``offset``, from it to ``limit`` (either way), as an offset in the chain whose last
    fragment is ``last``; -1 if there is none."""
    mask = len(fragments) - 1
    base = _base(state, capacity)
    step = 1 if limit >= offset else -1
    number = _holder(state, fragments, last, offset)
    while True:
        f = fragments[number & mask]
        row = f.first + offset - f.offset
        stop = _stop(state, fragments, number) if step > 0 else f.first - 1
        while row != stop:
            if marks[_slot(row, base, capacity)]:
                return offset
            if offset == limit:
                return -1
            row += step
            offset += step
        number += f.next if step > 0 else -f.prev


@compiled()
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
    """Slot of a marked row of ``chain``, -1 if it has none; see :func:`marked`."""
    low, high, last = chain.dropped, chain.total, chain.last
    full = max(high - length, low)
    if high <= low or (strict and high - low < length):
        return -1
    final = np.int64(-1)
    if not strict:
        final = _seek(state, capacity, fragments, last, marks, full, high - 1)
    if final < 0:
        final = _seek(state, capacity, fragments, last, marks, full, low)
    if final < 0:
        return -1
    end = high
    if final + 1 < high:
        after = _seek(state, capacity, fragments, last, marks, final + 1, high - 1)
        end = high if after < 0 else after
    drawn = low + min(np.int64(uniform * (end - low)), end - low - 1)
    at = _seek(state, capacity, fragments, last, marks, drawn, low)
    if at < 0:
        at = _seek(state, capacity, fragments, last, marks, drawn, final)
    f = fragments[_holder(state, fragments, last, at) & (len(fragments) - 1)]
    return _slot(f.first + at - f.offset, _base(state, capacity), capacity)


@compiled()
def marked(
    state: Records,
    capacity: Int,
    fragments: Records,
    chains: Records,
    tree: Array,
    uniform: Array,
    length: Int,
    strict: bool,
    marks: Array,
    starts: Array,
) -> Int:
    """Draw slots where slices of ``length`` rows begin, among those with ``marks[slot]``; how many there are.

    A chain is drawn by weight (one without such a row gives way to the next one), then a row uniformly, and the
    slice begins at the mark at or before it: the first one of the chain if it has lost that. The rows drawn end
    where the slice from the last mark that is needed to reach the end of the chain begins; with ``strict``, from
    the last one with ``length`` rows. ``uniform`` are float64 in [0, 1), two per slice.
    """
    used = state[0].slots
    size = len(tree) - 1
    total = tree[size]
    for j in range(len(starts)):
        rest = min(np.int64(uniform[2 * j] * total), total - 1)
        c, step = 0, size // 2
        while step:
            if tree[c + step] <= rest:
                c += step
                rest -= tree[c]
            step //= 2
        slot = np.int64(-1)
        for _ in range(used):
            slot = _marked_start(
                state, capacity, fragments, chains[c], marks, uniform[2 * j + 1], length, strict
            )
            if slot >= 0:
                break
            c = c + 1 if c + 1 < used else 0
        if slot < 0:
            return j
        starts[j] = slot
    return len(starts)


@compiled()
def places(
    state: Records,
    capacity: Int,
    fragments: Records,
    chains: Records,
    begin: Array,
    length: Int,
    again: bool,
    strict: bool,
    places: Array,
) -> Int:
    """Write the slot and the rows of a slice of each chain to ``places``, in the order of their rows; how many.

    The slice of chain c begins ``begin[c]`` rows after its first live row; none if that is negative. With
    ``again`` further slices follow it to the end of the chain, and what is before it is one, too. They have
    ``length`` rows, or what is there; such shorter ones are left out if ``strict``.
    """
    s = state[0]
    mask = len(fragments) - 1
    base = _base(state, capacity)
    count = 0
    for number in range(s.first, s.end):
        f = fragments[number & mask]
        if begin[f.chain] < 0:
            continue
        chain = chains[f.chain]
        low = max(f.offset, chain.dropped)
        high = f.offset + _stop(state, fragments, number) - f.first
        at = chain.dropped + begin[f.chain]
        if again and not strict and low == chain.dropped and low < at:
            places[0, count], places[1, count] = _slot(f.first + low - f.offset, base, capacity), at - low
            count += 1
        if again and at < low:
            at += (low - at + length - 1) // length * length
        while low <= at < high and not (strict and at + length > chain.total):
            places[0, count] = _slot(f.first + at - f.offset, base, capacity)
            places[1, count] = min(length, chain.total - at)
            count += 1
            if not again:
                break
            at += length
    return count


@compiled()
def _stretch(
    state: Records, capacity: Int, fragments: Records, number: Int, low: Int, high: Int, slots: Array, at: Int
) -> Int:
    """Write the slots of the offsets ``low ... high`` of the chain of fragment ``number``, none of them after that
    fragment, to ``slots[at:]``; the position after them."""
    if low > high:
        return at
    base = _base(state, capacity)
    nearer = _back(state, fragments, number, low)
    while nearer != number:
        number = nearer
        nearer = _back(state, fragments, number, low)
    while True:
        f = fragments[number & (len(fragments) - 1)]
        row = f.first + low - f.offset
        take = min(_stop(state, fragments, number) - row, high - low + 1)
        for i in range(take):
            slots[at + i] = _slot(row + i, base, capacity)
        at += take
        low += take
        if low > high:
            return at
        number += f.next


@compiled()
def begun(
    state: Records,
    capacity: Int,
    fragments: Records,
    chains: Records,
    first: Int,
    length: Int,
    strict: bool,
    slots: Array,
) -> Int:
    """Slots of the rows from which ``length`` rows of their chain are there since the rows from number ``first``
    on are; how many. Unless ``strict``, the first row of each shorter chain that these rows lengthened, too."""
    s = state[0]
    mask = len(fragments) - 1
    number = s.end - 1
    while number > s.first and fragments[number & mask].first > first:
        number -= 1
    count = 0
    while number < s.end:
        f = fragments[number & mask]
        chain = chains[f.chain]
        old = f.offset + max(first - f.first, 0)  # rows of the chain before these
        low = max(old - length + 1, chain.dropped)
        high = f.offset + _stop(state, fragments, number) - f.first - length
        if not strict and chain.total - chain.dropped < length:
            low = high = chain.dropped
        count = _stretch(state, capacity, fragments, number, low, high, slots, count)
        number += 1
    return count


@compiled()
def beheaded(
    state: Records,
    capacity: Int,
    fragments: Records,
    chains: Records,
    touched: Array,
    length: Int,
    slots: Array,
) -> Int:
    """Slots of the first rows of those ``touched`` chains that have fewer than ``length`` rows; how many."""
    count = 0
    for c in touched:
        chain = chains[c]
        if 0 < chain.total - chain.dropped < length:
            first = chain.dropped
            count = _stretch(state, capacity, fragments, chain.last, first, first, slots, count)
    return count


@compiled()
def follow_rows(
    state: Records, capacity: Int, fragments: Records, slots: Array, follow: Array, patch: Array
) -> Int:
    """As :func:`draw` does for slices: the slot after each of ``slots``, any rows in any order; patches."""
    base, patched = _base(state, capacity), 0
    rows, numbers = _found(state, capacity, fragments, slots)
    for i in range(len(slots)):
        stop = _stop(state, fragments, numbers[i])
        patched = _after(fragments, capacity, base, numbers[i], rows[i] + 1, stop, i, follow, patch, patched)
    return patched


@compiled()
def ahead_rows(state: Records, capacity: Int, fragments: Records, slots: Array, ahead: Array) -> None:
    """Write the slots of the row in ``slots[i]`` and of the rows after it in its trajectory to ``ahead[i]``.

    -1 from where no row is stored on.
    """
    mask = len(fragments) - 1
    base = _base(state, capacity)
    rows, numbers = _found(state, capacity, fragments, slots)
    for i in range(len(slots)):
        row, number = rows[i], numbers[i]
        stop = _stop(state, fragments, number)
        for j in range(ahead.shape[1]):
            if row == stop:
                distance = fragments[number & mask].next
                if distance == 0:
                    ahead[i, j:] = -1
                    break
                number += distance
                row = fragments[number & mask].first
                stop = _stop(state, fragments, number)
            ahead[i, j] = _slot(row, base, capacity)
            row += 1
