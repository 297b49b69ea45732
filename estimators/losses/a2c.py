"""Advantage actor-critic."""

from torch import Tensor
from torch.distributions import Distribution
from typing_extensions import override

from flatroll.estimators.losses.base import LossInputs
from flatroll.estimators.losses.policy_gradient import PolicyGradientLoss


class A2CLoss(PolicyGradientLoss):
    """Advantage actor-critic: ``-log_prob * advantage`` per row.

    Args:
        actor_network, critic_network, options: see :class:`~flatroll.estimators.PolicyGradientLoss`.

    Writes ``loss_objective``, ``loss_critic``, ``loss_entropy``, and detached ``entropy``,
    ``explained_variance``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 2), "action": torch.tensor([0, 1]),
        ...     "advantage": torch.tensor([[2.0], [4.0]]),
        ... }, [2])
        >>> A2CLoss(ProbabilisticTensorDictSequential(net, head))(batch)["loss_objective"]      # 3 log 2
        tensor(2.0794)

    References:
        V. Mnih et al., Asynchronous methods for deep reinforcement learning,
        https://arxiv.org/abs/1602.01783
    """

    @override
    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -log_prob * advantage, {}
