"""Soft actor-critic, of continuous and of discrete actions."""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import ClassVar, Unpack

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution

from flatroll.estimators.distributions import joint
from flatroll.estimators.losses.action_values import OffPolicyLoss
from flatroll.estimators.losses.base import Rows, frozen, held
from flatroll.estimators.losses.dqn import ActionSpace, of_action
from flatroll.estimators.losses.soft_actor_critic import SACOptions, SoftActorCritic
from flatroll.layout.keys import NestedKey, flat_column


class SACLoss(SoftActorCritic):
    """Soft actor-critic: ``Q_i(s, a)`` to ``r + gamma * (min_j Q'_j(s', a') - alpha * log p(a' | s'))``.

    ``a'`` is drawn from the actor. The actor minimises ``alpha * log p(b | s) - min_i Q_i(s, b)`` over its own
    reparametrised actions ``b``; ``alpha`` is drawn to where the entropy is ``target_entropy``. Rows may come in
    any order.

    Args:
        actor_network: tensordict module with ``get_dist(batch)``, of a distribution with ``rsample``.
        qvalue_network: tensordict module that reads the observation and ``"action"`` and writes
            ``"state_action_value"`` ``[*B, 1]``; or a list of them.
        options: see :class:`~flatroll.estimators.losses.soft_actor_critic.SoftActorCritic`:
            ``num_qvalue_nets=2``, ``loss_function="smooth_l1"``,
            ``alpha_init=1.0``, ``min_alpha=None``, ``max_alpha=None``, ``fixed_alpha=False``,
            ``target_entropy="auto"`` (minus the number of action dims), ``delay_actor=False``,
            ``delay_qvalue=True``, ``separate_losses=False``, ``use_prioritized_weights="auto"``,
            ``reduction="mean"``.

    ``make_value_estimator(gamma=0.99)`` sets the discount. N-step rows are used as they are.

    Writes ``loss_actor``, ``loss_qvalue``, ``loss_alpha``, and detached ``alpha``, ``entropy``. Into the batch
    it writes ``"td_error"`` ``[*B]``, the largest of the absolute errors.

    Raises:
        TypeError: the actor has no ``get_dist`` or no ``rsample``, or a network is recurrent.
        ValueError: see :class:`~flatroll.estimators.losses.soft_actor_critic.SoftActorCritic`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
        >>> from torch.distributions import Normal
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), NormalParamExtractor())
        >>> params = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
        >>> head = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal)
        >>> class Value(torch.nn.Linear):
        ...     def forward(self, observation, action):
        ...         return super().forward(torch.cat([observation, action], -1))
        >>> keys = {"in_keys": ["observation", "action"], "out_keys": ["state_action_value"]}
        >>> loss = SACLoss(ProbabilisticTensorDictSequential(params, head), TensorDictModule(Value(4, 1), **keys))
        >>> batch = TensorDict({
        ...     "observation": torch.randn(5, 3), "action": torch.randn(5, 1),
        ...     "next": {"observation": torch.randn(5, 3), "reward": torch.ones(5, 1),
        ...              "terminated": torch.zeros(5, 1, dtype=torch.bool)},
        ... }, [5])
        >>> sorted(loss(batch).keys()), batch["td_error"].shape
        (['alpha', 'entropy', 'loss_actor', 'loss_alpha', 'loss_qvalue'], torch.Size([5]))

    References:
        T. Haarnoja et al., Soft actor-critic algorithms and applications, https://arxiv.org/abs/1812.05905
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        **OffPolicyLoss.default_keys,
        "state_action_value": "state_action_value",
    }
    value_name = "state_action_value"

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        qvalue_network: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        **options: Unpack[SACOptions],
    ) -> None:
        super().__init__(actor_network, qvalue_network, **options)

    def _next_value(self, dist: Distribution, after: TensorDict) -> Tensor:
        action, log_prob = drawn(dist, after)
        value = self._smallest(self._targets, after.set(self.key("action"), action))
        return value - self.alpha * log_prob

    def _smallest(self, networks: nn.ModuleList, batch: TensorDictBase) -> Tensor:
        value = reduce(torch.minimum, self._evaluate(networks, batch))
        return flat_column(value, batch, self.key(self.value_name))

    def _of_action(self, value: Tensor, action: Tensor) -> Tensor:
        if value.ndim == action.ndim and value.shape[-1] == 1:
            return value.squeeze(-1)
        return value

    def _actor_loss(self, rows: Rows, dist: Distribution, values: list[Tensor]) -> tuple[Tensor, Tensor]:
        action, log_prob = drawn(dist, rows.work)
        with frozen(held(self.qvalue_network)[0]):
            value = self._smallest(self.qvalue_network, rows.work.copy().set(self.key("action"), action))
        return self.alpha * log_prob - value, log_prob

    def _aim(self, action: Tensor, value: Tensor) -> float:
        return -float(math.prod(action.shape[value.ndim - 1 :]))


class DiscreteSACLoss(SoftActorCritic):
    """Soft actor-critic over a finite set of actions, whose expectations are sums.

    With ``p`` the actor's probabilities, values are drawn to
    ``r + gamma * sum_b p(b | s') * (min_j Q'_j(s', b) - alpha * log p(b | s'))``, and the actor minimises
    ``sum_b p(b | s) * (alpha * log p(b | s) - min_i Q_i(s, b))``.

    Args:
        actor_network: tensordict module with ``get_dist(batch)``, of a distribution with ``logits``.
        qvalue_network: tensordict module that writes ``"action_value"`` ``[*B, A]``; or a list of them.
        action_space: ``"categorical"`` (integers ``[*B]``) or ``"one-hot"`` (``[*B, A]``). Default: what the
            shape of the action says.
        target_entropy_weight: share of the largest entropy, ``log A``, that ``target_entropy="auto"`` aims at.
            Default: 0.98.
        options: see :class:`SACLoss`.

    Writes what :class:`SACLoss` writes.

    Raises:
        TypeError: the actor has no ``get_dist``, its distribution no ``logits``, or a network is recurrent.
        ValueError: see :class:`~flatroll.estimators.losses.soft_actor_critic.SoftActorCritic`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
        >>> from tensordict.nn import TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> actor = ProbabilisticTensorDictSequential(net, head)
        >>> values = TensorDictModule(torch.nn.Linear(2, 2), in_keys=["observation"], out_keys=["action_value"])
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 2), "action": torch.tensor([0, 1]),
        ...     "next": {"observation": torch.zeros(2, 2), "reward": torch.ones(2, 1),
        ...              "terminated": torch.ones(2, 1, dtype=torch.bool)},
        ... }, [2])
        >>> DiscreteSACLoss(actor, values)(batch)["entropy"]                       # log 2
        tensor(0.6931)

    References:
        P. Christodoulou, Soft actor-critic for discrete action settings, https://arxiv.org/abs/1910.07207
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        **OffPolicyLoss.default_keys,
        "action_value": "action_value",
    }
    value_name = "action_value"

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        qvalue_network: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        *,
        action_space: ActionSpace | None = None,
        target_entropy_weight: float = 0.98,
        **options: Unpack[SACOptions],
    ) -> None:
        super().__init__(actor_network, qvalue_network, **options)
        self.action_space: ActionSpace | None = action_space
        self.target_entropy_weight = target_entropy_weight

    def _next_value(self, dist: Distribution, after: TensorDict) -> Tensor:
        log_prob = log_probabilities(dist)
        value = reduce(torch.minimum, self._evaluate(self._targets, after))
        return (log_prob.exp() * (value - self.alpha * log_prob)).sum(-1)

    def _of_action(self, value: Tensor, action: Tensor) -> Tensor:
        return of_action(value, action, self.action_space)

    def _actor_loss(self, rows: Rows, dist: Distribution, values: list[Tensor]) -> tuple[Tensor, Tensor]:
        log_prob = log_probabilities(dist)
        probability = log_prob.exp()
        value = reduce(torch.minimum, values).detach()
        loss = (probability * (self.alpha * log_prob - value)).sum(-1)
        return loss, (probability * log_prob).sum(-1)

    def _aim(self, action: Tensor, value: Tensor) -> float:
        return self.target_entropy_weight * math.log(value.shape[-1])


def drawn(dist: Distribution, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """An action that gradients flow through, and its log-probability ``[*B]``."""
    if not dist.has_rsample:
        raise TypeError(
            f"SACLoss needs actions that gradients flow through, and {type(dist).__name__} has no rsample: "
            "for discrete actions take DiscreteSACLoss"
        )
    action = dist.rsample()
    return action, joint(dist.log_prob(action), batch)


def log_probabilities(dist: Distribution) -> Tensor:
    """Log-probability of every action, ``[*B, A]``."""
    logits = getattr(dist, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"DiscreteSACLoss needs a distribution with logits, e.g. Categorical, got {type(dist).__name__}"
        )
    return logits.log_softmax(-1)
