"""Sums and moments over the real rows of a batch."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Reduction: TypeAlias = Literal["mean", "sum", "none"]


def both(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Rows that count in both masks; None is the mask in which all do."""
    if mask is None or other is None:
        return other if mask is None else mask
    return mask & other


def spread_over(mask: Tensor | None, column: Tensor) -> Tensor | None:
    """``mask`` of the batch's shape, broadcast over the features of ``column``."""
    if mask is None:
        return None
    return mask.reshape(*mask.shape, *[1] * (column.ndim - mask.ndim)).expand(column.shape)


def masked_mean(column: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the rows where ``mask`` (the shape of ``column``) is True; 0 if it is True nowhere.

    >>> masked_mean(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    if mask is None:
        return column.mean()
    return torch.where(mask, column, 0.0).sum() / mask.sum().clamp(min=1)


def masked_variance(column: Tensor, mask: Tensor | None, correction: int) -> Tensor:
    """Variance over the real rows; 0 where ``correction`` leaves no degree of freedom."""
    count = column.numel() if mask is None else mask.sum()
    centred = column - masked_mean(column, mask)
    squares = centred.square() if mask is None else torch.where(mask, centred.square(), 0.0)
    return squares.sum() / torch.as_tensor(count - correction).clamp(min=1)


def standardized(column: Tensor, mask: Tensor | None) -> Tensor:
    """Zero mean and unit (unbiased) deviation over the real rows; a deviation below 1e-4 counts as 1e-4.

    >>> standardized(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))[:2]
    tensor([-0.7071,  0.7071])
    """
    deviation = masked_variance(column, mask, correction=1).sqrt().clamp(min=1e-4)
    return (column - masked_mean(column, mask)) / deviation


def reduced(column: Tensor, mask: Tensor | None, reduction: Reduction) -> Tensor:
    """The loss of each row, brought to one number over the real rows, or kept with 0 in the others."""
    if reduction == "mean":
        return masked_mean(column, mask)
    kept = column if mask is None else torch.where(mask, column, 0.0)
    return kept.sum() if reduction == "sum" else kept
