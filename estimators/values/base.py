"""The base class of value estimators: reads the batch, evaluates the network, writes the result."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypedDict, Unpack

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor

from flatroll.estimators.distributions import require_critic
from flatroll.estimators.functional import factor_over, unit_interval
from flatroll.estimators.masked import (
    WarnOnce,
    expand_mask,
    mask_and,
    standardized,
    standardized_in_groups,
    zero_padding,
)
from flatroll.estimators.values.evaluate import (
    Chunks,
    NetworkInputs,
    Parameters,
    ValueInputs,
    Values,
    broadcast_like,
    state_values,
)
from flatroll.estimators.values.extended_stream import Boundaries, true_indices
from flatroll.estimators.values.order import OrderCheck
from flatroll.estimators.values.records import Estimate, EstimatorInputs, Series, SeriesColumns
from flatroll.kernels.scan import is_tracing, zeroed
from flatroll.layout.boundaries import ends_from, goes_on_in_env, no_markers_error
from flatroll.layout.checks import (
    BLAMED,
    blame_entries,
    check_choice,
    check_dense_tensor,
    check_device,
    check_flags,
    check_keys,
    check_rows,
    check_whole_number,
)
from flatroll.layout.keys import (
    ENV,
    ENV_STEP,
    IS_INIT,
    MASK,
    NEXT_KNOWN,
    REWARD,
    STEP_COUNT,
    TRAJ_IDS,
    VALID,
    KeyNames,
    NestedKey,
    flat_column,
    key_list,
    marker,
    next_key,
    renamed,
    require,
    under_next,
)
from flatroll.layout.tensordict_seam import get_entry, set_entry
from flatroll.modules import set_recurrent_mode
from flatroll.modules.reward_scale import RewardScale

BootstrapMissing = Literal["error", "current", "mask"]


class EstimatorOptions(TypedDict, total=False):
    """Keyword arguments shared by all estimators; :class:`ValueEstimator` documents them."""

    differentiable: bool
    shifted: bool
    shifted_budget: int | None
    single_call: bool | None
    value_chunk_size: int | None
    num_chunks: int | None
    num_chunk: int | None
    value_chunk_dim: int
    skip_existing: bool | None
    check_finite: bool
    bootstrap_missing: BootstrapMissing
    episodic: bool
    group_key: NestedKey | None
    reward_scale: RewardScale | None
    time_dim: int | None
    advantage_key: NestedKey | None
    value_target_key: NestedKey | None
    value_key: NestedKey | None
    device: torch.device | str | None
    vectorized: bool | None
    deactivate_vmap: bool


#: Names of entries under ``"next"``.
_UNDER_NEXT = ("reward", "done", "terminated")


def chunks_from(options: EstimatorOptions) -> Chunks:
    """Return the chunks for the value network; ``num_chunk`` is an alias of ``num_chunks``.

    >>> chunks_from({"num_chunk": 4})
    Chunks(size=None, number=4, dim=0)
    """
    number = options.get("num_chunks")
    num_chunk = options.get("num_chunk")
    if num_chunk is not None:
        if number not in (None, num_chunk):
            raise ValueError(f"num_chunk is another name for num_chunks, got {num_chunk} and {number}")
        number = num_chunk

    return Chunks(options.get("value_chunk_size"), number, options.get("value_chunk_dim", 0))


def stream_from(options: EstimatorOptions) -> tuple[bool, int | None]:
    """Check ``shifted``, its alias ``single_call``, and ``shifted_budget``."""
    shifted = options.get("shifted", False)
    single_call = options.get("single_call")
    if not isinstance(shifted, bool):
        raise ValueError(f"shifted must be True or False, got {shifted!r}")
    if single_call is not None and shifted and not single_call:
        raise ValueError(f"single_call is another name for shifted, got {single_call} and {shifted}")

    shifted = shifted or bool(single_call)

    budget = options.get("shifted_budget")
    if budget is not None and check_whole_number("shifted_budget", budget) and not shifted:
        raise ValueError(
            f"shifted_budget={budget} sets the length of the single call with shifted=True: pass shifted=True "
            "as well"
        )

    return shifted, budget


class ValueEstimator(TensorDictModuleBase):
    """Base of the estimators; a subclass defines :meth:`estimate`, the recursion over rewards and values.

    Args:
        gamma: discount in [0, 1]; a number, or a tensor that broadcasts to the reward.
        value_network: tensordict module, e.g. from ``"observation"`` to ``"state_value"`` ``[*B, T, 1]``.
            Recurrent networks run in recurrent mode, whatever the mode around the call. None: both values are
            in the batch.
        standardize: normalise the advantage to zero mean and unit deviation over the rows that count.
        average_rewards: normalise the reward first (the batch keeps its own).
        differentiable: let gradients through, into the parameters of the network as well. Default: False.
        shifted: one call of the network over the extended stream (N + K rows, K the runs that do not end
            terminated) instead of two calls on 2 N rows; the same numbers. Inside a run ``("next", obs)`` of
            a row must be the observation of the next row, so no n-step rewards. Default: False. A
            recurrent network, and a batch without next observations, always take this path: no other is right.
        shifted_budget: the stream has exactly T + this many places for each series of T rows: static shapes,
            for ``torch.compile`` and CUDA graphs. Rows that do not fit are left out (``"shifted_valid"``), and
            the trace is cut before them. Default: None, the stream that fits.
        single_call: alias of ``shifted``.
        value_chunk_size: rows passed to the network at a time. Default: all.
        num_chunks, num_chunk: number of chunks instead. Chunks never cut a run of a recurrent network.
        value_chunk_dim: the batch dim that is split. Default: 0.
        skip_existing: use ``value_key`` and its next version if they are in the batch. Default: False.
        check_finite: raise if a value or reward is not finite, naming the row. It costs a pass over them and, on a
            device, a sync. Default: False.
        bootstrap_missing: what to do where a run ends, not terminated, at a row whose next observation the
            env hid (``("collector", "next_known")`` is False): ``"error"``; ``"current"``, use the row's own
            observation; ``"mask"``, exclude the row: the previous row bootstraps from it, its own advantage is 0, and
            ``"shifted_valid"``, which losses respect, is False there. Default: ``"error"``.
        episodic: the return ends with the episode. False: it runs on over the ends of an env's episodes, terminated
            or not, and what follows a last row is the value of the next episode's first observation (the intrinsic
            return of random network distillation). The batch must say which episode follows which
            (``Collector(track_envs=True)``); each env's last row bootstraps from its next observation. Values come
            from one call, as with ``shifted``. Default: True.
        group_key: integer entry ``[*B, T]``; standardise within its groups. Default: over all rows.
        reward_scale: a :class:`RewardScale`: divides rewards as they are read; the batch keeps its own. Default: none.
        time_dim: batch dim of time. Default: the one named ``"time"``, else the last.
        advantage_key, value_target_key, value_key: names of what is written. Default: ``"advantage"``,
            ``"value_target"``, ``"state_value"`` (and ``("next", "state_value")``, 0 where terminated).
        device: of ``gamma``, where it is a tensor.
        vectorized, deactivate_vmap: accepted for compatibility, without effect.

    Raises:
        TypeError: ``value_network`` is not a tensordict module.
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
        "step_count": STEP_COUNT,
        "mask": MASK,
        "valid": VALID,
        "sample_log_prob": "action_log_prob",
    }
    gamma: float | Tensor
    #: Names of the attributes that are discounts, decays or thresholds: a number, or one per row.
    factor_names: ClassVar[tuple[str, ...]] = ("gamma",)
    #: Those that are raised to the power of the row's ``"steps_to_next_obs"``.
    factors_of_steps: tuple[str, ...] = ("gamma",)
    #: Whether the rows of a run must be consecutive; otherwise they may come in any order.
    sums_along: ClassVar[bool] = True
    #: Whether the value target depends on the values of the rows, not only on those of the next states.
    target_needs_value: ClassVar[bool] = False

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

        require_critic("value_network", value_network)
        self.value_network = value_network

        skip_existing = options.get("skip_existing")
        if skip_existing is None:
            skip_existing = False
        check_flags(
            average_rewards=average_rewards,
            differentiable=options.get("differentiable", False),
            episodic=options.get("episodic", True),
            skip_existing=skip_existing,
            check_finite=options.get("check_finite", False),
        )
        keys = ("group_key", "advantage_key", "value_target_key", "value_key")
        check_keys(optional=True, **{name: options.get(name) for name in keys})

        # How the network is evaluated.
        self.chunks = chunks_from(options)
        self.shifted, self.shifted_budget = stream_from(options)
        self.differentiable = bool(options.get("differentiable", False))
        self.skip_existing = bool(options.get("skip_existing"))
        self.check_finite = options.get("check_finite", False)
        self.bootstrap_missing = check_choice(
            "bootstrap_missing", options.get("bootstrap_missing", "error"), ("error", "current", "mask")
        )

        # Whether the return ends with the episode.
        self.episodic = bool(options.get("episodic", True))

        # How the result is scaled.
        self.standardize = standardize
        self.average_rewards = average_rewards
        self.group_key = options.get("group_key")
        self.time_dim = options.get("time_dim")
        self.reward_scale = options.get("reward_scale")
        if self.group_key is not None and not (standardize or average_rewards):
            raise ValueError(
                f"group_key={self.group_key!r} names the groups in which advantages or rewards are "
                "standardised: request that as well (average_gae=True, average_adv=True or "
                "average_rewards=True)"
            )

        self.number("gamma", gamma, options.get("device"))
        self._warn_once = WarnOnce()
        self._check_order = OrderCheck(self.sums_along)

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

        check_dense_tensor(name, x)
        if not x.numel():
            raise ValueError(
                f"{name} must be a number or one per row, got an empty tensor of shape {tuple(x.shape)}"
            )

        for bound in x.aminmax():
            unit_interval(name, bound)

        if device is not None:
            x = x.to(check_device("device", device))
        self.register_buffer(name, x)

    def set_keys(self, **keys: NestedKey | None) -> None:
        """Change the keys of entries that the estimator reads or writes.

        Args:
            keys: ``advantage``, ``value_target`` and ``value`` are written, the value under ``"next"``, too;
                ``reward``, ``done`` and ``terminated`` are read under ``"next"``; the others are
                ``steps_to_next_obs``, ``is_init``, ``traj_ids``, ``step_count``, ``mask``, ``valid`` and
                ``sample_log_prob`` (read by V-trace alone). None leaves a name as it is.

        Raises:
            ValueError: there is no such key.
        """
        self.tensor_keys = KeyNames(renamed(self.tensor_keys, keys))
        #: The batch key of each entry, by its name in :attr:`tensor_keys`.
        self.places = {**self.tensor_keys, **{k: under_next(self.tensor_keys[k]) for k in _UNDER_NEXT}}

        network = self.value_network
        observed: list[Any] = []
        inputs = None
        if network is not None:
            inputs = NetworkInputs.of(network, self.tensor_keys["is_init"])
            observed = list(network.in_keys)
        #: The network for which the keys below are cached, and its inputs. In a tuple it is no submodule.
        self._keys_of = (network,)
        self._inputs = inputs

        value = self.tensor_keys["value"]
        values: list[Any] = [value, next_key(value)]
        read: list[Any] = [*observed, *map(next_key, observed)] or list(values)
        read += [self.places[name] for name in _UNDER_NEXT]
        if not self.episodic:
            read += [ENV, ENV_STEP]
        written: list[Any] = [self.tensor_keys["advantage"], self.tensor_keys["value_target"], *values]

        self.in_keys = read
        self.out_keys = written
        self._written: list[NestedKey] = list(written)

    @property
    def readable_keys(self) -> list[Any]:
        """All entries that the estimator may read: :attr:`in_keys`, markers, and values that are there already."""
        value = self.tensor_keys["value"]
        written = (self.tensor_keys["advantage"], self.tensor_keys["value_target"])
        named = [key for place in self.places.values() for key in key_list(place) if key not in written]
        groups = [] if self.group_key is None else [self.group_key]
        read: list[Any] = [*self.in_keys, *named, next_key(value), *groups, NEXT_KNOWN]
        return list(dict.fromkeys(read))

    def estimate(self, inputs: EstimatorInputs) -> tuple[Tensor, Tensor]:
        """Compute advantage and value target, both of the reward's shape."""
        raise NotImplementedError(f"{type(self).__name__} must define estimate")

    @property
    def _tuple_keys(self) -> list[Any]:
        """What a call by keyword returns: advantage and value target, or what select_out_keys() chose."""
        if self.out_keys == self._written:
            return self.out_keys[:2]
        return self.out_keys

    @dispatch(dest="_tuple_keys")  # type: ignore[untyped-decorator]  # untyped; it makes forward an attribute
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

        A call with tensors by keyword (``next_reward=`` for ``("next", "reward")``) returns advantage and value target.

        Args:
            tensordict: the batch. Earlier outputs of an estimator are not read (except with ``skip_existing`` or
                ``value_network=None``).
            params: parameters to evaluate ``value_network`` with, in place of its own.
            target_params: parameters for the values of the next observations. Default: ``params``.
            final: the next observations that no row of a compact batch holds, as it came with the batch
                (``collector.final``). Without it, and without ``("next", obs)``, the row's own observation
                stands in at the ends of runs that are not terminated, and a warning says so once.
            time_dim: batch dim of time, in place of the estimator's own.

        Raises:
            KeyError: an entry is missing; the message names what writes it.
            TypeError: the reward is not floating, or a flag not bool.
            ValueError: shapes that do not match, hidden final observations, a ``final`` of another batch; or rows
                that do not follow one another inside a run, as their ``"step_count"`` says, else the next
                observations of some. Only batches on the host are checked, in the first calls and every 16th.
        """
        estimate = self._estimate(tensordict, time_dim, Parameters(params, target_params), None, final)
        columns = (estimate.advantage, estimate.target, estimate.value, estimate.next_value)
        written = dict(zip(self._written, columns, strict=True))

        valid_key = self.tensor_keys["valid"]
        valid = estimate.valid

        stale = get_entry(tensordict, valid_key) is not None  # an old one is there: remove it
        if valid is None and (self.shifted or stale):
            valid = torch.ones(tensordict.batch_size, dtype=torch.bool, device=estimate.target.device)
        if valid is not None:
            written[valid_key] = valid

        for key, column in written.items():
            set_entry(tensordict, key, column)

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
        """Return only the value target, without writing into the batch.

        Args:
            next_value: values of the next observations, ``[*B, T, *F]``, if they are known already: then the
                network is not called for them, nor, by an estimator of temporal differences, at all.
            tensordict, params, target_params, final, time_dim: as in :meth:`forward`, as is what is raised.
        """
        if next_value is not None:
            check_dense_tensor("next_value", next_value)
            if not self.episodic:
                raise ValueError(
                    "next_value= gives the values of the next observations, and with episodic=False the value of the "
                    "next episode's first observation follows the end of an episode: leave one of the two out"
                )

        parameters = Parameters(params, target_params)
        return self._estimate(tensordict, time_dim, parameters, next_value, final).target

    def _estimate(
        self,
        batch: TensorDictBase,
        time_dim: int | None,
        parameters: Parameters,
        next_value: Tensor | None,
        final: TensorDictBase | None,
    ) -> Estimate:
        """Compute what is written for a batch; time may be any of its dims."""
        if not isinstance(batch, TensorDictBase):
            check_rows(batch)

        # The dim of time.
        last = batch.batch_dims - 1
        if last < 0:
            raise ValueError("the batch must have at least one batch dimension (time), got batch size []")

        if time_dim is None:
            time_dim = self.time_dim
        if time_dim is None:
            time_dim = last
            if "time" in batch.names:
                time_dim = batch.names.index("time")
        if not (isinstance(time_dim, int) and -last - 1 <= time_dim <= last):
            raise ValueError(f"time_dim must name a batch dim of {tuple(batch.batch_size)}, got {time_dim!r}")
        dim = time_dim % (last + 1)

        # The arguments, with time in the last dim.
        factors = {name: getattr(self, name) for name in self.factor_names}
        series = Series(batch, factors, self.chunks, parameters, next_value, final)
        if dim != last:
            series = series.turned(dim, self.places["reward"])

        grad = self.differentiable and torch.is_grad_enabled()
        with torch.set_grad_enabled(grad), set_recurrent_mode(True):
            if is_tracing():
                estimate = self._estimate_series(series)
            else:
                try:
                    estimate = self._estimate_series(series)
                except BLAMED as error:
                    entries: list[Any] = self.in_keys
                    blame_entries(self, series.batch, entries, error)
                    raise

        if dim != last:
            estimate = estimate.turned(dim, last)
        if self.check_finite:
            check_finite(batch, self.value_network, estimate)

        return estimate

    def _estimate_series(self, series: Series) -> Estimate:
        """Do the same for a batch whose last dim is time."""
        if self._keys_of[0] is not self.value_network:
            self.set_keys()  # the network was replaced and may read other entries

        columns = self._read(series.batch)
        batch = columns.batch
        reward = columns.reward
        at = columns.at

        # The values of observations and next observations.
        in_order = self.shifted or not self.episodic
        values_of = ValueInputs(
            network=self._inputs,
            value_key=self.tensor_keys["value"],
            batch=batch,
            at=at,
            chunks=series.chunks,
            shifted=self.shifted,
            shifted_budget=self.shifted_budget,
            skip_existing=self.skip_existing,
            final=series.final,
            parameters=series.parameters,
            n_step=columns.steps is not None and not (in_order and _lead_to_next_row(columns.steps)),
            warn=self._warn_once,
        )
        if at.ends.is_cpu and not is_tracing():  # on a device the values are not ready yet
            self._check_order(values_of, self.places, series.factors.get("lmbda", 1.0))

        if series.next_value is None:
            values = state_values(values_of)
        else:
            values = self._complete_values(values_of, series.next_value, reward)
        if values.value.shape != reward.shape or values.next_value.shape != reward.shape:
            raise self._shape_error(values, reward)

        # The rows that count: runs stop before an excluded one.
        ends = at.stops
        valid = values.valid
        if at.unknown is not None and self.bootstrap_missing == "mask":
            valid = mask_and(valid, ~at.unknown)
        if valid is not None:
            ends = ends.clone()
            ends[..., :-1] |= ~valid[..., 1:]  # where row t + 1 does not count

        # Discounts and rewards.
        factors = series.factors
        if columns.steps is not None:
            over = {
                name: self._factor_over_steps(name, columns.steps, batch, factors[name], reward)
                for name in self.factors_of_steps
            }
            factors = {**factors, **over}
        discounted = reward
        if self.average_rewards:
            discounted = self._standardize(columns, reward, valid)

        # The recursion of the subclass.
        inputs = EstimatorInputs(
            batch=batch,
            at=at,
            value=values.value,
            next_value=values.next_value,
            reward=discounted,
            terminated=at.terminated,
            ends=ends,
            time_dim=batch.batch_dims - 1,
            factors=factors,
            chunks=series.chunks,
        )
        advantage, target = self.estimate(inputs)

        if self.standardize:
            advantage = self._standardize(columns, advantage, valid)
        if valid is not None:  # an excluded row has advantage 0 and its own value as the target
            rows = broadcast_like(valid, reward)
            advantage = advantage.masked_fill(~rows, 0.0)
            target = torch.where(rows, target, values.value)

        return Estimate(reward, advantage, target, values.value, values.next_value, valid)

    def _read(self, batch: TensorDictBase) -> SeriesColumns:
        """Read the reward and the markers of a batch ``[*B, T]``, and find its boundaries."""
        keys = self.places

        # The reward.
        reward: Tensor | None = get_entry(batch, keys["reward"])
        if reward is None:
            reward = require(batch, keys["reward"], REWARD)  # the error says what writes the entry
        if not reward.is_floating_point():
            key = keys["reward"]
            raise TypeError(f"batch[{key!r}] must be floating, got {reward.dtype}: cast it with .float()")
        if reward.shape == batch.batch_size:
            reward = reward.unsqueeze(-1)
        if self.reward_scale is not None:
            reward = self.reward_scale.scaled(reward)

        # The markers, and where runs end.
        flags: list[Tensor | None] = []
        for name in ("done", "is_init", "mask", "terminated"):
            flag = get_entry(batch, keys[name])
            if flag is not None:
                flag = flat_column(flag, batch, keys[name], flag=True)
            flags.append(flag)
        done, is_init, mask, terminated = flags

        ids = get_entry(batch, keys["traj_ids"])
        if ids is not None:
            ids = flat_column(ids, batch, keys["traj_ids"])

        if done is None and is_init is None and ids is None:
            raise no_markers_error(batch, keys["is_init"], keys["done"], keys["traj_ids"])
        ends = ends_from(done, is_init, ids, mask)
        if not self.episodic:
            at = _across_episodes(batch, ends, mask)
        else:
            if terminated is None:
                terminated = marker(batch, keys["terminated"])  # the error says what writes the entry
            at = Boundaries(ends, terminated, None)
        if get_entry(batch, NEXT_KNOWN) is not None:
            at = _with_unknown(batch, at, refuse=self.bootstrap_missing == "error")

        if mask is not None:
            read: list[Any] = [key for key in self.in_keys if key != keys["reward"]]
            batch = zero_padding(batch, keys["mask"], read)
        return SeriesColumns(batch, reward, at, mask, get_entry(batch, keys["steps_to_next_obs"]))

    def _complete_values(self, inputs: ValueInputs, next_value: Tensor, reward: Tensor) -> Values:
        """Return the values, given those of next observations, ``[*B, T]`` or of the reward's shape."""
        if next_value.shape == inputs.batch.batch_size:
            next_value = next_value.unsqueeze(-1)
        if next_value.shape != reward.shape:
            raise ValueError(
                f"next_value must have the reward's shape {tuple(reward.shape)}, got {tuple(next_value.shape)}"
            )

        if self.target_needs_value:
            return state_values(inputs, next_value)
        # Only the advantage, which nobody asked for, depends on the values of the rows.
        return Values(next_value, zeroed(next_value, inputs.at.terminated))

    def _shape_error(self, values: Values, reward: Tensor) -> ValueError:
        """Values of another shape than the reward's."""
        column = values.value
        if column.shape == reward.shape:
            column = values.next_value
        if self.value_network is None:
            words = "the batch must hold"
        else:
            words = "value_network must write"

        return ValueError(
            f"{words} values of the reward's shape {tuple(reward.shape)}, got {tuple(column.shape)}"
        )

    def _factor_over_steps(
        self, name: str, steps: Tensor, batch: TensorDictBase, factor: float | Tensor, reward: Tensor
    ) -> Tensor:
        """The discount or decay over the ``steps`` of each row: k times over k steps, not at all over 0."""
        spanned = flat_column(steps, batch, self.places["steps_to_next_obs"]).to(reward.dtype)
        factor = torch.as_tensor(factor, dtype=reward.dtype, device=reward.device)
        if factor.ndim:
            factor = factor_over(name, factor, reward.shape, batch.batch_dims)

        return factor ** broadcast_like(spanned, reward)

    def _standardize(self, columns: SeriesColumns, column: Tensor, valid: Tensor | None) -> Tensor:
        """The column with zero mean and unit deviation over the rows that count, or within each group of them."""
        batch = columns.batch
        mask = expand_mask(mask_and(columns.mask, valid), column)
        if self.group_key is None:
            return standardized(column, mask)

        groups = flat_column(require(batch, self.group_key), batch, self.group_key)
        return standardized_in_groups(column, groups, mask)


def _lead_to_next_row(steps: Tensor) -> bool:
    """Whether all ``steps_to_next_obs`` are 0 or 1, as in texts: the next observation is that of the row after."""
    if is_tracing():
        return False
    return not bool((steps > 1).any())


def _across_episodes(batch: TensorDictBase, ends: Tensor, mask: Tensor | None) -> Boundaries:
    """The boundaries of returns that run over the ends of an env's episodes: nothing terminates them.

    They stop where the next row is not the env's next step, also inside of an episode.

    Raises:
        KeyError: the rows do not name their env.
        ValueError: the rows of an env are in several places of the batch, or one is missing (checked on the host).
    """
    follows = goes_on_in_env(batch)
    gaps = ~follows
    if mask is not None:
        gaps = gaps & mask
    at = Boundaries(ends | gaps, torch.zeros_like(ends), None, ends & follows)
    if is_tracing() or not ends.is_cpu:
        return at

    last = at.stops
    if mask is not None:
        last = last & mask
    rows = true_indices(last)
    env = require(batch, ENV).reshape(-1)[rows]
    order = env.argsort(stable=True)
    twice = (env[order[1:]] == env[order[:-1]]).nonzero()
    if len(twice):
        row = int(rows[order[int(twice[0])]])
        raise ValueError(
            f"episodic=False needs the rows of each env in one stretch, as a Collector(track_envs=True) lays them out, "
            f"but what follows row {row} in env {int(env[order[int(twice[0])]])} is not in the row behind it: call the "
            "estimator on the batch as it was collected, before rows are stored, sampled, joined or filtered"
        )
    return at


def _with_unknown(batch: TensorDictBase, at: Boundaries, *, refuse: bool) -> Boundaries:
    """The boundaries with the bootstrapped ends whose next observation the env hid; ValueError if ``refuse``."""
    # Only needed at ends: inside a run the next row holds the observation, and a terminated row has no next value.
    unknown = ~marker(batch, NEXT_KNOWN) & at.bootstrapped
    if refuse and bool(unknown.any()):
        rows = unknown.reshape(-1).nonzero().squeeze(-1)
        hidden = f"{len(rows)} truncated rows (the first is row {int(rows[0])})"
        if at.crossed is not None:  # at the last row of an env terminated ones count, too
            hidden = f"{len(rows)} ended rows (the first is row {int(rows[0])})"
        raise ValueError(
            f"the env hid the final observation of {hidden}, so their next value is unknown: choose "
            "bootstrap_missing='current' (the value of the row's own observation) or 'mask' (leave the rows out), or "
            "collect from an env that reports final observations"
        )

    return replace(at, unknown=unknown)


def check_finite(batch: TensorDictBase, network: TensorDictModuleBase | None, estimate: Estimate) -> None:
    """Raise ValueError unless rewards and values are finite, naming the first row where they are not.

    The message says whether the network's inputs were finite there.
    """
    observed: list[Any] = []
    if network is not None:
        observed = list(network.in_keys)

    for column, words, read in (
        (estimate.reward, "", ()),
        (estimate.value, "observation", observed),
        (estimate.next_value, "next observation", [next_key(key) for key in observed]),
    ):
        if bool(column.isfinite().all()):
            continue

        bad_rows = ~column.isfinite().reshape(*batch.batch_size, -1).all(-1)
        row = tuple(int(i) for i in torch.nonzero(bad_rows)[0])
        numbers: list[float] = column[row].reshape(-1).tolist()
        shown: float | list[float] = numbers
        if len(numbers) == 1:
            shown = numbers[0]
        named: int | tuple[int, ...] = row
        if len(row) == 1:
            named = row[0]

        if not words:
            raise ValueError(f"the reward of row {named} is {shown}")

        entries = {key: batch.get(key, None) for key in read}
        bad = [key for key, x in entries.items() if x is not None and not bool(x[row].isfinite().all())]
        if bad:
            of_input = f"{bad[0]!r} is not finite there"
            way_out = "fix the data"
        else:
            of_input = "the inputs of value_network are finite there"
            way_out = "value_network has diverged, or divides by zero"

        raise ValueError(f"the value of the {words} of row {named} is {shown}, and {of_input}: {way_out}")
