"""How a storage's rows are read and written by position: through the buffer that owns them, or without one.

``storage[i]`` asks one of these; :class:`Storage` itself only serves whoever asks: it checks, copies and reads rows.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.index.ring import Draw, Follow, Ring
from flatroll.buffers.storages.positions import in_shape, slots_at
from flatroll.buffers.storages.records import Rows

T = TypeVar("T")


class StorageOwner(Protocol):
    """The part of `flatroll.buffers.Buffer` that a storage uses of the buffer it belongs to.

    Attributes:
        ring: counts the rows and names their slots; another object after ``empty`` and ``load_state_dict``.
        started: whether the buffer has written rows to the storage.
        lock: protects ``ring`` and what follows it; held for microseconds.
        write_lock: admits one writer at a time; taken before ``lock``.
    """

    ring: Ring
    started: bool
    lock: threading.Lock
    write_lock: AbstractContextManager[Any]

    def __len__(self) -> int: ...

    def enter_process(self) -> None:
        """Get ready in this process, to which the buffer may have come by ``fork``."""
        ...

    def overwrite(self, index: Any, data: Any) -> None:
        """Write ``data``, a batch of the shape of ``index``, over stored rows, without the transforms' ``inv``."""
        ...

    def read_drawn(
        self, ring: Ring, draw: Draw, draw_again: Callable[[Ring], Draw], read: Callable[[Ring, Draw], T]
    ) -> tuple[Draw, T]:
        """Return ``read(ring, draw)``, called without a lock, and the draw that it belongs to.

        If another thread overwrote one of the rows meanwhile, ``draw_again(ring)`` draws others, under the lock.
        """
        ...


class AccessedStorage(Protocol):
    """The part of `flatroll.buffers.Storage` by which its rows are reached by position."""

    ndim: int
    lanes: torch.Size
    compact_obs: bool
    max_size: int

    @property
    def had_buffer(self) -> bool:
        """Whether the storage belonged to a buffer, which was deleted."""
        ...

    def batch_of_one(self, item: object) -> Any:
        """Return a batch of one item, for :meth:`prepare`."""
        ...

    def prepare(self, batch: object, final: None, keys: None) -> Rows:
        """Check a batch and lay it out."""
        ...

    def put(self, slots: Tensor, rows: Rows) -> None:
        """Copy rows to slots."""
        ...

    def read_rows(self, slots: Tensor, follow: Follow | None = None) -> Any:
        """Return copies of stored rows, as columns by key or as items."""
        ...

    def build(self, values: Any, shape: torch.Size) -> Any:
        """Turn what :meth:`read_rows` returned into a batch of batch shape ``shape``."""
        ...


class Access(ABC):
    """Reads and writes the rows of a storage by position; the arguments are those of `Storage.get` and `set`."""

    @abstractmethod
    def count(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def get(self, storage: AccessedStorage, index: object) -> Any:
        """Return the rows at ``index``."""

    @abstractmethod
    def set(self, storage: AccessedStorage, index: object, data: object) -> None:
        """Write ``data`` over the rows at ``index``."""


class ThroughBuffer(Access):
    """Access to rows of a buffer, which knows their order and which of them are readable."""

    def __init__(self, buffer: StorageOwner) -> None:
        self.buffer = buffer

    @override
    def count(self) -> int:
        return len(self.buffer)

    @override
    def get(self, storage: AccessedStorage, index: object) -> Any:
        buffer = self.buffer
        buffer.enter_process()
        slots = slots_at(index, buffer.ring, storage.lanes)
        asked = slots.reshape(-1)
        strict = not isinstance(index, slice)

        def draw_again(ring: Ring) -> Draw:
            return ring.draw_slots(asked, strict, storage.compact_obs)

        with buffer.lock:
            ring = buffer.ring
            draw = draw_again(ring)
        draw, values = buffer.read_drawn(
            ring, draw, draw_again, lambda _, draw: storage.read_rows(draw.slots, draw.follow)
        )

        return _shaped(storage, values, slots, len(draw.slots))

    @override
    def set(self, storage: AccessedStorage, index: object, data: object) -> None:
        self.buffer.overwrite(index, data)


class WithoutBuffer(Access):
    """Access to a storage that belongs to no buffer; counts its rows itself, once there are any."""

    def __init__(self) -> None:
        self.ring: Ring | None = None

    @override
    def count(self) -> int:
        if self.ring is None:
            return 0
        return len(self.ring)

    @override
    def get(self, storage: AccessedStorage, index: object) -> Any:
        if self.ring is None and storage.had_buffer:
            raise RuntimeError(
                "the storage's buffer, which knew the order of its rows, was deleted: keep a reference to it"
            )

        ring = self.ring or Ring(1)
        slots = slots_at(index, ring, storage.lanes)
        asked = slots.reshape(-1)
        values = storage.read_rows(asked)
        return _shaped(storage, values, slots, len(asked))

    @override
    def set(self, storage: AccessedStorage, index: object, data: object) -> None:
        if storage.ndim > 1 or storage.compact_obs:
            raise RuntimeError(
                "a storage with ndim > 1 or compact_obs=True can be written only by a ReplayBuffer"
            )

        ring = self.ring or Ring(storage.max_size)
        if isinstance(index, slice):
            slots = torch.arange(storage.max_size)[index]
        else:
            slots = torch.as_tensor(index, device="cpu")
        if slots.dtype is torch.bool:
            slots = slots.nonzero().squeeze(1)
        if not slots.ndim:
            data = storage.batch_of_one(data)

        rows = storage.prepare(data, None, None)
        slots = slots.reshape(-1)
        if len(slots) != rows.count:
            raise ValueError(f"index has {len(slots)} positions, data {rows.count} rows")

        new = torch.from_numpy(np.unique(slots[slots >= len(ring)].numpy()))  # sorted
        expected = torch.arange(len(ring), len(ring) + len(new))
        too_many = len(ring) + len(new) > storage.max_size
        if bool((slots < 0).any()) or not torch.equal(new, expected) or too_many:
            raise IndexError(
                f"positions must be those of the {len(ring)} stored rows or follow them without a gap, below "
                f"max_size={storage.max_size}, got {slots.tolist()}"
            )

        storage.put(slots, rows)
        ring.publish(len(new))
        self.ring = ring


def _shaped(storage: AccessedStorage, values: Any, slots: Tensor, count: int) -> Any:
    """Return ``count`` rows that were read as one item or as a batch of the shape of ``slots``."""
    if isinstance(values, list):
        if slots.ndim:
            return values
        return values[0]
    return in_shape(storage.build(values, torch.Size([count])), slots, count, storage.lanes)
