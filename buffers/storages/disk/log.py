"""The log of a disk storage: rows are buffered in memory blocks, and a thread writes them to files."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.columns.column import Columns
from flatroll.buffers.index.ring import Array
from flatroll.buffers.storages.disk.layout import Layout
from flatroll.buffers.storages.disk.pieces import Piece, Pieces
from flatroll.disk import Folder, Ragged, Segment, Version, column_name
from flatroll.kernels.rows.host_memory import host_memory
from flatroll.layout.keys import NestedKey, next_key

_LINE = 64  # bytes of a cache line
_FACTS = {"kind": "rows of a DiskStorage"}
_WAITING = 2  # maximum number of full blocks waiting for the disk; beyond it writers block


class FlushRule(NamedTuple):
    """The latest time at which rows are published.

    Args:
        rows: when this many have gathered; None for a full block.
        seconds: this long after the first of them; None for no limit.
    """

    rows: int | None
    seconds: float | None


class _Block:
    """Rows ``first ... first + rows - 1`` in memory, and the next observations that none of them holds."""

    def __init__(self, first: int, rows: int, layout: Layout) -> None:
        self.first = first
        self.limit = first + rows

        # One allocation for all columns, each aligned to a cache line: only large allocations get huge pages,
        # and page faults of small pages cost more than the copy.
        sizes = [-(-rows * form.row_bytes // _LINE) * _LINE for form in layout.forms.values()]
        memories = torch.split(host_memory(sum(sizes), torch.uint8, ()), sizes)
        self.columns: Columns = {
            key: memory[: rows * form.row_bytes].view(form.dtype).view(rows, *form.shape)
            for (key, form), memory in zip(layout.forms.items(), memories, strict=True)
        }

        self.piece = Piece(first, self.limit, self.columns, layout.forms)
        #: For each write: (rows of the block, their next observations by root key).
        self.tails: list[tuple[Array, Columns]] = []


class RowLog:
    """The rows of a folder, including those not yet in a file.

    One thread at a time appends; any number read :attr:`pieces`. A separate thread writes files. The next
    :meth:`check` or :meth:`flush` raises its error; the rows stay in memory and are written then.

    Lock order: ``_disk``, the folder's lock, ``_turn``.

    Args:
        folder: where the rows go; loaded, if there are any.
        rule: when rows are published.
        capacity: how many rows are kept at most, except for the rest of a file.

    Attributes:
        end: number of the row to come.
        pieces: the rows that can be read.
        layout: the folder's metadata of the rows; None before the first batch.
        notes: further metadata by name: JSON.
        saved: the version of each other folder that :meth:`save` may replace.
        thread: the last writing thread, which may still run; None before the first.
        closed: whether :meth:`close` has released the folder.
    """

    def __init__(self, folder: Folder, rule: FlushRule, capacity: int, layout: Layout | None) -> None:
        self.folder = folder
        self.rule = rule
        self.capacity = capacity
        self.layout = layout
        self.end = folder.end
        self.notes: dict[str, Any] = {}
        # Other folders that this run has saved to or loaded, and what it knows of them.
        self.saved: dict[Path, Folder | Version] = {}

        self._blocks: tuple[_Block, ...] = ()
        self._mapped: dict[str, Piece] = {}
        self._noted = False  # whether this run has published the layout
        self._appended = False  # whether this run has published rows
        self._named = 0  # number of the first row that the version does not name
        self._held = 0  # number of the next row when the rows were last held

        # _turn guards the blocks, the pieces and the thread's orders; _disk guards the folder.
        self._turn = threading.Lock()
        self._disk = threading.RLock()
        self._begun = self.end  # first row of the latest append
        self._unfinished = False  # whether that append was interrupted

        self.thread: threading.Thread | None = None
        self._due = 0  # the thread writes the rows below this number
        self._done = True  # whether the thread has stopped
        self._timer: threading.Timer | None = None
        self._error: BaseException | None = None

        self.closed = False
        self.pieces = Pieces([], {})
        self._refresh()

    @property
    def unflushed(self) -> int:
        """Number of rows not yet in a file."""
        return max(0, self.end - self.folder.end)

    def check(self) -> None:
        """Raise an error of the thread since the last call; ValueError if the log is closed."""
        if self.closed:
            raise self._closed_error()

        error = self._error
        self._error = None
        if error is not None:
            raise error

        blocks = self._blocks  # read once, because the thread removes full blocks
        if len(blocks) > _WAITING:  # the disk is slower than the writers, so they wait
            self._try(min(blocks[-1].first, self.end))

    def append(
        self, columns: Mapping[NestedKey, Tensor], lasts: Array, tails: Columns, first: int | None = None
    ) -> None:
        """Append rows ``[N, ...]``, after a :meth:`check`. After an error or Ctrl-C none of them is stored.

        Args:
            columns: by key.
            lasts: int64 ``[F]``, rows among the N whose next observations are stored separately.
            tails: these next observations, ``[F, *obs]``, by root key.
            first: number of the first row. Default: :attr:`end`. The number of the previous append replaces its rows,
                which the caller did not count because it was interrupted.

        Raises:
            RuntimeError: ``first`` is neither of these, or the rows of the previous append are in a file.
            ValueError: the log was closed meanwhile.
        """
        assert self.layout is not None
        if first is None:
            first = self.end
        if first not in (self.end, self._begun):
            raise RuntimeError(
                f"rows of a log are written in order: row {self.end} is the next one, not {first}"
            )

        if self._unfinished or first < self.end:
            self._take_back(first)

        self._begun = first
        self._unfinished = True

        count = len(next(iter(columns.values())))
        done = 0
        while done < count:
            row = first + done
            blocks = self._blocks  # read once, because the thread removes full blocks
            if blocks and blocks[-1].limit > row:
                block = blocks[-1]
            else:
                block = self._new_block(row)

            fit = min(block.limit - row, count - done)
            at = row - block.first
            for key, values in columns.items():
                block.columns[key][at : at + fit] = values[done : done + fit]

            inside = np.flatnonzero((lasts >= done) & (lasts < done + fit))
            if len(inside):
                chosen = torch.from_numpy(inside)
                here = {key: values.cpu().index_select(0, chosen) for key, values in tails.items()}
                block.tails.append((lasts[inside] - done + at, here))

            done += fit

        # The thread starts by taking this lock, and then finds the rows counted. If Ctrl-C interrupts its
        # start, they stay uncounted.
        with self._turn:
            if self.closed:
                raise self._closed_error()
            self._begin_writing(first + count)
            self.end = first + count
        self._unfinished = False

    def flush(self) -> None:
        """Write all rows to files.

        Raises:
            OSError: the disk is full or failed; the rows stay in memory, and another call writes them.
        """
        self._try(self.end)

    def settle(self) -> None:
        """Flush, leaving no row in memory."""
        with self._disk:
            self.flush()
            with self._turn:
                self._blocks = ()
            self._refresh()

    def close(self) -> None:
        """Flush and release the folder; a second call does nothing if the first one succeeded."""
        with self._disk:
            while not self.closed:
                self.flush()
                with self._turn:  # checks for rows written meanwhile; no more can come after this
                    self.closed = self.folder.end >= self.end
                    if self.closed and self._timer is not None:
                        self._timer.cancel()
            self.folder.close()

    def close_later(self) -> None:
        """Close from the garbage collector's thread, which may hold locks of this log."""
        if threading.current_thread() in (self.thread, self._timer):
            threading.Thread(target=self.close, name="flatroll close").start()
        else:
            self.close()

    def empty(self, first: int) -> None:
        """Drop all rows; the next one has the number ``first``, at least :attr:`end`."""
        with self._disk:
            self._error = None
            try:
                if self.layout is not None and (self.end > 0 or first > 0):
                    try:
                        self._note()  # this version names all files, so they stay until the next one
                    finally:
                        self._noted = False
                        self.folder.drop_before(first)
                    self._note()
                    self._note()  # no version names the files any more, so they are removed
            finally:
                with self._turn:
                    self._blocks = ()
                    self.end = first
                    self._begun = first
                self._refresh()

    def cut(self, row: int) -> None:
        """Mark this row as a cut: trajectories open before it end there. The folder records this with its next rows."""
        assert self.layout is not None
        self.layout.seams.append(row)
        self._noted = False

    def save(self, path: Path, head: int, notes: dict[str, Any], overwrite: bool) -> None:
        """Make ``path`` a folder with the same rows from number ``head`` on, sharing the files."""
        path = path.resolve()
        with self.held():
            segments = self.held_segments(head, write=True)
            if path == self.folder.path.resolve():
                self.notes = notes
                if self.layout is not None:
                    self._note()
                return

            with Folder(
                path, write=True, log=False, resume=self.saved.get(path), overwrite=overwrite
            ) as other:
                self.saved[path] = other
                other.adopt(segments)
                layout = {} if self.layout is None else self.layout.to_json()
                other.publish({**layout, **notes}, head=head, extra=_FACTS)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Return a context in which files do not change; new rows stay in memory.

        Enter it while nothing is being appended; appending may continue inside.
        """
        with self._disk:
            self._held = self.end
            yield

    def held_segments(self, first: int, *, write: bool) -> list[Segment]:
        """Return the files of the rows from number ``first`` to the last one when they were `held`, in that context.

        Args:
            first: number of a row.
            write: publish those that no file has yet.
        """
        if write:
            self._try(self._held)
        return [segment for segment in self.folder.segments if segment.end > first]

    def has(self, segments: Sequence[Segment], head: int, end: int) -> bool:
        """Return whether these files have the same bytes as this log's rows ``head`` to ``end - 1``."""
        own = [segment for segment in self.folder.segments if segment.first < end and segment.end > head]
        return [segment.contents for segment in own] == [segment.contents for segment in segments]

    def load(self, segments: Sequence[Segment], layout: Layout, head: int, end: int) -> None:
        """Replace all rows with those of other files, atomically.

        Args:
            segments: of another folder, end to end.
            layout: of these rows.
            head: number of the first row.
            end: number of the row to come. Trajectories are cut there.

        Raises:
            OSError: the disk is full or failed; the rows stay as they were, those in memory, too.
        """
        with self._disk:
            before = self.layout
            seams = [*layout.seams, end]

            try:
                if before is None:
                    self.layout = Layout(layout.forms, layout.pairs, [])

                # This version names all files present, so that they stay until the next one is published.
                self._note()
                number = self.folder.version
                try:
                    self.folder.adopt(segments)
                    self.layout = Layout(layout.forms, layout.pairs, seams)
                    self._note(head)
                except BaseException:
                    self.closed = True  # unless the folder turns out to be unchanged
                    self.closed = self.folder.load().version != number
                    raise
            except BaseException:
                self.layout = before
                self._noted = False
                raise

            with self._turn:
                self._blocks = ()
                self.end = end
                self._begun = end
                self._due = 0
                self._error = None

            self._refresh()
            with suppress(OSError):  # otherwise a later version removes the files
                self._note()  # no version names the files of the previous rows any more, so they are removed

    def _new_block(self, first: int) -> _Block:
        assert self.layout is not None
        block = _Block(first, self.folder.rows_per_segment(self.layout.row_bytes()), self.layout)
        with self._turn:
            self._blocks = (*self._blocks, block)
        self._refresh()
        return block

    def _try(self, end: int) -> None:
        """Write the rows before ``end`` now; its error is raised here, and not by the thread, too."""
        with self._disk:
            self._error = None  # what failed is retried
            try:
                self._write(end)
            except BaseException:
                with self._turn:
                    self._done = True
                raise

    def _take_back(self, first: int) -> None:
        """Forget the rows from number ``first`` on, of an append that was cut off."""
        with self._disk:
            if self.folder.end > first:
                raise RuntimeError(
                    "an extend was interrupted after its rows had been written to a file: open "
                    f"{self.folder.path} again to use them"
                )

            with self._turn:
                self._blocks = tuple(block for block in self._blocks if block.first <= first)
                for block in self._blocks:
                    block.tails = [tail for tail in block.tails if block.first + tail[0][0] < first]
                self.end = first
            self._refresh()

    def _closed_error(self) -> ValueError:
        return ValueError(f"the storage of {self.folder.path} is closed: open the folder again")

    # -- writer thread ---------------------------------------------------------------------------------------------

    def _begin_writing(self, end: int) -> None:
        """Have what is due of the rows before ``end`` written by a thread; the caller has ``_turn``."""
        last = self._blocks[-1]
        rows, seconds = self.rule
        # Only full blocks become files; the rows of the last block wait, unless the flush rule says otherwise.
        early = rows is not None and end - self.folder.end >= rows
        due = end if early or last.limit == end else last.first
        self._due = max(self._due, due)

        if self._due > self.folder.end and not self._at_work:
            # together: a thread that is about to end must not count as at work
            self.thread, self._done = threading.Thread(target=self._run, name="flatroll rows"), False
            self.thread.start()

        if seconds is not None and self._timer is None:
            self._timer = threading.Timer(seconds, _call, [weakref.WeakMethod(self._time_is_up)])
            self._timer.daemon = True
            self._timer.start()

    @property
    def _at_work(self) -> bool:
        """Whether a thread is writing and will check ``_due`` before it stops, or an error prevents writing."""
        alive = self.thread is not None and self.thread.is_alive() and not self._done
        return alive or self._error is not None

    def _time_is_up(self) -> None:
        """Write all rows on the timer's thread, unless another thread does."""
        with self._turn:
            self._due = max(self._due, self.end)
            if not self._at_work:
                self.thread, self._done = self._timer, False
            self._timer = None

        if self.thread is threading.current_thread():
            self._run()

    def _run(self) -> None:
        while True:
            with self._turn:
                end = min(self._due, self.end)
                self._done |= self.folder.end >= end
                if self._done:  # or another thread's write failed before this one began
                    return

            with self._disk:
                if self._done:  # another thread's write failed
                    return
                try:
                    # What was due may have been replaced by a load meanwhile.
                    self._write(min(end, self._due))
                except BaseException as error:  # any error is kept for the next writer to raise
                    with self._turn:
                        self._error = error
                        self._done = True
                    return

    def _write(self, end: int) -> None:
        """Publish the rows before ``end`` that no file holds, and let go those that the ring has dropped."""
        with self._disk:
            end = min(end, self.end)  # a load may have replaced the waiting rows meanwhile

            while (first := self.folder.end) < end:
                if not self._noted:
                    self._note()
                block = next(block for block in self._blocks if block.first <= first < block.limit)
                stop = min(end, block.limit)
                self.folder.append(self._encode_rows(block, first, stop), first=first)
                self._appended = True
                self._refresh()

            # Remove files whose rows the ring has dropped, but only after this run has appended rows.
            given_up = [segment.end for segment in self.folder.segments if segment.end <= end - self.capacity]
            if given_up and self._appended:
                # Files that no version names are removed at once. The files after them are found only if a
                # version says where to begin.
                if given_up[-1] > self._named:
                    self._note()
                self.folder.drop_before(end - self.capacity)
                self._note()
                self._refresh()

    def _note(self, head: int | None = None) -> None:
        """Publish a version that has the layout, and names the files that are there, from row ``head`` on."""
        assert self.layout is not None
        if head is None:
            head = self.folder.head
        self.layout.seams[:] = [row for row in self.layout.seams if row > head]

        # Two versions, in case one manifest is damaged.
        versions = 2 if self.folder.version is None else 1
        for _ in range(versions):
            self.folder.publish({**self.layout.to_json(), **self.notes}, head=head, extra=_FACTS)
        self._named = self.folder.end
        self._noted = True

    def _encode_rows(self, block: _Block, first: int, stop: int) -> dict[str, Tensor | Ragged]:
        """Rows ``first ... stop - 1`` of a block as a file holds them."""
        assert self.layout is not None
        low = first - block.first
        high = stop - block.first
        columns: dict[str, Tensor | Ragged] = {
            column_name(key): form.encode(block.columns[key][low:high])
            for key, form in self.layout.forms.items()
        }
        if not self.layout.pairs:
            return columns

        rows = np.concatenate([at for at, _ in block.tails] or [np.zeros(0, np.int64)])
        inside = np.flatnonzero((rows >= low) & (rows < high))
        lengths = torch.zeros(high - low, dtype=torch.int64)
        lengths[torch.from_numpy(rows[inside] - low)] = 1

        # The row after the last one is in another file, so store its next values here as well.
        follows = lengths[-1] == 0
        lengths[-1] = 1

        for key in self.layout.pairs:
            parts = [tails[key] for _, tails in block.tails]
            ends: list[Tensor] = []
            if parts:
                ends.append(torch.cat(parts).index_select(0, torch.from_numpy(inside)))
            if follows:
                ends.append(self._row(stop, key))
            columns[column_name(next_key(key))] = Ragged(torch.cat(ends), lengths)

        return columns

    def _row(self, row: int, key: NestedKey) -> Tensor:
        """The value of a row that is in a block, ``[1, ...]``."""
        block = next(block for block in self._blocks if block.first <= row < block.limit)
        return block.columns[key][row - block.first : row - block.first + 1]

    def _refresh(self) -> None:
        """Rebuild the pieces from the current files and blocks."""
        if self.layout is None:
            return

        with self._turn:
            segments = self.folder.segments
            end = self.folder.end
            self._blocks = tuple(block for block in self._blocks if block.limit > end or not segments)
            first = self._blocks[0].first if self._blocks else end

            mapped: dict[str, Piece] = {}
            for segment in segments:
                name = str(segment.name)
                if segment.first < first:
                    mapped[name] = self._mapped.get(name) or Piece.of(segment, self.layout.forms)

            self._mapped = mapped
            pieces = [*mapped.values(), *(block.piece for block in self._blocks)]
            self.pieces = Pieces(pieces, self.layout.forms)


def _call(weak: "weakref.WeakMethod[Callable[[], None]]") -> None:
    """Call a method, unless its object was garbage-collected."""
    method = weak()
    if method is not None:
        method()
