"""The records of a write: a batch as a storage takes it, and what its fragments continue."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from flatroll.buffers.columns.column import After, Columns
from flatroll.buffers.index.fragments import Fragments
from flatroll.buffers.index.ring import Array


@dataclass(slots=True)  # not frozen: one is made for every batch, and freezing costs 1 µs
class Rows:
    """A checked batch, ready to copy into a storage.

    Attributes:
        count: number of rows.
        columns: what the storage keeps per row, by key, ``[count, ...]``.
        fragments: the F fragments of the batch; None where no trajectory index is kept.
        tails: compact storage: next observation of each fragment's last row, by root key, ``[F, *obs]``.
        source: addresses of the columns that are copied by one call, from `HostColumns.find`; None if they are not.
        items: the items of a storage without columns.
    """

    count: int
    columns: Columns = field(default_factory=dict)
    fragments: Fragments | None = None
    tails: Columns = field(default_factory=dict)
    source: Array | None = None
    items: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Links:
    """What the F fragments of a batch continue, from `TrajectoryIndex.link`.

    Attributes:
        before: int64 ``[F]``, a stored trajectory, -2 - i for fragment i of the batch, -1 for nothing.
        slots: int64 ``[F]``, the slot of the stored row that a fragment continues, -1 for none.
        agree: compact storage: 1 where a fragment begins, bit by bit, with what the row before it says; int64 ``[F]``.
    """

    before: Array
    slots: Array
    agree: Array

    def after(self, firsts: Array) -> After:
        """Return which rows of the batch (``firsts`` are those of the fragments) continue stored ones."""
        at = np.flatnonzero(self.before >= 0)
        return After(torch.from_numpy(firsts[at]), torch.from_numpy(self.slots[at]))
