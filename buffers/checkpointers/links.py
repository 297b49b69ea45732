"""Checkpointers that copy no rows: those of storages whose rows are files, and of ensembles; and which one a storage
has."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

from flatroll.buffers.checkpointers.rows import (
    ListStorageCheckpointer,
    StorageCheckpointerBase,
    TensorStorageCheckpointer,
    load_from,
)
from flatroll.buffers.checkpointers.saving import SavedFolder, open_folder
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.storages.disk.storage import DiskStorage
from flatroll.buffers.storages.list import ListStorage
from flatroll.buffers.storages.storage import Storage
from flatroll.disk import Folder, LoadedVersion, Version
from flatroll.disk.checkpoint import SaveOptions
from flatroll.disk.state_tree import Packer

T = TypeVar("T")


class DiskStorageCheckpointer:
    """The checkpointer of `DiskStorage`: it writes no rows, since they are in files already.

    The files get a second name in the folder of the checkpoint (copies are made on another disk), and stay as long as
    one of the two folders needs them. A load gives them a second name in the storage's folder, whose own rows go. The
    folder of a checkpoint may lie within that of the storage, but cannot be the same: there the rows go on.

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

    def check(self, storage: Any) -> None:
        """Raise TypeError if this is no checkpointer for ``storage``."""
        if not isinstance(storage, DiskStorage):
            raise TypeError(
                f"DiskStorageCheckpointer is for a DiskStorage, this is a {type(storage).__name__}"
            )

    def save(self, storage: Storage, ring: Ring, saved: SavedFolder, options: SaveOptions) -> "FileLinks":
        """Return a save of the rows that ``ring`` counts."""
        assert isinstance(storage, DiskStorage)  # that is what `check` is for
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
        """Return ``use(version)`` of the newest version that is whole, or of the one of this number, and the folder
        that knows this version."""
        assert isinstance(storage, DiskStorage)
        _check_other(storage, path)
        return load_from(path, use, number, strict)

    def restore_version(
        self, storage: Storage, tables: dict[str, Any], version: LoadedVersion, ring: Ring
    ) -> dict[str, Any]:
        """Return the storage's state with the rows of ``version``, which ``ring`` counts; nothing changes."""
        assert isinstance(storage, DiskStorage)
        return storage.linked(tables, version, ring)

    def versions(self, path: Path) -> list[int]:
        """Return the numbers of the versions in a folder, the newest first."""
        return Folder(path).versions() if path.is_dir() else []

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class FileLinks:
    """A save that gives the files of a storage a second name.

    Args:
        storage: whose files are held as they are from :meth:`hold` until the context ends.
        folder: where the version goes.
        saved: what the buffer has in the folder.
        ring: counts the rows.
    """

    def __init__(self, storage: DiskStorage, folder: Folder, saved: SavedFolder, ring: Ring) -> None:
        self._storage, self._folder, self._saved, self._ring = storage, folder, saved, ring
        self._held: AbstractContextManager[Any] | None = None
        self._head = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._held is not None:
            self._held.__exit__(None, None, None)
        self._folder.close()

    def begin(self, rows: Callable[[], tuple[int, int]]) -> None:
        """Let the storage write the files of the rows that wait in memory."""
        if not self._storage.read_only:
            self._storage.flush()

    def hold(self, head: int, end: int) -> None:
        """Keep the files of the rows as they are; rows that come from now on stay in memory."""
        held = self._storage.held()
        held.__enter__()
        self._held, self._head = held, head

    def publish(self, packer: Packer, facts: Mapping[str, Any]) -> Version:
        """Link the files and publish a version."""
        segments, first = self._storage.linkable(self._head)
        self._folder.adopt(segments)
        version = self._folder.publish(packer.tree, packer.tensors, head=first, extra=facts)
        self._saved.note(self._ring)
        return version


class StorageEnsembleCheckpointer:
    """The checkpointer of `StorageEnsemble`: each member's own writes its rows, to a folder of their own."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


#: What says how the rows of a storage are saved.
Checkpointer: TypeAlias = StorageCheckpointerBase | DiskStorageCheckpointer


def checkpointer_of(storage: Storage) -> Checkpointer:
    """Return the checkpointer of ``storage``, the default one if none was chosen; TypeError if it does not fit."""
    if storage.checkpointer is None:
        if isinstance(storage, DiskStorage):
            storage.checkpointer = DiskStorageCheckpointer()
        elif isinstance(storage, ListStorage):
            storage.checkpointer = ListStorageCheckpointer()
        else:
            storage.checkpointer = TensorStorageCheckpointer()
    checkpointer = storage.checkpointer
    if not isinstance(checkpointer, StorageCheckpointerBase | DiskStorageCheckpointer):
        raise TypeError(
            f"checkpointer must be a StorageCheckpointerBase, such as TensorStorageCheckpointer(), got {checkpointer!r}"
        )
    checkpointer.check(storage)
    return checkpointer


def hooked(storage: Storage) -> StorageCheckpointerBase:
    """Return the checkpointer of ``storage``, which takes hooks; TypeError if it copies no rows that they could
    change."""
    checkpointer = checkpointer_of(storage)
    if isinstance(checkpointer, DiskStorageCheckpointer):
        raise TypeError("DiskStorageCheckpointer takes no hooks: it writes no rows that they could change")
    return checkpointer


def _check_other(storage: DiskStorage, path: Path) -> None:
    """Raise ValueError if a checkpoint's folder is that of the rows."""
    if path.resolve() == Path(storage.path).resolve():
        raise ValueError(
            f"{path} is the folder of the rows themselves, which DiskStorage goes on writing: a checkpoint needs "
            f"another one, such as {path / 'checkpoint'}"
        )
