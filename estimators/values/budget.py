"""The stream of a fixed length: what ``shifted_budget`` makes of the extended one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flatroll.estimators.values.extended_stream import Behind, Columns, marked, stops


@dataclass(frozen=True)
class Budgeted:
    """Each series of T rows takes T + budget places, whatever its runs are: static shapes, no host sync.

    The observation behind each end that is bootstrapped stands right behind its row and moves the rows behind it
    one place on. A row counts (``valid``) if there is a place behind it. The rows moved out do not, and the trace
    of the last row that counts is cut there. Places left over repeat the last row; nobody reads their values.

    Attributes:
        position: int64 ``[N]``, the place of each row; the series' last place for a row that has none.
        placed: bool ``[N]``, whether it has one.
        valid: bool ``[B, T]``.
        source: int64 ``[B * (T + budget)]``, the row at each place; an inserted one has the row before it.
        inserted: bool, which places hold what follows their row.
    """

    position: Tensor
    placed: Tensor
    valid: Tensor
    source: Tensor
    inserted: Tensor

    @classmethod
    def of(cls, opened: Tensor, budget: int) -> "Budgeted":
        """The stream of series whose bootstrapped ends are ``opened``, bool ``[B, T]``.

        >>> stream = Budgeted.of(torch.tensor([[False, True, False, True]]), budget=1)
        >>> stream.source.tolist(), stream.inserted.int().tolist(), stream.valid.tolist()
        ([0, 1, 1, 2, 3], [0, 0, 1, 0, 0], [[True, True, True, False]])
        """
        count, time = opened.shape
        length = time + budget
        moves = opened.long()
        slot = torch.arange(time, device=opened.device) + moves.cumsum(-1) - moves
        valid = slot + 1 < length
        row = torch.arange(count * time, device=opened.device).view(count, time)
        out = torch.full_like(slot, length)  # a place that is dropped below
        source = row[:, -1:].repeat(1, length + 1)
        source.scatter_(1, torch.where(slot < length, slot, out), row)
        behind = torch.where(opened & valid, slot + 1, out)
        source.scatter_(1, behind, row)
        inserted = torch.zeros_like(source, dtype=torch.bool).scatter_(1, behind, True)
        place = slot.clamp(max=length - 1) + length * torch.arange(count, device=opened.device).unsqueeze(-1)
        return cls(
            place.reshape(-1),
            (slot < length).reshape(-1),
            valid,
            source[:, :length].reshape(-1),
            inserted[:, :length].reshape(-1),
        )

    @property
    def rows(self) -> int:
        return self.source.shape[0]

    def stops(self, ends: Tensor) -> Tensor:
        """Past-the-last place of each run, int64 ascending; ``ends [N]`` marks the last row of each."""
        return stops(self.position[marked(ends[:-1] & self.placed[1:]) + 1], self.rows)

    def columns(self, root: Columns, behind: Behind, start: int, stop: int) -> Columns:
        rows, inserted = self.source[start:stop], self.inserted[start:stop]
        return {key: column.index_select(0, rows) for key, column in root.items()} | behind(rows, inserted)

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        following = (self.position + 1).clamp(max=self.rows - 1)
        return values.index_select(0, self.position), values.index_select(0, following)
