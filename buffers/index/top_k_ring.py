"""A ring that keeps the best rows instead of the latest."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.index.ring import Array, Draw, Ring
from flatroll.buffers.index.saved_tables import check_heap, check_table, damaged

_GONE = np.iinfo(np.int64).max  # number of a slot without a row


class RankedRing(Ring):
    """The ring of a buffer that keeps the ``capacity`` rows of highest rank.

    Writing is ``choose`` (the worst rows are dropped and can no longer be drawn), copying, then ``publish``. A write
    that fails in between keeps the other rows. A row's number is its position among all rows ever offered. Of two
    rows of equal rank the earlier one is kept.

    Args:
        capacity: number of slots, at least 1.
        first: number of the first row offered.

    >>> import torch
    >>> ring = RankedRing(2)
    >>> rows, slots = ring.choose(torch.tensor([5.0, 7.0, 6.0]))
    >>> ring.publish(len(rows))
    >>> rows.tolist(), slots.tolist(), len(ring)
    ([1, 2], [0, 1], 2)
    >>> ring.choose(torch.tensor([6.0, 8.0]))  # 8 takes the place of 6
    (tensor([1]), tensor([1]))
    """

    in_order = False
    _dtype = np.dtype([(name, "i8") for name in ("head", "written", "taken", "live", "used")])

    def __init__(self, capacity: int, first: int = 0) -> None:
        super().__init__(capacity, first)
        self._heap: Array = np.arange(capacity)
        self._rank: Array = np.zeros(capacity)
        self._number: Array = np.full(capacity, _GONE)
        self._chosen: tuple[int, Array, Array] = (0, self._rank[:0], self._number[:0])
        # (rows ever offered, rows stored) when the order was computed, and the stored slots by age
        self._by_age: tuple[tuple[int, int], Tensor] = ((-1, 0), torch.zeros(0, dtype=torch.int64))

    def choose(self, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Choose rows to keep by ``ranks`` (float64 ``[N]``, no NaN); return them and their slots, int64."""
        # Numba takes 0.3 s to import, so only where rows are ranked.
        from flatroll.kernels.trees.heap import make_room

        offered = ranks.numpy(force=True)
        # Sort best first, earlier rows first among equal ranks, and keep the first `room`.
        best = np.argsort(-offered, kind="stable")
        room = make_room(self._state, self._heap, self._rank, self._number, offered[best], _GONE)
        rows = np.sort(best[:room])

        self._chosen = len(offered), offered[rows], self.written + rows
        # The heap lists the free slots after the stored rows.
        slots = self._heap[len(self) : len(self) + room].copy()
        return torch.from_numpy(rows), torch.from_numpy(slots)

    def publish(self, rows: int) -> None:
        """Make the ``rows`` chosen rows readable."""
        from flatroll.kernels.trees.heap import push  # numba

        offered, ranks, numbers = self._chosen
        push(self._state, self._heap, self._rank, self._number, offered, ranks, numbers)
        self._chosen = (0, ranks[:0], numbers[:0])

    def claim(self, rows: int) -> int:
        """Raise TypeError: which rows are dropped depends on the ranks of the new ones, see :meth:`choose`."""
        raise TypeError("a RankedRing cannot claim rows: write to it with choose and publish")

    @property
    @override
    def used(self) -> int:
        return int(self._state["used"][0])

    @override
    def numbers(self, slots: Tensor, head: int) -> Tensor:
        """Return the numbers of the rows in ``slots``, int64 ``[N]``; the largest int64 for an empty slot."""
        return torch.from_numpy(self._number)[slots]

    @override
    def snapshot(self) -> tuple[tuple[int, int], int]:
        self.check_not_empty()
        return self.version, len(self)

    @override
    def slots_by_age(self, ranks: Tensor, version: tuple[int, int] | None = None) -> Tensor:
        # `version` is not needed: this ring belongs to one process, and its buffer locks it.
        self._check_ranks(ranks, len(self))

        # The order only changes with writes; a write that only dropped rows changes the second number.
        version = self.written, len(self)
        if self._by_age[0] != version:
            slots = self._heap[: len(self)]
            self._by_age = version, torch.from_numpy(slots[np.argsort(self._number[slots])])
        return self._by_age[1][ranks]

    @override
    def stored(self) -> Tensor:
        return self.slots_by_age(torch.arange(len(self)))

    @override
    def uniform(self, count: int, generator: torch.Generator | None) -> Draw:
        self.check_not_empty()
        at = torch.randint(len(self), (count,), generator=generator)
        return Draw(torch.from_numpy(self._heap)[at], version=self.version)

    @property
    @override
    def version(self) -> tuple[int, int]:
        """Count of the rows offered so far: rows written later have this number or a larger one."""
        return self.written, 0

    @override
    def overwritten(self, draw: Draw) -> Tensor | None:
        lost = self.numbers(draw.slots, 0) >= draw.version[0]
        if not lost.any():
            return None
        return lost

    _TABLES = ("_state", "_heap", "_rank", "_number")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "ranked": [getattr(self, name).copy() for name in self._TABLES]}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "ranked" not in state:
            raise ValueError(
                "the state is of a buffer that keeps the latest rows, this one keeps the best: load it into a "
                "buffer with RoundRobinWriter"
            )

        counters, *tables = state["ranked"]
        self._checked_counters(state["capacity"], counters)
        for name, table in zip(self._TABLES[1:], tables, strict=True):
            check_table(name[1:], table, getattr(self, name).dtype, self.capacity)

        head, written, live, used = (int(counters[name][0]) for name in ("head", "written", "live", "used"))
        if live != written - head or not live <= used <= self.capacity:
            raise damaged(f"it counts {live} rows in {used} slots")
        check_heap(live, used, written, _GONE, *tables)

        for name, table in zip(self._TABLES, state["ranked"], strict=True):
            getattr(self, name)[:] = table
        self._by_age = (-1, 0), self._by_age[1]  # invalid, so that it is sorted anew
