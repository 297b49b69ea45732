"""Generalized advantage estimation on a batch."""

from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.estimators.base import BootstrapMissing, ValueEstimator
from flatroll.estimators.functional import generalized_advantage_estimate
from flatroll.estimators.series import unit_interval
from flatroll.layout.keys import NestedKey


class GAE(ValueEstimator):
    """Generalized advantage estimate of a flat batch ``[N]``, or of ``[*B, T]``, whatever runs it is made of.

    The recursion is that of :func:`~flatroll.estimators.generalized_advantage_estimate`; boundaries come from
    :func:`flatroll.layout.run_ends`, so each run gets exactly what it would get alone.

    Args:
        gamma: discount in [0, 1].
        lmbda: trace decay in [0, 1].
        value_network: tensordict module, e.g. from ``"observation"`` to ``"state_value"`` ``[N, 1]``.
            Recurrent networks run in recurrent mode, whatever the mode around the call.
        average_gae: zero mean and unit deviation of the advantage over the real rows. Default: False.
        differentiable: let gradients through the values. Default: False.
        shifted: evaluate N + K rows in one call instead of 2 N in two; the same numbers. Default: False.
        value_chunk_size: rows that go through the network at a time. Default: all.
        num_chunks: number of chunks instead. ``num_chunk`` is another name for it.
        bootstrap_missing: ``"error"`` (default), ``"current"`` or ``"mask"``: what to do where a run that is
            not terminated ends at an observation the env hid.
        advantage_key, value_target_key, value_key: names of what is written. Default: ``"advantage"``,
            ``"value_target"``, ``"state_value"`` (and ``("next", "state_value")``, 0 where terminated).

    A NaN in a next observation (what ``NextStateReconstructor`` writes where it has none) never reaches the
    network: the row's own number stands in, an approximation wherever the run is not terminated.

    Raises:
        ValueError: ``gamma`` or ``lmbda`` outside [0, 1], both chunk arguments, or an unknown
            ``bootstrap_missing``.
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

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor,
        value_network: TensorDictModuleBase,
        average_gae: bool = False,
        differentiable: bool = False,
        shifted: bool = False,
        value_chunk_size: int | None = None,
        num_chunks: int | None = None,
        num_chunk: int | None = None,
        bootstrap_missing: BootstrapMissing = "error",
        advantage_key: NestedKey | None = None,
        value_target_key: NestedKey | None = None,
        value_key: NestedKey | None = None,
    ) -> None:
        super().__init__(
            value_network,
            differentiable=differentiable,
            shifted=shifted,
            value_chunk_size=value_chunk_size,
            num_chunks=num_chunks,
            num_chunk=num_chunk,
            bootstrap_missing=bootstrap_missing,
            standardize=average_gae,
            keys={"advantage": advantage_key, "value_target": value_target_key, "value": value_key},
        )
        self.gamma, self.lmbda = unit_interval("gamma", gamma), unit_interval("lmbda", lmbda)

    def estimate(
        self,
        value: Tensor,
        next_value: Tensor,
        reward: Tensor,
        terminated: Tensor,
        ends: Tensor,
        time_dim: int,
    ) -> tuple[Tensor, Tensor]:
        return generalized_advantage_estimate(
            self.gamma, self.lmbda, value, next_value, reward, ends, terminated, time_dim=time_dim
        )
