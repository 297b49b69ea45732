"""States of C++'s `std::mt19937` in saved bytes: 624 words and a place, written as decimal numbers."""

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_WORDS = 624
#: Without leading zeros: numbers have one form only.
_TEXT = re.compile(rb"(?<![0-9])(?:(?:0|[1-9][0-9]{0,9}) ){624}(?:0|[1-9][0-9]{0,2})(?![0-9])")


class Twister(NamedTuple):
    """A state of the generator in a byte string.

    Args:
        begin: place of its first byte.
        end: place after its last byte.
        words: the 624 words and the place in them, uint32 ``[625]``.
    """

    begin: int
    end: int
    words: npt.NDArray[np.uint32]


def find_twisters(data: bytes) -> list[Twister]:
    """Return the states in ``data``, in order; only those that `twister_text` writes byte by byte the same.

    >>> words = np.arange(625, dtype=np.uint32)
    >>> [found] = find_twisters(b"RNG:" + twister_text(words) + b".")
    >>> found.begin, bool((found.words == words).all())
    (4, True)
    """
    found: list[Twister] = []
    if data.count(b" ") < _WORDS:  # much faster than the search
        return found

    for match in _TEXT.finditer(data):
        numbers = np.fromstring(match[0].decode(), np.uint64, sep=" ")
        if numbers[_WORDS] <= _WORDS and numbers.max() < 2**32:
            found.append(Twister(match.start(), match.end(), numbers.astype(np.uint32)))
    return found


def twister_text(words: npt.NDArray[np.uint32]) -> bytes:
    """Return a state as C++ writes it."""
    return " ".join(map(str, words.tolist())).encode()


def without_twisters(data: bytes, found: list[Twister]) -> bytes:
    """Return ``data`` without the states that were found in it."""
    rest = []
    at = 0
    for twister in found:
        rest.append(data[at : twister.begin])
        at = twister.end
    return b"".join([*rest, data[at:]])


def generator_at(words: npt.NDArray[np.uint32]) -> np.random.MT19937:
    """Return NumPy's generator, which is the same one, in a state."""
    generator = np.random.MT19937(0)
    generator.state = {
        "bit_generator": "MT19937",
        "state": {"key": words[:_WORDS].copy(), "pos": int(words[_WORDS])},
    }
    return generator


def words_of(generator: np.random.MT19937) -> npt.NDArray[np.uint32]:
    """Invert `generator_at`."""
    inner = generator.state["state"]
    assert isinstance(inner, dict)
    return np.append(inner["key"], inner["pos"]).astype(np.uint32)


def draws_until(generator: np.random.MT19937, words: npt.NDArray[np.uint32], most_rounds: int) -> int | None:
    """Advance a generator to a state; return how many numbers were drawn, None if it is not found.

    Args:
        generator: NumPy's; where the state is not found, it stands ``most_rounds`` times 624 numbers later.
        words: the state.
        most_rounds: how often at most the 624 words are made anew.
    """
    begin = int(words_of(generator)[_WORDS])
    drawn = (int(words[_WORDS]) - begin) % _WORDS
    generator.random_raw(drawn, output=False)
    for _ in range(most_rounds + 1):
        here = words_of(generator)
        # After the last of its words, a state's place is 624, and 0 only in theory.
        if (here == words).all():
            return drawn
        generator.random_raw(_WORDS, output=False)
        drawn += _WORDS
    return None
