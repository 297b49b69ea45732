"""The column of a disk storage's entry."""

import weakref
from typing import Any

from typing_extensions import override

from flatroll.buffers.columns.read_only import ReadOnlyColumn, Take
from flatroll.buffers.storages.disk.forms import Form
from flatroll.layout.keys import NestedKey


class DiskColumn(ReadOnlyColumn):
    """A read-only column of a `DiskStorage`.

    Args:
        take: the storage's method that reads rows.
        key: key of the entry.
        form: form of the entry.
    """

    def __init__(self, take: "weakref.WeakMethod[Take]", key: NestedKey, form: Form) -> None:
        super().__init__(take, key, form.dtype, form.shape, no_edits_error)
        self._form = form

    @property
    @override
    def saved_as(self) -> str:
        return f"{type(self).__name__} ({self._form.name})"

    @override
    def check_state_dict(self, state: dict[str, Any]) -> None:
        return  # the rows are in files


def no_edits_error() -> RuntimeError:
    """Return the error for a change of stored rows."""
    return RuntimeError(
        "the rows of a DiskStorage cannot be changed: its files are written once. Extend with new rows, or use "
        "LazyMemmapStorage"
    )
