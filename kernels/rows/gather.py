"""Rows of many columns copied as raw memory by one compiled call.

``index_select`` column by column spends most of a small sample's time on calls, on copying neighbouring rows one by
one, and on waiting for memory at the start of each slice. One loop over all columns copies stretches of neighbours
at once and asks for the next ones ahead of time: 0.45 of the time for 32 slices of 64 rows of 11 columns.

This module imports numba: import it inside the function that needs it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatroll.kernels.rows.raw_memory import ask, copy_bytes
from flatroll.kernels.scans.scan import compiled

Array = NDArray[Any]
Int = Any  # a 64-bit integer of NumPy's or Python's

_NONE = np.zeros(0, np.int64)
_AHEAD = 16  # stretches between asking for one and copying it
_LINES = 64  # cache lines asked for per stretch; the hardware foresees the rest of a longer one


@compiled()
def gather(
    source: Array, near: Array, target: Array, size: Array, rows: Int, slots: Array, follow: Array
) -> Int:
    """Copy row ``slots[i]`` of each column at address ``source[k]`` to row i of the one at ``target[k]``.

    A row of column k has ``size[k]`` bytes, a column ``rows`` rows. With ``follow`` (else empty) it is row
    ``follow[i]`` that is copied, row 0 if that is negative; where it is row ``slots[i + 1]``, it is taken from row
    i + 1 of the column at ``near[k]``, which holds the rows ``slots``. Returns the position of a row out of range,
    with nothing copied, or -1.
    """
    stretches = np.empty((len(slots), 4), np.int64)  # first row, first position, rows, whether near
    count, before, before_near = 0, np.int64(-2), False
    for i in range(len(slots)):
        row, is_near = slots[i], False
        if len(follow):
            row = max(follow[i], 0)
            if i + 1 < len(slots) and row == slots[i + 1]:
                row, is_near = np.int64(i + 1), True
        if row < 0 or (row >= rows and not is_near):
            return i
        if row != before + 1 or is_near != before_near:
            stretches[count, 0], stretches[count, 1], stretches[count, 2], stretches[count, 3] = (
                row,
                i,
                0,
                is_near,
            )
            count += 1
        stretches[count - 1, 2] += 1
        before, before_near = row, is_near
    asked, following = 0, 0  # column and stretch to ask for next
    for k in range(-1, len(source)):
        for j in range(count if k >= 0 else min(_AHEAD, len(source) * count)):
            if asked < len(source):
                if not stretches[following, 3]:
                    first = source[asked] + stretches[following, 0] * size[asked]
                    lines = min(stretches[following, 2] * size[asked] + 63 >> 6, _LINES)
                    for line in range(lines):
                        ask(first + 64 * line)
                following += 1
                if following == count:
                    asked, following = asked + 1, 0
            if k >= 0:
                copy_bytes(
                    target[k] + stretches[j, 1] * size[k],
                    (near[k] if stretches[j, 3] else source[k]) + stretches[j, 0] * size[k],
                    stretches[j, 2] * size[k],
                )
    return -1


@compiled()
def copy(source: Array, target: Array, size: Array, first: Int, slot: Int, rows: Int) -> None:
    """Copy ``rows`` rows, from ``first`` on of each column at ``source[k]``, to row ``slot`` of ``target[k]`` on."""
    for k in range(len(source)):
        copy_bytes(target[k] + slot * size[k], source[k] + first * size[k], rows * size[k])


class Block:
    """Columns in host memory, of one length, that are read and written together.

    Args:
        columns: contiguous CPU tensors ``[rows, ...]``; their memory must stay where it is.

    >>> block = Block([torch.arange(10), torch.arange(20.0).view(10, 2)])
    >>> block.take(torch.tensor([3, 4, 0]))
    [tensor([3, 4, 0]), tensor([[6., 7.],
            [8., 9.],
            [0., 1.]])]
    >>> block.write(8, [torch.tensor([5, 6, 7]), torch.zeros(3, 2)], 1, 2)
    >>> block.columns[0].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 6, 7]
    """

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self.columns = list(columns)
        self.rows = len(self.columns[0])
        for column in self.columns:
            if column.device.type != "cpu" or not column.is_contiguous() or len(column) != self.rows:
                raise ValueError("columns must be contiguous CPU tensors of one length")
        like = [
            torch.empty((1, *column.shape[1:]), dtype=column.dtype, device="meta") for column in self.columns
        ]
        self._forms = [(one.shape[1:], one.stride(), one.dtype) for one in like]
        self._address: Array = np.array([column.data_ptr() for column in self.columns], np.int64)
        self._size: Array = np.array([one.numel() * one.element_size() for one in like], np.int64)
        self.row_bytes = int(self._size.sum())

    def take(self, slots: Tensor) -> list[Tensor]:
        """Copies of the rows in ``slots`` (int64 ``[N]``, on the host), by column.

        Raises:
            IndexError: a slot that is none.
        """
        return self._gathered(slots.numpy(), _NONE, self._address)

    def take_next(self, slots: Tensor, follow: Tensor, taken: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the rows in ``follow`` (row 0 where it is -1), given the rows in ``slots`` as ``taken``, among
        which most rows that follow are.

        >>> block = Block([torch.arange(10)])
        >>> slots = torch.tensor([3, 4, 5, 8])
        >>> block.take_next(slots, torch.tensor([4, 5, 6, -1]), block.take(slots))
        [tensor([4, 5, 6, 0])]
        """
        near = np.array([rows.data_ptr() for rows in taken], np.int64)
        return self._gathered(slots.numpy(), follow.numpy(), near)

    def _gathered(self, slots: Array, follow: Array, near: Array) -> list[Tensor]:
        # with strides given it takes 1 µs a column, torch.empty 1.7
        rows = len(slots)
        copies = [
            torch.empty_strided((rows, *shape), stride, dtype=dtype) for shape, stride, dtype in self._forms
        ]
        target = np.array([copy.data_ptr() for copy in copies], np.int64)
        wrong = gather(self._address, near, target, self._size, self.rows, slots, follow)
        if wrong >= 0:
            slot = int((follow if len(follow) else slots)[wrong])
            raise IndexError(f"slot {slot} is out of range: there are {self.rows} slots")
        return copies

    def write(self, slot: int, values: Sequence[Tensor], first: int, rows: int) -> None:
        """Copy the rows ``first ... first + rows - 1`` of ``values`` to ``slot`` and the slots after it.

        Args:
            slot: with ``rows``, within the block.
            values: per column, of its dtype and row shape.
            first: first row of ``values`` to copy.
            rows: how many.
        """
        plain = [
            value
            if value.is_cpu and value.is_contiguous() and not value.is_neg() and not value.is_complex()
            else _plain(value)
            for value in values
        ]
        source = np.array([value.data_ptr() for value in plain], np.int64)
        copy(source, self._address, self._size, first, slot, rows)


def _plain(value: Tensor) -> Tensor:
    """``value`` with its numbers in host memory as they are, row after row."""
    return value.cpu().resolve_conj().resolve_neg().contiguous()
