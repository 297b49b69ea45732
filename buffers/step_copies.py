"""Copies the rows of a step writer, stored or waiting, by one compiled call, where all of them are plain numbers."""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.columns.column import Columns
from flatroll.buffers.index.ring import Array, Ring
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.kernels.rows.records import FRAGMENT, STATE
from flatroll.layout.keys import IS_INIT, NestedKey

_MOST = 2**18  # bytes to copy while the buffer's lock is held: some 20 µs
_NO_INDEX = np.zeros(1, STATE), 1, np.zeros(1, FRAGMENT), None


class StepCopies:
    """Copies entries of rows.

    Args:
        storage: the buffer's.
        staged: the waiting rows, ``[E * L, ...]``.
        given: those of their entries that steps give; the others are filled in.
        names: entries, default all.

    Attributes:
        marks: whether some of them are filled in.
        rows: how many can be copied at once; -1 where it takes more than copying bytes in this process's memory.
    """

    def __init__(
        self,
        storage: Any,
        staged: Columns,
        given: Collection[NestedKey],
        names: tuple[NestedKey, ...] | None,
    ) -> None:
        self.marks = names is None or IS_INIT in names or not {*names} <= {*given}
        self._of = storage._plain, storage.pool
        self.rows = -1
        if not storage.copies_bytes or storage.by_reference:
            return
        next_keys = {} if storage.pool is None else storage.pool.next_keys
        self._roots = [key for key, later in next_keys.items() if names is None or later in names]
        # The next value of an entry is mostly that of a row near it, so that entry is copied, too.
        asked = {*storage.columns, *next_keys.values()} if names is None else {*names}
        stored = [key for key in storage.columns if key in asked or key in self._roots]
        found = (*stored, *(next_keys[key] for key in self._roots))
        self._extra = [key for key in stored if key not in asked]
        if len(found) - len(self._extra) != len(staged if names is None else asked):
            return
        columns = [storage.columns[key].data for key in (*stored, *self._roots)]
        waiting = [staged.get(key) for key in found]
        kinds = [(one.dtype, one.shape[1:]) for one in columns]
        if any(
            row is None or (row.dtype, row.shape[1:]) != kind
            for row, kind in zip(waiting, kinds, strict=True)
        ):
            return
        self._names = found
        like = [torch.empty((1, *shape), dtype=dtype, device="meta") for dtype, shape in kinds]
        self._forms = [(one.shape[1:], one.stride(), one.dtype) for one in like]
        sizes = [one.numel() * one.element_size() for one in like]
        addresses = [[one.data_ptr() for one in many if one is not None] for many in (columns, waiting)]
        self._columns: Array = np.array([addresses[0], sizes, addresses[1]], np.int64)
        self._at: Array = np.array([stored.index(key) for key in self._roots], np.int64)
        self.rows = _MOST // max(1, sum(sizes))

    def still(self, storage: Any) -> bool:
        """Return whether the columns are still those of ``storage``."""
        return self._of[0] is storage._plain and self._of[1] is storage.pool

    def read(self, places: Tensor, num_envs: int, where: tuple[Any, ...], ring: Ring) -> Columns | None:
        """Return copies of the rows at these places by key; None if one was overwritten.

        Args:
            places: step * E + env of each row, int64 ``[N]``.
            num_envs: E.
            where: from `StepPositions.stands`.
            ring: that of the buffer, whose lock is held.
        """
        from flatroll.kernels.slices.steps import read_steps  # numba

        asked, rows = np.ascontiguousarray(places.numpy()), len(places)
        copies = [
            torch.empty_strided((rows, *shape), stride, dtype=dtype) for shape, stride, dtype in self._forms
        ]
        target = np.array([copy.data_ptr() for copy in copies], np.int64)
        entries = {} if self._of[1] is None else self._of[1].entries  # which may have grown, and moved
        pool: Array = np.array([entries[key].data.data_ptr() for key in self._roots], np.int64)
        state, _, fragments, _ = ring.tables if isinstance(ring, TrajectoryIndex) else _NO_INDEX
        of = state, fragments, self._columns, pool, self._at, target
        if not read_steps(asked, num_envs, *where, *of):
            return None
        columns = dict(zip(self._names, copies, strict=True))
        for key in self._extra:
            del columns[key]
        return columns
