"""A column for values that are zero in most rows, such as recurrent states stored once per several rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import (
    After,
    Column,
    Dumped,
    Part,
    check_dumped,
    check_values,
    differ,
    take_rows,
)
from flatroll.buffers.index.saved_tables import damaged
from flatroll.layout.transfers import upload


class SparseColumn(Column):
    """A lossless column that uses 4 bytes for an all-zero row and stores other rows in full.

    Memory for non-zero rows is allocated on demand and reused.

    One thread writes at a time and any number read. Reading a row while it is overwritten may return its old value or
    another row's; other rows are not affected.

    Args:
        rows: number of rows.
        shape: shape of one row's value.
        dtype: dtype of the values, any.
        device: device of the column, default ``"cpu"``.

    >>> column = SparseColumn(1000, torch.Size([1, 128]), torch.float32)
    >>> column.write(0, torch.cat([torch.ones(1, 1, 128), torch.zeros(15, 1, 128)]))
    >>> column.take(torch.tensor([0, 1, 999]))[:, 0, 0], column.row_bytes
    (tensor([1., 0., 0.]), 36)
    """

    def __init__(
        self, rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self.device = torch.device(device)

        # Row r has the value _entries[_place[r]]; entry 0 is always zeros. _spare lists the unused entries.
        self._place = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self._entries = torch.zeros((1, *shape), dtype=dtype, device=self.device)
        self._spare = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._written = 0  # slots below this were written

    @override
    def write(self, slot: int, values: Tensor, after: After | None = None) -> None:
        self.put(torch.arange(slot, slot + len(values)), values)

    @override
    def put(self, slots: Tensor, values: Tensor, after: After | None = None) -> None:
        if not len(slots):
            return

        slots = upload(slots, self.device)
        values = upload(values.detach(), self.device)
        self._written = max(self._written, int(slots.max()) + 1)

        old = self._place.index_select(0, slots)
        filled = differ(values, torch.zeros_like(values[:1]).expand_as(values).contiguous())
        count = int(filled.sum())

        missing = count - len(self._spare)
        if missing > 0:  # grow by at least half
            entries = len(self._entries)
            larger = self._entries.new_zeros((entries + max(missing, entries // 2), *self.shape))
            larger[:entries] = self._entries
            self._entries = larger
            fresh = torch.arange(entries, len(larger), dtype=torch.int32, device=self.device)
            self._spare = torch.cat([self._spare, fresh])

        taken = self._spare[:count]
        self._spare = self._spare[count:]
        places = torch.zeros_like(old)
        places[filled] = taken

        # Fill new entries before rows refer to them, and free old ones only after no row does.
        self._entries.index_copy_(0, places[filled].long(), values[filled])
        self._place.index_copy_(0, slots, places)
        self._spare = torch.cat([self._spare, old[old > 0]])

    @override
    def take(self, slots: Tensor) -> Tensor:
        # Read the places first: in between, the entries may grow but never shrink.
        places = self._place.index_select(0, upload(slots, self.device))
        return self._entries.index_select(0, places)

    @override
    def pool(self) -> "SparseColumn":
        return SparseColumn(0, self.shape, self.dtype, self.device)

    @override
    def grow(self, rows: int) -> None:
        if rows > len(self._place):
            larger = self._place.new_zeros(rows)
            larger[: len(self._place)] = self._place
            self._place = larger

    @property
    @override
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._place, self._entries, self._spare))

    @property
    @override
    def row_bytes(self) -> int:
        """Mean bytes of the rows written so far."""
        used = len(self._entries) - 1 - len(self._spare)
        return self._place.element_size() + self.value_bytes * used // max(1, self._written)

    @override
    def dump(self, slots: Tensor) -> Dumped:
        """Return the non-zero rows; other rows have length 0."""
        filled = (self._place.index_select(0, upload(slots, self.device)) > 0).cpu()
        return {"values": (self.take(slots[filled]), filled.long())}

    @override
    def restore(self, parts: Sequence[Part], rows: int) -> dict[str, Any]:
        slots = [torch.zeros(0, dtype=torch.int64)]
        values = [torch.empty((0, *self.shape), dtype=self.dtype)]
        for places, dumped in parts:
            check_dumped(dumped, {"values": True})
            stored, lengths = dumped["values"]
            check_values("values", stored, self.dtype, self.shape)

            if bool((lengths > 1).any()):
                raise damaged("a row has more than one value")
            at = places[lengths > 0]
            slots.append(at[at >= 0])
            values.append(stored[at >= 0])

        filled, order = torch.cat(slots).sort()
        return {"rows": rows, "filled": filled, "values": take_rows(torch.cat(values), order)}

    @override
    def state_dict(self, rows: int) -> dict[str, Any]:
        """Return the non-zero rows and their slots."""
        filled = self._place[:rows].nonzero().squeeze(1)
        return {"rows": rows, "filled": filled, "values": self.take(filled)}

    @override
    def check_state_dict(self, state: dict[str, Any]) -> int:
        rows = state["rows"]
        filled = state["filled"]
        count = check_values("slots", filled, torch.int64, ())
        if check_values("values", state["values"], self.dtype, self.shape) != count:
            raise damaged(f"it has {len(state['values'])} values for {count} slots")

        # Strictly ascending slots are distinct; the first and the last bound them all.
        in_order = not count or (int(filled[0]) >= 0 and bool((filled.diff() > 0).all()))
        if type(rows) is not int or rows < 0 or not in_order or (count and int(filled[-1]) >= rows):
            raise damaged(f"its slots are not ascending slots of {rows} rows")
        return rows

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = int(state["rows"])
        filled = state["filled"].to(self.device)
        fresh = SparseColumn(max(rows, len(self._place)), self.shape, self.dtype, self.device)
        fresh.put(filled, state["values"])
        vars(self).update(vars(fresh) | {"_written": rows})
