"""The stored rows of a step writer: their positions, trajectories and copies."""

from collections.abc import Collection, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.columns.column import Columns, TensorColumn
from flatroll.buffers.index.ring import Array, Ring
from flatroll.buffers.index.trajectory_index import Choose, TrajectoryIndex
from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.kernels.rows.records import CHAIN, FRAGMENT, STATE, Index, Where
from flatroll.layout.keys import IS_INIT, NestedKey

_MOST = 2**18  # maximum bytes copied under the buffer's lock: about 20 µs
# The tables of a buffer without rows, which has no index yet.
_NO_INDEX: Index = np.zeros(1, STATE), 1, np.zeros(1, FRAGMENT), np.zeros(1, CHAIN)


class StepPositions:
    """Finds the stored rows of steps: within a window an env's steps are adjacent.

    Args:
        num_envs: number of envs per step.

    >>> ring, positions = Ring(8), StepPositions(num_envs=2)
    >>> for window in range(3):  # of two steps each; the third overwrites the first
    ...     _ = ring.claim(4), ring.publish(4)
    ...     positions.append(ring, 2 * window, 4 * window % 8, 2)
    >>> places = torch.tensor([4, 5, 5]) * 2 + torch.tensor([0, 0, 1])  # of env 0, env 0 and env 1
    >>> positions.oldest(), positions.find(places, ring, stored=6, window=2)
    (2, (tensor([0, 1, 3]), array([], shape=(2, 0), dtype=int64)))
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.ring: Ring | None = None
        # For each window in use: its first step, its first row number in the ring, its number of steps.
        self._table: Array = np.zeros((3, 16), np.int64)
        self._count = 0

    def append(self, ring: Ring, step: int, slot: int, steps: int) -> None:
        """Record a window of ``steps`` steps from ``step`` on, whose first row is in ``slot``."""
        if ring is not self.ring:  # the buffer was emptied or reloaded
            self.ring = ring
            self._count = 0

        head = ring.head
        if self._count == self._table.shape[1]:
            kept = self._table[:, self._first() :]
            count = kept.shape[1]
            larger = np.zeros((3, 2 * count + 16), np.int64)
            larger[:, :count] = kept
            self._table, self._count = larger, count  # together: an interrupt must not come between

        number = int(ring.numbers(torch.tensor([slot]), head)[0])
        self._table[:, self._count] = step, number, steps
        self._count += 1

    def _first(self) -> int:
        """Return the first complete window."""
        head = 0 if self.ring is None else self.ring.head
        return int(self._table[1, : self._count].searchsorted(head))

    def oldest(self) -> int | None:
        """Return the first complete step; None if there is none."""
        first = self._first()
        if first < self._count:
            return int(self._table[0, first])
        return None

    def tables(self, ring: Ring, stored: int, window: int) -> Where:
        """Return the record ``where`` of `flatroll.kernels.slices.steps.locate`; see :meth:`find`."""
        used = self._count if ring is self.ring else 0
        return self._table, used, ring.head, ring.capacity, stored, window

    def find(self, places: Tensor, ring: Ring, stored: int, window: int) -> tuple[Tensor, Array] | None:
        """Find rows by place, step * E + env, int64 ``[N]``; None if one was overwritten.

        Args:
            places: places of the rows, in host memory.
            ring: the buffer's current ring.
            stored: number of the first step that waits.
            window: L.

        Returns:
            slots, int64 ``[N]``, arbitrary for waiting rows; and int64 ``[2, M]``, the positions of the M waiting
            rows in ``places`` and their rows env * L + step in the waiting arrays.
        """
        from flatroll.kernels.slices.steps import locate  # numba

        slots = np.empty(len(places), np.int64)
        waiting = np.empty((2, len(places)), np.int64)
        asked = np.ascontiguousarray(places.numpy())
        count = locate(asked, self.num_envs, self.tables(ring, stored, window), slots, waiting)

        if count < 0:
            return None
        return torch.from_numpy(slots), waiting[:, :count]

    def choose(
        self, places: Tensor, choose: Choose, ring: Ring, stored: int, filled: int, marks: Sequence[Array]
    ) -> Tensor | None:
        """Call ``choose`` to select another row of the same trajectory for some rows; see `TrajectoryIndex.choose`.

        An env's steps of a trajectory are consecutive, stored ones before waiting ones, so a trajectory is a range of
        steps: the trajectory index has the range of stored rows, the markers that of waiting rows.

        Args:
            places: step * E + env of each row, int64 ``[N]``.
            choose: see `TrajectoryIndex.choose`.
            ring: the buffer's ring; its lock is held.
            stored: number of the first waiting step.
            filled: number of waiting steps.
            marks: ``is_init``, trajectory ids and ``done`` of the waiting rows, each ``[E, >= filled]``.

        Returns:
            int64 ``[2, M]``, indices in ``places`` and the places of the chosen rows; None if another writer has
            overwritten one of the rows.
        """
        from flatroll.kernels.slices.step_spans import step_spans  # numba

        oldest = None
        if self.ring is ring:
            oldest = self.oldest()
        if oldest is None:
            oldest = -1

        index = ring.tables if isinstance(ring, TrajectoryIndex) else _NO_INDEX
        asked = np.ascontiguousarray(places.numpy())
        spans = np.empty((2, len(places)), np.int64)
        stored_steps = self._table, self._count, oldest
        waiting_steps = stored, filled, *marks
        if not step_spans(asked, self.num_envs, stored_steps, waiting_steps, index, spans):
            return None

        step = asked // self.num_envs
        which, chosen = choose(step - spans[0], spans[1] - spans[0])
        # From the row's own step to the chosen one, of the same env.
        goals: Array = asked[which] + (spans[0, which] + chosen - step[which]) * self.num_envs
        return torch.from_numpy(np.stack([which, goals]))


class StepCopies:
    """Copies entries of stored and waiting rows.

    Args:
        storage: the buffer's storage.
        staged: the waiting rows, ``[E * L, ...]``.
        given: the entries contained in steps; the others are filled in.
        names: entries to copy, default all.

    Attributes:
        marks: whether some of them are filled in.
        rows: rows that can be copied at once; -1 if copying is not a plain copy in this process's memory.
    """

    def __init__(
        self,
        storage: ColumnStorage,
        staged: Columns,
        given: Collection[NestedKey],
        names: tuple[NestedKey, ...] | None,
    ) -> None:
        self.marks = names is None or IS_INIT in names or not {*names} <= {*given}
        self._of = storage.known, storage.pool
        self.rows = -1
        if not storage.copies_bytes or storage.by_reference:
            return

        stored = self._list_entries(storage, names)
        wanted = len(staged) if names is None else len({*names})
        if len(self._names) - len(self._extra) != wanted:
            return

        # Columns that are copied as bytes are tensors.
        tensors = cast(dict[NestedKey, TensorColumn], storage.columns)
        forms = []
        sizes = []
        columns = []
        waiting = []
        for name, key in zip(self._names, (*stored, *self._roots), strict=True):
            column = tensors[key].data
            rows = staged.get(name)
            if rows is None or (rows.dtype, rows.shape[1:]) != (column.dtype, column.shape[1:]):
                return
            row = torch.empty((1, *column.shape[1:]), dtype=column.dtype, device="meta")
            forms.append((row.shape[1:], row.stride(), row.dtype))
            sizes.append(row.numel() * row.element_size())
            columns.append(column.data_ptr())
            waiting.append(rows.data_ptr())

        self._forms = forms
        self._columns: Array = np.array([columns, sizes, waiting], np.int64)
        self._at: Array = np.array([stored.index(key) for key in self._roots], np.int64)
        self.rows = _MOST // max(1, sum(sizes))

    def _list_entries(self, storage: ColumnStorage, names: tuple[NestedKey, ...] | None) -> list[NestedKey]:
        """Choose the entries to copy; return those that have a column.

        The next value of an entry is usually that of a nearby row, so that entry is copied, too: it is one of
        ``_roots``, and one of ``_extra`` if only its next value was asked for.
        """
        next_keys = {} if storage.pool is None else storage.pool.next_keys
        self._roots = [key for key, later in next_keys.items() if names is None or later in names]
        if names is None:
            asked = {*storage.columns, *next_keys.values()}
        else:
            asked = {*names}
        stored = [key for key in storage.columns if key in asked or key in self._roots]
        self._names = (*stored, *(next_keys[key] for key in self._roots))
        self._extra = [key for key in stored if key not in asked]
        return stored

    def is_current(self, storage: ColumnStorage) -> bool:
        """Return whether the columns are still those of ``storage``."""
        return self._of[0] is storage.known and self._of[1] is storage.pool

    def read(self, places: Tensor, num_envs: int, where: Where, ring: Ring) -> Columns | None:
        """Return copies of the rows at these places by key; None if one was overwritten.

        Args:
            places: step * E + env of each row, int64 ``[N]``.
            num_envs: E.
            where: from `StepPositions.tables`.
            ring: that of the buffer, whose lock is held.
        """
        from flatroll.kernels.slices.steps import read_steps  # numba

        asked = np.ascontiguousarray(places.numpy())
        rows = len(places)
        copies = [
            torch.empty_strided((rows, *shape), stride, dtype=dtype) for shape, stride, dtype in self._forms
        ]
        target = np.array([copy.data_ptr() for copy in copies], np.int64)

        pooled = self._of[1]  # read here, because the pool's columns may grow and move
        entries = {}
        if pooled is not None:
            entries = cast(dict[NestedKey, TensorColumn], pooled.entries)
        pool: Array = np.array([entries[key].data.data_ptr() for key in self._roots], np.int64)

        index = ring.tables if isinstance(ring, TrajectoryIndex) else _NO_INDEX
        if not read_steps(asked, num_envs, where, index, self._columns, pool, self._at, target):
            return None

        columns = dict(zip(self._names, copies, strict=True))
        for key in self._extra:
            del columns[key]
        return columns
