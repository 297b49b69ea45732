"""Offline data sets as replay buffers, and trajectories that are kept on disk."""

from flatroll.datasets.trajectories.buffer import TrajectoryReplayBuffer
from flatroll.datasets.trajectories.cache import TrajectoryCache

__all__ = ["TrajectoryCache", "TrajectoryReplayBuffer"]
