"""The value estimators GAE, TD(0), TD(1), TD(lambda) and V-trace, and the names that losses accept."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from functools import reduce
from typing import Any, ClassVar, Literal, TypeAlias, Unpack, cast

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from typing_extensions import override

from flatroll.estimators.distributions import (
    compute_log_prob,
    distribution,
    joint,
    log_prob_parts,
    part_key,
    require_actor,
    sampled_log_prob_keys,
)
from flatroll.estimators.functional import (
    generalized_advantage_estimate,
    td0_return_estimate,
    td_lambda_return_estimate,
    vtrace_advantage_estimate,
)
from flatroll.estimators.values.base import EstimatorOptions, ValueEstimator
from flatroll.estimators.values.evaluate import NetworkInputs, broadcast_like, flat_rows
from flatroll.estimators.values.extended_stream import run_stops
from flatroll.estimators.values.records import EstimatorInputs
from flatroll.kernels.scan import residual_scan
from flatroll.layout.boundaries import starts_from
from flatroll.layout.checks import check_choice, check_dense_tensor, check_flags, check_number
from flatroll.layout.keys import ACTION, NestedKey, key_list, require
from flatroll.layout.sampling import base_sample_key, components
from flatroll.layout.tensordict_seam import get_entry

#: What lambda decays over.
LmbdaPer: TypeAlias = Literal["row", "step"]


def _factors_of_steps(lmbda_per: LmbdaPer) -> tuple[str, ...]:
    """Names of the factors that steps of more or less than one row change."""
    if check_choice("lmbda_per", lmbda_per, ("row", "step")) == "row":
        return ("gamma",)
    return ("gamma", "lmbda")


class GAE(ValueEstimator):
    """Generalized advantage estimation for a flat batch ``[N]`` or ``[*B, T]``, with runs of any length.

    The recursion is that of :func:`~flatroll.estimators.generalized_advantage_estimate`; boundaries come from
    :func:`flatroll.layout.run_ends`, so each run gets exactly what it would get alone.

    Args:
        gamma: discount in [0, 1].
        lmbda: trace decay in [0, 1].
        value_network: tensordict module, e.g. from ``"observation"`` to ``"state_value"`` ``[N, 1]``; None reads
            both values from the batch.
        average_gae: zero mean and unit deviation of the advantage over the rows that count. Default: False.
        lmbda_per: what ``lmbda`` decays over: ``"row"``, or ``"step"``, like ``gamma``: ``lmbda`` to the power of
            ``"steps_to_next_obs"``, if the batch has it. In texts a step may be a turn
            (`flatroll.text.rows_of_texts`). Default: ``"row"``.
        options: what all estimators take, see :class:`~flatroll.estimators.values.base.ValueEstimator`:
            ``differentiable``, ``shifted`` (one call of the network on N + K rows), ``shifted_budget``,
            ``value_chunk_size``, ``num_chunks``, ``skip_existing``, ``check_finite``, ``bootstrap_missing``,
            ``episodic`` (False: the return runs over the ends of episodes), ``group_key``, ``time_dim``,
            ``advantage_key``, ``value_target_key``, ``value_key``, …

    A NaN in a next observation (written by ``NextStateReconstructor`` where it has none) never reaches the network:
    the row's own value is used instead, an approximation where the run is not terminated, with one warning.

    Raises:
        ValueError: ``gamma`` or ``lmbda`` outside [0, 1], both chunk arguments, or an option out of range.
        TypeError: ``value_network`` is not a tensordict module.

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
    factor_names = ("gamma", "lmbda")
    target_needs_value = True

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor,
        value_network: TensorDictModuleBase | None,
        average_gae: bool = False,
        lmbda_per: LmbdaPer = "row",
        **options: Unpack[EstimatorOptions],
    ) -> None:
        check_flags(average_gae=average_gae)
        super().__init__(gamma=gamma, value_network=value_network, standardize=average_gae, **options)
        self.number("lmbda", lmbda, options.get("device"))
        self.factors_of_steps = _factors_of_steps(lmbda_per)

    @override
    def estimate(self, inputs: EstimatorInputs) -> tuple[Tensor, Tensor]:
        gamma = inputs.factors["gamma"]
        lmbda = inputs.factors["lmbda"]
        reward = inputs.reward
        value = inputs.value
        next_value = inputs.next_value
        terminated = inputs.terminated
        time = inputs.time_dim
        shape = reward.shape

        numbers = all(isinstance(x, float) and 0.0 <= x <= 1.0 for x in (gamma, lmbda))
        one_dtype = reward.dtype == value.dtype == next_value.dtype
        one_feature = shape[time + 1 :].numel() == 1

        if not (numbers and one_dtype and one_feature):
            columns = (value, next_value, reward, inputs.ends, terminated)
            return generalized_advantage_estimate(gamma, lmbda, *columns, time_dim=time)

        # With one feature and time as the last other dim, the flattened series are contiguous, and the last row of
        # each is an end, so that the scan reads the columns directly.
        ends = inputs.ends | terminated
        advantage, target = residual_scan(
            gamma,
            gamma * lmbda,
            reward.reshape(-1),
            value.reshape(-1),
            next_value.reshape(-1),
            terminated.reshape(-1),
            ends.reshape(-1),
            longest=shape[time],
        )
        return advantage.view(shape), target.view(shape)


class TD0Estimator(ValueEstimator):
    """One-step targets ``reward + gamma * next_value * (1 - terminated)``; the advantage is target minus value.

    Rows may come in any order, n-step rows too: if the batch has ``"steps_to_next_obs"``, ``gamma`` to that power
    replaces ``gamma``.

    Args:
        gamma: discount in [0, 1].
        value_network: tensordict module, e.g. from ``"observation"`` to ``"state_value"`` ``[N, 1]``; None reads
            both values from the batch.
        average_rewards: first normalise the rewards to zero mean and unit deviation over the rows that count. The
            batch keeps its own. Default: False.
        options: what all estimators take, see :class:`~flatroll.estimators.values.base.ValueEstimator`.

    Raises:
        ValueError: ``gamma`` outside [0, 1], both chunk arguments, or an option out of range.
        TypeError: ``value_network`` is not a tensordict module.

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

    sums_along = False

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        value_network: TensorDictModuleBase | None,
        average_rewards: bool = False,
        **options: Unpack[EstimatorOptions],
    ) -> None:
        super().__init__(gamma=gamma, value_network=value_network, average_rewards=average_rewards, **options)

    @override
    def estimate(self, inputs: EstimatorInputs) -> tuple[Tensor, Tensor]:
        gamma = inputs.factors["gamma"]
        columns = (inputs.next_value, inputs.reward, inputs.terminated)
        target = td0_return_estimate(gamma, *columns, time_dim=inputs.time_dim)
        return target - inputs.value, target


class TDLambdaEstimator(ValueEstimator):
    """Lambda-return targets along each run; the advantage is target minus value.

    The recursion is that of :func:`~flatroll.estimators.td_lambda_return_estimate`; boundaries come from
    :func:`flatroll.layout.run_ends`.

    Args:
        gamma: discount in [0, 1].
        lmbda: trace decay in [0, 1]: 0 is :class:`TD0Estimator`, 1 is :class:`TD1Estimator`.
        lmbda_per: as for :class:`GAE`.
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
    factor_names = ("gamma", "lmbda")

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor,
        value_network: TensorDictModuleBase | None,
        average_rewards: bool = False,
        lmbda_per: LmbdaPer = "row",
        **options: Unpack[EstimatorOptions],
    ) -> None:
        super().__init__(gamma=gamma, value_network=value_network, average_rewards=average_rewards, **options)
        self.number("lmbda", lmbda, options.get("device"))
        self.factors_of_steps = _factors_of_steps(lmbda_per)

    @override
    def estimate(self, inputs: EstimatorInputs) -> tuple[Tensor, Tensor]:
        gamma = inputs.factors["gamma"]
        lmbda = inputs.factors["lmbda"]
        columns = (inputs.next_value, inputs.reward, inputs.ends, inputs.terminated)
        target = td_lambda_return_estimate(gamma, lmbda, *columns, time_dim=inputs.time_dim)
        return target - inputs.value, target


class TD1Estimator(TDLambdaEstimator):
    """Discounted reward sums to the end of the run, bootstrapped: :class:`TDLambdaEstimator` for lambda 1.

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


class VTrace(ValueEstimator):
    """V-trace targets and advantages, for batches collected by another policy.

    The recursion is that of :func:`~flatroll.estimators.vtrace_advantage_estimate`; boundaries come from
    :func:`flatroll.layout.run_ends`. The weight of a row is the probability of the batch's action under
    ``actor_network`` over the one it was sampled with, ``"action_log_prob"``.

    Args:
        gamma: discount in [0, 1].
        actor_network: tensordict module with ``get_dist(batch)``, the policy that learns. Recurrent ones run in
            recurrent mode.
        value_network: tensordict module, e.g. from ``"observation"`` to ``"state_value"`` ``[N, 1]``; None reads
            both values from the batch.
        rho_thresh: maximum weight of a row's own residual. Default: 1.
        c_thresh: maximum weight of the trace after a row. Default: 1.
        average_adv: zero mean and unit deviation of the advantage over the rows that count. Default: False.
        options: what all estimators take, see :class:`~flatroll.estimators.values.base.ValueEstimator`. Chunks split
            what goes through the actor, too.

    Raises:
        ValueError: ``gamma`` outside [0, 1], a threshold below 0, both chunk arguments, or an option out of range.
        TypeError: the actor has no ``get_dist``, or ``value_network`` is not a tensordict module.

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

    default_keys: ClassVar[Mapping[str, NestedKey]] = {**ValueEstimator.default_keys, "action": ACTION}
    factor_names = ("gamma", "rho_thresh", "c_thresh")
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
        check_flags(average_adv=average_adv)
        super().__init__(gamma=gamma, value_network=value_network, standardize=average_adv, **options)
        require_actor(actor_network)
        self.actor_network = actor_network

        for name, threshold in (("rho_thresh", rho_thresh), ("c_thresh", c_thresh)):
            if not isinstance(threshold, Tensor) or threshold.is_meta:
                check_number(name, threshold, least=0)
            elif not bool((check_dense_tensor(name, threshold) >= 0.0).all()):
                raise ValueError(f"{name} must be at least 0, got {threshold}")

        self.rho_thresh = rho_thresh
        self.c_thresh = c_thresh
        self.set_keys()

    def set_keys(self, **keys: NestedKey | None) -> None:
        """Change the keys of entries; also accepts ``action`` and ``sample_log_prob``."""
        super().set_keys(**keys)

        actor = getattr(self, "actor_network", None)
        read: list[Any] = []
        if actor is not None:
            read = list(actor.in_keys)
        read += [*key_list(self.tensor_keys["action"]), *key_list(self.tensor_keys["sample_log_prob"])]
        in_keys: list[Any] = list(dict.fromkeys([*self.in_keys, *read]))
        self.in_keys = in_keys

    @property
    @override
    def readable_keys(self) -> list[Any]:
        """All entries that the estimator may read."""
        made_of = [base_sample_key(key) for key in key_list(self.tensor_keys["action"])]

        parts: list[NestedKey] = []
        with suppress(RuntimeError):  # see keys_written_by
            parts = log_prob_parts(self.actor_network)

        return list(dict.fromkeys([*super().readable_keys, *made_of, *parts]))

    @override
    def estimate(self, inputs: EstimatorInputs) -> tuple[Tensor, Tensor]:
        batch = inputs.batch
        keys = sampled_log_prob_keys(self.actor_network, key_list(self.tensor_keys["sample_log_prob"]), batch)
        parts = [require(batch, key, self.default_keys["sample_log_prob"]) for key in keys]
        log_mu = reduce(torch.add, [joint(part, batch) for part in parts])
        log_mu = broadcast_like(log_mu, inputs.reward)
        log_pi = broadcast_like(self._log_prob(inputs), inputs.reward)

        columns = (inputs.value, inputs.next_value, inputs.reward, inputs.ends, inputs.terminated)
        # thresholds of the weights of the row's own residual (rho) and of the trace after it (c)
        gamma, rho, c = (inputs.factors[name] for name in self.factor_names)
        return vtrace_advantage_estimate(gamma, log_pi, log_mu, *columns, rho, c, inputs.time_dim)

    def _log_prob(self, inputs: EstimatorInputs) -> Tensor:
        """Log-probability of each row's action under the actor, ``[*B, T]``, chunk by chunk."""
        batch = inputs.batch
        is_init = self.tensor_keys["is_init"]
        actor = NetworkInputs.of(self.actor_network, is_init)
        dims = batch.batch_dims

        states = [key for key in actor.states if batch.get(key, None) is not None]
        columns = {key: flat_rows(require(batch, key), dims) for key in (*actor.observed, *states)}
        actions = key_list(self.tensor_keys["action"])

        ends = inputs.at.ends.reshape(-1)
        chunks = inputs.chunks
        stops = None
        if actor.recurrent:
            columns[is_init] = starts_from(ends).unsqueeze(-1)
            if not chunks.whole:  # a recurrent network must see each run in one chunk
                stops = run_stops(ends)
        # Rows per index of the dim that is split: all batch dims are flattened here.
        each = len(ends) // max(batch.shape[chunks.along(dims)], 1)

        log_probs = []
        for start, stop in chunks.spans(len(ends), stops, each=each):
            part = TensorDict({key: column[start:stop] for key, column in columns.items()}, [stop - start])

            of_parts = []  # parts of an action are independent: their log-probabilities add up
            for key, dist in components(distribution(self.actor_network, part)).items():
                if key is None:
                    key = actions[0]
                else:
                    key = part_key(key, actions, self.actor_network)

                action = flat_rows(require(batch, key, ACTION), dims)[start:stop]
                base = get_entry(batch, base_sample_key(key))
                if base is not None:
                    base = flat_rows(base, dims)[start:stop]
                of_parts.append(joint(compute_log_prob(dist, action, base, self._warn_once), part))

            log_probs.append(reduce(torch.add, of_parts))

        return torch.cat(log_probs).view(batch.batch_size)


class ValueEstimators(StrEnum):
    """Names of the estimators, for losses; strings such as ``"td_lambda"`` or ``"TDLambda"`` work too.

    >>> ValueEstimators.TDLambda == "td_lambda"
    True
    """

    TD0 = "td0"
    TD1 = "td1"
    TDLambda = "td_lambda"
    GAE = "gae"
    VTrace = "vtrace"


#: The value estimator argument of a loss: a name, a class, or an estimator.
Kind: TypeAlias = ValueEstimators | str | type[ValueEstimator] | ValueEstimator

_DEFAULTS = {"gamma": 0.99, "lmbda": 0.95}
_CLASSES: dict[str, type[ValueEstimator]] = {
    "td0": TD0Estimator,
    "td1": TD1Estimator,
    "td_lambda": TDLambdaEstimator,
    "gae": GAE,
    "vtrace": VTrace,
}


def check_estimator_name(kind: str | type[ValueEstimator]) -> str:
    """Return the name of an estimator kind; ValueError if it is unknown.

    >>> check_estimator_name("TDLambda"), check_estimator_name(GAE)
    ('td_lambda', 'gae')
    """
    if isinstance(kind, str):
        return check_choice("value_type", str(ValueEstimators.__members__.get(kind, kind)), tuple(_CLASSES))

    for name, known in _CLASSES.items():
        if kind is known:
            return name
    raise ValueError(f"value_type must be a name in ValueEstimators or one of its classes, got {kind!r}")


def make_estimator(
    kind: Kind, networks: Mapping[str, TensorDictModuleBase | None], arguments: dict[str, Any]
) -> ValueEstimator:
    """Create the estimator given by a name or a class; an estimator is returned unchanged.

    ``networks`` (``value_network`` and ``actor_network``) and defaults are used unless ``arguments`` override them.
    """
    if isinstance(kind, ValueEstimator):
        if arguments:
            raise ValueError(
                f"this {type(kind).__name__} already has its arguments: leave out {', '.join(arguments)}"
            )
        return cast(ValueEstimator, kind)

    is_own = isinstance(kind, type) and issubclass(kind, ValueEstimator)
    chosen: Any = kind
    if not is_own:
        chosen = _CLASSES[check_estimator_name(cast(str, kind))]

    known = inspect.signature(chosen).parameters
    if networks["value_network"] is None and "value_network" not in arguments:
        raise ValueError(
            f"this loss has no critic_network: give {chosen.__name__} a value_network=, or write the advantage "
            "into the batch yourself, e.g. with reward2go"
        )

    made: ValueEstimator = chosen(
        **{name: x for name, x in {**_DEFAULTS, **networks}.items() if name in known} | arguments
    )
    return made
