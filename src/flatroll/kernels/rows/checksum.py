"""The XXH64 checksum at memory speed: compiled kernels.

Of every 32 bytes, each of four lanes processes one 64-bit word, so that their multiplications overlap. A lane's step is
a bijection of its word, so a changed word always changes its lane.

The state is uint64 ``[9]``: the lanes, the number of bytes so far, and up to 31 bytes of an incomplete stripe.

Source: the specification of xxHash (Y. Collet, "xxHash fast digest algorithm", version 0.1.1), with the seed 0.

This module imports numba: import it inside the function that needs it.
"""

from typing import Any

import numpy as np

from flatroll.kernels.compiled import Array, Int, compiled
from flatroll.kernels.rows.raw_memory import octets, word_at

_1, _2, _3, _4, _5 = (
    np.uint64(x)
    for x in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
# offsets of the byte count and of the remaining bytes in the state; bytes per stripe
_COUNT = 4
_REST = 5
_STRIPE = 32
_29 = np.uint64(29)
_32 = np.uint64(32)
_33 = np.uint64(33)


def new_state() -> Array:
    """Return the state before the first byte."""
    one = int(_1)
    two = int(_2)
    return np.array([(one + two) % 2**64, two, 0, 2**64 - one, 0, 0, 0, 0, 0], np.uint64)


@compiled(inline="always")
def _turn(word: np.uint64, bits: int) -> Any:
    """Rotate a word's bits to the left."""
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@compiled(inline="always")
def _step(lane: np.uint64, word: np.uint64) -> Any:
    return _turn(lane + word * _2, 31) * _1


@compiled()
def absorb(state: Array, address: Int, size: Int) -> None:
    """Update the state with the ``size`` bytes at ``address``."""
    rest = state[_REST:].view(np.uint8)  # [32]
    held = np.int64(state[_COUNT] % np.uint64(_STRIPE))
    state[_COUNT] += np.uint64(size)

    given = octets(address, size)
    done = 0
    if held:  # complete the stripe that an earlier call began
        done = min(_STRIPE - held, size)
        rest[held : held + done] = given[:done]
        if held + done < _STRIPE:
            return
        for lane in range(4):
            state[lane] = _step(state[lane], state[_REST + lane])

    stripes = (size - done) // _STRIPE
    a = state[0]
    b = state[1]
    c = state[2]
    d = state[3]

    for at in range(address + done, address + done + _STRIPE * stripes, _STRIPE):
        a = _step(a, word_at(at))
        b = _step(b, word_at(at + 8))
        c = _step(c, word_at(at + 16))
        d = _step(d, word_at(at + 24))

    state[0] = a
    state[1] = b
    state[2] = c
    state[3] = d

    done += _STRIPE * stripes
    rest[: size - done] = given[done:]


@compiled()
def digest(state: Array) -> Any:
    """Return the checksum of all bytes so far, uint64."""

    if state[_COUNT] < np.uint64(_STRIPE):
        mixed = _5
    else:
        mixed = _turn(state[0], 1) + _turn(state[1], 7) + _turn(state[2], 12) + _turn(state[3], 18)
        for lane in range(4):
            mixed = (mixed ^ _step(np.uint64(0), state[lane])) * _1 + _4

    mixed += state[_COUNT]
    rest = state[_REST:].view(np.uint8)
    held = np.int64(state[_COUNT] % np.uint64(_STRIPE))

    for word in range(held // 8):
        mixed = _turn(mixed ^ _step(np.uint64(0), state[_REST + word]), 27) * _1 + _4

    at = held // 8 * 8
    if held - at >= 4:
        half = state[_REST:].view(np.uint32)[at // 4]
        mixed = _turn(mixed ^ (np.uint64(half) * _1), 23) * _2 + _3
        at += 4

    for i in range(at, held):
        mixed = _turn(mixed ^ (np.uint64(rest[i]) * _5), 11) * _1

    mixed = (mixed ^ (mixed >> _33)) * _2
    mixed = (mixed ^ (mixed >> _29)) * _3
    return mixed ^ (mixed >> _32)
