"""Generalized advantage estimation on a batch."""

from typing import Unpack

from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.estimators.functional.gae import generalized_advantage_estimate
from flatroll.estimators.functional.time_columns import unit_interval as unit_interval
from flatroll.estimators.values.base import Given, ValueEstimator
from flatroll.estimators.values.options import EstimatorOptions


class GAE(ValueEstimator):
    """Generalized advantage estimate of a flat batch ``[N]``, or of ``[*B, T]``, whatever runs it is made of.

    The recursion is that of :func:`~flatroll.estimators.generalized_advantage_estimate`; boundaries come from
    :func:`flatroll.layout.run_ends`, so each run gets exactly what it would get alone.

    Args:
        gamma: discount in [0, 1].
        lmbda: trace decay in [0, 1].
        value_network: tensordict module, e.g. from ``"observation"`` to ``"state_value"`` ``[N, 1]``; None reads
            both values from the batch.
        average_gae: zero mean and unit deviation of the advantage over the rows that count. Default: False.
        options: what all estimators take, see :class:`~flatroll.estimators.values.base.ValueEstimator`:
            ``differentiable``, ``shifted`` (one call of the network on N + K rows), ``shifted_budget``,
            ``value_chunk_size``, ``num_chunks``, ``skip_existing``, ``check_finite``, ``bootstrap_missing``,
            ``group_key``, ``time_dim``, ``advantage_key``, ``value_target_key``, ``value_key``, …

    A NaN in a next observation (what ``NextStateReconstructor`` writes where it has none) never reaches the
    network: the row's own number stands in, an approximation wherever the run is not terminated, and a warning
    says so once.

    Raises:
        ValueError: ``gamma`` or ``lmbda`` outside [0, 1], both chunk arguments, or an option out of range.
        TypeError: ``value_network`` is no tensordict module.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> critic = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["state_value"])
        >>> end = torch.tensor([False, True, True])
        >>> batch = TensorDict({
        ...     "observation": torch.tensor([[1.0], [2.0], [3.0]]),
        ...     "next": {"observation": torch.tensor([[2.0], [4.0], [0.0]]), "reward": torch.ones(3, 1),
        ...              "done": end, "terminated": torch.tensor([False, False, True])},
        ... }, [3])
        >>> GAE(gamma=1.0, lmbda=0.5, value_network=critic)(batch)["advantage"].squeeze(-1)
        tensor([ 3.5000,  3.0000, -2.0000])

    References:
        J. Schulman et al., High-dimensional continuous control using generalized advantage estimation,
        https://arxiv.org/abs/1506.02438
    """

    lmbda: float | Tensor
    target_needs_value = True

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor,
        value_network: TensorDictModuleBase | None,
        average_gae: bool = False,
        **options: Unpack[EstimatorOptions],
    ) -> None:
        super().__init__(gamma=gamma, value_network=value_network, standardize=average_gae, **options)
        self.number("lmbda", lmbda, options.get("device"))

    def estimate(self, given: Given) -> tuple[Tensor, Tensor]:
        return generalized_advantage_estimate(
            given.gamma,
            given.factor("lmbda", self.lmbda),
            given.value,
            given.next_value,
            given.reward,
            given.ends,
            given.terminated,
            time_dim=given.time_dim,
        )
