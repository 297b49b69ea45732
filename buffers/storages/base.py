"""The base class of storages, which hold the rows of a replay buffer."""

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
        by_reference: whether a pickle names where the rows are, for other processes, instead of holding them.
        columns: the stored entries by key, each a `Column`; empty before the first batch and without columns.
    """

    ndim: int = 1
    lanes: torch.Size = torch.Size([])
    compact_obs: bool = False
    shares: bool = False
    structure: Any = None
    own_column: str | None = None
    by_reference: bool = False

    def __init__(self, max_size: int) -> None:
        self.max_size = whole_number("max_size", max_size)
        self.columns: dict[NestedKey, Column] = {}

    @property
    def capacity(self) -> int:
        """Number of rows that fit: ``max_size``, rounded down to a multiple of the number of lanes (envs)."""
        return self.max_size // self.lanes.numel() * self.lanes.numel()

    @property
    def contents(self) -> Any:
        """The dataset that the storage was created with, its rows stored from the start; or None."""
        return None

    def write_lock(self) -> AbstractContextManager[Any]:
        """Return a lock that admits one writer at a time, across processes if other processes can write."""
        return threading.Lock()

    def attach(self, ring: Ring, alone: str | None, first: bool = False) -> None:
        """Set the ``ring`` that counts the rows; its counters are shared if other processes share the rows.

        Args:
            ring: the ring.
            alone: name of the component whose state other processes cannot see; None if the buffer can be shared.
            first: whether the buffer begins to use this storage.
        """
        return

    def reattach(self, ring: Ring) -> None:
        """Connect an unpickled ``ring`` to the original's counters, if processes share the rows."""
        return

    def enter_process(self) -> None:
        """React to a ``fork``, in the child process; RuntimeError if the storage does not work there."""
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
        """Copy ``rows`` to the slots from ``slot`` on, wrapping around from the last slot to slot 0."""

    @abstractmethod
    def put(self, slots: Tensor, rows: Rows, at: Tensor | None = None) -> None:
        """Copy the rows ``at`` (default: all) of ``rows`` to ``slots``, in any order."""

    def keep_next(self, ring: Ring, rows: Rows, before: Array, first: int) -> tuple[Array, Array]:
        """Store the next observations that no row holds; called after :meth:`write` with ``compact_obs``.

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
        """Return whether reading the columns ``keys`` (None: all) requires `Ring.follow`."""
        return False

    @abstractmethod
    def set(self, draw: Draw, data: Any, shape: torch.Size, keys: BoundaryKeys | None) -> None:
        """Overwrite the drawn rows with ``data`` of batch shape ``shape``."""

    @abstractmethod
    def get(
        self,
        slots: Tensor,
        follow: Follow | None = None,
        *,
        slices: bool = False,
        keys: frozenset[NestedKey] | None = None,
    ) -> Any:
        """Return copies of stored rows, as columns by key or as items.

        Args:
            slots: int64 ``[N]``, positions of the rows.
            follow: where their next observations stand; a compact storage needs it to give them.
            slices: whether the slots come in stretches of neighbours (a hint, for speed).
            keys: which columns, default all.
        """

    @abstractmethod
    def build(self, values: Any, shape: torch.Size) -> Any:
        """Turn what :meth:`get` returned into a batch of batch shape ``shape``."""

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one stored row; 0 before the first extend, or where that is not known."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage; 0 if unknown."""
        return 0

    @property
    def bytes_saved(self) -> int:
        """Bytes saved compared with plain tensors; 0 if the storage is neither compact nor encoded."""
        return 0

    @abstractmethod
    def state_dict(self, rows: int, pool_rows: int = 0) -> dict[str, Any]:
        """Return the first ``rows`` slots and ``pool_rows`` pool entries for :meth:`load_state_dict`."""

    @abstractmethod
    def check_state_dict(self, state: dict[str, Any], ring: Ring) -> None:
        """Raise an error if ``state``, whose rows ``ring`` counts, cannot be loaded; nothing changes either way."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows from a checked :meth:`state_dict`."""
