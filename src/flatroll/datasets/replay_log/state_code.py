"""States of envs as few bytes: what differs from a state that a reader can make again, after a reset with a seed."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from flatroll.disk.state_tree import from_text, pack, to_text, unpack
from flatroll.disk.tensor_file import DTYPES, DamagedFileError, dtype_name
from flatroll.wrappers.mersenne import (
    Twister,
    draws_until,
    find_twisters,
    generator_at,
    twister_text,
    without_twisters,
    words_of,
)

#: A state has at most so many bytes before it is encoded.
MOST_BYTES = 256 << 20
_MOST_DRAWS = 2**30  # of a generator, about 3 s
_MOST_ROUNDS = 2048  # of a generator, between two states
#: Number of bytes of the body before compression, checksum of the state, number of bytes of its text.
_HEAD = struct.Struct("<III")
_BYTES = "\0bytes"  # a bytes object, in the place of which stands a dict


class _Part(NamedTuple):
    """The bytes of a tensor: those of generators apart.

    Args:
        data: all bytes.
        rest: the others.
        found: the generators, and where they are.
    """

    data: bytes
    rest: bytes
    found: list[Twister]


class _Parts(NamedTuple):
    """A tree as text and bytes."""

    description: Any
    tensors: dict[str, Tensor]
    parts: dict[str, _Part]


class StateCode:
    """Encodes the states of one env, and decodes them.

    Where a state is about that of the base, with the generators of both in the same run of numbers, few bytes remain:
    the bits that differ, and how many numbers were drawn.

    Args:
        base: a tree of plain values, the state that the others are like; None if there is none.

    >>> code = StateCode({"screen": np.zeros(9999, np.uint8)})
    >>> packed = code.encode({"screen": np.repeat(np.uint8([1, 0]), [100, 9899])})
    >>> len(packed) < 100, int(code.decode(packed)["screen"].sum())
    (True, 100)
    """

    def __init__(self, base: Any = None) -> None:
        self._base: dict[str, _Part] = {}
        self._text = b""
        if base is not None:
            split = _split(base)
            self._base = split.parts
            self._text = to_text(_index(split, {}, {})).encode()
        # Where the generators of the last state stand, and how many numbers they have drawn since the base.
        self._last: dict[tuple[str, int], tuple[np.random.MT19937, int] | None] = {}

    def encode(self, tree: Any) -> bytes:
        """Return a tree of plain values as bytes; TypeError or ValueError if it is none, or is too large."""
        split = _split(tree)
        draws: dict[str, list[int]] = {}
        masked: dict[str, bool] = {}
        body = []
        for name, part in split.parts.items():
            draws[name] = [self._draws(name, number, found.words) for number, found in enumerate(part.found)]
            like = self._base.get(name)
            masked[name] = like is not None and len(like.rest) == len(part.rest)
            rest = part.rest
            if like is not None and masked[name]:
                rest = _differing(rest, like.rest)
            body.append(rest)
            body += [
                found.words.tobytes()
                for found, count in zip(part.found, draws[name], strict=True)
                if count < 0
            ]

        text = to_text(_index(split, draws, masked)).encode()
        data = b"".join([text, *body])
        if len(data) > MOST_BYTES:
            raise ValueError(f"the state of the env has {len(data):,} bytes")
        checksum = _checksum(text, [part.data for part in split.parts.values()])
        return _HEAD.pack(len(data), checksum, len(text)) + _compress(data, self._text)

    def decode(self, packed: bytes) -> Any:
        """Invert `encode`; DamagedFileError for anything else, or for a state that is like another base."""
        try:
            data, text = _decompress(packed, self._text)
            description, tensors = self._join(data, from_text(text))
            whole = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values()]
            if _checksum(text, whole) != _HEAD.unpack_from(packed)[1]:
                raise ValueError("its checksum differs")
            return _with_bytes(unpack(description, tensors, max_bytes=MOST_BYTES))
        except (
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            OverflowError,
            RuntimeError,
            struct.error,
        ) as error:
            raise DamagedFileError(f"a state of the log cannot be read: {str(error)[:200]}") from None

    def _draws(self, name: str, number: int, words: Any) -> int:
        """Return how many numbers a generator has drawn since the base; -1 if that cannot be told."""
        key = name, number
        if key not in self._last:
            self._last[key] = None
            like = self._base.get(name)
            if like is not None and number < len(like.found):
                self._last[key] = generator_at(like.found[number].words), 0

        last = self._last[key]
        if last is None:
            return -1
        generator, before = last
        drawn = draws_until(generator, words, _MOST_ROUNDS)
        if drawn is None or before + drawn > _MOST_DRAWS:
            self._last[key] = None
            return -1
        self._last[key] = generator, before + drawn
        return before + drawn

    def _join(self, data: memoryview, index: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return the description of a tree and its tensors."""
        description, entries = index
        tensors: dict[str, Tensor] = {}
        at = 0

        def take(size: int) -> bytes:
            nonlocal at
            if type(size) is not int or not 0 <= size <= len(data) - at:
                raise ValueError("it is shorter than it says")
            at += size
            return bytes(data[at - size : at])

        for name, dtype, size, masked, places, draws in entries:
            if name in tensors:
                raise ValueError("a part stands there twice")  # its generators would draw again
            rest = take(size)
            like = self._base.get(name)
            if masked:
                if like is None or len(like.rest) != size:
                    raise ValueError("it is like a state that is not here")
                rest = _differing(rest, like.rest)

            pieces = []
            before = 0
            for number, (place, count) in enumerate(zip(places, draws, strict=True)):
                if type(place) is not int or not before <= place <= size or type(count) is not int:
                    raise ValueError("a generator has no place")
                pieces += [rest[before:place], twister_text(self._words_after(name, number, count, take))]
                before = place
            joined = b"".join([*pieces, rest[before:]])
            memory = torch.from_numpy(np.frombuffer(bytearray(joined), np.uint8))
            tensors[name] = memory.view(DTYPES[dtype])

        return description, tensors

    def _words_after(self, name: str, number: int, count: int, take: Any) -> Any:
        """Return the words of a generator: after ``count`` numbers of the base's, or stored ones if it is negative."""
        if count < 0:
            words = np.frombuffer(take(625 * 4), np.uint32)
            if words[624] > 624:
                raise ValueError("a generator has another form")
            return words
        if count > _MOST_DRAWS:
            raise ValueError(f"a generator has drawn {count:,} numbers")
        generator = generator_at(self._base[name].found[number].words)
        generator.random_raw(count, output=False)
        return words_of(generator)


def _split(tree: Any) -> _Parts:
    """Return a tree as a description and parts."""
    description, tensors = pack(_without_bytes(tree), compress=False)
    parts = {}
    for name, tensor in tensors.items():
        data = tensor.view(torch.uint8).numpy().tobytes()
        found = find_twisters(data)
        parts[name] = _Part(data, without_twisters(data, found), found)
    return _Parts(description, tensors, parts)


def _index(split: _Parts, draws: Mapping[str, list[int]], masked: Mapping[str, bool]) -> Any:
    """Return the description of a tree and of its parts, as JSON."""
    entries = []
    for name, part in split.parts.items():
        places = []
        cut = 0
        for found in part.found:
            places.append(found.begin - cut)
            cut += found.end - found.begin
        dtype = dtype_name(split.tensors[name].dtype)
        entries.append([name, dtype, len(part.rest), masked.get(name, False), places, draws.get(name, [])])
    return [split.description, entries]


def _without_bytes(tree: Any) -> Any:
    """Return a tree with an array in a dict for each bytes object."""
    if isinstance(tree, bytes):
        return {_BYTES: np.frombuffer(tree, np.uint8)}
    if isinstance(tree, dict):
        return {key: _without_bytes(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_without_bytes(value) for value in tree)
    return tree


def _with_bytes(tree: Any) -> Any:
    """Invert `_without_bytes`."""
    if isinstance(tree, dict):
        if set(tree) == {_BYTES}:
            if not isinstance(tree[_BYTES], np.ndarray):
                raise ValueError("bytes that are no array")
            return tree[_BYTES].tobytes()
        return {key: _with_bytes(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_with_bytes(value) for value in tree)
    return tree


def _differing(data: bytes, others: bytes) -> bytes:
    """Return the bits that differ; twice, it is the first again."""
    different: Any = np.frombuffer(data, np.uint8) ^ np.frombuffer(others, np.uint8)
    return bytes(different.tobytes())


def _checksum(text: bytes, parts: Sequence[bytes]) -> int:
    """Return a checksum of a state, 32 bits."""
    checksum = xxhash.xxh32(text)
    for part in parts:
        checksum.update(part)
    return checksum.intdigest()


def _compress(data: bytes, text: bytes) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=text)
    return compressor.compress(data) + compressor.flush()


def _decompress(packed: bytes, text: bytes) -> tuple[memoryview, bytes]:
    """Return the data behind the text, and the text; ValueError if they are damaged or like another base."""
    size, _, of_text = _HEAD.unpack_from(packed)
    if size > MOST_BYTES or of_text > size:
        raise ValueError(f"it claims {size:,} bytes")
    try:
        data = zlib.decompressobj(-15, zdict=text).decompress(packed[_HEAD.size :], size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(data) != size:
        raise ValueError("it is shorter than it says")
    return memoryview(data)[of_text:], data[:of_text]
