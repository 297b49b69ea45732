"""Proximal policy optimisation with a penalty on the divergence from the policy that acted."""

from functools import reduce
from typing import Any, ClassVar, Unpack

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution
from typing_extensions import override

from flatroll.estimators.distributions import components, divergence_of, joint
from flatroll.estimators.losses.base import LossInputs
from flatroll.estimators.losses.options import Coefficient, PolicyOptions
from flatroll.estimators.losses.policy_gradient import PPOLoss
from flatroll.estimators.masked import masked_mean, zero_masked
from flatroll.layout.keys import NestedKey


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
        actor_network: TensorDictModuleBase | None = None,
        critic_network: TensorDictModuleBase | None = None,
        *,
        dtarg: float = 0.01,
        beta: Coefficient = 1.0,
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
        if not hasattr(self.actor_network, "build_dist_from_params"):
            raise TypeError(
                "actor_network must have build_dist_from_params, as a ProbabilisticTensorDictSequential has, "
                f"got {type(self.actor_network).__name__}"
            )
        self.dtarg, self.increment, self.decrement = dtarg, increment, decrement
        self.samples_mc_kl = samples_mc_kl
        self.register_coeff_buffer("beta", beta, device=options.get("device"))
        self._beta_at_first = float(beta)

    def reset(self) -> None:
        """Reset ``beta`` to its initial value."""
        self.beta = torch.full_like(self.beta, self._beta_at_first)

    @override
    def set_keys(self, **keys: NestedKey | list[NestedKey] | None) -> None:
        super().set_keys(**keys)
        actor: Any = self.actor_network
        self.in_keys = list(dict.fromkeys((*self.in_keys, *getattr(actor, "dist_params_keys", ()))))

    @override
    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, diagnostics = super().objective(inputs, dist, log_prob, advantage)
        actor: Any = self.actor_network
        for key in actor.dist_params_keys:
            if inputs.batch.get(key, None) is None:
                hint = ". It says how the actions were sampled: the policy must write it when it acts"
                raise self.missing(inputs, key, hint=hint)
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
