"""What a replay buffer asks of its storage, and the storage that takes anything: a list."""

import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.base import After, Columns
from flatroll.buffers.index.fragments import BoundaryKeys, Runs
from flatroll.buffers.index.ring import Draw, Follow, Ring
from flatroll.buffers.storages.item_kinds import Structure, apart, stacked
from flatroll.buffers.storages.next_pool import NextPool
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import NestedKey


@dataclass(frozen=True, slots=True)
class Rows:
    """A checked batch, ready to be copied into a storage.

    Attributes:
        count: number of rows.
        columns: what the storage keeps per row, by key.
        runs: the fragments of the batch; None where no trajectory index is kept.
        tails: compact storage: next observation of each fragment's last row, by root key.
        items: the items of a storage without columns.
    """

    count: int
    columns: Columns = field(default_factory=dict)
    runs: Runs | None = None
    tails: Columns = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)


class Storage(ABC):
    """The container of a replay buffer: ``max_size`` slots, written and read by position.

    One storage belongs to one buffer, which knows the order of the rows and which of them may be read.

    Args:
        max_size: number of slots.

    Attributes:
        ndim: number of batch dimensions; with 2 or more, slots are steps of several parallel lanes.
        lanes: sizes of the batch dimensions after the first.
        compact_obs: whether ``("next", observation)`` is read from the following row.
        shares: whether columns want to know which rows continue stored ones (`After`).
        structure: what kind of data there is, known from the first batch on.
        pool: the next observations that no row holds; None unless compact.
    """

    ndim: int = 1
    lanes: torch.Size = torch.Size([])
    compact_obs: bool = False
    shares: bool = False
    structure: Structure | None = None
    pool: NextPool | None = None

    def __init__(self, max_size: int) -> None:
        whole_number("max_size", max_size)
        self.max_size = max_size

    @property
    def capacity(self) -> int:
        """Rows there is room for: ``max_size``, rounded down to whole steps of all lanes."""
        return self.max_size // self.lanes.numel() * self.lanes.numel()

    @property
    def contents(self) -> Any:
        """The batch that the storage was made with, all of whose rows are there from the start; None for none."""
        return None

    def write_lock(self) -> AbstractContextManager[Any]:
        """A lock for who writes; it covers other processes where they can write too."""
        return threading.Lock()

    def attach(self, ring: Ring, alone: str | None, first: bool = False) -> None:
        """From now on ``ring`` counts the rows; kept where other processes see it, if they see the rows.

        Args:
            ring: the ring.
            alone: what else of the buffer counts rows, which other processes cannot see; None for nothing.
            first: whether the buffer begins to use this storage.
        """
        return

    def reattach(self, ring: Ring) -> None:
        """The buffer was unpickled, ``ring`` with it: it stands where the original stands, if that is shared."""
        return

    def enter_process(self) -> None:
        """The buffer came to another process by ``fork``; RuntimeError if it does not work there."""
        return

    @abstractmethod
    def prepare(
        self, batch: Any, final: TensorDictBase | None, keys: BoundaryKeys | None, whole: bool = False
    ) -> Rows:
        """Check ``batch`` and lay it out, its last `capacity` rows or all (``whole``). Nothing is stored yet."""

    @abstractmethod
    def write(self, slot: int, rows: Rows, after: After | None = None) -> None:
        """Copy ``rows`` to ``slot`` and the slots after it, going on at slot 0 after the last one."""

    @abstractmethod
    def put(self, slots: Tensor, rows: Rows, at: Tensor | None = None) -> None:
        """Copy the rows ``at`` (default: all) of ``rows`` to ``slots``, in any order."""

    @abstractmethod
    def set(self, draw: Draw, data: Any, shape: torch.Size, keys: BoundaryKeys | None) -> None:
        """Overwrite the rows that were drawn with ``data`` of batch shape ``shape``."""

    @abstractmethod
    def get(
        self,
        slots: Tensor,
        follow: Follow | None = None,
        *,
        slices: bool = False,
        keys: frozenset[NestedKey] | None = None,
    ) -> Any:
        """Copies of rows: columns by key, or items.

        Args:
            slots: int64 ``[N]``, positions of the rows.
            follow: where their next observations stand; a compact storage needs it to give them.
            slices: whether the slots come in stretches of neighbours (a hint, for speed).
            keys: which columns, default all.
        """

    @abstractmethod
    def build(self, values: Any, shape: torch.Size) -> Any:
        """What :meth:`get` gave, as a batch of batch shape ``shape``."""

    @property
    @abstractmethod
    def bytes_per_row(self) -> int:
        """Bytes of one stored row; 0 before the first extend, or where that is not known."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the storage; 0 where that is not known."""

    @property
    def bytes_saved(self) -> int:
        """Bytes that the columns would need on top as plain tensors; 0 unless compact or encoded."""
        return 0

    @abstractmethod
    def state_dict(self, rows: int, pool_rows: int = 0) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs of the first ``rows`` slots and ``pool_rows`` pool entries."""

    @abstractmethod
    def check_state_dict(self, state: dict[str, Any], rows: int) -> None:
        """ValueError if :meth:`load_state_dict` cannot hold ``state``, of a storage with room for ``rows`` rows."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what the storage that gave ``state`` held."""


class ListStorage(Storage):
    """Items of any kind, in a list. By far the slowest storage: tensors belong into `LazyTensorStorage`.

    A sample is a list of items, or, where all of them are tensors, tensordicts or trees of tensors of one form and
    shape, their stack.

    Args:
        max_size: number of items, default 1000.

    >>> from flatroll.buffers import ReplayBuffer
    >>> buffer = ReplayBuffer(storage=ListStorage(10))
    >>> buffer.add("a string!"), buffer.extend([30, None]), buffer[:]
    (0, tensor([1, 2]), ['a string!', 30, None])
    """

    def __init__(self, max_size: int = 1000) -> None:
        super().__init__(max_size)
        self._items: list[Any] = []

    def prepare(
        self, batch: Any, final: TensorDictBase | None, keys: BoundaryKeys | None, whole: bool = False
    ) -> Rows:
        """See `Storage`; ``batch`` is a list, or has a leading dimension to take apart."""
        if keys is not None:
            raise TypeError(
                "ListStorage holds items, not rows of trajectories: use LazyTensorStorage with a slice sampler"
            )
        if final is not None:
            raise ValueError(
                "final comes with a compact tensordict batch only, which ListStorage does not know"
            )
        items = apart(batch)[0 if whole else -self.max_size :]
        return Rows(len(items), items=items)

    def write(self, slot: int, rows: Rows, after: After | None = None) -> None:
        """See `Storage`."""
        self._reach(min(slot + rows.count, self.max_size))
        fit = min(rows.count, self.max_size - slot)
        self._items[slot : slot + fit] = rows.items[:fit]
        self._items[: rows.count - fit] = rows.items[fit:]

    def put(self, slots: Tensor, rows: Rows, at: Tensor | None = None) -> None:
        """See `Storage`."""
        self._reach(int(slots.max()) + 1 if len(slots) else 0)
        chosen = range(rows.count) if at is None else at.tolist()
        for slot, i in zip(slots.tolist(), chosen, strict=True):
            self._items[slot] = rows.items[i]

    def _reach(self, length: int) -> None:
        self._items.extend([None] * (length - len(self._items)))

    def set(self, draw: Draw, data: Any, shape: torch.Size, keys: BoundaryKeys | None) -> None:
        """See `Storage`; ``data`` is one item for one slot, else a list of as many."""
        items = data if shape else [data]
        if not isinstance(items, list) or len(items) != len(draw.slots):
            raise ValueError(f"{len(draw.slots)} slots need a list of as many items, got {data!r:.80}")
        self.put(draw.slots, Rows(len(items), items=items))

    def get(
        self,
        slots: Tensor,
        follow: Follow | None = None,
        *,
        slices: bool = False,
        keys: frozenset[NestedKey] | None = None,
    ) -> list[Any]:
        """See `Storage`."""
        return [self._items[slot] for slot in slots.tolist()]

    def build(self, values: Any, shape: torch.Size) -> Any:
        """See `Storage`: the list, or the stack where its items can be stacked."""
        return stacked(values)

    @property
    def bytes_per_row(self) -> int:
        """0: not known."""
        return 0

    @property
    def nbytes(self) -> int:
        """0: not known."""
        return 0

    def state_dict(self, rows: int, pool_rows: int = 0) -> dict[str, Any]:
        """See `Storage`."""
        return {"items": self._items[:rows]}

    def check_state_dict(self, state: dict[str, Any], rows: int) -> None:
        """See `Storage`."""
        if "items" not in state:
            raise ValueError("the state is of a storage of tensors, this is a ListStorage")
        if rows != self.max_size:
            raise ValueError(
                f"the state has room for {rows} rows, this storage for {self.max_size}: make it with "
                f"max_size={rows}"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Storage`."""
        self._items = list(state["items"])
