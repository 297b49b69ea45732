"""The ring, which counts stored rows and maps them to slots, and `Draw`, the rows of one sample."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatroll.buffers.index.saved_tables import check_table, damaged
from flatroll.layout.checks import check_whole_number

Array = NDArray[Any]

_MOST = 2**63 - 2**48  # row numbers stay below this, so that adding a capacity does not overflow
_EMPTY = (
    "cannot sample from an empty buffer: extend it with a batch first (steps that wait in a step writer: "
    "writer.flush() stores them)"
)


@dataclass(frozen=True, slots=True)
class Follow:
    """Where the next observation of each drawn row is stored (``compact_obs`` only).

    Attributes:
        slots: int64 ``[N]``, slot of the next row, -1 if none is stored.
        patch: int64 ``[2, K]``, (position in ``slots``, pool entry) of rows whose next observation is in the pool;
            takes precedence over ``slots``.
    """

    slots: Tensor
    patch: Tensor


@dataclass(slots=True)  # not frozen: one is created for every sample, and freezing costs 2 µs
class Draw:
    """The rows that a sampler drew. A sampler of single rows sets ``slots``, ``follow`` and ``version``.

    Attributes:
        slots: int64 ``[N]``, positions in the storage.
        firsts: int64 ``[S]``, positions in ``slots`` where slices begin; None for single rows.
        lasts: int64 ``[S]``, positions in ``slots`` of the last row of each slice.
        follow: where the next observations are (`Ring.follow`); None unless asked for.
        mask: bool ``[N]``, False at padding; None without padding.
        version: the ring's `Ring.version` at the draw, used to detect overwritten rows.
        info: further entries of the sample's info, one value per row.
        ahead: int64 ``[N, n]``, slots of each row and the following rows of its trajectory, -1 if none; set by the
            buffer for transforms that look ahead.
        chosen: int64 ``[2, M]``, positions in ``slots`` and the slot of the row of the same trajectory that was chosen
            for each; set by the buffer for a transform that chooses rows.
        scale: what the numbers in ``info`` are relative to, such as the smallest priority. Rows of draws with the same
            scale can be put into one sample.
    """

    slots: Tensor
    firsts: Tensor | None = None
    lasts: Tensor | None = None
    follow: Follow | None = None
    mask: Tensor | None = None
    version: tuple[int, int] = (0, 0)
    info: dict[str, Tensor] = field(default_factory=dict)
    ahead: Tensor | None = None
    chosen: Tensor | None = None
    scale: tuple[float, ...] = ()

    def ends(self) -> Tensor:
        """Return bool ``[N]``, True where a slice ends or a row is padding; all True for single rows."""
        if self.lasts is None:
            return torch.ones(len(self.slots), dtype=torch.bool)
        ends = torch.zeros(len(self.slots), dtype=torch.bool)
        ends[self.lasts] = True
        if self.mask is None:
            return ends
        return ends | ~self.mask


class Ring:
    """Counts the rows of a buffer: rows are numbered in writing order, ``head ... written - 1`` are readable.

    Samplers get the number of drawable rows from :meth:`snapshot` and their slots from :meth:`slots_by_age`. A row's
    number modulo the capacity is not always its slot: a writer that keeps the best rows uses any slot.

    Writing is ``claim`` (rows about to be overwritten can no longer be drawn), copying, then ``publish`` (new rows
    can be drawn). A write that fails in between leaves a valid ring with fewer rows. Counters are 64-bit and only
    grow.

    Args:
        capacity: number of slots, at least 1.
        first: number of the first row.

    >>> ring = Ring(4)
    >>> ring.claim(3), ring.publish(3), len(ring)
    (0, None, 3)
    >>> ring.claim(2), len(ring)  # row 0 is given up before row 4 takes its slot
    (3, 2)
    >>> ring.publish(2)
    >>> ring.slots_by_age(torch.tensor([0, 3]))  # of the rows 1, 2, 3 and 4 the oldest and the newest
    tensor([1, 0])
    """

    #: Number of rows that a collector holds back until their trajectories end; for the error of an empty buffer.
    waiting = 0
    #: Whether row r is in slot r modulo the capacity.
    in_order = True
    _dtype = np.dtype([("head", "i8"), ("written", "i8"), ("taken", "i8")])
    _saved_dtype: np.dtype[Any] | None = None  # of the counters in a state, if it is another one

    def __init__(self, capacity: int, first: int = 0) -> None:
        check_whole_number("capacity", capacity)
        self.capacity = capacity
        # A single record, so that it can be in shared memory and kernels can change it.
        self._state: Array = np.zeros(1, self._dtype)
        self._state["head"] = first
        self._state["written"] = first

    def __len__(self) -> int:
        """Return the number of readable rows."""
        # Another process may move the counters meanwhile. Read head first: if it were read after written, it
        # could exceed it.
        head = self.head
        return min(self.written - head, self.capacity)

    @property
    def used(self) -> int:
        """Number of slots written so far, counted from slot 0; no stored row lies beyond them."""
        head = self.head  # read before written, as in __len__, or the difference could be negative
        # head // capacity * capacity is the row in slot 0 when the oldest row was written.
        return min(self.written - head // self.capacity * self.capacity, self.capacity)

    @property
    def head(self) -> int:
        """Number of the oldest readable row."""
        return int(self._state["head"][0])

    @property
    def written(self) -> int:
        """Count of all rows ever published; also the number of the next row."""
        return int(self._state["written"][0])

    @property
    def pool_size(self) -> int:
        """Number of pool entries, free ones included, that a trajectory index counts; other rings have none."""
        return 0

    @property
    def saved_rows(self) -> tuple[int, int]:
        """Numbers of a save's first row and of the row after its last; slot numbers if not `in_order`."""
        if self.in_order:
            return self.head, self.written
        return 0, self.used

    def claim(self, rows: int) -> int:
        """Drop the rows that the next ``rows`` rows will overwrite; return the first new row's number."""
        # Afterwards head ... written + rows - 1 are at most capacity numbers, one for each slot.
        written = self.written
        self._state["head"] = max(self.head, written + rows - self.capacity)
        return written

    def publish(self, rows: int) -> None:
        """Make the next ``rows`` rows, claimed and copied before, readable."""
        # Only now, after the columns were copied: readers check this counter.
        self._state["written"] += rows

    def snapshot(self) -> tuple[tuple[int, int], int]:
        """Return the current `version` and its number of rows; samplers call this first.

        Rows of this version can be found (:meth:`slots_by_age`) even if another process drops some meanwhile.

        Raises:
            RuntimeError: nothing is stored.

        >>> ring = Ring(4)
        >>> ring.claim(4), ring.publish(4)
        (0, None)
        >>> version, rows = ring.snapshot()
        >>> ring.claim(2), len(ring), rows  # the write of another process begins
        (4, 2, 4)
        >>> slots = ring.slots_by_age(torch.tensor([0, 3]), version)
        >>> slots, ring.unchanged_since(Draw(slots, version=version))  # a buffer draws again then
        (tensor([0, 3]), False)
        """
        version = self.version  # read before written, which is never below this head
        rows = min(self.written - version[0], self.capacity)
        if rows <= 0:
            raise self._empty_error()
        return version, rows

    def slots_by_age(self, ranks: Tensor, version: tuple[int, int] | None = None) -> Tensor:
        """Return the slots of the stored rows with these ages, whatever the writer.

        Args:
            ranks: int64 ``[N]``, from 0 for the oldest row to ``rows - 1`` for the newest.
            version: the version from :meth:`snapshot` in which ages count. Default: the current one with
                ``len(ring)`` rows, which another writing process may change between the two calls.

        Returns:
            int64 ``[N]``.

        Raises:
            IndexError: no row has that age.
        """
        head = self.head if version is None else version[0]
        self._check_ranks(ranks, min(self.written - head, self.capacity))
        return (ranks + head).remainder_(self.capacity)

    def _check_ranks(self, ranks: Tensor, rows: int) -> None:
        """Raise IndexError unless all ``ranks`` are ages of ``rows`` stored rows."""
        if not ranks.numel():
            return

        low, high = torch.aminmax(ranks)
        if int(low) < 0 or int(high) >= rows:
            wrong = int(low) if int(low) < 0 else int(high)
            raise IndexError(f"no stored row has age {wrong}: ages are 0 (the oldest) to {rows - 1}")

    def stored(self) -> Tensor:
        """Return the slots of all readable rows, oldest first; int64 ``[len(ring)]``."""
        head = self.head
        return torch.arange(head, max(head, self.written)).remainder_(self.capacity)

    def numbers(self, slots: Tensor, head: int) -> Tensor:
        """Return the numbers (int64 ``[N]``) of the rows in ``slots`` when ``head`` was the oldest row."""
        # The number from head ... head + capacity - 1 that equals the slot modulo the capacity.
        return (slots - head).remainder_(self.capacity).add_(head)

    def uniform(self, count: int, generator: torch.Generator | None) -> Draw:
        """Draw ``count`` stored rows uniformly, with replacement.

        Raises:
            RuntimeError: nothing is stored.
        """
        version = self.version  # read first, because other processes may write meanwhile
        head = version[0]
        written = self.written
        if written <= head:
            raise self._empty_error()

        slots = torch.randint(head, written, (count,), generator=generator)
        if written > self.capacity:  # row r is in slot r
            slots.remainder_(self.capacity)
        return Draw(slots, version=version)

    def draw_slots(self, slots: Tensor, strict: bool, follow: bool) -> Draw:
        """Draw these slots, int64 ``[N]``. Slots being overwritten are skipped, or raise IndexError if ``strict``."""
        version = self.version
        self.check_not_empty()
        readable = self.numbers(slots, version[0]) < self.written
        if not readable.all():
            if strict:
                raise IndexError(
                    f"position {int(slots[~readable][0])} holds no row: its old row was dropped, and the new one "
                    "is not written yet"
                )
            slots = slots[readable]

        following = self.follow(slots) if follow else None
        return Draw(slots, follow=following, version=version)

    @property
    def version(self) -> tuple[int, int]:
        """Two counters that change with every overwrite: the oldest row's number, and the pool entries taken.

        A sampler reads it first, for `Draw.version`.
        """
        return self.head, 0

    def unchanged_since(self, draw: Draw) -> bool:
        """Return whether no row or pool entry of ``draw`` has been overwritten since."""
        return self.overwritten(draw) is None

    def overwritten(self, draw: Draw) -> Tensor | None:
        """Return which rows of ``draw`` have been overwritten since, bool ``[N]``; None if there are none.

        The pool entry of a row, and the row that was chosen for it, count as parts of it.
        """
        head = self.head
        drawn_head = draw.version[0]
        if head == drawn_head or not len(draw.slots):
            return None

        # Rows from head on are still in their slots; lower numbers have been dropped since the draw.
        lost = self.numbers(draw.slots, drawn_head) < head
        if draw.chosen is not None:
            at, chosen = draw.chosen
            lost[at] |= self.numbers(chosen, drawn_head) < head

        if not lost.any():
            return None
        return lost

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the counters for :meth:`load_state_dict`."""
        return {"capacity": self.capacity, "state": self._state.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters; ValueError if the capacity or the kind of ring differs."""
        if "state" not in state:
            raise ValueError(
                "the state is of a buffer that keeps the best rows, this one keeps the latest: load it into a "
                "buffer with the writer it was saved with"
            )

        self._state[:] = self._checked_counters(state["capacity"], state["state"])

    def _checked_counters(self, capacity: int, counters: Array) -> Array:
        """Return a state's record of counters; ValueError unless it fits a ring of this kind and size."""
        if capacity != self.capacity:
            raise ValueError(f"the state is of a ring of {capacity} rows, this one has {self.capacity}")

        check_table("counters", counters, self._saved_dtype or self._dtype, 1)
        head = int(counters["head"][0])
        written = int(counters["written"][0])
        if not (0 <= head <= written <= head + self.capacity and written < _MOST) or counters["taken"][0] < 0:
            raise damaged(f"a ring of {self.capacity} rows cannot hold the rows {head} ... {written - 1}")
        return counters

    def check_not_empty(self) -> None:
        """Raise RuntimeError if no row is readable."""
        if not len(self):
            raise self._empty_error()

    def _empty_error(self) -> RuntimeError:
        if not self.waiting:
            return RuntimeError(_EMPTY)
        return RuntimeError(
            f"{_EMPTY} ({self.waiting} rows wait in the collector for the end of their trajectories: trajs_per_batch)"
        )

    def move(self, memory: Array) -> None:
        """Move the counters into ``memory`` (uint8), which other processes share."""
        before = self._state
        self.adopt(memory)
        for name in ("head", "taken", "written"):  # written last: it makes rows readable
            self._state[name] = before[name]

    def adopt(self, memory: Array) -> None:
        """Use the counters that ``memory`` (uint8) already holds."""
        # A view of the caller's memory, often a mapped file.
        self._state = memory[: self._dtype.itemsize].view(self._dtype)

    def follow(self, slots: Tensor) -> Follow | None:
        """Return where the next observations of ``slots`` (int64 ``[N]``) are; None without an index."""
        return None
