"""Names of files in a folder, and of columns and dtypes in files."""

import re
from typing import NamedTuple
from urllib.parse import unquote

import torch

from flatroll.disk.files import TEMPORARY
from flatroll.layout.keys import NestedKey, as_tuple, plain_key

LOCK = "lock"
#: Of files and folders; a reader refuses others.
FORMAT = 1
_ROWS = re.compile(r"([0-9]{15})-([0-9]{15})\.([0-9a-f]{8})-([0-9a-f]{1,8})\.rows")
_STATE = re.compile(r"state-([0-9]{12})\.([0-9a-f]{8})\.state")
_MANIFEST = re.compile(r"manifest-([0-9]{12})\.json")
#: Rows are counted below this, since their numbers have 15 digits in names.
MOST_ROWS = 10**15
#: What ends the name of the tensor that says how many values each row of a ragged column has.
LENGTHS = "#lengths"
#: What the format calls a dtype. What is missing here is stored as one of these, and declared in the metadata.
STORED = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
#: Complex numbers are stored as pairs (a last dimension of 2), the small floats as their bytes.
DECLARED = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}
#: Dtypes by that name.
BY_STORED = {name: dtype for dtype, name in STORED.items()}
#: All of them by torch's name, such as ``"float32"``.
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*STORED, *DECLARED)}


class RowsName(NamedTuple):
    """The name of a file of rows ``[first, end)``: who wrote it, and which of the writer's files it is.

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
        """Read a name; None if it is no name of a file of rows."""
        match = _ROWS.fullmatch(name)
        if match is None or int(match[1]) >= int(match[2]):
            return None
        return cls(int(match[1]), int(match[2]), match[3], int(match[4], 16))


class FileRecord(NamedTuple):
    """A file that a version names: name, size in bytes, checksum of its header (which has those of its tensors)."""

    name: str
    size: int
    checksum: int


def state_name(version: int, line: str) -> str:
    """The name of a version's file of tensors."""
    return f"state-{version:012d}.{line}.state"


def manifest_name(version: int) -> str:
    """The name of a version's manifest."""
    return f"manifest-{version:012d}.json"


def version_of_manifest(name: str) -> int | None:
    """The version whose manifest has this name; None if it is no name of a manifest.

    >>> version_of_manifest("manifest-000000000042.json")
    42
    """
    match = _MANIFEST.fullmatch(name)
    return None if match is None else int(match[1])


def is_state(name: str) -> bool:
    """Whether this is the name of a file of tensors."""
    return _STATE.fullmatch(name) is not None


def is_own(name: str) -> bool:
    """Whether a file of this name belongs to a folder of rows and versions."""
    name = name.removesuffix(TEMPORARY)
    return (
        name == LOCK
        or is_state(name)
        or version_of_manifest(name) is not None
        or RowsName.parse(name) is not None
    )


def column_name(key: NestedKey) -> str:
    """Write a nested key as one string: its parts joined by ``/``, with ``%``, ``/`` and ``#`` in parts escaped.

    >>> column_name("reward"), column_name(("next", "obs/left"))
    ('reward', 'next/obs%2Fleft')
    """
    parts = [part.replace("%", "%25").replace("/", "%2F").replace("#", "%23") for part in as_tuple(key)]
    name = "/".join(parts)
    return "%5F_metadata__" if name == "__metadata__" else name  # safetensors has another use for that name


def column_key(name: str) -> NestedKey:
    """Read what `column_name` wrote.

    >>> column_key("reward"), column_key("next/obs%2Fleft")
    ('reward', ('next', 'obs/left'))
    """
    return plain_key(tuple(unquote(part) for part in name.split("/")))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``"float32"``; TypeError if files cannot hold it."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"cannot store {dtype}; what can be stored: {', '.join(DTYPES)}")
    return name


def stored_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which a file holds another."""
    dtype_name(dtype)
    return DECLARED.get(dtype, dtype)
