"""Proximal policy optimisation: the ratio objective, plain, clipped, and with a penalty on the KL divergence."""

import math
from functools import reduce
from typing import Any, ClassVar

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution
from typing_extensions import override

from flatroll.estimators.distributions import components, divergence_of, joint
from flatroll.estimators.losses.base import LossInputs
from flatroll.estimators.losses.policy_gradient import PolicyGradientLoss
from flatroll.estimators.masked import masked_mean, zero_masked
from flatroll.layout.keys import missing_marker, require


class PPOLoss(PolicyGradientLoss):
    """Importance-weighted policy gradient: ``-ratio * advantage`` per row.

    ``ratio`` is the probability of the action under the actor over the one it was sampled with. A flat batch
    goes through recurrent actors and critics as it is.

    Args:
        actor_network, critic_network, entropy_bonus, ...: see :class:`~flatroll.estimators.PolicyGradientLoss`.

    Writes ``loss_objective``, ``loss_critic``, ``loss_entropy``, and detached ``kl_approx``, ``ESS`` (effective
    sample size over the rows, in [0, 1]), ``max_ratio``, ``mean_ratio``, ``entropy``, ``explained_variance``.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> actor = ProbabilisticTensorDictSequential(net, head)
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 2), "action": torch.tensor([0, 1]),
        ...     "action_log_prob": torch.tensor([0.25, 0.5]).log(), "advantage": torch.tensor([[3.0], [4.0]]),
        ... }, [2])
        >>> PPOLoss(actor)(batch)["loss_objective"]                           # ratios 2 and 1
        tensor(-5.)

    References:
        J. Schulman et al., Proximal policy optimization algorithms, https://arxiv.org/abs/1707.06347
    """

    reads: ClassVar[tuple[str, ...]] = ("action", "sample_log_prob", "advantage")
    diagnostics: ClassVar[tuple[str, ...]] = ("kl_approx", "ESS", "max_ratio", "mean_ratio")

    @override
    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = self.log_ratio(inputs, log_prob)
        return -log_ratio.exp() * advantage, diagnose(log_ratio.detach(), inputs.mask)

    def log_ratio(self, inputs: LossInputs, log_prob: Tensor) -> Tensor:
        """Log of the ratio ``[*B]``; 0 in rows that do not count.

        What the policy wrote when it acted may be one entry for each part of an action: then they add up.
        """
        names: list[Any] = list(getattr(self.actor_network, "log_prob_keys", None) or ())
        if len(names) > 1 and inputs.batch.get(self.key("sample_log_prob"), None) is None:
            columns = [require(inputs.batch, name, "action_log_prob") for name in names]
        else:
            columns = [self.entry(inputs, "sample_log_prob")]
        sampled = reduce(torch.add, [joint(column.detach(), inputs.batch) for column in columns])
        log_ratio = log_prob - sampled
        return log_ratio if inputs.mask is None else zero_masked(log_ratio, inputs.mask)


class ClipPPOLoss(PPOLoss):
    """Clipped PPO: ``-min(ratio * advantage, clip(ratio, 1 - eps, 1 + eps) * advantage)`` per row.

    Args:
        actor_network, critic_network, options: see :class:`~flatroll.estimators.PolicyGradientLoss`.
        clip_epsilon: ``eps``, or a pair (below 1, above 1). Default: 0.2.
        clip_value: as for the others; True takes ``clip_epsilon``. Default: None, any move.

    Writes what :class:`PPOLoss` writes, and ``clip_fraction``.

    Raises:
        ValueError: a ``clip_epsilon`` that is not positive or reaches 1 below, or ``clip_value=True`` with a pair.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> critic = TensorDictModule(lambda x: x[:, :1], in_keys=["observation"], out_keys=["state_value"])
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 4), "action": torch.tensor([0, 3]),
        ...     "action_log_prob": torch.tensor([-1.3863, -2.3863]),           # a quarter, and a quarter / e
        ...     "advantage": torch.tensor([[1.0], [1.0]]), "value_target": torch.zeros(2, 1),
        ... }, [2])
        >>> losses = ClipPPOLoss(ProbabilisticTensorDictSequential(net, head), critic)(batch)
        >>> losses["loss_objective"], losses["clip_fraction"]          # -(1 + 1.2) / 2, one of two clipped
        (tensor(-1.1000), tensor(0.5000))

    References:
        J. Schulman et al., Proximal policy optimization algorithms, https://arxiv.org/abs/1707.06347
    """

    diagnostics: ClassVar[tuple[str, ...]] = (*PPOLoss.diagnostics, "clip_fraction")

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        **options: Any,
    ) -> None:
        low, high = clip_epsilon if isinstance(clip_epsilon, tuple) else (clip_epsilon, clip_epsilon)
        if not (0.0 < low < 1.0 and high > 0.0):
            raise ValueError(
                f"clip_epsilon must be above 0, and below 1 on the lower side, got {clip_epsilon}"
            )
        if options.get("clip_value") is True:
            if isinstance(clip_epsilon, tuple):
                raise ValueError(
                    "clip_value=True needs one clip_epsilon, not a pair: give clip_value a number"
                )
            options["clip_value"] = low
        super().__init__(actor_network, critic_network, **options)
        self.clip_epsilon = clip_epsilon

    @override
    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = self.log_ratio(inputs, log_prob)
        low, high = self.clip_epsilon if isinstance(self.clip_epsilon, tuple) else 2 * (self.clip_epsilon,)
        least, most = math.log1p(-low), math.log1p(high)  # log(1 - low), log(1 + high)
        # min(ratio * A, clip(ratio) * A) bounds the ratio on one side only: above if A >= 0, below if A < 0.
        # The logarithm is bounded, before exp: where the limit holds, a ratio that overflows leaves no NaN in the
        # gradient (inf * 0).
        bounded = torch.where(advantage < 0, log_ratio.clamp(min=least), log_ratio.clamp(max=most))
        free = log_ratio.detach()
        fraction = masked_mean((free.clamp(least, most) != free).to(free.dtype), inputs.mask)
        return -bounded.exp() * advantage, diagnose(free, inputs.mask) | {"clip_fraction": fraction}


class KLPENPPOLoss(PPOLoss):
    """PPO with a penalty: ``-ratio * advantage + beta * KL(sampled | current)`` per row.

    The distribution that an action was sampled from is rebuilt from its parameters in the batch (e.g.
    ``"logits"``, or ``"loc"`` and ``"scale"``), so the policy must write them when it acts. After each call in
    training mode ``beta`` follows the mean divergence: it grows by ``increment`` where that is above
    ``1.5 * dtarg``, and shrinks by ``decrement`` where it is below ``dtarg / 1.5``.

    Args:
        actor_network, critic_network, options: see :class:`~flatroll.estimators.PolicyGradientLoss`.
        dtarg: divergence aimed at. Default: 0.01.
        beta: factor of the penalty to start with. Default: 1.
        increment, decrement: factors of ``beta``, at least 1 and at most 1. Default: 2 and 0.5.
        samples_mc_kl: samples per row where the divergence has no closed form. Default: 1.

    Writes what :class:`PPOLoss` writes, and ``kl``, the mean divergence.

    Raises:
        TypeError: the actor has no ``build_dist_from_params``.
        ValueError: ``increment`` below 1, ``decrement`` above 1.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> actor = ProbabilisticTensorDictSequential(net, head)
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 2), "logits": torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log(),
        ...     "action": torch.tensor([0, 1]), "action_log_prob": torch.tensor([0.5, 0.9]).log(),
        ...     "advantage": torch.ones(2, 1),
        ... }, [2])
        >>> loss = KLPENPPOLoss(actor, dtarg=0.05)
        >>> loss(batch)["kl"], loss.beta                     # (0 + KL(0.1, 0.9 | 0.5, 0.5)) / 2: beta grows
        (tensor(0.1840), tensor(2.))

    References:
        J. Schulman et al., Proximal policy optimization algorithms, https://arxiv.org/abs/1707.06347
    """

    diagnostics: ClassVar[tuple[str, ...]] = (*PPOLoss.diagnostics, "kl")
    beta: Tensor

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        dtarg: float = 0.01,
        beta: float = 1.0,
        increment: float = 2.0,
        decrement: float = 0.5,
        samples_mc_kl: int = 1,
        **options: Any,
    ) -> None:
        if increment < 1.0:
            raise ValueError(f"increment must be at least 1, got {increment}")
        if not 0.0 < decrement <= 1.0:
            raise ValueError(f"decrement must lie in (0, 1], got {decrement}")
        super().__init__(actor_network, critic_network, **options)
        if not hasattr(actor_network, "build_dist_from_params"):
            raise TypeError(
                "actor_network must have build_dist_from_params, as a ProbabilisticTensorDictSequential has, "
                f"got {type(actor_network).__name__}"
            )
        self.dtarg, self.increment, self.decrement = dtarg, increment, decrement
        self.samples_mc_kl = samples_mc_kl
        self._beta_at_first = beta
        self.register_buffer("beta", torch.tensor(beta))

    def reset(self) -> None:
        """Set ``beta`` back to what it was in the beginning."""
        self.beta = torch.full_like(self.beta, self._beta_at_first)

    @override
    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, diagnostics = super().objective(inputs, dist, log_prob, advantage)
        actor: Any = self.actor_network
        for key in actor.dist_params_keys:
            if inputs.batch.get(key, None) is None:
                error = missing_marker(key, inputs.batch.keys(True, True))
                raise KeyError(
                    f"{error.args[0]}. It says how the actions were sampled: the policy must write it when it acts"
                )
        sampled, current = components(actor.build_dist_from_params(inputs.batch)), components(dist)
        pairs = [divergence_of(part, current[key], self.samples_mc_kl) for key, part in sampled.items()]
        divergence = reduce(torch.add, [joint(pair, inputs.batch) for pair in pairs])
        divergence = zero_masked(divergence, inputs.mask)
        mean = masked_mean(divergence.detach(), inputs.mask)
        loss = loss + self.beta * divergence
        if self.training:  # beta for the next call: see the class
            larger, smaller = self.beta * self.increment, self.beta * self.decrement
            steady = torch.where(mean < self.dtarg / 1.5, smaller, self.beta)
            # a new tensor, not an in-place change: the graph of this loss keeps the old beta
            self.beta = torch.where(mean > 1.5 * self.dtarg, larger, steady)
        return loss, diagnostics | {"kl": mean}


def diagnose(log_ratio: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """How far the policy has moved from the one that acted, by the log-ratios ``[*B]``, 0 where masked.

    ``kl_approx`` is the mean of ``-log_ratio``, which estimates ``KL(sampled | current)``. ``ESS`` is the effective
    sample size ``sum(ratio) ** 2 / sum(ratio ** 2)`` as a share of the rows.
    """
    count: Tensor | int = log_ratio.numel()
    real = log_ratio
    if mask is not None:
        count = mask.sum().clamp(min=1)
        real = log_ratio.masked_fill(~mask, -torch.inf)  # a ratio of 0 adds nothing to the sums
    # Ratios relative to the largest lie in [0, 1], so neither they nor their squares overflow, and the factor cancels
    # in ESS. The bound keeps -inf - (-inf) = NaN out where no row counts.
    largest = real.max().clamp(min=torch.finfo(real.dtype).min)
    relative = (real - largest).exp()
    total, max_ratio = relative.sum(), largest.exp()
    return {
        "kl_approx": masked_mean(-log_ratio, mask),
        "ESS": total.square() / relative.square().sum().clamp(min=1.0) / count,
        "max_ratio": max_ratio,
        "mean_ratio": max_ratio * total / count,
    }
