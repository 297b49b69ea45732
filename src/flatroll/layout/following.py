"""Compares next observations with the observations that follow them."""

import torch
from torch import Tensor


def follow(before: Tensor, after: Tensor, behind: Tensor) -> Tensor:
    """Return where ``after``, the next observations of ``before``, are the observations ``behind``.

    NaN may be anything, and so may what a delta of low precision rounds away.

    Args:
        before, after, behind: ``[K, F]``, of one dtype.

    Returns:
        bool ``[K]``.

    >>> import torch
    >>> before, after = torch.zeros(3, 1), torch.tensor([[1.0], [torch.nan], [2.0]])
    >>> follow(before, after, torch.tensor([[1.0], [5.0], [5.0]]))
    tensor([ True,  True, False])
    """
    equal = after == behind
    if not bool(equal.all()) and after.is_floating_point():
        # bfloat16 keeps 8 bits of a difference, and the sum is rounded once more
        slack = (after - before).abs() * 2**-8 + behind.abs() * (2 * torch.finfo(behind.dtype).eps)
        equal |= ~((after - behind).abs() > slack)
    if after.is_complex():
        equal |= after.isnan()
    return equal.all(1)
