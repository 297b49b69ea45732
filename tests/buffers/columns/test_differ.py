"""Tests of `differ`, which compares rows bit for bit, against a comparison of their bytes."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from flatroll.buffers.columns.column import differ
from flatroll.buffers.steps.episodes import _same_bits

DTYPES = [
    torch.uint8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
SHAPES = [(), (1,), (3,), (511,), (512,), (513,), (520,), (1024,), (4, 84, 84), (3, 7, 31), (2, 0)]
ROWS = 6


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, shape, generator=generator).to(dtype)


def row_bytes(values: Tensor, dims: int) -> list[bytes]:
    """The bytes of each row, in the order of the rows."""
    flat = values.contiguous().flatten(0, dims - 1)
    return [row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for row in flat]


def expected(left: Tensor, right: Tensor, dims: int = 1) -> list[bool]:
    pairs = zip(row_bytes(left, dims), row_bytes(right, dims), strict=True)
    return [one != other for one, other in pairs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_differ_where_their_bytes_do(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    left = numbers(dtype, ROWS, *shape)
    right = left.clone()
    if right.numel():
        right[1].view(-1)[0] = left[1].view(-1)[0] == 0
        right[4].view(-1)[-1] = left[4].view(-1)[-1] == 0

    assert differ(left, right).tolist() == expected(left, right)
    assert differ(left, right).tolist() == [bool(right.numel()) and row in (1, 4) for row in range(ROWS)]


@pytest.mark.parametrize("last", range(0, 1040, 13))
def test_every_byte_of_a_long_row_is_compared(last: int) -> None:
    left = torch.zeros(2, 1040, dtype=torch.uint8)
    right = left.clone()
    right[1, last] = 1

    assert differ(left, right).tolist() == [False, True]


@pytest.mark.parametrize("size", [16, 600, 1024])
def test_rows_may_lie_anywhere(size: int) -> None:
    """Shifted by one byte, with gaps, transposed, repeated by a stride of 0, in two dims."""
    source = numbers(torch.uint8, ROWS * (size + 3) * 2 + 1)
    shifted = source[1 : 1 + ROWS * size].view(ROWS, size)
    with_gaps = source[: ROWS * (size + 3)].view(ROWS, size + 3)[:, :size]
    transposed = source[: ROWS * size].view(size, ROWS).T
    repeated = source[:size].expand(ROWS, size)

    for left in (shifted, with_gaps, transposed, repeated):
        right = left.clone()
        right[2, size - 1] ^= 1
        for one, other in itertools.permutations((left, right, transposed, repeated), 2):
            assert differ(one, other).tolist() == expected(one, other)

    steps = source[: ROWS * size].view(2, ROWS // 2, size)
    before = steps[:, :-1]
    after = steps[:, 1:]
    assert differ(before, after, 2).flatten().tolist() == expected(before, after, 2)
    assert differ(before, after, 2).shape == before.shape[:2]


def test_bits_count_and_not_values() -> None:
    nan = torch.full((2, 256), torch.nan)
    zeros = torch.zeros(2, 256)

    assert differ(nan, nan.clone()).tolist() == [False, False]
    assert differ(zeros, -zeros).tolist() == [True, True]


def test_no_rows() -> None:
    assert differ(torch.zeros(0, 1024), torch.zeros(0, 1024)).shape == (0,)
    assert differ(torch.zeros(3, 0, 1024), torch.zeros(3, 0, 1024), 2).shape == (3, 0)


@pytest.mark.parametrize(
    "shape", [(3,), (9000,), (5, 9), (1024, 17), (99, 4, 333), (2, 4, 84, 84), (5, 3, 85, 61)], ids=str
)
@pytest.mark.parametrize("dtype", ["u1", "?", "f2", "f4", "f8"])
def test_the_values_of_a_step_are_the_same_where_their_bytes_are(shape: tuple[int, ...], dtype: str) -> None:
    window = np.zeros((shape[0], 2, *shape[1:]), dtype)  # [E, L, ...]
    left = window[:, 0]
    right = np.zeros(shape, dtype)
    assert _same_bits(left, right)

    right.reshape(-1)[-1] = 1
    assert not _same_bits(left, right)

    if dtype.startswith("f"):
        left[:] = np.nan
        right[:] = np.nan
        assert _same_bits(left, right)
        right[:] = 0.0
        left[:] = -0.0
        assert not _same_bits(left, right)
