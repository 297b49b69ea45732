"""Rows copied as bytes are the rows that torch gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flatroll.kernels.rows.gather import HostBlock

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.float32, torch.float64, torch.bfloat16, torch.complex64]
SHAPES = [(), (1,), (17,), (2, 3), (0,), (84, 84)]


def column(rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 200, (rows, *shape)).to(dtype)


SLOTS = {
    "one": [3],
    "slices, two side by side": [*range(5, 15), *range(15, 20), *range(5, 15), 0],
    "backwards": list(range(39, -1, -1)),
    "the same": [7] * 50,
    "none": [],
}


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_taken_rows_are_those_of_index_select(slots: list[int]) -> None:
    columns = [column(40, shape, dtype) for dtype in DTYPES for shape in SHAPES]
    index = torch.tensor(slots, dtype=torch.int64)
    for taken, stored in zip(HostBlock(columns).take(index), columns, strict=True):
        wanted = stored.index_select(0, index)
        assert taken.dtype == wanted.dtype and taken.stride() == wanted.stride()
        assert torch.equal(taken, wanted)


def test_rows_beyond_what_is_asked_for_ahead() -> None:
    """Slices longer than the lines asked for, and more of them than are asked for at once."""
    stored = column(3000, (100,), torch.float64)
    index = (torch.randint(2900, (40, 1)) + torch.arange(100)).flatten()
    assert torch.equal(HostBlock([stored]).take(index)[0], stored[index])


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_rows_that_follow_are_taken_from_the_rows_that_were(slots: list[int]) -> None:
    block = HostBlock([column(41, (3,), torch.float32), column(41, (), torch.uint8)], roots=[0, 1])
    index = torch.tensor(slots, dtype=torch.int64)
    follow = index + 1
    follow[::7] = -1  # none follows
    follow[3::9] = 0  # another one does
    none: Any = torch.zeros(2, 0, dtype=torch.int64), [stored[:1] for stored in block.columns]
    for later, stored in zip(block.take(index, follow, *none)[2:], block.columns, strict=True):
        assert torch.equal(later, stored[follow.clamp(min=0)])
    if slots:
        with pytest.raises(IndexError, match="slot 41 is out of range: there are 41 slots"):
            block.take(index, torch.full_like(index, 41), *none)


@pytest.mark.parametrize("slot", [-1, 40])
def test_a_slot_that_is_none_is_refused(slot: int) -> None:
    block = HostBlock([torch.zeros(40)])
    with pytest.raises(IndexError, match=f"slot {slot} is out of range: there are 40 slots"):
        block.take(torch.tensor([3, slot, 4]))


def test_written_rows_are_those_given_in_any_form() -> None:
    rows = torch.arange(24.0).view(6, 4)
    complex_rows = torch.complex(rows, rows + 1)
    forms = {
        "plain": rows,
        "every other": torch.arange(48.0).view(12, 4)[::2],
        "transposed": torch.arange(24.0).view(4, 6).T,
        "expanded": torch.arange(4.0).expand(6, 4),
        "conjugate": complex_rows.conj(),
        "negative": complex_rows.conj().imag,
    }
    stored = [torch.zeros(10, *form.shape[1:], dtype=form.dtype) for form in forms.values()]
    HostBlock(stored).write(3, list(forms.values()), 1, 4)
    for column, form in zip(stored, forms.values(), strict=True):
        assert torch.equal(column[3:7], form[1:5])
        assert not column[:3].any() and not column[7:].any()


def test_columns_that_cannot_be_copied_as_bytes_are_refused() -> None:
    for columns in ([torch.zeros(8, 2).T], [torch.zeros(3), torch.zeros(4)], [torch.zeros(3, device="meta")]):
        with pytest.raises(ValueError, match="contiguous CPU tensors of one length"):
            HostBlock(columns)
