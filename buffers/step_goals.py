"""Finds other rows of the trajectories of a step writer's rows, whether they are stored or wait to be stored."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.index.ring import Array, Ring
from flatroll.buffers.index.trajectory_index import Choose, TrajectoryIndex
from flatroll.kernels.rows.records import CHAIN, FRAGMENT, STATE


class StepTables(NamedTuple):
    """Where the rows of a step writer are.

    Attributes:
        windows: int64 ``[3, >= used]``, of each stored window its first step, the number of its first row in the ring,
            and its steps.
        used: number of windows.
        oldest: first step that is stored whole; -1 if none is.
        stored: number of the first step that waits.
        filled: steps that wait.
        init, ids, done: markers of the waiting rows, ``[E, >= filled]``.
    """

    windows: Array
    used: int
    oldest: int
    stored: int
    filled: int
    init: Array
    ids: Array
    done: Array


def choose_places(
    places: Tensor, num_envs: int, choose: Choose, tables: StepTables, ring: Ring
) -> Tensor | None:
    """Let ``choose`` choose another row of the same trajectory for some rows; see `TrajectoryIndex.choose`.

    An env's steps of one trajectory follow each other, the stored ones and then the waiting ones. So a trajectory is
    known by its first step and the one after its last: of stored rows the trajectory index says them, of waiting rows
    their markers.

    Args:
        places: int64 ``[N]``, step * E + env of each row.
        num_envs: E.
        choose: see `TrajectoryIndex.choose`.
        tables: where the rows are.
        ring: that of the buffer, whose lock is held.

    Returns:
        int64 ``[2, M]``, which of the places, and the places of the rows chosen for them; None if another writer has
        overwritten one of the rows at ``places``.
    """
    from flatroll.kernels.slices.step_spans import step_spans  # numba

    # A buffer without rows has no index yet.
    nothing = np.zeros(1, STATE), 1, np.zeros(1, FRAGMENT), np.zeros(1, CHAIN)
    index = ring.tables if isinstance(ring, TrajectoryIndex) else nothing
    asked, spans = np.ascontiguousarray(places.numpy()), np.empty((2, len(places)), np.int64)
    if not step_spans(asked, num_envs, *tables, *index, spans):
        return None
    step = asked // num_envs
    which, chosen = choose(step - spans[0], spans[1] - spans[0])
    # From the row's own step to the chosen one, of the same env.
    goals: Array = asked[which] + (spans[0, which] + chosen - step[which]) * num_envs
    return torch.from_numpy(np.stack([which, goals]))
