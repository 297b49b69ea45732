"""Proximal policy optimisation: the ratio objective, plain, clipped, and with a penalty on the KL divergence."""

import math
from typing import Any, ClassVar, Unpack

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from flatroll.estimators.distributions import components, joint
from flatroll.estimators.losses.base import Rows
from flatroll.estimators.losses.policy_gradient import PolicyGradientLoss, PolicyOptions, sum_of
from flatroll.estimators.masked import masked_mean
from flatroll.layout.keys import missing_marker, require


class PPOLoss(PolicyGradientLoss):
    """Importance-weighted policy gradient: ``-ratio * advantage`` per row.

    ``ratio`` is the probability of the action under the actor over the one it was sampled with. A flat batch
    goes through recurrent actors and critics as it is.

    Args:
        actor_network, critic_network, options: see
            :class:`~flatroll.estimators.losses.policy_gradient.PolicyGradientLoss`: ``entropy_bonus=True``,
            ``entropy_coeff=0.01``, ``samples_mc_entropy=1``, ``critic_coeff=1.0``,
            ``loss_critic_type="smooth_l1"``, ``clip_value=None``, ``normalize_advantage=False``,
            ``separate_losses=False``, ``burn_in=0``, ``reduction="mean"``.

    Writes ``loss_objective``, ``loss_critic``, ``loss_entropy``, and detached ``kl_approx``, ``ESS`` (effective
    sample size over the rows, in [0, 1]), ``max_ratio``, ``mean_ratio``, ``entropy``, ``explained_variance``.

    Raises:
        TypeError: the actor has no ``get_dist``, or the critic is no tensordict module.
        ValueError: an unknown ``loss_critic_type`` or ``reduction``, or an action of the wrong shape.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
        >>> from tensordict.nn import TensorDictModule
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

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        **options: Unpack[PolicyOptions],
    ) -> None:
        super().__init__(actor_network, critic_network, **options)

    def objective(
        self, rows: Rows, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = self.log_ratio(rows, log_prob)
        return -log_ratio.exp() * advantage, diagnose(log_ratio.detach(), rows.mask)

    def log_ratio(self, rows: Rows, log_prob: Tensor) -> Tensor:
        """Log of the ratio ``[*B]``; 0 in rows that do not count."""
        log_ratio = log_prob - self._sampled_log_prob(rows)
        return log_ratio if rows.mask is None else torch.where(rows.mask, log_ratio, 0.0)

    def _sampled_log_prob(self, rows: Rows) -> Tensor:
        """What the policy wrote when it acted; where an action has several parts, it may be one entry for each."""
        written: list[Any] = list(getattr(self.actor_network, "log_prob_keys", None) or ())
        if len(written) > 1 and rows.batch.get(self.key("sample_log_prob"), None) is None:
            found = [require(rows.batch, key, "action_log_prob") for key in written]
        else:
            found = [self.entry(rows, "sample_log_prob")]
        return sum_of(joint(column.detach(), rows.batch) for column in found)


class ClipPPOLoss(PPOLoss):
    """Clipped PPO: ``-min(ratio * advantage, clip(ratio, 1 - eps, 1 + eps) * advantage)`` per row.

    Args:
        actor_network, critic_network, options: see :class:`PPOLoss`.
        clip_epsilon: ``eps``, or a pair (below 1, above 1). Default: 0.2.
        clip_value: as for the others; True takes ``clip_epsilon``. Default: None, any move.

    Writes what :class:`PPOLoss` writes, and ``clip_fraction``.

    Raises:
        TypeError: the actor has no ``get_dist``, or the critic is no tensordict module.
        ValueError: a ``clip_epsilon`` that is not positive or reaches 1 below, ``clip_value=True`` with a
            pair, an unknown ``loss_critic_type`` or ``reduction``, or an action of the wrong shape.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
        >>> from tensordict.nn import TensorDictModule
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
        **options: Unpack[PolicyOptions],
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

    def objective(
        self, rows: Rows, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = self.log_ratio(rows, log_prob)
        low, high = self.clip_epsilon if isinstance(self.clip_epsilon, tuple) else 2 * (self.clip_epsilon,)
        least, most = math.log1p(-low), math.log1p(high)
        # bounded before exp: where the limit holds, a ratio that overflows leaves no NaN in the gradient
        bounded = torch.where(advantage < 0, log_ratio.clamp(min=least), log_ratio.clamp(max=most))
        seen = log_ratio.detach()
        fraction = masked_mean((seen.clamp(least, most) != seen).to(seen.dtype), rows.mask)
        return -bounded.exp() * advantage, diagnose(seen, rows.mask) | {"clip_fraction": fraction}


class KLPENPPOLoss(PPOLoss):
    """PPO with a penalty: ``-ratio * advantage + beta * KL(sampled | current)`` per row.

    The distribution that an action was sampled from is rebuilt from its parameters in the batch (e.g.
    ``"logits"``, or ``"loc"`` and ``"scale"``), so the policy must write them when it acts. After each call in
    training mode ``beta`` follows the mean divergence: it grows by ``increment`` where that is above
    ``1.5 * dtarg``, and shrinks by ``decrement`` where it is below ``dtarg / 1.5``.

    Args:
        actor_network, critic_network, options: see :class:`PPOLoss`.
        dtarg: divergence aimed at. Default: 0.01.
        beta: factor of the penalty to start with. Default: 1.
        increment, decrement: factors of ``beta``, at least 1 and at most 1. Default: 2 and 0.5.
        samples_mc_kl: samples per row where the divergence has no closed form. Default: 1.

    Writes what :class:`PPOLoss` writes, and ``kl``, the mean divergence.

    Raises:
        TypeError: the actor has no ``build_dist_from_params``, or the critic is no tensordict module.
        ValueError: ``increment`` below 1, ``decrement`` above 1, or what :class:`PPOLoss` raises.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
        >>> from tensordict.nn import TensorDictModule
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
        **options: Unpack[PolicyOptions],
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

    def objective(
        self, rows: Rows, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, diagnostics = super().objective(rows, dist, log_prob, advantage)
        divergence = self._divergence(self._sampled(rows), dist, rows)
        if rows.mask is not None:
            divergence = torch.where(rows.mask, divergence, 0.0)
        mean = masked_mean(divergence.detach(), rows.mask)
        loss = loss + self.beta * divergence
        if self.training:
            larger, smaller = self.beta * self.increment, self.beta * self.decrement
            steady = torch.where(mean < self.dtarg / 1.5, smaller, self.beta)
            self.beta = torch.where(mean > 1.5 * self.dtarg, larger, steady)  # the graph keeps the old one
        return loss, diagnostics | {"kl": mean}

    def _sampled(self, rows: Rows) -> Distribution:
        """The distributions that the actions were sampled from."""
        actor: Any = self.actor_network
        for key in actor.dist_params_keys:
            if rows.batch.get(key, None) is None:
                error = missing_marker(key, rows.batch.keys(True, True))
                raise KeyError(
                    f"{error.args[0]}. It says how the actions were sampled: the policy must write it when it acts"
                )
        dist: Distribution = actor.build_dist_from_params(rows.batch)
        return dist

    def _divergence(self, sampled: Distribution, current: Distribution, rows: Rows) -> Tensor:
        """``KL(sampled | current)`` of each row, ``[*B]``."""
        parts, now = components(sampled), components(current)
        pairs = [(parts[key], now[key]) for key in parts] or [(sampled, current)]
        return sum_of(joint(self._of_pair(*pair), rows.batch) for pair in pairs)

    def _of_pair(self, sampled: Distribution, current: Distribution) -> Tensor:
        try:
            return kl_divergence(sampled, current)
        except NotImplementedError:
            with torch.no_grad():
                drawn = sampled.sample((self.samples_mc_kl,))
                log_prob = sampled.log_prob(drawn)
            return (log_prob - current.log_prob(drawn)).mean(0)


def diagnose(log_ratio: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """How far the policy has moved from the one that acted."""
    count: Tensor | int = log_ratio.numel()
    real = log_ratio
    if mask is not None:
        count = mask.sum().clamp(min=1)
        real = log_ratio.masked_fill(~mask, -torch.inf)
    largest = real.max().clamp(min=torch.finfo(real.dtype).min)
    share = (real - largest).exp()  # of the largest: none overflows
    total, most = share.sum(), largest.exp()
    return {
        "kl_approx": masked_mean(-log_ratio, mask),
        "ESS": total.square() / share.square().sum().clamp(min=1.0) / count,
        "max_ratio": most,
        "mean_ratio": most * total / count,
    }
