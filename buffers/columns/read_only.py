"""A column whose values are read by its storage, and never written."""

import weakref
from collections.abc import Callable, Collection
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import After, Column, Columns, TensorColumn
from flatroll.layout.keys import NestedKey

Take: TypeAlias = Callable[[Tensor, Collection[NestedKey] | None], Columns]


class ReadOnlyColumn(Column):
    """A read-only column.

    Args:
        take: the storage's method that reads rows.
        key: key of the entry.
        dtype: of its values.
        shape: of one row's value.
        refusal: returns the error for a change of its values.
    """

    def __init__(
        self,
        take: "weakref.WeakMethod[Take]",
        key: NestedKey,
        dtype: torch.dtype,
        shape: torch.Size,
        refusal: Callable[[], RuntimeError],
    ) -> None:
        self._take = take
        self._key = key
        self.dtype = dtype
        self.shape = shape
        self._refusal = refusal

    @override
    def take(self, slots: Tensor) -> Tensor:
        take = self._take()
        assert take is not None  # guaranteed by the storage
        return take(slots, [self._key])[self._key]

    @override
    def write(self, slot: int, values: Tensor, after: After | None = None) -> NoReturn:
        raise self._refusal()

    @override
    def put(self, slots: Tensor, values: Tensor, after: After | None = None) -> NoReturn:
        raise self._refusal()

    @override
    def pool(self) -> TensorColumn:
        return TensorColumn(torch.empty((0, *self.shape), dtype=self.dtype))

    @override
    def grow(self, rows: int) -> None:
        return

    @property
    @override
    def nbytes(self) -> int:
        return 0
