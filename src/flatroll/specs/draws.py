"""Random values, distributed as Gymnasium's ``space.sample`` draws them."""

from typing import NamedTuple

import torch
from torch import Tensor


class Limits(NamedTuple):
    """Bounds to draw between, float64 and broadcastable to the values; infinite where there is none."""

    low: Tensor
    high: Tensor
    bounded: bool  # whether all are finite

    @classmethod
    def of(cls, low: Tensor, high: Tensor) -> "Limits":
        """The limits of these bounds."""
        return cls(low, high, bool((low.isfinite() & high.isfinite()).all()))


def draw_between(limits: Limits, shape: torch.Size, whole: bool, generator: torch.Generator | None) -> Tensor:
    """Draw float64 numbers: uniform between two bounds, exponential from one, normal where there is none.

    ``whole`` numbers are uniform with both ends. The arithmetic is in float64, so that the widest bounds of narrower
    dtypes do not overflow.
    """
    low, high, bounded = limits
    uniform = torch.rand(shape, generator=generator, device=low.device, dtype=torch.float64)
    # Weighted ends, not low + (high - low) * u, which overflows for the widest bounds. Whole numbers reach high
    # because the floor is taken below one more.
    drawn = low * (1 - uniform) + (high + 1 if whole else high) * uniform
    if not bounded:
        below, above = low.isfinite(), high.isfinite()
        away = -torch.log1p(-uniform)  # exponential with mean 1
        normal = torch.randn(shape, generator=generator, device=low.device).double()
        one_sided = torch.where(below, low + away, torch.where(above, high - away, normal))
        drawn = torch.where(below & above, drawn, one_sided)
    return (drawn.floor_() if whole else drawn).clamp_(low, high)


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
    return noise.masked_fill_(~mask, -1.0).argmax(-1)  # the largest of independent numbers is uniform
