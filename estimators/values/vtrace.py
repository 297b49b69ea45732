"""V-trace on a batch: targets for a policy that did not collect it."""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.estimators.distributions import distribution, joint, log_prob_of, require_actor
from flatroll.estimators.functional.vtrace import vtrace_advantage_estimate
from flatroll.estimators.values.base import Given, ValueEstimator
from flatroll.estimators.values.extended_stream import row_stops
from flatroll.estimators.values.network import NetworkInputs
from flatroll.estimators.values.next_observations import beside, flat
from flatroll.estimators.values.options import EstimatorOptions
from flatroll.layout.boundaries import starts_from
from flatroll.layout.keys import ACTION, NestedKey, require


class VTrace(ValueEstimator):
    """V-trace targets and advantages of a batch that another policy collected.

    The recursion is that of :func:`~flatroll.estimators.vtrace_advantage_estimate`; boundaries come from
    :func:`flatroll.layout.run_ends`. The weight of a row is the probability of the batch's action under
    ``actor_network`` over the one it was sampled with, ``"action_log_prob"``.

    Args:
        gamma: discount in [0, 1].
        actor_network: tensordict module with ``get_dist(batch)``, the policy that learns. Recurrent ones run in
            recurrent mode.
        value_network: tensordict module, e.g. from ``"observation"`` to ``"state_value"`` ``[N, 1]``; None reads
            both values from the batch.
        rho_thresh: largest weight of a row's own residual. Default: 1.
        c_thresh: largest weight of what lies behind a row. Default: 1.
        average_adv: zero mean and unit deviation of the advantage over the rows that count. Default: False.
        options: what all estimators take, see :class:`~flatroll.estimators.values.base.ValueEstimator`. Chunks split
            what goes through the actor, too.

    Raises:
        ValueError: ``gamma`` outside [0, 1], a threshold below 0, both chunk arguments, or an option out of range.
        TypeError: the actor has no ``get_dist``, or ``value_network`` is no tensordict module.

    Example:
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
        >>> from tensordict.nn import TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> critic = TensorDictModule(lambda x: x[:, :1], in_keys=["observation"], out_keys=["state_value"])
        >>> end = torch.tensor([False, True])
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 4), "action": torch.tensor([0, 3]),
        ...     "action_log_prob": torch.tensor([-1.3863, -0.3863]),      # a quarter, and e times a quarter
        ...     "next": {"observation": torch.zeros(2, 4), "reward": torch.ones(2, 1), "done": end,
        ...              "terminated": end},
        ... }, [2])
        >>> actor = ProbabilisticTensorDictSequential(net, head)
        >>> VTrace(gamma=1.0, actor_network=actor, value_network=critic)(batch)["value_target"].squeeze(-1)
        tensor([1.3679, 0.3679])

    References:
        L. Espeholt et al., IMPALA: scalable distributed deep-RL with importance weighted actor-learner
        architectures, https://arxiv.org/abs/1802.01561
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        **ValueEstimator.default_keys,
        "action": ACTION,
        "sample_log_prob": "action_log_prob",
    }
    target_needs_value = True

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        actor_network: TensorDictModuleBase,
        value_network: TensorDictModuleBase | None,
        rho_thresh: float | Tensor = 1.0,
        c_thresh: float | Tensor = 1.0,
        average_adv: bool = False,
        **options: Unpack[EstimatorOptions],
    ) -> None:
        super().__init__(gamma=gamma, value_network=value_network, standardize=average_adv, **options)
        require_actor(actor_network)
        self.actor_network = actor_network
        for name, threshold in (("rho_thresh", rho_thresh), ("c_thresh", c_thresh)):
            if not bool((torch.as_tensor(threshold) >= 0.0).all()):
                raise ValueError(f"{name} must be at least 0, got {threshold}")
        self.rho_thresh, self.c_thresh = rho_thresh, c_thresh
        self.set_keys()

    def set_keys(self, **keys: NestedKey | None) -> None:
        """Rename entries: those of the other estimators, ``action`` and ``sample_log_prob``."""
        super().set_keys(**keys)
        actor = getattr(self, "actor_network", None)
        read: list[Any] = [] if actor is None else list(actor.in_keys)
        read += [self.tensor_keys["action"], self.tensor_keys["sample_log_prob"]]
        in_keys: list[Any] = list(dict.fromkeys([*self.in_keys, *read]))
        self.in_keys = in_keys

    def estimate(self, given: Given) -> tuple[Tensor, Tensor]:
        key = self.tensor_keys["sample_log_prob"]
        log_mu = joint(require(given.batch, key, self.default_keys["sample_log_prob"]), given.batch)
        return vtrace_advantage_estimate(
            given.gamma,
            beside(self._log_prob(given), given.reward),
            beside(log_mu, given.reward),
            given.value,
            given.next_value,
            given.reward,
            given.ends,
            given.terminated,
            given.factor("rho_thresh", self.rho_thresh),
            given.factor("c_thresh", self.c_thresh),
            given.time_dim,
        )

    def _log_prob(self, given: Given) -> Tensor:
        """Log-probability of each row's action under the actor, ``[*B, T]``."""
        batch, inputs = given.batch, NetworkInputs.of(self.actor_network, self.tensor_keys["is_init"])
        held = [key for key in inputs.states if batch.get(key, None) is not None]
        columns = {key: flat(require(batch, key), batch) for key in (*inputs.observed, *held)}
        action = flat(require(batch, self.tensor_keys["action"], ACTION), batch)
        ends, rows = given.at.ends.reshape(-1), given.at.ends.numel()
        bounds = None
        if inputs.recurrent:
            columns[self.tensor_keys["is_init"]] = starts_from(ends).unsqueeze(-1)
            if not self.chunks.whole:
                bounds = row_stops(ends)
        each = rows // max(batch.shape[self.chunks.along(batch.batch_dims, given.turned)], 1)
        found = []
        for start, stop in self.chunks.spans(rows, bounds, each=each):
            part = TensorDict({key: column[start:stop] for key, column in columns.items()}, [stop - start])
            dist = distribution(self.actor_network, part)
            found.append(joint(log_prob_of(dist, action[start:stop]), part))
        return torch.cat(found).view(batch.batch_size)
