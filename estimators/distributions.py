"""What an actor network says about actions."""

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    TensorDictModuleBase,
)
from torch import Tensor
from torch.distributions import Distribution

from flatroll.layout.fast_call import before_sampling
from flatroll.layout.keys import NestedKey


def require_actor(actor_network: TensorDictModuleBase) -> None:
    """TypeError unless the actor has ``get_dist``."""
    if not hasattr(actor_network, "get_dist"):
        raise TypeError(
            "actor_network must be a tensordict module with get_dist, e.g. "
            f"ProbabilisticTensorDictSequential, got {type(actor_network).__name__}"
        )


def distribution(actor_network: TensorDictModuleBase, batch: TensorDictBase) -> Distribution:
    """The actor's distribution over actions in each row; what the actor writes on the way is in ``batch``."""
    ready = before_sampling(actor_network, batch)
    actor: Any
    actor, batch = (actor_network, batch) if ready is None else ready
    dist: Distribution = actor.get_dist(batch)
    return dist


def log_prob_of(dist: Distribution, action: Tensor) -> Tensor:
    """Log-probability of each row's action, as the distribution gives it.

    Raises:
        ValueError: the action does not have the distribution's shape, which would broadcast.
    """
    shape = dist.batch_shape
    log_prob: Tensor | None = dist.log_prob(action) if action.shape[: len(shape)] == shape else None
    if log_prob is None or log_prob.shape != shape:
        raise ValueError(
            f"the action must have the shape {tuple(shape + dist.event_shape)} of the actor's "
            f"{type(dist).__name__}, got {tuple(action.shape)}"
        )
    return log_prob


def components(dist: Distribution) -> dict[NestedKey, Distribution]:
    """The distributions of an action of several parts, by the entries that hold these; empty for any other."""
    return dict(dist.dists) if isinstance(dist, CompositeDistribution) else {}


def joint(log_prob: Tensor, batch: TensorDictBase) -> Tensor:
    """Log-probabilities (or entropies) of independent action dims summed to the batch's shape ``[*B]``."""
    extra = log_prob.ndim - batch.batch_dims
    return log_prob.flatten(-extra).sum(-1) if extra > 0 else log_prob
