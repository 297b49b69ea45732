"""Compiled kernels that find the rows of a step writer by the numbers of their steps and envs.

A row's *place* is the number step * E + env, for E envs.

This module imports numba: import it inside the function that needs it.
"""

import numpy as np

from flatroll.kernels.compiled import Array, Int, compiled
from flatroll.kernels.rows.gather import gather_next, scatter
from flatroll.kernels.rows.records import Index, Where
from flatroll.kernels.slices.drawing import follow_rows
from flatroll.kernels.slices.links import row_slot

_ANY = 2**62  # rows of an array whose size is not checked


@compiled()
def number_places(steps: Array, envs: Array, num_envs: Int, first: Int, stop: Int, places: Array) -> bool:
    """Fill ``places`` (int64 ``[N]``).

    Return False if a step is not from ``first`` to ``stop - 1``, or an env not from 0 to ``num_envs - 1``.
    """
    for i in range(len(steps)):
        if steps[i] < first or steps[i] >= stop or envs[i] < 0 or envs[i] >= num_envs:
            return False
        places[i] = steps[i] * num_envs + envs[i]
    return True


@compiled()
def locate(places: Array, num_envs: Int, where: Where, slots: Array, waiting: Array) -> Int:
    """Find the rows at ``places``: the stored ones in a ring, the others in arrays ``[E, length]``.

    Args:
        places: int64 ``[N]``.
        num_envs: E.
        where: ``windows, used, head, capacity, stored, length``:
            windows: int64 ``[3, >= W]``, for each stored window its first step, the number of its first row in the
                ring, and its steps; an env's rows are adjacent.
            used: W; ``windows`` may have more columns.
            head: number of the oldest row that may be read.
            capacity: capacity of the ring.
            stored: number of the first waiting step; all later ones wait, too.
            length: number of steps in the arrays.
        slots: int64 ``[N]``, becomes the slot of each row, an arbitrary stored one for waiting rows.
        waiting: int64 ``[2, N]``, becomes (position in ``places``, row env * length + step of the arrays) for each
            waiting row.

    Returns:
        number of waiting rows; -1 if one of the others was overwritten.
    """
    windows, used, head, capacity, stored, length = where
    count = 0
    known = np.int64(0)
    slot_0 = head - head % capacity  # number of the row that slot 0 held when the oldest row was written

    for i in range(len(places)):
        step = places[i] // num_envs
        env = places[i] - step * num_envs

        if step >= stored:
            waiting[0, count] = i
            waiting[1, count] = env * length + step - stored
            count += 1
            continue

        # The last window that begins at or before the step. First guess that all windows have ``length``
        # steps, else search: windows 0 ... low - 1 begin at or before the step, windows from high on begin
        # after it.
        low = min((step - windows[0, 0]) // length + 1, used)
        high = used
        if not (low > 0 and windows[0, low - 1] <= step and (low == used or windows[0, low] > step)):
            low = 0
            while low < high:
                middle = (low + high) // 2
                if windows[0, middle] <= step:
                    low = middle + 1
                else:
                    high = middle

        if low == 0:
            return -1

        number = windows[1, low - 1] + env * windows[2, low - 1] + step - windows[0, low - 1]
        if number < head:
            return -1

        known = row_slot(number, slot_0, capacity)
        slots[i] = known

    for j in range(count):
        slots[waiting[0, j]] = known

    return count


@compiled()
def read_steps(
    places: Array,
    num_envs: Int,
    where: Where,
    index: Index,
    columns: Array,
    pool: Array,
    roots: Array,
    target: Array,
) -> bool:
    """Copy the rows at ``places`` of K columns, and the next observations of M of these columns.

    This is :func:`locate`, `flatroll.kernels.rows.gather` and :func:`follow_rows` in one call.

    Args:
        places, num_envs, where: as for :func:`locate`.
        index: tables of the trajectory index (`flatroll.kernels.rows.records`), read only if there are ``roots``.
        columns: int64 ``[3, K + M]``, addresses of the stored columns, bytes of their rows, and addresses of the arrays
            of waiting rows; the last M are next observations, which are not stored.
        pool: int64 ``[M]``, addresses of the pool's columns.
        roots: int64 ``[M]``, the columns, among the K, whose next values the last M are.
        target: int64 ``[K + M]``, addresses of the copies.

    Returns:
        False, with nothing copied, if one of the rows was overwritten.
    """
    _, _, _, capacity, _, _ = where

    count = len(places)
    slots = np.empty(count, np.int64)
    waiting = np.empty((2, count), np.int64)
    wait = locate(places, num_envs, where, slots, waiting)
    if wait < 0:
        return False

    source = columns[0]
    size = columns[1]
    staged = columns[2]
    if wait < count:
        follow = np.empty(count, np.int64)
        patch = np.empty((2, count), np.int64)
        patched = 0
        if len(roots):
            patched = follow_rows(index, slots, follow, patch)

        found = patch[:, :patched]
        gather_next(source, target, size, capacity, roots, slots, follow, found, pool)

    scatter(staged, target, size, _ANY, waiting[1, :wait], waiting[0, :wait])
    return True
