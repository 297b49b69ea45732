"""Hooks of a checkpointer: functions that change rows before they are written, and after they are read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.checkpointers.items import dump_items, from_bytes, read_items, to_bytes
from flatroll.buffers.checkpointers.saving import Span
from flatroll.buffers.columns.column import Column
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.index.saved_tables import damaged
from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.buffers.storages.item_kinds import Structure, structure_from_plain
from flatroll.buffers.storages.storage import Storage
from flatroll.disk import Ragged, column_key, column_name
from flatroll.disk.segments import Column as FileColumn

#: A hook receives rows (a batch, or a list of items) and returns the same number of rows, or one object for all.
Hook: TypeAlias = Callable[..., Any]
#: The column of what save hooks returned for several rows, as bytes in the first row.
CONVERTED = "#converted"


@dataclass(slots=True)
class HookedDump:
    """Returns the rows in some slots as columns of a file, after save hooks have changed them.

    Args:
        hooks: called one after another.
        storage: has the rows, plain tensors or items.
        ring: counts them.
        path: of the folder that they are saved to.
    """

    hooks: Sequence[Hook]
    storage: Storage
    ring: Ring
    path: Path

    def __call__(self, slots: Tensor) -> dict[str, FileColumn]:
        rows = _read_rows(self.storage, slots)
        full = len(self.ring) == self.ring.capacity
        converted = False

        for hook in self.hooks:
            if hasattr(hook, "shift") and hasattr(hook, "is_full"):
                # Rows are sorted oldest first, independent of the ring's cursor.
                conversion: Any = hook
                conversion.shift = 0 if full else len(slots)
                conversion.is_full = full
                rows = hook(rows)
                converted = True
            else:
                rows = hook(rows, path=self.path)

        if converted or (isinstance(rows, TensorDictBase) and not rows.batch_dims):
            encoded = to_bytes(rows, "what the save hooks returned")
            memory = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            lengths = torch.zeros(len(slots), dtype=torch.int64)
            lengths[0] = len(memory)
            return {CONVERTED: Ragged(memory, lengths)}
        return _dump_rows(self.storage.structure, rows, len(slots))


def undo_hooks(hooks: Sequence[Hook], tables: dict[str, Any], spans: Iterable[Span]) -> Iterator[Span]:
    """Return spans of the rows that load hooks make of those in ``spans``; ``tables`` describe the storage."""
    structure = structure_from_plain(tables.get("structure"))

    for slots, read in spans:
        columns = read({})
        if CONVERTED in columns:
            parts = _read_converted(columns[CONVERTED])
        else:
            parts = [(len(slots), _build_rows(structure, columns))]

        first = 0
        for count, rows in parts:
            for hook in hooks:
                rows = hook(rows)

            changed = _dump_rows(structure, rows, count)
            yield Span(slots[first : first + count], lambda targets, changed=changed: changed)  # type: ignore[misc]
            first += count


def _read_rows(storage: Storage, slots: Tensor) -> Any:
    """Return the rows in ``slots`` in the form that hooks receive."""
    if not isinstance(storage, ColumnStorage):
        return storage.read_rows(slots)

    own = [key for key, column in storage.columns.items() if type(column).dump is not Column.dump]
    if own:
        raise TypeError(
            f"hooks take rows of plain tensors, the storage keeps {own[0]!r} in another form: leave it out of "
            "frame_stack, codec and sparse"
        )
    # Each observation once: read_rows would want to know where a compact storage has the next ones.
    values = {key: column.take(slots) for key, column in storage.columns.items()}
    return storage.build(values, slots.shape)


def _build_rows(structure: Structure | None, columns: Mapping[str, FileColumn]) -> Any:
    """Invert `_dump_rows`: return the rows for the load hooks."""
    if structure is None:
        return read_items(columns)

    values = {column_key(name): column for name, column in columns.items() if isinstance(column, Tensor)}
    return structure.build(values, torch.Size({len(column) for column in values.values()}))


def _dump_rows(structure: Structure | None, rows: Any, count: int) -> dict[str, FileColumn]:
    """Return ``count`` rows from a hook as columns of a file; ValueError if their number differs.

    ``structure`` is the kind of rows in the storage; None for items.
    """
    if structure is None:
        if len(rows) != count:
            raise ValueError(f"a hook was given {count} items and must return as many, got {len(rows)}")
        return dump_items(rows)

    columns = structure.columns(rows)
    if {len(values) for values in columns.values()} != {count}:
        raise ValueError(f"a hook was given {count} rows and must return the same number")
    return {column_name(key): values for key, values in columns.items()}


def _read_converted(column: FileColumn) -> list[tuple[int, Any]]:
    """Return the save hooks' results and the number of rows of each."""
    if (
        not isinstance(column, Ragged)
        or column.values.dtype is not torch.uint8
        or not int(column.lengths[:1].sum())
    ):
        raise damaged("a part has no rows")

    memory = column.values.numpy().tobytes()
    firsts = column.lengths.nonzero().squeeze(1)
    ends = column.lengths[firsts].cumsum(0).tolist()
    counts = torch.diff(firsts, append=torch.tensor([len(column.lengths)])).tolist()

    starts = [0, *ends[:-1]]
    return [
        (count, from_bytes(memory[start:end])) for count, start, end in zip(counts, starts, ends, strict=True)
    ]
