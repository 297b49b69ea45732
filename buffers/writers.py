"""Where new rows go."""

from typing import Any

from torch import Tensor

from flatroll.buffers.index import TrajectoryIndex
from flatroll.buffers.ring import Ring
from flatroll.buffers.storage import Rows


class Writer:
    """Decides which slots new rows take. One writer belongs to one buffer, which calls it under its lock."""

    def ring(self, capacity: int, indexed: bool, first: int = 0) -> Ring:
        """The counters of a storage of ``capacity`` slots, ``indexed`` if they have to know trajectories."""
        return TrajectoryIndex(capacity, first) if indexed else Ring(capacity, first)

    def check(self, batch: Any) -> None:
        """Raise if ``batch`` may not be written."""
        return

    def choose(self, ring: Ring, rows: Rows) -> tuple[Tensor, Tensor] | None:
        """Rows to keep and the slots they take, both int64; None: all rows, in the ring's order."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the writer that gave ``state`` stood."""
        return


class RoundRobinWriter(Writer):
    """One row after another; in a full storage each takes the place of the oldest one."""
