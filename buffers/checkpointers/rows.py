"""Checkpointers: for storages whose rows are written to files, and for storages that are on disk already."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.checkpointers.own_files import OwnFiles, OwnFilesCheckpointer
from flatroll.buffers.checkpointers.saving import (
    RowCopy,
    RowWriter,
    SavedFolder,
    load_from,
    open_folder,
    rows_of_a_segment,
)
from flatroll.buffers.columns.column import (
    Column,
    Part,
    check_values,
    differ,
    put_rows,
    scatter,
)
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.index.saved_tables import check_rows, damaged
from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.buffers.storages.disk.storage import DiskStorage
from flatroll.buffers.storages.item_kinds import Structure, structure_from_plain
from flatroll.buffers.storages.list import ListStorage
from flatroll.buffers.storages.storage import Storage
from flatroll.disk import Folder, LoadedVersion, Ragged, Version, column_key, column_name
from flatroll.disk.checkpoint import SaveOptions
from flatroll.disk.segments import Column as FileColumn
from flatroll.disk.state_tree import Packer, from_text, to_text, unpack
from flatroll.kernels.rows.host_memory import host_memory
from flatroll.layout.boundaries import run_starts
from flatroll.layout.keys import NestedKey, next_key, plain_key
from flatroll.layout.tensordict_seam import nest

T = TypeVar("T")
#: The checkpointers that write columns with these suffixes; others cannot read them.
_WRITERS = {"after": "FlatStorageCheckpointer", "starts": "NestedStorageCheckpointer"}
_STARTS = "#starts"  # bool per row: whether a run begins here
_AFTER = "#after"  # next values that differ from the next row's values
_CONVERTED = "#converted"  # output of save hooks for several rows, as bytes in the first row
#: A hook receives rows (a batch, or a list of items) and returns the same number of rows, or one object for all.
Hook: TypeAlias = Callable[..., Any]
Reader: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, FileColumn]]


class Span(NamedTuple):
    """Rows to read from a file.

    Attributes:
        slots: int64 ``[N]``, slot of each row; -1 for rows that are no longer stored, which come first.
        read: reads them: returns the result of :meth:`StorageCheckpointerBase.dump`. Its argument is targets by name,
            tensors ``[N, ...]``; a column is read into its target if dtype and shape match, else into new memory.
    """

    slots: Tensor
    read: Reader


class StorageCheckpointerBase:
    """Base class of checkpointers, which determine how ``buffer.dumps`` writes the rows of a storage.

    ``storage.checkpointer = …``, or ``ReplayBuffer(checkpointer=…)``, sets one. By default a storage of tensors has a
    `TensorStorageCheckpointer`, one of items a `ListStorageCheckpointer`, and one on disk a
    `DiskStorageCheckpointer`, which links files and copies no rows. Load with the same class that wrote the files.
    To change the form of columns, a subclass implements :meth:`dump` and :meth:`restore`. To write other files it
    also overrides :meth:`open`, which returns a `RowWriter`, and :meth:`load_with`, as `H5StorageCheckpointer` does.

    A class with ``dumps(storage, path)`` and ``loads(storage, path)`` instead, a subclass of this one or not, writes
    all rows to files of its own: ``path`` is a new folder, ``storage.state_dict()`` returns the rows, and ``loads``
    passes them to ``storage.load_state_dict``. The buffer checks them before it changes.
    """

    def __init__(self) -> None:
        self._save_hooks: list[Hook] = []
        self._load_hooks: list[Hook] = []

    def register_save_hook(self, hook: Hook) -> None:
        """Call ``hook(rows, path=path)`` before rows are written; its result is written instead.

        See `ReplayBuffer.register_save_hook`.
        """
        self._save_hooks.append(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Call ``hook(rows)`` on loaded rows before they are stored, to undo the save hooks."""
        self._load_hooks.append(hook)

    def dump(self, storage: Storage, slots: Tensor) -> dict[str, FileColumn]:
        """Return the rows in ``slots`` (int64 ``[N]``) as columns of a file by name: a tensor ``[N, ...]`` or `Ragged`.

        Names, dtypes and shapes are the same for all rows. These rows are not overwritten during the call.
        """
        raise TypeError(f"{type(self).__name__} must have dump and restore, or dumps and loads")

    def restore(
        self, storage: Storage, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        """Return the storage's ``state_dict`` of ``rows`` slots; nothing is changed.

        Args:
            storage: the storage that will load it.
            tables: its state without the rows, untrusted.
            spans: the rows, oldest first.
            rows: number of used slots.

        Raises:
            ValueError: they do not match.
        """
        raise TypeError(f"{type(self).__name__} must have dump and restore, or dumps and loads")

    def check(self, storage: Storage) -> None:
        """Raise an error if this checkpointer does not support ``storage``."""
        return

    def dump_rows(self, storage: Storage, slots: Tensor, path: Path, ring: Ring) -> dict[str, FileColumn]:
        """Return the result of :meth:`dump`, or of the save hooks, for these rows."""
        if not self._save_hooks:
            return self.dump(storage, slots)

        rows = self.rows_for_hooks(storage, slots)

        full = len(ring) == ring.capacity
        converted = False
        for hook in self._save_hooks:
            if hasattr(hook, "shift") and hasattr(hook, "is_full"):
                # Rows are sorted oldest first, independent of the ring's cursor.
                conversion: Any = hook
                conversion.shift = 0 if full else len(slots)
                conversion.is_full = full
                rows = hook(rows)
                converted = True
            else:
                rows = hook(rows, path=path)

        if converted or (isinstance(rows, TensorDictBase) and not rows.batch_dims):
            encoded = _to_bytes(rows, "what the save hooks returned")
            memory = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            lengths = torch.zeros(len(slots), dtype=torch.int64)
            lengths[0] = len(memory)
            return {_CONVERTED: Ragged(memory, lengths)}
        return self.dump_given(storage.structure, rows, len(slots))

    def rows_for_hooks(self, storage: Storage, slots: Tensor) -> Any:
        """Return the rows in ``slots`` in the form that hooks receive."""
        raise TypeError(f"{type(self).__name__} does not accept hooks")

    def dump_given(self, structure: Structure | None, rows: Any, count: int) -> dict[str, FileColumn]:
        """Return ``count`` rows from a hook as columns of a file; ValueError if their number differs.

        ``structure`` is the kind of rows in the storage.
        """
        raise TypeError(f"{type(self).__name__} does not accept hooks")

    def given_from(self, storage: Storage, tables: dict[str, Any], tensors: Mapping[str, FileColumn]) -> Any:
        """Invert :meth:`dump_given`: return the rows for the load hooks."""
        raise TypeError(f"{type(self).__name__} does not accept hooks")

    def open(self, saved: SavedFolder, options: SaveOptions, ring: Ring, segment_rows: int) -> RowWriter:
        """Return a writer for the rows that ``ring`` counts; ``saved`` describes the rows already in its folder."""
        return open_folder(saved, options, ring, segment_rows)

    def save(self, storage: Storage, ring: Ring, saved: SavedFolder, options: SaveOptions) -> RowCopy:
        """Return a save of the rows that ``ring`` counts."""
        segment_rows = rows_of_a_segment(storage.bytes_per_row, ring.capacity)
        writer = self.open(saved, options, ring, segment_rows)
        dump = partial(self.dump_rows, storage, path=saved.path, ring=ring)
        return RowCopy(saved, writer, dump, ring, segment_rows)

    def load_with(
        self,
        storage: Storage,
        path: Path,
        use: Callable[[LoadedVersion], T],
        number: int | None,
        strict: bool,
    ) -> tuple[T, Folder | None]:
        """Return ``use(version)`` of the newest complete (or the given) version, and its folder if it is one."""
        return load_from(path, use, number, strict)

    def restore_version(
        self, storage: Storage, tables: dict[str, Any], version: LoadedVersion, ring: Ring
    ) -> dict[str, Any]:
        """Return the result of :meth:`restore` for a version with ``ring``'s rows, after the load hooks."""
        if not self._load_hooks:
            return self.restore(storage, tables, spans(ring, version), ring.used)
        changed = []

        for slots, read in spans(ring, version):
            tensors = read({})
            if _CONVERTED in tensors:
                parts = _read_converted(tensors[_CONVERTED])
            else:
                parts = [(len(slots), self.given_from(storage, tables, tensors))]

            first = 0
            for count, given in parts:
                for hook in self._load_hooks:
                    given = hook(given)

                structure = structure_from_plain(tables.get("structure"))
                dumped = self.dump_given(structure, given, count)
                part = slots[first : first + count]
                changed.append(Span(part, lambda targets, dumped=dumped: dumped))  # type: ignore[misc]
                first += count

        return self.restore(storage, tables, changed, ring.used)

    def versions(self, path: Path) -> list[int]:
        """Return the numbers of the versions in a folder, the newest first."""
        if path.is_dir():
            return Folder(path).versions()
        return []

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """The checkpointer of storages of tensors, in memory or in files: writes the rows of each column unchanged.

    Frame stacks are written as single frames, compressed rows compressed and sparse rows sparse; a compact storage
    writes each observation once. Later saves write only new rows.

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), checkpointer=TensorStorageCheckpointer())
    >>> buffer.storage.checkpointer
    TensorStorageCheckpointer()
    """

    @override
    def check(self, storage: Storage) -> None:
        if not isinstance(storage, ColumnStorage):
            raise TypeError(
                f"{type(self).__name__} writes storages of tensors, this is a {type(storage).__name__}: use "
                "ListStorageCheckpointer"
            )
        if isinstance(storage, DiskStorage):
            raise TypeError(
                f"{type(self).__name__} copies rows, but the rows of a {type(storage).__name__} are in files "
                "already: use DiskStorageCheckpointer, its default"
            )

        for key, column in storage.columns.items():
            kind = type(column)
            if kind.restore is Column.restore and kind.load_state_dict is not Column.load_state_dict:
                raise TypeError(
                    f"{kind.__name__}, which keeps {key!r}, has a load_state_dict of its own: override dump "
                    "and restore as well"
                )

    @override
    def dump(self, storage: Storage, slots: Tensor) -> dict[str, FileColumn]:
        dumped: dict[str, FileColumn] = {}
        for key, column in storage.columns.items():
            name = column_name(key)
            for part, values in column.dump(slots).items():
                at = name if part == "values" else f"{name}#{part}"
                dumped[at] = Ragged(*values) if isinstance(values, tuple) else values
        return dumped

    @override
    def restore(
        self, storage: Storage, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        assert isinstance(storage, ColumnStorage)  # guaranteed by `check`
        columns = storage.columns_like(tables)
        names: dict[str, NestedKey] = {column_name(key): key for key in columns}
        parts: dict[NestedKey, list[Part]] = {key: [] for key in columns}

        # Plain rows are copied file by file, so that at most one file is in memory twice.
        plain = {
            key: host_memory(rows, column.dtype, column.shape)
            for key, column in columns.items()
            if type(column).restore is Column.restore
        }
        # True for slots in no file: the ring has dropped their rows.
        blank = torch.ones(rows, dtype=torch.bool)

        for slots, read in spans:
            first = int(slots[0]) if len(slots) else -1
            count = len(slots)
            in_place = first >= 0 and int(slots[-1]) - first == count - 1  # consecutive slots
            targets: dict[str, Tensor] = {}
            if in_place:
                blank[first : first + count] = False
                targets = {column_name(key): values[first : first + count] for key, values in plain.items()}
            else:
                blank[slots[slots >= 0]] = False

            for key, dumped in _group_by_entry(read(targets), names).items():
                if key not in plain:
                    parts[key].append(Part(slots, dumped))
                    continue
                values = columns[key].check_dump(dumped)
                if not in_place or values.data_ptr() != targets[column_name(key)].data_ptr():
                    scatter(plain[key], slots, values)

        empty = blank.nonzero().squeeze(1)
        if len(empty):  # the memory was not initialised
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
    def rows_for_hooks(self, storage: Storage, slots: Tensor) -> Any:
        own = [key for key, column in storage.columns.items() if type(column).dump is not Column.dump]
        if own:
            raise TypeError(
                f"hooks take rows of plain tensors, the storage keeps {own[0]!r} in another form: leave it out of "
                "frame_stack, codec and sparse"
            )

        values = {key: column.take(slots) for key, column in storage.columns.items()}
        return storage.build(values, slots.shape)

    @override
    def dump_given(self, structure: Structure | None, rows: Any, count: int) -> dict[str, FileColumn]:
        assert structure is not None  # tensor rows have exactly one
        columns = structure.columns(rows)
        if {len(values) for values in columns.values()} != {count}:
            raise ValueError(f"a hook was given {count} rows and must return the same number")
        return {column_name(key): values for key, values in columns.items()}

    @override
    def given_from(self, storage: Storage, tables: dict[str, Any], tensors: Mapping[str, FileColumn]) -> Any:
        columns = {column_key(name): values for name, values in tensors.items() if isinstance(values, Tensor)}
        structure = structure_from_plain(tables["structure"])
        if structure is None:
            raise damaged("its rows are of an unknown kind")
        return structure.build(columns, torch.Size({len(values) for values in columns.values()}))


class ListStorageCheckpointer(StorageCheckpointerBase):
    """The checkpointer of `ListStorage`: items are written as JSON and tensors, without pickle.

    Items may be numbers, strings, bytes, tensors, arrays, tensordicts, and dicts, lists and tuples of these; other
    types raise TypeError.
    """

    @override
    def check(self, storage: Storage) -> None:
        if isinstance(storage, ColumnStorage):
            raise TypeError(f"ListStorageCheckpointer writes items, this is a {type(storage).__name__}")

    @override
    def dump(self, storage: Storage, slots: Tensor) -> dict[str, FileColumn]:
        return self.dump_given(None, storage.read_rows(slots), len(slots))

    @override
    def restore(
        self, storage: Storage, tables: dict[str, Any], spans: Iterable[Span], rows: int
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

            memory = column.values.numpy().tobytes()
            end = 0
            for slot, size in zip(slots.tolist(), column.lengths.tolist(), strict=True):
                end += size
                if slot >= 0:
                    items[slot] = _from_bytes(memory[end - size : end])
        return {"items": items}

    @override
    def rows_for_hooks(self, storage: Storage, slots: Tensor) -> Any:
        return storage.read_rows(slots)

    @override
    def dump_given(self, structure: Structure | None, rows: Any, count: int) -> dict[str, FileColumn]:
        if len(rows) != count:
            raise ValueError(f"a hook was given {count} items and must return as many, got {len(rows)}")
        return {"items": _end_to_end([_to_bytes(item, f"item {i}") for i, item in enumerate(rows)])}

    @override
    def given_from(self, storage: Storage, tables: dict[str, Any], tensors: Mapping[str, FileColumn]) -> Any:
        column = tensors.get("items")
        count = len(column.lengths) if isinstance(column, Ragged) else 0
        dumped = Span(torch.arange(count), lambda targets: tensors)
        return self.restore(storage, tables, [dumped], count)["items"]


class FlatStorageCheckpointer(TensorStorageCheckpointer):
    """Writes a next observation only where it differs bitwise from the next row's observation.

    Rows in the TED format then take little more than half the space. It assumes nothing about the rows: next
    observations that are not those of the next row, such as n-step ones, are written in full, and loading is
    bit-exact. All entries are written, including markers at the root.

    Args:
        done_keys, reward_keys: entries that the rows must have, as in torchrl scripts; default none.

    >>> import tempfile
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), checkpointer=FlatStorageCheckpointer())
    >>> rows = torch.arange(4.0)
    >>> at = buffer.extend(TensorDict({"observation": rows[:3], "next": {"observation": rows[1:]}}, [3]))
    >>> dumped = buffer.storage.checkpointer.dump(buffer.storage, torch.arange(3))
    >>> dumped["next/observation#after"].values
    tensor([3.])
    """

    def __init__(
        self,
        done_keys: Iterable[NestedKey] | None = None,
        reward_keys: Iterable[NestedKey] | None = None,
    ) -> None:
        super().__init__()
        self.done_keys = [plain_key(key) for key in done_keys or ()]
        self.reward_keys = [plain_key(key) for key in reward_keys or ()]

    @override
    def check(self, storage: Storage) -> None:
        super().check(storage)
        for name, keys in (("done_keys", self.done_keys), ("reward_keys", self.reward_keys)):
            for key in keys:
                if storage.columns and key not in storage.columns and next_key(key) not in storage.columns:
                    present = sorted(storage.columns, key=repr)
                    raise KeyError(f"{name} names {key!r}, which the rows do not have: {present}")

    @override
    def dump(self, storage: Storage, slots: Tensor) -> dict[str, FileColumn]:
        dumped = super().dump(storage, slots)
        for key in storage.columns:
            name = column_name(key)
            later = column_name(next_key(key))
            now = dumped.get(name)
            after = dumped.get(later)
            if not isinstance(now, Tensor) or not isinstance(after, Tensor) or now.dtype is not after.dtype:
                continue
            if now.shape != after.shape or not len(now):
                continue

            kept = torch.ones(len(now), dtype=torch.bool, device=now.device)  # the last row is always kept
            kept[:-1] = differ(after[:-1], now[1:])

            del dumped[later]
            dumped[later + _AFTER] = Ragged(after[kept], kept.long())
        return dumped

    @override
    def restore(
        self, storage: Storage, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        filled = (Span(slots, partial(_fill_next, read)) for slots, read in spans)
        return super().restore(storage, tables, filled, rows)


class NestedStorageCheckpointer(FlatStorageCheckpointer):
    """A `FlatStorageCheckpointer` that also writes the column ``#starts``, bool per row: where trajectories begin.

    Readers of the files find trajectories by it, as with `layout.run_starts`; each file begins with a start. Loading
    does not need it.

    Args:
        done_keys, reward_keys: see `FlatStorageCheckpointer`.
    """

    @override
    def dump(self, storage: Storage, slots: Tensor) -> dict[str, FileColumn]:
        names = BoundaryKeys()
        markers = [names.is_init, names.done, names.traj, "episode"]
        columns = {key: storage.columns[key].take(slots) for key in markers if key in storage.columns}
        if not columns:
            raise KeyError(
                f"{type(self).__name__} needs rows with a trajectory marker, one of {markers}: use "
                "FlatStorageCheckpointer"
            )

        batch = nest(columns, *slots.shape)
        keys = BoundaryKeys.probe(batch)
        starts = run_starts(batch, is_init_key=keys.is_init, done_key=keys.done, traj_key=keys.traj)
        return {**super().dump(storage, slots), _STARTS: starts}

    @override
    def restore(
        self, storage: Storage, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        kept = (Span(slots, partial(_without_starts, read)) for slots, read in spans)
        return super().restore(storage, tables, kept, rows)


class DiskStorageCheckpointer:
    """The checkpointer of `DiskStorage`, which links files instead of writing rows.

    A save hard-links the files into the checkpoint's folder (on another file system it copies them); files exist as
    long as one of the two folders needs them. A load links them into the storage's folder and drops its rows. The
    checkpoint's folder may be inside the storage's, but not the same.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import DiskStorage, ReplayBuffer
    >>> folder = tempfile.TemporaryDirectory()
    >>> buffer = ReplayBuffer(storage=DiskStorage(4, f"{folder.name}/rows"))
    >>> for first in (0, 3):
    ...     rows = buffer.extend(TensorDict({"reward": torch.arange(first, first + 3)}, [3]))
    ...     if not first:
    ...         buffer.dumps(folder.name)
    >>> buffer.loads(folder.name)
    >>> buffer[:]["reward"], buffer.storage.checkpointer
    (tensor([0, 1, 2]), DiskStorageCheckpointer())
    >>> buffer.storage.close()
    >>> folder.cleanup()
    """

    def check(self, storage: Storage) -> None:
        """Raise TypeError if this checkpointer does not support ``storage``."""
        if not isinstance(storage, DiskStorage):
            raise TypeError(
                f"DiskStorageCheckpointer is for a DiskStorage, this is a {type(storage).__name__}"
            )

    def save(self, storage: Storage, ring: Ring, saved: SavedFolder, options: SaveOptions) -> "FileLinks":
        """Return a save of the rows that ``ring`` counts."""
        assert isinstance(storage, DiskStorage)  # guaranteed by `check`
        _check_other(storage, saved.path)
        return FileLinks(storage, open_folder(saved, options, ring), saved, ring)

    def load_with(
        self,
        storage: Storage,
        path: Path,
        use: Callable[[LoadedVersion], T],
        number: int | None,
        strict: bool,
    ) -> tuple[T, Folder | None]:
        """Return ``use(version)`` of the newest complete (or the given) version, and its folder."""
        assert isinstance(storage, DiskStorage)
        _check_other(storage, path)
        return load_from(path, use, number, strict)

    def restore_version(
        self, storage: Storage, tables: dict[str, Any], version: LoadedVersion, ring: Ring
    ) -> dict[str, Any]:
        """Return the storage's state with the rows of ``version``, counted by ``ring``; nothing is changed."""
        assert isinstance(storage, DiskStorage)
        return storage.linked(tables, version, ring)

    def versions(self, path: Path) -> list[int]:
        """Return the numbers of the versions in a folder, the newest first."""
        if path.is_dir():
            return Folder(path).versions()
        return []

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class FileLinks:
    """A save that links the files of a storage.

    Args:
        storage: its files are not changed between :meth:`hold` and :meth:`close`.
        folder: folder of the version.
        saved: the buffer's rows in the folder.
        ring: counts the rows.
    """

    def __init__(self, storage: DiskStorage, folder: Folder, saved: SavedFolder, ring: Ring) -> None:
        self._storage = storage
        self._folder = folder
        self._saved = saved
        self._ring = ring
        self._held: AbstractContextManager[Any] | None = None
        self._head = 0

    def close(self) -> None:
        """Release writers and the folder."""
        if self._held is not None:
            self._held.__exit__(None, None, None)
        self._folder.close()

    def begin(self, rows: Callable[[], tuple[int, int]]) -> None:
        """Make the storage write its rows in memory to files."""
        if not self._storage.read_only:
            self._storage.flush()

    def hold(self, head: int, end: int) -> None:
        """Freeze the files; new rows stay in memory from now on."""
        held = self._storage.held()
        held.__enter__()
        self._held = held
        self._head = head

    def publish(self, packer: Packer, facts: Mapping[str, Any]) -> Version:
        """Link the files and publish a version."""
        segments, first = self._storage.linkable(self._head)
        self._folder.adopt(segments)
        version = self._folder.publish(packer.tree, packer.tensors, head=first, extra=facts)
        self._saved.note(self._ring)
        return version


class StorageEnsembleCheckpointer:
    """The checkpointer of `StorageEnsemble`: each member's checkpointer writes to its own folder."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


#: Any object that saves the rows of a storage.
Checkpointer: TypeAlias = StorageCheckpointerBase | DiskStorageCheckpointer | OwnFilesCheckpointer


def find_checkpointer(storage: Storage) -> Checkpointer:
    """Return the checkpointer of ``storage``, the default one if none was set; TypeError if it does not fit."""
    if storage.checkpointer is None:
        if isinstance(storage, DiskStorage):
            storage.checkpointer = DiskStorageCheckpointer()
        elif isinstance(storage, ListStorage):
            storage.checkpointer = ListStorageCheckpointer()
        else:
            storage.checkpointer = TensorStorageCheckpointer()

    checkpointer = storage.checkpointer
    if isinstance(checkpointer, OwnFiles):
        if isinstance(storage, DiskStorage):
            raise TypeError(
                f"{type(checkpointer).__name__} writes the rows of storages in memory, but those of a DiskStorage are "
                "in files already: use DiskStorageCheckpointer, its default"
            )
        return OwnFilesCheckpointer(checkpointer)

    if not isinstance(checkpointer, StorageCheckpointerBase | DiskStorageCheckpointer):
        raise TypeError(
            "checkpointer must be a StorageCheckpointerBase, such as TensorStorageCheckpointer(), or have "
            f"dumps(storage, path) and loads(storage, path), got {checkpointer!r}"
        )

    checkpointer.check(storage)
    return checkpointer


def checkpointer_with_hooks(storage: Storage) -> StorageCheckpointerBase:
    """Return the checkpointer of ``storage`` for hooks; TypeError if it copies no rows."""
    checkpointer = find_checkpointer(storage)
    if isinstance(checkpointer, DiskStorageCheckpointer):
        raise TypeError(
            "DiskStorageCheckpointer does not accept hooks: it writes no rows that they could change"
        )
    if isinstance(checkpointer, OwnFilesCheckpointer):
        raise TypeError(
            f"{type(checkpointer.files).__name__} writes its own files and does not accept hooks: change the rows in "
            "its dumps and loads"
        )
    return checkpointer


def _check_other(storage: DiskStorage, path: Path) -> None:
    """Raise ValueError if a checkpoint's folder is the storage's."""
    if path.resolve() == Path(storage.path).resolve():
        raise ValueError(
            f"{path} is the folder of the rows themselves, to which DiskStorage keeps writing: a checkpoint "
            f"needs another one, such as {path / 'checkpoint'}"
        )


def spans(ring: Ring, version: LoadedVersion) -> Iterator[Span]:
    """Return the spans of ``ring``'s rows in a version's files; ValueError if the version has other rows."""
    head, end = ring.saved_rows
    check_rows((head, end), (version.head, version.end))
    for segment in version.segments:
        if segment.rows > ring.capacity:
            raise damaged(f"one of its files has {segment.rows} rows, more than the ring's {ring.capacity}")

        start = segment.first % ring.capacity
        slots = torch.arange(start, start + segment.rows)
        slots[ring.capacity - start :] -= ring.capacity  # wrap around the end of the ring
        slots[: max(0, head - segment.first)] = -1
        yield Span(slots, segment.read)


def _group_by_entry(
    tensors: Mapping[str, FileColumn], names: Mapping[str, NestedKey]
) -> dict[NestedKey, dict[str, FileColumn]]:
    """Return a file's columns by entry and part; ``names`` are the entries' keys by their names in the file."""
    found: dict[NestedKey, dict[str, FileColumn]] = {key: {} for key in names.values()}
    for name, values in tensors.items():
        column, _, part = name.partition("#")
        if name == _CONVERTED:
            raise ValueError(
                "save hooks changed the form of the rows: register the inverse with "
                "buffer.register_load_hook, such as Flat2TED() for TED2Flat()"
            )
        if part in _WRITERS:
            raise ValueError(
                f"the rows were written by a {_WRITERS[part]}: set it as the storage's checkpointer"
            )
        if column not in names:
            raise damaged(f"its rows have an entry {column!r}, expected {sorted(names)}")
        found[names[column]][part or "values"] = values
    return found


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
        (count, _from_bytes(memory[start:end]))
        for count, start, end in zip(counts, starts, ends, strict=True)
    ]


def _to_bytes(item: object, name: str) -> bytes:
    """Encode an item: the length of its JSON in 8 bytes, the JSON, and its tensors as a safetensors file."""
    try:
        packer = Packer()
        value = packer.value(item, "state", 0)
    except TypeError as error:
        raise TypeError(
            f"{name}: {error}. ListStorage keeps any object in memory, but cannot save this one to disk"
        ) from None

    text = to_text(value).encode()
    return len(text).to_bytes(8, "little") + text + save(packer.tensors)


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
    if pieces:
        values = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
    else:
        values = torch.zeros(0).byte()

    lengths = torch.tensor([len(piece) for piece in pieces], dtype=torch.int64)
    return Ragged(values, lengths)


def _without_starts(read: Reader, targets: Mapping[str, Tensor]) -> dict[str, FileColumn]:
    """Return the columns of a span without run starts."""
    return {name: values for name, values in read(targets).items() if name != _STARTS}


def _fill_next(read: Reader, targets: Mapping[str, Tensor]) -> dict[str, FileColumn]:
    """Return the columns of a span with all next values."""
    tensors = read(targets)
    filled = {name: values for name, values in tensors.items() if not name.endswith(_AFTER)}
    for name, kept in tensors.items():
        if not name.endswith(_AFTER):
            continue

        later = name.removesuffix(_AFTER)
        now = tensors.get(later.partition("/")[2])
        if not isinstance(kept, Ragged) or not isinstance(now, Tensor):
            raise damaged(f"its rows lack the entry whose next value is {later!r}")

        check_values("next values", kept.values, now.dtype, now.shape[1:])
        if bool((kept.lengths > 1).any()) or (len(now) and int(kept.lengths[-1]) != 1):
            raise damaged(f"the next values of {later!r} are not one per row, or lack the last")

        after = now.roll(-1, 0)
        put_rows(after, kept.lengths.nonzero().squeeze(1), kept.values)
        filled[later] = after
    return filled
