"""Soft actor-critic for continuous and for discrete actions."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any, ClassVar, Literal, TypeAlias, TypedDict, Unpack, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution
from typing_extensions import override

from flatroll.estimators.distributions import (
    distribution,
    joint,
    keys_written_by,
    part_key,
    require_actor,
    require_critic,
)
from flatroll.estimators.losses.action_values import (
    ActionSpace,
    OffPolicyLoss,
    critic_ensemble,
    name_action_space,
    value_of_action,
)
from flatroll.estimators.losses.base import (
    Frozen,
    LossInputs,
    NetworkParameters,
    frozen,
    parameters_and_buffers,
    shared_parameters,
    target_copy,
)
from flatroll.estimators.masked import Distance, Reduction, as_number, distance, masked_mean
from flatroll.estimators.values.evaluate import NetworkInputs
from flatroll.layout.checks import check_flags, check_number, check_whole_number
from flatroll.layout.keys import ACTION, NestedKey, as_tuple, flat_column, next_key
from flatroll.layout.sampling import components, draw
from flatroll.layout.tensordict_seam import call_for, get_entry, nest, set_entry, shallow_copy

#: A number, or a tensor of one.
Number: TypeAlias = float | Tensor


class SACOptions(TypedDict, total=False):
    """Options of both losses; :class:`SACLoss` documents them."""

    num_qvalue_nets: int
    loss_function: Distance
    alpha_init: float
    min_alpha: float | None
    max_alpha: float | None
    fixed_alpha: bool
    target_entropy: Number | Literal["auto"]
    delay_actor: bool
    delay_qvalue: bool
    separate_losses: bool
    use_prioritized_weights: bool | Literal["auto"]
    reduction: Reduction
    diagnostics: bool
    skip_done_states: bool
    deactivate_vmap: bool


class SoftActorCritic(OffPolicyLoss):
    """Base of :class:`SACLoss`, which documents the arguments, and of :class:`DiscreteSACLoss`."""

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        **OffPolicyLoss.default_keys,
        "value": "state_value",  # written by a value_network
        "log_prob": "action_log_prob",  # unused here, but scripts set it
    }
    log_alpha: Tensor
    target_entropy: Any  # a number, a buffer or "auto"
    actor_network_params = NetworkParameters()
    qvalue_network_params = NetworkParameters()
    target_actor_network_params = NetworkParameters()
    target_qvalue_network_params = NetworkParameters()

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        qvalue_network: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        *,
        num_qvalue_nets: int = 2,
        loss_function: Distance = "smooth_l1",
        alpha_init: float = 1.0,
        min_alpha: float | None = None,
        max_alpha: float | None = None,
        fixed_alpha: bool = False,
        target_entropy: Number | Literal["auto"] = "auto",
        delay_actor: bool = False,
        delay_qvalue: bool = True,
        separate_losses: bool = False,
        use_prioritized_weights: bool | Literal["auto"] = "auto",
        reduction: Reduction = "mean",
        diagnostics: bool = True,
        skip_done_states: bool = False,
        deactivate_vmap: bool = False,
    ) -> None:
        super().__init__(
            loss_function=loss_function,
            use_prioritized_weights=use_prioritized_weights,
            reduction=reduction,
            diagnostics=diagnostics,
        )

        require_actor(actor_network)
        check_flags(
            fixed_alpha=fixed_alpha,
            delay_actor=delay_actor,
            delay_qvalue=delay_qvalue,
            separate_losses=separate_losses,
            skip_done_states=skip_done_states,
        )
        check_whole_number("num_qvalue_nets", num_qvalue_nets)
        for name, limit in (("alpha_init", alpha_init), ("min_alpha", min_alpha), ("max_alpha", max_alpha)):
            if limit is not None or name == "alpha_init":
                check_number(name, cast(float, limit))

        low = min_alpha or 0.0
        high = math.inf if max_alpha is None else max_alpha
        if not 0.0 <= low <= alpha_init <= high or alpha_init <= 0.0:
            raise ValueError(
                "alpha_init must be above 0 and between min_alpha and max_alpha, "
                f"got {alpha_init}, {min_alpha} and {max_alpha}"
            )

        # The networks.
        self.actor_network = actor_network
        self.qvalue_network = critic_ensemble(qvalue_network, num_qvalue_nets)
        self.target_actor_network = target_copy(actor_network) if delay_actor else None
        self.target_qvalue_network = target_copy(self.qvalue_network) if delay_qvalue else None

        # Alpha. Its logarithm is trained, so that alpha stays positive.
        log_alpha = torch.tensor(math.log(alpha_init))
        if fixed_alpha:
            self.register_buffer("log_alpha", log_alpha)
        else:
            self.register_parameter("log_alpha", nn.Parameter(log_alpha))
        least = math.log(low) if low else -math.inf
        self._bounds = (least, math.log(high))

        # Options.
        self.delay_actor = delay_actor
        self.delay_qvalue = delay_qvalue
        self.separate_losses = separate_losses
        self._aim_at(target_entropy)

        written = keys_written_by(actor_network)
        self.set_keys(action=written.get("action"), log_prob=written.get("sample_log_prob"))

    def _aim_at(self, target_entropy: Number | str) -> None:
        """Set the entropy that alpha is to reach."""
        if isinstance(target_entropy, Tensor):  # a buffer that a schedule may change
            self.register_coeff_buffer("target_entropy", target_entropy)
        elif isinstance(target_entropy, (int, float)):
            self.target_entropy = float(check_number("target_entropy", target_entropy))
        elif isinstance(target_entropy, str) and target_entropy == "auto":
            self.target_entropy = target_entropy
        else:
            raise ValueError(f"target_entropy must be a number or 'auto', got {target_entropy!r}")

    @override
    def set_keys(self, **keys: NestedKey | list[NestedKey] | None) -> None:
        """Change the keys of entries; ``action`` may be a list of keys, for an action of several parts."""
        super().set_keys(**cast(Any, keys))

        networks: list[Any] = [self.actor_network, *self.qvalue_network]
        state_value: Any = getattr(self, "value_network", None)
        if state_value is not None:
            networks.append(state_value)
        for network in networks:
            if NetworkInputs.of(network, self.key("is_init")).recurrent:
                raise TypeError(
                    f"{type(self).__name__} reads rows independently, but a recurrent module needs the preceding rows: "
                    "let the policy write its features while collecting, and pass networks that read those"
                )

        # The entries read from the batch, at the root and under "next"; the actor writes the others.
        actor: Any = self.actor_network
        made = {as_tuple(key) for key in (*actor.out_keys, *self.named_keys("action"), ACTION)}
        observed: list[Any] = []
        for key in dict.fromkeys(key for network in networks for key in network.in_keys):
            names = as_tuple(key)
            if not any(names == other[: len(names)] for other in made):
                observed.append(key)
        self._observed = observed

        inputs: list[Any] = [*observed, *map(next_key, observed)]
        self.in_keys = [*inputs, *self.named_keys("action"), self.key("reward"), self.key("terminated")]

        written: list[Any] = ["loss_actor", "loss_qvalue", "loss_alpha"]
        if self.with_diagnostics:
            written += ["alpha", "entropy"]
        if state_value is not None:
            written.append("loss_value")
        self.out_keys = written

    @property
    def alpha(self) -> Tensor:
        """The entropy coefficient, detached."""
        return self.log_alpha.detach().exp()

    @override
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Compute the losses of a batch ``[N]`` or ``[*B, T]``, and write ``"td_error"`` into the batch.

        Each loss only has gradients for its own networks, so their sum can be minimised.

        Raises:
            KeyError: an entry is missing; the message names what writes it.
        """
        inputs = self.transitions(tensordict, self._observed)
        actor = self.actor_network
        critics = self.qvalue_network

        # The critics' target.
        with torch.no_grad():
            if self._bounds != (-math.inf, math.inf):
                self.log_alpha.clamp_(*self._bounds)  # an optimizer step may exceed min_alpha, max_alpha
            alpha = as_number(self.alpha)
            after = self.next_entries(inputs, self._observed)
            delayed = self.target_actor_network
            next_actor = actor if delayed is None else delayed
            targets = self.target_qvalue_network
            if targets is None:
                targets = critics
            dist = distribution(next_actor, after)
            target = self.target(inputs, self._next_value(dist, after, targets, alpha))

        # The losses of actor and critics.
        work = shallow_copy(inputs.readable)  # the actor writes into this copy, which critics may read
        dist = distribution(actor, work)
        for key in self.named_keys("action"):
            if get_entry(inputs.batch, key) is None:
                raise self.missing_entry_error(inputs, key, ACTION)
        value_losses = self._value_losses(inputs, work, dist, alpha)
        read = work.detach() if self.separate_losses else work
        with self._detach_shared(critics):
            values = self.critic_values(critics, read)
        chosen = [self._action_value(inputs, value) for value in values]  # for each critic, [*B]
        loss_actor, log_prob = self._actor_loss(work, dist, values, alpha)

        # The loss of alpha.
        entropy = -log_prob.detach()
        aim = self.target_entropy
        if isinstance(aim, str):
            aim = self._auto_target_entropy(inputs, values[0])
        losses = {
            "loss_actor": self.reduce(inputs, loss_actor),
            "loss_qvalue": self.fit(inputs, chosen, target),
            # decreases in log_alpha if the entropy is below its target: then alpha grows
            "loss_alpha": self.log_alpha * self.reduce(inputs, entropy - aim),
        }

        if self.with_diagnostics:
            losses |= {"alpha": self.alpha, "entropy": masked_mean(entropy, inputs.mask)}
        return nest(losses | value_losses)

    def _detach_shared(self, network: nn.Module) -> AbstractContextManager[None]:
        """With ``separate_losses``: detach parameters shared with the actor from the value losses."""
        if self.separate_losses:
            return frozen(shared_parameters(network, self.actor_network))
        return nullcontext()

    def _value_losses(
        self, inputs: LossInputs, work: TensorDictBase, dist: Distribution, alpha: float
    ) -> dict[str, Tensor]:
        """Return reduced losses of further networks by name; ``work`` contains the actor's outputs."""
        return {}

    def _next_value(
        self, dist: Distribution, after: TensorDictBase, critics: nn.ModuleList, alpha: float
    ) -> Tensor:
        """Return the next state's soft value ``[*B]``: the actor's expected value plus ``alpha * entropy``."""
        raise NotImplementedError(f"{type(self).__name__} must define _next_value")

    def _action_value(self, inputs: LossInputs, value: Tensor) -> Tensor:
        """Return the value ``[*B]`` of the batch's action from a critic's output."""
        return value

    def _actor_loss(
        self, work: TensorDictBase, dist: Distribution, values: list[Tensor], alpha: float
    ) -> tuple[Tensor, Tensor]:
        """Return the actor's loss and the (expected) log-probability of its actions, both ``[*B]``."""
        raise NotImplementedError(f"{type(self).__name__} must define _actor_loss")

    def _auto_target_entropy(self, inputs: LossInputs, value: Tensor) -> float:
        """Return the target of ``target_entropy="auto"``."""
        raise NotImplementedError(f"{type(self).__name__} must define _auto_target_entropy")


class SACLoss(SoftActorCritic):
    """Soft actor-critic: fits ``Q_i(s, a)`` to ``r + gamma * (min_j Q'_j(s', a') - alpha * log p(a'|s'))``.

    The actor samples ``a'``, and minimises ``alpha * log p(b | s) - min_i Q_i(s, b)`` over its own reparametrised
    actions ``b``. ``alpha`` moves until the entropy is ``target_entropy``. Rows may come in any order.

    With a ``value_network``, the first version of the algorithm: ``Q_i(s, a)`` is fitted to ``r + gamma * V'(s')``,
    and ``V(s)`` to ``min_j Q'_j(s, b) - alpha * log p(b | s)``.

    Args:
        actor_network: tensordict module with ``get_dist(batch)``, of a distribution with ``rsample``. A tanh-Normal
            is scored by its value before tanh, so that actions near -1 and 1 have the right log-probability. The
            parts of a ``CompositeDistribution`` count as independent.
        qvalue_network: tensordict module that reads the observation and ``"action"`` and writes
            ``"state_action_value"`` ``[*B, 1]``; or a list of them. The minimum of their values is used.
        num_qvalue_nets: number of critics. One module is copied, with new initial weights (``reset_parameters``); a
            list is used as it is. Critics may read the actor's outputs (a shared trunk). Default: 2.
        value_network: tensordict module that writes ``"state_value"`` ``[*B, 1]``. Default: None, no such network.
        loss_function, use_prioritized_weights, reduction, diagnostics: see
            :class:`~flatroll.estimators.OffPolicyLoss`. Default: ``"smooth_l1"``, ``"auto"``, ``"mean"``, True.
        alpha_init: first factor of the entropy. Default: 1.
        min_alpha, max_alpha: bounds of the factor. Default: none.
        fixed_alpha: keep the factor constant. Default: False.
        target_entropy: target of the entropy, a number or one-element tensor, which becomes a buffer. Default:
            ``"auto"``, minus the number of action dims.
        delay_actor, delay_qvalue, delay_value: whether targets come from target copies, ``target_actor_network``,
            ``target_qvalue_network`` and, of a ``value_network``, ``target_value_network``. Default: False, True, True.
        separate_losses: the value losses do not train parameters shared with the actor. Default: False.
        action_spec, skip_done_states, deactivate_vmap: accepted for compatibility, without effect.

    ``make_value_estimator(gamma=0.99)`` sets the discount. N-step rows are used as they are.

    Writes ``loss_actor``, ``loss_qvalue``, ``loss_alpha``, with a ``value_network`` ``loss_value``, and detached
    ``alpha``, ``entropy``. Into the batch it writes ``"td_error"`` ``[*B]``, the largest of the absolute errors, 0
    in rows that do not count.

    Raises:
        TypeError: the actor has no ``get_dist`` or no ``rsample``, or a network is no tensordict module or recurrent.
        ValueError: numbers out of range, or a network that cannot be initialised anew.

    Example:
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
        >>> from torch.distributions import Normal
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), NormalParamExtractor())
        >>> params = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
        >>> head = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal)
        >>> class Value(torch.nn.Linear):
        ...     def forward(self, observation, action):
        ...         return super().forward(torch.cat([observation, action], -1))
        >>> keys = {"in_keys": ["observation", "action"], "out_keys": ["state_action_value"]}
        >>> loss = SACLoss(ProbabilisticTensorDictSequential(params, head), TensorDictModule(Value(4, 1), **keys))
        >>> batch = TensorDict({
        ...     "observation": torch.randn(5, 3), "action": torch.randn(5, 1),
        ...     "next": {"observation": torch.randn(5, 3), "reward": torch.ones(5, 1),
        ...              "terminated": torch.zeros(5, 1, dtype=torch.bool)},
        ... }, [5])
        >>> sorted(loss(batch).keys()), batch["td_error"].shape
        (['alpha', 'entropy', 'loss_actor', 'loss_alpha', 'loss_qvalue'], torch.Size([5]))

    References:
        T. Haarnoja et al., Soft actor-critic algorithms and applications, https://arxiv.org/abs/1812.05905; the first
        version: Soft actor-critic, https://arxiv.org/abs/1801.01290
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        qvalue_network: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        value_network: TensorDictModuleBase | None = None,
        *,
        delay_value: bool = True,
        action_spec: object = None,
        **options: Unpack[SACOptions],
    ) -> None:
        super().__init__(actor_network, qvalue_network, **options)
        require_critic("value_network", value_network)
        self.value_network: TensorDictModuleBase | None = value_network

        self.delay_value = delay_value
        self.target_value_network: TensorDictModuleBase | None = None
        if value_network is not None and delay_value:
            self.target_value_network = target_copy(value_network)
        self.set_keys()

    def _state_value(self, network: TensorDictModuleBase, batch: TensorDictBase) -> Tensor:
        """Return a value network's output for the rows of ``batch``, ``[*B]``."""
        key = self.key("value")
        value = call_for(network, batch, key)
        if value is None:
            raise KeyError(
                f"value_network wrote no entry {key!r}: its out_keys are {list(network.out_keys)}; name the one that "
                "holds the value with set_keys(value=...)"
            )
        return flat_column(value, batch, key)

    @override
    def _value_losses(
        self, inputs: LossInputs, work: TensorDictBase, dist: Distribution, alpha: float
    ) -> dict[str, Tensor]:
        if self.value_network is None:
            return {}

        with torch.no_grad():
            delayed = self.target_actor_network
            critics = self.target_qvalue_network
            if critics is None:
                critics = self.qvalue_network
            with_action = work
            if delayed is not None:
                with_action = shallow_copy(work)
                dist = distribution(delayed, with_action)
            target = self._soft_value(dist, with_action, critics, alpha)

        read = work.detach() if self.separate_losses else work
        with self._detach_shared(self.value_network):
            value = self._state_value(self.value_network, read)

        return {"loss_value": self.reduce(inputs, distance(value, target, self.loss_function))}

    @override
    def _next_value(
        self, dist: Distribution, after: TensorDictBase, critics: nn.ModuleList, alpha: float
    ) -> Tensor:
        if self.value_network is not None:
            return self._state_value(self.target_value_network or self.value_network, after)
        return self._soft_value(dist, after, critics, alpha)

    def _soft_value(
        self, dist: Distribution, work: TensorDictBase, critics: nn.ModuleList, alpha: float
    ) -> Tensor:
        """Return the minimum value of a sampled action minus ``alpha`` times its log-probability, ``[*B]``."""
        # A single sample estimates the expectation over actions.
        with_action, log_prob = self._sample_action(dist, work)
        return self.minimum_value(critics, with_action) - alpha * log_prob

    def _sample_action(self, dist: Distribution, work: TensorDictBase) -> tuple[TensorDictBase, Tensor]:
        """Return a shallow copy of the batch with a new action, and its log-probability ``[*B]``."""
        copy = shallow_copy(work)
        actions = self.named_keys("action")
        log_probs = []
        for key, part in components(dist).items():
            if not part.has_rsample:
                raise TypeError(
                    f"SACLoss needs actions that gradients flow through, but {type(part).__name__} has no "
                    "rsample: for discrete actions use DiscreteSACLoss"
                )

            action, log_prob, _ = draw(part)
            if key is None:
                place = actions[0]
            else:
                place = part_key(key, actions, self.actor_network)
            set_entry(copy, place, action)
            log_probs.append(joint(log_prob, work))

        # parts of an action are independent: their log-probabilities add up
        return copy, reduce(torch.add, log_probs)

    @override
    def _actor_loss(
        self, work: TensorDictBase, dist: Distribution, values: list[Tensor], alpha: float
    ) -> tuple[Tensor, Tensor]:
        with_action, log_prob = self._sample_action(dist, work)
        critics = self.qvalue_network

        # gradients flow through the critics into the action, but not into the critics' parameters
        if torch.compiler.is_compiling():
            detached = [cast(Any, Frozen(cast(Any, critic))) for critic in critics]
            value = self.minimum_value(detached, with_action)
        else:
            with frozen(parameters_and_buffers(critics)[0]):
                value = self.minimum_value(critics, with_action)

        return alpha * log_prob - value, log_prob

    @override
    def _auto_target_entropy(self, inputs: LossInputs, value: Tensor) -> float:
        # minus the number of action dims of all parts
        rows = inputs.batch.batch_size.numel()

        dims = 0
        for key in self.named_keys("action"):
            action: Tensor | TensorDictBase = get_entry(inputs.batch, key)
            if isinstance(action, Tensor):
                leaves = [action]
            else:
                leaves = action.values(True, True)
            dims += sum(leaf.numel() for leaf in leaves) // rows

        return -float(dims)


class DiscreteSACLoss(SoftActorCritic):
    """Soft actor-critic for discrete actions: expectations over actions are exact sums.

    With ``p`` the actor's probabilities, the regression target of values is
    ``r + gamma * sum_b p(b | s') * (min_j Q'_j(s', b) - alpha * log p(b | s'))``, and the actor minimises
    ``sum_b p(b | s) * (alpha * log p(b | s) - min_i Q_i(s, b))``.

    Args:
        actor_network: tensordict module with ``get_dist(batch)``, of a distribution with ``logits``.
        qvalue_network: tensordict module that writes ``"action_value"`` ``[*B, A]``; or a list of them.
        action_space: ``"categorical"`` (integers ``[*B]``) or ``"one-hot"`` (``[*B, A]``), or a space or spec of
            such actions. Default: inferred from the action's shape.
        num_actions: accepted for compatibility, without effect.
        target_entropy_weight: ``target_entropy="auto"`` is this fraction of the maximum entropy ``log A``. Default:
            0.98.
        options: see :class:`SACLoss`.

    Writes what :class:`SACLoss` writes.

    Raises:
        TypeError: the actor's distribution has no ``logits``; and what :class:`SACLoss` raises.

    Example:
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> actor = ProbabilisticTensorDictSequential(net, head)
        >>> values = TensorDictModule(torch.nn.Linear(2, 2), in_keys=["observation"], out_keys=["action_value"])
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 2), "action": torch.tensor([0, 1]),
        ...     "next": {"observation": torch.zeros(2, 2), "reward": torch.ones(2, 1),
        ...              "terminated": torch.ones(2, 1, dtype=torch.bool)},
        ... }, [2])
        >>> DiscreteSACLoss(actor, values)(batch)["entropy"]                       # log 2
        tensor(0.6931)

    References:
        P. Christodoulou, Soft actor-critic for discrete action settings, https://arxiv.org/abs/1910.07207
    """

    value_name = "action_value"

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        qvalue_network: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        *,
        action_space: object = None,
        num_actions: int | None = None,
        target_entropy_weight: float = 0.98,
        **options: Unpack[SACOptions],
    ) -> None:
        super().__init__(actor_network, qvalue_network, **options)
        self.action_space: ActionSpace | None = name_action_space(action_space)
        self.target_entropy_weight = check_number("target_entropy_weight", target_entropy_weight)

    @override
    def _next_value(
        self, dist: Distribution, after: TensorDictBase, critics: nn.ModuleList, alpha: float
    ) -> Tensor:
        log_prob = log_probabilities(dist)
        value = self.minimum_value(critics, after)
        return (log_prob.exp() * (value - alpha * log_prob)).sum(-1)  # the exact expectation

    @override
    def _action_value(self, inputs: LossInputs, value: Tensor) -> Tensor:
        return value_of_action(value, self.entry(inputs, "action"), self.action_space)

    @override
    def _actor_loss(
        self, work: TensorDictBase, dist: Distribution, values: list[Tensor], alpha: float
    ) -> tuple[Tensor, Tensor]:
        log_prob = log_probabilities(dist)
        probability = log_prob.exp()
        # Gradients flow into the probabilities, not the values.
        value = reduce(torch.minimum, values).detach()
        loss = (probability * (alpha * log_prob - value)).sum(-1)
        return loss, (probability * log_prob).sum(-1)

    @override
    def _auto_target_entropy(self, inputs: LossInputs, value: Tensor) -> float:
        return self.target_entropy_weight * math.log(value.shape[-1])  # log A, the entropy of uniform actions


def log_probabilities(dist: Distribution) -> Tensor:
    """Log-probability of every action, ``[*B, A]``."""
    logits = getattr(dist, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"DiscreteSACLoss needs a distribution with logits, e.g. Categorical, got {type(dist).__name__}"
        )

    # logits may be unnormalised, and log_softmax avoids log(0) = -inf. Masked actions still give -inf: clamp
    # to a bound whose exp() is 0, since 0 * -inf = NaN
    return logits.log_softmax(-1).clamp(min=-(torch.finfo(logits.dtype).max ** 0.5))
