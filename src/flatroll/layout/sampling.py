"""Samples from distributions with log-probabilities, and scores actions by their values before tanh.

``log_prob(rsample())`` inverts the transform of a tanh-Normal: close to -1 and 1 a float32 action no longer
determines the normal sample, and the log-probability is off by tens, or NaN. Therefore the normal sample itself, the
*base sample*, is scored; a collector stores it in the batch beside the action.
"""

from contextlib import nullcontext
from typing import Any, Protocol, TypeGuard

import torch
from tensordict.nn import CompositeDistribution
from torch import Tensor
from torch.distributions import (
    Categorical,
    ComposeTransform,
    Distribution,
    Independent,
    TanhTransform,
    TransformedDistribution,
)

from flatroll.layout.keys import NestedKey


class FromBase(Protocol):
    """A transformed distribution that draws and scores base samples by itself, in fewer operations."""

    def draw_base(self, sample_shape: Any = ()) -> Tensor:
        """Draw base samples ``[*sample_shape, *B, *E]``; gradients flow through them."""
        ...

    def from_base(self, base: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples made from base samples, and their log-probabilities ``[*B]``."""
        ...

    def to_base(self, value: Tensor) -> Tensor:
        """Return the base samples of samples, as far as the precision of the samples allows."""
        ...


def base_sample_key(action: NestedKey) -> NestedKey:
    """Return the key under which a collector stores an action's base sample.

    >>> base_sample_key("action")
    ('base_sample', 'action')
    """
    if isinstance(action, str):
        return ("base_sample", action)
    return ("base_sample", *action)


def components(dist: Distribution) -> dict[NestedKey | None, Distribution]:
    """Return a composite distribution's parts by action key; any other distribution under the key None."""
    if isinstance(dist, CompositeDistribution):
        return dict(dist.dists)
    return {None: dist}


def draw(
    dist: Distribution, shape: tuple[int, ...] = (), *, reparametrize: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample from a non-composite distribution; return the sample, its log-probability and its base sample.

    Args:
        dist: the distribution.
        shape: dims of samples in front of the batch's.
        reparametrize: let gradients flow through the sample.

    Returns:
        sample ``[*shape, *B, *E]``, log-probability ``[*shape, *B]``, and what transforms made the sample of; None
        if there is no transform.

    >>> from torch.distributions import Normal, TanhTransform
    >>> dist = TransformedDistribution(Normal(torch.tensor(12.0), 0.3), TanhTransform())
    >>> action, log_prob, base = draw(dist)
    >>> float(action), log_prob.isfinite(), dist.log_prob(action)
    (1.0, tensor(True), tensor(nan))
    """
    if _knows_base(dist):
        gradients: Any = nullcontext() if reparametrize else torch.no_grad()
        with gradients:
            base = dist.draw_base(shape)
        return *dist.from_base(base), base

    root = _root(dist)
    if root is not None:
        base = root.rsample(shape) if reparametrize else root.sample(shape)
        return *_apply_transforms(dist, base), base

    if type(dist) is Categorical and not shape and dist.logits.ndim == 2:
        # As sample() does, at half the cost of sample() and log_prob().
        choice = torch.multinomial(dist.probs, 1, True)
        return choice.squeeze(-1), dist.logits.gather(-1, choice).squeeze(-1), None

    name = "rsample_and_log_prob" if reparametrize else "sample_and_log_prob"
    together: Any = getattr(dist, name, None)
    if together is not None:
        sample, log_prob = together(shape)
    else:  # the distribution may recognise its own sample and reuse what it computed
        sample = dist.rsample(shape) if reparametrize else dist.sample(shape)
        log_prob = dist.log_prob(sample)
    return sample, log_prob, None


def score(dist: Distribution, action: Tensor, base: Tensor) -> Tensor:
    """Return the log-probability ``[*B]`` of an action's base sample.

    An action changed since then (random exploration, clipping) is scored itself.
    """
    if _root(dist) is None:
        log_prob: Tensor = dist.log_prob(action)
        return log_prob

    made, log_prob = _apply_transforms(dist, base)
    close = torch.isclose(made, action.to(made.dtype), rtol=1e-4, atol=1e-6)
    if action.is_cpu and not torch.compiler.is_compiling() and bool(close.all()):
        return log_prob

    inverted = _inverse(dist, action)
    same = close
    if close.shape != base.shape:
        same = close.all(-1, keepdim=True)
    return _apply_transforms(dist, torch.where(same, base, inverted))[1]


def saturated(dist: Distribution, action: Tensor) -> Tensor | None:
    """Return which numbers of an action are so close to the ends of a tanh that the base sample is lost.

    None if the distribution has no tanh.
    """

    for transform in reversed(_transforms(dist)):
        if isinstance(transform, TanhTransform):
            return action.abs() >= 1.0 - 2.0 * torch.finfo(action.dtype).resolution
        action = transform.inv(action)
    return None


def _parts(dist: TransformedDistribution) -> list[Any]:
    """Its own transforms, one by one."""
    parts: list[Any] = []
    for transform in dist.transforms:
        if isinstance(transform, ComposeTransform):
            parts += transform.parts
        else:
            parts.append(transform)
    return parts


def _transforms(dist: Distribution) -> list[Any]:
    """What turns a base sample into a sample, in this order."""
    if _is_independent(dist):
        return _transforms(dist.base_dist)
    if _is_transformed(dist):
        return [*_transforms(dist.base_dist), *_parts(dist)]
    return []


def _root(dist: Distribution) -> Distribution | None:
    """The distribution of base samples; None where nothing transforms them."""
    within = dist
    transformed = False
    while (changes := _is_transformed(within)) or _is_independent(within):
        transformed |= changes
        within = within.base_dist

    if transformed:
        return within
    return None


def _apply_transforms(dist: Distribution, base: Tensor) -> tuple[Tensor, Tensor]:
    """Transform a base sample; return the sample and its log-probability."""
    if _knows_base(dist):
        return dist.from_base(base)

    if _is_independent(dist):
        sample, log_prob = _apply_transforms(dist.base_dist, base)
        return sample, _sum_last(log_prob, dist.reinterpreted_batch_ndims)

    if not _is_transformed(dist):
        return base, dist.log_prob(base)
    sample, log_prob = _apply_transforms(dist.base_dist, base)

    parts = _parts(dist)
    # event dims of the input of each part, beginning with the first
    dims = len(dist.event_shape) + sum(part.domain.event_dim - part.codomain.event_dim for part in parts)
    log_prob = _sum_last(log_prob, dims - len(dist.base_dist.event_shape))

    for part in parts:
        before = sample
        sample = part(sample)
        slope = part.log_abs_det_jacobian(before, sample)
        log_prob = log_prob - _sum_last(slope, dims - part.domain.event_dim)
        dims += part.codomain.event_dim - part.domain.event_dim
    return sample, log_prob


def _inverse(dist: Distribution, sample: Tensor) -> Tensor:
    """The base sample of a sample, as far as its digits tell it."""
    if _knows_base(dist):
        return dist.to_base(sample)

    for transform in reversed(_transforms(dist)):
        sample = transform.inv(sample)
    return sample


def _sum_last(x: Tensor, dims: int) -> Tensor:
    """The sum over the last ``dims`` dims."""
    if dims:
        return x.sum(tuple(range(-dims, 0)))
    return x


def _knows_base(dist: Distribution) -> TypeGuard[FromBase]:
    """Return whether a distribution converts base samples itself (``from_base``)."""
    return hasattr(dist, "from_base")


def _is_independent(dist: Distribution) -> TypeGuard["Independent[Any]"]:
    """Return whether a distribution scores and samples as `Independent` does."""
    kind = type(dist)
    return (
        isinstance(dist, Independent)
        and kind.log_prob is Independent.log_prob
        and kind.rsample is Independent.rsample
    )


def _is_transformed(dist: Distribution) -> TypeGuard[TransformedDistribution]:
    """Return whether a transformed distribution has ``from_base``, or PyTorch's own scoring and sampling."""
    kind = type(dist)  # a subclass that scores or samples differently does it itself
    return isinstance(dist, TransformedDistribution) and (
        hasattr(kind, "from_base")
        or (
            kind.log_prob is TransformedDistribution.log_prob
            and kind.rsample is TransformedDistribution.rsample
        )
    )
