"""Reads rows from the pieces of a log: mapped files and memory blocks."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.columns.column import Columns, take_rows
from flatroll.buffers.index.ring import Array
from flatroll.buffers.storages.disk.forms import Form
from flatroll.disk import Ragged, Segment, column_name
from flatroll.layout.keys import NestedKey

_LOOKS = 8  # number of rows of a sample checked for being in memory


class Piece:
    """Rows ``first ... end - 1``: a mapped file, or a block in memory whose rows are as they came.

    Args:
        first: number of the first row.
        end: number of the row after the last.
        columns: the entries by key, ``[end - first, ...]``.
        forms: their forms, by key; a block has plain values only.
        segment: the file; None for a block.

    Raises:
        ValueError: the columns of a file are not those of ``forms``.
    """

    def __init__(
        self,
        first: int,
        end: int,
        columns: Mapping[NestedKey, Tensor | Ragged],
        forms: Mapping[NestedKey, Form],
        segment: Segment | None = None,
    ) -> None:
        self.first = first
        self.end = end
        self.columns = columns
        self.segment = segment

        # Of ragged columns: the number of values up to and including each row, int64.
        self.ends: dict[NestedKey, Array] = {}

        self.source, self.running = np.zeros((2, len(forms)), np.int64)
        for k, (key, form) in enumerate(forms.items()):
            column = columns[key]
            values = column
            if segment is not None:
                form.check(column)
            if isinstance(column, Ragged):
                values = column.values
                self.ends[key] = column.lengths.cumsum(0).numpy()
                self.running[k] = self.ends[key].ctypes.data

            assert isinstance(values, Tensor)
            self.source[k] = values.data_ptr()

    @classmethod
    def of(cls, segment: Segment, forms: Mapping[NestedKey, Form]) -> "Piece":
        """Map a file."""
        columns = segment.columns
        missing = [key for key in forms if column_name(key) not in columns]
        if missing:
            raise ValueError(f"the file {segment.name} has no {missing[0]!r}")

        named = {key: columns[column_name(key)] for key in forms}
        return cls(segment.first, segment.end, named, forms, segment)


class Pieces:
    """An immutable snapshot of a log's rows, which any number of threads read.

    Args:
        pieces: end to end; where the last file and the first block have the same rows, those of the block are read.
        forms: of the entries, by key.
    """

    def __init__(self, pieces: Sequence[Piece], forms: Mapping[NestedKey, Form]) -> None:
        self.pieces = tuple(pieces)
        self.forms = dict(forms)
        self.end = pieces[-1].end if pieces else 0
        self.firsts: Array = np.array([piece.first for piece in pieces] + [self.end], np.int64)

        shape = len(pieces), len(self.forms)
        self._source = np.array([piece.source for piece in pieces], np.int64).reshape(shape)
        self._running = np.array([piece.running for piece in pieces], np.int64).reshape(shape)
        self._tables: dict[tuple[NestedKey, ...], tuple[Array, ...]] = {}

    def __len__(self) -> int:
        return self.end - int(self.firsts[0])

    def read(self, rows: Array, keys: Collection[NestedKey] | None = None) -> Columns:
        """Return copies of rows, by key.

        Args:
            rows: int64 ``[N]``, numbers of rows.
            keys: which entries, default all; unknown ones are left out.

        Raises:
            IndexError: a number of no row.
        """
        from flatroll.kernels.rows.gather import gather_pieces  # numba

        names = tuple(key for key in self.forms if keys is None or key in keys)
        copied = tuple(key for key in names if self.forms[key].by_address)
        if len(rows) and not self.firsts[0] <= rows.min() <= rows.max() < self.end:
            raise IndexError(
                f"rows {rows.min()} ... {rows.max()} are not all in {self.firsts[0]} ... {self.end - 1}"
            )

        self._ask_for(rows)
        columns: Columns = {
            key: torch.empty((len(rows), *self.forms[key].shape), dtype=self.forms[key].dtype)
            for key in names
        }

        target = np.array([columns[key].data_ptr() for key in copied], np.int64)
        gather_pieces(self.firsts, *self._table(copied), rows, target)

        for key in names:
            if key not in copied:
                self._decode(key, rows, columns[key])
        return columns

    def _table(self, keys: tuple[NestedKey, ...]) -> tuple[Array, ...]:
        """The arguments ``source, ends, size, unit`` of the kernel for these entries."""
        if keys not in self._tables:
            names = list(self.forms)
            at = [names.index(key) for key in keys]
            forms = [self.forms[key] for key in keys]
            sizes = [form.row_bytes for form in forms]
            units = [form.row_bytes // form.shape[0] if form.name == "frames" else 0 for form in forms]
            self._tables[keys] = (
                np.ascontiguousarray(self._source[:, at]),
                np.ascontiguousarray(self._running[:, at]),
                np.array(sizes, np.int64),
                np.array(units, np.int64),
            )
        return self._tables[keys]

    def _decode(self, key: NestedKey, rows: Array, target: Tensor) -> None:
        """Fill ``target`` with the rows of an entry that files hold compressed."""
        which = np.searchsorted(self.firsts, rows, "right") - 1
        for number in np.unique(which).tolist():
            piece = self.pieces[number]
            at = np.flatnonzero(which == number)
            column = piece.columns[key]

            local = rows[at] - piece.first

            if not isinstance(column, Ragged):
                target[torch.from_numpy(at)] = take_rows(column, torch.from_numpy(local))
                continue
            try:
                self.forms[key].decode(column, piece.ends[key], local, target, at)
            except ValueError as error:
                if piece.segment is not None:
                    error.add_note(f"while {piece.segment.folder / str(piece.segment.name)} was read")
                raise

    def _ask_for(self, rows: Array) -> None:
        """If the rows do not seem to be in memory, ask the system to read them, all at once."""
        some = rows[:: max(1, len(rows) // _LOOKS)]
        which = np.searchsorted(self.firsts, some, "right") - 1

        for number, row in zip(which.tolist(), some.tolist(), strict=True):
            segment = self.pieces[number].segment
            if segment is not None and not segment.in_memory(row - segment.first):
                break
        else:
            return

        which = np.searchsorted(self.firsts, rows, "right") - 1
        for number in np.unique(which).tolist():
            segment = self.pieces[number].segment
            if segment is not None:
                segment.prefetch(np.unique(rows[which == number]) - segment.first)
