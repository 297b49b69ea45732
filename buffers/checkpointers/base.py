"""Checkpointers: they turn rows of a storage into tensors for files, and such tensors into a storage's state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import Column, Part, host_memory, put_rows, scatter
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.index.saved_tables import check_rows, damaged
from flatroll.buffers.index.top_k_ring import RankedRing
from flatroll.disk import Folder, LoadedVersion, Ragged, Version, column_key, column_name
from flatroll.disk.segments import Column as FileColumn
from flatroll.disk.state_tree import from_text, pack, to_text, unpack
from flatroll.layout.keys import NestedKey

T = TypeVar("T")
#: The checkpointers whose columns have these parts, which others do not read.
_WRITERS = {"after": "FlatStorageCheckpointer", "starts": "NestedStorageCheckpointer"}
#: A hook takes rows (a batch of the stored kind, or a list of items) and returns as many.
Hook: TypeAlias = Callable[..., Any]


class Span(NamedTuple):
    """Rows in a file, to be read.

    Attributes:
        slots: int64 ``[N]``, where each row belongs; -1 for rows that are no longer stored, which come first.
        read: reads them: what :meth:`StorageCheckpointerBase.dump` gave, given targets by name, tensors ``[N, ...]``
            to read a column into where its dtype and shape are those of the file (else it comes in new memory).
    """

    slots: Tensor
    read: Callable[[Mapping[str, Tensor]], Mapping[str, FileColumn]]

    @classmethod
    def of(cls, slots: Tensor, segment: Any) -> "Span":
        """The rows of a file."""

        def read(targets: Mapping[str, Tensor]) -> Mapping[str, FileColumn]:
            schema = segment.schema
            fits = {
                name: target
                for name, target in targets.items()
                if name in schema and schema[name] == (str(target.dtype)[6:], tuple(target.shape[1:]), False)
            }
            columns: Mapping[str, FileColumn] = segment.read(fits)
            return columns

        return cls(slots, read)


class StorageCheckpointerBase(ABC):
    """Base class of checkpointers, which say in what form ``buffer.dumps`` writes the rows of a storage.

    ``storage.checkpointer = …``, or ``ReplayBuffer(checkpointer=…)``, chooses one; without, a storage of tensors has a
    `TensorStorageCheckpointer`, one of items a `ListStorageCheckpointer`, one on disk a `DiskStorageCheckpointer`.
    The same kind reads what was written.
    Subclasses implement :meth:`dump` and :meth:`restore`.
    """

    def __init__(self) -> None:
        self._save_hooks: list[Hook] = []
        self._load_hooks: list[Hook] = []

    def register_save_hook(self, hook: Hook) -> None:
        """Call ``hook(rows, path=path)`` before rows are written; what it returns, as many rows, is written instead."""
        self._save_hooks.append(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Call ``hook(rows)`` on rows that were read, before they are stored: it undoes what the save hooks did."""
        self._load_hooks.append(hook)

    @abstractmethod
    def dump(self, storage: Any, slots: Tensor) -> dict[str, FileColumn]:
        """Return the rows in ``slots`` (int64 ``[N]``) as columns of a file by name: a tensor ``[N, ...]`` or `Ragged`.

        The names, dtypes and shapes are the same for all rows. Nobody overwrites these rows meanwhile.
        """

    @abstractmethod
    def restore(
        self, storage: Any, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        """Return the storage's ``state_dict`` of ``rows`` slots; nothing changes.

        Args:
            storage: the one that will be asked to load it.
            tables: its state without the rows, not to be trusted.
            spans: the rows, oldest first.
            rows: how many slots have been used.

        Raises:
            ValueError: they do not fit together.
        """

    def check(self, storage: Any) -> None:
        """Raise an error if this is no checkpointer for ``storage``."""
        return

    def dump_rows(self, storage: Any, slots: Tensor, path: Path) -> dict[str, FileColumn]:
        """Return what :meth:`dump` gives, or what the save hooks make of these rows."""
        if not self._save_hooks:
            return self.dump(storage, slots)
        rows = self.rows_for_hooks(storage, slots)
        for hook in self._save_hooks:
            rows = hook(rows, path=path)
        return self.dump_given(storage.structure, rows, len(slots))

    def restore_rows(
        self,
        storage: Any,
        tables: dict[str, Any],
        spans: Iterable[tuple[Tensor, Any]],
        rows: int,
    ) -> dict[str, Any]:
        """Return what :meth:`restore` gives of rows that the load hooks have changed back.

        ``spans`` are slots as in `Span`, and files that have ``read(targets)`` and ``schema``.
        """
        if not self._load_hooks:
            return self.restore(storage, tables, (Span.of(*span) for span in spans), rows)
        changed = []
        for slots, segment in spans:
            given = self.given_from(storage, tables, segment.read({}))
            for hook in self._load_hooks:
                given = hook(given)
            dumped = self.dump_given(tables.get("structure"), given, len(slots))
            changed.append(Span(slots, lambda targets, dumped=dumped: dumped))  # type: ignore[misc]
        return self.restore(storage, tables, changed, rows)

    def rows_for_hooks(self, storage: Any, slots: Tensor) -> Any:
        """Return the rows in ``slots`` as hooks take them."""
        raise TypeError(f"{type(self).__name__} takes no hooks")

    def dump_given(self, structure: Any, rows: Any, count: int) -> dict[str, FileColumn]:
        """Return ``count`` rows that a hook gave as columns of a file; ValueError if they are more or fewer.

        ``structure`` is what kind of rows the storage keeps.
        """
        raise TypeError(f"{type(self).__name__} takes no hooks")

    def given_from(self, storage: Any, tables: dict[str, Any], tensors: Mapping[str, FileColumn]) -> Any:
        """Return the rows of which :meth:`dump_given` made ``tensors``."""
        raise TypeError(f"{type(self).__name__} takes no hooks")

    def check_path(self, storage: Any, path: Path) -> None:
        """Raise ValueError if rows of ``storage`` cannot be saved to the folder ``path``, or come from there."""
        return

    def restore_version(
        self, storage: Any, tables: dict[str, Any], version: LoadedVersion, ring: Ring
    ) -> dict[str, Any]:
        """Return what :meth:`restore_rows` gives of a version whose rows ``ring`` counts."""
        return self.restore_rows(storage, tables, spans(ring, version), ring.used)

    def open_to_save(
        self, storage: Any, path: Path, resume: Version | None, anew: bool, options: Mapping[str, Any]
    ) -> Any:
        """Return a writer of the folder ``path`` that goes on from the version ``resume``, or, if ``anew``, puts
        other rows of ``storage`` in its place."""
        folder = Folder(path, write=True, log=False, resume=resume, **options)
        if folder.version is None or not anew:
            return folder
        folder.close()
        return Folder(path, write=True, log=False, **{**options, "overwrite": True})

    def load_with(self, path: Path, use: Callable[[LoadedVersion], T], number: int | None, strict: bool) -> T:
        """Return ``use(version)`` of the newest version that is whole, or of the one of this number."""
        if not path.is_dir():
            raise FileNotFoundError(
                f"there is no folder {path}: buffer.dumps(path) or Checkpoint.save() makes one"
            )
        return Folder(path).load_with(use, number, strict=strict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """The checkpointer of storages made of tensors, in memory or in files: the rows of each column as they are.

    Frame stacks are written as single frames, compressed rows compressed and sparse ones sparse; a compact storage
    writes each observation once. A save after the first one writes the new rows only.

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), checkpointer=TensorStorageCheckpointer())
    >>> buffer.storage.checkpointer
    TensorStorageCheckpointer()
    """

    @override
    def check(self, storage: Any) -> None:
        if not hasattr(storage, "columns_like"):
            raise TypeError(
                f"{type(self).__name__} writes storages of tensors, this is a {type(storage).__name__}: use "
                "ListStorageCheckpointer"
            )
        if hasattr(storage, "linkable"):
            raise TypeError(
                f"{type(self).__name__} copies rows, those of a {type(storage).__name__} are files already: use "
                "DiskStorageCheckpointer, its default"
            )
        for key, column in storage.columns.items():
            kind = type(column)
            if kind.restore is Column.restore and kind.load_state_dict is not Column.load_state_dict:
                raise TypeError(
                    f"{kind.__name__}, which keeps {key!r}, has a load_state_dict of its own: override dump and "
                    "restore, too"
                )

    @override
    def dump(self, storage: Any, slots: Tensor) -> dict[str, FileColumn]:
        dumped: dict[str, FileColumn] = {}
        for key, column in storage.columns.items():
            name = column_name(key)
            for part, values in column.dump(slots).items():
                at = name if part == "values" else f"{name}#{part}"
                dumped[at] = Ragged(*values) if isinstance(values, tuple) else values
        return dumped

    @override
    def restore(
        self, storage: Any, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        columns = storage.columns_like(tables)
        names: dict[str, NestedKey] = {column_name(key): key for key in columns}
        parts: dict[NestedKey, list[Part]] = {key: [] for key in columns}
        # Plain rows go to their place as they come, so that one file at a time is in memory twice.
        plain = {
            key: host_memory(rows, column.dtype, column.shape)
            for key, column in columns.items()
            if type(column).restore is Column.restore
        }
        blank = torch.ones(rows, dtype=torch.bool)  # slots of no file: rows that the ring has given up
        for slots, read in spans:
            first, count = int(slots[0]) if len(slots) else -1, len(slots)
            in_place = first >= 0 and int(slots[-1]) - first == count - 1  # slots that follow each other
            if in_place:
                blank[first : first + count] = False
            else:
                blank[slots[slots >= 0]] = False
            targets = {column_name(key): values[first : first + count] for key, values in plain.items()}
            tensors = read(targets if in_place else {})
            found: dict[NestedKey, dict[str, FileColumn]] = {key: {} for key in columns}
            for name, values in tensors.items():
                column, _, part = name.partition("#")
                if writer := _WRITERS.get(part):
                    raise ValueError(
                        f"the rows were written by a {writer}: make that the storage's checkpointer"
                    )
                if column not in names:
                    raise damaged(f"its rows have an entry {column!r}, expected {sorted(names)}")
                found[names[column]][part or "values"] = values
            for key, dumped in found.items():
                if key in plain:
                    values = columns[key].check_dump(dumped)
                    if not in_place or values.data_ptr() != targets[column_name(key)].data_ptr():
                        scatter(plain[key], slots, values)
                else:
                    parts[key].append(Part(slots, dumped))
        empty = blank.nonzero().squeeze(1)
        if len(empty):  # zeros, whatever was in that memory
            for values in plain.values():
                put_rows(values, empty, values.new_zeros((len(empty), *values.shape[1:])))
        restored: dict[NestedKey, Any] = {
            key: {"values": values, "unshared": True} for key, values in plain.items()
        }
        for key in columns.keys() - plain.keys():
            try:
                restored[key] = columns[key].restore(parts[key], rows)
            except ValueError as error:
                raise ValueError(f"the entry {key!r}: {error}") from None
        return {**tables, "columns": restored}

    @override
    def rows_for_hooks(self, storage: Any, slots: Tensor) -> Any:
        if own := [key for key, column in storage.columns.items() if type(column).dump is not Column.dump]:
            raise TypeError(
                f"hooks take rows of plain tensors, the storage keeps {own[0]!r} in another form: leave it out of "
                "frame_stack, codec and sparse"
            )
        return storage.build(
            {key: column.take(slots) for key, column in storage.columns.items()}, slots.shape
        )

    @override
    def dump_given(self, structure: Any, rows: Any, count: int) -> dict[str, FileColumn]:
        columns = structure.columns(rows)
        if {len(values) for values in columns.values()} != {count}:
            raise ValueError(f"a hook was given {count} rows and must return as many, got other numbers")
        return {column_name(key): values for key, values in columns.items()}

    @override
    def given_from(self, storage: Any, tables: dict[str, Any], tensors: Mapping[str, FileColumn]) -> Any:
        columns = {column_key(name): values for name, values in tensors.items() if isinstance(values, Tensor)}
        return tables["structure"].build(columns, torch.Size({len(values) for values in columns.values()}))


class ListStorageCheckpointer(StorageCheckpointerBase):
    """The checkpointer of `ListStorage`: items are written as JSON and tensors, without pickle.

    Items may be numbers, strings, bytes, tensors, arrays, tensordicts, and dicts, lists and tuples of them; saving
    others is a TypeError that names them.
    """

    @override
    def check(self, storage: Any) -> None:
        if hasattr(storage, "columns_like"):
            raise TypeError(f"ListStorageCheckpointer writes items, this is a {type(storage).__name__}")

    @override
    def dump(self, storage: Any, slots: Tensor) -> dict[str, FileColumn]:
        return self.dump_given(None, storage.read_rows(slots), len(slots))

    @override
    def restore(
        self, storage: Any, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        items: list[Any] = [None] * rows
        for slots, read in spans:
            tensors = read({})
            column = tensors.get("items")
            if (
                not isinstance(column, Ragged)
                or tensors.keys() != {"items"}
                or column.values.dtype is not torch.uint8
            ):
                raise damaged("a part has no items")
            memory, end = column.values.numpy().tobytes(), 0
            for slot, size in zip(slots.tolist(), column.lengths.tolist(), strict=True):
                end += size
                if slot >= 0:
                    items[slot] = _from_bytes(memory[end - size : end])
        return {"items": items}

    @override
    def rows_for_hooks(self, storage: Any, slots: Tensor) -> Any:
        return storage.read_rows(slots)

    @override
    def dump_given(self, structure: Any, rows: Any, count: int) -> dict[str, FileColumn]:
        if len(rows) != count:
            raise ValueError(f"a hook was given {count} items and must return as many, got {len(rows)}")
        return {"items": _end_to_end([_to_bytes(item, i) for i, item in enumerate(rows)])}

    @override
    def given_from(self, storage: Any, tables: dict[str, Any], tensors: Mapping[str, FileColumn]) -> Any:
        column = tensors.get("items")
        count = len(column.lengths) if isinstance(column, Ragged) else 0
        return self.restore(storage, tables, [Span(torch.arange(count), lambda targets: tensors)], count)[
            "items"
        ]


def spans(ring: Ring, version: LoadedVersion) -> Iterator[tuple[Tensor, Any]]:
    """The rows that ``ring`` counts in a version's files: their slots, -1 for rows that are gone, and the file.

    ValueError if the version has others.
    """
    head, end = (0, ring.used) if isinstance(ring, RankedRing) else (ring.head, ring.written)
    check_rows((head, end), (version.head, version.end))
    for segment in version.segments:
        if segment.rows > ring.capacity:
            raise damaged(f"one of its files has {segment.rows} rows, of {ring.capacity}")
        start = segment.first % ring.capacity
        slots = torch.arange(start, start + segment.rows)
        slots[ring.capacity - start :] -= ring.capacity  # after the end of the ring comes its beginning
        slots[: max(0, head - segment.first)] = -1
        yield slots, segment


def _to_bytes(item: Any, number: int) -> bytes:
    """An item as bytes: the length of its JSON in 8 bytes, the JSON, and its tensors as a safetensors file."""
    try:
        value, tensors = pack(item)
    except TypeError as error:
        raise TypeError(
            f"item {number}: {error}. ListStorage keeps any object in memory, and these on disk"
        ) from None
    text = to_text(value).encode()
    return len(text).to_bytes(8, "little") + text + save(tensors)


def _from_bytes(memory: bytes) -> Any:
    size = int.from_bytes(memory[:8], "little")
    if size > len(memory) - 8:
        raise damaged("an item is cut short")
    try:
        tensors = load(memory[8 + size :])
    except SafetensorError as error:
        raise damaged(f"the tensors of an item cannot be read ({error})") from None
    return unpack(from_text(memory[8 : 8 + size]), tensors)


def _end_to_end(pieces: list[bytes]) -> Ragged:
    values = (
        torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8) if pieces else torch.zeros(0).byte()
    )
    return Ragged(values, torch.tensor([len(piece) for piece in pieces], dtype=torch.int64))
