"""Finds other rows of the trajectories of a step writer's rows, whether they are stored or wait to be stored."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.index.ring import Array, Ring
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
    ring: Ring,
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
        ring: that of the buffer, whose lock is held.
        positions: where the stored rows are.

    Returns:
        int64 ``[2, M]``, which of the places, and the places of the rows chosen for them; None if another writer has
        overwritten one of the rows at ``places``.
    """
    from flatroll.kernels.slices.step_spans import step_spans  # numba

    index = (
        ring if isinstance(ring, TrajectoryIndex) else TrajectoryIndex(1)
    )  # a buffer without rows has no index yet
    table, used = positions.windows
    oldest = positions.oldest() if positions.ring is index else None
    if steps > stored:
        markers = tuple(staged[key].rows for key in (IS_INIT, TRAJ_IDS, DONE))
    else:
        markers = tuple(np.zeros((1, 1), kind) for kind in (np.bool_, np.int64, np.bool_))
    asked, spans = np.ascontiguousarray(places.numpy()), np.empty((2, len(places)), np.int64)
    where = asked, positions.num_envs, table, used, -1 if oldest is None else oldest, stored, steps - stored
    if not step_spans(*where, *markers, *index.tables, spans):
        return None
    step = asked // positions.num_envs
    which, chosen = choose(step - spans[0], spans[1] - spans[0])
    # From the row's own step to the chosen one, of the same env.
    goals: Array = asked[which] + (spans[0, which] + chosen - step[which]) * positions.num_envs
    return torch.from_numpy(np.stack([which, goals]))
