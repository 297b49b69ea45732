"""The checkpointer of storages whose rows are files, which get a second name; and which checkpointer a storage has."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from typing_extensions import override

from flatroll.buffers.checkpointers.base import (
    Hook,
    ListStorageCheckpointer,
    Span,
    StorageCheckpointerBase,
    TensorStorageCheckpointer,
)
from flatroll.buffers.index.ring import Ring
from flatroll.disk import Folder, LoadedVersion, Version
from flatroll.disk.segments import Column as FileColumn
from flatroll.disk.segments import MOST_ROWS


class DiskStorageCheckpointer(StorageCheckpointerBase):
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

    @override
    def check(self, storage: Any) -> None:
        if not hasattr(storage, "linkable"):
            raise TypeError(
                f"DiskStorageCheckpointer is for a DiskStorage, this is a {type(storage).__name__}"
            )

    @override
    def check_path(self, storage: Any, path: Path) -> None:
        if path.resolve() == Path(storage.path).resolve():
            raise ValueError(
                f"{path} is the folder of the rows themselves, which DiskStorage goes on writing: a checkpoint needs "
                f"another one, such as {path / 'checkpoint'}"
            )

    @override
    def register_save_hook(self, hook: Hook) -> None:
        raise TypeError("DiskStorageCheckpointer takes no hooks: it writes no rows that they could change")

    @override
    def register_load_hook(self, hook: Hook) -> None:
        self.register_save_hook(hook)

    @override
    def dump(self, storage: Any, slots: Tensor) -> dict[str, FileColumn]:
        raise TypeError("the rows of a DiskStorage are not copied: its files are linked")

    @override
    def restore(
        self, storage: Any, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        raise TypeError("the rows of a DiskStorage are not copied: files are linked")

    @override
    def restore_version(
        self, storage: Any, tables: dict[str, Any], version: LoadedVersion, ring: Ring
    ) -> dict[str, Any]:
        state: dict[str, Any] = storage.linked(tables, version, ring)
        return state

    @override
    def open_to_save(
        self, storage: Any, path: Path, resume: Version | None, anew: bool, options: Mapping[str, Any]
    ) -> "LinkedFolder":
        if not storage.read_only:
            storage.flush()
        return LinkedFolder(storage, super().open_to_save(storage, path, resume, anew, options))


class LinkedFolder:
    """Writes versions of a folder whose rows are links to the files of a storage; it takes what `Folder` takes.

    Args:
        storage: a `DiskStorage`, held while ``publish`` is called.
        folder: where the version goes.

    Attributes:
        end: number of the row to come: no row is to be written here, since all are in the storage's files.
        segments: none that could be edited.
    """

    end = MOST_ROWS
    segments: tuple[()] = ()

    def __init__(self, storage: Any, folder: Folder) -> None:
        self._storage, self._folder = storage, folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.close()

    def drop_before(self, row: int) -> None:
        """Do nothing: ``publish`` says which rows there are."""

    def publish(self, state: Any, tensors: Mapping[str, Tensor], *, head: int, extra: Any) -> Version:
        """Link the files and publish a version, as `Folder.publish` does; ``head`` is a number of the ring's."""
        segments, first = self._storage.linkable(head)
        self._folder.adopt(segments)
        return self._folder.publish(state, tensors, head=first, extra=extra)


def checkpointer_of(storage: Any) -> StorageCheckpointerBase:
    """Return the checkpointer of ``storage``, the default one if none was chosen; TypeError if it does not fit."""
    if storage.checkpointer is None:
        columns, files = hasattr(storage, "columns_like"), hasattr(storage, "linkable")
        kind = (
            DiskStorageCheckpointer
            if files
            else TensorStorageCheckpointer
            if columns
            else ListStorageCheckpointer
        )
        storage.checkpointer = kind()
    checkpointer = storage.checkpointer
    if not isinstance(checkpointer, StorageCheckpointerBase):
        raise TypeError(
            f"checkpointer must be a StorageCheckpointerBase, such as TensorStorageCheckpointer(), got {checkpointer!r}"
        )
    checkpointer.check(storage)
    return checkpointer
