"""The log of a storage on disk: rows gather in blocks of memory, and a thread makes files of them."""

import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.columns.base import Columns, host_memory
from flatroll.buffers.index.ring import Array
from flatroll.buffers.storages.disk.forms import FORMS, Form
from flatroll.buffers.storages.disk.pieces import Piece, Pieces
from flatroll.disk import Folder, Ragged, Version, column_key, column_name
from flatroll.disk.tensor_file import DTYPES, dtype_name
from flatroll.layout.keys import NestedKey, next_key

_KIND = "flatroll.DiskStorage"
_WAITING = 2  # full blocks that may wait for the disk before a writer waits, too


class FlushRule(NamedTuple):
    """When rows are published, at the latest.

    Args:
        rows: as soon as so many have gathered; None for a whole block.
        seconds: so long after the first of them came; None for no limit.
    """

    rows: int | None
    seconds: float | None


class Layout(NamedTuple):
    """What a folder notes of its rows besides them.

    Args:
        forms: of the entries, by key.
        pairs: root keys of the entries whose next values stand apart (``compact_obs``).
        seams: numbers of rows at which a run began to write: what was open before is cut there.
    """

    forms: dict[NestedKey, Form]
    pairs: list[NestedKey]
    seams: list[int]

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` reads."""
        entries = [
            [column_name(key), dtype_name(form.dtype), list(form.shape), form.name]
            for key, form in self.forms.items()
        ]
        return {
            "kind": _KIND,
            "entries": entries,
            "pairs": [column_name(key) for key in self.pairs],
            "seams": self.seams,
        }

    @classmethod
    def from_json(cls, noted: Any) -> "Layout":
        """Read what a folder notes; ValueError if it is no folder of a `DiskStorage`."""
        if not isinstance(noted, dict):
            raise ValueError(
                "the folder is none of a DiskStorage or a data set; what buffer.dumps or Checkpoint saved, they load"
            )
        try:
            if noted["kind"] != _KIND:
                raise ValueError(noted["kind"])
            forms: dict[NestedKey, Form] = {
                column_key(name): FORMS[form](DTYPES[dtype], torch.Size(shape))
                for name, dtype, shape, form in noted["entries"]
            }
            pairs, seams = [column_key(name) for name in noted["pairs"]], noted["seams"]
            if not all(key in forms for key in pairs) or not all(type(row) is int for row in seams):
                raise ValueError("pairs or seams")
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"the folder is none of a DiskStorage ({error})") from None
        return cls(forms, pairs, seams)

    def row_bytes(self) -> int:
        """Bytes of a row in memory."""
        return sum(form.row_bytes for form in self.forms.values())


class _Block:
    """Rows ``first ... first + rows - 1`` in memory, and the next observations that none of them holds."""

    def __init__(self, first: int, rows: int, layout: Layout) -> None:
        self.first, self.limit = first, first + rows
        self.columns: Columns = {key: host_memory(rows, f.dtype, f.shape) for key, f in layout.forms.items()}
        self.piece = Piece(first, self.limit, self.columns, layout.forms)
        #: (rows of the block, their next observations by root key), of one write after the other.
        self.tails: list[tuple[Array, Columns]] = []


class RowLog:
    """Rows of a folder, with those that are not in a file yet.

    One thread at a time appends; any number reads :attr:`pieces`. Files are written by a thread of its own. The next
    :meth:`check` or :meth:`flush` raises its error; the rows stay in memory, to be written then.

    Args:
        folder: where the rows go; loaded, if there are any.
        rule: when rows are published.
        capacity: how many rows are kept at most, but for the rest of a file.

    Attributes:
        end: number of the row to come.
        pieces: the rows that can be read.
        layout: what the folder notes of the rows; None before the first batch.
        notes: what else it notes, by name: JSON.
    """

    def __init__(self, folder: Folder, rule: FlushRule, capacity: int, layout: Layout | None) -> None:
        self.folder, self.rule, self.capacity, self.layout = folder, rule, capacity, layout
        self.end = folder.end
        self.notes: dict[str, Any] = {}
        self._saved: dict[Path, Version] = {}
        self._blocks: tuple[_Block, ...] = ()
        self._mapped: dict[str, Piece] = {}
        self._noted = False  # whether this run has published the layout
        self._appended = False  # whether this run has published rows
        self._turn, self._disk = threading.Lock(), threading.RLock()  # of the pieces, of the folder
        self._thread: threading.Thread | None = None
        self._timer: threading.Timer | None = None
        self._error: BaseException | None = None
        self._closed = False
        self.pieces = Pieces([], {})
        self._refresh()

    @property
    def unflushed(self) -> int:
        """Number of rows that no file holds yet."""
        return max(0, self.end - self.folder.end)

    def check(self) -> None:
        """Raise the error of the thread, if it had one since the last call; ValueError if the log is closed."""
        if self._closed:
            raise ValueError(f"the storage of {self.folder.path} is closed: open the folder anew")
        error, self._error = self._error, None
        if error is not None:
            raise error
        if len(self._blocks) > _WAITING:  # the disk is slower than the writers: they wait for it
            self.flush()

    def append(self, columns: Mapping[NestedKey, Tensor], lasts: Array, tails: Columns) -> None:
        """Take rows ``[N, ...]``, after a :meth:`check`.

        Args:
            columns: by key.
            lasts: int64 ``[F]``, rows among the N whose next observations stand apart.
            tails: these, ``[F, *obs]``, by root key.
        """
        assert self.layout is not None
        count, first = len(next(iter(columns.values()))), self.end
        done = 0
        while done < count:
            block = self._blocks[-1] if self._blocks else None
            if block is None or block.limit == first + done:
                block = self._new_block(first + done)
            fit = min(block.limit - first - done, count - done)
            at = first + done - block.first
            for key, values in columns.items():
                block.columns[key][at : at + fit] = values[done : done + fit]
            inside = np.flatnonzero((lasts >= done) & (lasts < done + fit))
            if len(inside):
                chosen = torch.from_numpy(inside)
                here = {key: values.cpu().index_select(0, chosen) for key, values in tails.items()}
                block.tails.append((lasts[inside] - done + at, here))
            done += fit
        self.end = first + count
        waits = self.end - self.folder.end
        if self._blocks[0].limit <= self.end or (self.rule.rows is not None and waits >= self.rule.rows):
            self._start()
        elif self.rule.seconds is not None and self._timer is None:
            self._timer = threading.Timer(self.rule.seconds, _start_later, [weakref.ref(self)])
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Return when all rows are in files.

        Raises:
            OSError: the disk is full or failed; the rows stay in memory, and another call writes them.
        """
        if self._thread is not None:
            self._thread.join()
        self._error = None  # what failed is tried again
        self._write(self.end)

    def close(self) -> None:
        """Flush, and give the folder back."""
        if self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.flush()
        self._closed = True
        self.folder.close()

    def empty(self, first: int) -> None:
        """Forget all rows; the next one has the number ``first``, which is not below :attr:`end`."""
        if self._thread is not None:
            self._thread.join()
        with self._disk:
            self._error = None
            if self.layout is not None and (self.end > 0 or first > 0):
                self.folder.drop_before(first)
                self._note()
            with self._turn:
                self._blocks, self.end = (), first
            self._refresh()

    def save(self, path: Path, head: int, notes: dict[str, Any], overwrite: bool) -> None:
        """Make ``path`` a folder of the same rows, from number ``head`` on: its files are those of this one."""
        with self._disk:
            self.flush()
            if path.resolve() == self.folder.path.resolve():
                self.notes = notes
                if self.layout is not None:
                    self._note()
                return
            path = path.resolve()
            with Folder(path, write=True, resume=self._saved.get(path), overwrite=overwrite) as other:
                other.adopt([segment for segment in self.folder.segments if segment.end > head])
                layout = {} if self.layout is None else self.layout.to_json()
                version = other.publish(
                    {**layout, **notes}, head=head, extra={"kind": "rows of a DiskStorage"}
                )
            self._saved[path] = version

    def _new_block(self, first: int) -> _Block:
        assert self.layout is not None
        block = _Block(first, self.folder.rows_per_segment(self.layout.row_bytes()), self.layout)
        with self._turn:
            self._blocks = (*self._blocks, block)
        self._refresh()
        return block

    # -- on the thread ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Write what is there on a thread, unless it is at work."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (self._thread is None or not self._thread.is_alive()) and not self._closed and self._error is None:
            self._thread = threading.Thread(target=self._run, args=(self.end,), name="flatroll rows")
            self._thread.start()

    def _run(self, end: int) -> None:
        try:
            self._write(end)
        except BaseException as error:  # kept for the thread that writes next, whatever it is
            self._error = error

    def _write(self, end: int) -> None:
        """Publish the rows before ``end`` that no file holds, and let go those that the ring has dropped."""
        with self._disk:
            while (first := self.folder.end) < end:
                if not self._noted:
                    self._note()
                block = next(block for block in self._blocks if block.first <= first < block.limit)
                stop = min(end, block.limit)
                self.folder.append(self._encoded(block, first, stop), first=first)
                self._appended = True
                self._refresh()
            # Rows that the ring has given up go with the file that they are in, but not before this run adds to them.
            segments = self.folder.segments
            if self._appended and segments and segments[0].end <= end - self.capacity:
                self.folder.drop_before(end - self.capacity)
                self._note()
                self._refresh()

    def _note(self) -> None:
        """Publish a version that has the layout, and names the files that are there."""
        assert self.layout is not None
        head = self.folder.head
        self.layout.seams[:] = [row for row in self.layout.seams if row > head]
        facts = {"kind": "rows of a DiskStorage"}
        self.folder.publish({**self.layout.to_json(), **self.notes}, extra=facts)
        self._noted = True

    def _encoded(self, block: _Block, first: int, stop: int) -> dict[str, Tensor | Ragged]:
        """Rows ``first ... stop - 1`` of a block as a file holds them."""
        assert self.layout is not None
        low, high = first - block.first, stop - block.first
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
        # The row after the last one is in another file: what comes next stands here, too.
        follows = lengths[-1] == 0
        lengths[-1] = 1
        for key in self.layout.pairs:
            parts = [tails[key] for _, tails in block.tails]
            values = torch.cat(parts).index_select(0, torch.from_numpy(inside)) if parts else None
            ends = [] if values is None else [values]
            if follows:
                ends.append(self._row(stop, key))
            columns[column_name(next_key(key))] = Ragged(torch.cat(ends), lengths)
        return columns

    def _row(self, row: int, key: NestedKey) -> Tensor:
        """The value of a row that is in a block, ``[1, ...]``."""
        block = next(block for block in self._blocks if block.first <= row < block.limit)
        return block.columns[key][row - block.first : row - block.first + 1]

    def _refresh(self) -> None:
        """Make the pieces anew, of what files and blocks there are."""
        if self.layout is None:
            return
        with self._turn:
            segments, end = self.folder.segments, self.folder.end
            self._blocks = tuple(block for block in self._blocks if block.limit > end or not segments)
            first = self._blocks[0].first if self._blocks else end
            mapped: dict[str, Piece] = {}
            for segment in segments:
                name = str(segment.name)
                if segment.first < first:
                    mapped[name] = self._mapped.get(name) or Piece.of(segment, self.layout.forms)
            self._mapped = mapped
            self.pieces = Pieces(
                [*mapped.values(), *(block.piece for block in self._blocks)], self.layout.forms
            )


def _start_later(log: "weakref.ref[RowLog]") -> None:
    alive = log()
    if alive is not None:
        alive._timer = None
        alive._start()


def columns_differ(folder: Folder, layout: Layout) -> str | None:
    """Say what is wrong if the columns of a folder's rows are not those that it notes; else None."""
    expected = {column_name(key) for key in (*layout.forms, *map(next_key, layout.pairs))}
    found = set(folder.columns)
    return (
        None
        if not found or found == expected
        else f"it has the columns {sorted(found)}, and notes {sorted(expected)}"
    )
