"""Saves buffers and ensembles to folders and loads them: `dumps` and `loads`."""

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from flatroll.buffers.checkpointers.row_log import RowLog
from flatroll.disk import Version
from flatroll.disk.checkpoint import SaveOptions

#: What is saved along with a buffer: plain values by name, made when the buffer's own state is.
Others: TypeAlias = Callable[[], Mapping[str, Any]]
#: Loads what was read and checked.
Apply: TypeAlias = Callable[[], None]


class SaveRecords:
    """What a buffer knows of its saves: its rows in each folder, and the save that is under way on a thread.

    A copy of the buffer, or one in another process, knows nothing.
    """

    def __init__(self) -> None:
        self.logs: dict[Path, RowLog] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[type["SaveRecords"], tuple[()]]:
        return SaveRecords, ()

    def log(self, path: Path) -> RowLog:
        """The log of the rows in a folder."""
        return self.logs.setdefault(path.resolve(), RowLog(path))

    def join(self) -> None:
        """Wait for the save on a thread; raise its error if it had one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def start(self, save: Callable[[], Any]) -> None:
        """Call ``save`` on a thread, of which there is one at a time."""

        def run() -> None:
            try:
                save()
            except BaseException as error:  # kept for the caller's thread, whatever it is
                self._error = error

        self._thread = threading.Thread(target=run, name="flatroll save")
        self._thread.start()


class Saveable:
    """The part of buffers and ensembles that saves and loads them."""

    @property
    def _saves(self) -> SaveRecords:
        records: SaveRecords = self.__dict__.setdefault("_save_records", SaveRecords())
        return records

    def dumps(
        self,
        path: str | os.PathLike[str],
        *,
        wait: bool = True,
        sync: bool = True,
        keep: int = 2,
        overwrite: bool = False,
    ) -> None:
        """Save rows, sampler, writer and random state to a folder, for :meth:`loads`; transforms are not in it.

        A second save to the same folder writes the rows that are new since, and the tables. It is there as a whole or
        not at all: whatever the process is killed by, the folder holds the version before or this one. Other threads
        write and sample meanwhile. No pickle is written or read. Which form the rows have says
        ``storage.checkpointer``.

        Args:
            path: of the folder, which is made.
            wait: return when all is written, default True. With False a thread does it, one at a time; its error comes
                with the next call of `dumps` or `loads`, which waits for it.
            sync: return when the data are on the disk, safe from a power loss, default True.
            keep: versions that stay in the folder, default 2.
            overwrite: begin anew in a folder with a version that this buffer has neither saved nor loaded, default
                False.

        Raises:
            FileExistsError: the folder holds such a version.
            BlockingIOError: somebody else saves to it right now.
            TypeError: the state holds something that is no data, such as an object in a `ListStorage`.
            OSError: the disk is full, or failed; the version before stays.

        >>> import tempfile, torch
        >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
        >>> buffer, other = (ReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2))
        >>> rows = buffer.extend(torch.arange(6))
        >>> with tempfile.TemporaryDirectory() as path:
        ...     buffer.dumps(path)
        ...     other.loads(path)
        >>> other[:]
        tensor([2, 3, 4, 5])
        """
        self._saves.join()
        options, folder = SaveOptions(sync, keep, overwrite), Path(path)

        def save() -> None:
            self.save_version(folder, dict, options)

        save() if wait else self._saves.start(save)

    def loads(
        self, path: str | os.PathLike[str], *, version: int | None = None, strict: bool = False
    ) -> None:
        """Restore what :meth:`dumps` saved, so that the same samples follow, as `load_state_dict` does.

        Nothing in the folder is trusted: checksums, sizes and tables are checked, and what does not fit changes
        nothing.

        Args:
            path: of the folder.
            version: number of a version that is kept, default the newest.
            strict: raise if the newest version is damaged; by default a warning says what is lost, and the version
                before it is loaded.

        Raises:
            FileNotFoundError: there is no folder, or no version in it, or not this one (the text lists them).
            ValueError: a storage of another capacity, kind or other entries (the text says how to load it all the
                same), or damaged files, named; a folder of a later version of the package.
        """
        self._saves.join()
        self.load_version(Path(path), version, strict)[1]()

    def dump(self, path: str | os.PathLike[str], **options: Any) -> None:
        """See :meth:`dumps`."""
        self.dumps(path, **options)

    def load(self, path: str | os.PathLike[str], **options: Any) -> None:
        """See :meth:`loads`."""
        self.loads(path, **options)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Call ``hook(rows, path=path)`` before rows are written; what it returns, as many rows, is written instead.

        The rows are a batch of the kind that is stored (a compact storage gives each observation once), or a list of
        items.
        """
        for checkpointer in self._checkpointers():
            checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Call ``hook(rows)`` on rows that were read, before they are stored: it undoes what the save hooks did."""
        for checkpointer in self._checkpointers():
            checkpointer.register_load_hook(hook)

    @abstractmethod
    def _checkpointers(self) -> list[Any]:
        """The checkpointers of the storages; TypeError if one does not fit its storage."""

    @abstractmethod
    def save_version(self, path: Path, others: Others, options: SaveOptions) -> Version:
        """Publish a version of this and of ``others`` in the folder ``path``; return its number and line."""

    @abstractmethod
    def load_version(self, path: Path, number: int | None, strict: bool) -> tuple[dict[str, Any], Apply]:
        """Read and check a version; return what ``others`` gave, and what loads the rest."""
