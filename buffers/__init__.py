"""Replay buffers for flat batches: storages, the trajectory index, samplers, transforms."""

from flatroll.buffers.crop import RandomCropTensorDict
from flatroll.buffers.ensemble import ReplayBufferEnsemble
from flatroll.buffers.ensemble_parts import SamplerEnsemble, StorageEnsemble, WriterEnsemble
from flatroll.buffers.index import TrajectoryIndex
from flatroll.buffers.memmap import LazyMemmapStorage
from flatroll.buffers.multi_step import MultiStep, MultiStepTransform
from flatroll.buffers.named import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from flatroll.buffers.prioritized import PrioritizedSampler
from flatroll.buffers.prioritized_slices import PrioritizedSliceSampler
from flatroll.buffers.replay_buffer import ReplayBuffer
from flatroll.buffers.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from flatroll.buffers.slice_samplers import SliceSampler, SliceSamplerWithoutReplacement
from flatroll.buffers.storage import ListStorage, Storage
from flatroll.buffers.storages import LazyTensorStorage, TensorStorage
from flatroll.buffers.transforms import NextStateReconstructor
from flatroll.buffers.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)
from flatroll.layout.delta import NextObservationDelta

__all__ = [
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MultiStep",
    "MultiStepTransform",
    "NextObservationDelta",
    "NextStateReconstructor",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomCropTensorDict",
    "RandomSampler",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RoundRobinWriter",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "StorageEnsemble",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "TrajectoryIndex",
    "Writer",
    "WriterEnsemble",
]
