"""Deep Q-learning."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from typing_extensions import override

from flatroll.estimators.losses.action_values import (
    STEPS,
    ActionSpace,
    OffPolicyLoss,
    name_action_space,
    value_of_action,
)
from flatroll.estimators.losses.base import LossInputs, NetworkParameters, target_copy
from flatroll.estimators.masked import Distance, Reduction, masked_mean
from flatroll.estimators.values.evaluate import NetworkInputs, ValueInputs, Values, state_values
from flatroll.estimators.values.extended_stream import Boundaries
from flatroll.layout.checks import check_flags
from flatroll.layout.keys import ACTION_MASK, OBSERVATION, NestedKey, next_key, require
from flatroll.layout.tensordict_seam import get_entry, nest
from flatroll.modules import set_recurrent_mode


class DQNLoss(OffPolicyLoss):
    """Q-learning: the distance of ``Q(s, a)`` to ``r + gamma * max_b Q'(s', b)``, or to ``r`` where terminated.

    ``Q'`` is a delayed copy of the network. Rows may come in any order (``RandomSampler``). A recurrent network needs
    slices: the network and its copy run once over each slice and its final next observation, from the state stored in
    the first row, and the first ``burn_in`` rows only warm up the state.

    Args:
        value_network: tensordict module that writes ``"action_value"`` ``[*B, A]``; or a plain module from
            ``"observation"`` to it.
        loss_function, use_prioritized_weights, burn_in, reduction, diagnostics: see
            :class:`~flatroll.estimators.OffPolicyLoss`. Default: ``"l2"``, ``"auto"``, 0, ``"mean"``, True.
        delay_value: whether targets come from a copy, ``target_value_network``, that only moves when
            :class:`~flatroll.estimators.SoftUpdate` or :class:`~flatroll.estimators.HardUpdate` moves it.
            Default: True.
        double_dqn: the network selects the next action, the copy evaluates it. Default: False.
        action_space: ``"categorical"`` (integers ``[*B]``) or ``"one-hot"`` (``[*B, A]``), or a space or spec of
            such actions. Default: inferred from the action's shape.

    ``make_value_estimator(gamma=0.99)`` sets the discount. N-step rows are used as they are.

    If the batch has an ``"action_mask"``, the maximum is over the legal actions of the next state, ``("next",
    "action_mask")`` ``[*B, A]``, unless the network applies the mask itself, like `flatroll.modules.q_network`.

    Writes ``loss``, and detached means ``pred_value`` and ``target_value``. Into the batch it writes
    ``"td_error"`` ``[*B]``, absolute: the priority for a prioritized buffer. It is 0 in rows without a transition,
    such as padding, and where the next observation is unknown.

    Raises:
        TypeError: ``value_network`` is not a module.
        ValueError: ``double_dqn`` without ``delay_value``, an unknown choice, or shapes that do not match.

    Example:
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
        "action_mask": ACTION_MASK,
    }
    value_name = "action_value"
    value_network_params = NetworkParameters()
    target_value_network_params = NetworkParameters()

    def __init__(
        self,
        value_network: TensorDictModuleBase | nn.Module,
        *,
        loss_function: Distance = "l2",
        delay_value: bool = True,
        double_dqn: bool = False,
        action_space: object = None,
        use_prioritized_weights: bool | Literal["auto"] = "auto",
        burn_in: int = 0,
        reduction: Reduction = "mean",
        diagnostics: bool = True,
    ) -> None:
        super().__init__(
            loss_function=loss_function,
            use_prioritized_weights=use_prioritized_weights,
            burn_in=burn_in,
            reduction=reduction,
            diagnostics=diagnostics,
        )

        check_flags(delay_value=delay_value, double_dqn=double_dqn)
        if double_dqn and not delay_value:
            raise ValueError(
                "double_dqn=True needs delay_value=True: the delayed copy evaluates the chosen action"
            )

        if not isinstance(value_network, nn.Module):
            raise TypeError(
                "value_network must be a tensordict module or a torch.nn.Module, "
                f"got {type(value_network).__name__}"
            )

        if not isinstance(value_network, TensorDictModuleBase):
            value_network = TensorDictModule(value_network, [OBSERVATION], [self.value_name])

        self.value_network: TensorDictModuleBase = value_network
        self.target_value_network = target_copy(self.value_network) if delay_value else None

        self.delay_value = delay_value
        self.double_dqn = double_dqn
        self.action_space: ActionSpace | None = name_action_space(action_space)
        self.set_keys()

    @override
    def set_keys(self, **keys: NestedKey | None) -> None:
        super().set_keys(**keys)
        self._network_inputs = NetworkInputs.of(self.value_network, self.key("is_init"))
        read: list[Any] = [key for key in self.value_network.in_keys if key != self.key("is_init")]
        read += [next_key(key) for key in self._network_inputs.observed]
        read += [self.key(name) for name in ("action", "reward", "terminated")]
        self.in_keys = read

        written: list[Any] = ["loss"]
        if self.with_diagnostics:
            written += ["pred_value", "target_value"]
        self.out_keys = written
        self.tuple_length = 1

    @override
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Compute the loss of a batch ``[N]`` or ``[*B, T]``, and write ``"td_error"`` into the batch.

        Recurrent networks run in recurrent mode, whatever the mode around the call.

        Raises:
            KeyError: an entry is missing; the message names what writes it.
        """
        inputs = self.transitions(tensordict, self._network_inputs.observed)
        with set_recurrent_mode(True, burn_in=self.burn_in):
            value, next_value = self._values(inputs)

        chosen = value_of_action(value, self.entry(inputs, "action"), self.action_space)
        target = self.target(inputs, next_value)
        losses = {"loss": self.fit(inputs, [chosen], target)}

        if self.with_diagnostics:
            losses["pred_value"] = masked_mean(chosen.detach(), inputs.mask)
            losses["target_value"] = masked_mean(target, inputs.mask)

        return nest(losses)

    def _values(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Return values ``[*B, A]`` of each row, with gradients, and ``[*B]`` of its next state, without."""
        online = self.value_network
        target = self.target_value_network
        if target is None:
            target = online

        reads = self._network_inputs
        observed = reads.observed
        if reads.recurrent or any(get_entry(inputs.batch, key) is None for key in reads.next_observed):
            return self._values_of_runs(inputs)

        (value,) = self.critic_values([online], self.root_entries(inputs, observed), "value_network")
        with torch.no_grad():  # double DQN: the network selects the next action, its copy evaluates it
            after = self.next_entries(inputs, observed)
            choice = None
            if self.double_dqn:
                choice = self.critic_values([online], after, "value_network")[0]
            (next_value,) = self.critic_values([target], after, "value_network")
            legal = self._legal(inputs)
            return value, next_state_value(masked(next_value, legal), masked(choice, legal))

    def _values_of_runs(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Do the same in one pass over the runs, each followed by its final next observation."""
        if inputs.batch.get(STEPS, None) is not None:
            raise ValueError(
                f"batch[{STEPS!r}] says that its next observations are several rows ahead, but a recurrent "
                "network (or a batch without next observations) needs those of the next row: leave the n-step "
                "transform out, and call make_value_estimator('td_lambda') for longer returns"
            )

        at = Boundaries(self.ends(inputs), self.terminated(inputs), inputs.unknown)
        online = self._over_stream(self.value_network, inputs.readable, at)
        choice = online.next_value.detach()  # [*B, A]
        next_value = choice
        if self.target_value_network is not None:
            with torch.no_grad():
                next_value = self._over_stream(self.target_value_network, inputs.readable, at).next_value

        legal = self._legal(inputs)
        chosen_by = masked(choice, legal) if self.double_dqn else None
        return online.value, next_state_value(masked(next_value, legal), chosen_by)

    def _legal(self, inputs: LossInputs) -> Tensor | None:
        """Return the legal actions in each row's next state, bool ``[*B, A]``; None if all, or masked by the
        network."""
        key = self.key("action_mask")
        if get_entry(inputs.batch, key) is None or key in self._network_inputs.observed:
            return None
        return require(inputs.batch, next_key(key)).bool()

    def _over_stream(self, network: TensorDictModuleBase, batch: TensorDictBase, at: Boundaries) -> Values:
        """Return action values of each row and of its next state; rows with a warning are excluded."""
        reads = NetworkInputs.of(network, self.key("is_init"))
        return state_values(ValueInputs(reads, self.key("action_value"), batch, at, shifted=True))


def masked(value: Tensor | None, legal: Tensor | None) -> Any:
    """Set the values ``[*B, A]`` of illegal actions to the lowest number, except in rows without a legal action.

    >>> masked(torch.tensor([[1.0, 9.0]]), torch.tensor([[True, False]])).argmax(-1)
    tensor([0])
    """
    if value is None or legal is None:
        return value
    if legal.shape != value.shape:
        raise ValueError(
            f"the next action_mask must have shape {tuple(value.shape)}, one number for each action, got "
            f"{tuple(legal.shape)}"
        )

    # A final state may have no legal action. Its value is not used.
    return value.where(legal | ~legal.any(-1, keepdim=True), torch.finfo(value.dtype).min)


def next_state_value(value: Tensor, choice: Tensor | None) -> Tensor:
    """Return the next state's value ``[*B]``, that of its best action, from values ``[*B, A]``.

    ``choice`` ``[*B, A]``, other values of the same actions, selects the best action; default ``value``.
    """
    if choice is None:
        return value.amax(-1)
    return value.gather(-1, choice.argmax(-1, keepdim=True)).squeeze(-1)  # [*B, A] at [*B, 1] -> [*B]
