"""Checks the columns of a saved storage before any of them is loaded."""

from collections.abc import Mapping
from typing import Any

import torch

from flatroll.buffers.columns.column import Column, TensorColumn
from flatroll.buffers.index.saved_tables import damaged
from flatroll.buffers.storages.item_kinds import like, shown, structure_from_plain, structure_to_plain
from flatroll.layout.keys import NestedKey, next_key

#: Dtype of each entry, and shape of one row of it.
Like = Mapping[NestedKey, tuple[torch.dtype, torch.Size]]


def tables(storage: Any, pool_rows: int) -> dict[str, Any]:
    """Return the state of a storage of columns without its rows: what they are, and the pool's entries."""
    entries = {} if storage.pool is None else storage.pool.entries
    return {
        "lanes": storage.lanes,
        "structure": structure_to_plain(storage.structure),
        "like": {key: (column.dtype, column.shape) for key, column in storage.columns.items()},
        "kinds": {key: kind_of(column) for key, column in storage.columns.items()},
        "pool": {key: column.state_dict(pool_rows) for key, column in entries.items()},
    }


def other_capacity(rows: int, room: int) -> ValueError:
    """Return the error for a state with room for ``rows`` rows given to a storage with ``room``."""
    return ValueError(
        f"the state has room for {rows} rows, this storage for {room}: make it with max_size={rows}; to go on with "
        "another size, load it into such a buffer and extend this one with other.oldest_first()"
    )


def check_lanes(saved: Any, lanes: torch.Size | None, ndim: int, rows: int, max_size: int) -> None:
    """Raise ValueError unless a state of ``rows`` rows in the lanes ``saved`` fits a storage of ``max_size`` rows with
    ``ndim`` batch dimensions and these ``lanes`` (None before its first batch)."""
    given = torch.Size(saved)
    if min(given, default=1) < 1:
        raise damaged(f"it has the lanes {list(given)}")
    if len(given) != ndim - 1 or lanes not in (None, given):
        raise ValueError(
            f"the state is of a storage with lanes {list(given)} after the time, this one has ndim={ndim}"
            f"{'' if lanes is None else f' and lanes {list(lanes)}'}"
        )
    room = max_size // given.numel() * given.numel()
    if rows != room:
        raise other_capacity(rows, room)


def check_like(saved: Any, structure: Any) -> None:
    """Raise ValueError unless ``saved`` says dtypes and shapes by key, of data that ``structure`` can build."""
    for key, kind in saved.items():
        names = key if isinstance(key, tuple) else (key,)
        dtype, shape = kind
        is_shape = isinstance(shape, torch.Size) and all(size >= 0 for size in shape)
        if not names or not all(isinstance(name, str) for name in names):
            raise damaged(f"{key!r} is no key of an entry")
        if not isinstance(dtype, torch.dtype) or not is_shape:
            raise damaged(f"its entry {key!r} has the dtype {dtype!r} and the shape {shape!r}")
    kind = structure_from_plain(structure)
    if kind is None:
        raise damaged("its rows are of no known kind")
    # No rows of that kind, made and taken apart again.
    rows = {key: torch.empty((0, *shape), dtype=dtype) for key, (dtype, shape) in saved.items()}
    try:
        again = kind.columns(kind.build(rows, torch.Size([0])))
    except (KeyError, RuntimeError, TypeError) as error:
        raise damaged(f"its entries do not make rows of its kind ({error})") from None
    if {key: like(column) for key, column in again.items()} != dict(saved):
        raise damaged("its entries are not those of its kind of rows")


def check_columns(
    state: Mapping[str, Any], columns: Mapping[NestedKey, Column], rows: int, entries: int
) -> None:
    """Raise ValueError unless ``state`` has ``rows`` rows of each of ``columns``, and ``entries`` pool entries."""
    if state["columns"].keys() != columns.keys():
        raise damaged(f"it has the columns {list(state['columns'])}, expected {list(columns)}")
    pool = state["pool"]
    if any(key not in columns or next_key(key) in columns for key in pool) or (entries and not pool):
        raise damaged(f"it keeps next observations of {list(pool)} apart, which are not kept once")
    expected = [(key, column, state["columns"][key], rows) for key, column in columns.items()]
    expected += [(next_key(key), columns[key].pool(), saved, entries) for key, saved in pool.items()]
    for key, column, saved, count in expected:
        try:
            found = column.check_state_dict(saved)
        except ValueError as error:
            raise ValueError(f"the entry {key!r}: {error}") from None
        if found not in (None, count):
            raise damaged(f"the entry {key!r} has {found} values, the index counts {count}")


def load(columns: Mapping[NestedKey, Column], saved: Mapping[NestedKey, Any], new: bool) -> None:
    """Load checked states of columns by key.

    Args:
        columns: into these.
        saved: the states. Where ``"unshared"`` is True, nobody else has the values.
        new: nobody has the memory of the columns either: unshared values of all rows take its place, and are not
            copied.
    """
    for key, column in columns.items():
        # Of this class only: a subclass may keep its rows elsewhere, as in a file.
        if new and isinstance(column, TensorColumn) and type(column) is TensorColumn:
            values = saved[key]["values"]
            on_host = column.data.device.type == "cpu"
            if saved[key].get("unshared") and on_host and values.shape == column.data.shape:
                column.data = values
                continue
        column.load_state_dict(saved[key])


def check_same_kinds(state: dict[str, Any], columns: Mapping[NestedKey, Column]) -> None:
    """Raise ValueError if the columns of ``state`` are of other shapes, dtypes or kinds than ``columns``."""
    kinds = state["kinds"]
    saved = {key: (*like, kinds[key]) for key, like in state["like"].items()}
    here = {key: (column.dtype, column.shape, kind_of(column)) for key, column in columns.items()}
    for key in {**saved, **here}:
        if saved.get(key) != here.get(key):
            got, expected = (
                f"{form[0]} {tuple(form[1])} per row{form[2]}" if form else "nothing"
                for form in (saved.get(key), here.get(key))
            )
            raise ValueError(
                f"the state has {got} as {shown(key)}, this storage keeps {expected}: load it into a storage made as "
                "the saved one, and extend this buffer with other.oldest_first(), changed as needed"
            )


def kind_of(column: Column) -> str:
    """Return how a column is kept, for errors; in memory or in a file is one kind."""
    return "" if isinstance(column, TensorColumn) else f" in a {column.saved_as}"
