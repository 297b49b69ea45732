"""Checkpointers that write files of their own: objects with ``dumps(storage, path)`` and ``loads(storage, path)``."""

import secrets
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flatroll.buffers.checkpointers.saving import SavedFolder
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.index.saved_tables import damaged
from flatroll.buffers.storages.storage import Storage
from flatroll.disk import Folder, LoadedVersion, Version
from flatroll.disk.state_tree import Packer

_PREFIX = "own-"  # of the folders that the two methods are given
_NOTE = "own_files"  # the name of such a folder, in the facts of its version


@runtime_checkable
class OwnFiles(Protocol):
    """Writes the rows of a storage to files of its own, and reads them."""

    def dumps(self, storage: Any, path: Path) -> Any:
        """Write ``storage.state_dict()`` into the folder ``path``, which exists and is empty."""
        ...

    def loads(self, storage: Any, path: Path) -> Any:
        """Read it from ``path`` and pass it to ``storage.load_state_dict``."""
        ...


class StorageState:
    """The storage as `OwnFiles` sees it: its state, and otherwise the storage itself.

    Attributes:
        loaded: the state that :meth:`load_state_dict` was given; None before.
    """

    def __init__(self, storage: Storage, rows: int, pool_rows: int) -> None:
        self._storage_itself = storage
        self._rows = rows
        self._pool_rows = pool_rows
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all stored rows: plain values and tensors."""
        return self._storage_itself.state_dict(self._rows, self._pool_rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state; the buffer loads it once everything was checked."""
        self.loaded = state

    def __len__(self) -> int:
        return self._rows

    def __getattr__(self, name: str) -> Any:
        if name == "_storage_itself":  # of a copy that is not complete
            raise AttributeError(name)
        return getattr(self._storage_itself, name)


class OwnFilesSave:
    """A save through an `OwnFiles` object."""

    def __init__(
        self, files: OwnFiles, storage: Storage, folder: Folder, saved: SavedFolder, ring: Ring
    ) -> None:
        self._files = files
        self._storage = storage
        self._folder = folder
        self._saved = saved
        self._ring = ring
        self._written: Path | None = None  # until its version is published

    def close(self) -> None:
        """Release the folder; remove files of a version that was not published."""
        self._folder.close()
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)

    def begin(self, lock: AbstractContextManager[Any]) -> None:
        """Do nothing: the rows are written while writers wait."""

    def hold(self, head: int, end: int) -> None:
        """Write the rows."""
        self._folder.forget_rows()
        written = self._saved.path / f"{_PREFIX}{secrets.token_hex(8)}"
        written.mkdir(parents=True)
        self._written = written

        self._files.dumps(StorageState(self._storage, end - head, self._ring.pool_size), written)

    def publish(self, packer: Packer, facts: Mapping[str, Any]) -> Version:
        """Publish a version that names the files; remove those of versions that are not kept."""
        assert self._written is not None
        noted = {**facts, _NOTE: self._written.name}
        version = self._folder.publish(packer.tree, packer.tensors, extra=noted)
        self._written = None
        self._saved.note(self._ring)

        kept = {_folder_in(self._folder.load(number).extra) for number in self._folder.versions()}
        for path in self._saved.path.glob(f"{_PREFIX}*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)
        return version


def read_own_files(
    files: OwnFiles, path: Path, storage: Storage, version: LoadedVersion, ring: Ring
) -> dict[str, Any]:
    """Return the state that ``files.loads`` gives for a version in the folder ``path``; nothing is changed."""
    name = _folder_in(version.extra)
    if name is None:
        raise ValueError(
            f"the version was not written by {type(files).__name__}: set the checkpointer that wrote it"
        )
    if not (path / name).is_dir():
        raise damaged(f"it lacks the folder {name}")

    view = StorageState(storage, ring.used, ring.pool_size)
    try:
        files.loads(view, path / name)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        # Otherwise they would be taken for errors of the tables.
        raise ValueError(f"{type(files).__name__}.loads(storage, path) raised {error!r}") from error

    if view.loaded is None:
        raise ValueError(
            f"{type(files).__name__}.loads(storage, path) must call storage.load_state_dict(state) with what "
            "storage.state_dict() returned in dumps"
        )
    return view.loaded


def _folder_in(facts: Any) -> str | None:
    """Return the name of the folder of own files in a version's facts, None if it has none; it is not trusted."""
    name = facts.get(_NOTE) if isinstance(facts, dict) else None
    if not isinstance(name, str) or not name.startswith(_PREFIX) or not name.removeprefix(_PREFIX).isalnum():
        return None
    return name
