"""Columns most of whose rows are zeros, such as recurrent states that were kept in few rows."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from flatroll.buffers.columns.base import After, Column, differ
from flatroll.layout.keys import NestedKey, as_tuple


def checked_sparse(sparse: Collection[NestedKey]) -> set[NestedKey]:
    """The keys as they are mostly written; TypeError for a single name, which would be read letter by letter."""
    if isinstance(sparse, str):
        raise TypeError(f"sparse must be a list of keys, got the string {sparse!r}: write [{sparse!r}]")
    return {names[0] if len(names) == 1 else names for names in map(as_tuple, sparse)}


class SparseColumn(Column):
    """A column that keeps rows of zeros as a number of 4 bytes each, and the others besides. Lossless.

    Room for rows that are no zeros is made as they come, and used again when they are overwritten.

    Rows are written by one thread at a time and read by any number: a row that is being overwritten reads as one that
    was there, or as some other one; those read elsewhere are not touched.

    Args:
        rows: number of rows.
        shape: of one row's value.
        dtype: of the values, any.
        device: where everything is, default ``"cpu"``.

    >>> column = SparseColumn(1000, torch.Size([1, 128]), torch.float32)
    >>> column.write(0, torch.cat([torch.ones(1, 1, 128), torch.zeros(15, 1, 128)]))
    >>> column.take(torch.tensor([0, 1, 999]))[:, 0, 0], column.row_bytes
    (tensor([1., 0., 0.]), 36)
    """

    def __init__(
        self, rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.dtype, self.shape, self.device = dtype, torch.Size(shape), torch.device(device)
        self._place = torch.zeros(rows, dtype=torch.int32, device=self.device)  # entry of each row
        self._entries = torch.zeros(
            (1, *shape), dtype=dtype, device=self.device
        )  # entry 0 is zeros, for ever
        self._spare = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._written = 0  # slots below this have been written

    def write(self, slot: int, values: Tensor, after: After | None = None) -> None:
        """See `Column`."""
        self.put(torch.arange(slot, slot + len(values)), values)

    def put(self, slots: Tensor, values: Tensor, after: After | None = None) -> None:
        """See `Column`."""
        if not len(slots):
            return
        slots, values = slots.to(self.device), values.to(self.device)
        self._written = max(self._written, int(slots.max()) + 1)
        old = self._place.index_select(0, slots)
        filled = differ(values, torch.zeros_like(values[:1]).expand_as(values).contiguous())
        places = torch.zeros_like(old)
        places[filled] = self._take_spare(int(filled.sum()))
        self._entries.index_copy_(0, places[filled].long(), values[filled])
        self._place.index_copy_(0, slots, places)
        self._spare = torch.cat([self._spare, old[old > 0]])  # free only once no row points there

    def _take_spare(self, count: int) -> Tensor:
        """``count`` entries that no row uses; makes more, as many again as there were, if they do not do."""
        missing = count - len(self._spare)
        if missing > 0:
            there = len(self._entries)
            larger = self._entries.new_zeros((there + max(missing, there // 2), *self.shape))
            larger[:there] = self._entries
            self._entries = larger
            fresh = torch.arange(there, len(larger), dtype=torch.int32, device=self.device)
            self._spare = torch.cat([self._spare, fresh])
        taken, self._spare = self._spare[:count], self._spare[count:]
        return taken

    def take(self, slots: Tensor) -> Tensor:
        """See `Column`."""
        places = self._place.index_select(
            0, slots.to(self.device)
        )  # before the entries, which may have grown since
        return self._entries.index_select(0, places)

    def pool(self) -> "SparseColumn":
        """See `Column`."""
        return SparseColumn(0, self.shape, self.dtype, self.device)

    def grow(self, rows: int) -> None:
        """See `Column`."""
        if rows > len(self._place):
            larger = self._place.new_zeros(rows)
            larger[: len(self._place)] = self._place
            self._place = larger

    @property
    def nbytes(self) -> int:
        """See `Column`."""
        return sum(t.numel() * t.element_size() for t in (self._place, self._entries, self._spare))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: the mean of those written."""
        used = len(self._entries) - 1 - len(self._spare)
        return self._place.element_size() + self.value_bytes * used // max(1, self._written)

    def state_dict(self, rows: int) -> dict[str, Any]:
        """See `Column`; the rows that are no zeros."""
        filled = self._place[:rows].nonzero().squeeze(1)
        return {"rows": rows, "filled": filled, "values": self.take(filled)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Column`."""
        rows, filled = int(state["rows"]), state["filled"].to(self.device)
        fresh = SparseColumn(max(rows, len(self._place)), self.shape, self.dtype, self.device)
        fresh.put(filled, state["values"])
        self._place, self._entries, self._spare = fresh._place, fresh._entries, fresh._spare
        self._written = rows
