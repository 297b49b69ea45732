"""`TrajectoryJoiner`: complete trajectories, from windows that cut them."""

from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.keys import DONE, NestedKey, marker, require


class TrajectoryJoiner:
    """Keeps the rows of unfinished trajectories until they end, and returns complete trajectories.

    Complete trajectories are ordered by the window in which they ended, then by id. The first ones of a run are
    therefore short; over a whole run only open trajectories are left out.

    Args:
        per_batch: complete trajectories per batch.
        traj_key: the key of the trajectory ids.
    """

    def __init__(self, per_batch: int, traj_key: NestedKey) -> None:
        self.per_batch = per_batch
        self._traj_key = traj_key
        self._open: TensorDict | None = None
        self._ready: list[TensorDict] = []

    @property
    def waiting(self) -> int:
        """Number of rows that are not yet in a batch."""
        return sum(map(len, self._ready)) + (0 if self._open is None else len(self._open))

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that wait: those of open trajectories, and the complete ones."""
        return {"open": self._open, "ready": list(self._ready)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with these rows."""
        self._open = state["open"]
        self._ready = list(state["ready"])

    def add(self, batch: TensorDict) -> None:
        """Add a flat batch; trajectories that it completes become available to :meth:`pop`."""
        if self._open is None:
            rows = batch
        else:
            rows = cast(TensorDict, TensorDict.cat([self._open, batch]))
        # Stable: the rows of one trajectory keep their order in time.
        rows = rows[require(rows, self._traj_key).argsort(stable=True)]
        ids = require(rows, self._traj_key)
        # Rows are sorted by id: find the last row of each trajectory (bool [N]) and its row count.
        last = torch.ones_like(ids, dtype=torch.bool)
        last[:-1] = ids[1:] != ids[:-1]
        lengths = last.nonzero().squeeze(-1).diff(prepend=ids.new_tensor([-1]))
        complete = marker(rows, DONE)[last]
        if not bool(complete.any()):
            self._open = rows
            return
        mask = complete.repeat_interleave(lengths)  # from one bool per trajectory to one per row
        self._open = rows[~mask]
        pieces: Any = rows[mask].split(lengths[complete].tolist())
        self._ready.extend(pieces)

    def pop(self, last: bool) -> TensorDict | None:
        """Return the next ``per_batch`` complete trajectories, or fewer if it is the last batch; or None."""
        if len(self._ready) < (1 if last else self.per_batch):
            return None
        ready = self._ready[: self.per_batch]
        self._ready = self._ready[self.per_batch :]
        return cast(TensorDict, TensorDict.cat(ready))

    def drop_open_but(self, ids: Tensor) -> None:
        """Drop unfinished trajectories whose ids are not in ``ids``: a reset has cut them."""
        if self._open is not None:
            self._open = self._open[torch.isin(require(self._open, self._traj_key), ids)]

    def drop_open(self) -> None:
        """Drop all unfinished trajectories."""
        self._open = None
