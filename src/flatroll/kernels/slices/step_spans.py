"""A compiled kernel that finds the trajectories of a step writer's rows, both stored and waiting ones.

The index is the record ``state, capacity, fragments, chains`` (`flatroll.kernels.rows.records`).

This module imports numba: import it inside the function that needs it.
"""

import numpy as np

from flatroll.kernels.compiled import Array, Int, compiled, helper
from flatroll.kernels.rows.records import Index
from flatroll.kernels.slices.links import place, rows_in_slots


@helper
def _starts(init: Array, ids: Array, done: Array, env: Int, at: Int) -> bool:
    """Return whether a waiting row does not continue the waiting row before it."""
    return bool(at == 0 or init[env, at] or ids[env, at] != ids[env, at - 1] or done[env, at - 1])


@helper
def _run_stop(init: Array, ids: Array, done: Array, env: Int, at: Int, filled: Int) -> Int:
    """Return the waiting row after the last one of the run of row ``at``."""
    at += 1
    while at < filled and not _starts(init, ids, done, env, at):
        at += 1
    return at


@compiled()
def step_spans(
    places: Array,
    num_envs: Int,
    stored_steps: tuple[Array, Int, Int],
    waiting_steps: tuple[Int, Int, Array, Array, Array],
    index: Index,
    spans: Array,
) -> bool:
    """Find the first step of each row's trajectory and the one after its last, among stored and waiting rows.

    Args:
        places: step * E + env of each row, int64 ``[N]``.
        num_envs: E.
        stored_steps: ``windows, used, oldest``:
            windows: int64 ``[3, >= used]``, for each stored window its first step, the number of its first row in the
                ring, and its steps; an env's rows are adjacent.
            used: number of windows.
            oldest: first complete stored step; -1 if there is none.
        waiting_steps: ``stored, filled, init, ids, done``:
            stored: number of the first waiting step.
            filled: number of waiting steps.
            init, ids, done: markers of the waiting rows, ``[E, >= filled]``.
        spans: int64 ``[2, N]``, the result.

    Returns:
        False if one of the rows was overwritten.
    """
    state, capacity, fragments, chains = index
    windows, used, oldest = stored_steps
    stored, filled, init, ids, done = waiting_steps

    count = len(places)
    slots = np.zeros(count, np.int64)

    # the slot of each row, or of the stored row that leads to a waiting one
    for i in range(count):
        step = places[i] // num_envs
        if oldest < 0:
            if step < stored:
                return False
            continue

        # the row itself, or if it is waiting, its env's last stored row, which may belong to the same trajectory
        env = places[i] - step * num_envs
        step = min(step, stored - 1)

        low = 0
        high = used
        while low < high:
            middle = (low + high) // 2
            if windows[0, middle] <= step:
                low = middle + 1
            else:
                high = middle

        number = windows[1, low - 1] + env * windows[2, low - 1] + step - windows[0, low - 1]
        if low == 0 or number < state[0].head:
            return False
        slots[i] = number % capacity

    # the extent of each row's trajectory: among the stored rows, then among the waiting ones
    rows, numbers = rows_in_slots(state, capacity, fragments, slots)
    for i in range(count):
        step = places[i] // num_envs
        env = places[i] - step * num_envs
        at = step - stored
        joined = False

        if oldest >= 0:
            f = fragments[place(state, fragments, numbers[i])]
            chain = chains[f.chain]

            # steps of the trajectory that are stored before the row
            known = min(step, stored - 1)
            before = f.offset + rows[i] - f.first - chain.dropped
            spans[0, i] = known - min(before, known - oldest)

            # the step after the last stored one
            stop = known + chain.total - chain.dropped - before
            # does the trajectory continue in the first run of the waiting rows?
            if filled and stop == stored and chain.open:
                joined = chain.id == ids[env, 0] and not init[env, 0]
            if joined:
                stop = stored + _run_stop(init, ids, done, env, 0, filled)
            spans[1, i] = stop

        if at >= 0:
            first = at
            while not _starts(init, ids, done, env, first):
                first -= 1
            if first > 0 or not joined:
                spans[0, i] = stored + first
                spans[1, i] = stored + _run_stop(init, ids, done, env, at, filled)
    return True
