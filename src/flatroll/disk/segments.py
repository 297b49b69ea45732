"""Rows on disk: columns, and immutable files of rows ``[first, end)``, which are read or mapped."""

import errno
import json
import mmap
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import Buffer

from flatroll.disk import files, tensor_file
from flatroll.disk.tensor_file import DTYPES, DamagedFileError, Header, MissingFileError, dtype_name, opened
from flatroll.layout.checks import as_text
from flatroll.layout.keys import NestedKey, as_tuple, plain_key

#: Format of files and folders; a reader refuses others.
FORMAT = 1
#: Suffix of the tensor with the number of values per row of a ragged column.
LENGTHS = "#lengths"
#: Row numbers are below this limit, since file names have 15 digits for them.
MOST_ROWS = 10**15
#: The random word in file names that separates independent runs.
LINE = r"[0-9a-f]{8}"
_ROWS = re.compile(rf"([0-9]{{15}})-([0-9]{{15}})\.({LINE})-([0-9a-f]{{1,8}})\.rows")
Ints = npt.NDArray[np.int64]
#: Errors after which a file is copied instead of linked: another disk, no link support, too many links, a removed
#: file.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.ENOENT)


class RowsName(NamedTuple):
    """The name of a file of rows ``[first, end)``, with its writer and file number.

    >>> str(RowsName(0, 20, "0badcafe", 1))
    '000000000000000-000000000000020.0badcafe-1.rows'
    >>> RowsName.parse('000000000000000-000000000000020.0badcafe-1.rows')
    RowsName(first=0, end=20, line='0badcafe', number=1)
    """

    first: int
    end: int
    line: str
    number: int

    def __str__(self) -> str:
        return f"{self.first:015d}-{self.end:015d}.{self.line}-{self.number:x}.rows"

    @classmethod
    def parse(cls, name: str) -> "RowsName | None":
        """Parse a name; None if it is not that of a file of rows."""
        match = _ROWS.fullmatch(name)
        if match is None or int(match[1]) >= int(match[2]):
            return None
        return cls(int(match[1]), int(match[2]), match[3], int(match[4], 16))


class FileRecord(NamedTuple):
    """A file of a version: name, size in bytes, checksum of its header (which contains those of its tensors)."""

    name: str
    size: int
    checksum: int


def column_name(key: NestedKey) -> str:
    """Write a nested key as one string: its parts joined by ``/``, with ``%``, ``/`` and ``#`` in parts escaped; an
    empty part is ``%``.

    >>> column_name("reward"), column_name(("next", "obs/left"))
    ('reward', 'next/obs%2Fleft')
    """
    parts = [
        part.replace("%", "%25").replace("/", "%2F").replace("#", "%23") or "%" for part in as_tuple(key)
    ]
    name = "/".join(parts)
    # safetensors has another use for that name
    if name == "__metadata__":
        return "%5F_metadata__"
    return name


def column_key(name: str) -> NestedKey:
    """Invert `column_name`.

    >>> column_key("reward"), column_key("next/obs%2Fleft")
    ('reward', ('next', 'obs/left'))
    """
    return plain_key(tuple("" if part == "%" else unquote(part) for part in name.split("/")))


class Ragged(NamedTuple):
    """A column whose rows have variable numbers of values: text, compressed frames, frames added by a row.

    Args:
        values: ``[M, ...]``, the values of all rows end to end.
        lengths: int64 ``[N]``, how many each row has; they add up to M. So the columns of two segments are joined by
            joining both tensors.
    """

    values: Tensor
    lengths: Tensor


#: A column of N rows: a tensor ``[N, ...]``, or a `Ragged`.
Column: TypeAlias = Tensor | Ragged


class ColumnSchema(NamedTuple):
    """The dtype and shape of a column.

    Args:
        dtype: its name, such as ``"float32"``.
        shape: of one row's value; of one value if ragged.
        ragged: whether rows have any number of values.
    """

    dtype: str
    shape: tuple[int, ...]
    ragged: bool = False

    def __str__(self) -> str:
        return f"{'ragged ' * self.ragged}{self.dtype} {list(self.shape)}"


Schema: TypeAlias = dict[str, ColumnSchema]


def make_schema(columns: Mapping[str, Column]) -> Schema:
    """Return the schema of columns; TypeError if a file cannot store one of their dtypes."""
    schema: Schema = {}
    for name, column in columns.items():
        ragged = isinstance(column, Ragged)
        values = column.values if isinstance(column, Ragged) else column
        schema[name] = ColumnSchema(dtype_name(values.dtype), tuple(values.shape[1:]), ragged)
    return schema


class Size(NamedTuple):
    """The number of rows and the bytes of their columns."""

    rows: int
    bytes: int


def check_columns(columns: Mapping[str, Column]) -> Size:
    """Return the size of columns of equal length.

    Raises:
        ValueError: there is no column, their numbers of rows differ, or the lengths of a ragged one do not match.
        TypeError: a name is not a string, or a column is not a tensor.
    """
    if not isinstance(columns, Mapping):
        raise TypeError(f"columns must be a dict of tensors or Ragged by name, got {as_text(columns)}")
    counts: dict[str, int | None] = {}
    size = 0

    for name, column in columns.items():
        if not isinstance(name, str):
            raise TypeError(f"names of columns must be strings, got {name!r}: column_name converts a key")
        if name.endswith(LENGTHS) or name in ("", "__metadata__"):
            raise ValueError(
                f"a column cannot be called {name!r}: column_name makes a valid name for any key"
            )

        rows = column.lengths if isinstance(column, Ragged) else column
        if not isinstance(rows, Tensor):
            raise TypeError(f"column {name!r} must be a tensor or Ragged, got {type(column).__name__}")
        if isinstance(column, Ragged):
            values = column.values.shape[0] if column.values.dim() else -1
            if rows.dtype != torch.int64 or rows.dim() != 1 or values < 0:
                raise ValueError(f"ragged column {name!r} must have values [M, ...] and lengths int64 [N]")
            if bool((rows < 0).any()) or int(rows.sum()) != values:
                raise ValueError(f"the lengths of ragged column {name!r} must add up to its {values} values")
            size += column.values.nbytes
        elif rows.layout is not torch.strided:
            raise TypeError(f"column {name!r} must be dense, got layout {rows.layout}")

        counts[name] = rows.shape[0] if rows.dim() else None
        size += rows.nbytes

    sizes = set(counts.values())
    if len(sizes) != 1 or None in sizes:
        raise ValueError(f"columns must have the same number of rows, got {counts}")
    return Size(sizes.pop() or 0, size)


def difference(expected: Schema, got: Schema) -> str:
    """Describe how columns differ from the expected ones.

    >>> print(difference({"x": ColumnSchema("float32", (3,))}, {"x": ColumnSchema("float64", (3,))}))
    'x' is float64 [3], expected float32 [3]
    """
    missing = [f"{name!r} is missing" for name in expected if name not in got]
    added = [f"{name!r} is new" for name in got if name not in expected]
    changed = [
        f"{name!r} is {got[name]}, expected {column}"
        for name, column in expected.items()
        if name in got and got[name] != column
    ]
    return ", ".join([*missing, *added, *changed])


class Segment:
    """A file of rows: its header is checked, and its rows are read or memory-mapped.

    Args:
        folder: where it is.
        name: of the file.
        header: of the file.

    Attributes:
        first: number of its first row.
        end: number of the row after its last one.
        rows: how many it has.
        schema: what its columns hold, by name.
        record: what a manifest says of the file.
        needs: what a reader of the file must know.

    Raises:
        DamagedFileError: the header does not fit the name.
    """

    def __init__(self, folder: Path, name: RowsName, header: Header) -> None:
        self.folder = folder
        self.name = name
        self.header = header
        self.first = name.first
        self.end = name.end
        self.rows = name.end - name.first
        self.record = FileRecord(str(name), header.size, header.checksum)
        self.schema: Schema = {}

        try:
            if header.metadata["format"] != str(FORMAT):
                raise DamagedFileError(f"format {header.metadata['format']}, this version reads {FORMAT}")
            ragged = set(json.loads(header.metadata["ragged"]))
        except (KeyError, ValueError, TypeError) as error:
            raise DamagedFileError(f"not a file of rows: {error}") from None

        entries = header.entries
        for column, entry in entries.items():
            if not entry.shape or (column not in ragged and entry.shape[0] != self.rows):
                raise DamagedFileError(f"{column!r} has shape {list(entry.shape)}, expected {self.rows} rows")
            if not column.endswith(LENGTHS):
                kind = ColumnSchema(dtype_name(entry.dtype), entry.shape[1:], column in ragged)
                self.schema[column] = kind

        lengths = {column + LENGTHS for column in ragged}
        if {*self.schema, *lengths} != set(entries) or not ragged <= set(self.schema):
            raise DamagedFileError("ragged columns do not match their lengths")
        if any(entries[n].shape != (self.rows,) or entries[n].dtype != torch.int64 for n in lengths):
            raise DamagedFileError("lengths of ragged columns are not int64 per row")

        self.needs = header.needs
        if ragged:
            self.needs.add("ragged")

    @classmethod
    def open(
        cls, folder: Path, name: RowsName, record: FileRecord | None = None, *, mapped: bool
    ) -> "Segment":
        """Open a file and check its header, also against ``record`` if given; map the file if ``mapped``.

        Raises:
            DamagedFileError: it is missing, or not what was written.
        """
        with opened(folder, str(name)) as (descriptor, size):
            header = tensor_file.read_header(descriptor, size)
            if record is not None and (header.size, header.checksum) != (record.size, record.checksum):
                raise DamagedFileError("it is not the file that its version refers to")
            segment = cls(folder, name, header)
            if mapped:
                segment._maps = tensor_file.map_tensors(descriptor, header)
            return segment

    @property
    def size(self) -> int:
        """Size of the file, in bytes."""
        return self.header.size

    @property
    def contents(self) -> tuple[int, ...]:
        """First row, end row, size in bytes and checksum of the header: equal for files of the same rows."""
        return (*self.name[:2], *self.record[1:])

    @cached_property
    def _maps(self) -> tuple[Tensor, dict[str, Tensor]]:
        with opened(self.folder, str(self.name)) as (descriptor, size):
            if size != self.header.size:
                raise DamagedFileError(f"it has {size} bytes, expected {self.header.size}")
            return tensor_file.map_tensors(descriptor, self.header)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns by name, in mapped memory: no descriptor stays open, and the rows are not checked.

        The map is valid as long as one of the tensors exists, even after the file is removed. What is written into
        them stays in this process, and never goes to the file.
        """
        return _assemble(self.schema, self._maps[1])

    def read(
        self, targets: Mapping[str, Tensor] | None = None, names: Collection[str] | None = None
    ) -> dict[str, Column]:
        """Read all rows, with checksums, into new memory.

        Args:
            targets: name to a contiguous tensor ``[rows, ...]``, into which a column of its dtype and shape is read
                instead; others are left alone.
            names: read only these columns. Default: all.

        Raises:
            DamagedFileError: they are not those that were written.
        """
        schema = {name: self.schema[name] for name in self.schema if names is None or name in names}
        entries = {
            name: entry for name, entry in self.header.entries.items() if name.removesuffix(LENGTHS) in schema
        }
        targets = {
            name: target
            for name, target in (targets or {}).items()
            if self.schema.get(name) == (str(target.dtype).removeprefix("torch."), target.shape[1:], False)
        }

        try:
            with opened(self.folder, str(self.name)) as (descriptor, _):
                tensors = {
                    name: tensor_file.read_tensor(descriptor, name, entry, targets.get(name))
                    for name, entry in entries.items()
                }
        except MissingFileError:
            if "_maps" not in self.__dict__:
                raise
            # A writer has removed the file meanwhile; the map still holds it.
            tensors = {name: self._maps[1][name].clone() for name in entries}
            for name, tensor in tensors.items():
                tensor_file.check_bytes(name, entries[name], tensor_file.as_bytes(tensor))
                if name in targets:
                    targets[name].copy_(tensor)

        return _assemble(schema, tensors)

    def share(self, folder: Path, name: RowsName, *, synced: bool) -> "Segment":
        """Link the file into another folder; copy it to another disk, or if it was removed since it was mapped.

        The folder is not synced: one sync does for several files.
        """
        try:
            files.link(self.folder / str(self.name), folder / str(name))
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            files.publish(folder, str(name), [self._maps[0].numpy().data], synced=synced, named=False)
        else:
            if synced:  # the writer of the linked file may not have synced it
                files.sync_all(folder / str(name))
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
        """Whether a row, counted from the first of the segment, is probably in memory: if its largest column is."""
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


def damaged_rows(segments: Iterable[Segment]) -> list[str]:
    """Read all rows of the files; return one line per damaged file."""
    damage = []
    for segment in segments:
        try:
            segment.read()
        except DamagedFileError as error:
            damage.append(str(error))
    return damage


def read_range(segments: Iterable[Segment], schema: Schema, first: int, end: int) -> dict[str, Column]:
    """Read rows ``[first, end)``, which the segments have, into new memory, with checksums."""
    plain = {
        name: torch.empty((end - first, *column.shape), dtype=DTYPES[column.dtype])
        for name, column in schema.items()
        if not column.ragged
    }
    pieces: dict[str, list[Ragged]] = {name: [] for name in schema if name not in plain}

    for segment in segments:
        low = max(first, segment.first)
        high = min(end, segment.end)
        if low >= high:
            continue

        begin = low - segment.first
        stop = high - segment.first
        whole = segment.rows == high - low
        targets = {name: column[low - first : high - first] for name, column in plain.items()}
        read_into = targets if whole else {}
        for name, column in segment.read(read_into, schema).items():
            if isinstance(column, Ragged):
                ends = column.lengths.cumsum(0)
                at = int(ends[begin - 1]) if begin else 0
                pieces[name].append(
                    Ragged(column.values[at : int(ends[stop - 1])], column.lengths[begin:stop])
                )
            elif not whole:
                targets[name].copy_(column[begin:stop])

    columns: dict[str, Column] = {}
    for name, column_schema in schema.items():
        if name in plain:
            columns[name] = plain[name]
            continue

        values = [piece.values for piece in pieces[name]]
        lengths = [piece.lengths for piece in pieces[name]]

        columns[name] = Ragged(
            torch.cat(values or [torch.empty((0, *column_schema.shape), dtype=DTYPES[column_schema.dtype])]),
            torch.cat(lengths or [torch.empty(0, dtype=torch.int64)]),
        )
    return columns


def page_stretches(rows: Ints, size: int, first: int = 0) -> list[tuple[int, int]]:
    """Return the position and length, in bytes, of each stretch of a map that holds rows; each begins at a page.

    Args:
        rows: int64, ascending.
        size: bytes of one row.
        first: position of row 0 in the map.

    >>> page_stretches(np.array([0, 1, 9000]), 8)
    [(0, 16), (69632, 2376)]
    """
    if not len(rows) or not size:
        return []

    # Rows less than a page apart form one stretch.
    gaps = np.flatnonzero(np.diff(rows) > 1 + mmap.PAGESIZE // size)
    begins = (first + rows[np.concatenate([[0], gaps + 1])] * size) // mmap.PAGESIZE * mmap.PAGESIZE
    ends = first + (rows[np.concatenate([gaps, [len(rows) - 1]])] + 1) * size
    return list(zip(begins.tolist(), (ends - begins).tolist(), strict=True))


def encode_segment(name: RowsName, parts: Sequence[Mapping[str, Column]]) -> tuple[Header, list[Buffer]]:
    """Return the header and the bytes of a file that holds the rows of several parts, end to end."""
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
    """Choose contiguous files from row ``first`` (default: the lowest) to the first gap.

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


def _assemble(schema: Schema, tensors: Mapping[str, Tensor]) -> dict[str, Column]:
    """Assemble a file's tensors into columns."""
    columns: dict[str, Column] = {}
    for name, column in schema.items():
        values = tensors[name]
        if not column.ragged:
            columns[name] = values
            continue

        lengths = tensors[name + LENGTHS]
        # The sum cannot overflow: no length exceeds the number of values.
        if bool(((lengths < 0) | (lengths > len(values))).any()) or int(lengths.sum()) != len(values):
            raise DamagedFileError(f"the lengths of {name!r} do not add up to its {len(values)} values")
        columns[name] = Ragged(values, lengths)
    return columns
