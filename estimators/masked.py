"""Sums and moments over the real rows of a batch."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Reduction: TypeAlias = Literal["mean", "sum", "none"]
Distance: TypeAlias = Literal["l1", "l2", "smooth_l1"]

_DISTANCES = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}


def one_of(name: str, choice: str, choices: tuple[str, ...]) -> None:
    """ValueError unless ``choice`` is one of ``choices``."""
    if choice not in choices:
        *most, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(most)} or {last}, got {choice!r}")


def check_distance(name: str, kind: str) -> None:
    """ValueError unless :func:`distance` knows ``kind``."""
    one_of(name, kind, tuple(_DISTANCES))


def distance(value: Tensor, target: Tensor, kind: Distance) -> Tensor:
    """Distance of each element to its target: ``|x|``, ``x ** 2``, or Huber's ``x ** 2 / 2`` within 1.

    >>> distance(torch.tensor([0.5, 3.0]), torch.zeros(2), "smooth_l1")
    tensor([0.1250, 2.5000])
    """
    return _DISTANCES[kind](value, target, reduction="none")


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


def kept(column: Tensor, mask: Tensor | None) -> Tensor:
    """``column`` with 0 where ``mask`` (the same shape) is False, whatever stands there, NaN included."""
    return column if mask is None else torch.where(mask, column, 0.0)


def masked_mean(column: Tensor, mask: Tensor | None, weights: Tensor | None = None) -> Tensor:
    """Mean over the rows where ``mask`` (the shape of ``column``) is True; 0 if it is True nowhere.

    With ``weights`` (the same shape), ``sum(weight * x) / sum(weight)``.

    >>> masked_mean(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    if weights is not None:
        total = kept(weights, mask).sum()
        return kept(column * weights, mask).sum() / torch.where(total > 0, total, 1.0)
    if mask is None:
        return column.mean()
    return kept(column, mask).sum() / mask.sum().clamp(min=1)


def masked_variance(column: Tensor, mask: Tensor | None, correction: int) -> Tensor:
    """Variance over the real rows; 0 where ``correction`` leaves no degree of freedom."""
    if mask is None and column.numel() > correction:
        return column.var(correction=correction)
    count = column.numel() if mask is None else mask.sum()
    centred = column - masked_mean(column, mask)
    return kept(centred.square(), mask).sum() / torch.as_tensor(count - correction).clamp(min=1)


def standardized(column: Tensor, mask: Tensor | None) -> Tensor:
    """Zero mean and unit (unbiased) deviation over the real rows; a deviation below 1e-4 counts as 1e-4.

    >>> standardized(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))[:2]
    tensor([-0.7071,  0.7071])
    """
    if mask is None and column.numel() > 1:
        deviation, mean = torch.std_mean(column)
    else:
        deviation, mean = masked_variance(column, mask, correction=1).sqrt(), masked_mean(column, mask)
    return (column - mean) / deviation.clamp(min=1e-4)


def reduced(
    column: Tensor, mask: Tensor | None, reduction: Reduction, weights: Tensor | None = None
) -> Tensor:
    """The loss of each row, brought to one number over the real rows, or kept with 0 in the others.

    ``weights`` (the same shape) multiply the rows; the mean is then divided by their sum.
    """
    if reduction == "mean":
        return masked_mean(column, mask, weights)
    rows = kept(column if weights is None else column * weights, mask)
    return rows.sum() if reduction == "sum" else rows
