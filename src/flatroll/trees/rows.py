"""Rows of columns: `RowNumbers` numbers the distinct ones, `GrowingColumns` stores them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.kernels.rows.row_index import RowIndex
from flatroll.kernels.rows.words import hash_words, pack_rows, view_rows
from flatroll.layout.keys import NestedKey, as_tuple, plain_key
from flatroll.layout.tensordict_seam import get_entry, nest

if TYPE_CHECKING:
    from flatroll.kernels.rows.gather import HostColumns

Kind = tuple[torch.dtype, torch.Size]


class RowNumbers:
    """Numbers the distinct rows of some columns; the first insertion fixes dtypes and shapes.

    >>> rows = RowNumbers(["x"])
    >>> rows.insert([torch.tensor([3.0, 5.0, 3.0])])
    tensor([0, 1, 0])
    """

    def __init__(self, names: Sequence[NestedKey]) -> None:
        self.names = names
        self.index: RowIndex | None = None
        self.kinds: list[Kind] | None = None

    def __len__(self) -> int:
        if self.index is None:
            return 0
        return len(self.index)

    def insert(self, columns: Sequence[Tensor]) -> Tensor:
        """Return the number of each row, int64 ``[N]``; new rows get new numbers."""
        return self.number(columns)[0]

    def find(self, columns: Sequence[Tensor]) -> Tensor:
        """Return the number of each row, int64 ``[N]``; -1 for unknown rows."""
        return self.number(columns, extend=False)[0]

    def number(self, columns: Sequence[Tensor], extend: bool = True) -> tuple[Tensor, Tensor]:
        """Return the numbers and hashes, int64 ``[N]`` each, of the rows of columns ``[N, *F]``.

        Unknown rows get new numbers if ``extend``, else -1.

        Raises:
            TypeError: a column has a different dtype or shape than before.
        """
        if self.index is None and not extend:
            hashes = hash_words(pack_rows(columns))
            return torch.full_like(hashes, -1), hashes
        index, words, floats = self.prepare(columns)
        return index.number(words, floats=floats, extend=extend)

    def prepare(self, columns: Sequence[Tensor]) -> tuple[RowIndex, Tensor, int]:
        """Return what numbering these rows needs: the index, and the two results of `view_rows`, words first.

        TypeError as in :meth:`number`.
        """
        for name, column, kind in zip(self.names, columns, self.kinds or (), strict=False):
            if column.dtype != kind[0] or column.shape[1:] != kind[1]:
                raise TypeError(
                    f"{name!r} must be {kind[0]} {tuple(kind[1])} per row as in the rows before, "
                    f"got {column.dtype} {tuple(column.shape[1:])}"
                )

        words, floats = view_rows(columns)
        if self.index is None:
            self.index = RowIndex(words.shape[1], words.device)
            self.kinds = [(column.dtype, column.shape[1:]) for column in columns]
        return self.index, words, floats

    def truncate(self, count: int) -> None:
        """Drop the rows with numbers from ``count`` on; with 0, also the columns' dtypes and shapes."""
        if self.index is not None:
            self.index.truncate(count)
        if not count:
            self.index = None
            self.kinds = None

    def state_dict(self) -> dict[str, Any]:
        """Return the rows, ordered by number."""
        words = None if self.index is None else self.index.words.clone()
        return {"words": words, "kinds": self.kinds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the numbers from :meth:`state_dict`."""
        self.kinds = state["kinds"]
        self.index = None
        if state["words"] is not None:
            self.index = RowIndex(state["words"].shape[1], state["words"].device)
            self.index.insert(state["words"])


class GrowingColumns:
    """Rows of named columns in memory that doubles when full. The first rows fix names, dtypes and shapes.

    >>> rows = GrowingColumns()
    >>> rows.set(torch.tensor([0, 1]), {"x": torch.tensor([5.0, 6.0])})
    >>> rows.set(torch.tensor([1, 2]), {"x": torch.tensor([7.0, 8.0])})
    >>> rows.get(torch.tensor([2, 1, 0]))["x"]
    tensor([8., 7., 5.])
    """

    def __init__(self) -> None:
        self._count = 0
        self._columns: dict[NestedKey, Tensor] = {}
        self._host: HostColumns[NestedKey] | None = None  # the columns, if they are in host memory

    def __len__(self) -> int:
        return self._count

    @property
    def keys(self) -> list[NestedKey]:
        """Names of the columns; empty before the first row."""
        return list(self._columns)

    def check(self, columns: Mapping[NestedKey, Tensor]) -> None:
        """Raise unless ``columns`` have the names, dtypes and shapes of the existing rows.

        Raises:
            KeyError: a column is missing.
            TypeError: a column has another dtype or shape.
        """
        for key, stored in self._columns.items():
            if key not in columns:
                raise KeyError(f"no entry {key!r}, which earlier rows have; got {sorted(map(str, columns))}")
            column = columns[key]
            if column.dtype != stored.dtype or column.shape[1:] != stored.shape[1:]:
                raise TypeError(
                    f"{key!r} must be {stored.dtype} {tuple(stored.shape[1:])} per row as in the rows before, "
                    f"got {column.dtype} {tuple(column.shape[1:])}"
                )

    def set(self, at: Tensor, columns: Mapping[NestedKey, Tensor]) -> None:
        """Write rows ``[N, *F]`` at distinct positions ``at`` (int64 ``[N]``), over old rows or right after them.

        Columns that existing rows do not have are left out. Call :meth:`check` first.
        """
        if not at.shape[0]:
            return

        # If the positions are the next ones, in order, write a slice, which is much faster.
        rows = int(at.max()) + 1
        if rows - self._count == len(at) and int(at[0]) == self._count and bool((at[1:] > at[:-1]).all()):
            self.append(columns, len(at))
            return

        self._reserve(columns, rows)
        for key, stored in self._columns.items():
            stored.index_copy_(0, at, columns[key].detach())
        self._count = max(self._count, rows)

    def append(self, columns: Mapping[NestedKey, Tensor], new: int) -> None:
        """Write ``new`` rows ``[new, *F]`` after the last one, as :meth:`set` does; the errors are :meth:`check`'s."""
        before = self._count
        rows = self._count + new
        source = None if self._host is None else self._host.find(columns, new)

        if source is None:
            self.check(columns)
        if not new:
            return

        self._reserve(columns, rows)
        if source is None or self._host is None or not self._host.write_found(before, source, new):
            for key, stored in self._columns.items():
                stored[before:rows] = columns[key].detach()
        self._count = rows

    def _reserve(self, columns: Mapping[NestedKey, Tensor], rows: int) -> None:
        """Make room for this many rows of columns like these."""
        if not self._columns:
            self._columns = {key: column.new_empty(0, *column.shape[1:]) for key, column in columns.items()}

        for key, stored in self._columns.items():
            if rows > stored.shape[0]:
                larger = stored.new_empty(room_for(rows), *stored.shape[1:])
                larger[: self._count] = stored[: self._count]
                self._columns[key] = larger
                self._host = None

        if self._host is None and all(column.is_cpu for column in self._columns.values()):
            from flatroll.kernels.rows.gather import HostColumns  # numba

            self._host = HostColumns(self._columns)

    def get(self, at: Tensor) -> TensorDict:
        """Return copies of the rows at positions ``at`` (int64 ``[N]``) as a tensordict ``[N]``."""
        return nest({key: column[at] for key, column in self._columns.items()}, len(at))

    def column(self, key: NestedKey) -> Tensor:
        """Return one column of all rows, ``[len, *F]``: a view, which later :meth:`set` calls may not update."""
        return self._columns[plain_key(key)][: self._count]

    def clear(self) -> None:
        """Remove all rows, names, dtypes and shapes."""
        self._count = 0
        self._columns = {}
        self._host = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_host": None}  # a copy has its own memory

    def load(self, rows: TensorDictBase) -> None:
        """Replace all rows with those of ``rows`` (``[N]``)."""
        self.clear()
        self.set(torch.arange(len(rows)), flat_columns(rows))


def room_for(rows: int) -> int:
    """Return how many rows to allocate for ``rows`` rows: a power of two, at least 64."""
    return max(64, 1 << (rows - 1).bit_length())


def flat_columns(rows: TensorDictBase, keys: Iterable[NestedKey] | None = None) -> dict[NestedKey, Tensor]:
    """Return the entries of a tensordict ``[*B]``, or those at ``keys``, as columns ``[N, *F]`` of all its rows.

    >>> flat_columns(TensorDict({"next": {"x": torch.zeros(2, 3, 4)}}, [2, 3]))["next", "x"].shape
    torch.Size([6, 4])
    """
    dims = rows.batch_dims
    count = rows.batch_size.numel()
    if keys is None:
        named = _leaves(rows)
    else:
        named = ((plain_key(as_tuple(key)), get_entry(rows, key)) for key in keys)

    columns = dict(named)
    if dims == 1:
        return columns
    return {key: column.reshape(count, *column.shape[dims:]) for key, column in columns.items()}


def _leaves(rows: TensorDictBase, *parents: str) -> Iterator[tuple[NestedKey, Tensor]]:
    """Iterate over all tensors with their keys; ``rows.items(True, True)`` takes three times as long."""
    for name, value in rows.items():
        if isinstance(value, TensorDictBase):
            yield from _leaves(value, *parents, name)
        elif isinstance(value, Tensor):
            key: NestedKey = (*parents, name) if parents else name
            yield key, value
