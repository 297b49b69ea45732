"""Replay buffers for flat batches: storages, the trajectory index, samplers, transforms."""

from flatroll.buffers.crop import RandomCropTensorDict
from flatroll.buffers.index import TrajectoryIndex
from flatroll.buffers.memmap import LazyMemmapStorage
from flatroll.buffers.multi_step import MultiStep, MultiStepTransform
from flatroll.buffers.prioritized import PrioritizedSampler
from flatroll.buffers.prioritized_slices import PrioritizedSliceSampler
from flatroll.buffers.replay_buffer import ReplayBuffer
from flatroll.buffers.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from flatroll.buffers.slice_samplers import SliceSampler, SliceSamplerWithoutReplacement
from flatroll.buffers.storage import ListStorage, Storage
from flatroll.buffers.storages import LazyTensorStorage, TensorStorage
from flatroll.buffers.transforms import NextStateReconstructor
from flatroll.buffers.writers import RoundRobinWriter, Writer
from flatroll.layout.delta import NextObservationDelta

__all__ = [
    "LazyMemmapStorage",
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
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "TensorStorage",
    "TrajectoryIndex",
    "Writer",
]
