"""The part of the trajectory index that finds other rows of the trajectories of stored rows."""

from collections.abc import Callable
from types import ModuleType
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.index.ring import Array, Draw, Ring

#: ``choose(at, count)``: see `TrajectoryRows.choose`.
Choose: TypeAlias = Callable[[Array, Array], tuple[Array, Array]]

NONE = np.zeros(0, np.int64)
NO_PATCH = np.zeros((2, 0), np.int64)


class TrajectoryRows(Ring):
    """A ring whose rows belong to trajectories, and which finds one row of a trajectory given another."""

    _fragments: Array
    _chains: Array
    _drawing: ClassVar[ModuleType]

    def ahead(self, slots: Tensor, n: int) -> Tensor:
        """Return the slots of the stored rows ``slots`` and of the n - 1 rows after each; int64 ``[N, n]``.

        Column 0 is ``slots``, column j the row j steps later in the same trajectory, -1 where none is stored.
        """
        asked = np.ascontiguousarray(slots.numpy(force=True))
        ahead = np.empty((len(asked), n), np.int64)
        self._drawing.ahead_rows(self._state, self.capacity, self._fragments, asked, ahead)
        return torch.from_numpy(ahead)

    def extents(self, slots: Tensor) -> Array:
        """Return where the stored rows ``slots`` stand in their trajectories; int64 ``[3, N]``.

        Line 0 is each row's position among the stored rows of its trajectory, from 0; line 1 their number; line 2 the
        trajectory, as a number for :meth:`rows_at`.
        """
        asked = np.ascontiguousarray(slots.numpy(force=True))
        found = np.empty((3, len(asked)), np.int64)
        self._drawing.extents(*self.tables, asked, found)
        return found

    def rows_at(self, chains: Array, positions: Array) -> Tensor:
        """Return the slots (int64 ``[N]``) of rows, given their trajectories and positions as of :meth:`extents`."""
        records = self._chains[chains]
        slots, count = np.empty(len(chains), np.int64), len(chains)
        # One row of each: it begins at its offset in the chain, and goes to its place in the result.
        stretches = (
            records["last"],
            records["dropped"] + positions,
            np.ones(count, np.int64),
            np.arange(count),
        )
        self._drawing.walk(self._state, self.capacity, self._fragments, *stretches, slots, NONE, NO_PATCH)
        return torch.from_numpy(slots)

    @property
    def tables(self) -> tuple[Array, int, Array, Array]:
        """The tables ``state, capacity, fragments, chains`` that kernels take."""
        return self._state, self.capacity, self._fragments, self._chains

    def choose(self, draw: Draw, choose: Choose) -> Tensor:
        """Let ``choose`` choose another row for some of the rows or slices of a draw; see `Draw.chosen`.

        Args:
            draw: single rows, each of which counts for itself, or slices, each of which counts as its first row.
            choose: given the positions of S rows among the stored rows of their trajectories and the numbers of these,
                both int64 ``[S]``, returns which of the S, ascending, and the position chosen for each, int64 ``[M]``.
        """
        heads = draw.slots if draw.firsts is None else draw.slots[draw.firsts]
        at, count, chains = self.extents(heads)
        which, positions = choose(at, count)
        slots = self.rows_at(chains[which], positions)
        if draw.firsts is None:
            return torch.stack([torch.from_numpy(which), slots])
        # The rows up to the first one of the next slice, padding among them, are those of a slice.
        of_slice = torch.full((len(heads),), -1).index_copy_(0, torch.from_numpy(which), slots)
        bounds = torch.cat([draw.firsts, torch.tensor([len(draw.slots)])])
        of_row = of_slice.repeat_interleave(bounds.diff())
        rows = (of_row >= 0).nonzero().squeeze(1)
        return torch.stack([rows, of_row[rows]])

    def rows_of(self, traj: int) -> Tensor:
        """Return the slots (int64) of the stored rows of trajectory ``traj`` in time order; if several
        trajectories used this id, one after the other. Without ids, they are numbered as they begin.

        Raises:
            KeyError: no row of it is stored.
        """
        chains = self._chains[: int(self._state["slots"][0])]
        length = chains["total"] - chains["dropped"]
        chosen = np.flatnonzero((chains["id"] == traj) & (length > 0))  # several, if the id was used again
        if not len(chosen):
            raise KeyError(f"no row of trajectory {traj} is stored")
        chosen = chosen[np.argsort(chains["last"][chosen])]  # in the order in which they were written
        rows = length[chosen]
        slots = np.empty(rows.sum(), np.int64)
        # From the first stored row on of each, to the position behind the rows of those before it.
        stretches = chains["last"][chosen], chains["dropped"][chosen], rows, np.cumsum(rows) - rows
        tables = self._state, self.capacity, self._fragments
        self._drawing.walk(*tables, *stretches, slots, NONE, NO_PATCH)
        return torch.from_numpy(slots)
