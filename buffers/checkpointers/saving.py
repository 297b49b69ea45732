"""Saving a buffer: what is known about each folder, and saves by copies or by links."""

import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from flatroll.buffers.index.ring import Ring
from flatroll.disk import Folder, LoadedVersion, Version
from flatroll.disk.checkpoint import SaveOptions
from flatroll.disk.state_tree import Packer

T = TypeVar("T")
# limits of the bytes per segment
LEAST_BYTES = 2**22
MOST_BYTES = 2**25
_PARTS = 64  # minimum number of segments for a full ring: the oldest also holds dropped rows
_ROW_BYTES = 1000  # assumed bytes of a row of unknown size
_MOST_EDITS = 1000  # maximum number of edits recorded one by one


class SavedFolder:
    """The state of a buffer's rows in a folder, so that the next save writes only new rows.

    Args:
        path: path of the folder.

    Attributes:
        folder: the closed `Folder` of the last save or load, which knows this run's versions.
        ring: counts the rows in the folder; None or dead if the folder has other rows than the buffer.
        edits: first and last row number of each in-place edit since then.
        saving: whether a save is running, which relies on the order of the edits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder: Folder | None = None
        self.ring: weakref.ref[Ring] | None = None
        self.edits: list[tuple[int, int]] = []
        self.saving = False

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


class Save(Protocol):
    """A save of a buffer's rows; the buffer calls its methods in this order."""

    def begin(self, rows: Callable[[], tuple[int, int]]) -> None:
        """Write what can be written while other threads write to the buffer.

        Args:
            rows: returns the current numbers of the first row to save and of the row after the last.
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

    def __init__(
        self,
        saved: SavedFolder,
        writer: RowWriter,
        dump: Callable[[Tensor], Mapping[str, Any]],
        ring: Ring,
        segment_rows: int,
    ) -> None:
        self._saved = saved
        self._writer = writer
        self._ring = ring
        self._count = segment_rows
        self._dump = dump

        self._parts: list[tuple[int, Mapping[str, Any]]] = []
        self._head = 0
        self._edits = 0
        saved.saving = True

    def close(self) -> None:
        """Release the target; another save may begin."""
        self._saved.saving = False
        self._writer.close()

    def begin(self, rows: Callable[[], tuple[int, int]]) -> None:
        """Append rows until less than a segment remains."""
        for _ in range(4 * _PARTS):  # if writers are faster, copy the rest while they wait
            head, end = rows()
            self._writer.drop_before(head)
            first = self._writer.end
            if end - first <= self._count:
                return

            # Rows overwritten meanwhile are below the version's head and are not read again.
            slots = torch.arange(first, first + self._count) % self._ring.capacity
            self._writer.append(self._dump(slots))

    def hold(self, head: int, end: int) -> None:
        """Copy the remaining rows and edited rows of existing files, in memory."""
        self._head = head
        self._edits = len(self._saved.edits)
        self._writer.drop_before(head)

        ranges = [
            (segment.first, segment.end)
            for segment in self._writer.segments
            if any(low < segment.end and segment.first <= high for low, high in self._saved.edits)
        ]
        if self._writer.end < end:
            ranges.append((self._writer.end, end))

        for first, stop in ranges:
            slots = torch.arange(first, stop) % self._ring.capacity
            self._parts.append((first, self._dump(slots)))

    def publish(self, packer: Packer, facts: Mapping[str, Any]) -> Version:
        """Write the remaining rows and publish them together with the contents of ``packer``."""
        for first, columns in self._parts:
            if first < self._writer.end:
                self._writer.replace(columns, first)
            else:
                self._writer.append(columns)

        version = self._writer.publish(packer.tree, packer.tensors, head=self._head, extra=facts)
        self._saved.note(self._ring, self._edits)
        return version


def open_folder(
    saved: SavedFolder, options: SaveOptions, ring: Ring, segment_rows: int | None = None
) -> Folder:
    """Open a folder to save ``ring``'s rows after the buffer's existing rows there.

    Raises:
        FileExistsError: at the first change, if it holds a version that this buffer has neither saved nor loaded.
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
