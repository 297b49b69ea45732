"""What a replay buffer is put together from, and its locks."""

import os
import pickle
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.prefetcher import Prefetcher
from flatroll.buffers.samplers.base import RandomSampler, Sampler
from flatroll.buffers.storages.base import ListStorage, Storage
from flatroll.buffers.storages.parallel_lanes import grid
from flatroll.buffers.transforms.base import TransformLike, looks_ahead
from flatroll.buffers.writers import RoundRobinWriter, Writer
from flatroll.layout.checks import whole_number

Made: TypeAlias = tuple[Any, dict[str, Tensor], bool]  # a sample, its info, and whether a pass ended with it

_UNSAVED = ("_lock", "_write_lock", "_ahead", "_process")


class BufferParts:
    """Storage, sampler, writer, transforms and the ring of a replay buffer, and the locks that guard them."""

    def __init__(
        self,
        *,
        storage: Storage | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int | None = None,
        transform: TransformLike | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(
                f"generator must be a CPU generator (rows are drawn on the host), got {generator.device}"
            )
        if not isinstance(storage, Storage | None):
            raise TypeError(
                f"storage must be a storage such as LazyTensorStorage(max_size), got {type(storage).__name__}"
            )
        self.storage: Storage = ListStorage() if storage is None else storage
        self.sampler: Sampler = RandomSampler() if sampler is None else sampler
        self.sampler.attach(self.storage)
        self.writer: Writer = RoundRobinWriter() if writer is None else writer
        self.collate_fn = collate_fn
        self.prefetch = prefetch
        self.batch_size = batch_size
        self.dim_extend = self.storage.ndim - 1 if dim_extend is None else dim_extend
        self.generator = generator
        if not 0 <= self.dim_extend < self.storage.ndim:
            raise ValueError(
                f"dim_extend must be one of the {self.storage.ndim} dimensions of the storage (its ndim), "
                f"got {dim_extend}"
            )
        if batch_size is not None or prefetch:
            self._checked(batch_size)
        self._keys: BoundaryKeys | None = None
        self._started = False
        self._ring = Ring(self.storage.max_size)
        self._transforms: list[TransformLike] = []
        if transform is not None:
            self.append_transform(transform)
        self._make_locks()
        self.writer.fits(self.storage, self.sampler)
        if self.storage.contents is not None:
            self._write(self.storage.contents, None)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        ForkingPickler.register(cls, _by_value)

    def _make_locks(self) -> None:
        self._lock = threading.Lock()  # bookkeeping: held for microseconds
        self._write_lock = self.storage.write_lock()  # one writer at a time
        self._ahead = Prefetcher(self.prefetch, _Begin(self)) if self.prefetch else None
        self._process = os.getpid()

    def _enter(self) -> None:
        """Be ready in this process, to which the buffer may have come by ``fork``; RuntimeError if it cannot be."""
        if self._process != os.getpid():
            self.storage.enter_process()
            self._make_locks()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _UNSAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_locks()
        self.storage.reattach(self._ring)

    def __len__(self) -> int:
        return len(self._ring)

    def __repr__(self) -> str:
        name, kind, sampler = (type(part).__name__ for part in (self, self.storage, self.sampler))
        return f"{name}({len(self)} of {self._ring.capacity} rows, {kind}, {sampler})"

    @property
    def index(self) -> TrajectoryIndex | None:
        """The trajectory index; None before the first extend, and where nothing needs one."""
        return self._ring if isinstance(self._ring, TrajectoryIndex) else None

    def append_transform(self, transform: TransformLike) -> Self:
        """Add a transform after those there are: an object with ``forward(td)`` and perhaps ``inv(td)``, or a
        function. Samples go through ``forward`` in order, batches to store through ``inv`` in reverse order.

        Raises:
            TypeError: neither of the two.
            RuntimeError: a transform that reads ahead (n-step), but the rows stored so far are not indexed.
        """
        if not callable(transform) and not hasattr(transform, "forward"):
            raise TypeError(
                f"transform must have forward(td) or be a function of td, got {type(transform).__name__}"
            )
        if looks_ahead(transform) and self._started and self.index is None:
            raise RuntimeError(
                f"{type(transform).__name__} follows trajectories, which the rows stored so far cannot: append it "
                "before the first extend, or give it to ReplayBuffer(transform=...)"
            )
        self._transforms.append(transform)
        return self

    def _checked(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else batch_size
        if size is not None:
            whole_number("batch_size", size)
        return self.sampler.check(size)

    def _slots(self, index: Any) -> Tensor:
        """The positions that ``index`` names, in its shape."""
        if any(isinstance(part, str) for part in (index if isinstance(index, tuple) else [index])):
            raise TypeError(
                f"rows are written by position, got {index!r}: buffer[:] = TensorDict({{{index!r}: ...}}, ...) "
                "writes one entry of all rows"
            )
        slots = grid(self._ring.used, self.storage.lanes)
        if isinstance(index, slice) and index.step is not None and index.step < 0:
            return slots[list(range(len(slots))[index])]  # torch has no steps back
        try:
            return slots[index]
        except IndexError:
            if isinstance(index, float):
                raise TypeError(f"rows are indexed by integers, slices and masks, got {index!r}") from None
            raise IndexError(f"index {index!r} is out of range: {len(self)} rows are stored") from None

    @abstractmethod
    def _begin(self, size: int) -> Callable[[], Made]:
        """Draw rows; what is left to do, on any thread."""

    @abstractmethod
    def _write(self, data: Any, final: TensorDictBase | None) -> Tensor:
        """Store a batch whose batch dimensions are one."""

    def _alone(self, ring: Ring) -> str | None:
        """What of the buffer, besides the storage, counts rows and is seen by this process only; None for nothing."""
        if isinstance(ring, TrajectoryIndex):
            return "a trajectory index"
        for part, base, hooks in (
            (self.sampler, Sampler, ("claimed", "entered", "emptied", "update_priority", "state_dict")),
            (self.writer, Writer, ("choose", "state_dict")),
        ):
            if any(getattr(type(part), hook) is not getattr(base, hook) for hook in hooks):
                return f"a {type(part).__name__}"
        return None if type(ring) is Ring else f"a {type(ring).__name__}"

    def _follows(self) -> str | None:
        """What needs to know the trajectories; None for nothing."""
        if type(self.sampler).boundary_keys is not Sampler.boundary_keys:
            return type(self.sampler).__name__
        ahead = (type(transform).__name__ for transform in self._transforms if looks_ahead(transform))
        return next(ahead, "compact_obs=True" if self.storage.compact_obs else None)


def _by_value(buffer: BufferParts) -> tuple[Any, ...]:
    """How a buffer goes to another process: torch would share the memory of its tensors, but not its counters."""
    return pickle.loads, (pickle.dumps(buffer),)


class _Begin:
    """Draws a sample of the buffer, without keeping the buffer alive."""

    def __init__(self, buffer: BufferParts) -> None:
        self._buffer = weakref.ref(buffer)

    def __call__(self) -> Callable[[], Made]:
        buffer = self._buffer()
        assert buffer is not None  # whose Prefetcher called
        return buffer._begin(buffer._checked(None))
