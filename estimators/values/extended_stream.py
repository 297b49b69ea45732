"""The extended stream: a batch and, for each run, the final observation that the run bootstraps from.

A network that remembers must meet that observation right behind its run. One that does not may meet it
anywhere, so it stands at the end, where it costs no index over the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from flatroll.kernels.scans.scan import is_tracing
from flatroll.layout.keys import NestedKey

Columns: TypeAlias = dict[NestedKey, Tensor]

#: What follows the rows int64 ``[M]`` (of which, if a bool ``[M]`` is given, only those where it is True).
Behind: TypeAlias = Callable[[Tensor, Tensor | None], Columns]


class Stream(Protocol):
    """The rows of a batch and inserted ones, the observations behind some of them."""

    @property
    def rows(self) -> int:
        """The rows of the stream."""
        ...

    def columns(self, root: Columns, behind: Behind, start: int, stop: int) -> Columns:
        """Rows ``start`` to ``stop`` of the stream.

        Args:
            root: columns ``[N, *]`` of the batch.
            behind: what to insert; a column that it leaves out repeats the row before.
            start, stop: the rows wanted.
        """
        ...

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values of the batch's rows and of what follows them ``[N, *]``; any number behind a terminated row."""
        ...


def marked(flag: Tensor) -> Tensor:
    """The marked rows of a bool tensor of any shape, its dims taken as one: int64 ``[K]``, ascending.

    K is read on the host: the one sync of an extended stream.

    >>> marked(torch.tensor([False, True, False, True])).tolist()
    [1, 3]
    """
    flat = flag.reshape(-1)
    if flat.device.type == "cpu" and type(flat) is Tensor and not is_tracing():
        return torch.from_numpy(np.flatnonzero(flat.numpy()))  # torch takes six times as long
    return flat.nonzero().squeeze(-1)


@dataclass(frozen=True)
class Appended:
    """The inserted rows come last.

    >>> stream = Appended(torch.tensor([1, 3]), count=4)
    >>> [x.tolist() for x in stream.split(torch.tensor([0.0, 1.0, 2.0, 3.0, 1.5, 3.5]))]
    [[0.0, 1.0, 2.0, 3.0], [1.0, 1.5, 3.0, 3.5]]
    """

    after: Tensor
    count: int

    @property
    def rows(self) -> int:
        return self.count + self.after.shape[0]

    def columns(self, root: Columns, behind: Behind, start: int, stop: int) -> Columns:
        if stop <= self.count:
            return {key: column[start:stop] for key, column in root.items()}
        after = self.after[max(start - self.count, 0) : stop - self.count]
        found = behind(after, None)
        part = {key: found[key] if key in found else column[after] for key, column in root.items()}
        if start >= self.count:
            return part
        return {key: torch.cat([column[start:], part[key].to(column.dtype)]) for key, column in root.items()}

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        value = values[: self.count]
        following = torch.cat([value[1:], value[-1:]])
        return value, following.index_copy_(0, self.after, values[self.count :])


@dataclass(frozen=True)
class Interleaved:
    """Each inserted row stands right behind its run.

    Attributes:
        after: int64 ``[K]``, ascending.
        position: int64 ``[N]``, where each row of the batch stands in the stream.
        source: int64 ``[N + K]``, the row of the batch at each place; an inserted row has the one before it.
    """

    after: Tensor
    position: Tensor
    source: Tensor

    @classmethod
    def of(cls, after: Tensor, count: int) -> "Interleaved":
        """The stream of ``count`` rows with one inserted behind each of ``after``.

        >>> stream = Interleaved.of(torch.tensor([1, 3]), count=4)
        >>> stream.position.tolist(), stream.source.tolist()
        ([0, 1, 3, 4], [0, 1, 1, 2, 3, 3])
        """
        row = torch.arange(count, device=after.device)
        inserts = torch.zeros_like(row).index_fill_(0, after, 1)
        source = torch.repeat_interleave(row, 1 + inserts, output_size=count + after.shape[0])
        return cls(after, row + inserts.cumsum(0) - inserts, source)

    @property
    def rows(self) -> int:
        return self.source.shape[0]

    def stops(self, ends: Tensor) -> Tensor:
        """Past-the-last place of each run, int64 ascending; ``ends [N]`` marks the last row of each."""
        return stops(self.position[marked(ends[:-1]) + 1], self.rows)

    def columns(self, root: Columns, behind: Behind, start: int, stop: int) -> Columns:
        inserted = self.position[self.after] + 1
        first, past = 0, inserted.shape[0]
        if (start, stop) != (0, self.rows):
            first, past = torch.searchsorted(inserted, inserted.new_tensor([start, stop])).tolist()
        rows, local = self.source[start:stop], inserted[first:past] - start
        part = {key: column.index_select(0, rows) for key, column in root.items()}
        for key, column in behind(self.after[first:past], None).items():
            part[key][local] = column.to(part[key].dtype)
        return part

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        following = (self.position + 1).clamp(max=self.rows - 1)
        return values.index_select(0, self.position), values.index_select(0, following)


def stops(first: Tensor, rows: int) -> Tensor:
    """Past-the-last place of each run of a stream of ``rows`` rows, int64 ascending.

    Args:
        first: places of the first rows of the runs but the first one, int64, ascending.
        rows: rows of the stream.
    """
    return torch.cat([first, first.new_tensor([rows])])


def row_stops(ends: Tensor) -> Tensor:
    """The same for the batch's own rows: past-the-last row of each run, of which ``ends [N]`` marks the last.

    >>> row_stops(torch.tensor([False, True, False, True])).tolist()
    [2, 4]
    """
    return stops(marked(ends[:-1]) + 1, len(ends))
