"""Finds other rows of the trajectories of a step writer's rows, whether they are stored or wait to be stored."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.index.ring import Array
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.index.trajectory_rows import Choose
from flatroll.buffers.step_rows import StagedColumn, StepPositions
from flatroll.layout.keys import DONE, IS_INIT, TRAJ_IDS, NestedKey


def choose_places(
    places: Tensor,
    choose: Choose,
    staged: Mapping[NestedKey, StagedColumn],
    stored: int,
    steps: int,
    index: object,
    positions: StepPositions,
) -> Tensor | None:
    """Let ``choose`` choose another row of the same trajectory for some rows; see `TrajectoryRows.choose`.

    An env's steps of one trajectory follow each other, the stored ones and then the waiting ones. So a trajectory is
    known by its first step and the one after its last: of stored rows the trajectory index says them, of waiting rows
    their markers.

    Args:
        places: int64 ``[N]``, step * E + env of each row.
        choose: see `TrajectoryRows.choose`.
        staged: the waiting rows.
        stored: number of the first step that waits.
        steps: number of steps written.
        index: the ring of the buffer; its lock is held.
        positions: where the stored rows are.

    Returns:
        int64 ``[2, M]``, which of the places, and the places of the rows chosen for them; None if another writer has
        overwritten one of the rows at ``places``.
    """
    num_envs, filled = positions.num_envs, steps - stored
    step, env = np.divmod(places.numpy(), num_envs)
    waits = step >= stored
    if filled:
        begins, ends = (part + stored for part in tail_runs(staged, filled))  # [E, filled]
        tail = np.maximum(step - stored, 0)
        first, stop = begins[env, tail], ends[env, tail]
    else:
        first = stop = step
    oldest = positions.oldest() if positions.ring is index else None
    if oldest is None or not isinstance(index, TrajectoryIndex):
        if not waits.all():
            return None
    else:
        # Of a waiting row, its env's last stored row: perhaps it is of the same trajectory.
        known = np.minimum(step, stored - 1)
        numbers = positions.row_numbers(known, env)
        if len(numbers) and int(numbers.min()) < index.head:
            return None
        at, count, chains = index.extents(torch.from_numpy(numbers % index.capacity))
        known_first, known_stop = known - np.minimum(at, known - oldest), known + count - at
        if filled:
            # Where the stored rows of a trajectory go on in the waiting ones, it ends with the first run of these.
            ids, init = (staged[key].rows[env, 0] for key in (TRAJ_IDS, IS_INIT))
            goes_on = (known_stop == stored) & ~init & index.goes_on(chains, ids)
            known_stop = np.where(goes_on, ends[env, 0], known_stop)
            of_stored = ~waits | (goes_on & (first == stored))
        else:
            of_stored = np.True_
        first, stop = np.where(of_stored, known_first, first), np.where(of_stored, known_stop, stop)
    which, chosen = choose(step - first, stop - first)
    return torch.from_numpy(np.stack([which, (first[which] + chosen) * num_envs + env[which]]))


def tail_runs(staged: Mapping[NestedKey, StagedColumn], filled: int) -> tuple[Array, Array]:
    """Return the first step of the run of each waiting row, and the step after its last, counted among the ``filled``
    waiting steps; int64 ``[E, filled]``."""
    init, ids, done = (staged[key].rows[:, :filled] for key in (IS_INIT, TRAJ_IDS, DONE))
    starts = init.copy()
    starts[:, 0] = True
    starts[:, 1:] |= (ids[:, 1:] != ids[:, :-1]) | done[:, :-1]
    at = np.arange(filled)
    begins: Array = np.maximum.accumulate(np.where(starts, at, 0), 1)
    # The next start after each row, carried backwards; the last run ends with the waiting rows.
    later = np.full_like(begins, filled)
    later[:, :-1] = np.where(starts[:, 1:], at[1:], filled)
    ends: Array = np.minimum.accumulate(later[:, ::-1], 1)[:, ::-1]
    return begins, ends
