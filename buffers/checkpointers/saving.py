"""How a buffer is saved: what it knows of each folder, and the two ways of its rows to one, as copies or as links."""

import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flatroll.buffers.index.ring import Ring
from flatroll.disk import Folder, Version
from flatroll.disk.checkpoint import SaveOptions
from flatroll.disk.state_tree import Packer

LEAST_BYTES, MOST_BYTES = 2**22, 2**25  # of a segment
_PARTS = 64  # segments of a full ring, at least: the oldest one holds rows that are gone already
_ROW_BYTES = 1000  # of a row whose size is not known
_MOST_EDITS = 1000  # that are remembered one by one


class SavedFolder:
    """What a buffer has in a folder, so that the next save writes the new rows only.

    Args:
        path: of the folder.

    Attributes:
        folder: the closed `Folder` that has saved or loaded last, which knows the versions of this run.
        ring: counts the rows in the folder; None, or gone, if others than those of the buffer are there.
        edits: numbers of the first and last row of each edit in place since then.
        saving: whether a save is under way, which counts on the order of the edits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder: Folder | None = None
        self.ring: weakref.ref[Ring] | None = None
        self.edits: list[tuple[int, int]] = []
        self.saving = False

    def note(self, ring: Ring, edits: int = 0) -> None:
        """Remember that the folder has the rows that ``ring`` counts, after the first ``edits`` of the edits."""
        self.ring = weakref.ref(ring)
        del self.edits[:edits]

    def edited(self, numbers: Tensor) -> None:
        """Note that rows with these numbers were overwritten in place; the caller holds the lock of writers."""
        if not len(numbers):
            return
        low, high = map(int, torch.aminmax(numbers))
        self.edits.append((low, high))
        if len(self.edits) > _MOST_EDITS and not self.saving:
            self.edits = [(min(low for low, _ in self.edits), max(high for _, high in self.edits))]


class SavedFolders:
    """What a buffer knows of its saves: its rows in each folder, and the save that is under way on a thread.

    A copy of the buffer, or one in another process, knows nothing.
    """

    def __init__(self) -> None:
        self.folders: dict[Path, SavedFolder] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[type["SavedFolders"], tuple[()]]:
        return SavedFolders, ()

    def of(self, path: Path) -> SavedFolder:
        """What is known of a folder."""
        path = path.resolve()
        return self.folders.setdefault(path, SavedFolder(path))

    def join(self) -> None:
        """Wait for the save on a thread; raise its error if it had one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def dumps(self, save: Callable[[], Any], wait: bool) -> None:
        """Call ``save``; without ``wait`` on a thread, of which there is one at a time."""
        self.join()
        if wait:
            save()
            return

        def run() -> None:
            try:
                save()
            except BaseException as error:  # kept for the caller's thread, whatever it is
                self._error = error

        self._thread = threading.Thread(target=run, name="flatroll save")
        self._thread.start()


class Save(Protocol):
    """One save of a buffer's rows; the buffer calls its methods in this order."""

    def begin(self, rows: Callable[[], tuple[int, int]]) -> None:
        """Write what can be written while others write to the buffer.

        Args:
            rows: returns the numbers of the first row to save and of the row after the last one, at the moment.
        """
        ...

    def hold(self, head: int, end: int) -> None:
        """Take the rows ``head ... end - 1`` as they are: writers go on when this returns."""
        ...

    def publish(self, packer: Packer, facts: Mapping[str, Any]) -> Version:
        """Publish a version with these rows and what ``packer`` has."""
        ...

    def close(self) -> None:
        """Let others save to the folder, whether a version was published or not."""
        ...


class RowWriter(Protocol):
    """Where copies of rows go: a `Folder`, or a file that does as one.

    Attributes:
        end: number of the row to come.
    """

    end: int

    @property
    def segments(self) -> tuple[Any, ...]:
        """Files of rows that are there and could be written anew; with none, each save writes all rows."""
        ...

    def drop_before(self, row: int) -> None:
        """Forget the rows before this one; if it is after ``end``, the next row written is this one."""
        ...

    def append(self, columns: Mapping[str, Any]) -> None:
        """Write rows after those that are there."""
        ...

    def replace(self, columns: Mapping[str, Any], first: int) -> Any:
        """Write the rows of some of the ``segments`` anew."""
        ...

    def publish(
        self, state: Any, tensors: Mapping[str, Tensor] | None = None, *, head: int | None, extra: Any
    ) -> Version:
        """Publish a version, whose rows are ``head`` ... ``end - 1``: earlier ones were overwritten meanwhile."""
        ...

    def close(self) -> None:
        """Let others write; also called after an error, when nothing was published."""
        ...


class RowCopy:
    """A save that copies rows.

    Writers and readers of the buffer go on while rows are copied; they wait while those that came meanwhile, at most a
    segment, and those that were edited are copied in memory, and no longer.

    Args:
        saved: what the buffer has in the folder.
        writer: of the folder.
        dump: returns the rows in some slots as columns of a file.
        ring: counts the rows.
        segment_rows: how many rows make a file.
    """

    def __init__(
        self,
        saved: SavedFolder,
        writer: RowWriter,
        dump: Callable[[Tensor], Mapping[str, Any]],
        ring: Ring,
        segment_rows: int,
    ) -> None:
        self._saved, self._writer, self._ring, self._count = saved, writer, ring, segment_rows
        self._dump = dump
        self._parts: list[tuple[int, Mapping[str, Any]]] = []
        self._head = self._edits = 0
        saved.saving = True

    def close(self) -> None:
        self._saved.saving = False
        self._writer.close()

    def begin(self, rows: Callable[[], tuple[int, int]]) -> None:
        """Append rows until less than a segment is left."""
        for _ in range(4 * _PARTS):  # writers may be faster; then the rest is copied while they wait
            head, end = rows()
            self._writer.drop_before(head)
            first = self._writer.end
            if end - first <= self._count:
                return
            # Rows that a writer overwrites meanwhile are below the head of the version, and not read again.
            slots = torch.arange(first, first + self._count) % self._ring.capacity
            self._writer.append(self._dump(slots))

    def hold(self, head: int, end: int) -> None:
        """Copy the rest, and what was edited in files that are there, in memory."""
        self._head, self._edits = head, len(self._saved.edits)
        self._writer.drop_before(head)
        ranges = [
            (segment.first, segment.end)
            for segment in self._writer.segments
            if any(low < segment.end and segment.first <= high for low, high in self._saved.edits)
        ]
        if self._writer.end < end:
            ranges.append((self._writer.end, end))
        for first, stop in ranges:
            self._parts.append((first, self._dump(torch.arange(first, stop) % self._ring.capacity)))

    def publish(self, packer: Packer, facts: Mapping[str, Any]) -> Version:
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
    """Open a folder to save the rows that ``ring`` counts, after those that the buffer has there.

    Raises:
        FileExistsError: with the first change, if it holds a version that this buffer has neither saved nor loaded.
        BlockingIOError: somebody else saves to it.
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
    saved.folder = (
        folder  # before anything is published: an interrupted save's version is known to the next one
    )
    if not ring.in_order or saved.ring is None or saved.ring() is not ring:
        folder.forget_rows()
    return folder


def rows_of_a_segment(row_bytes: int, capacity: int) -> int:
    """How many rows of so many bytes a file of a ring's rows has."""
    size = row_bytes or _ROW_BYTES
    return max(1, min(max(-(-capacity // _PARTS), LEAST_BYTES // size), MOST_BYTES // size))
