"""Masked statistics: means, variances and losses over the rows where a mask is True; one-time warnings."""

import sys
import warnings
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn import functional as F

from flatroll.layout.keys import NestedKey, marker

Reduction: TypeAlias = Literal["mean", "sum", "none"]
Distance: TypeAlias = Literal["l1", "l2", "smooth_l1"]

DISTANCES = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}
#: Minimum deviation to divide by, so that noise in almost constant columns is not scaled up.
_LEAST_DEVIATION = 1e-4


def distance(value: Tensor, target: Tensor, kind: Distance) -> Tensor:
    """Elementwise regression loss ``|x|``, ``x ** 2`` or Huber's (``x ** 2 / 2`` within 1) of value - target.

    >>> distance(torch.tensor([0.5, 3.0]), torch.zeros(2), "smooth_l1")
    tensor([0.1250, 2.5000])
    """
    return DISTANCES[kind](value, target, reduction="none")


def mask_and(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Combine two masks by logical and; None means all True."""
    if mask is None:
        return other
    if other is None:
        return mask
    return mask & other


def expand_mask(mask: Tensor | None, column: Tensor) -> Tensor | None:
    """A mask ``[*B]`` in the shape ``[*B, *F]`` of ``column``; None means all True."""
    if mask is None:
        return None
    ones = [1] * (column.ndim - mask.ndim)  # [*B] -> [*B, 1, ..., 1] -> [*B, *F]
    return mask.reshape(*mask.shape, *ones).expand(column.shape)


def zero_masked(column: Tensor, mask: Tensor | None) -> Tensor:
    """``column`` with 0 where ``mask`` (the same shape) is False; None means all True."""
    # where(), not a product: 0 * NaN is NaN, also in the gradient
    if mask is None:
        return column
    return torch.where(mask, column, 0.0)


def zero_padding(batch: TensorDictBase, mask_key: NestedKey, keys: Iterable[NestedKey]) -> TensorDictBase:
    """Return a shallow copy of the batch in which floating entries ``keys`` are 0 in padding rows.

    Padding (rows where ``mask_key`` is False) may contain anything. A loss that excludes such a row still multiplies
    the network's input there by a gradient of 0, and 0 * NaN in one row is NaN in every weight.

    >>> from tensordict import TensorDict
    >>> mask = torch.tensor([True, False])
    >>> padded = TensorDict({"observation": torch.tensor([1.0, float("nan")]), "mask": mask}, [2])
    >>> zero_padding(padded, "mask", ["observation"])["observation"].tolist()
    [1.0, 0.0]
    """
    copy = batch.copy()
    real = marker(batch, mask_key)
    for key in keys:
        column = batch.get(key, None)
        if column is not None and column.is_floating_point():
            copy.set(key, zero_masked(column, expand_mask(real, column)))

    return copy


def masked_mean(column: Tensor, mask: Tensor | None, weights: Tensor | None = None) -> Tensor:
    """Mean of ``column`` where ``mask`` (same shape) is True; 0 if it is True nowhere.

    With ``weights`` (the same shape), ``sum(weight * x) / sum(weight)``.

    >>> masked_mean(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    if weights is not None:
        total = zero_masked(weights, mask).sum()  # without weights 0 / 1, not 0 / 0
        return zero_masked(column * weights, mask).sum() / torch.where(total > 0, total, 1.0)
    if mask is None:
        return column.mean()
    return zero_masked(column, mask).sum() / mask.sum().clamp(min=1)  # without rows that count 0 / 1


def masked_variance(column: Tensor, mask: Tensor | None, correction: int) -> Tensor:
    """Variance where ``mask`` is True, divided by the number of rows minus ``correction``; 0 for too few."""
    if mask is None and column.numel() > correction:
        return column.var(correction=correction)

    count = column.numel() if mask is None else mask.sum()
    centred = column - masked_mean(column, mask)  # two passes, because E[x^2] - E[x]^2 would lose digits
    return zero_masked(centred.square(), mask).sum() / torch.as_tensor(count - correction).clamp(min=1)


def standardized(column: Tensor, mask: Tensor | None) -> Tensor:
    """Scale ``column`` to mean 0 and standard deviation 1 where ``mask`` is True (deviation at least 1e-4).

    >>> standardized(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))[:2]
    tensor([-0.7071,  0.7071])
    """
    if mask is None and column.numel() > 1:
        deviation, mean = torch.std_mean(column)  # one pass for both
    else:
        deviation = masked_variance(column, mask, correction=1).sqrt()
        mean = masked_mean(column, mask)

    return (column - mean) / deviation.clamp(min=_LEAST_DEVIATION)


def standardized_in_groups(column: Tensor, groups: Tensor, mask: Tensor | None) -> Tensor:
    """:func:`standardized` within groups of rows, e.g. the tasks of a multi-task batch; a group of one row gets 0.

    ``groups``, integer ``[*B]`` or ``[*B, 1]``, holds one id for each row of ``column [*B, *F]``.

    >>> standardized_in_groups(torch.tensor([1.0, 3.0, 50.0, 50.0]), torch.tensor([0, 0, 7, 7]), None)
    tensor([-0.7071,  0.7071,  0.0000,  0.0000])
    """
    # number the groups 0, 1, ..., and expand each row's number to all its elements
    ids = torch.unique(groups, return_inverse=True)[1]
    ids = ids.reshape(*ids.shape, *[1] * (column.ndim - ids.ndim)).expand(column.shape).reshape(-1)

    flat = column.reshape(-1)
    if mask is None:
        real = torch.ones_like(flat, dtype=torch.bool)
    else:
        real = mask.reshape(-1)

    def total(x: Tensor) -> Tensor:
        """Return the sum over each row's group, one value per row."""
        # add up the elements of each group, then gather the group's sum at each element
        return x.new_zeros(flat.shape[0]).index_add_(0, ids, zero_masked(x, real))[ids]

    count = total(real.to(flat.dtype))  # number of real elements per group
    centred = flat - total(flat) / count.clamp(min=1)
    deviation = (total(centred.square()) / (count - 1).clamp(min=1)).sqrt()  # unbiased
    return (centred / deviation.clamp(min=_LEAST_DEVIATION)).reshape(column.shape)


def ratio_statistics(log_ratio: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Return how far a policy has moved, from log-ratios ``[*B]`` of its probabilities: ``kl_approx``, ``ESS``, ...

    ``kl_approx`` is the mean of ``-log_ratio``, which estimates ``KL(sampled | current)``. ``ESS`` is the effective
    sample size ``sum(ratio) ** 2 / sum(ratio ** 2)`` as a share of the rows.
    """
    count: Tensor | int = log_ratio.numel()
    real = log_ratio
    if mask is not None:
        count = mask.sum().clamp(min=1)
        real = log_ratio.masked_fill(~mask, -torch.inf)  # a ratio of 0 adds nothing to the sums

    # Relative to the largest, ratios lie in [0, 1], so neither they nor their squares overflow, and the
    # factor cancels in the ESS. The lower bound avoids -inf - (-inf) = NaN where no row counts.
    largest = real.max().clamp(min=torch.finfo(real.dtype).min)
    relative = (real - largest).exp()
    total = relative.sum()
    max_ratio = largest.exp()

    return {
        "kl_approx": masked_mean(-log_ratio, mask),
        "ESS": total.square() / relative.square().sum().clamp(min=1.0) / count,
        "max_ratio": max_ratio,
        "mean_ratio": max_ratio * total / count,
    }


def on_host(column: Tensor) -> bool:
    """Return whether values of ``column`` can be read cheaply: on the CPU, outside ``torch.compile``."""
    return column.is_cpu and not torch.compiler.is_compiling()


def as_number(coefficient: Tensor) -> Any:
    """Return the number in a 0-dim tensor where reading it is cheap (see :func:`on_host`), else the tensor.

    Arithmetic with a number costs half of that with a tensor, and a number has no device to differ.
    """
    if coefficient.is_cpu and not torch.compiler.is_compiling():
        return coefficient.item()
    return coefficient


class WarnOnce:
    """Issues a warning once, attributed to the user's line that called flatroll."""

    def __init__(self) -> None:
        self.warned = False

    def __call__(self, text: str) -> None:
        if self.warned:
            return
        self.warned = True

        # count frames up to the first one outside this package and torch, which is the user's
        inside = ("flatroll.estimators", "torch.", "tensordict.")
        level = 1
        frame = sys._getframe(0)

        while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(inside):
            level = level + 1
            frame = frame.f_back
        warnings.warn(text, UserWarning, stacklevel=level)
