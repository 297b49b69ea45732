"""A version of everything, as one small JSON file: which files it has, what their columns are, and its state."""

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from flatroll.disk import files
from flatroll.disk.columns import ColumnSchema, Schema
from flatroll.disk.names import DTYPES, FORMAT, MOST_ROWS, FileRecord, RowsName, is_state, manifest_name
from flatroll.disk.tensor_file import MOST_DIMENSIONS, DamagedFileError, opened

#: What JSON can say.
Json: TypeAlias = Any
#: What a folder may need of its reader. A later version of the package that stores something in a new way adds a word
#: here, and older ones refuse such folders.
KNOWN_NEEDS = frozenset({"ragged", "xxh64"})
MOST_BYTES = 64 << 20
DEEPEST = 64
installed = cache(version)  # reading a package's metadata takes longer than writing a manifest
_BEFORE_CHECKSUM = b'{"checksum":"'
_NO_CHECKSUM = "00000000"


class Version(NamedTuple):
    """Which version of a folder: its number, and the line of runs that wrote it."""

    number: int
    line: str


@dataclass(frozen=True)
class Manifest:
    """What a manifest says.

    Args:
        version: number and line.
        head: number of the first row of the version.
        end: number of its last row, plus 1.
        rows: its files of rows, in order, end to end; the first may begin before ``head``.
        state: its file of tensors, if any.
        columns: its columns by name.
        tree: the JSON part of its state.
        extra: what else its writer noted.
        needs: what a reader must know.
        written_by: the version of the package.
    """

    version: Version
    head: int
    end: int
    rows: tuple[FileRecord, ...]
    state: FileRecord | None
    columns: Schema
    tree: Json
    extra: Json
    needs: tuple[str, ...] = ()
    written_by: str = field(default_factory=lambda: installed("flatroll"))

    @property
    def names(self) -> set[str]:
        """The files of the version, its manifest included."""
        named = [*self.rows, *([] if self.state is None else [self.state])]
        return {manifest_name(self.version.number), *(record.name for record in named)}

    @property
    def size(self) -> int:
        """Bytes of the files of rows and tensors."""
        return sum(record.size for record in (*self.rows, *([] if self.state is None else [self.state])))

    def encode(self) -> bytes:
        """The bytes of the file.

        Raises:
            TypeError: ``tree`` or ``extra`` is more than JSON can say.
            ValueError: they hold NaN or infinity, are nested too deeply, or are too large.
        """
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields = {"checksum": _NO_CHECKSUM, "format": FORMAT, **own}
        fields["version"], fields["line"] = self.version
        if (deepest := depth(fields)) > DEEPEST:
            raise ValueError(f"the JSON part of a state may be nested {DEEPEST} deep, got {deepest}")
        text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > MOST_BYTES:
            raise ValueError(
                f"a manifest has at most {MOST_BYTES:,} bytes, got {len(text):,}: put more into tensors"
            )
        at = len(_BEFORE_CHECKSUM)
        return text[:at] + f"{zlib.crc32(text):08x}".encode() + text[at + len(_NO_CHECKSUM) :]


def read_manifest(folder: Path, number: int) -> Manifest:
    """Read and check the manifest of a version.

    Raises:
        DamagedFileError: it is missing, or not what was written.
        ValueError: it is of a later format, or needs something that is not known here.
    """
    name = manifest_name(number)
    with opened(folder, name) as (descriptor, size):
        if size > MOST_BYTES:
            raise DamagedFileError(f"{size:,} bytes, where {MOST_BYTES:,} are the most")
        text = bytearray(size)
        files.read_into(descriptor, 0, text)
        fields = _decode(bytes(text))
        _check_readable(folder, fields)
        try:
            manifest = _from_fields(fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFileError(f"it says nothing sensible: {error}") from None
        if manifest.version.number != number:
            raise DamagedFileError(f"it is of version {manifest.version.number}")
        return manifest


def depth(value: Json) -> int:
    """How deeply lists and dicts are nested, without recursion.

    >>> depth(3), depth([]), depth({"a": [1, [2]]})
    (0, 1, 3)
    """
    level, deepest = [value], -1
    while level and deepest <= DEEPEST + 1:
        inner: list[Json] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values() or [None])
            elif isinstance(item, (list, tuple)):
                inner.extend(item or [None])
        level, deepest = inner, deepest + 1
    return deepest


def _decode(text: bytes) -> dict[str, Json]:
    """The fields of a manifest's bytes."""
    at = len(_BEFORE_CHECKSUM)
    end = at + len(_NO_CHECKSUM)
    checksum = zlib.crc32(text[:at] + _NO_CHECKSUM.encode() + text[end:])
    if not text.startswith(_BEFORE_CHECKSUM) or text[at:end] != f"{checksum:08x}".encode():
        raise DamagedFileError("its checksum is wrong")
    try:
        fields = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"it is no JSON: {error}") from None
    if depth(fields) > DEEPEST:
        raise DamagedFileError(f"it is nested more than {DEEPEST} deep")
    return dict(fields)


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


def _check_readable(folder: Path, fields: Mapping[str, Json]) -> None:
    """ValueError if a later version of the package is needed."""
    unknown = sorted(set(map(str, fields.get("needs", ()))) - KNOWN_NEEDS)
    if fields.get("format") == FORMAT and not unknown:
        return
    wrong = f"needs {', '.join(unknown)}, unknown here"
    if fields.get("format") != FORMAT:
        wrong = f"has format {fields.get('format')!r}, known here is {FORMAT}"
    later = f"install flatroll {fields.get('written_by')} or later (this is {installed('flatroll')})"
    raise ValueError(f"{folder} {wrong}: {later}")


def _from_fields(fields: Mapping[str, Json]) -> Manifest:
    """The manifest with these fields; ValueError, KeyError or TypeError if they make no sense."""
    head, end = _count(fields["head"]), _count(fields["end"])
    rows = tuple(_record(values) for values in fields["rows"])
    position: int | None = None
    for record in rows:
        name = RowsName.parse(record.name)
        if name is None or position not in (None, name.first):
            raise ValueError(f"no file of rows after row {position}: {record.name!r}")
        position = name.end
    first = RowsName.parse(rows[0].name) if rows else None
    if (head, end) != (head, position if rows else head) or (
        first is not None and not first.first <= head <= end
    ):
        raise ValueError(f"rows {head} to {end}, but files to {position}")
    state = None if fields["state"] is None else _record(fields["state"])
    if state is not None and not is_state(state.name):
        raise ValueError(f"no file of tensors: {state.name!r}")
    return Manifest(
        version=Version(_count(fields["version"]), str(fields["line"])),
        head=head,
        end=end,
        rows=rows,
        state=state,
        columns=_schema(fields["columns"]),
        tree=fields["tree"],
        extra=fields["extra"],
        needs=tuple(fields["needs"]),
        written_by=str(fields["written_by"]),
    )


def _record(values: Iterable[Json]) -> FileRecord:
    name, size, checksum = values
    return FileRecord(str(name), _count(size, 2**63), _count(checksum, 2**32))


def _schema(fields: Mapping[str, Json]) -> Schema:
    columns: Schema = {}
    for name, (dtype, shape, ragged) in fields.items():
        if dtype not in DTYPES or len(shape) >= MOST_DIMENSIONS or not isinstance(ragged, bool):
            raise ValueError(f"column {name!r}: {dtype}, {shape}, {ragged}")
        columns[name] = ColumnSchema(dtype, tuple(_count(n) for n in shape), ragged)
    return columns


def _count(value: Json, below: int = MOST_ROWS) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{value!r} is no number from 0 to {below - 1}")
    return value
