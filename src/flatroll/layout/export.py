"""Converts flat batches to NumPy arrays, pandas data frames and Arrow tables, and back, bit for bit.

Every format has one column per entry, with a dotted name (``("next", "reward")`` is ``next.reward``), and one row per
row of the batch, in order. Markers are columns like all others.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase

from flatroll.layout.checks import as_text, check_rows, check_type, optional_package
from flatroll.layout.keys import (
    DONE,
    EPISODE_REWARD,
    IS_INIT,
    REWARD,
    STEP_COUNT,
    TERMINATED,
    TRUNCATED,
    as_tuple,
    is_entry,
    plain_key,
)

Array = npt.NDArray[Any]

# Names of columns that are [N, 1] in a flat batch; other columns of one number per row are [N].
_ONE_WIDE = {IS_INIT, STEP_COUNT, EPISODE_REWARD} | {key[-1] for key in (REWARD, DONE, TERMINATED, TRUNCATED)}
_RECORD = "flatroll"  # metadata key for shapes in data frames and Arrow fields
_Recorded: TypeAlias = tuple[str, Sequence[int]]  # dtype and shape of a row of an entry
_PART = re.compile(r"(?P<name>.+)\[(?P<place>\d+(,\d+)*)\]")  # of an entry in a data frame: "observation[2]"


def to_numpy(batch: TensorDictBase, *, separator: str = ".") -> dict[str, Array]:
    """Return the columns of a batch as NumPy arrays by their dotted names.

    The arrays share memory with a batch on the host. ``numpy.savez(path, **to_numpy(batch))`` saves them.

    Args:
        batch: flat batch ``[N]`` of tensors.
        separator: what joins the names of a nested key. Default ``"."``.

    Returns:
        A dict of arrays ``[N, ...]``, of the shapes and dtypes of the entries.

    Raises:
        ValueError: the batch is not ``[N]``, or an entry's name contains the separator.
        TypeError: an entry is not a tensor, or NumPy lacks its dtype (bfloat16).

    >>> batch = TensorDict({"action": torch.tensor([2, 0]), "next": {"reward": torch.ones(2, 1)}}, [2])
    >>> to_numpy(batch)
    {'action': array([2, 0]), 'next.reward': array([[1.],
           [1.]], dtype=float32)}
    >>> from_numpy(to_numpy(batch))["next", "reward"].shape
    torch.Size([2, 1])
    """

    check_rows(batch, values=True)
    if batch.batch_dims != 1:
        raise ValueError(
            f"batch must have batch size [N], got {list(batch.batch_size)}: join() concatenates the rows"
        )

    _check_separator(separator)
    columns: dict[str, Array] = {}
    for key, array in to_columns(batch):
        if any(separator in name for name in key):
            raise ValueError(
                f"entry {plain_key(key)!r} has {separator!r} in its name: pass another separator="
            )
        columns[separator.join(key)] = array
    return columns


def _check_separator(separator: str) -> str:
    """The separator, which has at least one character."""
    if not check_type("separator", separator, str, "a string"):
        raise ValueError("separator must have at least one character, got ''")
    return separator


def to_columns(batch: TensorDictBase) -> Iterator[tuple[tuple[str, ...], Array]]:
    """Yield the key and the array ``[N, ...]`` of each entry; TypeError for an entry that NumPy cannot hold."""
    for key in batch.keys(True, True, is_leaf=is_entry):
        column = batch.get(key)
        if not isinstance(column, torch.Tensor) or column.is_nested:
            raise TypeError(
                f"entry {key!r} holds {type(column).__name__}, which is not a tensor [N, ...]: leave it out, "
                f"batch.exclude({key!r})"
            )

        try:
            array: Array = column.detach().cpu().resolve_conj().resolve_neg().numpy()
        except TypeError as error:
            raise TypeError(
                f"entry {key!r} is {column.dtype}, which NumPy does not support: cast it first"
            ) from error
        yield as_tuple(key), array


def from_numpy(columns: Mapping[str, Any], *, separator: str = ".") -> TensorDict:
    """Return the flat batch ``[N]`` of arrays made by `to_numpy`.

    The batch shares memory with writable arrays.

    Args:
        columns: arrays ``[N, ...]`` by dotted name; a dict, or what `numpy.load` returns.
        separator: what joins the names of a nested key. Default ``"."``.

    Raises:
        ValueError: the arrays differ in their number of rows, or one name is an entry and a part of another name.
        TypeError: an array is not of numbers or bools.
    """
    check_type("columns", columns, Mapping, "a dict of arrays by name")
    if isinstance(columns, TensorDictBase):
        raise TypeError(
            "columns must be a dict of arrays by name, got a tensordict, which is a batch already"
        )

    _check_separator(separator)
    return _assemble(((name, np.asarray(columns[name])) for name in columns), separator)


def _assemble(columns: Iterable[tuple[str, Array]], separator: str) -> TensorDict:
    """Make the batch of arrays by dotted name."""
    entries = {tuple(name.split(separator)): array for name, array in columns}
    return from_columns(entries, separator)


def from_columns(columns: Mapping[tuple[str, ...], Array], separator: str = ".") -> TensorDict:
    """Return the flat batch ``[N]`` of arrays by key; errors as `from_numpy`, with names joined by ``separator``."""
    lengths = {}
    for key, array in columns.items():
        lengths[separator.join(key)] = len(array) if array.ndim else -1
    if len(set(lengths.values())) > 1 or -1 in lengths.values():
        raise ValueError(f"columns must have one row for each row of the batch, got lengths {lengths}")

    folders = {key[:depth] for key in columns for depth in range(1, len(key))}
    both = sorted(separator.join(key) for key in columns if key in folders)
    if both:
        raise ValueError(
            f"columns {both} are entries, and also prefixes of other entries' names: rename them first"
        )

    batch = TensorDict({}, [next(iter(lengths.values()), 0)])

    for key, array in columns.items():
        if array.dtype.kind not in "biufc":
            raise TypeError(
                f"column {separator.join(key)!r} must hold numbers or bools, got {array.dtype}: leave it out"
            )
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        batch.set(key, torch.from_numpy(np.require(native, requirements=["C", "W"])))
    return batch


def to_pandas(batch: TensorDictBase, *, separator: str = ".", split: int = 16) -> Any:
    """Return a batch as a `pandas.DataFrame`.

    An entry of one number per row is a column. An entry of up to ``split`` numbers becomes the columns
    ``observation[0]``, ``observation[1]``, ...; larger ones (images) are a column of arrays.
    ``frame.attrs["flatroll"]`` records the shapes, so that `from_pandas` can restore the frame or some of its rows.

    Args:
        batch: flat batch ``[N]`` of tensors.
        separator: what joins the names of a nested key. Default ``"."``.
        split: split entries of up to this many numbers into columns. Default 16; 1 splits nothing.

    Raises:
        ImportError: pandas is missing; the message names the extra.
        ValueError, TypeError: as `to_numpy`.

    ```python
    frame = to_pandas(batch)
    frame.groupby("collector.traj_ids")["next.reward"].sum()
    ```
    """
    pandas = optional_package("pandas", "pandas", "to_pandas")
    columns: dict[str, Any] = {}

    record: dict[str, Any] = {}
    for name, array in to_numpy(batch, separator=separator).items():
        if _PART.fullmatch(name):
            raise ValueError(f"entry {name!r} would be read as a part of another one: rename it first")
        shape = array.shape[1:]
        record[name] = [array.dtype.name, list(shape)]
        if prod(shape) == 1:
            columns[name] = array.reshape(-1)
        elif prod(shape) <= split:
            for place in np.ndindex(*shape):
                columns[f"{name}[{','.join(map(str, place))}]"] = array[:, *place]
        else:
            columns[name] = pandas.Series(list(array.copy()), dtype=object)

    frame = pandas.DataFrame(columns, index=pandas.RangeIndex(len(batch)))
    frame.attrs[_RECORD] = record
    return frame


def from_pandas(frame: Any, *, separator: str = ".") -> TensorDict:
    """Return the flat batch ``[N]`` of a data frame made by `to_pandas`.

    Rows keep the order of the frame: those of a trajectory must be contiguous and in time order. In frames without
    the record of `to_pandas`, rewards, flags and step counts become ``[N, 1]``, other single columns ``[N]``,
    and arrays or lists of one length ``[N, size]``.

    Args:
        frame: a `pandas.DataFrame`.
        separator: what joins the names of a nested key. Default ``"."``.

    Raises:
        ValueError: a column of an entry is missing, arrays or lists of a column differ in shape or dtype (the message
            names the row), or names clash.
        TypeError: a column is not of numbers, bools, or arrays or lists of them.
    """
    if not frame.columns.is_unique:
        raise ValueError(f"columns must have unique names, got {list(frame.columns)}")

    record: Mapping[str, _Recorded] = frame.attrs.get(_RECORD, {})
    wholes: dict[str, Array] = {}
    parts: dict[str, dict[tuple[int, ...], Array]] = {}
    for label in frame.columns:
        name = str(label)
        column = frame[label].to_numpy()
        part = _PART.fullmatch(name)
        if part is not None:
            wholes.setdefault(part["name"], column)  # keeps the order of the entries
            place = tuple(map(int, part["place"].split(",")))
            parts.setdefault(part["name"], {})[place] = column
        elif column.dtype == object:
            wholes[name] = _stack(name, column, record.get(name))
        else:
            wholes[name] = column

    for name, (dtype, shape) in record.items():
        if not prod(shape):
            wholes[name] = np.empty((len(frame), *shape), dtype)

    for name, places in parts.items():
        shape = _shape_of_parts(name, places, record.get(name))
        wholes[name] = np.stack([places[place] for place in np.ndindex(*shape)], 1).reshape(-1, *shape)

    shapes = {name: entry[1] for name, entry in record.items()}
    shaped = {name: _reshape(name, column, shapes.get(name), separator) for name, column in wholes.items()}
    return _assemble(shaped.items(), separator)


def _stack(name: str, column: Array, recorded: _Recorded | None) -> Array:
    """Stack a column of arrays or lists to one array ``[N, ...]``; the error names the row that does not fit."""
    if not len(column) and recorded is not None:
        return np.empty((0, *recorded[1]), recorded[0])

    items: list[Array] = []
    for row, cell in enumerate(column):
        if isinstance(cell, str | bytes):
            raise TypeError(f"column {name!r} holds texts, row {row} has {cell[:40]!r}: leave it out")
        item = _cell_array(cell)
        if item is None:
            raise TypeError(
                f"column {name!r} must hold numbers, bools, or arrays or lists of them, row {row} has "
                f"{as_text(cell)}: leave the column out, or fill it"
            )

        items.append(item)
        if item.shape != items[0].shape:
            raise ValueError(
                f"the cells of column {name!r} must have one shape: row {row} has {list(item.shape)}, row 0 has "
                f"{list(items[0].shape)}; pad them, or leave the column out"
            )
        if item.dtype != items[0].dtype:
            raise ValueError(
                f"the cells of column {name!r} must have one dtype: row {row} has {item.dtype}, row 0 has "
                f"{items[0].dtype}; make arrays of them, frame[{name!r}] = [numpy.asarray(cell, float) for cell in "
                f"frame[{name!r}]]"
            )

    if items:
        return np.stack(items)
    return np.empty((0, 0))


def _cell_array(cell: Any) -> Array | None:
    """An array of the numbers in a cell of a data frame, which may be nested lists; None if it holds something else."""
    try:
        array = np.asarray(cell)
        if array.dtype == object and array.ndim:  # pandas gives lists of lists as arrays of arrays
            array = np.stack([_cell_array(part) for part in array])  # type: ignore[misc]
    except (TypeError, ValueError):
        return None
    if array.dtype.kind in "biufc":
        return array
    return None


def _shape_of_parts(
    name: str, places: Iterable[tuple[int, ...]], recorded: _Recorded | None
) -> tuple[int, ...]:
    """Return the shape of an entry split into columns; ValueError unless all columns exist."""
    present = set(places)
    axes = zip(*present, strict=False)
    if recorded is None:
        shape = tuple(max(axis) + 1 for axis in axes)
    else:
        shape = tuple(recorded[1])

    wanted = set(np.ndindex(*shape))
    if present != wanted:
        odd = sorted(present ^ wanted)[0]
        fault = "missing" if odd in wanted else "one too many"
        raise ValueError(
            f"entry {name!r} needs its {len(wanted)} columns {name}[...]: {name}[{','.join(map(str, odd))}] is "
            f"{fault}"
        )
    return shape


def _reshape(name: str, column: Array, shape: Sequence[int] | None, separator: str) -> Array:
    """Reshape a column to the recorded row shape, or to the shape that its name has in flat batches."""
    if shape is not None:
        return column.reshape(len(column), *shape)
    if column.ndim == 1 and name.split(separator)[-1] in _ONE_WIDE:
        return column[:, None]
    return column


def to_arrow(batch: TensorDictBase, *, separator: str = ".") -> Any:
    """Return a batch as a `pyarrow.Table`, for Parquet files, polars, DuckDB and data set libraries.

    An entry of one number per row is a column of that type; others are fixed-size lists, row-major. The field's
    metadata records the shape, so that `from_arrow` can restore the batch.

    Args:
        batch: flat batch ``[N]`` of tensors.
        separator: what joins the names of a nested key. Default ``"."``.

    Raises:
        ImportError: pyarrow is missing; the message names the extra.
        ValueError, TypeError: as `to_numpy`; an entry of complex numbers, or of no numbers at all.

    ```python
    pyarrow.parquet.write_table(to_arrow(batch), "batch.parquet")
    batch = from_arrow(pyarrow.parquet.read_table("batch.parquet"))
    ```
    """
    pyarrow = optional_package("pyarrow", "arrow", "to_arrow")
    fields = []

    arrays = []
    for name, array in to_numpy(batch, separator=separator).items():
        if array.dtype.kind == "c":
            raise TypeError(
                f"entry {name!r} is {array.dtype}, which Arrow does not support: apply torch.view_as_real first"
            )
        size = prod(array.shape[1:])
        if not size:
            raise TypeError(
                f"entry {name!r} has rows without numbers, which Arrow's lists cannot hold: leave it out"
            )

        values = pyarrow.array(array.reshape(-1))
        if size != 1:
            values = pyarrow.FixedSizeListArray.from_arrays(values, size)
        arrays.append(values)

        shape = json.dumps(list(array.shape[1:]))
        fields.append(pyarrow.field(name, values.type, nullable=False, metadata={_RECORD: shape}))

    return pyarrow.Table.from_arrays(arrays, schema=pyarrow.schema(fields))


def from_arrow(table: Any, *, separator: str = ".") -> TensorDict:
    """Return the flat batch ``[N]`` of an Arrow table made by `to_arrow`.

    Rows keep the order of the table. In tables without the record of `to_arrow`, lists become ``[N, size]``
    (lists of lists ``[N, a, b]``), rewards, flags and step counts ``[N, 1]``, other columns ``[N]``.

    Args:
        table: a `pyarrow.Table`.
        separator: what joins the names of a nested key. Default ``"."``.

    Raises:
        ImportError: pyarrow is missing; the message names the extra.
        ValueError: a column has missing values, or lists of different lengths (the message names the row); names clash.
        TypeError: a column is not of numbers, bools or lists of them.
    """
    pyarrow = optional_package("pyarrow", "arrow", "from_arrow")
    entries: dict[str, Array] = {}
    if len(set(table.column_names)) < len(table.column_names):
        raise ValueError(f"columns must have unique names, got {table.column_names}")

    for field, chunks in zip(table.schema, table.columns, strict=True):
        if chunks.num_chunks:
            values = pyarrow.concat_arrays(chunks.chunks)
        else:
            values = chunks.combine_chunks()
        column = _arrow_column(pyarrow, field.name, values)

        shape = None
        record = (field.metadata or {}).get(_RECORD.encode())
        if record is not None:
            shape = _noted_shape(field.name, record)
        entries[field.name] = _reshape(field.name, column, shape, separator)

    return _assemble(entries.items(), separator)


def _arrow_column(pyarrow: Any, name: str, values: Any) -> Array:
    """The numbers of an Arrow column, ``[N]``, or ``[N, ...]`` of lists, whose lengths must be one at each depth."""

    types = pyarrow.types
    kind = values.type
    shape = [len(values)]
    while True:
        if values.null_count:
            row = values.is_null().to_numpy(zero_copy_only=False).argmax() // prod(shape[1:])
            raise ValueError(
                f"column {name!r} has {values.null_count} missing values, the first in row {row}: fill them, or "
                "leave it out"
            )
        if isinstance(values, pyarrow.FixedShapeTensorArray):
            return np.asarray(values.to_numpy_ndarray())
        if isinstance(values, pyarrow.ExtensionArray):  # such as the arrays of Hugging Face's data sets
            values = values.storage
        elif types.is_fixed_size_list(values.type):
            shape.append(values.type.list_size)
            values = values.flatten()
        elif types.is_list(values.type) or types.is_large_list(values.type):
            shape.append(_list_length(name, values, prod(shape[1:])))
            values = values.flatten()
        else:
            break

    if (
        types.is_string(values.type)
        or types.is_large_string(values.type)
        or types.is_string_view(values.type)
    ):
        raise TypeError(f"column {name!r} holds texts ({kind}): leave it out, table.drop_columns([{name!r}])")
    if not (types.is_boolean(values.type) or types.is_primitive(values.type)):
        raise TypeError(
            f"column {name!r} must hold numbers, bools or lists of them, got {kind}: leave it out, "
            f"table.drop_columns([{name!r}])"
        )
    return values.to_numpy(zero_copy_only=False).reshape(shape)  # type: ignore[no-any-return]


def _list_length(name: str, lists: Any, per_row: int) -> int:
    """The length that all lists have; ValueError that names the first row with another one."""
    lengths: Array = lists.value_lengths().to_numpy(zero_copy_only=False)

    if not len(lengths):
        return 0
    differing = np.flatnonzero(lengths != lengths[0])
    if differing.size:
        place = int(differing[0])
        raise ValueError(
            f"column {name!r} must have lists of one length: one in row {place // per_row} has {lengths[place]} "
            f"values, the first has {lengths[0]}; pad them, or leave the column out"
        )
    return int(lengths[0])


def _noted_shape(name: str, record: bytes) -> list[int]:
    """Return the shape of a row in a field's metadata; ValueError if it is invalid."""
    try:
        shape = json.loads(record)
    except (ValueError, RecursionError):
        shape = None
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"column {name!r} does not record the shape of its rows: {record[:80]!r}")
    return shape
