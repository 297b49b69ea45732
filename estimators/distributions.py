"""Computes an actor's distributions and their log-probabilities, entropies and KL divergences."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution, Independent, TransformedDistribution, kl_divergence

from flatroll.estimators.masked import WarnOnce, on_host
from flatroll.layout.keys import NestedKey, as_tuple
from flatroll.layout.sampling import draw, saturated, score
from flatroll.layout.tensordict_seam import build_distribution, get_entry, prepare_sampling, shallow_copy


def require_actor(actor_network: TensorDictModuleBase) -> None:
    """Raise TypeError unless the actor has ``get_dist``."""
    if not hasattr(actor_network, "get_dist"):
        raise TypeError(
            "actor_network must be a tensordict module with get_dist, e.g. "
            f"ProbabilisticTensorDictSequential, got {type(actor_network).__name__}"
        )


def require_critic(name: str, network: TensorDictModuleBase | None) -> None:
    """Raise TypeError unless the network (argument ``name``) is None or has ``in_keys``."""
    if network is not None and not hasattr(network, "in_keys"):
        raise TypeError(
            f"{name} must be a tensordict module, e.g. TensorDictModule(net, in_keys=['observation'], "
            f"out_keys=['state_value']), got {type(network).__name__}"
        )


def keys_written_by(actor: TensorDictModuleBase) -> dict[str, Any]:
    """Return the keys under which an actor writes ``action`` and ``sample_log_prob``, as far as it declares them."""
    heads: list[Any] = [part for part in actor.modules() if isinstance(part, ProbabilisticTensorDictModule)]
    if not heads:
        return {}

    # the distribution is that of the last part, unless the actor declares one over all sampling parts
    sampler: Any = actor if getattr(actor, "return_composite", False) else heads[-1]
    keys: dict[str, Any] = {"action": list(sampler.dist_sample_keys)}
    # raises if the actor was built under another set_composite_lp_aggregate
    with suppress(RuntimeError):
        log_prob_keys = list(sampler.log_prob_keys)
        # several parts may share one log-probability entry, which the loss finds itself
        if len(log_prob_keys) == 1:
            keys["sample_log_prob"] = log_prob_keys

    return keys


def log_prob_parts(actor: TensorDictModuleBase) -> list[NestedKey]:
    """Return the keys under which an actor writes the log-probabilities of an action's parts; none for one part."""
    declared: Any = getattr(actor, "log_prob_keys", None) or ()
    if len(declared) > 1:
        return list(declared)
    return []


def sampled_log_prob_keys(
    actor: TensorDictModuleBase, keys: Sequence[NestedKey], batch: TensorDictBase
) -> list[NestedKey]:
    """Return the entries whose sum is the log-probability with which a batch's actions were sampled.

    Args:
        actor: the policy.
        keys: the keys set for it; of an action of several parts, one each or one for their sum.
        batch: the batch. Without the one entry for the sum, there is one for each of :func:`log_prob_parts`.
    """
    if len(keys) == 1 and get_entry(batch, keys[0]) is None:
        return log_prob_parts(actor) or list(keys)
    return list(keys)


def distribution(actor_network: TensorDictModuleBase, batch: TensorDictBase) -> Distribution:
    """Return the actor's action distribution for each row; the actor's outputs are written to ``batch``."""
    return distribution_for(None, actor_network, batch)[0]


def distribution_for(
    readers: Iterable[Any] | None, actor_network: TensorDictModuleBase, batch: TensorDictBase
) -> tuple[Distribution, TensorDictBase]:
    """Return the actor's action distribution for each row, and the batch with the actor's outputs.

    Args:
        readers: networks that read the actor's outputs afterwards; ``batch`` is then unchanged, and the second result
            is a copy with the outputs, or ``batch`` itself if no reader needs them. None: the outputs are written to
            ``batch``.
        actor_network: module with ``get_dist``.
        batch: its input.
    """
    ready = prepare_sampling(actor_network, batch, readers)
    if ready is None:
        whole: Any = actor_network
        work = batch if readers is None else shallow_copy(batch)
        return whole.get_dist(work), work

    head, work, outputs = ready
    return build_distribution(head, work, outputs), work


def part_key(part: NestedKey, actions: Sequence[NestedKey], actor_network: TensorDictModuleBase) -> NestedKey:
    """Return the key of an action's part, given its name in :func:`~flatroll.layout.sampling.components`.

    Args:
        part: the name.
        actions: the keys of the action.
        actor_network: the actor; if it declares a single key, the parts are nested under it.
    """
    declared: list[NestedKey] | None = getattr(actor_network, "dist_sample_keys", None)
    if declared and as_tuple(part) not in map(as_tuple, declared):
        return (*as_tuple(actions[0]), *as_tuple(part))
    return part


def compute_log_prob(
    dist: Distribution, action: Tensor, base: Tensor | None = None, warn: WarnOnce | None = None
) -> Tensor:
    """Return the log-probability of each row's action; ValueError if the action's shape differs.

    Args:
        dist: of each row.
        action: of each row.
        base: its base sample, if the batch has it (:func:`~flatroll.layout.sampling.base_sample_key`).
        warn: called without a base sample: a tanh-Normal cannot score its actions near -1 and 1.

    Raises:
        ValueError: the action does not have the distribution's shape, which would broadcast.
    """
    shape = dist.batch_shape
    # log_prob() would silently broadcast [N, 1] against [N] to [N, N]
    log_prob: Tensor | None = None
    if action.shape[: len(shape)] == shape:
        if base is None:
            log_prob = dist.log_prob(action)
        else:
            log_prob = score(dist, action, base)

    squashes = isinstance(dist, (TransformedDistribution, Independent))
    if squashes and base is None and warn is not None and not warn.warned and on_host(action):
        lost = saturated(dist, action)
        if lost is not None and (count := int(lost.sum())):
            warn(
                f"{count} of {lost.numel()} numbers of the batch's actions are so close to an end of tanh that their "
                "log-probability is wrong or NaN: collect with return_log_prob=True in the policy, so that the "
                "Collector keeps the value before tanh ('base_sample')"
            )

    if log_prob is None or log_prob.shape != shape:
        raise ValueError(
            f"the action must have the shape {tuple(shape + dist.event_shape)} of the actor's "
            f"{type(dist).__name__}, got {tuple(action.shape)}"
        )

    return log_prob


def joint(log_prob: Tensor, batch: TensorDictBase) -> Tensor:
    """Sum log-probabilities (or entropies) ``[*B, *A]`` of independent action dims to ``[*B]``.

    Raises:
        ValueError: they do not begin with the batch's dims, and would broadcast against its rows.
    """
    shape = batch.batch_size
    if log_prob.shape[: len(shape)] != shape:  # e.g. [N] beside a batch [N, 1]: [N, N] losses
        raise ValueError(
            f"the log-probability must have one number per row {list(shape)}, got {tuple(log_prob.shape)}: the "
            "batch size of the tensordict must be that of the rows, without feature dims"
        )

    extra = log_prob.ndim - len(shape)  # further dims are independent, so their log-probabilities add up
    if extra > 0:
        return log_prob.flatten(-extra).sum(-1)
    return log_prob


def compute_entropy(dist: Distribution, samples: int) -> Tensor:
    """Return the entropy in closed form, or its Monte Carlo estimate from ``samples`` samples."""
    try:
        return dist.entropy()
    except NotImplementedError:  # e.g. a tanh-Normal: H = -E[log p(x)] over its own samples x
        return -draw(dist, (samples,), reparametrize=dist.has_rsample)[1].mean(0)


def compute_divergence(sampled: Distribution, current: Distribution, samples: int) -> Tensor:
    """Return ``KL(sampled | current)`` in closed form, or else an estimate from ``samples`` samples."""
    try:
        return kl_divergence(sampled, current)
    except NotImplementedError:  # KL = E[log p(x) - log q(x)] over x of p; gradients flow into q only
        with torch.no_grad():
            x, log_prob, _ = draw(sampled, (samples,), reparametrize=False)
        return (log_prob - current.log_prob(x)).mean(0)
