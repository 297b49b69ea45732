"""A save that links the files of a `DiskStorage` instead of copying its rows."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from flatroll.buffers.checkpointers.saving import SavedFolder
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.storages.disk.storage import DiskStorage
from flatroll.disk import Folder, Version
from flatroll.disk.state_tree import Packer


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

    def begin(self, lock: AbstractContextManager[Any]) -> None:
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
