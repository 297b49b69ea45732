"""Joining what windows cut: complete trajectories out of a stream of flat batches."""

import torch
from tensordict import TensorDict

from flatroll.layout.keys import DONE, NestedKey, marker, require


class TrajectoryJoiner:
    """Holds the rows of open trajectories back until they end.

    Args:
        per_batch: how many complete trajectories make a batch.
        traj_key: the key of the trajectory ids.
    """

    def __init__(self, per_batch: int, traj_key: NestedKey) -> None:
        self._per_batch = per_batch
        self._traj_key = traj_key
        self._open: TensorDict | None = None
        self._ready: list[TensorDict] = []
        self._count = 0

    def add(self, batch: TensorDict) -> list[TensorDict]:
        """Take a window in; return the batches of ``per_batch`` complete trajectories it fills."""
        rows = batch if self._open is None else torch.cat([self._open, batch])
        ids = require(rows, self._traj_key)
        # Stable: the rows of one trajectory keep their order in time.
        rows = rows[ids.argsort(stable=True)]
        ids = require(rows, self._traj_key)
        last = torch.ones_like(ids, dtype=torch.bool)
        last[:-1] = ids[1:] != ids[:-1]
        lengths = last.nonzero().squeeze(-1).diff(prepend=torch.tensor([-1], device=ids.device))
        complete = marker(rows, DONE)[last]
        mask = complete.repeat_interleave(lengths)
        self._open = rows[~mask]
        self._ready.extend(rows[mask].split(lengths[complete].tolist()))
        batches = []
        while len(self._ready) >= self._per_batch:
            batches.append(torch.cat(self._ready[: self._per_batch]))
            self._ready = self._ready[self._per_batch :]
        return batches

    def rest(self) -> list[tuple[TensorDict, None]]:
        """The complete trajectories that did not fill a batch, as a last, smaller one."""
        ready, self._ready = self._ready, []
        return [(torch.cat(ready), None)] if ready else []

    def forget(self) -> None:
        """Drop the open trajectories (their env has been reset)."""
        self._open = None
