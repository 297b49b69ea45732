"""The extended stream: a batch with, behind each run, the final observation that the run bootstraps from."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from flatroll.layout.keys import NestedKey

Columns: TypeAlias = dict[NestedKey, Tensor]


@dataclass(frozen=True)
class Stream:
    """Index of the extended stream of a flat batch of N rows: K rows inserted, one behind each of ``after``.

    Attributes:
        after: int64 ``[K]``, the rows of the batch that end a run without terminating, ascending.
        position: int64 ``[N]``, where each row of the batch stands in the stream.
        source: int64 ``[N + K]``, the row of the batch at each place; an inserted row has the one before it.
    """

    after: Tensor
    position: Tensor
    source: Tensor

    @classmethod
    def of(cls, ends: Tensor, terminated: Tensor) -> "Stream":
        """Index a batch by its ``ends`` and ``terminated`` ``[N]``. K is read on the host: the one sync.

        >>> ends, terminated = torch.tensor([[False, True, True, True], [False, False, True, False]])
        >>> stream = Stream.of(ends, terminated)
        >>> stream.after.tolist(), stream.position.tolist(), stream.source.tolist()
        ([1, 3], [0, 1, 3, 4], [0, 1, 1, 2, 3, 3])
        """
        inserts = (ends & ~terminated).long()
        after = inserts.nonzero().squeeze(-1)
        row = torch.arange(ends.shape[0], device=ends.device)
        source = torch.repeat_interleave(row, 1 + inserts, output_size=row.shape[0] + after.shape[0])
        return cls(after, row + inserts.cumsum(0) - inserts, source)

    @property
    def rows(self) -> int:
        """N + K."""
        return self.source.shape[0]

    def stops(self, ends: Tensor) -> Tensor:
        """Past-the-last row of each run in the stream, int64 ascending."""
        first = ends[:-1].nonzero().squeeze(-1) + 1  # of every run but the first
        return torch.cat([self.position[first], self.position.new_tensor([self.rows])])

    def columns(self, root: Columns, behind: Columns, start: int, stop: int) -> Columns:
        """Rows ``start`` to ``stop`` of the stream.

        Args:
            root: columns ``[N, *]`` of the batch.
            behind: columns ``[K, *]`` of the inserted rows; a key that is absent repeats the row before.
            start, stop: the rows wanted.
        """
        if not self.after.shape[0]:
            return {key: column[start:stop] for key, column in root.items()}
        inserted = self.position[self.after] + 1
        first, past = 0, inserted.shape[0]
        if (start, stop) != (0, self.rows):
            first, past = torch.searchsorted(inserted, inserted.new_tensor([start, stop])).tolist()
        rows, local = self.source[start:stop], inserted[first:past] - start
        part = {key: column.index_select(0, rows) for key, column in root.items()}
        for key, column in behind.items():
            part[key][local] = column[first:past].to(part[key].dtype)
        return part
