"""Temporal-difference estimators on a batch: TD(0), TD(1), TD(lambda)."""

from typing import Unpack

from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.estimators.functional.td import td0_return_estimate, td_lambda_return_estimate
from flatroll.estimators.values.base import Given, ValueEstimator
from flatroll.estimators.values.options import EstimatorOptions


class TD0Estimator(ValueEstimator):
    """One-step targets ``reward + gamma * next_value * (1 - terminated)``; the advantage is target minus value.

    Rows may come in any order, n-step rows too: where ``"steps_to_next_obs"`` is in the batch, ``gamma`` to that
    power takes the place of ``gamma``.

    Args:
        gamma: discount in [0, 1].
        value_network: tensordict module, e.g. from ``"observation"`` to ``"state_value"`` ``[N, 1]``; None reads
            both values from the batch.
        average_rewards: bring the rewards to zero mean and unit deviation over the rows that count first. The
            batch keeps its own. Default: False.
        options: what all estimators take, see :class:`~flatroll.estimators.values.base.ValueEstimator`.

    Raises:
        ValueError: ``gamma`` outside [0, 1], both chunk arguments, or an option out of range.
        TypeError: ``value_network`` is no tensordict module.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> critic = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["state_value"])
        >>> end = torch.tensor([False, True])
        >>> batch = TensorDict({
        ...     "observation": torch.tensor([[1.0], [2.0]]),
        ...     "next": {"observation": torch.tensor([[2.0], [4.0]]), "reward": torch.ones(2, 1), "done": end,
        ...              "terminated": end},
        ... }, [2])
        >>> TD0Estimator(gamma=0.5, value_network=critic)(batch)["value_target"].squeeze(-1)
        tensor([2., 1.])
    """

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        value_network: TensorDictModuleBase | None,
        average_rewards: bool = False,
        **options: Unpack[EstimatorOptions],
    ) -> None:
        super().__init__(gamma=gamma, value_network=value_network, average_rewards=average_rewards, **options)

    def estimate(self, given: Given) -> tuple[Tensor, Tensor]:
        target = td0_return_estimate(
            given.gamma, given.next_value, given.reward, given.terminated, time_dim=given.time_dim
        )
        return target - given.value, target


class TDLambdaEstimator(ValueEstimator):
    """Lambda-return targets along each run; the advantage is target minus value.

    The recursion is that of :func:`~flatroll.estimators.td_lambda_return_estimate`; boundaries come from
    :func:`flatroll.layout.run_ends`.

    Args:
        gamma: discount in [0, 1].
        lmbda: trace decay in [0, 1]: 0 is :class:`TD0Estimator`, 1 is :class:`TD1Estimator`.
        value_network, average_rewards, options: as for :class:`TD0Estimator`, as is what is raised.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> critic = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["state_value"])
        >>> end = torch.tensor([False, True])
        >>> batch = TensorDict({
        ...     "observation": torch.tensor([[1.0], [2.0]]),
        ...     "next": {"observation": torch.tensor([[2.0], [4.0]]), "reward": torch.ones(2, 1), "done": end,
        ...              "terminated": torch.tensor([False, False])},
        ... }, [2])
        >>> TDLambdaEstimator(gamma=1.0, lmbda=0.5, value_network=critic)(batch)["value_target"].squeeze(-1)
        tensor([4.5000, 5.0000])
    """

    lmbda: float | Tensor

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor,
        value_network: TensorDictModuleBase | None,
        average_rewards: bool = False,
        **options: Unpack[EstimatorOptions],
    ) -> None:
        super().__init__(gamma=gamma, value_network=value_network, average_rewards=average_rewards, **options)
        self.number("lmbda", lmbda, options.get("device"))

    def estimate(self, given: Given) -> tuple[Tensor, Tensor]:
        target = td_lambda_return_estimate(
            given.gamma,
            given.factor("lmbda", self.lmbda),
            given.next_value,
            given.reward,
            given.ends,
            given.terminated,
            time_dim=given.time_dim,
        )
        return target - given.value, target


class TD1Estimator(TDLambdaEstimator):
    """Targets that sum the discounted rewards to the end of the run: :class:`TDLambdaEstimator` with ``lmbda = 1``.

    A run that is not terminated is bootstrapped at its end.

    Args:
        gamma: discount in [0, 1].
        value_network, average_rewards, options: as for :class:`TD0Estimator`, as is what is raised.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> critic = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["state_value"])
        >>> end = torch.tensor([False, True])
        >>> batch = TensorDict({
        ...     "observation": torch.tensor([[1.0], [2.0]]),
        ...     "next": {"observation": torch.tensor([[2.0], [4.0]]), "reward": torch.ones(2, 1), "done": end,
        ...              "terminated": torch.tensor([False, False])},
        ... }, [2])
        >>> TD1Estimator(gamma=0.5, value_network=critic)(batch)["value_target"].squeeze(-1)
        tensor([2.5000, 3.0000])
    """

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        value_network: TensorDictModuleBase | None,
        average_rewards: bool = False,
        **options: Unpack[EstimatorOptions],
    ) -> None:
        super().__init__(
            gamma=gamma, lmbda=1.0, value_network=value_network, average_rewards=average_rewards, **options
        )
