"""Checkpointers that copy no rows: those of storages whose rows are files, and of ensembles; and which one a storage
has."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias, TypeVar

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
        self._storage = storage

    def save(self, storage: DiskStorage, ring: Ring, saved: SavedFolder, options: SaveOptions) -> "FileLinks":
        """Return a save of the rows that ``ring`` counts."""
        _check_other(storage, saved.path)
        return FileLinks(storage, ring, saved, options)

    def load_with(
        self, saved: SavedFolder, use: Callable[[LoadedVersion], T], number: int | None, strict: bool
    ) -> T:
        """Return ``use(version)`` of the newest version that is whole, or of the one of this number."""
        return load_from(saved, use, number, strict)

    def restore_version(
        self, storage: DiskStorage, tables: dict[str, Any], version: LoadedVersion, ring: Ring
    ) -> dict[str, Any]:
        """Return the storage's state with the rows of ``version``, which ``ring`` counts; nothing changes."""
        return storage.linked(tables, version, ring)

    def versions(self, path: Path) -> list[int]:
        """Return the numbers of the versions in a folder, the newest first."""
        return Folder(path).versions() if path.is_dir() else []

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
