"""Saving a buffer: the methods that buffers and ensembles share, the state of each folder, and saves that copy rows."""

import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from flatroll.buffers.index.ring import Ring
from flatroll.disk import Folder, LoadedVersion, Version
from flatroll.disk.checkpoint import Apply, Others, SaveOptions
from flatroll.disk.segments import Column
from flatroll.disk.state_tree import Packer
from flatroll.layout.checks import check_flags, check_path, check_whole_number

T = TypeVar("T")
Reader: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, Column]]
# limits of the bytes per segment
LEAST_BYTES = 2**22
MOST_BYTES = 2**25
_PARTS = 64  # minimum number of segments for a full ring: the oldest also holds dropped rows
_ROW_BYTES = 1000  # assumed bytes of a row of unknown size
_MOST_EDITS = 1000  # maximum number of edits recorded one by one


@dataclass(slots=True)
class SavedFolder:
    """The state of a buffer's rows in a folder, so that the next save writes only new rows.

    Args:
        path: path of the folder.
        folder: the closed `Folder` of the last save or load, which knows this run's versions.
        ring: counts the rows in the folder; None or dead if the folder has other rows than the buffer.
        edits: first and last row number of each in-place edit since then.
        saving: whether a save is running, which relies on the order of the edits.
    """

    path: Path
    folder: Folder | None = None
    ring: weakref.ref[Ring] | None = None
    edits: list[tuple[int, int]] = field(default_factory=list)
    saving: bool = False

    def note(self, ring: Ring, edits: int = 0) -> None:
        """Record that the folder has ``ring``'s rows, including the first ``edits`` edits."""
        self.ring = weakref.ref(ring)
        del self.edits[:edits]

    def note_edit(self, numbers: Tensor) -> None:
        """Record that rows with these numbers were overwritten in place; the caller holds the write lock."""
        if not len(numbers):
            return

        low, high = map(int, torch.aminmax(numbers))
        self.edits.append((low, high))
        if len(self.edits) > _MOST_EDITS and not self.saving:
            lows, highs = zip(*self.edits, strict=True)
            self.edits = [(min(lows), max(highs))]


class SavedFolders:
    """A buffer's saves: the state of each folder, and the save that runs on a thread.

    A copy of the buffer, also in another process, starts without any.
    """

    def __init__(self) -> None:
        self.folders: dict[Path, SavedFolder] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[type["SavedFolders"], tuple[()]]:
        return SavedFolders, ()

    def of(self, path: Path) -> SavedFolder:
        """Return the state of a folder."""
        path = path.resolve()
        return self.folders.setdefault(path, SavedFolder(path))

    def join(self) -> None:
        """Wait for the save on a thread and raise its error, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

        error = self._error
        self._error = None
        if error is not None:
            raise error

    def dumps(self, save: Callable[[], Any], wait: bool) -> None:
        """Call ``save``; without ``wait``, on a thread, one at a time."""
        self.join()
        if wait:
            save()
            return

        def run() -> None:
            try:
                save()
            except BaseException as error:  # re-raised in the caller's thread
                self._error = error

        self._thread = threading.Thread(target=run, name="flatroll save")
        self._thread.start()


class SavesToFolders:
    """The methods of a buffer, or of an ensemble of buffers, that save it to folders and load it.

    Attributes:
        saves: what is known of the folders.
    """

    saves: SavedFolders

    @abstractmethod
    def save_version(self, path: Path, others: Others, options: SaveOptions) -> Version:
        """Publish a version, and ``others`` (plain values by name) with it, in a folder; see `Checkpoint`."""

    @abstractmethod
    def load_version(self, path: Path, number: int | None, strict: bool) -> tuple[Others, Apply]:
        """Read and check a version; return the values saved with it, and a function that loads the rest."""

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

        A second save to the same folder writes only new rows and the tables. Saves are atomic: if the process is
        killed, the folder holds either the previous version or this one. Other threads may write and sample
        meanwhile. No pickle is written or read. ``storage.checkpointer`` determines the form of the rows.

        Args:
            path: the folder, created if necessary.
            wait: return when everything is written, default True. If False, a thread saves; the next call of `dumps`
                or `loads` waits for it and raises its error.
            sync: also flush to disk, safe from a power loss, default True.
            keep: number of versions kept in the folder, default 2.
            overwrite: start over in a folder with a version that this buffer has neither saved nor loaded, default
                False.

        Raises:
            FileExistsError: the folder has such a version.
            BlockingIOError: another save to it is running.
            TypeError: the state contains unsupported values, such as an object in a `ListStorage`.
            OSError: the disk is full or failed; the previous version is intact.

        >>> import tempfile, torch
        >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
        >>> buffer, other = (ReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2))
        >>> rows = buffer.extend(torch.arange(3))
        >>> with tempfile.TemporaryDirectory() as path:
        ...     buffer.dumps(path)
        ...     other.loads(path)
        >>> other[:]
        tensor([0, 1, 2])
        """
        check_flags(sync=sync, overwrite=overwrite, wait=wait)
        options = SaveOptions(sync, check_whole_number("keep", keep), overwrite)
        folder = check_path("path", path).absolute()
        self.saves.dumps(partial(self.save_version, folder, {}, options), wait)

    def loads(
        self, path: str | os.PathLike[str], *, version: int | None = None, strict: bool = False
    ) -> None:
        """Restore what :meth:`dumps` saved, like `load_state_dict`; the same samples follow.

        Nothing in the folder is trusted: checksums, sizes and tables are checked before anything changes. `dumps` and
        `loads` do not call `state_dict` or `load_state_dict`: save further state of a subclass with `Checkpoint`, as
        a separate part.

        Args:
            path: of the folder.
            version: number of a kept version, default the newest.
            strict: raise if the newest version is damaged; by default warn and load the previous one.

        Raises:
            FileNotFoundError: the folder, or a version in it, does not exist (the message lists the versions).
            ValueError: the storage's capacity, kind or entries differ (the message says how to load it anyway), files
                are damaged, or the folder is from a later version of the package.
        """
        check_flags(strict=strict)
        if version is not None:
            check_whole_number("version", version)

        folder = check_path("path", path)
        self.saves.join()
        _, apply = self.load_version(folder, version, strict)
        apply()

    def dump(self, path: str | os.PathLike[str], **options: Any) -> None:
        """See :meth:`dumps`."""
        self.dumps(path, **options)

    save = dump

    def load(self, path: str | os.PathLike[str], **options: Any) -> None:
        """See :meth:`loads`."""
        self.loads(path, **options)


class Save(Protocol):
    """A save of a buffer's rows; the buffer calls its methods in this order."""

    def begin(self, lock: AbstractContextManager[Any]) -> None:
        """Write what can be written while other threads write to the buffer.

        Args:
            lock: the buffer's lock for readers, under which its ring is read.
        """
        ...

    def hold(self, head: int, end: int) -> None:
        """Fix the rows ``head ... end - 1``; writers continue when this returns."""
        ...

    def publish(self, packer: Packer, facts: Mapping[str, Any]) -> Version:
        """Publish a version with these rows and the contents of ``packer``."""
        ...

    def close(self) -> None:
        """Release the folder, whether a version was published or not."""
        ...


class RowWriter(Protocol):
    """A target for copies of rows: a `Folder`, or a file with its interface.

    Attributes:
        end: number of the row to come.
    """

    end: int

    @property
    def segments(self) -> tuple[Any, ...]:
        """Existing files of rows that can be rewritten; without any, each save writes all rows."""
        ...

    def drop_before(self, row: int) -> None:
        """Drop the rows before this one; if it is after ``end``, the next row written is this one."""
        ...

    def append(self, columns: Mapping[str, Any]) -> None:
        """Write rows after those that are there."""
        ...

    def replace(self, columns: Mapping[str, Any], first: int) -> Any:
        """Rewrite the rows of some of the ``segments``."""
        ...

    def publish(
        self, state: Any, tensors: Mapping[str, Tensor] | None = None, *, head: int | None, extra: Any
    ) -> Version:
        """Publish a version with rows ``head`` ... ``end - 1``; earlier ones were overwritten meanwhile."""
        ...

    def close(self) -> None:
        """Release the target; also called after an error, when nothing was published."""
        ...


@dataclass(slots=True)
class RowCopy:
    """A save that copies rows.

    Writers and readers of the buffer continue while rows are copied. They wait only while the rows added meanwhile
    (at most a segment) and edited rows are copied in memory.

    Args:
        saved: the buffer's rows in the folder.
        writer: writer of the folder.
        dump: returns the rows in some slots as columns of a file.
        ring: counts the rows.
        segment_rows: rows per file.
    """

    saved: SavedFolder
    writer: RowWriter
    dump: Callable[[Tensor], Mapping[str, Any]]
    ring: Ring
    segment_rows: int
    _parts: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)  # first row and columns of each
    _head: int = 0
    _edits: int = 0

    def close(self) -> None:
        """Release the target; another save may begin."""
        self.saved.saving = False
        self.writer.close()

    def begin(self, lock: AbstractContextManager[Any]) -> None:
        """Append rows until less than a segment remains."""
        self.saved.saving = True
        for _ in range(4 * _PARTS):  # if writers are faster, copy the rest while they wait
            with lock:
                head, end = self.ring.saved_rows

            self.writer.drop_before(head)
            first = self.writer.end
            if end - first <= self.segment_rows:
                return

            # Rows overwritten meanwhile are below the version's head and are not read again.
            slots = torch.arange(first, first + self.segment_rows) % self.ring.capacity
            self.writer.append(self.dump(slots))

    def hold(self, head: int, end: int) -> None:
        """Copy the remaining rows and edited rows of existing files, in memory."""
        self._head = head
        self._edits = len(self.saved.edits)
        self.writer.drop_before(head)

        ranges = [
            (segment.first, segment.end)
            for segment in self.writer.segments
            if any(low < segment.end and segment.first <= high for low, high in self.saved.edits)
        ]
        if self.writer.end < end:
            ranges.append((self.writer.end, end))

        for first, stop in ranges:
            slots = torch.arange(first, stop) % self.ring.capacity
            self._parts.append((first, self.dump(slots)))

    def publish(self, packer: Packer, facts: Mapping[str, Any]) -> Version:
        """Write the remaining rows and publish them together with the contents of ``packer``."""
        for first, columns in self._parts:
            if first < self.writer.end:
                self.writer.replace(columns, first)
            else:
                self.writer.append(columns)

        version = self.writer.publish(packer.tree, packer.tensors, head=self._head, extra=facts)
        self.saved.note(self.ring, self._edits)
        return version


class Span(NamedTuple):
    """Rows to read from a file.

    Attributes:
        slots: int64 ``[N]``, slot of each row; -1 for rows that are no longer stored, which come first.
        read: reads them: returns the result of :meth:`StorageCheckpointerBase.dump`. Its argument is targets by name,
            tensors ``[N, ...]``; a column is read into its target if dtype and shape match, else into new memory.
    """

    slots: Tensor
    read: Reader


def load_from(
    path: Path, use: Callable[[LoadedVersion], T], number: int | None, strict: bool
) -> tuple[T, Folder]:
    """Return ``use(version)`` of a folder's newest complete (or the given) version, and the folder."""
    if not path.is_dir():
        raise FileNotFoundError(
            f"there is no folder {path}: buffer.dumps(path) or Checkpoint.save() creates one"
        )
    folder = Folder(path)
    return folder.load_with(use, number, strict=strict), folder


def rows_of_a_segment(row_bytes: int, capacity: int) -> int:
    """Return the number of rows per file, given the bytes per row."""
    size = row_bytes or _ROW_BYTES
    return max(1, min(max(-(-capacity // _PARTS), LEAST_BYTES // size), MOST_BYTES // size))


def versions_in(path: Path) -> list[int]:
    """Return the numbers of the versions in a folder, the newest first; empty if there is none to load."""
    if path.is_dir():
        return Folder(path).versions()
    return []
