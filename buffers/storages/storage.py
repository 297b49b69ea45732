"""The base class of storages, which hold the rows of a replay buffer."""

import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.column import After, Column, Columns
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Array, Draw, Follow, Ring
from flatroll.buffers.storages.access import Access, StorageOwner, ThroughBuffer, WithoutBuffer
from flatroll.buffers.storages.item_kinds import Structure, one_row
from flatroll.buffers.storages.positions import time_first
from flatroll.buffers.storages.records import Links, Rows
from flatroll.layout.checks import check_whole_number
from flatroll.layout.inspect.text import Facts
from flatroll.layout.keys import NestedKey
from flatroll.layout.tensordict_seam import leaves, nest


class Storage(Facts, ABC):
    """Base class of storages: ``max_size`` slots, written and read by position.

    A storage serves one buffer, which gives itself to it, and tracks the order of the rows and which are readable.
    Rows are also reached by position: ``storage[i]``, ``storage[i] = item``, ``len(storage)``, iteration (`Access`);
    through the buffer, or without one.

    Args:
        max_size: number of slots.
        checkpointer: how ``buffer.dumps`` writes the rows, a `StorageCheckpointerBase`; None for the default.
        compilable: accepted for compatibility, without effect.

    Attributes:
        ndim: number of batch dimensions; with 2 or more, slots are steps of several parallel lanes.
        lanes: sizes of the batch dimensions after the first.
        compact_obs: whether ``("next", observation)`` is read from the following row.
        shares: whether columns want to know which rows continue stored ones (`After`).
        structure: what kind of data there is (a `Structure`), known from the first batch on.
        own_column: class name of a column that the caller's code made, whose memory other processes may not see.
        by_reference: whether other processes may read and write the rows: a pickle names where they are.
        keeps_items: whether the items of a list are kept as they are, and not stacked to columns.
        copies_rows: whether the storage keeps nothing of a batch but copies.
        columns: the stored entries by key, each a `Column`; empty before the first batch and without columns.
        not_compared: root keys whose next values need not be those of the following rows: they are not compared.
        compiled: whether compiled kernels copy rows: where there is a trajectory index or a step writer.
        filling: whether the buffer is counting rows that are there already (:meth:`fill`).
        loads_whole: whether :meth:`load_state_dict` puts all rows in the place of the others, or raises and none.
    """

    ndim: int = 1
    lanes: torch.Size = torch.Size([])
    compact_obs: bool = False
    shares: bool = False
    structure: Structure | None = None
    own_column: str | None = None
    by_reference: bool = False
    keeps_items: bool = False
    copies_rows: bool = False
    compiled: bool = False
    filling: bool = False
    loads_whole: bool = False
    _warned_left_out = False

    def __init__(self, max_size: int, checkpointer: object = None, compilable: bool = False) -> None:
        self.max_size = check_whole_number("max_size", max_size)
        self._asked = self.max_size
        self.checkpointer = checkpointer
        self.columns: dict[NestedKey, Column] = {}
        self.not_compared: set[NestedKey] = set()

        self._buffer: weakref.ref[StorageOwner] | None = None
        self._alone: Access = WithoutBuffer()  # reaches the rows while no buffer does
        self._observers: list[weakref.ref[Any]] = []

    def _facts(self) -> dict[str, str]:
        """What `repr` shows: the room it has, and the options that are switched on."""
        switches = [name for name in ("compact_obs", "frame_stack", "codec") if getattr(self, name, None)]
        return {"": f"{self.max_size} rows"} | {name: repr(getattr(self, name)) for name in switches}

    # -- rows by position ------------------------------------------------------------------------------------------

    @property
    def _access(self) -> Access:
        """How rows are reached by position: through the buffer while there is one."""
        owner = self.owner
        if owner is None:
            return self._alone
        return ThroughBuffer(owner)

    def __len__(self) -> int:
        return self._access.count()

    def __bool__(self) -> bool:
        return True  # even if it is empty

    def __getitem__(self, index: object) -> Any:
        return self.get(index)

    def __setitem__(self, index: object, data: object) -> None:
        self.set(index, data)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the items."""
        return map(self.get, range(len(self)))

    def get(self, index: object) -> Any:
        """Return the rows at ``index`` as they are stored: like ``buffer[index]``, without its transforms.

        Args:
            index: an integer for one item; a slice, a list, an integer tensor or a mask for a batch (with
                `ListStorage` a list of items).

        Raises:
            IndexError: no row is stored there.
        """
        return self._access.get(self, index)

    def set(self, index: object, data: object) -> None:
        """Write ``data`` over the rows at ``index``, as ``buffer[index] = data`` does without the transforms' ``inv``.

        A storage without a buffer also accepts new rows after its last. Attached objects are notified.

        Args:
            index: see :meth:`get`; also a range.
            data: one item for an integer, else a batch (with `ListStorage` a list of items).

        Raises:
            IndexError: a position that holds no row and is none of the next ones.
            RuntimeError: new rows for a storage with ``ndim`` > 1 or ``compact_obs``, which a buffer must write.
        """
        if isinstance(index, range):
            index = list(index)
        if isinstance(data, range):
            data = list(data)

        self._access.set(self, index, data)

        for reference in self._observers:
            mark = getattr(reference(), "mark_update", None)
            if mark is not None:
                mark(index)

    def batch_of_one(self, item: object) -> Any:
        """Return a batch of one item, for :meth:`prepare`."""
        if not isinstance(item, TensorDict):
            return one_row(item)

        rows = {key: leaf.unsqueeze(0) for key, leaf in leaves(item).items()}
        return nest(rows, 1, *item.batch_size, device=item.device)  # takes a third of the time of one_row

    def attach(self, buffer: object) -> None:
        """Let ``buffer`` know of changes: ``buffer.mark_update(index)``, if it has that, is called by :meth:`set`.

        A `ReplayBuffer` attaches itself to its storage. The object is not kept alive.
        """
        if all(reference() is not buffer for reference in self._observers):
            self._observers.append(weakref.ref(buffer))

    def __getstate__(self) -> dict[str, Any]:
        # The copy of a buffer gives itself to the copy of its storage.
        return self.__dict__ | {"_observers": [], "_buffer": None}

    # -- the buffer it belongs to ----------------------------------------------------------------------------------

    def belong_to(self, buffer: StorageOwner) -> None:
        """Take ``buffer`` as the owner of the rows, unless another one, which is alive, has written some."""
        owner = self.owner
        if owner is None or not owner.started:
            self._buffer = weakref.ref(buffer)

    @property
    def owner(self) -> StorageOwner | None:
        """The buffer that this storage belongs to, or None."""
        if self._buffer is None:
            return None
        return self._buffer()

    @property
    def had_buffer(self) -> bool:
        """Whether the storage belonged to a buffer, which was deleted."""
        return self._buffer is not None and self._buffer() is None

    def check_free(self) -> None:
        """Raise ValueError if a buffer, which is alive, writes to this storage, or `set` has."""
        owner = self.owner
        if self._alone.count() or (owner is not None and owner.started):
            raise ValueError(
                f"the storage already belongs to another buffer, or storage.set wrote to it: make one "
                f"{type(self).__name__} per buffer; buffer.extend(other.oldest_first()) copies rows"
            )

    # -- for the buffer --------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of rows that fit: ``max_size``, in a `TensorStorage` rounded down to whole steps of all lanes."""
        return self.max_size // self.lanes.numel() * self.lanes.numel()

    @property
    def most_rows(self) -> int:
        """The largest value to which ``max_size`` may be rounded up once the lanes are known."""
        if self.ndim == 1 or self.lanes:
            return self.max_size
        return 2 * self.max_size - 1

    def room(self, lanes: torch.Size) -> int:
        """Return ``max_size`` for this many lanes: the requested one, rounded up to whole steps of all lanes."""
        return -(-self._asked // lanes.numel()) * lanes.numel()

    def lay_flat(self, data: object, time: int, started: bool) -> Any:
        """Flatten the batch dimensions of ``data`` into one, dimension ``time`` first. Unless ``started``, record the
        lanes and round ``max_size`` up to whole steps of all lanes.

        Raises:
            ValueError: the lanes are not those of the first batch, or too many.
        """
        data, lanes = time_first(data, self.ndim, time)
        if started and lanes != self.lanes:
            raise ValueError(
                f"batches must have the lanes of the first one, {list(self.lanes)}, got {list(lanes)}"
            )
        if lanes.numel() > self._asked:
            raise ValueError(f"max_size={self._asked} is too small for one step of {list(lanes)} lanes")

        if not started:
            # together: the capacity follows from both, and an interrupt must not come between
            self.lanes, self.max_size = lanes, self.room(lanes)
        return data

    def fill(self, write: Callable[[Any, None], Any]) -> None:
        """Call the buffer's ``write(batch, None)`` for rows that exist from the start, so that it counts them."""
        return

    def counts(self) -> dict[str, int]:
        """Return additional entries for the buffer's ``stats()``."""
        return {}

    def write_lock(self) -> AbstractContextManager[Any]:
        """Return a lock that admits one writer at a time, across processes if other processes can write."""
        return threading.Lock()

    def check_removable(self) -> None:
        """Raise RuntimeError if the storage is for reading only, so that its rows cannot be removed."""

    def use_ring(self, ring: Ring, alone: str | None, first: bool = False) -> None:
        """Set the ``ring`` that counts the rows; its counters are shared if other processes share the rows.

        Args:
            ring: the ring.
            alone: name of the component whose state other processes cannot see; None if the buffer can be shared.
            first: whether the buffer begins to use this storage.

        Raises:
            ValueError: another buffer, which is alive, writes to this storage, or `set` has; both would write the
                same slots.
        """
        if first:
            self.check_free()

    def reattach(self, ring: Ring) -> None:
        """Connect an unpickled ``ring`` to the original's counters, if processes share the rows."""
        return

    def enter_process(self) -> None:
        """Called in the child process after a ``fork``; RuntimeError if the storage does not work there."""
        return

    @abstractmethod
    def prepare(
        self, batch: object, final: TensorDictBase | None, keys: BoundaryKeys | None, whole: bool = False
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

    def warn_left_out(self, rows: int) -> None:
        """Warn, once, that a batch has ``rows`` more rows than there is room for: its first ones are not stored."""
        if not self._warned_left_out:
            self._warned_left_out = True
            warnings.warn(
                f"the batch has {rows + self.capacity} rows, the storage holds {self.capacity}: the first {rows} are "
                f"not stored. Use max_size={rows + self.capacity}, or shorter batches (shown once)",
                stacklevel=5,  # of buffer.extend()
            )

    @abstractmethod
    def write(self, slot: int, rows: Rows, after: After | None = None) -> None:
        """Copy ``rows`` to the slots from ``slot`` on, wrapping around from the last slot to slot 0."""

    @abstractmethod
    def put(self, slots: Tensor, rows: Rows, at: Tensor | None = None) -> None:
        """Copy the rows ``at`` (default: all) of ``rows`` to ``slots``, in any order."""

    def link(self, ring: Ring, rows: Rows, keys: BoundaryKeys | None) -> Links | None:
        """Find what the fragments of ``rows`` continue; called before slots are claimed for them.

        Args:
            ring: the trajectory index in which the rows will be entered; for another ring the result is None.
            rows: those to be written.
            keys: names of the markers.

        Raises:
            ValueError: a fragment is not what the row before it says comes next.
        """
        return None

    def keep_next(self, ring: Ring, rows: Rows, links: Links, first: int) -> tuple[Array, Array]:
        """Store the next observations that no row holds; called after :meth:`write` with ``compact_obs``.

        Args:
            ring: the trajectory index in which the rows will be entered.
            rows: those written.
            links: what :meth:`link` returned.
            first: number of the first row.

        Returns:
            pool entry per fragment, -1 for none, int64 ``[F]``; chains whose last entry is now spare, int64.
        """
        raise NotImplementedError

    @property
    def copies_bytes(self) -> bool:
        """Whether all columns that :meth:`read_rows` gives are copied as bytes: contiguous, in host memory."""
        return False

    def needs_follow(self, keys: Iterable[NestedKey] | None) -> bool:
        """Return whether reading the columns ``keys`` (None: all) requires `Ring.follow`."""
        return False

    @abstractmethod
    def write_drawn(self, draw: Draw, data: object, shape: torch.Size, keys: BoundaryKeys | None) -> None:
        """Overwrite the drawn rows with ``data`` of batch shape ``shape``."""

    @abstractmethod
    def read_rows(
        self,
        slots: Tensor,
        follow: Follow | None = None,
        *,
        keys: frozenset[NestedKey] | None = None,
    ) -> Any:
        """Return copies of stored rows, as columns by key or as items.

        Args:
            slots: int64 ``[N]``, positions of the rows.
            follow: where their next observations are; required to read them from a compact storage.
            keys: columns to read, default all.
        """

    @abstractmethod
    def build(self, values: Columns | list[Any], shape: torch.Size) -> Any:
        """Turn what :meth:`read_rows` returned into a batch of batch shape ``shape``."""

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
    def tables(self, pool_rows: int) -> dict[str, Any]:
        """Return the part of :meth:`state_dict` that is not rows, with ``pool_rows`` pool entries."""

    @abstractmethod
    def check_tables(self, state: dict[str, Any], ring: Ring) -> None:
        """Raise ValueError if the :meth:`tables` in ``state``, whose rows ``ring`` counts, do not fit this storage.
        Called before :meth:`check_state_dict`."""

    @abstractmethod
    def check_state_dict(self, state: dict[str, Any], ring: Ring) -> None:
        """Raise an error if ``state``, whose rows ``ring`` counts, cannot be loaded; nothing changes either way."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows from a checked :meth:`state_dict`."""


def other_capacity_error(rows: int, room: int) -> ValueError:
    """Return the error for a state with room for ``rows`` rows given to a storage with ``room``."""
    return ValueError(
        f"the state has room for {rows} rows, this storage for {room}: make it with max_size={rows}; to continue with "
        "another size, load it into such a buffer and extend this one with other.oldest_first()"
    )
