"""Keeps the trajectories that were read last."""

from collections import OrderedDict
from typing import Any

from flatroll.layout.checks import whole_number


class TrajectoryCache:
    """The last few trajectories, by number, first in, first out.

    Args:
        max_size: number of trajectories. Default 5.

    >>> cache = TrajectoryCache(max_size=1)
    >>> cache.put(0, {"rewards": 1}), cache.put(1, {"rewards": 2})
    (None, None)
    >>> cache.get(0), cache.get(1), len(cache)
    (None, {'rewards': 2}, 1)
    """

    def __init__(self, max_size: int = 5) -> None:
        self.max_size = whole_number("max_size", max_size)
        self._trajectories: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._trajectories)

    def get(self, trajectory_id: int) -> dict[str, Any] | None:
        """Return the fields of a trajectory, or None."""
        return self._trajectories.get(trajectory_id)

    def put(self, trajectory_id: int, trajectory: dict[str, Any]) -> None:
        """Keep a trajectory; the one that is there for the longest time goes if there are too many."""
        self._trajectories[trajectory_id] = trajectory
        while len(self._trajectories) > self.max_size:
            self._trajectories.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._trajectories.clear()
