"""Checkpointers: for storages whose rows are written to files, and for storages that are on disk already."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.checkpointers.hooks import CONVERTED, Hook, HookedDump, undo_hooks
from flatroll.buffers.checkpointers.items import dump_items, read_items
from flatroll.buffers.checkpointers.links import FileLinks
from flatroll.buffers.checkpointers.own_files import OwnFiles, OwnFilesSave, read_own_files
from flatroll.buffers.checkpointers.saving import (
    MOST_BYTES,
    Reader,
    RowCopy,
    RowWriter,
    Save,
    SavedFolder,
    Span,
    load_from,
    rows_of_a_segment,
    versions_in,
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
from flatroll.buffers.storages.list import ListStorage
from flatroll.buffers.storages.storage import Storage
from flatroll.disk import Folder, LoadedVersion, Ragged, column_name
from flatroll.disk.checkpoint import SaveOptions
from flatroll.disk.segments import Column as FileColumn
from flatroll.kernels.rows.host_memory import host_memory
from flatroll.layout.boundaries import run_starts
from flatroll.layout.keys import NestedKey, next_key, plain_key
from flatroll.layout.tensordict_seam import nest

T = TypeVar("T")
#: The checkpointers that write columns with these suffixes; others cannot read them.
_WRITERS = {"after": "FlatStorageCheckpointer", "starts": "NestedStorageCheckpointer"}
_STARTS = "#starts"  # bool per row: whether a run begins here
_AFTER = "#after"  # next values that differ from the next row's values


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

    def open(
        self, saved: SavedFolder, options: SaveOptions, ring: Ring, segment_rows: int | None = None
    ) -> RowWriter:
        """Return a writer for the rows that ``ring`` counts; ``saved`` describes the rows already in its folder.

        Raises:
            FileExistsError: at the first change, if the folder holds a version that the buffer has neither saved nor
                loaded.
            BlockingIOError: another save to it is running.
        """
        folder = Folder(
            saved.path,
            write=True,
            log=False,
            resume=saved.folder,
            segment_rows=segment_rows,
            segment_bytes=MOST_BYTES,
            **options._asdict(),
        )

        # Before publishing, so that the next save recognises the version of an interrupted one.
        saved.folder = folder
        if not ring.in_order or saved.ring is None or saved.ring() is not ring:
            folder.forget_rows()
        return folder

    def save(self, storage: Storage, ring: Ring, saved: SavedFolder, options: SaveOptions) -> Save:
        """Return a save of the rows that ``ring`` counts."""
        segment_rows = rows_of_a_segment(storage.bytes_per_row, ring.capacity)
        writer = self.open(saved, options, ring, segment_rows)

        dump: Callable[[Tensor], Mapping[str, FileColumn]] = partial(self.dump, storage)
        if self._save_hooks:
            dump = HookedDump(self._save_hooks, storage, ring, saved.path)
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
        """Return the storage's state with the rows of ``version``, which ``ring`` counts; nothing is changed."""
        spans: Iterable[Span] = find_spans(ring, version)
        if self._load_hooks:
            spans = undo_hooks(self._load_hooks, tables, spans)
        return self.restore(storage, tables, spans, ring.used)

    def versions(self, path: Path) -> list[int]:
        """Return the numbers of the versions in a folder, the newest first."""
        return versions_in(path)

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
        rows = storage.read_rows(slots)
        assert isinstance(rows, list)
        return dump_items(rows)

    @override
    def restore(
        self, storage: Storage, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        items: list[Any] = [None] * rows
        for slots, read in spans:
            gone = int((slots < 0).sum())
            found = read_items(read({}), gone)
            for slot, item in zip(slots[gone:].tolist(), found, strict=True):
                items[slot] = item
        return {"items": items}


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


class DiskStorageCheckpointer(StorageCheckpointerBase):
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

    @override
    def check(self, storage: Storage) -> None:
        if not isinstance(storage, DiskStorage):
            raise TypeError(
                f"DiskStorageCheckpointer is for a DiskStorage, this is a {type(storage).__name__}"
            )

    @override
    def save(self, storage: Storage, ring: Ring, saved: SavedFolder, options: SaveOptions) -> FileLinks:
        assert isinstance(storage, DiskStorage)  # guaranteed by `check`
        _check_other(storage, saved.path)
        folder = self.open(saved, options, ring)
        assert isinstance(folder, Folder)
        return FileLinks(storage, folder, saved, ring)

    @override
    def load_with(
        self,
        storage: Storage,
        path: Path,
        use: Callable[[LoadedVersion], T],
        number: int | None,
        strict: bool,
    ) -> tuple[T, Folder | None]:
        assert isinstance(storage, DiskStorage)
        _check_other(storage, path)
        return super().load_with(storage, path, use, number, strict)

    @override
    def restore_version(
        self, storage: Storage, tables: dict[str, Any], version: LoadedVersion, ring: Ring
    ) -> dict[str, Any]:
        assert isinstance(storage, DiskStorage)
        return storage.linked(tables, version, ring)


class OwnFilesCheckpointer(StorageCheckpointerBase):
    """Saves the rows through an `OwnFiles` object, in a folder for each version, and the tables beside them.

    All rows are written each time, while writers to the buffer wait.
    """

    def __init__(self, files: OwnFiles) -> None:
        super().__init__()
        self.files = files

    @override
    def check(self, storage: Storage) -> None:
        if isinstance(storage, DiskStorage):
            raise TypeError(
                f"{type(self.files).__name__} writes the rows of storages in memory, but those of a DiskStorage are "
                "in files already: use DiskStorageCheckpointer, its default"
            )

    @override
    def save(self, storage: Storage, ring: Ring, saved: SavedFolder, options: SaveOptions) -> OwnFilesSave:
        folder = self.open(saved, options, ring)
        assert isinstance(folder, Folder)
        return OwnFilesSave(self.files, storage, folder, saved, ring)

    @override
    def load_with(
        self,
        storage: Storage,
        path: Path,
        use: Callable[[LoadedVersion], T],
        number: int | None,
        strict: bool,
    ) -> tuple[T, Folder | None]:
        self._path = path
        return super().load_with(storage, path, use, number, strict)

    @override
    def restore_version(
        self, storage: Storage, tables: dict[str, Any], version: LoadedVersion, ring: Ring
    ) -> dict[str, Any]:
        return read_own_files(self.files, self._path, storage, version, ring)


class StorageEnsembleCheckpointer:
    """The checkpointer of `StorageEnsemble`: each member's checkpointer writes to its own folder."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def find_checkpointer(storage: Storage) -> StorageCheckpointerBase:
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
        checkpointer = OwnFilesCheckpointer(checkpointer)

    if not isinstance(checkpointer, StorageCheckpointerBase):
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


def find_spans(ring: Ring, version: LoadedVersion) -> Iterator[Span]:
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
        if name == CONVERTED:
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
