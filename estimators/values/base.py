"""The base class of value estimators: reads the batch, evaluates the network, writes the result."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Unpack

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor

from flatroll.estimators.functional.returns import factor_over, unit_interval
from flatroll.estimators.masked import (
    WarnOnce,
    expand_mask,
    mask_and,
    standardized,
    standardized_in_groups,
    without_rubbish,
)
from flatroll.estimators.values.batch_inputs import broadcast_like, check_finite
from flatroll.estimators.values.evaluate import ValueInputs, Values, state_values
from flatroll.estimators.values.extended_stream import Boundaries
from flatroll.estimators.values.options import EstimatorOptions, NetworkInputs, Parameters, evaluation_from
from flatroll.kernels.scans.scan import zeroed
from flatroll.layout.boundaries import run_ends
from flatroll.layout.keys import (
    IS_INIT,
    MASK,
    NEXT_KNOWN,
    REWARD,
    TRAJ_IDS,
    VALID,
    KeyNames,
    NestedKey,
    flat_column,
    marker,
    next_key,
    renamed,
    require,
    under_next,
)
from flatroll.modules import set_recurrent_mode

#: Names of entries that stand under ``"next"``.
_UNDER_NEXT = ("reward", "done", "terminated")


@dataclass(frozen=True)
class EstimatorInputs:
    """Inputs of an estimator: rewards and values ``[*B, T, *F]`` and flags ``[*B, T]``, time dim last.

    Attributes:
        batch: the batch.
        at: its boundaries.
        value: of each row's observation.
        next_value: of its next one.
        reward, terminated, ends: as the functions of ``flatroll.estimators.functional.returns`` take them.
        time_dim: likewise.
        factors: what the estimator names in ``factor_names``, by name: numbers, or one number per row in the order
            of these columns.
        turned: the batch dim in which the caller has time, if that is not the last.
    """

    batch: TensorDictBase
    at: Boundaries
    value: Tensor
    next_value: Tensor
    reward: Tensor
    terminated: Tensor
    ends: Tensor
    time_dim: int
    factors: dict[str, float | Tensor]
    turned: int | None


def _of_evaluation(name: str) -> Any:
    """An attribute of an estimator that stands in its ``evaluation``."""
    return property(attrgetter(f"evaluation.{name}"), lambda self, x: setattr(self.evaluation, name, x))


class ValueEstimator(TensorDictModuleBase):
    """Base of the estimators; a subclass defines :meth:`estimate`, the recursion over rewards and values.

    Args:
        gamma: discount in [0, 1]; a number, or a tensor that broadcasts to the reward.
        value_network: tensordict module, e.g. from ``"observation"`` to ``"state_value"`` ``[*B, T, 1]``.
            Recurrent networks run in recurrent mode, whatever the mode around the call. None: both values are
            in the batch.
        standardize: bring the advantage to zero mean and unit deviation over the rows that count.
        average_rewards: bring the reward there first (the batch keeps its own).
        differentiable: let gradients through, into the parameters of the network as well. Default: False.
        shifted: one call of the network over the extended stream (N + K rows, K the runs that do not end
            terminated) instead of two calls on 2 N rows; the same numbers. Inside a run ``("next", obs)`` of
            a row must be the observation of the row behind it, so no n-step rewards. Default: False. A
            recurrent network, and a batch without next observations, always take this path: no other is right.
        shifted_budget: the stream has exactly T + this many places for each series of T rows: static shapes,
            for ``torch.compile`` and CUDA graphs. Rows that do not fit are left out (``"shifted_valid"``), and
            the trace is cut before them. Default: None, the stream that fits.
        single_call: another name of ``shifted``.
        value_chunk_size: rows that go through the network at a time. Default: all.
        num_chunks, num_chunk: number of chunks instead. Chunks never cut a run of a recurrent network.
        value_chunk_dim: the batch dim that is split. Default: 0.
        skip_existing: take ``value_key`` and its next version from the batch where they are there. Default: no.
        check_finite: raise where a value or reward is not finite, naming the row. It costs a pass over them and,
            on a device, a wait. Default: False.
        bootstrap_missing: what to do where a run ends, not terminated, at a row whose next observation the
            env hid (``("collector", "next_known")`` is False): ``"error"``; ``"current"``, the row's own
            observation stands in; ``"mask"``, the row is left out: the row before bootstraps from it, its own
            advantage is 0, and ``"shifted_valid"``, which the losses heed, is False there. Default:
            ``"error"``.
        group_key: integer entry ``[*B, T]``; standardise within its groups. Default: over all rows.
        time_dim: batch dim of time. Default: the one named ``"time"``, else the last.
        advantage_key, value_target_key, value_key: names of what is written. Default: ``"advantage"``,
            ``"value_target"``, ``"state_value"`` (and ``("next", "state_value")``, 0 where terminated).
        device: of ``gamma``, where it is a tensor.
        vectorized, deactivate_vmap: there is one form, without vmap; these change nothing.

    Raises:
        TypeError: ``value_network`` is no tensordict module.
        ValueError: a number out of range, both chunk arguments, ``shifted_budget`` without ``shifted``, or an
            unknown ``bootstrap_missing``.
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        "advantage": "advantage",
        "value_target": "value_target",
        "value": "state_value",
        "reward": "reward",
        "done": "done",
        "terminated": "terminated",
        "steps_to_next_obs": "steps_to_next_obs",
        "is_init": IS_INIT,
        "traj_ids": TRAJ_IDS,
        "mask": MASK,
        "valid": VALID,
    }
    gamma: float | Tensor
    #: The attributes that are discounts, decays or thresholds: a number, or one per row.
    factor_names: ClassVar[tuple[str, ...]] = ("gamma",)
    #: Whether the value target depends on the values of the rows, not only on those of the next ones.
    target_needs_value: ClassVar[bool] = False

    differentiable = _of_evaluation("differentiable")
    shifted = _of_evaluation("shifted")
    shifted_budget = _of_evaluation("shifted_budget")
    chunks = _of_evaluation("chunks")
    skip_existing = _of_evaluation("skip_existing")
    check_finite = _of_evaluation("check_finite")
    bootstrap_missing = _of_evaluation("bootstrap_missing")

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        value_network: TensorDictModuleBase | None,
        standardize: bool = False,
        average_rewards: bool = False,
        **options: Unpack[EstimatorOptions],
    ) -> None:
        super().__init__()
        for name in options:
            if name not in EstimatorOptions.__annotations__:
                raise TypeError(f"ValueEstimator.__init__() got an unexpected keyword argument {name!r}")
        if value_network is not None and not hasattr(value_network, "in_keys"):
            raise TypeError(
                "value_network must be a tensordict module, e.g. TensorDictModule(net, in_keys=['observation'], "
                f"out_keys=['state_value']), got {type(value_network).__name__}"
            )
        self.value_network = value_network
        self.evaluation = evaluation_from(options)
        self.standardize, self.average_rewards = standardize, average_rewards
        self.group_key, self.time_dim = options.get("group_key"), options.get("time_dim")
        if self.group_key is not None and not (standardize or average_rewards):
            raise ValueError(
                f"group_key={self.group_key!r} says within what the advantage or the rewards are standardised: ask "
                "for that, too (average_gae=True, average_adv=True or average_rewards=True)"
            )
        self.number("gamma", gamma, options.get("device"))
        self._warn_once = WarnOnce()
        self.tensor_keys = KeyNames(self.default_keys)
        self.set_keys(
            advantage=options.get("advantage_key"),
            value_target=options.get("value_target_key"),
            value=options.get("value_key"),
        )

    def number(self, name: str, x: float | Tensor, device: torch.device | str | None = None) -> None:
        """Store a discount or decay in [0, 1] as attribute ``name``: a float, or a buffer of several."""
        if not isinstance(x, Tensor) or x.numel() == 1:
            setattr(self, name, unit_interval(name, x))
            return
        if not x.numel():
            raise ValueError(f"{name} must be a number or one per row, got none (shape {tuple(x.shape)})")
        for bound in x.aminmax():
            unit_interval(name, bound)
        self.register_buffer(name, x.to(device))

    def set_keys(self, **keys: NestedKey | None) -> None:
        """Change the keys of entries that the estimator reads or writes.

        Args:
            keys: ``advantage``, ``value_target`` and ``value`` are written, the value under ``"next"``, too;
                ``reward``, ``done`` and ``terminated`` are read under ``"next"``; the others are
                ``steps_to_next_obs``, ``is_init``, ``traj_ids``, ``mask`` and ``valid``. None leaves a name as
                it is.

        Raises:
            ValueError: there is no such key.
        """
        self.tensor_keys = KeyNames(renamed(self.tensor_keys, keys))
        #: Where each entry stands in a batch, by the name that it has in :attr:`tensor_keys`.
        self.places = {k: under_next(x) if k in _UNDER_NEXT else x for k, x in self.tensor_keys.items()}
        network, value = self.value_network, self.tensor_keys["value"]
        #: The network that the keys below are of, and what it reads.
        self._inputs = None if network is None else NetworkInputs.of(network, self.tensor_keys["is_init"])
        observed: list[Any] = [] if network is None else list(network.in_keys)
        values: list[Any] = [value, next_key(value)]
        read: list[Any] = [*observed, *map(next_key, observed)] or list(values)
        read += [self.places[name] for name in _UNDER_NEXT]
        written: list[Any] = [self.tensor_keys["advantage"], self.tensor_keys["value_target"], *values]
        self.in_keys, self.out_keys = read, written
        self._written: list[NestedKey] = list(written)

    def estimate(self, inputs: EstimatorInputs) -> tuple[Tensor, Tensor]:
        """Compute advantage and value target, both of the reward's shape."""
        raise NotImplementedError(f"{type(self).__name__} must define estimate")

    @dispatch  # type: ignore[untyped-decorator]  # an untyped class, which makes forward an attribute
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        *,
        final: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        """Write advantage, value target and values into a batch ``[N]`` or ``[*B, T]`` and return it.

        Args:
            tensordict: the batch. Only its data are read, never what an estimator wrote before (unless
                ``skip_existing`` or ``value_network=None`` say so).
            params: parameters to evaluate ``value_network`` with, in place of its own.
            target_params: parameters for the values of the next observations. Default: ``params``.
            final: the next observations that no row of a compact batch holds, as it came with the batch
                (``collector.final``). Without it, and without ``("next", obs)``, the row's own observation
                stands in at the ends of runs that are not terminated, and a warning says so once.
            time_dim: batch dim of time, in place of the estimator's own.

        Raises:
            KeyError: an entry is missing; the text names what writes it.
            TypeError: the reward is not floating, or a flag not bool.
            ValueError: shapes that do not match, hidden final observations, a ``final`` of another batch.
        """
        dim = self.time_dim if time_dim is None else time_dim
        batch, turned = time_last(tensordict, dim)
        parameters = Parameters(params, target_params)
        advantage, target, values = self._estimate(batch, turned, parameters, None, final)
        written = dict(zip(self._written, (advantage, target, values.value, values.next_value), strict=True))
        valid_key, valid = self.tensor_keys["valid"], values.valid
        stale = tensordict.get(valid_key, None) is not None  # never leave an old one behind
        if valid is not None or self.evaluation.shifted or stale:
            everywhere = torch.ones(batch.batch_size, dtype=torch.bool, device=target.device)
            written[valid_key] = everywhere if valid is None else valid
        # Time goes back to the dim where the caller has it.
        for key, column in written.items():
            tensordict.set(key, column if turned is None else column.transpose(turned, batch.batch_dims - 1))
        return tensordict

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        next_value: Tensor | None = None,
        final: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> Tensor:
        """Return only the value target; write nothing into the batch.

        Args:
            next_value: values of the next observations, ``[*B, T, *F]``, if they are known already: then the
                network is not called for them, nor, by an estimator of temporal differences, at all.
            tensordict, params, target_params, final, time_dim: as in :meth:`forward`, as is what is raised.
        """
        batch, turned = time_last(tensordict, self.time_dim if time_dim is None else time_dim)
        last = batch.batch_dims - 1
        if next_value is not None and turned is not None:
            next_value = next_value.transpose(turned, last)
        _, target, _ = self._estimate(batch, turned, Parameters(params, target_params), next_value, final)
        return target if turned is None else target.transpose(turned, last)

    def _estimate(
        self,
        batch: TensorDictBase,
        turned: int | None,
        parameters: Parameters,
        next_value: Tensor | None,
        final: TensorDictBase | None,
    ) -> tuple[Tensor, Tensor, Values]:
        """Advantage, target and values of a batch whose last dim is time; the caller had it at ``turned``."""
        keys, grad = self.places, self.evaluation.differentiable and torch.is_grad_enabled()
        if batch.get(keys["mask"], None) is not None:
            read: list[Any] = [key for key in self.in_keys if key != keys["reward"]]
            batch = without_rubbish(batch, keys["mask"], read)
        with torch.set_grad_enabled(grad), set_recurrent_mode(True):
            reward, at, values = self._evaluate(batch, turned, parameters, next_value, final)
            valid, ends = values.valid, at.ends
            if at.unknown is not None and self.evaluation.bootstrap_missing == "mask":
                valid = mask_and(valid, ~at.unknown)
            if valid is not None:  # a run stops at the row before one that is left out
                ends = ends.clone()
                ends[..., :-1] |= ~valid[..., 1:]  # where row t + 1 does not count
            counted = valid  # the rows that moments are taken over; None is all of them
            if (self.standardize or self.average_rewards) and batch.get(keys["mask"], None) is not None:
                counted = mask_and(marker(batch, keys["mask"]), valid)
            factors, dims = {name: getattr(self, name) for name in self.factor_names}, batch.batch_dims
            if turned is not None:
                # A factor stands in the caller's order of dims: broadcast it to the reward there, then turn it.
                shape = reward.transpose(turned, dims - 1).shape
                for name, x in factors.items():
                    if isinstance(x, Tensor) and x.ndim:
                        factors[name] = factor_over(name, x, shape, dims).transpose(turned, dims - 1)
            steps = batch.get(keys["steps_to_next_obs"], None)
            if steps is not None:  # the discount over all the steps that a row spans
                spanned = flat_column(steps, batch, keys["steps_to_next_obs"]).to(reward.dtype)
                gamma = torch.as_tensor(factors["gamma"], dtype=reward.dtype, device=reward.device)
                gamma = factor_over("gamma", gamma, reward.shape, dims) if gamma.ndim else gamma
                # one power for each row: a reward that spans k rows is discounted k times
                factors["gamma"] = gamma ** broadcast_like(spanned, reward)
            if self.average_rewards:
                reward = self._standardized(batch, reward, counted)
            columns = (values.value, values.next_value, reward, at.terminated, ends)
            advantage, target = self.estimate(EstimatorInputs(batch, at, *columns, dims - 1, factors, turned))
            if self.standardize:
                advantage = self._standardized(batch, advantage, counted)
            if valid is not None:  # a row that does not count: no advantage, and its own value for a target
                rows = broadcast_like(valid, reward)
                advantage = advantage.masked_fill(~rows, 0.0)
                target = torch.where(rows, target, values.value)
            return advantage, target, Values(values.value, values.next_value, valid)

    def _evaluate(
        self,
        batch: TensorDictBase,
        turned: int | None,
        parameters: Parameters,
        next_value: Tensor | None,
        final: TensorDictBase | None,
    ) -> tuple[Tensor, Boundaries, Values]:
        """Reward ``[*B, T, *F]`` (one without feature dims gets a dim of 1), boundaries, and values of its shape."""
        keys, how, network = self.places, self.evaluation, self.value_network
        reward = require(batch, keys["reward"], REWARD)
        if not reward.is_floating_point():
            key = keys["reward"]
            raise TypeError(f"batch[{key!r}] must be floating, got {reward.dtype}: cast it with .float()")
        reward = reward.unsqueeze(-1) if reward.shape == batch.batch_size else reward
        names = {"is_init_key": "is_init", "done_key": "done", "traj_key": "traj_ids", "mask_key": "mask"}
        ends = run_ends(batch, **{argument: keys[name] for argument, name in names.items()})
        at = Boundaries(ends, marker(batch, keys["terminated"]), None)
        if batch.get(NEXT_KNOWN, None) is not None:
            at = _with_unknown(batch, at, refuse=how.bootstrap_missing == "error")
        if next_value is not None and next_value.shape == batch.batch_size:
            next_value = next_value.unsqueeze(-1)
        if next_value is not None and next_value.shape != reward.shape:
            raise ValueError(
                f"next_value must have the reward's shape {tuple(reward.shape)}, got {tuple(next_value.shape)}"
            )
        if next_value is not None and not self.target_needs_value:
            values = Values(next_value, zeroed(next_value, at.terminated))
        else:
            if network is not None and (self._inputs is None or self._inputs.module is not network):
                self.set_keys()  # somebody has put another network here, which may read other entries
            n_step = batch.get(keys["steps_to_next_obs"], None) is not None
            read, value_key = None if network is None else self._inputs, self.tensor_keys["value"]
            values = state_values(
                ValueInputs(
                    read, value_key, batch, at, how, final, parameters, n_step, turned, self._warn_once
                ),
                next_value,
            )
        if values.value.shape != reward.shape or values.next_value.shape != reward.shape:
            column = values.next_value if values.value.shape == reward.shape else values.value
            words = "the batch must hold" if network is None else "value_network must write"
            raise ValueError(
                f"{words} values of the reward's shape {tuple(reward.shape)}, got {tuple(column.shape)}"
            )
        if how.check_finite:
            observed: list[Any] = [] if network is None else list(network.in_keys)
            check_finite(batch, observed, reward, values.value, values.next_value, turned)
        return reward, at, values

    def _standardized(self, batch: TensorDictBase, column: Tensor, counted: Tensor | None) -> Tensor:
        """The column with zero mean and unit deviation over the rows ``counted``, or within each group of them."""
        mask = expand_mask(counted, column)
        if self.group_key is None:
            return standardized(column, mask)
        groups = flat_column(require(batch, self.group_key), batch, self.group_key)
        return standardized_in_groups(column, groups, mask)


def _with_unknown(batch: TensorDictBase, at: Boundaries, *, refuse: bool) -> Boundaries:
    """The boundaries with the bootstrapped ends whose next observation the env hid; ValueError if ``refuse``."""
    # Only ends need it: inside a run the row behind holds the observation, and a terminated one has no next value.
    unknown = ~marker(batch, NEXT_KNOWN) & at.bootstrapped
    if refuse and bool(unknown.any()):
        rows = unknown.reshape(-1).nonzero().squeeze(-1)
        raise ValueError(
            f"the env hid the final observation of {len(rows)} truncated rows (the first is row "
            f"{int(rows[0])}), so their next value is unknown: choose bootstrap_missing='current' (the "
            "value of the row's own observation) or 'mask' (leave the rows out), or collect from an env "
            "that reports final observations"
        )
    return Boundaries(at.ends, at.terminated, unknown)


def time_last(batch: TensorDictBase, time_dim: int | None) -> tuple[TensorDictBase, int | None]:
    """Move the batch's time dim to the end; also return where it was, None if it was last already.

    A ``time_dim`` of None is the dim named ``"time"``, else the last. Raises ValueError if there is no such dim.
    """
    last = batch.batch_dims - 1
    if last < 0:
        raise ValueError("the batch must have at least one batch dimension (time), got batch size []")
    if time_dim is None and "time" in batch.names:
        time_dim = batch.names.index("time")
    if time_dim is None or time_dim in (last, -1):
        return batch, None
    if not -last - 1 <= time_dim < last:
        raise ValueError(f"time_dim must name a batch dim of {tuple(batch.batch_size)}, got {time_dim}")
    return batch.transpose(time_dim, last), time_dim % (last + 1)
