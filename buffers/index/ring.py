"""The ring of rows: which rows are stored, which may be read, where the next ones go."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatroll.layout.checks import whole_number

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Follow:
    """Where the next observation of each drawn row stands (compact storage).

    Attributes:
        slots: int64 ``[N]``, slot of the row that follows, -1 where no stored row does.
        patch: int64 ``[2, K]``, (position in ``slots``, pool entry) of the rows whose next observation is kept
            apart; these win over ``slots``.
    """

    slots: Tensor
    patch: Tensor


@dataclass(slots=True)  # not frozen: it is made for every sample, and freezing costs 2 of its µs
class Draw:
    """Rows chosen by a sampler.

    Attributes:
        slots: int64 ``[N]``, positions in the storage.
        firsts: int64 ``[S]``, positions in ``slots`` where the slices begin; None if rows stand alone.
        lasts: int64 ``[S]``, positions of the last row of each slice.
        follow: where the next observations stand; None unless asked for.
        mask: bool ``[N]``, False at rows that only pad; None without padding.
        stamp: head and pool entries taken at the time of the draw, for :meth:`Ring.intact`.
        info: further entries of the sample's info, one value per row.
        ahead: int64 ``[N, n]``, slots of each row and of the rows after it in its trajectory, -1 where there is
            none; None unless asked for.
    """

    slots: Tensor
    firsts: Tensor | None = None
    lasts: Tensor | None = None
    follow: Follow | None = None
    mask: Tensor | None = None
    stamp: tuple[int, int] = (0, 0)
    info: dict[str, Tensor] = field(default_factory=dict)
    ahead: Tensor | None = None


class Ring:
    """Row counters of a ring of ``capacity`` slots; row ``r`` stands in slot ``r % capacity``.

    Writing is ``claim`` (the rows about to be overwritten can no longer be drawn), then copying, then ``publish``
    (the new rows can). A write that fails between the two leaves a ring that is right, with fewer rows. Counters
    are 64-bit and only grow.

    Args:
        capacity: number of slots, at least 1.
        first: number of the first row.

    >>> ring = Ring(4)
    >>> ring.claim(3), ring.publish(3), len(ring)
    (0, None, 3)
    >>> ring.claim(2), len(ring)  # row 0 is given up before row 4 takes its slot
    (3, 2)
    """

    _dtype = np.dtype([("head", "i8"), ("written", "i8"), ("taken", "i8")])

    def __init__(self, capacity: int, first: int = 0) -> None:
        whole_number("capacity", capacity)
        self.capacity = capacity
        self._state: Array = np.zeros(1, self._dtype)
        self._state["head"] = self._state["written"] = first

    def __len__(self) -> int:
        return max(0, self.written - self.head)

    @property
    def used(self) -> int:
        """Slots that were written, counted from slot 0: no stored row stands beyond them."""
        return min(self.written - self.head // self.capacity * self.capacity, self.capacity)

    @property
    def head(self) -> int:
        """Number of the oldest row that may be read."""
        return int(self._state["head"][0])

    @property
    def written(self) -> int:
        """Rows ever published; the number of the next one."""
        return int(self._state["written"][0])

    def claim(self, rows: int) -> int:
        """Drop the rows that the next ``rows`` rows (at most ``capacity``) overwrite; number of the first."""
        written = self.written
        self._state["head"] = max(self.head, written + rows - self.capacity)
        return written

    def publish(self, rows: int) -> None:
        """Let ``rows`` claimed and copied rows be read."""
        self._state["written"] += rows

    def slots(self, first: int, rows: int) -> Tensor:
        """Slots of ``rows`` rows from number ``first`` on, int64 ``[rows]``."""
        slot = first % self.capacity
        slots = torch.arange(slot, slot + rows)
        return slots if slot + rows <= self.capacity else slots.remainder_(self.capacity)

    def stored(self) -> Tensor:
        """Slots of the rows that may be read, oldest first; int64."""
        head, written = self.head, self.written
        return self.slots(head, max(0, written - head))

    def numbers(self, slots: Tensor, head: int) -> Tensor:
        """Row numbers that stood in ``slots`` when ``head`` was the oldest row; int64 ``[N]``."""
        return (slots - head).remainder_(self.capacity).add_(head)

    def uniform(self, count: int, generator: torch.Generator | None) -> Draw:
        """``count`` rows, uniform over the stored ones, with replacement.

        Raises:
            RuntimeError: nothing is stored.
        """
        stamp = self.stamp()  # first: other processes may write meanwhile
        head, written = stamp[0], self.written
        if written <= head:
            raise _empty()
        slots = torch.randint(head, written, (count,), generator=generator)
        if written > self.capacity:
            slots.remainder_(self.capacity)
        return Draw(slots, stamp=stamp)

    def stamp(self) -> tuple[int, int]:
        """What tells whether something was overwritten: the head, and how many pool entries were ever taken."""
        return self.head, int(self._state["taken"][0])

    def intact(self, draw: Draw) -> bool:
        """Whether nothing that ``draw`` points to has been overwritten since it was drawn."""
        head, taken = self.stamp()
        patched = draw.ahead is not None or (draw.follow is not None and draw.follow.patch.shape[1] > 0)
        if patched and taken != draw.stamp[1]:
            return False
        if head == draw.stamp[0] or not len(draw.slots):
            return True
        return int(self.numbers(draw.slots, draw.stamp[0]).min()) >= head

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs; owns its memory."""
        return {"capacity": self.capacity, "state": self._state.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the ring that gave ``state`` stood."""
        if "state" not in state:
            raise ValueError(
                "the state is of a buffer that keeps the best rows, this one keeps the latest: load it into a "
                "buffer with the writer it was saved with"
            )
        if state["capacity"] != self.capacity:
            raise ValueError(
                f"the state is of a ring of {state['capacity']} rows, this one has {self.capacity}"
            )
        self._state[:] = state["state"]

    def check_not_empty(self) -> None:
        """RuntimeError if no row may be read."""
        if not len(self):
            raise _empty()

    def move(self, memory: Array) -> None:
        """Count in ``memory`` (uint8) from now on, where other processes see it, starting from where this stands."""
        before = self._state
        self.adopt(memory)
        for name in ("head", "taken", "written"):  # no row is readable before its number is
            self._state[name] = before[name]

    def adopt(self, memory: Array) -> None:
        """Count in ``memory`` (uint8), and stand where it says."""
        self._state = memory[: self._dtype.itemsize].view(self._dtype)

    def follow(self, slots: Tensor) -> Follow | None:
        """Where the next observations of rows stand; None where rows are not followed."""
        return None


def _empty() -> RuntimeError:
    return RuntimeError("cannot sample from an empty buffer: extend it with a batch first")


def given(ring: Ring, slots: Tensor, listed: bool, follow: bool) -> Draw:
    """The rows in ``slots``; those that may not be read are left out, or refused if ``listed`` one by one."""
    stamp = ring.stamp()
    ring.check_not_empty()
    readable = ring.numbers(slots, stamp[0]) < ring.written
    if not bool(readable.all()):
        if listed:
            raise IndexError(
                f"position {int(slots[~readable][0])} holds no row: a write has given it up, and its new row is "
                "not there yet"
            )
        slots = slots[readable]
    there = ring.follow(slots) if follow else None
    return Draw(slots, follow=there, stamp=stamp)
