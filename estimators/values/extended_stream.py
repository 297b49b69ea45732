"""The extended stream: one sequence of a batch's rows and the last next observation of each run.

One call of a network over it gives the values of all rows and of their next observations: the next value of a row is
the value at the next place. This module maps rows to places. There are three streams:

* :class:`Appended`, for a network that reads one row at a time: the K inserted observations come last, which costs no
  index over the rows.
* :class:`Interleaved`, for a recurrent network: each inserted observation directly follows its run.
* :class:`Budgeted`, the same with a number of places that does not depend on the runs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatroll.kernels.scan import is_tracing


@dataclass(frozen=True)
class Boundaries:
    """Flags of the run ends of a batch, and which of them are terminated or unknown; bool ``[*B, T]``.

    Attributes:
        ends: last row of each run.
        terminated: ends whose next value is 0.
        unknown: ends whose next observation the env hid, or None.
        crossed: ends that the return runs over: the next row is what follows. None if it stops at each end.
    """

    ends: Tensor
    terminated: Tensor
    unknown: Tensor | None
    crossed: Tensor | None = None

    @property
    def stops(self) -> Tensor:
        """Run ends at which the return stops."""
        if self.crossed is None:
            return self.ends
        return self.ends & ~self.crossed

    @property
    def bootstrapped(self) -> Tensor:
        """Run ends that are not terminated, where the next value is bootstrapped."""
        return self.stops & ~self.terminated


def true_indices(mask: Tensor) -> Tensor:
    """Return the flat indices of the True entries, int64 ``[K]``, ascending.

    K is read on the host, the only sync of an extended stream.

    >>> true_indices(torch.tensor([False, True, False, True])).tolist()
    [1, 3]
    """
    flat = mask.reshape(-1)
    if flat.device.type == "cpu" and type(flat) is Tensor and not is_tracing():
        return torch.from_numpy(np.flatnonzero(flat.numpy()))  # torch is six times slower

    return flat.nonzero().squeeze(-1)


def run_stops(ends: Tensor, position: Tensor | None = None, places: int | None = None) -> Tensor:
    """Return where each run stops in the stream (exclusive, int64, ascending); ``ends [N]`` marks run ends.

    ``position`` (int64 ``[N]``) is the place of each row, by default its own number; ``places`` their number, N.

    >>> run_stops(torch.tensor([False, True, False, True])).tolist()
    [2, 4]
    """
    first = true_indices(ends[:-1]) + 1  # the first row of every run except the first
    if position is not None:
        first = position[first]
    if places is None:
        places = len(ends)
    return torch.cat([first, first.new_tensor([places])])


@dataclass(frozen=True)
class Appended:
    """A stream of ``count`` rows, followed by the next observations of the rows ``after`` (int64 ``[K]``).

    With ``used`` (bool ``[K]``), only these of the last places give the next value of their row.

    >>> stream = Appended(torch.tensor([1, 3]), count=4)
    >>> [x.tolist() for x in stream.split(torch.tensor([0.0, 1.0, 2.0, 3.0, 1.5, 3.5]))]
    [[0.0, 1.0, 2.0, 3.0], [1.0, 1.5, 3.0, 3.5]]
    """

    after: Tensor
    count: int
    used: Tensor | None = None

    @property
    def places(self) -> int:
        """Length of the stream, N + K."""
        return self.count + len(self.after)

    def stops(self, ends: Tensor) -> Tensor:
        """Return the exclusive end of each run among the N rows, int64 ascending."""
        return run_stops(ends)

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split the stream's values into those of rows and of next observations (arbitrary if terminated)."""
        value = values[: self.count]
        next_value = torch.cat([value[1:], value[-1:]])  # of the next row, which is right inside a run
        if self.used is None:
            return value, next_value.index_copy_(0, self.after, values[self.count :])

        # What is not used goes to a place behind the last row.
        target = torch.where(self.used, self.after, self.count)
        longer = torch.cat([next_value, next_value[-1:]])
        return value, longer.index_copy_(0, target, values[self.count :])[: self.count]


@dataclass(frozen=True)
class Interleaved:
    """A stream in which the next observation of each bootstrapped run follows its last row.

    Attributes:
        position: int64 ``[N]``, the place of each row.
        source: int64 ``[N + K]``, the row at each place; an inserted one has the row before it.
        after: int64 ``[K]``, ascending, the rows behind which something is inserted; None if a subclass says it
            otherwise.
    """

    position: Tensor
    source: Tensor
    after: Tensor | None

    @classmethod
    def behind(cls, after: Tensor, count: int) -> "Interleaved":
        """Build the stream of ``count`` rows with one element inserted after each row in ``after``.

        >>> stream = Interleaved.behind(torch.tensor([1, 3]), count=4)
        >>> stream.position.tolist(), stream.source.tolist()
        ([0, 1, 3, 4], [0, 1, 1, 2, 3, 3])
        """
        row = torch.arange(count, device=after.device)
        inserts = torch.zeros_like(row).index_fill_(0, after, 1)
        source = torch.repeat_interleave(row, 1 + inserts, output_size=count + len(after))
        # cumsum also counts the place inserted after the row itself, hence "- inserts".
        return cls(row + inserts.cumsum(0) - inserts, source, after)

    @property
    def places(self) -> int:
        """Length of the stream."""
        return len(self.source)

    def stops(self, ends: Tensor) -> Tensor:
        """Return where each run stops in the stream (exclusive end, int64); ``ends [N]`` marks run ends."""
        return run_stops(ends, self.position, self.places)

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`Appended.split`."""
        # Clamped, because the last row may be terminated and have no next place.
        behind = (self.position + 1).clamp(max=self.places - 1)
        return values.index_select(0, self.position), values.index_select(0, behind)


@dataclass(frozen=True)
class Budgeted(Interleaved):
    """An interleaved stream of static length, T + budget elements per series of T, for ``torch.compile``.

    Shapes are static and nothing syncs with the device. The observation behind each bootstrapped end stands right
    behind its row and moves the rows behind it one place on. A row counts (``valid``) if there is a place behind it.
    The rows moved out do not, and the trace of the last row that counts is cut there. Places left over repeat the
    last row; their values are not read. ``position`` of a row that has no place is the series' last one.

    Attributes:
        placed: bool ``[N]``, whether a row has a place.
        valid: bool ``[B, T]``, whether it counts.
        inserted: bool ``[B * (T + budget)]``, which places hold what follows their row.
    """

    placed: Tensor
    valid: Tensor
    inserted: Tensor

    @classmethod
    def of(cls, bootstrapped: Tensor, budget: int) -> "Budgeted":
        """Build the stream from the flags of bootstrapped run ends, bool ``[B, T]``.

        >>> stream = Budgeted.of(torch.tensor([[False, True, False, True]]), budget=1)
        >>> stream.source.tolist(), stream.inserted.int().tolist(), stream.valid.tolist()
        ([0, 1, 1, 2, 3], [0, 0, 1, 0, 0], [[True, True, True, False]])
        """
        count, time = bootstrapped.shape
        length = time + budget
        moves = bootstrapped.long()

        # Place of each row within its series: its index plus the number of places inserted before it.
        slot = torch.arange(time, device=bootstrapped.device) + moves.cumsum(-1) - moves
        valid = slot + 1 < length
        row = torch.arange(count * time, device=bootstrapped.device).view(count, time)

        # Scattered into length + 1 columns: rows without a place go to the last column, which is dropped.
        dropped = torch.full_like(slot, length)
        source = row[:, -1:].repeat(1, length + 1)
        source.scatter_(1, torch.where(slot < length, slot, dropped), row)
        behind = torch.where(bootstrapped & valid, slot + 1, dropped)
        source.scatter_(1, behind, row)
        inserted = torch.zeros_like(source, dtype=torch.bool).scatter_(1, behind, True)

        # First place of each series.
        first = length * torch.arange(count, device=bootstrapped.device).unsqueeze(-1)

        return cls(
            position=(slot.clamp(max=length - 1) + first).reshape(-1),
            source=source[:, :length].reshape(-1),
            after=None,
            placed=(slot < length).reshape(-1),
            valid=valid,
            inserted=inserted[:, :length].reshape(-1),
        )

    def stops(self, ends: Tensor) -> Tensor:
        # Runs whose first row has no place have no start.
        begun = torch.cat([ends[:-1] & self.placed[1:], ends[-1:]])
        return super().stops(begun)
