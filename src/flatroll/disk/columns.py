"""Columns of rows: tensors with one value per row, and ragged ones."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flatroll.disk.names import DTYPES, LENGTHS, dtype_name


class Ragged(NamedTuple):
    """A column whose rows have any number of values: text, compressed frames, the frames that a row adds.

    Args:
        values: ``[M, ...]``, the values of all rows end to end.
        lengths: int64 ``[N]``, how many each row has; they add up to M. So the columns of two segments are joined by
            joining both tensors.
    """

    values: Tensor
    lengths: Tensor


#: A column of N rows: a tensor ``[N, ...]``, or a `Ragged`.
Column: TypeAlias = Tensor | Ragged


class ColumnSchema(NamedTuple):
    """What a column holds.

    Args:
        dtype: its name, such as ``"float32"``.
        shape: of one row's value; of one value if ragged.
        ragged: whether rows have any number of values.
    """

    dtype: str
    shape: tuple[int, ...]
    ragged: bool = False

    def __str__(self) -> str:
        return f"{'ragged ' * self.ragged}{self.dtype} {list(self.shape)}"


Schema: TypeAlias = dict[str, ColumnSchema]


def schema_of(columns: Mapping[str, Column]) -> Schema:
    """What columns hold; TypeError if a file cannot hold one of their dtypes."""
    schema: Schema = {}
    for name, column in columns.items():
        ragged = isinstance(column, Ragged)
        values = column.values if isinstance(column, Ragged) else column
        schema[name] = ColumnSchema(dtype_name(values.dtype), tuple(values.shape[1:]), ragged)
    return schema


def check_columns(columns: Mapping[str, Column]) -> int:
    """Return the number of rows of columns that fit each other.

    Raises:
        ValueError: there is no column, their numbers of rows differ, or the lengths of a ragged one do not fit.
        TypeError: a name is no string, or a column no tensor.
    """
    counts = {}
    for name, column in columns.items():
        if not isinstance(name, str):
            raise TypeError(
                f"names of columns must be strings (column_name makes one of a key), got {name!r}"
            )
        if name.endswith(LENGTHS) or name in ("", "__metadata__"):
            raise ValueError(f"a column cannot be called {name!r}: column_name makes a name of any key")
        rows = column.lengths if isinstance(column, Ragged) else column
        if not isinstance(rows, Tensor):
            raise TypeError(f"column {name!r} must be a tensor or Ragged, got {type(column).__name__}")
        if isinstance(column, Ragged):
            _check_lengths(name, column)
        elif rows.layout is not torch.strided:
            raise TypeError(f"column {name!r} must be dense, got layout {rows.layout}")
        counts[name] = rows.shape[0] if rows.dim() else None
    sizes = set(counts.values())
    if len(sizes) != 1 or None in sizes:
        raise ValueError(f"columns must have one number of rows, got {counts}")
    return int(next(iter(counts.values())) or 0)


def byte_count(columns: Mapping[str, Column]) -> int:
    """Number of bytes of the columns."""
    tensors = [
        part for column in columns.values() for part in (column if isinstance(column, Ragged) else [column])
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def cut(column: Ragged, low: int, high: int) -> Ragged:
    """Rows ``[low, high)`` of a ragged column.

    >>> cut(Ragged(torch.arange(6), torch.tensor([3, 1, 2])), 1, 3)
    Ragged(values=tensor([3, 4, 5]), lengths=tensor([1, 2]))
    """
    begin, count = int(column.lengths[:low].sum()), int(column.lengths[low:high].sum())
    return Ragged(column.values[begin : begin + count], column.lengths[low:high])


def join(parts: Sequence[Ragged], schema: ColumnSchema) -> Ragged:
    """The rows of several ragged columns, end to end."""
    values = [part.values for part in parts] or [torch.empty((0, *schema.shape), dtype=DTYPES[schema.dtype])]
    lengths = [part.lengths for part in parts] or [torch.empty(0, dtype=torch.int64)]
    return Ragged(torch.cat(values), torch.cat(lengths))


def difference(expected: Schema, got: Schema) -> str:
    """In words, how columns differ from those that are expected.

    >>> print(difference({"x": ColumnSchema("float32", (3,))}, {"x": ColumnSchema("float64", (3,))}))
    'x' is float64 [3], expected float32 [3]
    """
    missing = [f"{name!r} is missing" for name in expected if name not in got]
    added = [f"{name!r} is new" for name in got if name not in expected]
    changed = [
        f"{name!r} is {got[name]}, expected {column}"
        for name, column in expected.items()
        if name in got and got[name] != column
    ]
    return ", ".join([*missing, *added, *changed])


def _check_lengths(name: str, column: Ragged) -> None:
    lengths, count = column.lengths, column.values.shape[0] if column.values.dim() else -1
    if lengths.dtype != torch.int64 or lengths.dim() != 1 or count < 0:
        raise ValueError(f"ragged column {name!r} must have values [M, ...] and lengths int64 [N]")
    if bool((lengths < 0).any()) or int(lengths.sum()) != count:
        raise ValueError(f"the lengths of ragged column {name!r} must add up to its {count} values")
