"""What every value estimator does around its recursion: read the batch, evaluate it, write the result."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor

from flatroll.estimators.functional.time_columns import unit_interval
from flatroll.estimators.masked import (
    WarnOnce,
    expand_mask,
    mask_and,
    one_of,
    standardized,
    standardized_in_groups,
)
from flatroll.estimators.values.batch_inputs import (
    BootstrapMissing,
    boundaries_of,
    discount_over,
    reward_of,
    time_last,
)
from flatroll.estimators.values.chunks import Chunks
from flatroll.estimators.values.evaluate import Parameters, Route, StateValues, Values
from flatroll.estimators.values.finite import check_finite
from flatroll.estimators.values.inputs import Estimated as Estimated
from flatroll.estimators.values.inputs import Given as Given
from flatroll.estimators.values.inputs import in_order
from flatroll.estimators.values.keyed import VALID, renamed, under_next
from flatroll.estimators.values.network import checked_network
from flatroll.estimators.values.next_observations import Boundaries, beside
from flatroll.estimators.values.options import checked_budget, one_stream
from flatroll.kernels import zeroed
from flatroll.layout.keys import (
    IS_INIT,
    MASK,
    TRAJ_IDS,
    NestedKey,
    flat_column,
    marker,
    next_key,
    require,
)
from flatroll.modules import set_recurrent_mode

#: Names of entries that stand under ``"next"``.
_UNDER_NEXT = ("reward", "done", "terminated")


class ValueEstimator(TensorDictModuleBase):
    """Base of the estimators: a subclass gives :meth:`estimate`, the recursion over values and rewards.

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
    #: Whether the value target depends on the values of the rows, not only on those of the next ones.
    target_needs_value: ClassVar[bool] = False

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        value_network: TensorDictModuleBase | None,
        standardize: bool = False,
        average_rewards: bool = False,
        differentiable: bool = False,
        shifted: bool = False,
        shifted_budget: int | None = None,
        single_call: bool | None = None,
        value_chunk_size: int | None = None,
        num_chunks: int | None = None,
        num_chunk: int | None = None,
        value_chunk_dim: int = 0,
        skip_existing: bool | None = None,
        check_finite: bool = False,
        bootstrap_missing: BootstrapMissing = "error",
        group_key: NestedKey | None = None,
        time_dim: int | None = None,
        advantage_key: NestedKey | None = None,
        value_target_key: NestedKey | None = None,
        value_key: NestedKey | None = None,
        device: torch.device | str | None = None,
        vectorized: bool | None = None,
        deactivate_vmap: bool = False,
    ) -> None:
        super().__init__()
        if value_network is not None:
            checked_network(
                value_network,
                "value_network",
                "TensorDictModule(net, in_keys=['observation'], out_keys=['state_value'])",
            )
        one_of("bootstrap_missing", bootstrap_missing, ("error", "current", "mask"))
        if num_chunk is not None and num_chunks not in (None, num_chunk):
            raise ValueError(f"num_chunk is another name of num_chunks, got {num_chunk} and {num_chunks}")
        self.value_network = value_network
        self.differentiable = differentiable
        self.shifted = one_stream(shifted, single_call)
        self.shifted_budget = checked_budget(shifted_budget, self.shifted)
        number = num_chunks if num_chunk is None else num_chunk
        self.chunks = Chunks(value_chunk_size, number, value_chunk_dim)
        self.skip_existing, self.check_finite = bool(skip_existing), check_finite
        self.bootstrap_missing: BootstrapMissing = bootstrap_missing
        self.standardize, self.average_rewards, self.group_key = standardize, average_rewards, group_key
        if group_key is not None and not (standardize or average_rewards):
            raise ValueError(
                f"group_key={group_key!r} says within what the advantage or the rewards are standardised: ask "
                "for that, too (average_gae=True, average_adv=True or average_rewards=True)"
            )
        self.time_dim = time_dim
        self.number("gamma", gamma, device)
        self._warn_once = WarnOnce()
        self.tensor_keys: dict[str, NestedKey] = dict(self.default_keys)
        self.set_keys(advantage=advantage_key, value_target=value_target_key, value=value_key)

    def number(self, name: str, x: float | Tensor, device: torch.device | str | None = None) -> None:
        """Keep a discount or decay in [0, 1] as attribute ``name``: a float, or a buffer of several numbers."""
        if not isinstance(x, Tensor) or x.numel() == 1:
            setattr(self, name, unit_interval(name, x))
            return
        if not x.numel():
            raise ValueError(f"{name} must be a number or one per row, got none (shape {tuple(x.shape)})")
        for bound in x.aminmax():
            unit_interval(name, bound)
        self.register_buffer(name, x.to(device))

    def set_keys(self, **keys: NestedKey | None) -> None:
        """Rename entries.

        Args:
            keys: ``advantage``, ``value_target`` and ``value`` are written, the value under ``"next"``, too;
                ``reward``, ``done`` and ``terminated`` are read under ``"next"``; the others are
                ``steps_to_next_obs``, ``is_init``, ``traj_ids``, ``mask`` and ``valid``. None leaves a name as
                it is.

        Raises:
            ValueError: there is no such key.
        """
        self.tensor_keys = renamed(self.tensor_keys, keys)
        observed: list[Any] = [] if self.value_network is None else list(self.value_network.in_keys)
        values: list[Any] = [self.tensor_keys["value"], next_key(self.tensor_keys["value"])]
        read: list[Any] = [*observed, *map(next_key, observed)] or list(values)
        read += map(self.key, _UNDER_NEXT)
        written: list[Any] = [self.tensor_keys["advantage"], self.tensor_keys["value_target"], *values]
        self.in_keys, self.out_keys = read, written

    def key(self, name: str) -> NestedKey:
        """Where the entry called ``name`` in :meth:`set_keys` stands."""
        return under_next(self.tensor_keys[name]) if name in _UNDER_NEXT else self.tensor_keys[name]

    def estimate(self, given: Given) -> tuple[Tensor, Tensor]:
        """Advantage and value target, shaped like the reward."""
        raise NotImplementedError(f"{type(self).__name__} must define estimate")

    @dispatch  # type: ignore[untyped-decorator]  # an untyped class, which makes forward an attribute
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
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
        batch, dim = time_last(tensordict, self.time_dim if time_dim is None else time_dim)
        out = self._estimated(batch, dim, Parameters(params, target_params), None, final)
        names = self.tensor_keys
        written = {
            names["advantage"]: out.advantage,
            names["value_target"]: out.target,
            names["value"]: out.value,
            next_key(names["value"]): out.next_value,
        }
        stale = tensordict.get(names["valid"], None) is not None  # never leave an old one behind
        if out.valid is not None or self.shifted or stale:
            everywhere = torch.ones(batch.batch_size, dtype=torch.bool, device=out.target.device)
            written[names["valid"]] = everywhere if out.valid is None else out.valid
        for key, column in written.items():
            tensordict.set(key, column if dim is None else column.transpose(dim, tensordict.batch_dims - 1))
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
        """The value target alone; nothing is written.

        Args:
            next_value: values of the next observations, ``[*B, T, *F]``, if they are known already: then the
                network is not called for them, nor, by an estimator of temporal differences, at all.
            tensordict, params, target_params, final, time_dim: as in :meth:`forward`, as is what is raised.
        """
        batch, dim = time_last(tensordict, self.time_dim if time_dim is None else time_dim)
        if next_value is not None and dim is not None:
            next_value = next_value.transpose(dim, batch.batch_dims - 1)
        target = self._estimated(batch, dim, Parameters(params, target_params), next_value, final).target
        return target if dim is None else target.transpose(dim, batch.batch_dims - 1)

    def _estimated(
        self,
        batch: TensorDictBase,
        turned: int | None,
        parameters: Parameters,
        next_value: Tensor | None,
        final: TensorDictBase | None,
    ) -> Estimated:
        grad = self.differentiable and torch.is_grad_enabled()
        with torch.set_grad_enabled(grad), set_recurrent_mode(True):
            reward = reward_of(batch, self.key("reward"))
            at = boundaries_of(batch, self.tensor_keys, self.bootstrap_missing)
            if next_value is not None and next_value.shape == batch.batch_size:
                next_value = next_value.unsqueeze(-1)
            if next_value is not None and next_value.shape != reward.shape:
                raise ValueError(
                    f"next_value must have the reward's shape {tuple(reward.shape)}, got {tuple(next_value.shape)}"
                )
            values = self._values(batch, turned, at, parameters, next_value, final)
            for column in (values.value, values.next_value):
                if column.shape != reward.shape:
                    words = (
                        "the batch must hold" if self.value_network is None else "value_network must write"
                    )
                    raise ValueError(
                        f"{words} values of the reward's shape {tuple(reward.shape)}, got {tuple(column.shape)}"
                    )
            if self.check_finite:
                check_finite(batch, self.value_network, reward, values, turned)
            valid, ends = values.valid, at.ends
            if at.unknown is not None and self.bootstrap_missing == "mask":
                valid = mask_and(valid, ~at.unknown)
            if valid is not None:  # the row before one that is left out stops there
                ends = ends.clone()
                ends[..., :-1] |= ~valid[..., 1:]
            counted = self._counted(batch, valid)
            gamma = in_order("gamma", self.gamma, reward, batch.batch_dims, turned)
            gamma = discount_over(gamma, batch, self.tensor_keys["steps_to_next_obs"], reward)
            if self.average_rewards:
                reward = self._standardized(batch, reward, counted)
            given = Given(
                batch,
                at,
                gamma,
                values.value,
                values.next_value,
                reward,
                beside(at.terminated, reward),
                beside(ends, reward),
                batch.batch_dims - 1,
                turned,
            )
            advantage, target = self.estimate(given)
            if self.standardize:
                advantage = self._standardized(batch, advantage, counted)
            if valid is not None:
                rows = beside(valid, reward)
                advantage = advantage.masked_fill(~rows, 0.0)
                target = torch.where(rows, target, values.value)
            return Estimated(advantage, target, values.value, values.next_value, valid)

    def _values(
        self,
        batch: TensorDictBase,
        turned: int | None,
        at: Boundaries,
        parameters: Parameters,
        next_value: Tensor | None,
        final: TensorDictBase | None,
    ) -> Values:
        if next_value is not None and not self.target_needs_value:
            return Values(next_value, zeroed(next_value, at.terminated))
        evaluate = StateValues(
            self.value_network,
            value_key=self.tensor_keys["value"],
            is_init_key=self.tensor_keys["is_init"],
            route=Route(self.shifted, self.shifted_budget, self.chunks, self.skip_existing, turned),
            warn=self._warn_once,
        )
        n_step = batch.get(self.tensor_keys["steps_to_next_obs"], None) is not None
        return evaluate(batch, at, final, parameters, next_value, n_step=n_step)

    def _counted(self, batch: TensorDictBase, valid: Tensor | None) -> Tensor | None:
        """The rows that moments are taken over; None is all of them."""
        if (
            not (self.standardize or self.average_rewards)
            or batch.get(self.tensor_keys["mask"], None) is None
        ):
            return valid
        return mask_and(marker(batch, self.tensor_keys["mask"]), valid)

    def _standardized(self, batch: TensorDictBase, column: Tensor, counted: Tensor | None) -> Tensor:
        mask = expand_mask(counted, column)
        if self.group_key is None:
            return standardized(column, mask)
        groups = flat_column(require(batch, self.group_key), batch, self.group_key)
        return standardized_in_groups(column, groups, mask)
