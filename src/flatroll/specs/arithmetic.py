"""Ranges, comparisons and random draws of numbers, for all dtypes."""

from typing import NamedTuple

import torch
from torch import Tensor

_NOT_ORDERED = {torch.bool, torch.uint16, torch.uint32, torch.uint64}  # torch has no clamp for these
#: The largest float64 within the range of these dtypes: their own maximum would be rounded up.
_LARGEST_DOUBLE = {torch.int64: 2.0**63 - 1024, torch.uint64: 2.0**64 - 2048}


def is_whole(dtype: torch.dtype) -> bool:
    """Return whether a dtype is integer or bool."""
    return not dtype.is_floating_point and not dtype.is_complex


def to_ordered(numbers: Tensor) -> Tensor:
    """Map numbers to a dtype that torch can clamp and compare, preserving the order."""

    if numbers.dtype not in _NOT_ORDERED:
        return numbers
    if numbers.dtype is torch.uint64:  # with the highest bit flipped, int64 has the same order
        return numbers.view(torch.int64) ^ torch.iinfo(torch.int64).min
    return numbers.long()


def from_ordered(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_ordered`."""
    if dtype is torch.uint64:
        return (numbers ^ torch.iinfo(torch.int64).min).view(torch.uint64)
    return numbers.to(dtype)


def as_double(numbers: Tensor) -> Tensor:
    """Convert numbers to float64, not rounded up beyond their dtype's range."""
    return numbers.double().clamp(max=_LARGEST_DOUBLE.get(numbers.dtype, torch.inf))


def whole_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the range in which a dtype represents all integers."""
    if dtype.is_complex:
        raise ValueError(f"dtype must be a real dtype, got {dtype}")
    if dtype is torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        most = round(2 / torch.finfo(dtype).eps)
        return -most, most

    info = torch.iinfo(dtype)
    return info.min, info.max


def check_holds(dtype: torch.dtype | None, least: int, most: int) -> None:
    """Raise ValueError unless a dtype holds the categories from ``least`` to ``most``."""
    if dtype is None:
        raise TypeError("dtype must be a torch dtype, such as torch.int64, got None")
    low, high = whole_range(dtype)

    if least < low or most > high:
        raise ValueError(f"dtype {dtype} cannot hold the categories {least} to {most}: choose a wider one")


class Limits(NamedTuple):
    """Bounds to draw between, float64 and broadcastable to the values; infinite where unbounded."""

    low: Tensor
    high: Tensor
    bounded: bool  # whether all limits are finite

    @classmethod
    def of(cls, low: Tensor, high: Tensor) -> "Limits":
        """The limits of these bounds."""
        return cls(low, high, bool((low.isfinite() & high.isfinite()).all()))


def draw_between(limits: Limits, shape: torch.Size, whole: bool, generator: torch.Generator | None) -> Tensor:
    """Draw float64 numbers: uniform between two bounds, exponential from one bound, normal without bounds.

    ``whole`` numbers are uniform with both ends. The arithmetic is in float64, so that the widest bounds of narrower
    dtypes do not overflow.
    """
    low, high, bounded = limits
    uniform = torch.rand(shape, generator=generator, device=low.device, dtype=torch.float64)
    top = high + 1 if whole else high

    # A weighted sum of the limits: low + (high - low) * u would overflow for the widest bounds. Whole numbers
    # reach high because the floor is taken of numbers below high + 1.
    drawn = low * (1 - uniform) + top * uniform

    if not bounded:
        below = low.isfinite()
        above = high.isfinite()
        away = -torch.log1p(-uniform)  # exponential with mean 1
        normal = torch.randn(shape, generator=generator, device=low.device).double()
        one_sided = torch.where(below, low + away, torch.where(above, high - away, normal))
        drawn = torch.where(below & above, drawn, one_sided)

    if whole:
        drawn = drawn.floor_()
    return drawn.clamp_(low, high)


def draw_categories(
    n: Tensor | int, shape: torch.Size, device: torch.device | None, generator: torch.Generator | None
) -> Tensor:
    """Draw categories from 0 to ``n - 1`` uniformly, int64; a tensor ``n`` has the last dims of the shape."""
    if isinstance(n, int):
        return torch.randint(n, shape, generator=generator, device=device)

    uniform = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
    # u < 1, but u * n can round up to n.
    return (uniform * n).floor().long().minimum(n - 1)


def draw_masked(mask: Tensor, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Draw categories ``[*shape, *mask.shape[:-1]]`` uniformly among those that a mask ``[..., n]`` allows."""
    noise = torch.rand((*shape, *mask.shape), generator=generator, device=mask.device)
    return noise.masked_fill_(~mask, -1.0).argmax(-1)  # the largest is at a uniformly random place
