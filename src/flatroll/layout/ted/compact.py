"""The compact form of rows: one row more per run instead of a second column for next observations.

A column ``[N + R]`` holds, run after run, the root entries of a run's rows and then the next entry of its last row. It
stands for two columns ``[N]``, ``key`` and ``("next", key)``, and does so bit by bit where the next entry of each row
that does not end a run equals the root entry of the row behind it.
"""

import torch
from torch import Tensor

from flatroll.layout.delta import signed

_ROWS_AT_ONCE = 8192  # compared in one step: bounds the memory that a comparison takes


def root_places(ends: Tensor) -> Tensor:
    """Return where the root entry of each row stands in a compact column; its next entry is one behind.

    Args:
        ends: bool ``[N]``, the last row of each run.

    Returns:
        int64 ``[N]``.

    >>> root_places(torch.tensor([False, True, False, True]))
    tensor([0, 1, 3, 4])
    """
    # Row i comes after i root entries and the last entries of the runs that ended before it.
    return torch.arange(len(ends), device=ends.device) + ends.cumsum(0) - ends.long()


def is_shift(root: Tensor, following: Tensor, ends: Tensor) -> bool:
    """Whether each row's next entry equals, bit by bit, the root entry of the row behind it in its run.

    Args:
        root: ``[N, *F]``.
        following: next entries, ``[N, *F]``.
        ends: bool ``[N]``, the last row of each run, whose next entry no row holds.

    >>> is_shift(torch.tensor([1, 2, 5]), torch.tensor([2, 3, 6]), torch.tensor([False, True, True]))
    True
    >>> is_shift(torch.tensor([1, 2, 5]), torch.tensor([3, 3, 6]), torch.tensor([False, True, True]))
    False
    """
    if root.shape != following.shape or root.dtype != following.dtype:
        return False
    for first in range(0, len(root) - 1, _ROWS_AT_ONCE):
        stop = min(first + _ROWS_AT_ONCE, len(root) - 1)
        differs = _bits(root[first + 1 : stop + 1]) != _bits(following[first:stop])
        if bool((differs.any(1) & ~ends[first:stop].to(differs.device)).any()):
            return False
    return True


def rows_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two columns ``[N, *F]`` are the same, bit by bit.

    >>> rows_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(rows: Tensor) -> Tensor:
    """Rows ``[n, *F]`` as their bytes, uint8 ``[n, bytes per row]``: NaN equals itself and -0.0 is not 0.0."""
    if rows.numel() == 0:
        return rows.new_zeros((len(rows), 0), dtype=torch.uint8)
    return rows.resolve_conj().resolve_neg().contiguous().reshape(len(rows), -1).view(torch.uint8)


def fill_compact(column: Tensor, root: Tensor, following: Tensor, ends: Tensor) -> None:
    """Write root entries ``[N, *F]`` and the next entries of last rows into a compact column ``[N + R, *F]``."""
    places = root_places(ends)
    signed(column).index_copy_(0, places, signed(root))
    signed(column).index_copy_(0, places[ends] + 1, signed(following)[ends])


def expand_compact(column: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return root and next entries, both ``[N, *F]``, of a compact column ``[N + R, *F]``.

    >>> root, following = expand_compact(torch.tensor([1, 2, 3, 5, 6]), torch.tensor([False, True, True]))
    >>> root, following
    (tensor([1, 2, 5]), tensor([2, 3, 6]))
    """
    places = root_places(ends)
    # The last row of memory that was never written has no entry behind it; whoever reads it leaves it out.
    behind = (places + 1).clamp(max=len(column) - 1)
    whole = signed(column)
    return whole[places].view(column.dtype), whole[behind].view(column.dtype)
