"""The columns of a storage that are plain tensors in host memory, read and written by one call for all of them."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from flatroll.buffers.columns.base import Column, Columns, TensorColumn
from flatroll.layout.keys import NestedKey

if TYPE_CHECKING:
    from flatroll.kernels.rows.gather import Block

_MOST = 2**22  # bytes; torch shares larger copies out among its threads


class PlainColumns:
    """Those of ``columns`` that are plain tensors in host memory, whose rows can be copied as bytes.

    Addresses are kept: make a new one when a column's memory moves, and in a copy of the storage.

    >>> import torch
    >>> plain = PlainColumns({"x": TensorColumn(torch.zeros(4)), "y": TensorColumn(torch.zeros(4, 2))})
    >>> plain.write(3, {"x": torch.tensor([5.0, 6.0]), "y": torch.ones(2, 2)}, 2, 4)
    ('x', 'y')
    >>> plain.take(torch.tensor([3, 0]), ["x"])
    {'x': tensor([5., 6.])}
    """

    def __init__(self, columns: Mapping[NestedKey, Column]) -> None:
        self.columns = columns
        self._data = {
            key: column.data
            for key, column in columns.items()
            if isinstance(column, TensorColumn)
            and (type(column).take, type(column).write) == (TensorColumn.take, TensorColumn.write)
            and column.flat is not None
        }
        # The addresses of those columns that were asked for together; no key asked for has no block.
        self._blocks: dict[tuple[NestedKey, ...], Block | None] = {(): None}

    def take(self, slots: Tensor, keys: Collection[NestedKey] | None = None) -> Columns:
        """Copies of the rows in ``slots`` (int64 ``[N]``) of the plain columns among ``keys`` (default: of all), by
        key; of none if that is more than one thread should copy, so take what is missing column by column."""
        names = tuple(self._data if keys is None else [key for key in keys if key in self._data])
        block = self._blocks[names] if names in self._blocks else self._new_block(names)
        if block is None or len(slots) * block.row_bytes > _MOST:
            return {}
        return dict(zip(names, block.take(slots), strict=True))

    def take_next(
        self, slots: Tensor, follow: Tensor, taken: Columns, keys: Collection[NestedKey]
    ) -> Columns:
        """Copies of the rows in ``follow`` (any row where it is -1) of the plain columns among ``keys``, as
        :meth:`take` gives them, given the rows in ``slots`` as ``taken`` gives them. Both int64 ``[N]``."""
        names = tuple([key for key in keys if key in taken])
        block = self._blocks[names] if names in self._blocks else self._new_block(names)
        if block is None:
            return {}
        rows = block.take_next(slots, follow, [taken[key] for key in names])
        return dict(zip(names, rows, strict=True))

    def write(self, slot: int, values: Columns, rows: int, capacity: int) -> tuple[NestedKey, ...]:
        """Copy the ``rows`` rows of the plain columns among ``values`` to ``slot`` and the slots after it, going on at
        slot 0 after the last one; their keys, none if there is more to copy than one thread should."""
        names = tuple([key for key in values if key in self._data])
        block = self._blocks[names] if names in self._blocks else self._new_block(names)
        if block is None or rows * block.row_bytes > _MOST:
            return ()
        columns = [values[key] for key in names]
        fit = min(rows, capacity - slot)  # rows up to the last slot
        block.write(slot, columns, 0, fit)
        if fit < rows:
            block.write(0, columns, fit, rows - fit)
        return names

    def _new_block(self, names: tuple[NestedKey, ...]) -> "Block":
        """Remember the addresses of these columns, for the next time they are asked for."""
        from flatroll.kernels.rows.gather import Block  # numba

        block = self._blocks[names] = Block([self._data[key] for key in names])
        return block
