"""States of envs as few bytes.

The state of ale-py's emulator has 14,000 bytes: two random generators, and 1,000 others, most of which are the same a
thousand steps later. A reader can make one state again: that after the log's first reset, the *base*. So only what
differs from the base is stored:

1. `flatroll.disk.state_tree` splits a state, a tree of plain values, into a description and arrays.
2. Generators of C++ (`flatroll.wrappers.mersenne`), 6,000 bytes that all change, are cut out of the arrays. Of each is
   stored how many numbers it has drawn since the base, or, if that is not found out, all of its words.
3. The bytes of an array that remain are stored as the bits that differ from the base's, most of them 0, if the base has
   as many bytes.
4. The result is compressed with zlib, with the text of the base as the dictionary.

A stored state:

| part | holds |
|---|---|
| head, 12 bytes | bytes of the rest before compression, checksum of the state, bytes of the text; uint32 each |
| text, compressed | JSON: the description, and an `_Entry` for each array |
| arrays, compressed | of each: the bytes that remain, then the words of the generators that are stored |

The checksum finds out damage, and a base that is another one.
"""

import itertools
import struct
import zlib
from collections.abc import Iterable, Sequence
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

#: A state has at most so many bytes before compression.
MOST_BYTES = 256 << 20
_MOST_DRAWS = 2**26  # of a generator since the base: to draw them takes about 0.2 s
_MOST_ROUNDS = 2048  # of a generator, 624 numbers each, from one state to the next
_HEAD = struct.Struct("<III")
_WORDS = 624  # of a generator; its place follows
#: What Python, NumPy and torch raise where a state is not what `StateCode.encode` returned.
_WRONG = (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError, struct.error)
_BYTES = "\0bytes"  # the only key of a dict that stands for a bytes object


class _Array(NamedTuple):
    """An array of a state.

    Args:
        dtype: its name.
        data: all of its bytes.
        rest: those outside of generators.
        generators: in the order of their places.
    """

    dtype: str
    data: bytes
    rest: bytes
    generators: list[Twister]


class _Entry(NamedTuple):
    """What the text says of an array.

    Args:
        name: of the array in the description.
        dtype: its name.
        size: number of its bytes outside of generators.
        differs: whether the bits that differ from the base's stand for these bytes.
        places: number of these bytes before each generator.
        draws: how many numbers each generator has drawn since the base; None if its words are stored.
    """

    name: str
    dtype: str
    size: int
    differs: bool
    places: list[int]
    draws: list[int | None]


class StateCode:
    """Encodes the states of one env, and decodes them.

    States are encoded in the order of time: generators are followed from one to the next. They are decoded in any
    order.

    Args:
        base: the state that the others are like, a tree of plain values; None if there is none.

    >>> code = StateCode({"screen": np.zeros(9999, np.uint8)})
    >>> packed = code.encode({"screen": np.repeat(np.uint8([1, 0]), [100, 9899])})
    >>> len(packed) < 100, int(code.decode(packed)["screen"].sum())
    (True, 100)
    """

    def __init__(self, base: Any = None) -> None:
        self._base: dict[str, _Array] = {}
        self._followed: dict[tuple[str, int], _Followed] = {}
        self._dictionary = b""
        if base is not None:
            description, self._base = _split(base)
            for name, array in self._base.items():
                for number, generator in enumerate(array.generators):
                    self._followed[name, number] = _Followed(generator)
            self._dictionary = _text(description, self._entries(self._base))

    def encode(self, tree: Any) -> bytes:
        """Return a tree of plain values as bytes.

        Raises:
            TypeError: it holds another value.
            ValueError: it nests too deep, or has more than `MOST_BYTES` bytes.
        """
        description, arrays = _split(tree)
        entries = self._entries(arrays)
        parts: list[bytes] = []
        for entry, array in zip(entries, arrays.values(), strict=True):
            if entry.differs:
                parts.append(_differing_bits(array.rest, self._base[entry.name].rest))
            else:
                parts.append(array.rest)
            for generator, count in zip(array.generators, entry.draws, strict=True):
                if count is None:
                    parts.append(generator.words.tobytes())

        text = _text(description, entries)
        data = b"".join([text, *parts])
        if len(data) > MOST_BYTES:
            raise ValueError(f"the state of the env has {len(data):,} bytes")
        checksum = _checksum(text, (array.data for array in arrays.values()))
        return _HEAD.pack(len(data), checksum, len(text)) + _compress(data, self._dictionary)

    def decode(self, packed: bytes) -> Any:
        """Invert `encode`; DamagedFileError for anything else, or for a state that is like another base."""
        try:
            text, stored = _decompress(packed, self._dictionary)
            description, entries = from_text(text)
            arrays: dict[str, bytes] = {}
            dtypes: dict[str, str] = {}
            for entry in itertools.starmap(_Entry, entries):
                if entry.name in arrays:
                    raise ValueError("it has an array twice")
                arrays[entry.name] = self._array(entry, stored)
                dtypes[entry.name] = entry.dtype
            if _checksum(text, arrays.values()) != _HEAD.unpack_from(packed)[1]:
                raise ValueError("its checksum differs")

            tensors = {name: _tensor(data, dtypes[name]) for name, data in arrays.items()}
            return _with_bytes(unpack(description, tensors, max_bytes=MOST_BYTES))
        except _WRONG as error:
            raise DamagedFileError(f"a state of the log cannot be read: {str(error)[:200]}") from None

    def _entries(self, arrays: dict[str, _Array]) -> list[_Entry]:
        """Return what the text says of the arrays of a state."""
        entries = []
        for name, array in arrays.items():
            like = self._base.get(name)
            differs = like is not None and len(like.rest) == len(array.rest)
            draws = [self._draws(name, number, found) for number, found in enumerate(array.generators)]
            entries.append(_Entry(name, array.dtype, len(array.rest), differs, _places(array), draws))
        return entries

    def _draws(self, name: str, number: int, generator: Twister) -> int | None:
        """Return how many numbers a generator of an array has drawn since the base; None if that is not found out."""
        followed = self._followed.get((name, number))
        if followed is None:
            return None
        count = followed.draws_until(generator)
        if count is None:
            del self._followed[name, number]
        return count

    def _array(self, entry: _Entry, stored: "_Reader") -> bytes:
        """Return the bytes of an array."""
        rest = stored.take(entry.size)
        if entry.differs:
            like = self._base[entry.name].rest
            if len(like) != len(rest):
                raise ValueError("it is like a state that is not here")
            rest = _differing_bits(rest, like)

        # The bytes before, between and behind the generators.
        pieces = []
        before = 0
        for number, (place, count) in enumerate(zip(entry.places, entry.draws, strict=True)):
            if type(place) is not int or not before <= place <= len(rest):
                raise ValueError("a generator has no place")
            if count is None:
                words = stored.take_words()
            else:
                words = _words_after(self._base[entry.name].generators[number], count)
            pieces += [rest[before:place], twister_text(words)]
            before = place
        return b"".join([*pieces, rest[before:]])


class _Followed:
    """A generator of the base, and how many numbers it has drawn up to the last state."""

    def __init__(self, generator: Twister) -> None:
        self._generator = generator_at(generator.words)
        self._drawn = 0

    def draws_until(self, later: Twister) -> int | None:
        """Return how many numbers it has drawn from the base to a later state; None if that is too far to find."""
        drawn = draws_until(self._generator, later.words, _MOST_ROUNDS)
        if drawn is None or self._drawn + drawn > _MOST_DRAWS:
            return None
        self._drawn += drawn
        return self._drawn


class _Reader:
    """Bytes that are taken from the front."""

    def __init__(self, data: memoryview) -> None:
        self._left = data

    def take(self, size: int) -> bytes:
        """Return the next bytes; ValueError if there are fewer."""
        if type(size) is not int or not 0 <= size <= len(self._left):
            raise ValueError("it is shorter than it says")
        taken = bytes(self._left[:size])
        self._left = self._left[size:]
        return taken

    def take_words(self) -> Any:
        """Return the words and the place of a generator, uint32 ``[625]``."""
        words = np.frombuffer(self.take(4 * (_WORDS + 1)), np.uint32)
        if words[_WORDS] > _WORDS:
            raise ValueError("a generator has another form")
        return words


# A state, and its arrays.


def _split(tree: Any) -> tuple[Any, dict[str, _Array]]:
    """Return a tree as a description, which is JSON, and arrays by name."""
    description, tensors = pack(_without_bytes(tree), compress=False)
    arrays = {}
    for name, tensor in tensors.items():
        data = tensor.view(torch.uint8).numpy().tobytes()
        generators = find_twisters(data)
        rest = without_twisters(data, generators)
        arrays[name] = _Array(dtype_name(tensor.dtype), data, rest, generators)
    return description, arrays


def _tensor(data: bytes, dtype: str) -> Tensor:
    """Return an array of a description."""
    memory = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    return memory.view(DTYPES[dtype])


def _without_bytes(tree: Any) -> Any:
    """Return a tree with an array in a dict for each bytes object: the description would hold it as text."""
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
            return tree[_BYTES].tobytes()
        return {key: _with_bytes(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_with_bytes(value) for value in tree)
    return tree


# What the text says of arrays.


def _text(description: Any, entries: Sequence[_Entry]) -> bytes:
    """Return the text of a stored state."""
    return to_text([description, [list(entry) for entry in entries]]).encode()


def _places(array: _Array) -> list[int]:
    """Return the number of bytes outside of generators before each generator."""
    places = []
    cut = 0
    for generator in array.generators:
        places.append(generator.begin - cut)
        cut += generator.end - generator.begin
    return places


def _words_after(base: Twister, count: int) -> Any:
    """Return the words of a generator that has drawn ``count`` numbers since the base."""
    if type(count) is not int or not 0 <= count <= _MOST_DRAWS:
        raise ValueError(f"a generator has drawn {str(count)[:20]} numbers")
    generator = generator_at(base.words)
    generator.random_raw(count, output=False)
    return words_of(generator)


# Bytes.


def _differing_bits(data: bytes, others: bytes) -> bytes:
    """Return the bits that differ; of these and ``others``, it returns ``data`` again."""
    different: Any = np.frombuffer(data, np.uint8) ^ np.frombuffer(others, np.uint8)
    return bytes(different.tobytes())


def _checksum(text: bytes, arrays: Iterable[bytes]) -> int:
    """Return a checksum of a state, 32 bits."""
    checksum = xxhash.xxh32(text)
    for data in arrays:
        checksum.update(data)
    return checksum.intdigest()


def _compress(data: bytes, dictionary: bytes) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=dictionary)
    return compressor.compress(data) + compressor.flush()


def _decompress(packed: bytes, dictionary: bytes) -> tuple[bytes, _Reader]:
    """Return the text of a stored state, and what follows it; ValueError if they are damaged, or like another base."""
    size, _, of_text = _HEAD.unpack_from(packed)
    if size > MOST_BYTES or of_text > size:
        raise ValueError(f"it claims {size:,} bytes")
    try:
        data = zlib.decompressobj(-15, zdict=dictionary).decompress(packed[_HEAD.size :], size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(data) != size:
        raise ValueError("it is shorter than it says")
    return data[:of_text], _Reader(memoryview(data)[of_text:])
