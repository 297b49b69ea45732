"""The column of a disk storage's entry."""

import weakref
from collections.abc import Callable, Collection
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import After, Column, Columns, TensorColumn
from flatroll.buffers.storages.disk.forms import Form
from flatroll.layout.keys import NestedKey

Take: TypeAlias = Callable[[Tensor, Collection[NestedKey] | None], Columns]


class DiskColumn(Column):
    """A read-only column of a `DiskStorage`.

    Args:
        take: the storage's method that reads rows.
        key: key of the entry.
        form: form of the entry.
    """

    def __init__(self, take: "weakref.WeakMethod[Take]", key: NestedKey, form: Form) -> None:
        self._take = take
        self._key = key
        self._form = form
        self.dtype = form.dtype
        self.shape = form.shape

    @override
    def take(self, slots: Tensor) -> Tensor:
        take = self._take()
        assert take is not None  # guaranteed by the storage
        return take(slots, [self._key])[self._key]

    @override
    def write(self, slot: int, values: Tensor, after: After | None = None) -> NoReturn:
        raise no_edits_error()

    @override
    def put(self, slots: Tensor, values: Tensor, after: After | None = None) -> NoReturn:
        raise no_edits_error()

    @override
    def pool(self) -> TensorColumn:
        return TensorColumn(torch.empty((0, *self.shape), dtype=self.dtype))

    @override
    def grow(self, rows: int) -> None:
        return

    @property
    @override
    def saved_as(self) -> str:
        return f"{type(self).__name__} ({self._form.name})"

    @override
    def check_state_dict(self, state: dict[str, Any]) -> None:
        return  # the rows are in files

    @property
    @override
    def nbytes(self) -> int:
        return 0


def no_edits_error() -> RuntimeError:
    """Return the error for a change of stored rows."""
    return RuntimeError(
        "the rows of a DiskStorage cannot be changed: its files are written once. Extend with new rows, or use "
        "LazyMemmapStorage"
    )
