"""The part of a storage on disk that saves its rows to other folders and takes them from there: by links to files."""

import os
import weakref
from abc import abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import Column, Columns
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.index.saved_tables import check_rows, damaged
from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.buffers.storages.disk.column import DiskColumn
from flatroll.buffers.storages.disk.forms import Form, FrameForm, ZstdForm
from flatroll.buffers.storages.disk.layout import Layout, columns_differ
from flatroll.buffers.storages.disk.log import RowLog
from flatroll.buffers.storages.disk.pieces import Piece
from flatroll.buffers.storages.item_kinds import TensorDicts
from flatroll.buffers.storages.next_pool import NextPool
from flatroll.disk import LoadedVersion, Segment, Version
from flatroll.disk.segments import MOST_ROWS
from flatroll.layout.keys import NestedKey


class LinkedRows(NamedTuple):
    """Rows of a version in another folder, checked, that are to be those of a storage.

    Args:
        head: number of the first row, in names of files.
        end: number of the row after the last.
        offset: number of a row, less its number in the ring of the buffer.
        layout: what they are.
        segments: the files.
    """

    head: int
    end: int
    offset: int
    layout: Layout
    segments: tuple[Segment, ...]


class LinkingStorage(ColumnStorage):
    """The part of `DiskStorage` that saves and loads rows without writing them.

    Attributes:
        read_only: whether rows are only read.
    """

    read_only: bool
    frame_stack: Any
    codec: Any
    _log: RowLog
    _ring: Ring | None
    _offset: int  # number of a row in the folder, less its number in the ring of the buffer

    @abstractmethod
    def _take(self, slots: Tensor, keys: Collection[NestedKey] | None) -> Columns:
        """Return copies of the newest rows in these slots."""

    @property
    def path(self) -> str:
        """The folder."""
        return str(self._log.folder.path)

    def save(
        self,
        path: str | os.PathLike[str],
        notes: dict[str, Any] | None = None,
        *,
        overwrite: bool = False,
        first: int | None = None,
    ) -> None:
        """Save the rows to another folder, which a `DiskStorage` can open: no row is written, the files get a second
        name there (copies are made on another disk).

        Args:
            path: of the folder; the storage's own will do for the ``notes``.
            notes: anything for JSON to save along.
            overwrite: replace what others have saved to the folder, default False.
            first: number of the first row to save, as the ring counts them. Default: the oldest one.

        Raises:
            FileExistsError: the folder holds what this storage has not saved there.
            BlockingIOError: somebody writes to it.
            OSError: the disk is full or failed; what was saved before stands.
        """
        self._writable()
        if first is None:
            first = 0 if self._ring is None else self._ring.head
        self._log.save(Path(path), self._offset + first, notes or {}, overwrite)

    @property
    def row_offset(self) -> int:
        """Number of a row in the folder, less its number in the ring of the buffer."""
        return self._offset

    def note(self, notes: dict[str, Any]) -> None:
        """Save ``notes``, anything for JSON, along with the next version of the folder."""
        self._log.notes = notes

    def may_replace(self, path: Path, version: Version) -> None:
        """Let :meth:`save` replace this version of another folder, which was loaded from there."""
        self._log.saved[path.resolve()] = version

    def _writable(self) -> None:
        if self.read_only:
            raise RuntimeError(f"{self.path} is open for reading only: DiskStorage(max_size, path) writes")
        self.enter_process()

    def _use_layout(self, layout: Layout) -> None:
        """Know the columns."""
        self.columns = {key: self._column(key, form) for key, form in layout.forms.items()}
        self.structure = TensorDicts(torch.Size([]))
        if layout.pairs:
            self.pool = NextPool(layout.pairs)
            self.pool.allocate(self.columns)

    def _form(self, key: NestedKey, dtype: torch.dtype, shape: torch.Size) -> Form:
        """The form that the options give an entry."""
        kind = FrameForm if key in self.frame_stack else ZstdForm if key in self.codec else Form
        return kind(dtype, shape)

    def _column(self, key: NestedKey, form: Form) -> DiskColumn:
        return DiskColumn(weakref.WeakMethod(self._take), key, form)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def held(self) -> AbstractContextManager[Any]:
        """Return a context in which the files of the rows stay as they are; writers wait while it is entered."""
        return self._log.held()

    def linkable(self, head: int) -> tuple[list[Segment], int]:
        """Return the files of the rows from ``head`` of the ring on, to the last one when they were `held`, and the
        number of the first of them."""
        first = self._offset + head
        return self._log.held_segments(first, write=not self.read_only), first

    @override
    def tables(self, pool_rows: int) -> dict[str, Any]:
        layout = self._log.layout
        log = {"offset": self._offset, "layout": None if layout is None else layout.to_json()}
        return super().tables(pool_rows) | {"log": log}

    def linked(self, tables: dict[str, Any], version: LoadedVersion, ring: Ring) -> dict[str, Any]:
        """Return the state of :attr:`tables` with the rows of ``version``, which ``ring`` counts; they are read once
        and checked, a file at a time, and nothing changes.

        Raises:
            DamagedFileError: a file is not what was written.
            ValueError: the rows are not those that the tables tell of.
        """
        log = tables["log"]
        offset, noted = log["offset"], log["layout"]
        # It is negative where the ring left out the rest of a round and the files did not.
        if type(offset) is not int or not 0 <= offset + ring.head <= offset + ring.written < MOST_ROWS:
            raise damaged(f"its rows are shifted by {offset!r}")
        try:
            layout = Layout.from_json(noted)
        except ValueError as error:
            raise damaged(f"its rows are of no known form ({error})") from None
        told = {key: (form.dtype, form.shape) for key, form in layout.forms.items()}
        expected = {key: self._form(key, *kind) for key, kind in tables["like"].items()}
        if told != dict(tables["like"]) or set(layout.pairs) != set(tables["pool"]):
            raise damaged("its rows have other entries than it tells of")
        if wrong := [key for key, form in layout.forms.items() if form.name != expected[key].name]:
            raise damaged(f"its entry {wrong[0]!r} has another form than it tells of")
        head, end = offset + ring.head, offset + ring.written
        check_rows((head, end), (version.head, version.end))
        if text := columns_differ(version.columns, layout):
            raise damaged(text)
        for segment in version.segments:
            segment.read()
            Piece.of(segment, layout.forms)
        rows = LinkedRows(head, end, offset, layout, version.segments)
        return {**tables, "columns": dict.fromkeys(layout.forms), "rows": rows}

    @override
    def check_state_dict(self, state: dict[str, Any], ring: Ring) -> None:
        super().check_state_dict(state, ring)
        rows = state.get("rows")
        if not isinstance(rows, LinkedRows):
            self.state_dict(0)
        elif self.read_only and not self._log.has(rows.segments, rows.head, rows.end):
            raise ValueError(
                f"{self.path} is open for reading only, and does not have the rows of the checkpoint: open the folder "
                "that it was saved of, or make DiskStorage(max_size, path) of another folder, which takes them"
            )

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows: LinkedRows = state["rows"]
        if not self.read_only:
            self._writable()
            self._log.load(rows.segments, rows.layout, rows.head, rows.end)
        self._offset = rows.offset
        self._use_layout(rows.layout)
        if self.pool is not None:
            self.known = None
            for key, column in self.pool.entries.items():
                column.load_state_dict(state["pool"][key])

    @override
    def _blank_column(self, key: NestedKey, dtype: torch.dtype, shape: torch.Size) -> Column:
        return self._column(key, self._form(key, dtype, shape))

    @override
    def state_dict(self, rows: int, pool_rows: int = 0) -> NoReturn:
        raise RuntimeError(
            "the rows of a DiskStorage stay in its folder: buffer.dumps(path) and Checkpoint save them, "
            f"and write none again; DiskStorage(max_size, {self.path!r}) has them, and storage.save(path) copies them"
        )
