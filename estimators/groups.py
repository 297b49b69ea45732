"""Standardising within groups of rows, e.g. the tasks of a multi-task batch."""

import torch
from torch import Tensor

from flatroll.estimators.masked import kept


def standardized_in_groups(column: Tensor, groups: Tensor, mask: Tensor | None) -> Tensor:
    """Zero mean and unit (unbiased) deviation over the real rows of each group; a deviation below 1e-4 counts as 1e-4.

    Args:
        column: ``[*B, *F]``.
        groups: integer ``[*B]`` or ``[*B, 1]``, one id per row.
        mask: bool of the column's shape, the real rows; None if all are.

    Returns:
        tensor of the column's shape. A group of one row gets 0.

    >>> standardized_in_groups(torch.tensor([1.0, 3.0, 50.0, 50.0]), torch.tensor([0, 0, 7, 7]), None)
    tensor([-0.7071,  0.7071,  0.0000,  0.0000])
    """
    ids = torch.unique(groups, return_inverse=True)[1]
    ids = ids.reshape(*ids.shape, *[1] * (column.ndim - ids.ndim)).expand(column.shape).reshape(-1)
    flat = column.reshape(-1)
    real = torch.ones_like(flat, dtype=torch.bool) if mask is None else mask.reshape(-1)

    def total(x: Tensor) -> Tensor:
        """The sum of each group, at each of its rows."""
        return x.new_zeros(flat.shape[0]).index_add_(0, ids, kept(x, real))[ids]

    count = total(real.to(flat.dtype))
    centred = flat - total(flat) / count.clamp(min=1)
    deviation = (total(centred.square()) / (count - 1).clamp(min=1)).sqrt().clamp(min=1e-4)
    return (centred / deviation).reshape(column.shape)
