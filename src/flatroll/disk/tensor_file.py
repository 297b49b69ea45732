"""Safetensors files with checksums: header, writing, reading and mapping.

A file has 8 bytes with the length of its header, the header (JSON), and the tensors' bytes end to end. Any tool that
reads safetensors reads it. The header's metadata has the checksum of each tensor and, at a fixed place, the crc32 of
the header itself, so that every flipped bit is detected.

Source: the safetensors project's description of its format.
"""

import errno
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from typing_extensions import Buffer

from flatroll.disk import files

#: The format's names of dtypes. Other dtypes are stored as one of these and declared in the metadata.
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
#: All dtypes by torch's name, such as ``"float32"``.
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*STORED, *DECLARED)}
#: From this size on the checksum is XXH64, which is several times faster and needs compiled code.
LARGE = 1 << 18
CHECKSUMS = ("crc32", "xxh64")
MOST_HEADER = 16 << 20  # bytes of a header
MOST_DIMENSIONS = 32
_LENGTH = 8  # size in bytes of the field with the header's length
# Bytes read at a time, so that they are still in the cache when the checksum reads them.
_AT_ONCE = 1 << 20
_ALIGNED = 64  # the tensors' bytes begin at a multiple of this
# The header begins with these bytes and the 8 hexadecimal digits of its crc32 (computed with zeros there).
_BEFORE_CHECKSUM = b'{"__metadata__":{"checksum":"'
_NO_CHECKSUM = "00000000"


class DamagedFileError(ValueError):
    """A file does not contain what was written to it."""


class MissingFileError(DamagedFileError):
    """A required file is missing, perhaps removed by a writer after its name was read."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``"float32"``; TypeError if files cannot hold it."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"cannot store {dtype}; supported dtypes: {', '.join(DTYPES)}")
    return name


class Checksum(NamedTuple):
    """A checksum: its kind, ``"crc32"`` or ``"xxh64"``, and the number."""

    kind: str
    value: int


@dataclass(frozen=True)
class TensorEntry:
    """Position, dtype and shape of a tensor in a file.

    Args:
        dtype: of the tensor.
        shape: of the tensor.
        begin: position of its first byte in the file.
        size: number of bytes.
        checksum: of the bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    size: int
    checksum: Checksum


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Args:
        entries: position of each tensor by name.
        metadata: strings by name, without those that this module writes itself.
        checksum: crc32 of the header, which covers the tensors' checksums.
        size: size of the whole file in bytes.
    """

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    checksum: int
    size: int

    @property
    def needs(self) -> set[str]:
        """Checksums besides crc32 that a reader must support."""
        return {entry.checksum.kind for entry in self.entries.values()} - {"crc32"}


def encode(
    tensors: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, str]
) -> tuple[Header, list[Buffer]]:
    """Return the header and the bytes of a file.

    Args:
        tensors: the pieces of each tensor by name, which are concatenated along the first dimension. Contiguous pieces
            are not copied, so they must not change until the file is written.
        metadata: strings for the header.

    Raises:
        TypeError: files cannot store a tensor's dtype.

    >>> header, chunks = encode({"x": [torch.zeros(2, 3), torch.ones(1, 3)]}, {"by": "hand"})
    >>> header.entries["x"].shape, header.size == sum(memoryview(chunk).nbytes for chunk in chunks)
    ((3, 3), True)
    """
    data: list[Buffer] = []
    table: dict[str, dict[str, Any]] = {}
    found: dict[
        str, TensorEntry
    ] = {}  # offsets relative to the end of the header, whose length is not known yet
    sums: dict[str, dict[str, str]] = {"crc32": {}}
    declared: dict[str, str] = {}
    position = 0

    # Tensors with large words first, so that each is aligned to its word size.
    kinds = {name: DECLARED.get(pieces[0].dtype, pieces[0].dtype) for name, pieces in tensors.items()}
    for _, name in sorted((-kind.itemsize, name) for name, kind in kinds.items()):
        pieces = tensors[name]
        dtype = pieces[0].dtype
        shape = tuple(pieces[0].shape)
        called = dtype_name(dtype)
        if len(pieces) > 1:
            shape = (sum(len(piece) for piece in pieces), *shape[1:])

        views = [as_bytes(piece) for piece in pieces]
        data.extend(views)
        size = sum(map(len, views))
        algorithm = "crc32"
        if size >= LARGE:
            algorithm = "xxh64"
        checksum = compute_checksum(algorithm, views)

        if dtype in DECLARED:
            declared[name] = called
        stored_shape = list(shape)
        if dtype.is_complex:
            stored_shape.append(2)
        table[name] = {
            "dtype": STORED[kinds[name]],
            "shape": stored_shape,
            "data_offsets": [position, position + size],
        }
        found[name] = TensorEntry(dtype, shape, position, size, checksum)
        sums.setdefault(checksum.kind, {})[name] = f"{checksum.value:08x}"
        position += size

    own = {"checksum": _NO_CHECKSUM, "dtypes": json.dumps(declared)}
    own |= {kind: json.dumps(by_name) for kind, by_name in sums.items()}
    text = json.dumps({"__metadata__": {**own, **metadata}, **table}, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH + len(text)) % _ALIGNED)

    crc = zlib.crc32(text)
    at = len(_BEFORE_CHECKSUM)
    first = _LENGTH + len(text)
    text = text[:at] + f"{crc:08x}".encode() + text[at + len(_NO_CHECKSUM) :]

    entries = {name: replace(entry, begin=first + entry.begin) for name, entry in found.items()}
    header = Header(entries, dict(metadata), crc, first + position)
    return header, [len(text).to_bytes(_LENGTH, "little") + text, *data]


def compute_checksum(kind: str, pieces: Iterable[memoryview]) -> Checksum:
    """An incremental checksum.

    >>> compute_checksum("xxh64", [memoryview(b"ab"), memoryview(b"c")]).value == 0x44BC2CF5AD770999
    True
    """
    if kind == "crc32":
        value = 0
        for piece in pieces:
            value = zlib.crc32(piece, value)
        return Checksum(kind, value)

    large = xxhash.xxh64()
    for piece in pieces:
        large.update(piece)
    return Checksum(kind, large.intdigest())


@contextmanager
def opened(folder: Path, name: str) -> Iterator[tuple[int, int]]:
    """Context manager: open a file of a folder; yield descriptor and size. Errors about its contents name it.

    Raises:
        DamagedFileError: the file is missing, not a regular file, unreadable, or the block raises this error.
    """
    try:
        descriptor, size = files.open_to_read(folder / name)
        try:
            yield descriptor, size
        finally:
            files.close(descriptor)
    except FileNotFoundError:
        raise MissingFileError(f"{name} is missing") from None
    except DamagedFileError as error:
        raise type(error)(f"{name}: {str(error)[:400]}") from None  # a name in it may be of any length
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EIO, errno.ENXIO):
            raise
        raise DamagedFileError(f"{name}: {error.strerror}") from None


def read_header(descriptor: int, size: int) -> Header:
    """Read and check the header of a file of ``size`` bytes.

    Nothing is allocated that the file's size does not cover.

    Raises:
        DamagedFileError: the file is invalid or incomplete.
    """
    try:
        length = bytearray(_LENGTH)
        files.read_into(descriptor, 0, length)
        count = int.from_bytes(length, "little")
        if count > min(size - _LENGTH, MOST_HEADER):
            raise DamagedFileError(f"it claims a header of {count} bytes, but has only {size} bytes")

        text = bytearray(count)
        files.read_into(descriptor, _LENGTH, text)
        return parse_header(bytes(text), size)
    except EOFError as error:
        raise DamagedFileError(str(error)) from None


def read_tensor(descriptor: int, name: str, entry: TensorEntry, out: Tensor | None = None) -> Tensor:
    """Read a tensor into new memory, or into ``out`` (contiguous, same dtype and number of values), and check it.

    Raises:
        DamagedFileError: its bytes are not those that were written.
    """
    if out is None:
        out = torch.empty(entry.shape, dtype=entry.dtype)
    view = as_bytes(out)

    def pieces() -> Iterator[memoryview]:
        for at in range(0, len(view), _AT_ONCE):
            piece = view[at : at + _AT_ONCE]
            files.read_into(descriptor, entry.begin + at, piece)
            yield piece

    try:
        check_bytes(name, entry, view, pieces())
    except EOFError as error:
        raise DamagedFileError(f"{name}: {error}") from None
    return out


def read_all(folder: Path, name: str, size: int, checksum: int) -> dict[str, Tensor]:
    """Read all tensors of a file that must have this size, and this checksum of its header.

    Raises:
        DamagedFileError: it is missing, or not what was written.
    """
    with opened(folder, name) as (descriptor, actual):
        header = read_header(descriptor, actual)
        if (header.size, header.checksum) != (size, checksum):
            raise DamagedFileError("it is not the file that its version refers to")
        return {name: read_tensor(descriptor, name, entry) for name, entry in header.entries.items()}


def map_tensors(descriptor: int, header: Header) -> tuple[Tensor, dict[str, Tensor]]:
    """Map a file and return its bytes and its tensors, which share their memory; the contents are not checked."""
    data = files.map_file(descriptor, header.size)
    tensors = {}
    for name, entry in header.entries.items():
        piece = data[entry.begin : entry.begin + entry.size]
        if not entry.size:  # an empty view would need an aligned address too
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
        elif entry.dtype.is_complex:
            tensors[name] = torch.view_as_complex(piece.view(DECLARED[entry.dtype]).view(*entry.shape, 2))
        else:
            tensors[name] = piece.view(entry.dtype).view(entry.shape)
    return data, tensors


def check_bytes(
    name: str, entry: TensorEntry, view: memoryview, pieces: Iterable[memoryview] | None = None
) -> None:
    """Raise DamagedFileError if the bytes in ``view`` are not those of the tensor ``name``; ``pieces`` fills ``view``
    (default: it is filled already)."""
    if pieces is None:
        pieces = [view]
    if compute_checksum(entry.checksum.kind, pieces) != entry.checksum:
        raise DamagedFileError(f"the checksum of {name!r} is wrong")

    # Any byte but 0 and 1 in a bool tensor means different things to different operations of torch.
    if entry.dtype == torch.bool and len(view) and np.frombuffer(view, np.uint8).max() > 1:
        raise DamagedFileError(f"{name!r} is bool and has bytes that are neither 0 nor 1")


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, its own memory if it is contiguous and on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def parse_header(text: bytes, size: int) -> Header:
    """Return the checked header of a file of ``size`` bytes."""
    at = len(_BEFORE_CHECKSUM)
    end = at + len(_NO_CHECKSUM)
    if not text.startswith(_BEFORE_CHECKSUM):
        raise DamagedFileError("the header does not begin with its checksum")
    checksum = zlib.crc32(text[:at] + _NO_CHECKSUM.encode() + text[end:])
    if text[at:end] != f"{checksum:08x}".encode():
        raise DamagedFileError("the checksum of the header is wrong")

    try:
        table = json.loads(text)
        metadata = table.pop("__metadata__")
        sums = {}
        for kind in CHECKSUMS:
            for name, value in json.loads(metadata.pop(kind, "{}")).items():
                sums[name] = Checksum(kind, int(value, 16))
        declared = json.loads(metadata.pop("dtypes"))
        entries = {
            name: _entry(values, sums[name], declared.get(name), _LENGTH + len(text))
            for name, values in table.items()
        }
        metadata.pop("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"the header cannot be read: {error}") from None

    position = _LENGTH + len(text)
    for begin, length, name in sorted((entry.begin, entry.size, name) for name, entry in entries.items()):
        if begin != position:
            raise DamagedFileError(f"{name!r} begins at byte {begin}, expected {position}")
        position += length
    if position != size:
        raise DamagedFileError(f"the file has {size} bytes, expected {position}")

    return Header(entries, metadata, checksum, size)


def _entry(values: Mapping[str, Any], checksum: Checksum, declared: str | None, first: int) -> TensorEntry:
    """Parse an entry of a header's table; ValueError if it is invalid."""
    begin, end = values["data_offsets"]
    shape = values["shape"]
    stored = BY_STORED[values["dtype"]]

    if len(shape) > MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"invalid shape {shape} or bytes {begin} to {end}")
    if end - begin != prod(shape) * stored.itemsize or prod(max(n, 1) for n in shape) >= 2**48:
        raise ValueError(f"{end - begin} bytes for shape {shape} of {stored}")

    dtype = stored
    if declared is not None:
        dtype = DTYPES[declared]
        if DECLARED.get(dtype, dtype) != stored:
            raise ValueError(f"{declared} is not stored as {stored}")

    if dtype.is_complex:
        if not shape or shape[-1] != 2:
            raise ValueError(f"shape {shape}, but complex numbers need pairs")
        shape = shape[:-1]

    return TensorEntry(dtype, tuple(shape), first + begin, end - begin, checksum)
