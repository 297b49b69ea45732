"""How often first observations come back: whether it means something that another row has the same numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor


def number_kinds(columns: Sequence[Tensor]) -> Tensor:
    """Number the rows of columns ``[N, ...]`` so that equal rows have equal numbers, int64 ``[N]``.

    Rows are compared bit for bit, so NaN equals NaN.

    >>> number_kinds([torch.tensor([5.0, 6.0, 5.0, 5.0]), torch.tensor([[1], [1], [1], [0]])]).tolist()
    [1, 2, 1, 0]
    """
    kinds = torch.zeros(len(columns[0]), dtype=torch.int64, device=columns[0].device)
    for column in columns:
        if not column.numel():
            continue
        flat = column.detach().reshape(len(column), -1).contiguous()
        _, number = torch.unique(flat.view(torch.uint8), dim=0, return_inverse=True)
        # A pair (number, kinds) as one number; numbered again, so that it stays below N.
        pairs = number + kinds * (int(number.max()) + 1)
        _, kinds = torch.unique(pairs, return_inverse=True)
    return kinds


def firsts_are_rare(kinds: Tensor, first: Tensor, inner: Tensor) -> bool:
    """Return whether first observations are less than half as common inside of episodes as other observations.

    If not, an observation may equal a first one by chance: the env has few observations, or they repeat. With few rows
    the answer is True only if no observation repeats.

    Args:
        kinds: numbers that are equal for equal observations, such as those of `number_kinds`, int64 ``[N]``.
        first: the first rows of episodes, bool ``[N]``.
        inner: the other rows that count, bool ``[N]``.

    >>> first = torch.tensor([True, False, False, True, False])
    >>> firsts_are_rare(torch.tensor([0, 1, 2, 0, 3]), first, ~first)
    True
    >>> firsts_are_rare(torch.tensor([0, 1, 0, 0, 2]), first, ~first)
    False
    """
    starts = torch.unique(kinds[first])
    inside = kinds[inner]
    like_first = int(torch.isin(inside, starts).sum())
    others = len(torch.unique(inside)) - int(torch.isin(starts, inside).sum())

    if not len(inside):  # episodes of one step: their first observations must differ from one another
        count = int(first.sum())
        return count >= _FEW_EPISODES and 2 * len(starts) > count

    if len(inside) < _FEW_ROWS:
        return not like_first and others == len(inside)

    # Twice the mean number of rows of a first observation, and the mean of another one, compared without division.
    return 2 * like_first * others < (len(inside) - like_first) * len(starts)


_FEW_EPISODES = 8
_FEW_ROWS = 32
