"""Replay buffers for flat batches: storages, the trajectory index, samplers, transforms."""

from flatroll.buffers.index import TrajectoryIndex
from flatroll.buffers.replay_buffer import ReplayBuffer
from flatroll.buffers.samplers import RandomSampler, SliceSampler
from flatroll.buffers.storages import LazyTensorStorage
from flatroll.buffers.transforms import NextStateReconstructor
from flatroll.layout.delta import NextObservationDelta

__all__ = [
    "LazyTensorStorage",
    "NextObservationDelta",
    "NextStateReconstructor",
    "RandomSampler",
    "ReplayBuffer",
    "SliceSampler",
    "TrajectoryIndex",
]
