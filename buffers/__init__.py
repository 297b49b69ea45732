"""Replay buffers for flat batches: storages, the trajectory index, samplers, transforms."""

from flatroll.buffers.crop import RandomCropTensorDict
from flatroll.buffers.index import TrajectoryIndex
from flatroll.buffers.multi_step import MultiStep, MultiStepTransform
from flatroll.buffers.prioritized import PrioritizedSampler
from flatroll.buffers.prioritized_slices import PrioritizedSliceSampler
from flatroll.buffers.replay_buffer import ReplayBuffer
from flatroll.buffers.samplers import RandomSampler, Sampler, SliceSampler
from flatroll.buffers.storage import ListStorage, Storage
from flatroll.buffers.storages import LazyTensorStorage, TensorStorage
from flatroll.buffers.transforms import NextStateReconstructor
from flatroll.buffers.writers import RoundRobinWriter, Writer
from flatroll.layout.delta import NextObservationDelta

__all__ = [
    "LazyTensorStorage",
    "ListStorage",
    "MultiStep",
    "MultiStepTransform",
    "NextObservationDelta",
    "NextStateReconstructor",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomCropTensorDict",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SliceSampler",
    "Storage",
    "TensorStorage",
    "TrajectoryIndex",
    "Writer",
]
