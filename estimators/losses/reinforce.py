"""REINFORCE."""

from typing import ClassVar, Unpack

from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution
from typing_extensions import override

from flatroll.estimators.losses.base import LossInputs, target_copy
from flatroll.estimators.losses.options import CriticOptions
from flatroll.estimators.losses.policy_gradient import PolicyGradientLoss


class ReinforceLoss(PolicyGradientLoss):
    """REINFORCE with a baseline: ``-log_prob * advantage`` per row, the advantage held constant.

    Args:
        actor_network: tensordict module with ``get_dist(batch)``.
        critic_network: tensordict module that writes the value, the baseline. Default: no critic loss.
        delay_value: advantages that the loss itself computes (``make_value_estimator``) come from a delayed
            copy of the critic, ``target_critic_network``, which :class:`~flatroll.estimators.SoftUpdate` or
            :class:`~flatroll.estimators.HardUpdate` moves. Default: False.
        options: ``critic_coeff``, ``loss_critic_type``, ``clip_value``, ``normalize_advantage``, ``separate_losses``,
            ``burn_in`` and ``reduction``: see :class:`~flatroll.estimators.PolicyGradientLoss`.

    Writes ``loss_actor``, ``loss_value``, and the detached ``explained_variance``.

    Raises:
        ValueError: ``delay_value`` without a critic.

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
        >>> ReinforceLoss(ProbabilisticTensorDictSequential(net, head))(batch)["loss_actor"]    # 3 log 2
        tensor(2.0794)

    References:
        R. J. Williams, Simple statistical gradient-following algorithms for connectionist reinforcement
        learning, 1992.
    """

    loss_names: ClassVar[tuple[str, str]] = ("loss_actor", "loss_value")

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        critic_network: TensorDictModuleBase | None = None,
        *,
        delay_value: bool = False,
        **options: Unpack[CriticOptions],
    ) -> None:
        super().__init__(actor_network, critic_network, entropy_bonus=False, **options)
        critic = self.critic_network
        if delay_value and critic is None:
            raise ValueError("delay_value=True needs a critic_network")
        self.target_critic_network = target_copy(critic) if delay_value and critic else None

    @override
    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -log_prob * advantage.detach(), {}
