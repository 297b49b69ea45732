"""Replay buffers for flat batches: storages, samplers, transforms, and the index of stored trajectories."""

from typing import TYPE_CHECKING

from flatroll.buffers.checkpointers.h5 import H5StorageCheckpointer
from flatroll.buffers.checkpointers.rows import (
    DiskStorageCheckpointer,
    FlatStorageCheckpointer,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    StorageCheckpointerBase,
    StorageEnsembleCheckpointer,
    TensorStorageCheckpointer,
)
from flatroll.buffers.columns.column import After, Column, TensorColumn
from flatroll.buffers.ensemble import ReplayBufferEnsemble, SamplerEnsemble, StorageEnsemble, WriterEnsemble
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Draw, Ring
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.on_ray.buffer import RayReplayBuffer
from flatroll.buffers.on_ray.ensemble import RayReplayBufferEnsemble
from flatroll.buffers.protocols import Buffer
from flatroll.buffers.remote import BufferHandle, OwnerGoneError
from flatroll.buffers.replay_buffer import ReplayBuffer
from flatroll.buffers.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from flatroll.buffers.samplers.sampler import RandomSampler, Sampler
from flatroll.buffers.samplers.slices import SliceSampler
from flatroll.buffers.samplers.without_replacement import (
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
)
from flatroll.buffers.schedulers import (
    LambdaScheduler,
    LinearScheduler,
    ParameterScheduler,
    SchedulerList,
    StepScheduler,
)
from flatroll.buffers.steps.writer import StepWriter
from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.buffers.storages.disk.storage import DiskStorage
from flatroll.buffers.storages.item_kinds import collate
from flatroll.buffers.storages.list import LazyStackStorage, ListStorage
from flatroll.buffers.storages.memmap import LazyMemmapStorage
from flatroll.buffers.storages.storage import Storage
from flatroll.buffers.storages.tensors import LazyTensorStorage, TensorStorage
from flatroll.buffers.tensordict_buffers import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from flatroll.buffers.transforms.compose import Compose
from flatroll.buffers.transforms.entries import ExcludeTransform, RenameTransform, SelectTransform
from flatroll.buffers.transforms.hindsight import HindsightTransform
from flatroll.buffers.transforms.images import Resize, ToTensorImage
from flatroll.buffers.transforms.n_step import MultiStep, MultiStepTransform
from flatroll.buffers.transforms.next_state import NextStateReconstructor
from flatroll.buffers.transforms.random_crop import RandomCropTensorDict
from flatroll.buffers.transforms.transform import Transform
from flatroll.buffers.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)
from flatroll.layout.delta import NextObservationDelta
from flatroll.layout.old_names import old_names

__all__ = [
    "After",
    "BoundaryKeys",
    "Buffer",
    "BufferHandle",
    "Column",
    "ColumnStorage",
    "Compose",
    "DiskStorage",
    "DiskStorageCheckpointer",
    "Draw",
    "ExcludeTransform",
    "FlatStorageCheckpointer",
    "H5StorageCheckpointer",
    "HindsightTransform",
    "ImmutableDatasetWriter",
    "LambdaScheduler",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "LinearScheduler",
    "ListStorage",
    "ListStorageCheckpointer",
    "MultiStep",
    "MultiStepTransform",
    "NestedStorageCheckpointer",
    "NextObservationDelta",
    "NextStateReconstructor",
    "OwnerGoneError",
    "ParameterScheduler",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomCropTensorDict",
    "RandomSampler",
    "RayReplayBuffer",
    "RayReplayBufferEnsemble",
    "RenameTransform",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "Resize",
    "Ring",
    "RoundRobinWriter",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SchedulerList",
    "SelectTransform",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StepScheduler",
    "StepWriter",
    "Storage",
    "StorageCheckpointerBase",
    "StorageEnsemble",
    "StorageEnsembleCheckpointer",
    "TensorColumn",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "TensorStorageCheckpointer",
    "ToTensorImage",
    "TrajectoryIndex",
    "Transform",
    "Writer",
    "WriterEnsemble",
    "collate",
]

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__, {"OwnerGone": OwnerGoneError})
