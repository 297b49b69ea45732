"""Computes an actor's distributions and their log-probabilities, entropies and KL divergences."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution, ProbabilisticTensorDictModule, TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from flatroll.layout.keys import NestedKey
from flatroll.layout.tensordict_seam import get_entry, prepare_sampling, shallow_copy


def require_actor(actor_network: TensorDictModuleBase) -> None:
    """Raise TypeError unless the actor has ``get_dist``."""
    if not hasattr(actor_network, "get_dist"):
        raise TypeError(
            "actor_network must be a tensordict module with get_dist, e.g. "
            f"ProbabilisticTensorDictSequential, got {type(actor_network).__name__}"
        )


def require_critic(name: str, network: TensorDictModuleBase | None) -> None:
    """Raise TypeError unless the network, the argument ``name``, is None or has ``in_keys``."""
    if network is not None and not hasattr(network, "in_keys"):
        raise TypeError(
            f"{name} must be a tensordict module, e.g. TensorDictModule(net, in_keys=['observation'], "
            f"out_keys=['state_value']), got {type(network).__name__}"
        )


def distribution(actor_network: TensorDictModuleBase, batch: TensorDictBase) -> Distribution:
    """Return the actor's action distribution for each row; the actor's outputs are written to ``batch``."""
    return distribution_for(None, actor_network, batch)[0]


def distribution_for(
    readers: Iterable[Any] | None, actor_network: TensorDictModuleBase, batch: TensorDictBase
) -> tuple[Distribution, TensorDictBase]:
    """Return the actor's action distribution for each row, and the batch with the actor's outputs.

    Args:
        readers: the networks that read the actor's outputs afterwards; then ``batch`` stays as it is, and the second
            result is a copy with the outputs, or ``batch`` itself where no reader reads them. None, anybody: then the
            outputs are written to ``batch``.
        actor_network: has ``get_dist``.
        batch: what it reads.
    """
    ready = prepare_sampling(actor_network, batch, readers)
    if ready is None:
        whole: Any = actor_network
        work = batch if readers is None else shallow_copy(batch)
        return whole.get_dist(work), work
    head, work, outputs = ready
    if type(head) is ProbabilisticTensorDictModule and head.dist_keys == head.in_keys:
        columns: dict[str, Any] = {}
        for key in head.in_keys:
            if type(key) is str:
                columns[key] = outputs[key] if key in outputs else get_entry(work, key)
        if len(columns) == len(head.in_keys):
            # what get_dist() does in more steps; it finds the words for what goes wrong
            with suppress(TypeError):
                return head.distribution_class(**columns, **head.distribution_kwargs), work
    read = shallow_copy(work).update(outputs) if outputs else work
    return head.get_dist(read), work


def components(dist: Distribution) -> dict[NestedKey | None, Distribution]:
    """Return a composite distribution's parts by action key; any other distribution under the key None."""
    return dict(dist.dists) if isinstance(dist, CompositeDistribution) else {None: dist}


def log_prob_of(dist: Distribution, action: Tensor) -> Tensor:
    """Return the log-probability of each row's action; ValueError if the action's shape differs.

    Raises:
        ValueError: the action does not have the distribution's shape, which would broadcast.
    """
    shape = dist.batch_shape
    # log_prob() would broadcast [N, 1] against [N] to [N, N] without a word
    log_prob: Tensor | None = dist.log_prob(action) if action.shape[: len(shape)] == shape else None
    if log_prob is None or log_prob.shape != shape:
        raise ValueError(
            f"the action must have the shape {tuple(shape + dist.event_shape)} of the actor's "
            f"{type(dist).__name__}, got {tuple(action.shape)}"
        )
    return log_prob


def joint(log_prob: Tensor, batch: TensorDictBase) -> Tensor:
    """Log-probabilities (or entropies) ``[*B, *A]`` of independent action dims summed to ``[*B]``.

    Raises:
        ValueError: they do not begin with the batch's dims, and would broadcast against its rows.
    """
    shape = batch.batch_size
    if log_prob.shape[: len(shape)] != shape:  # e.g. [N] beside a batch [N, 1]: [N, N] losses
        raise ValueError(
            f"the log-probability must have one number per row {list(shape)}, got {tuple(log_prob.shape)}: the batch "
            "size of the tensordict must be that of the rows, without dims of features"
        )
    extra = log_prob.ndim - len(shape)  # dims behind the batch's: independent, so their logarithms add up
    return log_prob.flatten(-extra).sum(-1) if extra > 0 else log_prob


def entropy_of(dist: Distribution, samples: int) -> Tensor:
    """Return the entropy in closed form, or its Monte Carlo estimate from ``samples`` samples."""
    try:
        return dist.entropy()
    except NotImplementedError:  # e.g. a tanh-Normal: H = -E[log p(x)] over its own samples x
        x = dist.rsample((samples,)) if dist.has_rsample else dist.sample((samples,))
        return -dist.log_prob(x).mean(0)


def divergence_of(sampled: Distribution, current: Distribution, samples: int) -> Tensor:
    """``KL(sampled | current)`` in closed form, or estimated from ``samples`` samples where there is none."""
    try:
        return kl_divergence(sampled, current)
    except NotImplementedError:  # KL = E[log p(x) - log q(x)] over x of p; gradients flow into q alone
        with torch.no_grad():
            x = sampled.sample((samples,))
            log_prob = sampled.log_prob(x)
        return (log_prob - current.log_prob(x)).mean(0)
