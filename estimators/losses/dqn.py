"""Deep Q-learning."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from flatroll.estimators.losses.action_values import STEPS, OffPolicyLoss, following, here
from flatroll.estimators.losses.base import Rows, delayed
from flatroll.estimators.masked import Distance, Reduction, distance, masked_mean
from flatroll.estimators.values.batch_inputs import on_host
from flatroll.estimators.values.evaluate import ValueInputs, Values, state_values
from flatroll.estimators.values.extended_stream import Boundaries
from flatroll.estimators.values.options import Evaluation, NetworkInputs
from flatroll.layout.fast_call import written
from flatroll.layout.keys import OBSERVATION, NestedKey, next_key
from flatroll.modules import set_recurrent_mode

ActionSpace = Literal["categorical", "one-hot"]


class DQNLoss(OffPolicyLoss):
    """Q-learning: the distance of ``Q(s, a)`` to ``r + gamma * max_b Q'(s', b)``, r alone where terminated.

    ``Q'`` is a delayed copy of the network. Rows may come in any order (``RandomSampler``). A recurrent network
    needs slices: it and its copy run once over each slice and the observation behind it, from the state stored
    in its first row, and the first ``burn_in`` rows only warm the memory up.

    Args:
        value_network: tensordict module that writes ``"action_value"`` ``[*B, A]``; or a plain module from
            ``"observation"`` to it.
        loss_function: ``"l2"`` (default), ``"l1"`` or ``"smooth_l1"``.
        delay_value: whether targets come from a copy, ``target_value_network``, that only moves when
            :class:`~flatroll.estimators.SoftUpdate` or :class:`~flatroll.estimators.HardUpdate` moves it.
            Default: True.
        double_dqn: the network chooses the next action, the copy says its value. Default: False.
        action_space: ``"categorical"`` (integers ``[*B]``) or ``"one-hot"`` (``[*B, A]``). Default: what the
            shape of the action says.
        use_prioritized_weights: whether ``"priority_weight"`` of the batch weights the rows; ``"auto"``
            (default): if it is there.
        burn_in: rows at the beginning of each slice that count nowhere in the loss, and through which no gradient
            flows. Default: 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. Default: ``"mean"``.

    ``make_value_estimator(gamma=0.99)`` sets the discount. N-step rows are used as they are.

    Writes ``loss``, and detached means ``pred_value`` and ``target_value``. Into the batch it writes
    ``"td_error"`` ``[*B]``, absolute: the priority for a prioritized buffer.

    Raises:
        TypeError: ``value_network`` is no module.
        ValueError: ``double_dqn`` without ``delay_value``, an unknown choice, or shapes that do not match.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["action_value"])
        >>> batch = TensorDict({
        ...     "observation": torch.tensor([[1.0, 0.0], [0.0, 5.0]]), "action": torch.tensor([0, 1]),
        ...     "next": {"observation": torch.tensor([[0.0, 4.0], [9.0, 9.0]]), "reward": torch.ones(2, 1),
        ...              "terminated": torch.tensor([[False], [True]])},
        ... }, [2])
        >>> loss = DQNLoss(net).make_value_estimator(gamma=0.5)
        >>> loss(batch)["loss"], batch["td_error"]                    # targets 1 + 0.5 * 4 and 1
        (tensor(10.), tensor([2., 4.]))

    References:
        V. Mnih et al., Human-level control through deep reinforcement learning, 2015; H. van Hasselt et al.,
        Deep reinforcement learning with double Q-learning, https://arxiv.org/abs/1509.06461; S. Kapturowski et
        al., Recurrent experience replay in distributed reinforcement learning, 2019.
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        **OffPolicyLoss.default_keys,
        "action_value": "action_value",
    }

    def __init__(
        self,
        value_network: TensorDictModuleBase | nn.Module,
        *,
        loss_function: Distance = "l2",
        delay_value: bool = True,
        double_dqn: bool = False,
        action_space: ActionSpace | None = None,
        use_prioritized_weights: bool | Literal["auto"] = "auto",
        burn_in: int = 0,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            loss_function=loss_function,
            use_prioritized_weights=use_prioritized_weights,
            burn_in=burn_in,
            reduction=reduction,
        )
        if double_dqn and not delay_value:
            raise ValueError("double_dqn=True needs delay_value=True: the copy says what the choice is worth")
        if action_space not in (None, "categorical", "one-hot"):
            raise ValueError(f"action_space must be 'categorical' or 'one-hot', got {action_space!r}")
        self.value_network = as_tensordict_module(value_network, "value_network", "action_value")
        self.target_value_network = delayed(self.value_network) if delay_value else None
        self.double_dqn = double_dqn
        self.action_space: ActionSpace | None = action_space
        self.set_keys()

    def set_keys(self, **keys: NestedKey | None) -> None:
        super().set_keys(**keys)
        self._inputs = NetworkInputs.of(self.value_network, self.key("is_init"))
        read: list[Any] = [key for key in self.value_network.in_keys if key != self.key("is_init")]
        read += [next_key(key) for key in self._inputs.observed]
        read += [self.key(name) for name in ("action", "reward", "terminated")]
        self.in_keys = read
        self.out_keys = ["loss", "pred_value", "target_value"]

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The loss of a batch ``[N]`` or ``[*B, T]``, into which ``"td_error"`` is written.

        Recurrent networks run in recurrent mode, whatever the mode around the call.

        Raises:
            KeyError: an entry is missing; the text says what writes it.
        """
        rows, unknown = self.transitions(tensordict, self._inputs.observed)
        with set_recurrent_mode(True, burn_in=self.burn_in):
            value, next_value = self._values(rows, unknown)
        chosen = self._of_action(rows, value)
        target = self.target(rows, next_value, unknown)
        loss = self.finish(rows, distance(chosen, target, self.loss_function), unknown, chosen - target)
        means = {"pred_value": chosen.detach(), "target_value": target}
        return TensorDict({"loss": loss} | {name: masked_mean(x, rows.mask) for name, x in means.items()})

    def _values(self, rows: Rows, unknown: Tensor | None) -> tuple[Tensor, Tensor]:
        """Values ``[*B, A]`` of each row, with gradients, and ``[*B]`` of what follows it, without."""
        network, target = self.value_network, self.target_value_network or self.value_network
        inputs, batch = self._inputs, rows.batch
        complete = all(batch.get(next_key(key), None) is not None for key in inputs.observed)
        if inputs.recurrent or not complete:
            return self._values_of_runs(rows, unknown)
        value = self._action_value(network, here(batch, inputs.observed))
        with torch.no_grad():
            after = following(batch, inputs.observed, unknown)
            choice = self._action_value(network, after) if self.double_dqn else None
            return value, worth(self._action_value(target, after), choice)

    def _values_of_runs(self, rows: Rows, unknown: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same from one pass over the runs, each followed by the observation behind its last row."""
        if rows.batch.get(STEPS, None) is not None:
            raise ValueError(
                f"batch[{STEPS!r}] says that its next observations lie several rows ahead, and a recurrent "
                "network (or a batch without next observations) needs those of the next row: leave the n-step "
                "transform out, and make_value_estimator('td_lambda') for longer returns"
            )
        at = Boundaries(self.ends(rows), self.terminated(rows), unknown)
        online = self._over_stream(self.value_network, rows.batch, at)
        choice = following_value = online.next_value.detach()
        if self.target_value_network is not None:
            with torch.no_grad():
                following_value = self._over_stream(self.target_value_network, rows.batch, at).next_value
        return online.value, worth(following_value, choice if self.double_dqn else None)

    def _over_stream(self, network: TensorDictModuleBase, batch: TensorDictBase, at: Boundaries) -> Values:
        """Action values of each row and of what follows it; a row of which a warning would tell does not count."""
        inputs = NetworkInputs.of(network, self.key("is_init"))
        return state_values(
            ValueInputs(inputs, self.key("action_value"), batch, at, Evaluation(shifted=True))
        )

    def _action_value(self, network: TensorDictModuleBase, batch: TensorDict) -> Tensor:
        key = self.key("action_value")
        value = written(network, batch, key)
        if value is None:
            raise KeyError(
                f"value_network wrote no entry {key!r}: its out_keys are {list(network.out_keys)}; name the "
                "one that holds a value for each action with set_keys(action_value=...)"
            )
        if value.ndim != batch.batch_dims + 1:
            raise ValueError(
                f"value_network must write {key!r} of shape {[*batch.shape]} and one dim of actions, "
                f"got {tuple(value.shape)}"
            )
        return value

    def _of_action(self, rows: Rows, value: Tensor) -> Tensor:
        """The value ``[*B]`` of the action that was taken."""
        return of_action(value, self.entry(rows, "action"), self.action_space)


def worth(value: Tensor, choice: Tensor | None) -> Tensor:
    """The best of the values ``[*B, A]``, or the one of the action that ``choice`` holds for the best."""
    if choice is None:
        return value.amax(-1)
    return value.gather(-1, choice.argmax(-1, keepdim=True)).squeeze(-1)


def of_action(value: Tensor, action: Tensor, space: ActionSpace | None) -> Tensor:
    """The value ``[*B]`` of each row's action, of the values ``[*B, A]`` of all actions.

    Args:
        value: ``[*B, A]``.
        action: integers ``[*B]`` or ``[*B, 1]``, or one-hot ``[*B, A]``.
        space: which of the two; None asks the shape.

    Raises:
        ValueError: the shape is neither.
        TypeError: an action that is an index is not an integer.
    """
    if space == "one-hot" or (space is None and action.shape == value.shape and value.shape[-1] > 1):
        if action.shape != value.shape:
            raise ValueError(
                f"a one-hot action must have shape {tuple(value.shape)}, got {tuple(action.shape)}"
            )
        return (value * action).sum(-1)
    if action.shape not in (value.shape[:-1], (*value.shape[:-1], 1)):
        raise ValueError(
            f"the action must be an integer of shape {tuple(value.shape[:-1])}, or one-hot "
            f"{tuple(value.shape)} like the action values, got {tuple(action.shape)}"
        )
    if action.is_floating_point() or action.dtype is torch.bool:
        raise TypeError(
            f"an action that names one of {value.shape[-1]} must be an integer, got {action.dtype}"
        )
    index = action.long().reshape(*value.shape[:-1], 1)
    if on_host(index) and not bool(((index >= 0) & (index < value.shape[-1])).all()):
        raise ValueError(
            f"an action must be one of the {value.shape[-1]} that value_network judges, got actions from "
            f"{int(index.min())} to {int(index.max())}: give the network as many outputs as there are actions"
        )
    return value.gather(-1, index).squeeze(-1)


def as_tensordict_module(network: nn.Module, name: str, out_key: str) -> TensorDictModuleBase:
    """The network, or if it is a plain module, one that reads ``"observation"`` and writes ``out_key``."""
    if isinstance(network, TensorDictModuleBase):
        return network
    if not isinstance(network, nn.Module):
        raise TypeError(
            f"{name} must be a tensordict module or a torch.nn.Module, got {type(network).__name__}"
        )
    return TensorDictModule(network, in_keys=[OBSERVATION], out_keys=[out_key])
