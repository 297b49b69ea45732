"""The manifest of a version, a small JSON file: its files, their columns, and its state."""

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from flatroll.disk import files
from flatroll.disk.segments import FORMAT, LINE, MOST_ROWS, ColumnSchema, FileRecord, RowsName, Schema
from flatroll.disk.tensor_file import DTYPES, MOST_DIMENSIONS, DamagedFileError, opened

#: A JSON value.
Json: TypeAlias = Any
#: Features that a folder may require of its reader. A later version of the package with a new storage format adds a
#: word here, and older versions refuse such folders.
KNOWN_NEEDS = frozenset({"ragged", "xxh64"})
MOST_BYTES = 64 << 20
DEEPEST = 64
#: The manifest name of a version number, and the pattern of such names.
manifest_name = "manifest-{:012d}.json".format
MANIFEST = re.compile(r"manifest-([0-9]{12})\.json")
#: The name of the tensor file of a version number and line, and the pattern of such names.
state_name = "state-{:012d}.{}.state".format
STATE = re.compile(rf"state-[0-9]{{12}}\.{LINE}\.state")
installed = cache(version)  # reading a package's metadata takes longer than writing a manifest
_BEFORE_CHECKSUM = b'{"checksum":"'
_NO_CHECKSUM = "00000000"


class LaterFormatError(ValueError):
    """A folder was written by a later version of the package."""


class Version(NamedTuple):
    """The number of a version, and the id of the line of runs that wrote it, each continuing the previous one."""

    number: int
    line: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.

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
    written_by: str = field(default_factory=partial(installed, "flatroll"))

    @property
    def names(self) -> set[str]:
        """The files of the version, its manifest included."""
        named = {record.name for record in self.rows}
        if self.state is not None:
            named.add(self.state.name)
        return {manifest_name(self.version.number), *named}

    @property
    def size(self) -> int:
        """Bytes of the files of rows and tensors."""
        total = sum(record.size for record in self.rows)
        if self.state is not None:
            total += self.state.size
        return total

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
    """Read and check the manifest of a version; nothing in it is trusted.

    Raises:
        DamagedFileError: it is missing, or not what was written.
        ValueError: it is of a later format, or needs something that is not known here.
    """
    with opened(folder, manifest_name(number)) as (descriptor, size):
        if size > MOST_BYTES:
            raise DamagedFileError(f"{size:,} bytes, more than the {MOST_BYTES:,} allowed")
        memory = bytearray(size)
        files.read_into(descriptor, 0, memory)
        text = bytes(memory)

        at = len(_BEFORE_CHECKSUM)
        end = at + len(_NO_CHECKSUM)
        checksum = zlib.crc32(text[:at] + _NO_CHECKSUM.encode() + text[end:])
        if not text.startswith(_BEFORE_CHECKSUM) or text[at:end] != f"{checksum:08x}".encode():
            raise DamagedFileError("its checksum is wrong")

        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(f"it is not JSON: {error}") from None
        if depth(fields) > DEEPEST:
            raise DamagedFileError(f"it is nested more than {DEEPEST} deep")

        try:
            needs = {str(need) for need in fields["needs"]}
            if fields["format"] != FORMAT or not needs <= KNOWN_NEEDS:
                wrong = f"needs {', '.join(sorted(needs - KNOWN_NEEDS))[:200]}, unknown here"
                if fields["format"] != FORMAT:
                    wrong = f"has format {str(fields['format'])[:40]}, this version reads {FORMAT}"
                later = f"install flatroll {str(fields['written_by'])[:40]} or later"
                raise LaterFormatError(f"{folder} {wrong}: {later} (this is {installed('flatroll')})")
            manifest = _from_fields(fields)
        except LaterFormatError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFileError(f"it cannot be understood: {str(error)[:200]}") from None

        if manifest.version.number != number:
            raise DamagedFileError(f"it is of version {manifest.version.number}")
        return manifest


def _from_fields(fields: Mapping[str, Json]) -> Manifest:
    """Parse a manifest from its fields; ValueError, KeyError or TypeError if they are invalid.

    Names and the line become paths, now or with the next save: they are those that this package gives.
    """
    head = _count(fields["head"])
    end = _count(fields["end"])
    number = _count(fields["version"])
    line = fields["line"]

    if not isinstance(line, str) or re.fullmatch(LINE, line) is None:
        raise ValueError(f"its line {line!r} is invalid")

    described = [*fields["rows"]]
    if fields["state"] is not None:
        described.append(fields["state"])
    records = [
        FileRecord(name, _count(size, 2**63), _count(checksum, 2**32)) for name, size, checksum in described
    ]
    state = None if fields["state"] is None else records.pop()

    if state is not None and state.name != state_name(number, line):
        raise ValueError(f"{state.name!r} is not the file of tensors of version {number} and line {line}")
    _check_rows(records, head, end)

    columns: Schema = {}
    for column, (dtype, shape, ragged) in fields["columns"].items():
        if dtype not in DTYPES or len(shape) >= MOST_DIMENSIONS or not isinstance(ragged, bool):
            raise ValueError(f"column {column!r} is described as {dtype}, {shape}, {ragged}")
        columns[column] = ColumnSchema(dtype, tuple(_count(n) for n in shape), ragged)

    return Manifest(
        version=Version(number, line),
        head=head,
        end=end,
        rows=tuple(records),
        state=state,
        columns=columns,
        tree=fields["tree"],
        extra=fields["extra"],
        needs=tuple(fields["needs"]),
        written_by=str(fields["written_by"]),
    )


def _check_rows(records: Iterable[FileRecord], head: int, end: int) -> None:
    """Raise ValueError unless these are files of rows, end to end, that hold ``[head, end)``."""
    first = 0
    position: int | None = None
    for record in records:
        name = RowsName.parse(record.name)
        if name is None or position not in (None, name.first):
            raise ValueError(f"{record.name!r} is not a file of rows from row {position} on")
        if position is None:
            first = name.first
        position = name.end

    reached = head if position is None else position
    if end != reached or not first <= head <= end:
        raise ValueError(f"rows {head} to {end}, but the files end at row {position}")


def _count(value: Json, below: int = MOST_ROWS) -> int:
    """Return ``value``, an integer from 0 to ``below - 1``; refuse anything else."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{value!r} is not a number from 0 to {below - 1}")
    return value


def depth(value: Json) -> int:
    """Return the nesting depth of lists and dicts, without recursion.

    >>> depth(3), depth([]), depth({"a": [1, [2]]})
    (0, 1, 3)
    """
    level = [value]
    deepest = -1
    while level and deepest <= DEEPEST + 1:
        inner: list[Json] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values() or [None])
            elif isinstance(item, (list, tuple)):
                inner.extend(item or [None])
        level = inner
        deepest = deepest + 1
    return deepest
