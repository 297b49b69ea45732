"""A segment: an immutable file of rows ``[first, end)``, its columns end to end, read or mapped."""

import errno
import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import Buffer

from flatroll.disk import files, tensor_file
from flatroll.disk.columns import Column, ColumnSchema, Ragged, Schema, cut, join
from flatroll.disk.names import DTYPES, FORMAT, LENGTHS, FileRecord, RowsName, dtype_name
from flatroll.disk.tensor_file import DamagedFileError, Header, MissingFileError, opened

Ints = npt.NDArray[np.int64]
#: Why a file gets no second name, but a copy: another disk, one without such names, too many of them, a removed file.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.ENOENT)


class Segment:
    """A file of rows. Attributes ``first`` and ``end`` are the numbers of its first row and of that after its last.

    Args:
        folder: where it is.
        name: of the file.
        header: of the file.

    Raises:
        DamagedFileError: the header does not fit the name.
    """

    def __init__(self, folder: Path, name: RowsName, header: Header) -> None:
        self.folder, self.name, self.header = folder, name, header
        self.first, self.end = name.first, name.end
        self.schema = _schema_of(header, self.rows)

    @classmethod
    def open(
        cls, folder: Path, name: RowsName, record: FileRecord | None = None, *, mapped: bool
    ) -> "Segment":
        """Open a file and check its header, against what a manifest says of it if there is one; map it if asked to.

        Raises:
            DamagedFileError: it is missing, or not what was written.
        """
        with opened(folder, str(name)) as (descriptor, size):
            header = tensor_file.read_header(descriptor, size)
            if record is not None and (header.size, header.checksum) != (record.size, record.checksum):
                raise DamagedFileError("it is another file than the one that its version names")
            segment = cls(folder, name, header)
            if mapped:
                segment._maps = tensor_file.map_tensors(descriptor, header)
            return segment

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.end - self.first

    @property
    def size(self) -> int:
        """Size of the file, in bytes."""
        return self.header.size

    @property
    def data_bytes(self) -> int:
        """Bytes of its columns."""
        return sum(entry.size for entry in self.header.entries.values())

    @property
    def contents(self) -> tuple[int, ...]:
        """Numbers of the first row and of the one after the last, bytes, checksum: alike in files of the same rows."""
        return (*self.name[:2], *self.record[1:])

    @property
    def needs(self) -> set[str]:
        """What a reader of the file must know."""
        ragged = any(column.ragged for column in self.schema.values())
        return self.header.needs | ({"ragged"} if ragged else set())

    @property
    def record(self) -> FileRecord:
        """What a manifest says of the file."""
        return FileRecord(str(self.name), self.header.size, self.header.checksum)

    @cached_property
    def _maps(self) -> tuple[Tensor, dict[str, Tensor]]:
        with opened(self.folder, str(self.name)) as (descriptor, size):
            if size != self.header.size:
                raise DamagedFileError(f"it has {size} bytes, expected {self.header.size}")
            return tensor_file.map_tensors(descriptor, self.header)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns by name, in mapped memory: no descriptor stays open, and the rows are not checked.

        They stay as long as somebody holds one of the tensors, also after the file is removed. What is written into
        them stays in this process, and never goes to the file.
        """
        return _assembled(self.schema, self._maps[1])

    def read(self, targets: Mapping[str, Tensor] | None = None) -> dict[str, Column]:
        """Read all rows, with checksums, into new memory.

        Args:
            targets: name to a contiguous tensor ``[N, ...]`` of the column's dtype, into which it is read instead.

        Raises:
            DamagedFileError: they are not those that were written.
        """
        return _assembled(self.schema, self._read_tensors(targets or {}))

    def _read_tensors(self, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        entries = self.header.entries
        try:
            with opened(self.folder, str(self.name)) as (descriptor, _):
                return {
                    name: tensor_file.read_tensor(descriptor, name, entry, targets.get(name))
                    for name, entry in entries.items()
                }
        except MissingFileError:
            if "_maps" not in self.__dict__:
                raise
        # A writer has removed the file since; the map still has it.
        tensors = {name: tensor.clone() for name, tensor in self._maps[1].items()}
        for name, tensor in tensors.items():
            tensor_file.check_bytes(name, entries[name], tensor_file.bytes_of(tensor))
            if name in targets:
                targets[name].copy_(tensor)
        return tensors

    def share(self, folder: Path, name: RowsName, *, synced: bool) -> "Segment":
        """Have the file in another folder, too: as a second name of it, or a copy if that is on another disk, or if
        the file has been removed since it was mapped.

        The folder is not synced: one sync does for several files.
        """
        try:
            files.link(self.folder / str(self.name), folder / str(name))
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            files.publish(folder, str(name), [self._maps[0].numpy().data], synced=synced, named=False)
        else:
            if synced:  # it may have been written by somebody who does not sync
                descriptor, _ = files.open_to_read(folder / str(name))
                try:
                    files.sync(descriptor)
                finally:
                    files.close(descriptor)
        return Segment(folder, name, self.header)

    def prefetch(self, rows: Ints) -> None:
        """Ask the system to read these rows of all columns from disk, all at once, without waiting for them.

        Args:
            rows: int64, ascending, from 0 to the number of rows of the segment less 1.
        """
        mapped = self._maps[0]
        for entry in self.header.entries.values():
            if entry.shape and entry.shape[0] == self.rows:
                for begin, length in page_stretches(rows, entry.size // self.rows, entry.begin):
                    files.will_need(mapped, begin, length)

    def in_memory(self, row: int) -> bool:
        """Whether a row, counted from the first of the segment, is likely to be in memory: its largest column is."""
        begin, size = self._widest
        position = begin + row * size
        return not size or files.in_memory(self._maps[0], position - position % mmap.PAGESIZE)

    @cached_property
    def _widest(self) -> tuple[int, int]:
        """Position, and bytes of a row, of the largest column that has a value per row."""
        plain = [
            entry for entry in self.header.entries.values() if entry.shape and entry.shape[0] == self.rows
        ]
        return max(
            ((entry.begin, entry.size // self.rows) for entry in plain),
            key=lambda one: one[1],
            default=(0, 0),
        )


def read_range(segments: Iterable[Segment], schema: Schema, first: int, end: int) -> dict[str, Column]:
    """Read rows ``[first, end)``, which the segments have, into new memory, with checksums."""
    plain = {
        name: torch.empty((end - first, *column.shape), dtype=DTYPES[column.dtype])
        for name, column in schema.items()
        if not column.ragged
    }
    pieces: dict[str, list[Ragged]] = {name: [] for name in schema if name not in plain}
    for segment in segments:
        low, high = max(first, segment.first), min(end, segment.end)
        if low >= high:
            continue
        whole = segment.rows == high - low
        targets = {name: column[low - first : high - first] for name, column in plain.items()}
        for name, column in segment.read(targets if whole else {}).items():
            if isinstance(column, Ragged):
                pieces[name].append(cut(column, low - segment.first, high - segment.first))
            elif not whole:
                targets[name].copy_(column[low - segment.first : high - segment.first])
    ragged = {name: join(parts, schema[name]) for name, parts in pieces.items()}
    return {name: ragged[name] if name in ragged else plain[name] for name in schema}


def page_stretches(rows: Ints, size: int, first: int = 0) -> list[tuple[int, int]]:
    """Positions and lengths, in bytes, of the stretches of a map that hold rows; they begin at pages.

    Args:
        rows: int64, ascending.
        size: bytes of one row.
        first: position of row 0 in the map.

    >>> page_stretches(np.array([0, 1, 9000]), 8)
    [(0, 16), (69632, 2376)]
    """
    if not len(rows) or not size:
        return []
    # Rows that are less than a page apart are one stretch.
    gaps = np.flatnonzero(np.diff(rows) > 1 + mmap.PAGESIZE // size)
    begins = (first + rows[np.concatenate([[0], gaps + 1])] * size) // mmap.PAGESIZE * mmap.PAGESIZE
    ends = first + (rows[np.concatenate([gaps, [len(rows) - 1]])] + 1) * size
    return list(zip(begins.tolist(), (ends - begins).tolist(), strict=True))


def encode_segment(name: RowsName, parts: Sequence[Mapping[str, Column]]) -> tuple[Header, list[Buffer]]:
    """The header and bytes of a file of rows that has the rows of several parts end to end."""
    pieces: dict[str, list[Tensor]] = {}
    ragged: list[str] = []
    for column, example in parts[0].items():
        columns = [part[column] for part in parts]
        if isinstance(example, Ragged):
            ragged.append(column)
            pieces[column] = [piece.values for piece in columns if isinstance(piece, Ragged)]
            pieces[column + LENGTHS] = [piece.lengths for piece in columns if isinstance(piece, Ragged)]
        else:
            pieces[column] = [piece for piece in columns if isinstance(piece, Tensor)]
    metadata = {
        "format": str(FORMAT),
        "first": str(name.first),
        "end": str(name.end),
        "ragged": json.dumps(ragged),
    }
    return tensor_file.encode(pieces, metadata)


def chain_of_names(names: Iterable[RowsName], first: int | None = None) -> list[RowsName]:
    """Choose files that have rows end to end: from row ``first`` (default: the lowest) to the first hole.

    Of files that begin at the same row the longest counts, so files inside larger ones do not.

    >>> a, b, c, d = (RowsName(*rows, "0badcafe", 1) for rows in [(0, 9), (0, 4), (4, 9), (12, 15)])
    >>> chain_of_names([b, c, a, d]) == [a]
    True
    """
    longest: dict[int, RowsName] = {}
    for name in sorted(names):
        longest[name.first] = name  # sorted by end: the longest comes last
    position = min(longest, default=0) if first is None else first
    chain = []
    while position in longest:
        chain.append(longest[position])
        position = longest[position].end
    return chain


def _schema_of(header: Header, rows: int) -> Schema:
    """The columns of a file of ``rows`` rows."""
    try:
        if header.metadata["format"] != str(FORMAT):
            raise DamagedFileError(f"format {header.metadata['format']}, known here is {FORMAT}")
        ragged = set(json.loads(header.metadata["ragged"]))
    except (KeyError, ValueError, TypeError) as error:
        raise DamagedFileError(f"no file of rows: {error}") from None
    schema: Schema = {}
    for name, entry in header.entries.items():
        if not entry.shape or (name not in ragged and entry.shape[0] != rows):
            raise DamagedFileError(f"{name!r} has shape {list(entry.shape)}, expected {rows} rows")
        if not name.endswith(LENGTHS):
            schema[name] = ColumnSchema(dtype_name(entry.dtype), entry.shape[1:], name in ragged)
    lengths = {name + LENGTHS for name in ragged}
    if {*schema, *lengths} != set(header.entries) or not ragged <= set(schema):
        raise DamagedFileError("ragged columns and their lengths do not fit")
    if any(
        header.entries[name].shape != (rows,) or header.entries[name].dtype != torch.int64 for name in lengths
    ):
        raise DamagedFileError("lengths of ragged columns are no int64 per row")
    return schema


def _assembled(schema: Schema, tensors: Mapping[str, Tensor]) -> dict[str, Column]:
    """The columns that the tensors of a file make."""
    columns: dict[str, Column] = {}
    for name, column in schema.items():
        values = tensors[name]
        if not column.ragged:
            columns[name] = values
            continue
        lengths = tensors[name + LENGTHS]
        # The sum cannot overflow once no length is above the number of values.
        if bool(((lengths < 0) | (lengths > len(values))).any()) or int(lengths.sum()) != len(values):
            raise DamagedFileError(f"the lengths of {name!r} do not add up to its {len(values)} values")
        columns[name] = Ragged(values, lengths)
    return columns
