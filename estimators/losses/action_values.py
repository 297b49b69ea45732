"""Base class of the off-policy losses (DQN, SAC): next observations, critics, TD targets and priorities."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar, Literal, Self, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from typing_extensions import override

from flatroll.estimators.functional import (
    td0_return_estimate,
    td_lambda_return_estimate,
    unit_interval,
)
from flatroll.estimators.losses.base import LossInputs, LossModule, copy_network
from flatroll.estimators.masked import (
    DISTANCES,
    Distance,
    Reduction,
    distance,
    mask_and,
    on_host,
    zero_masked,
)
from flatroll.estimators.values.base import ValueEstimator
from flatroll.estimators.values.estimators import ValueEstimators, check_estimator_name
from flatroll.estimators.values.evaluate import fill_missing
from flatroll.kernels.scan import readable
from flatroll.layout.boundaries import run_ends
from flatroll.layout.checks import check_choice, check_whole_number
from flatroll.layout.keys import (
    NEXT_KNOWN,
    NestedKey,
    flat_column,
    marker,
    next_key,
    require,
)
from flatroll.layout.tensordict_seam import call_for, get_entry, nest, set_entry
from flatroll.modules.reward_scale import RewardScale

ActionSpace = Literal["categorical", "one-hot"]

#: Kinds of actions by the class names of Gymnasium spaces and TorchRL specs.
_SPACES = {"Discrete": "categorical", "Categorical": "categorical", "OneHot": "one-hot"}

#: Written by n-step transforms: the number of summed rewards, and the discount over them.
STEPS = "steps_to_next_obs"
DISCOUNT = "gamma"


class OffPolicyLoss(LossModule):
    """Base of the off-policy losses, which fit action values to single transitions: DQN, SAC, or your own.

    A subclass keeps its critics and their target copies (:func:`target_copy`) as attributes and defines ``forward``:
    it calls :meth:`transitions`, evaluates target networks on :meth:`next_entries`, makes regression targets with
    :meth:`target`, and returns losses reduced by :meth:`reduce_and_write_priority` and :meth:`reduce`.

    Args:
        loss_function: ``"l1"``, ``"l2"`` or ``"smooth_l1"``; kept as an attribute. Default: ``"l2"``.
        use_prioritized_weights: whether to weight the rows by ``"priority_weight"`` (``[N]``): True, False, or
            ``"auto"``, if present. A mean is divided by the sum of the weights. Default: ``"auto"``.
        burn_in, reduction, diagnostics: see :class:`LossModule`.

    Raises:
        ValueError: unknown ``loss_function``, ``use_prioritized_weights`` or ``reduction``.

    Example:
        A loss of two critics for a fixed policy that moves by 0.5 wherever it is:

        >>> from tensordict.nn import TensorDictModule
        >>> class FixedPolicyLoss(OffPolicyLoss):
        ...     def __init__(self, qvalue_network):
        ...         super().__init__()
        ...         self.qvalue_network = critic_ensemble(qvalue_network, 2)
        ...     def forward(self, batch):
        ...         inputs = self.transitions(batch, ["observation"])
        ...         with torch.no_grad():
        ...             after = self.next_entries(inputs, ["observation"])
        ...             after["action"] = torch.full((*after.shape, 1), 0.5)
        ...             target = self.target(inputs, self.minimum_value(self.qvalue_network, after))
        ...         error = torch.stack(self.critic_values(self.qvalue_network, inputs.readable)) - target   # [2, *B]
        ...         loss = self.reduce_and_write_priority(inputs, error.square().sum(0), error.abs().amax(0))
        ...         return TensorDict({"loss_qvalue": loss})
        >>> critic = TensorDictModule(lambda s, a: s + a, ["observation", "action"], ["state_action_value"])
        >>> batch = TensorDict({
        ...     "observation": torch.tensor([[1.0], [2.0]]), "action": torch.zeros(2, 1),
        ...     "next": {"observation": torch.tensor([[3.5], [9.0]]), "reward": torch.ones(2, 1),
        ...              "terminated": torch.tensor([[False], [True]])},
        ... }, [2])
        >>> loss = FixedPolicyLoss(critic).make_value_estimator("td0", gamma=0.5)
        >>> loss(batch)["loss_qvalue"], batch["td_error"]                   # targets 1 + 0.5 * (3.5 + 0.5) and 1
        (tensor(5.), tensor([2., 1.]))
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        **LossModule.default_keys,
        "priority": "td_error",
        "priority_weight": "priority_weight",
    }
    optional_keys: ClassVar[tuple[NestedKey, ...]] = (*LossModule.optional_keys, STEPS, DISCOUNT)
    #: The entry that a critic writes, also its name in :meth:`set_keys`: ``"state_action_value"`` ``[*B, 1]``,
    #: the value of the action in its input, or ``"action_value"`` ``[*B, A]``, one value per action.
    value_name: ClassVar[str] = "state_action_value"

    def __init__(
        self,
        *,
        loss_function: Distance = "l2",
        use_prioritized_weights: bool | Literal["auto"] = "auto",
        burn_in: int = 0,
        reduction: Reduction = "mean",
        diagnostics: bool = True,
    ) -> None:
        super().__init__(reduction=reduction, burn_in=burn_in, diagnostics=diagnostics)
        self._name_entries({**self.tensor_keys, self.value_name: self.value_name})
        check_choice("loss_function", loss_function, DISTANCES)
        check_choice("use_prioritized_weights", use_prioritized_weights, (True, False, "auto"))

        self.loss_function: Distance = loss_function
        self.use_prioritized_weights = use_prioritized_weights
        self.make_value_estimator()

    def make_value_estimator(
        self,
        value_type: str | type[ValueEstimator] = ValueEstimators.TD0,
        *,
        reward_scale: RewardScale | None = None,
        **hyperparams: float,
    ) -> Self:
        """Choose how the critics' regression target is computed, such as TD(0) with a given gamma.

        ``"td0"`` (default): ``reward + gamma * next_value``, on rows in any order. ``"td1"`` and
        ``"td_lambda"``, whose targets are those of ``"gae"``, too: returns along each run, for batches of slices,
        without off-policy correction.

        N-step rows (``"steps_to_next_obs"``, as ``MultiStepTransform`` writes it) need ``"td0"``; there
        ``"gamma"`` of the batch, or else ``gamma ** steps``, takes the place of ``gamma``.

        Args:
            value_type: ``"td0"``, ``"td1"``, ``"td_lambda"`` or ``"gae"``, or the class. Default: ``"td0"``.
            reward_scale: divides the reward as it is read; the batch keeps its own. Default: None.
            hyperparams: ``gamma``, default 0.99; ``lmbda`` of the last two, default 0.95. Both in [0, 1].

        Returns:
            the loss itself.

        Raises:
            ValueError: another estimator, or a number out of range.
            TypeError: another hyperparameter.
        """
        kind = check_estimator_name(value_type)
        if kind == ValueEstimators.VTrace:
            raise ValueError(
                "'vtrace' corrects state values by the actor's probabilities of the actions, but "
                f"{type(self).__name__} learns action values: use 'td0', 'td1' or 'td_lambda'"
            )

        traced = kind in (ValueEstimators.TDLambda, ValueEstimators.GAE)
        defaults = {"gamma": 0.99}
        if traced:
            defaults["lmbda"] = 0.95
        unknown = sorted(set(hyperparams) - set(defaults))
        if unknown:
            raise TypeError(f"{kind} takes {' and '.join(defaults)}, got {', '.join(unknown)}")

        numbers = defaults | hyperparams
        self.gamma = unit_interval("gamma", numbers["gamma"])
        self.reward_scale = reward_scale
        if traced:
            self.lmbda = unit_interval("lmbda", numbers["lmbda"])
        else:
            self.lmbda = float(kind == ValueEstimators.TD1)  # TD(1) is the full return, TD(0) one step

        return self

    def transitions(self, batch: TensorDictBase, observed: Iterable[NestedKey]) -> LossInputs:
        """Return ``batch`` ``[*B]`` with masks of the valid rows and of unknown next observations.

        The next observation of a row that is not terminated is unknown if the env hid it (``("collector",
        "next_known")``), if a number is NaN, e.g. because ``NextStateReconstructor`` found no next row, or, in a
        batch without next observations, at the last row of a run. Unknown rows do not count.

        Args:
            batch: the batch.
            observed: keys of the observations whose next ones the loss evaluates.
        """
        inputs = self.inputs_of(batch)
        finite = []

        # Rows whose next observation the env hid, or does not follow.
        unknown = None
        if get_entry(batch, NEXT_KNOWN) is not None:
            unknown = ~marker(batch, NEXT_KNOWN)
        for key in observed:
            column = get_entry(inputs.readable, next_key(key))
            if column is not None:
                bad = rows_with_nan(column, batch.batch_dims)
            else:
                bad = self.ends(inputs)
            if bad is None:
                finite.append(key)
            elif unknown is None:
                unknown = bad
            else:
                unknown = unknown | bad

        if unknown is None:
            inputs.finite = (*finite,)
            return inputs

        unknown = unknown & ~self.terminated(inputs)
        lost = int(unknown.sum()) if on_host(unknown) else 0
        if 2 * lost > unknown.numel():  # more than half of the rows
            self._warn_once(
                f"for most rows of the batch ({lost} of {unknown.numel()}) the next observation is not "
                "known, and they count nowhere: draw slices (SliceSampler), whose rows hold each other's next "
                "observations, or keep them (compact_obs=False)"
            )

        known = mask_and(inputs.mask, ~unknown)
        return LossInputs(inputs.batch, inputs.readable, known, unknown, inputs.real)

    def terminated(self, inputs: LossInputs) -> Tensor:
        """Return which rows are terminated, so that their next value is 0; bool ``[*B]``."""
        flag = self.entry(inputs, "terminated")  # the error says what writes the entry
        key = self.key("terminated")
        if flag.dtype is torch.bool:
            return flat_column(flag, inputs.batch, key)
        return marker(inputs.batch, key)

    def ends(self, inputs: LossInputs) -> Tensor:
        """Return which rows are the last of their run; bool ``[*B]``."""
        return run_ends(inputs.batch, **self.boundary_keys)

    @staticmethod
    def root_entries(inputs: LossInputs, keys: Iterable[NestedKey]) -> TensorDict:
        """Return the entries ``keys`` of the batch in a new tensordict ``[*B]``."""
        batch = inputs.readable
        columns = {}

        for key in keys:
            column = get_entry(batch, key)
            if column is None:
                column = require(batch, key)  # the error says what writes the entry
            columns[key] = column

        return nest(columns, *batch.batch_size)

    @staticmethod
    def next_entries(inputs: LossInputs, keys: Iterable[NestedKey]) -> TensorDict:
        """Return the next entries of ``keys``, ``("next", key)``, as ``key`` in a new tensordict ``[*B]``.

        NaN and unknown next observations are replaced by the row's own values, so that no NaN reaches a network; such
        rows do not count.
        """
        batch = inputs.readable
        columns = {}
        for key in keys:
            column = get_entry(batch, next_key(key))
            if column is None:
                column = require(batch, next_key(key))  # the error says what writes the entry
            if key not in inputs.finite:
                column = fill_missing(column, require(batch, key), inputs.unknown)
            columns[key] = column

        return nest(columns, *batch.batch_size)

    def critic_values(
        self, networks: Iterable[nn.Module], batch: TensorDictBase, argument: str = "qvalue_network"
    ) -> list[Tensor]:
        """Evaluate each critic on the rows of ``batch``, which stays unchanged.

        Args:
            networks: tensordict modules, e.g. a :func:`critic_ensemble`.
            batch: what they read, ``[*B]``.
            argument: name of the networks in errors.

        Returns:
            for each critic, ``"state_action_value"`` as ``[*B]`` or ``"action_value"`` ``[*B, A]``, depending on
            :attr:`value_name`.

        Raises:
            KeyError: a critic writes no such entry.
            ValueError: it has another shape.
        """
        key = self.tensor_keys[self.value_name]
        values = []
        per_action = self.value_name == "action_value"

        for network in cast(Iterable[Any], networks):
            value = call_for(network, batch, key)
            if value is None:
                wanted = "a value for each action" if per_action else "the value"
                raise KeyError(
                    f"{argument} wrote no entry {key!r}: its out_keys are {list(network.out_keys)}; name the one that "
                    f"holds {wanted} with set_keys({self.value_name}=...)"
                )
            if per_action and value.ndim != batch.batch_dims + 1:
                raise ValueError(
                    f"{argument} must write {key!r} of shape {[*batch.shape]} and one dim of actions, "
                    f"got {tuple(value.shape)}"
                )

            if not per_action:
                value = flat_column(value, batch, key)
            values.append(value)

        return values

    def minimum_value(self, networks: Iterable[nn.Module], batch: TensorDictBase) -> Tensor:
        """Return the elementwise minimum of the :meth:`critic_values`, against overestimation."""
        return reduce(torch.minimum, self.critic_values(networks, batch))

    def target(self, inputs: LossInputs, next_value: Tensor) -> Tensor:
        """Return each row's regression target ``[*B]``, without gradient (see :meth:`make_value_estimator`).

        It is 0 in padding, whose reward may be NaN, and in rows that an estimator excluded.

        Args:
            inputs: the batch.
            next_value: value of the next state, ``[*B]``; any number where terminated or unknown.
        """
        batch = inputs.batch
        next_value = next_value.detach()
        reward = self.entry(inputs, "reward")
        if not reward.is_floating_point():
            key = self.key("reward")
            raise TypeError(f"batch[{key!r}] must be floating, got {reward.dtype}: cast it with .float()")

        reward = flat_column(reward, batch, self.key("reward"))
        if self.reward_scale is not None:
            reward = self.reward_scale.scaled(reward)

        terminated = self.terminated(inputs)
        steps = get_entry(batch, STEPS)

        # One step, or n: the reward and the discounted next value.
        if self.lmbda == 0.0:
            discount: float | Tensor = self.gamma
            if steps is not None:  # n-step rows: the next observation is several steps ahead
                written_discount = batch.get(DISCOUNT, None)
                if written_discount is not None:
                    discount = flat_column(written_discount, batch, DISCOUNT)
                else:
                    discount = self.gamma ** flat_column(steps, batch, STEPS)

            if isinstance(discount, Tensor):
                returns = td0_return_estimate(discount, next_value, reward, terminated)
            else:  # the same for [*B] columns, whose shapes are known to match
                returns = torch.add(reward, readable(next_value, discount, terminated), alpha=discount)
            return zero_masked(returns, inputs.real)

        # A return along the run.
        if steps is not None:
            raise ValueError(
                f"batch[{STEPS!r}] says that its rewards span several rows, which a return along the run would "
                "count more than once: call make_value_estimator('td0'), or leave the n-step transform out"
            )

        ends = self.ends(inputs)
        if inputs.unknown is not None:
            # An unknown row has no target. Cut the return before it, so that the previous row bootstraps from
            # its own next value, which is known.
            ends[..., :-1] |= inputs.unknown[..., 1:]

        returns = td_lambda_return_estimate(
            self.gamma, self.lmbda, next_value, reward, ends, terminated, time_dim=-1
        )
        return zero_masked(returns, inputs.real)

    def fit(self, inputs: LossInputs, values: Sequence[Tensor], target: Tensor) -> Tensor:
        """Sum the critics' distances to the target and reduce; write ``"td_error"``, the largest error.

        Args:
            inputs: the batch.
            values: of each critic, ``[*B]``.
            target: of all of them, see :meth:`target`.

        Returns:
            the reduced loss, see :meth:`reduce`.
        """
        errors = [(value.detach() - target).abs_() for value in values]
        self.write_priority(inputs, reduce(torch.maximum, errors))
        kind = self.loss_function

        if inputs.mask is None and self.reduction == "mean" and self.read_weights(inputs) is None:
            # distance and mean of all rows in one pass
            return reduce(torch.add, [DISTANCES[kind](value, target) for value in values])

        losses = [distance(value, target, kind) for value in values]
        return self.reduce(inputs, reduce(torch.add, losses))

    def reduce_and_write_priority(self, inputs: LossInputs, loss: Tensor, error: Tensor) -> Tensor:
        """Reduce the loss, and write ``"td_error"``, the new priorities, into the batch.

        Args:
            inputs: the batch.
            loss: of each row, ``[*B]``.
            error: temporal-difference error of each row, ``[*B]``, of either sign. Its absolute value is written, and
                0 in rows without a transition or known target: padding, rows that an estimator excluded, unknown next
                observations. Network outputs in such rows are meaningless, and a NaN would be refused as a priority.
                Burn-in rows keep their errors, so that priorities of slices cover all rows.

        Returns:
            the reduced loss, see :meth:`reduce`.
        """
        self.write_priority(inputs, error.detach().abs())
        return self.reduce(inputs, loss)

    def write_priority(self, inputs: LossInputs, error: Tensor) -> None:
        """Write the size ``[*B]`` of each row's error as its priority: see :meth:`reduce_and_write_priority`."""
        # rows without an error get the lowest priority, because they do not contribute to the loss
        if inputs.unknown is not None:
            error = zero_masked(error, ~inputs.unknown)
        set_entry(inputs.batch, self.key("priority"), zero_masked(error, inputs.real))

    def read_weights(self, inputs: LossInputs) -> Tensor | None:
        """Return the importance weights ``[*B]`` of prioritized sampling; None if unused or missing."""
        key = self.key("priority_weight")
        column = None
        if self.use_prioritized_weights:
            column = get_entry(inputs.batch, key)
        if column is None and self.use_prioritized_weights is True:
            column = require(inputs.batch, key)  # the error says what writes the entry

        if column is None:
            return None
        return flat_column(column, inputs.batch, key)

    @override
    def reduce(self, inputs: LossInputs, loss: Tensor, weights: Tensor | None = None) -> Tensor:
        """Reduce the loss ``[*B]`` according to ``reduction``, weighted with the importance weights.

        With weights ``w`` (importance weights of prioritized sampling), the mean is ``sum(w * loss) / sum(w)``.
        """
        if weights is None:
            weights = self.read_weights(inputs)
        return super().reduce(inputs, loss, weights)


def critic_ensemble(
    networks: TensorDictModuleBase | Sequence[TensorDictModuleBase], number: int = 2
) -> nn.ModuleList:
    """Make an ensemble of critics from a list, or from one network and newly initialised copies of it.

    Args:
        networks: one tensordict module, or a list, used as it is.
        number: size of the ensemble, if one network is given. Its copies are initialised by ``reset_parameters``
            of their layers. Default: 2.

    Raises:
        TypeError: one is not a tensordict module.
        ValueError: fewer than one network, or layers without ``reset_parameters``.

    >>> from tensordict.nn import TensorDictModule
    >>> critic = TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_action_value"])
    >>> first, second = critic_ensemble(critic)
    >>> first is critic, torch.equal(first.module.weight, second.module.weight)
    (True, False)
    """
    is_one = isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList)
    several = not is_one and isinstance(networks, Iterable) and not isinstance(networks, Tensor)
    critics: list[Any] = [networks]
    if several:
        critics = list(cast(Iterable[Any], networks))

    check_whole_number("number", number)
    if not critics:
        raise ValueError(
            "networks (qvalue_network of a loss) must hold at least one tensordict module, got none"
        )
    for network in critics:
        if not isinstance(network, TensorDictModuleBase):
            raise TypeError(
                "networks (qvalue_network of a loss) must be a tensordict module or a list of them, "
                "e.g. TensorDictModule(net, in_keys=['observation', 'action'], out_keys=[...]), "
                f"got {type(network).__name__}"
            )

    copies = number - 1 if is_one else 0
    for _ in range(copies):  # the copies need parameters of their own
        copy = copy_network(critics[0])
        for layer in copy.modules():
            reset = getattr(layer, "reset_parameters", None)
            if callable(reset):
                reset()
            elif next(layer.parameters(recurse=False), None) is not None:
                raise ValueError(
                    f"qvalue_network has a {type(layer).__name__}, whose parameters cannot be re-initialised (it "
                    "has no reset_parameters): pass a list of networks instead of one"
                )

        critics.append(copy)

    return nn.ModuleList(critics)


def name_action_space(space: object) -> ActionSpace | None:
    """Return the name of an action space given as a name, spec or space; None: the action's shape decides.

    >>> import gymnasium as gym
    >>> name_action_space("one_hot"), name_action_space(gym.spaces.Discrete(3))
    ('one-hot', 'categorical')
    """
    if space is None:
        return None

    name = str(_SPACES.get(type(space).__name__, space)).replace("_", "-")
    if name not in ("categorical", "one-hot"):
        raise ValueError(
            f"action_space must be 'categorical' or 'one-hot', got {space!r}: pass a name, or a space or spec "
            "of such actions; values of several choices at once are not supported"
        )

    return cast(ActionSpace, name)


def value_of_action(value: Tensor, action: Tensor, space: ActionSpace | None) -> Tensor:
    """Select the value ``[*B]`` of each row's action from the values ``[*B, A]`` of all actions.

    Actions are integers ``[*B]`` or ``[*B, 1]``, or one-hot ``[*B, A]``, according to ``space`` or, if None, to their
    shape.
    """
    if space == "one-hot" or (space is None and action.shape == value.shape and value.shape[-1] > 1):
        if action.shape != value.shape:
            raise ValueError(
                f"a one-hot action must have shape {tuple(value.shape)}, got {tuple(action.shape)}"
            )
        return (value * action).sum(-1)  # only one of the A products is not 0

    if action.shape not in (value.shape[:-1], (*value.shape[:-1], 1)):
        raise ValueError(
            f"the action must be an integer of shape {tuple(value.shape[:-1])}, or one-hot "
            f"{tuple(value.shape)} like the action values, got {tuple(action.shape)}"
        )

    if action.is_floating_point() or action.dtype is torch.bool:
        raise TypeError(
            f"actions that are indices of {value.shape[-1]} values must be integers, got {action.dtype}"
        )

    index = action.long()
    if action.ndim != value.ndim:
        index = index.unsqueeze(-1)

    try:  # on the CPU, gather() checks each index itself
        return value.gather(-1, index).squeeze(-1)  # [*B, A] at [*B, 1] -> [*B, 1] -> [*B]
    except RuntimeError as error:
        if not on_host(index) or bool(((index >= 0) & (index < value.shape[-1])).all()):
            raise
        raise ValueError(
            f"an action must be one of the {value.shape[-1]} that value_network evaluates, got actions from "
            f"{int(index.min())} to {int(index.max())}: give the network as many outputs as there are actions"
        ) from error


def rows_with_nan(column: Tensor, batch_dims: int) -> Tensor | None:
    """Return which rows ``[*B]`` contain a NaN; None if a cheap check on the CPU finds none."""
    if not column.is_floating_point():
        return None

    # one pass in the common case: the sum of a column with NaN is NaN
    if on_host(column) and math.isfinite(column.sum().item()):
        return None

    return column.isnan().reshape(*column.shape[:batch_dims], -1).any(-1)  # [*B, *F] -> [*B, F] -> [*B]
