"""Packs rows of columns into 64-bit words, which are equal if and only if the rows are, and hashes such rows."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_VIEWED = (torch.float32, torch.float64)
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_STEP = 0x9E3779B97F4A7C15


def pack_rows(columns: Sequence[Tensor]) -> Tensor:
    """Pack the rows of columns into 64-bit words, without loss.

    Two rows get the same words if and only if each column's values are equal. 0.0 and -0.0 are equal, and so are all
    NaNs. The words do not contain the columns' dtypes and shapes: compare only rows of columns of the same kind.

    Args:
        columns: at least one tensor ``[N, *F]``, of any dtypes, all of the same N and device.

    Returns:
        int64 ``[N, W]``; each column takes its bytes of a row, rounded up to 8. It may share memory with a column.

    >>> pack_rows([torch.tensor([[0.0, 1.0], [-0.0, 1.0]]), torch.tensor([True, False])])
    tensor([[4575657221408423936,                   1],
            [4575657221408423936,                   0]])
    """
    if all(column.dtype is torch.int64 and column.ndim == 1 for column in columns):
        return torch.stack(list(columns), -1)  # 5 times as fast as the general path

    words = [_words(column) for column in columns]
    if len(words) == 1:
        return words[0]
    return torch.cat(words, -1)


def view_rows(columns: Sequence[Tensor]) -> tuple[Tensor, int]:
    """As `pack_rows`, without a copy if a kernel can normalise -0.0 and NaN.

    Returns:
        words, int64 ``[N, W]``, and the size in bytes of the floating-point numbers in them that are not normalised
        yet: 4, 8, or 0 for none.
    """
    column = columns[0]
    if len(columns) == 1 and column.dtype in _VIEWED and column.is_cpu and column.is_contiguous():
        size = column.element_size()
        width = column.shape[1] * size if column.ndim == 2 else 0

        if width and width % 8 == 0 and column.data_ptr() % 8 == 0:
            if column.requires_grad:
                column = column.detach()
            return column.view(torch.int64), size

    return pack_rows(columns), 0


def _words(column: Tensor) -> Tensor:
    rows = column.detach().reshape(len(column), prod(column.shape[1:]))
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj()).flatten(1)
    if rows.is_floating_point():
        rows = rows + 0.0  # -0.0 + 0.0 is 0.0
        # All NaNs become one; where() is slower than checking whether there is any.
        if bool(torch.isnan(rows).any()):
            rows = rows.nan_to_num(nan=float("nan"), posinf=float("inf"), neginf=float("-inf"))

    if rows.dtype is torch.int64 or not rows.shape[1]:
        return rows.long()

    bytes_of_row = rows.shape[1] * rows.element_size()
    if bytes_of_row % 8 or rows.data_ptr() % 8 or not rows.is_contiguous():
        padded = rows.new_zeros(len(rows), -(-bytes_of_row // 8) * 8 // rows.element_size())
        padded[:, : rows.shape[1]] = rows
        rows = padded
    return rows.view(torch.int64)


def hash_words(words: Tensor) -> Tensor:
    """Hash rows of words (int64 ``[N, W]``) to int64 ``[N]``: a fixed function, the same in every process and machine.

    It distributes rows evenly, but is not cryptographic: collisions can be constructed.

    >>> hash_words(torch.tensor([[1, 2], [2, 1], [1, 2]])).unique().numel()
    2
    """
    if words.device.type == "cpu" and len(words):
        from flatroll.kernels.rows.hash_table import hash_rows

        hashes = torch.empty(len(words), dtype=torch.int64)
        hash_rows(words.contiguous().numpy(), hashes.numpy().view("uint64"))
        return hashes
    return hash_by_torch(words)


def hash_by_torch(words: Tensor) -> Tensor:
    """The same as `hash_words`, in torch, on any device."""
    position = torch.arange(1, words.shape[1] + 1, device=words.device) * _signed(_STEP)
    return _mix(_mix(words + position).sum(-1) + words.shape[1])


def _signed(x: int) -> int:
    """Return the 64-bit word x as a signed number."""
    if x >> 63:
        return x - (1 << 64)
    return x


def _mix(x: Tensor) -> Tensor:
    # The arithmetic of `flatroll.kernels.rows.hash_table`, in signed numbers: >> copies the sign bit, & removes it.
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ (x >> shift & (_MASK >> shift))) * _signed(factor)
    return x ^ (x >> 31 & (_MASK >> 31))
