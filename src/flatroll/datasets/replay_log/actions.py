"""Actions as few bits: integers of small ranges are packed, other values kept as their bytes."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from flatroll.disk.tensor_file import DTYPES, DamagedFileError, dtype_name
from flatroll.layout.checks import optional_package
from flatroll.layout.keys import ACTION, NestedKey, as_tuple, plain_key
from flatroll.layout.spaces import find_part, space_leaves

_MOST_BITS = 16
#: Numbers in a row of one column, and bytes of a part of the action in one window.
MOST_NUMBERS = 2**24
_MOST_BYTES = 2**32
#: The first byte of compressed data.
_PLAIN, _ZLIB, _ZSTD = 0, 1, 2
#: Fewer bytes are not worth compressing.
_WORTH = 256


def squeeze(data: bytes) -> bytes:
    """Compress bytes: with zstd, without the extra ``zstd`` with zlib, or not at all if that is shorter."""
    if len(data) < _WORTH:
        return bytes([_PLAIN]) + data
    try:
        import zstandard

        shorter = bytes([_ZSTD]) + zstandard.ZstdCompressor(level=3).compress(data)
    except ImportError:
        shorter = bytes([_ZLIB]) + zlib.compress(data, 6)

    if len(shorter) > len(data):
        return bytes([_PLAIN]) + data
    return shorter


def expand(packed: bytes, most: int) -> bytes:
    """Invert `squeeze`; no more than ``most`` bytes are made.

    Raises:
        DamagedFileError: they are not what `squeeze` returned, or are more.
        ImportError: they are compressed with zstd, and zstandard is not installed.

    >>> expand(squeeze(b"a" * 1000), 1000) == b"a" * 1000
    True
    """
    if not packed:
        return b""

    kind = packed[0]
    body = packed[1:]
    try:
        if kind == _PLAIN:
            data = body
        elif kind == _ZLIB:
            data = zlib.decompressobj().decompress(body, most + 1)
        elif kind == _ZSTD:
            zstandard = optional_package("zstandard", "zstd", "this log, which is compressed with zstd,")
            claimed = zstandard.frame_content_size(body)
            if not 0 <= claimed <= most:
                raise DamagedFileError(f"it claims {claimed} bytes of at most {most}")
            data = zstandard.ZstdDecompressor().decompress(body, max_output_size=claimed)
        else:
            raise DamagedFileError(f"unknown compression {kind}")
    except zlib.error as error:
        raise DamagedFileError(str(error)) from None
    except RuntimeError as error:  # ZstdError
        raise DamagedFileError(str(error)) from None

    if len(data) > most:
        raise DamagedFileError(f"it has more than the {most} bytes allowed")
    return data


@dataclass(frozen=True)
class ActionCode:
    """How a part of the action is stored.

    Attributes:
        key: its column.
        dtype: of the column.
        shape: of one row.
        low: the smallest value, if values are packed.
        bits: of a packed value; 0 if the bytes are kept.
    """

    key: NestedKey
    dtype: torch.dtype
    shape: tuple[int, ...]
    low: int = 0
    bits: int = 0

    def encode(self, column: Tensor) -> bytes:
        """Return a column ``[N, *shape]`` as bytes."""
        values = column.detach().cpu().contiguous()
        if values.dtype != self.dtype or tuple(values.shape[1:]) != self.shape:
            raise TypeError(
                f"the actions of {self.key!r} were {dtype_name(self.dtype)} {list(self.shape)} and are "
                f"{dtype_name(values.dtype)} {list(values.shape[1:])} now, which a log cannot hold"
            )

        if values.nbytes > _MOST_BYTES:
            raise ValueError(
                f"the actions of {self.key!r} in one batch have {values.nbytes:,} bytes, a log holds {_MOST_BYTES:,}: "
                "choose a smaller frames_per_batch"
            )

        if not self.bits:
            raw = values.reshape(-1).view(torch.uint8).numpy() if values.numel() else np.zeros(0, np.uint8)
            return squeeze(raw.tobytes())

        numbers = values.reshape(-1).to(torch.int64).numpy() - self.low
        if len(numbers) and (numbers.min() < 0 or numbers.max() >> self.bits):
            raise ValueError(f"the actions of {self.key!r} are not all in the action space")
        places = np.arange(self.bits)
        bits = (numbers[:, None] >> places) & 1
        return squeeze(np.packbits(bits.astype(np.uint8)).tobytes())

    def decode(self, packed: bytes, rows: int) -> Tensor:
        """Return the column of ``rows`` rows; DamagedFileError if the bytes have another length."""
        count = rows * prod(self.shape)
        if self.bits:
            size = -(-count * self.bits // 8)
        else:
            size = count * self.dtype.itemsize
        if count * self.dtype.itemsize > _MOST_BYTES:
            raise DamagedFileError(f"the actions claim {count:,} numbers")

        data = expand(packed, size)
        if len(data) != size:
            raise DamagedFileError(f"the actions have {len(data)} bytes, expected {size}")
        if not size:
            return torch.zeros(rows, *self.shape, dtype=self.dtype)

        memory = np.frombuffer(bytearray(data), np.uint8)
        if not self.bits:
            return torch.from_numpy(memory).view(self.dtype).view(rows, *self.shape)

        bits = np.unpackbits(memory, count=count * self.bits).reshape(count, self.bits)
        numbers = (bits.astype(np.int64) << np.arange(self.bits)).sum(axis=1) + self.low
        return torch.from_numpy(numbers).to(self.dtype).view(rows, *self.shape)

    def to_json(self) -> list[Any]:
        """Return it as JSON."""
        return [list(as_tuple(self.key)), dtype_name(self.dtype), list(self.shape), self.low, self.bits]

    @classmethod
    def from_json(cls, value: Any) -> "ActionCode":
        """Invert `to_json`; ValueError or TypeError for anything else."""
        key, dtype, shape, low, bits = value
        if not key or not all(isinstance(part, str) for part in key):
            raise ValueError(f"{key!r} is no key")
        if not all(type(n) is int for n in (*shape, low, bits)):
            raise ValueError(f"{value!r} is no code of actions")
        if (
            any(n < 0 for n in shape)
            or prod(shape) > MOST_NUMBERS
            or not 0 <= bits <= _MOST_BITS
            or abs(low) > 2**40
        ):
            raise ValueError(f"{value!r} is no code of actions")
        return cls(plain_key(tuple(key)), DTYPES[dtype], tuple(shape), low, bits)


def codes_of(space: spaces.Space[Any], columns: dict[NestedKey, Tensor]) -> list[ActionCode]:
    """Return the codes of an action space's parts, given their columns."""
    codes = []
    for key, path in space_leaves(space, (ACTION,)):
        column = columns[key]
        low, bits = range_of(find_part(space, path))
        codes.append(ActionCode(key, column.dtype, tuple(column.shape[1:]), low, bits))
    return codes


def range_of(part: spaces.Space[Any]) -> tuple[int, int]:
    """Return the smallest value of a part of the action space and the bits of its range; 0 bits for no packing."""
    if isinstance(part, spaces.Discrete):
        low = int(part.start)
        most = int(part.n)
    elif isinstance(part, spaces.MultiDiscrete):
        starts = np.asarray(getattr(part, "start", 0))
        low = int(starts.min())
        most = int((part.nvec + starts).max()) - low
    elif isinstance(part, spaces.MultiBinary):
        low = 0
        most = 2
    else:
        return 0, 0

    bits = max(1, (most - 1).bit_length())
    if bits > _MOST_BITS:
        return 0, 0
    return low, bits


def as_tree(space: spaces.Space[Any], leaves: Iterator[Any]) -> Any:
    """Return a tree with the structure of a space, of leaves in the order of `space_leaves`."""
    if isinstance(space, spaces.Dict):
        return {name: as_tree(child, leaves) for name, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(as_tree(child, leaves) for child in space.spaces)
    return next(leaves)


def join_bytes(parts: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Return byte strings end to end, uint8 ``[M]``, and their lengths, int64 ``[n]``."""
    joined = b"".join(parts)
    values = (
        torch.frombuffer(bytearray(joined), dtype=torch.uint8)
        if joined
        else torch.zeros(0, dtype=torch.uint8)
    )
    return values, torch.tensor([len(part) for part in parts], dtype=torch.int64)
