"""What a replay buffer asks of its storage, the container of its rows."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.base import After, Column, Columns
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.buffers.index.ring import Array, Draw, Follow, Ring
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import NestedKey


@dataclass(frozen=True, slots=True)
class Rows:
    """A checked batch, ready to be copied into a storage.

    Attributes:
        count: number of rows.
        columns: what the storage keeps per row, by key, ``[count, ...]``.
        fragments: the F fragments of the batch; None where no trajectory index is kept.
        tails: compact storage: next observation of each fragment's last row, by root key, ``[F, *obs]``.
        items: the items of a storage without columns.
    """

    count: int
    columns: Columns = field(default_factory=dict)
    fragments: Fragments | None = None
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
        structure: what kind of data there is (a `Structure`), known from the first batch on.
        own_column: class name of a column that the caller's code made, whose memory other processes may not see.
        columns: the stored entries by key, each a `Column`; empty before the first batch and without columns.
    """

    ndim: int = 1
    lanes: torch.Size = torch.Size([])
    compact_obs: bool = False
    shares: bool = False
    structure: Any = None
    own_column: str | None = None

    def __init__(self, max_size: int) -> None:
        self.max_size = whole_number("max_size", max_size)
        self.columns: dict[NestedKey, Column] = {}

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
            alone: name of the component whose state other processes cannot see; None if the buffer can be shared.
            first: whether the buffer begins to use this storage.
        """
        return

    def reattach(self, ring: Ring) -> None:
        """Let ``ring``, unpickled with the buffer, count with the original one, if processes share the rows."""
        return

    def enter_process(self) -> None:
        """The buffer came to another process by ``fork``; RuntimeError if it does not work there."""
        return

    @abstractmethod
    def prepare(
        self, batch: Any, final: TensorDictBase | None, keys: BoundaryKeys | None, whole: bool = False
    ) -> Rows:
        """Check ``batch`` ``[N]`` and lay it out; the first call allocates. Nothing is stored yet.

        Args:
            batch: its last `capacity` rows are taken, or all if ``whole``, for a writer that chooses among them.
            final: the final observations that come with a compact batch.
            keys: markers by which to find the fragments; None to leave them out.
            whole: see ``batch``.

        Raises:
            ValueError: entries, shapes or dtypes that differ from the first batch, or no ``final`` where it is needed.
            MemoryError: what the columns need is not there.
        """

    @abstractmethod
    def write(self, slot: int, rows: Rows, after: After | None = None) -> None:
        """Copy ``rows`` to ``slot`` and the slots after it, going on at slot 0 after the last one."""

    @abstractmethod
    def put(self, slots: Tensor, rows: Rows, at: Tensor | None = None) -> None:
        """Copy the rows ``at`` (default: all) of ``rows`` to ``slots``, in any order."""

    def keep_next(self, ring: Ring, rows: Rows, before: Array, first: int) -> tuple[Array, Array]:
        """Keep the next observations that no row will hold; called with ``compact_obs``, after :meth:`write`.

        Args:
            ring: the trajectory index in which the rows will be entered.
            rows: those written.
            before: int64 ``[F]``, what each fragment continues (`TrajectoryIndex.link`).
            first: number of the first row.

        Returns:
            pool entry per fragment, -1 for none, int64 ``[F]``; chains whose last entry is now spare, int64.
        """
        raise NotImplementedError

    def needs_follow(self, keys: Iterable[NestedKey] | None) -> bool:
        """Whether reading these columns (None: all) takes what `Ring.follow` says about the rows."""
        return False

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
    def bytes_per_row(self) -> int:
        """Bytes of one stored row; 0 before the first extend, or where that is not known."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the storage; 0 where that is not known."""
        return 0

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
