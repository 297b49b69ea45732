"""Proximal policy optimisation."""

import math
from typing import ClassVar

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution

from flatroll.estimators.policy_loss import CriticLoss, PolicyGradientLoss, Rows, joint
from flatroll.estimators.reductions import Reduction, masked_mean


class ClipPPOLoss(PolicyGradientLoss):
    """Clipped PPO: ``-min(ratio * advantage, clip(ratio, 1 - eps, 1 + eps) * advantage)`` per row.

    ``ratio`` is the probability of the action under the actor over the one it was sampled with. A flat batch
    goes through recurrent actors and critics as it is.

    Args:
        actor, critic: see :class:`~flatroll.estimators.policy_loss.PolicyGradientLoss`, as for all others.
        clip_epsilon: ``eps``, or a pair (below 1, above 1). Default: 0.2.
        entropy_bonus, entropy_coeff, samples_mc_entropy: entropy term. Default: True, 0.01, 1.
        critic_coeff, loss_critic_type: critic term. Default: 1, ``"smooth_l1"``.
        clip_value: largest move of the value away from the batch's; True takes ``clip_epsilon``. Default:
            None, any move.
        normalize_advantage: standardise the advantage over the real rows. Default: False.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. Default: ``"mean"``.

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

    reads: ClassVar[tuple[str, ...]] = ("action", "sample_log_prob", "advantage")
    diagnostics: ClassVar[tuple[str, ...]] = ("kl_approx", "clip_fraction", "ESS", "max_ratio", "mean_ratio")

    def __init__(
        self,
        actor: TensorDictModuleBase,
        critic: TensorDictModuleBase | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        entropy_bonus: bool = True,
        entropy_coeff: float = 0.01,
        samples_mc_entropy: int = 1,
        critic_coeff: float | None = 1.0,
        loss_critic_type: CriticLoss = "smooth_l1",
        clip_value: bool | float | None = None,
        normalize_advantage: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        low, high = clip_epsilon if isinstance(clip_epsilon, tuple) else (clip_epsilon, clip_epsilon)
        if not (0.0 < low < 1.0 and high > 0.0):
            raise ValueError(
                f"clip_epsilon must be above 0, and below 1 on the lower side, got {clip_epsilon}"
            )
        if clip_value is True and isinstance(clip_epsilon, tuple):
            raise ValueError("clip_value=True needs one clip_epsilon, not a pair: give clip_value a number")
        super().__init__(
            actor,
            critic,
            entropy_bonus=entropy_bonus,
            entropy_coeff=entropy_coeff,
            samples_mc_entropy=samples_mc_entropy,
            critic_coeff=critic_coeff,
            loss_critic_type=loss_critic_type,
            clip_value=low if clip_value is True else clip_value or None,
            normalize_advantage=normalize_advantage,
            reduction=reduction,
        )
        self.clip_epsilon = clip_epsilon

    def objective(
        self, rows: Rows, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        sampled = self.entry(rows, "sample_log_prob").detach()
        log_ratio = log_prob - joint(sampled, rows.batch)
        if rows.mask is not None:
            log_ratio = torch.where(rows.mask, log_ratio, 0.0)
        low, high = self.clip_epsilon if isinstance(self.clip_epsilon, tuple) else 2 * (self.clip_epsilon,)
        clipped = log_ratio.clamp(math.log1p(-low), math.log1p(high))
        gain = torch.minimum(log_ratio.exp() * advantage, clipped.exp() * advantage)
        return -gain, self._diagnose(log_ratio.detach(), clipped.detach(), rows.mask)

    def _diagnose(self, log_ratio: Tensor, clipped: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        ratio = log_ratio.exp()
        if mask is None:
            weights, count = log_ratio.flatten(), torch.tensor(float(log_ratio.numel()))
        else:
            weights, count = log_ratio.masked_fill(~mask, -torch.inf).flatten(), mask.sum().clamp(min=1)
        effective = (2 * weights.logsumexp(0) - (2 * weights).logsumexp(0)).exp()
        return {
            "kl_approx": masked_mean(-log_ratio, mask),
            "clip_fraction": masked_mean((clipped != log_ratio).to(ratio.dtype), mask),
            "ESS": effective / count,
            "max_ratio": weights.max().exp(),
            "mean_ratio": masked_mean(ratio, mask),
        }
