"""Actor-critic losses: their base class, PPO, clipped PPO, PPO with a KL penalty, A2C and REINFORCE."""

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from difflib import get_close_matches
from functools import reduce
from typing import Any, ClassVar, Self, TypeAlias, TypedDict, Unpack, cast

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution
from typing_extensions import override

from flatroll.estimators.distributions import (
    compute_divergence,
    compute_entropy,
    compute_log_prob,
    distribution_for,
    joint,
    keys_written_by,
    log_prob_parts,
    part_key,
    require_actor,
    require_critic,
    sampled_log_prob_keys,
)
from flatroll.estimators.losses.base import (
    LossInputs,
    LossModule,
    NetworkParameters,
    frozen,
    shared_parameters,
    target_copy,
)
from flatroll.estimators.masked import (
    DISTANCES,
    Distance,
    Reduction,
    as_number,
    distance,
    masked_mean,
    masked_variance,
    ratio_statistics,
    standardized,
    zero_masked,
)
from flatroll.estimators.values.base import ValueEstimator
from flatroll.estimators.values.estimators import Kind, ValueEstimators, make_estimator
from flatroll.layout import checks
from flatroll.layout.keys import ACTION, NestedKey, as_tuple, flat_column
from flatroll.layout.sampling import base_sample_key, components
from flatroll.layout.tensordict_seam import call_for, get_entry, nest
from flatroll.modules import set_recurrent_mode

#: A factor: a number, or a tensor of one.
Coefficient: TypeAlias = float | Tensor


class CriticOptions(TypedDict, total=False):
    """Options of every policy-gradient loss; :class:`PolicyGradientLoss` documents them."""

    actor: TensorDictModuleBase | None
    critic: TensorDictModuleBase | None
    critic_coeff: Coefficient | None
    loss_critic_type: Distance
    clip_value: bool | Coefficient | None
    normalize_advantage: bool
    separate_losses: bool
    burn_in: int
    reduction: Reduction | None
    diagnostics: bool
    functional: bool
    device: torch.device | str | None


class PolicyOptions(CriticOptions, total=False):
    """Options of the losses with an entropy term."""

    entropy_bonus: bool
    entropy_coeff: Coefficient | Mapping[NestedKey, float] | None
    samples_mc_entropy: int


#: Arguments refused by losses without an entropy term: those of `PolicyOptions`, and the name used by another
#: library.
_OF_ENTROPY = ("entropy_bonus", "entropy_coeff", "entropy_coef", "samples_mc_entropy")

#: Arguments that have another name or place here, and which.
_ELSEWHERE = {
    "entropy_coef": "entropy_coeff=",
    "critic_coef": "critic_coeff=",
    "gamma": "make_value_estimator(gamma=...)",
    "lmbda": "make_value_estimator(lmbda=...)",
    "advantage_key": "set_keys(advantage=...)",
    "value_target_key": "set_keys(value_target=...)",
    "value_key": "set_keys(value=...)",
}


def refuse_unknown(loss: object, unknown: Mapping[str, object]) -> None:
    """Raise TypeError for unknown arguments, with a suggestion.

    >>> refuse_unknown(3, {"gamma": 0.9})
    Traceback (most recent call last):
    TypeError: int got an unexpected keyword argument 'gamma': use make_value_estimator(gamma=...)
    """
    for name in unknown:
        makers = [cls.__dict__["__init__"] for cls in type(loss).__mro__[:-1] if "__init__" in cls.__dict__]
        own = {x for make in makers for x in inspect.signature(make).parameters}
        near = get_close_matches(name, sorted(own - {"self"}), 1)
        meant = _ELSEWHERE.get(name)
        if meant is None and near:
            meant = f"{near[0]}="
        hint = f": use {meant}" if meant else ""
        raise TypeError(f"{type(loss).__name__} got an unexpected keyword argument {name!r}{hint}")


def check_networks(
    loss: object,
    actor_network: TensorDictModuleBase | None,
    critic_network: TensorDictModuleBase | None,
    actor: TensorDictModuleBase | None,
    critic: TensorDictModuleBase | None,
) -> tuple[TensorDictModuleBase, TensorDictModuleBase | None]:
    """Return actor and critic, each given by either of its two names.

    Raises:
        TypeError: one is given by both names, the actor is missing, or one is not a suitable network.
    """
    for name, by_name, short, by_short in (
        ("actor_network", actor_network, "actor", actor),
        ("critic_network", critic_network, "critic", critic),
    ):
        if by_name is not None and by_short is not None:
            raise TypeError(f"pass {name}= or {short}=, not both: they are two names of one argument")

    if actor_network is None:
        actor_network = actor
    if critic_network is None:
        critic_network = critic
    if actor_network is None:
        raise TypeError(f"{type(loss).__name__} needs an actor_network")

    require_actor(actor_network)
    require_critic("critic_network", critic_network)

    return actor_network, critic_network


def clip_distance(clip_value: bool | Coefficient | None) -> Coefficient | None:
    """Return the clipping distance of values, above 0; None if not set.

    Raises:
        ValueError: it is True, or not above 0.
    """
    if clip_value is True:
        raise ValueError("clip_value=True uses the clip_epsilon of ClipPPOLoss: pass a number here")
    if clip_value is None or clip_value is False:
        return None

    is_number = isinstance(clip_value, (int, float)) or (
        isinstance(clip_value, Tensor) and clip_value.numel() == 1
    )
    if is_number and not clip_value > 0:
        raise ValueError(f"clip_value must be above 0, got {clip_value!r}; None leaves the value unclipped")
    return clip_value


def clip_limits(clip_epsilon: Coefficient | Sequence[float], single: bool = False) -> dict[str, Coefficient]:
    """Return the limits of probability ratios by the names of their buffers: one for both sides, or a pair.

    ``single``: ``clip_value=True`` requires a single limit.

    Raises:
        ValueError: it is not a number or pair, not above 0, or reaches 1 on the lower side.

    >>> clip_limits((0.2, 0.3))
    {'clip_epsilon_low': 0.2, 'clip_epsilon_high': 0.3}
    """
    numbers: dict[str, Coefficient] = {"clip_epsilon": cast(Coefficient, clip_epsilon)}
    if isinstance(clip_epsilon, Sequence):
        if len(clip_epsilon) != 2:
            raise ValueError(f"clip_epsilon must be a number or a pair of numbers, got {clip_epsilon}")
        numbers = {"clip_epsilon_low": clip_epsilon[0], "clip_epsilon_high": clip_epsilon[1]}

    for number in numbers.values():
        checks.check_number("clip_epsilon", number)
    low, *_, high = 2 * (*numbers.values(),)  # a single number sets both
    if not (0.0 < low < 1.0 and high > 0.0):
        raise ValueError(f"clip_epsilon must be above 0, and below 1 on the lower side, got {clip_epsilon}")

    if single and len(numbers) > 1:
        raise ValueError("clip_value=True needs one clip_epsilon, not a pair: give clip_value a number")

    return numbers


def entropy_coefficients(coefficients: Mapping[NestedKey, float]) -> dict[NestedKey, float]:
    """Return a copy with normalised keys of the action's parts.

    Raises:
        ValueError: it is empty, or a value is not a finite number.
    """
    numbers: dict[NestedKey, float] = {}
    for key, number in coefficients.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ValueError(f"entropy_coeff[{key!r}] must be a finite number, got {number!r}")
        numbers[cast(NestedKey, unravel_key(key))] = float(number)

    if not numbers:
        raise ValueError("entropy_coeff must have a number for each part of the action, got an empty mapping")

    return numbers


def weighted_entropy(
    entropies: Mapping[NestedKey, Tensor], coefficients: Mapping[NestedKey, float]
) -> Tensor:
    """Add up the entropies ``[*B]`` of an action's parts, each times its own coefficient.

    A part is named by the key of its action or of its log-probability (``"..._log_prob"``).

    Raises:
        KeyError: parts and coefficients do not match.

    >>> parts = {("arm", "action"): torch.tensor([1.0]), ("leg", "action"): torch.tensor([10.0])}
    >>> weighted_entropy(parts, {("arm", "action"): 0.5, ("leg", "action_log_prob"): 0.1})
    tensor([1.5000])
    """
    left = dict(coefficients)

    total = None
    for key, entropy in entropies.items():
        *path, last = as_tuple(key)
        names = (key, unravel_key((*path, f"{last}_log_prob")))
        known = [name for name in names if name in left]
        if not known:
            raise KeyError(
                f"entropy_coeff has no number for the action's part {key!r}: it has {list(coefficients)}"
            )

        term = left.pop(known[0]) * entropy
        if total is None:
            total = term
        else:
            total = total + term

    if left or total is None:
        raise KeyError(f"entropy_coeff names {list(left)}, but the action's parts are {list(entropies)}")
    return total


class PolicyGradientLoss(LossModule):
    """Base of the losses of an actor and, if given, a critic: a subclass defines :meth:`objective`.

    Args:
        actor_network: tensordict module with ``get_dist(batch)``, e.g. a
            ``ProbabilisticTensorDictSequential``.
        critic_network: tensordict module that writes the value ``[*B, 1]``; it may read the actor's outputs (a shared
            trunk that runs once). Default: no critic loss.
        actor, critic: aliases of these two.
        entropy_bonus: add the entropy term. Default: True.
        entropy_coeff: factor of the entropy; of an action of several parts, also a mapping with a number for each
            part's key. Default: 0.01.
        samples_mc_entropy: samples per row if the entropy has no closed form. Default: 1.
        critic_coeff: factor of the critic loss; None leaves it out. Default: 1.
        loss_critic_type: ``"l1"``, ``"l2"`` or ``"smooth_l1"``. Default: ``"smooth_l1"``.
        clip_value: clipping distance of the value from the one in the batch, above 0; the larger of the clipped and
            the unclipped critic loss is used. Default: None (or False), no clipping.
        normalize_advantage: normalise the advantage to zero mean and unit deviation over the rows that count.
            Default: False.
        separate_losses: the critic loss does not train parameters shared with the actor. Default: False.
        burn_in, reduction, diagnostics: see :class:`~flatroll.estimators.LossModule`. Default: 0, ``"mean"``, True.
        functional: stored as an attribute, without effect: the loss always calls the networks themselves, so they may
            be wrapped (DDP) or compiled, and always has ``actor_network_params`` and ``critic_network_params``.
        device: device of the coefficients. Default: that of the first parameter.

    The coefficients ``entropy_coeff``, ``critic_coeff`` and ``clip_value`` are buffers, which a schedule may change:
    see :meth:`~flatroll.estimators.LossModule.register_coeff_buffer`. The keys of the action and its log-probability
    are those that the actor writes, until :meth:`set_keys` says otherwise; of an action of several parts, lists.

    Raises:
        TypeError: the actor is missing or has no ``get_dist``, a network is given by both names, the critic is not a
            tensordict module, or an argument is unknown.
        ValueError: unknown ``loss_critic_type`` or ``reduction``, ``burn_in`` below 0, a coefficient that is no finite
            number; in ``forward``, an action of the wrong shape.

    Example:
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> class SquaredAdvantageLoss(PolicyGradientLoss):
        ...     def objective(self, inputs, dist, log_prob, advantage):
        ...         return -log_prob * advantage.square(), {}
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> loss = SquaredAdvantageLoss(ProbabilisticTensorDictSequential(net, head), entropy_bonus=False)
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 2), "action": torch.tensor([0, 1]),
        ...     "advantage": torch.tensor([[1.0], [2.0]]),
        ... }, [2])
        >>> loss(batch)["loss_objective"]                                            # (1 + 4) / 2 * log 2
        tensor(1.7329)
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        **LossModule.default_keys,
        "sample_log_prob": "action_log_prob",
        "advantage": "advantage",
        "value_target": "value_target",
        "value": "state_value",
    }
    #: Entries that the loss itself reads, by their names in :meth:`set_keys`: ``"sample_log_prob"``, not
    #: ``"action_log_prob"``. A subclass that reads more must also list the advantage.
    reads: ClassVar[tuple[str, ...]] = ("action", "advantage")
    #: Diagnostics that :meth:`objective` returns.
    diagnostics: ClassVar[tuple[str, ...]] = ()
    #: The order of the results of a call by keyword, if the loss writes them; None for all.
    tuple_order: ClassVar[tuple[str, ...] | None] = None
    #: Names of the policy and critic losses.
    loss_names: ClassVar[tuple[str, str]] = ("loss_objective", "loss_critic")

    actor_network_params = NetworkParameters()
    critic_network_params = NetworkParameters()
    target_actor_network_params = NetworkParameters()
    target_critic_network_params = NetworkParameters()
    value_estimator: ValueEstimator | None
    entropy_coeff: Any  # the coefficients are tensors that accept numbers, see LossModule.__setattr__
    critic_coeff: Any
    clip_value: Any

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        critic_network: TensorDictModuleBase | None = None,
        *,
        actor: TensorDictModuleBase | None = None,
        critic: TensorDictModuleBase | None = None,
        entropy_bonus: bool = True,
        entropy_coeff: Coefficient | Mapping[NestedKey, float] | None = 0.01,
        samples_mc_entropy: int = 1,
        critic_coeff: Coefficient | None = 1.0,
        loss_critic_type: Distance = "smooth_l1",
        clip_value: bool | Coefficient | None = None,
        normalize_advantage: bool = False,
        separate_losses: bool = False,
        burn_in: int = 0,
        reduction: Reduction | None = "mean",
        diagnostics: bool = True,
        functional: bool = True,
        device: torch.device | str | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(self, unknown)
        super().__init__(reduction=reduction, burn_in=burn_in, diagnostics=diagnostics)

        networks = check_networks(self, actor_network, critic_network, actor, critic)
        checks.check_choice("loss_critic_type", loss_critic_type, DISTANCES)
        checks.check_flags(
            entropy_bonus=entropy_bonus,
            normalize_advantage=normalize_advantage,
            separate_losses=separate_losses,
            functional=functional,
        )
        checks.check_whole_number("samples_mc_entropy", samples_mc_entropy)

        self.actor_network, self.critic_network = networks

        # Coefficients.
        if isinstance(entropy_coeff, Mapping):
            self.entropy_coeff = entropy_coefficients(entropy_coeff)
        else:
            if entropy_coeff is None:
                entropy_coeff = 0.01
            self.register_coeff_buffer("entropy_coeff", entropy_coeff, device=device)
        self.register_coeff_buffer("critic_coeff", critic_coeff, device=device)
        self.register_coeff_buffer("clip_value", clip_distance(clip_value), device=device)

        # Options.
        self.entropy_bonus = entropy_bonus
        self.samples_mc_entropy = samples_mc_entropy
        self.loss_critic_type: Distance = loss_critic_type
        self.normalize_advantage = normalize_advantage
        self.separate_losses = separate_losses
        self.functional = functional

        # bypass nn.Module.__setattr__: the estimator's networks are not submodules
        self.__dict__["value_estimator"] = None
        self._name_outputs()
        self.set_keys(**keys_written_by(self.actor_network))

    def _name_outputs(self) -> None:
        policy_name, critic_name = self.loss_names
        written: list[Any] = [policy_name]
        if self.entropy_bonus:
            written += ["entropy", "loss_entropy"]
        if self.critic_network is not None and self.critic_coeff is not None:
            written += [critic_name, "explained_variance"]
            if self.clip_value is not None:
                written.append("value_clip_fraction")
        written += self.diagnostics
        if not self.with_diagnostics:
            written = [name for name in written if name.startswith("loss_")]

        order = written if self.tuple_order is None else self.tuple_order
        returned = [key for key in order if key in written]
        self.out_keys = [*returned, *(key for key in written if key not in returned)]
        self.tuple_length = len(returned)

    @override
    def set_keys(self, **keys: NestedKey | list[NestedKey] | None) -> None:
        """Change the keys of entries that the loss reads; ``action`` and ``sample_log_prob`` may be lists.

        See :meth:`LossModule.set_keys`. A list names the entries of an action of several parts.
        """
        super().set_keys(**cast(Any, keys))
        self._action_keys = self.named_keys("action")
        self._log_prob_keys = self.named_keys("sample_log_prob")

        names = list(self.reads)
        if self.critic_network is not None and self.critic_coeff is not None:
            names.append("value_target")
            if self.clip_value is not None:
                names.append("value")
        of_loss = [key for name in names for key in self.named_keys(name)]

        actor = cast(Any, self.actor_network)
        of_critic: list[Any] = []
        if self.critic_network is not None:
            written = set(getattr(actor, "out_keys", ()))
            of_critic = [key for key in self.critic_network.in_keys if key not in written]

        read: list[Any] = list(dict.fromkeys((*actor.in_keys, *of_critic, *of_loss)))
        if self.value_estimator is not None:
            shared = self.tensor_keys.keys() & self.value_estimator.tensor_keys.keys()
            self.value_estimator.set_keys(**{name: self.tensor_keys[name] for name in shared})
            made = set(self.value_estimator.out_keys)
            read = [key for key in read if key not in made]
            read = list(dict.fromkeys((*read, *self.value_estimator.in_keys)))

        self.in_keys = read

    @override
    def further_keys(self) -> list[NestedKey]:
        """Return what every loss reads, the log-probabilities of an action's parts, and what the estimator reads."""
        keys = super().further_keys()

        actor = getattr(self, "actor_network", None)  # None while the base class is initialised
        if actor is not None:
            with suppress(RuntimeError):  # see keys_written_by
                keys += log_prob_parts(actor)

        estimator = self.__dict__.get("value_estimator")
        if estimator is not None:
            keys += estimator.readable_keys

        return keys

    def make_value_estimator(self, value_type: Kind | None = ValueEstimators.GAE, **hyperparams: Any) -> Self:
        """Choose the value estimator that computes advantages for batches without them.

        Each call of the loss then computes advantages with the current networks, without gradients. A batch that has
        an advantage keeps it. To estimate once for several updates, call an estimator yourself.

        Args:
            value_type: a name, e.g. ``"gae"``, a class, or an estimator. Default: GAE, also for None.
            hyperparams: arguments of the estimator. Default: ``gamma=0.99``, ``lmbda=0.95``, and the critic
                of this loss as ``value_network``. If the critic needs the actor's outputs, pass another
                ``value_network``.

        Returns:
            the loss itself.

        Raises:
            ValueError: unknown name, hyperparameters out of range, or no critic.
        """
        target = getattr(self, "target_critic_network", None)  # ReinforceLoss may have one
        critic = self.critic_network if target is None else target
        networks = {"value_network": critic, "actor_network": self.actor_network}
        if value_type is None:
            value_type = ValueEstimators.GAE
        self.__dict__["value_estimator"] = make_estimator(value_type, networks, hyperparams)
        self.set_keys()
        return self

    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the policy loss of each row ``[*B]``, and values to log by name (:attr:`diagnostics`).

        Args:
            inputs: the batch and its mask.
            dist: the actor's distribution over actions in each row.
            log_prob: its log-probability of the batch's action, ``[*B]``, with gradients.
            advantage: ``[*B]``, 0 in rows that do not count.
        """
        raise NotImplementedError(f"{type(self).__name__} must define objective")

    @override
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Compute the losses of a batch ``[N]`` or ``[*B, T]``, which stays unchanged.

        Recurrent networks run in recurrent mode, whatever the mode around the call. Rows at which
        ``("collector", "mask")`` or ``"shifted_valid"`` is False are excluded.

        Returns:
            tensordict of the losses, whose sum is to be minimised, and detached diagnostics.

        Raises:
            KeyError: an entry is missing; the message names what writes it.
        """
        batch = tensordict
        if get_entry(batch, self.places["advantage"]) is None:
            batch = self._add_advantage(batch)

        inputs = self.inputs_of(batch)
        advantage = self.column(inputs, "advantage")
        if self.normalize_advantage and advantage.numel() > 1:
            advantage = standardized(advantage, inputs.mask)

        policy_name, critic_name = self.loss_names
        with set_recurrent_mode(True, burn_in=self.burn_in):
            # the critic may read the actor's outputs
            critic = None if self.critic_coeff is None else self.critic_network
            readers = () if critic is None else (critic,)
            dist, after_actor = distribution_for(readers, self.actor_network, inputs.readable)

            parts = components(dist)
            log_probs = []
            for name, part in parts.items():
                key = self._action_keys[0]
                if name is not None:
                    key = part_key(name, self._action_keys, self.actor_network)
                action = get_entry(inputs.batch, key)
                if action is None:
                    raise self.missing_entry_error(inputs, key, ACTION)
                base = get_entry(inputs.batch, base_sample_key(key))
                log_probs.append(joint(compute_log_prob(part, action, base, self._warn_once), inputs.batch))

            # parts of an action are independent: their log-probabilities add up
            log_prob = reduce(torch.add, log_probs)
            loss, diagnostics = self.objective(inputs, dist, log_prob, advantage)
            losses = {policy_name: self.reduce(inputs, loss)}

            if self.entropy_bonus:
                losses["loss_entropy"], entropy = self._entropy_loss(inputs, parts)
                if self.with_diagnostics:
                    diagnostics["entropy"] = masked_mean(entropy.detach(), inputs.mask)

            if critic is not None:
                losses[critic_name], of_critic = self._critic_loss(inputs, critic, after_actor)
                diagnostics |= of_critic

        if self.with_diagnostics:
            losses |= {name: number.detach() for name, number in diagnostics.items()}
        return nest(losses)

    def _add_advantage(self, batch: TensorDictBase) -> TensorDictBase:
        """Return a copy of the batch with the value estimator's advantages; KeyError if there are none."""
        key = self.places["advantage"]
        if self.value_estimator is not None:
            with torch.no_grad():
                batch = self.value_estimator(batch.copy())
            if get_entry(batch, key) is not None:
                return batch

        hint = ". Or let the loss compute it: loss.make_value_estimator(...)"
        inputs = self.inputs_of(batch)
        raise self.missing_entry_error(inputs, key, self.default_keys["advantage"], hint)

    def _entropy_loss(
        self, inputs: LossInputs, parts: Mapping[NestedKey | None, Distribution]
    ) -> tuple[Tensor, Tensor]:
        """Return the reduced loss, and the entropy of each row ``[*B]``, for an action of these parts."""
        entropies: dict[Any, Tensor] = {}
        for key, part in parts.items():
            place = self.tensor_keys["action"] if key is None else key
            entropies[place] = joint(compute_entropy(part, self.samples_mc_entropy), inputs.batch)
        entropy = reduce(torch.add, entropies.values())  # parts of an action are independent

        factor = self.entropy_coeff
        if isinstance(factor, Tensor):
            return -as_number(factor) * self.reduce(inputs, entropy), entropy
        return -self.reduce(inputs, weighted_entropy(entropies, factor)), entropy

    def _critic_loss(
        self, inputs: LossInputs, critic: TensorDictModuleBase, after_actor: TensorDictBase
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted, reduced critic loss and diagnostics; ``after_actor`` contains the actor's outputs."""
        key = self.tensor_keys["value"]
        target = self.column(inputs, "value_target")

        apart: AbstractContextManager[None]
        if self.separate_losses:
            after_actor = after_actor.detach()
            apart = frozen(shared_parameters(critic, self.actor_network))
        else:
            apart = nullcontext()
        with apart:
            # A value already in the batch is not from this critic.
            column = call_for(critic, after_actor, key)

        if column is None:
            raise KeyError(
                f"critic_network wrote no entry {key!r}: its out_keys are {list(critic.out_keys)}; name the one that "
                "holds the value with set_keys(value=...)"
            )
        value = flat_column(column, inputs.batch, key)

        diagnostics = {}
        most = self.clip_value
        if self.with_diagnostics:
            # 1 - Var(target - value) / Var(target): 1 for a perfect critic, 0 for a constant one; eps avoids
            # division by 0
            free = value.detach()
            aim = target.detach()
            tiny = torch.finfo(target.dtype).eps
            left = masked_variance(aim - free, inputs.mask, correction=0)
            total = masked_variance(aim, inputs.mask, correction=0)
            diagnostics = {"explained_variance": 1.0 - left / (total + tiny)}

        if most is None and inputs.mask is None and self.reduction == "mean":
            loss = DISTANCES[self.loss_critic_type](value, target)  # with the mean in one pass
        else:
            loss = distance(value, target, self.loss_critic_type)
            if most is not None:
                # use the larger of both losses, so that moving further than clip_value from the sampled value
                # gains nothing
                sampled = self.column(inputs, "value")
                moved = value - sampled
                most = as_number(most)
                clipped = moved.clamp(-most, most)
                loss = torch.maximum(loss, distance(sampled + clipped, target, self.loss_critic_type))
                diagnostics["value_clip_fraction"] = masked_mean(
                    (moved != clipped).to(value.dtype), inputs.mask
                )
            loss = self.reduce(inputs, loss)

        weight = as_number(self.critic_coeff)
        if not (isinstance(weight, float) and weight == 1.0):  # on a device this would sync
            loss = weight * loss
        return loss, diagnostics


class PPOLoss(PolicyGradientLoss):
    """Importance-weighted policy gradient: ``-ratio * advantage`` per row.

    ``ratio`` is the probability of the action under the actor over the one it was sampled with. Recurrent actors and
    critics accept flat batches.

    Args:
        actor_network, critic_network, options: see :class:`~flatroll.estimators.PolicyGradientLoss`.

    Writes ``loss_objective``, ``loss_critic``, ``loss_entropy``, and detached ``kl_approx``, ``ESS`` (effective
    sample size over the rows, in [0, 1]), ``max_ratio``, ``mean_ratio``, ``entropy``, ``explained_variance``.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> actor = ProbabilisticTensorDictSequential(net, head)
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 2), "action": torch.tensor([0, 1]),
        ...     "action_log_prob": torch.tensor([0.25, 0.5]).log(), "advantage": torch.tensor([[3.0], [4.0]]),
        ... }, [2])
        >>> PPOLoss(actor)(batch)["loss_objective"]                           # ratios 2 and 1
        tensor(-5.)

    References:
        J. Schulman et al., Proximal policy optimization algorithms, https://arxiv.org/abs/1707.06347
    """

    reads: ClassVar[tuple[str, ...]] = ("action", "sample_log_prob", "advantage")
    diagnostics: ClassVar[tuple[str, ...]] = ("kl_approx", "ESS", "max_ratio", "mean_ratio")
    _of_all = ("entropy", "loss_entropy", "loss_critic", "value_clip_fraction")
    tuple_order: ClassVar[tuple[str, ...] | None] = ("loss_objective", *_of_all)

    @override
    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = self.log_ratio(inputs, log_prob)
        numbers: dict[str, Tensor] = {}
        if self.with_diagnostics:
            numbers = ratio_statistics(log_ratio.detach(), inputs.mask)
        return log_ratio.exp() * -advantage, numbers

    def log_ratio(self, inputs: LossInputs, log_prob: Tensor) -> Tensor:
        """Return the log of the probability ratio new / old policy ``[*B]``; 0 where the mask is False.

        The sampled log-probability may have one entry per part of the action; these are summed.
        """
        names = sampled_log_prob_keys(self.actor_network, self._log_prob_keys, inputs.batch)
        columns = [get_entry(inputs.batch, name) for name in names]
        for name, column in zip(names, columns, strict=True):
            if column is None:
                raise self.missing_entry_error(inputs, name, self.default_keys["sample_log_prob"])

        sampled = reduce(torch.add, [joint(column.detach(), inputs.batch) for column in columns])

        log_ratio = log_prob - sampled
        if inputs.mask is None:
            return log_ratio
        return zero_masked(log_ratio, inputs.mask)


class ClipPPOLoss(PPOLoss):
    """Clipped PPO: ``-min(ratio * advantage, clip(ratio, 1 - eps, 1 + eps) * advantage)`` per row.

    Args:
        actor_network, critic_network, options: see :class:`~flatroll.estimators.PolicyGradientLoss`.
        clip_epsilon: ``eps``, or a pair (below 1, above 1). Default: 0.2. It is a buffer, which a schedule may change;
            a pair is two, ``clip_epsilon_low`` and ``clip_epsilon_high``.
        clip_value: as for the other losses; True means ``clip_epsilon``. Default: None, no clipping.

    Writes what :class:`PPOLoss` writes, and ``clip_fraction``.

    Raises:
        ValueError: ``clip_epsilon`` is not positive or its lower side reaches 1, or ``clip_value=True`` with a pair.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> critic = TensorDictModule(lambda x: x[:, :1], in_keys=["observation"], out_keys=["state_value"])
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 4), "action": torch.tensor([0, 3]),
        ...     "action_log_prob": torch.tensor([-1.3863, -2.3863]),           # a quarter, and a quarter / e
        ...     "advantage": torch.tensor([[1.0], [1.0]]), "value_target": torch.zeros(2, 1),
        ... }, [2])
        >>> losses = ClipPPOLoss(ProbabilisticTensorDictSequential(net, head), critic)(batch)
        >>> losses["loss_objective"], losses["clip_fraction"]          # -(1 + 1.2) / 2, one of two clipped
        (tensor(-1.1000), tensor(0.5000))

    References:
        J. Schulman et al., Proximal policy optimization algorithms, https://arxiv.org/abs/1707.06347
    """

    diagnostics: ClassVar[tuple[str, ...]] = (*PPOLoss.diagnostics, "clip_fraction")
    tuple_order: ClassVar[tuple[str, ...] | None] = (
        *("loss_objective", "clip_fraction", *PPOLoss._of_all),
        *("ESS", "kl_approx", "max_ratio", "mean_ratio"),
    )
    clip_epsilon: Any
    clip_epsilon_low: Any
    clip_epsilon_high: Any

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        critic_network: TensorDictModuleBase | None = None,
        *,
        clip_epsilon: Coefficient | Sequence[float] = 0.2,
        **options: Unpack[PolicyOptions],
    ) -> None:
        numbers = clip_limits(clip_epsilon, single=options.get("clip_value") is True)
        if options.get("clip_value") is True:
            options["clip_value"] = numbers["clip_epsilon"]
        super().__init__(actor_network, critic_network, **options)

        for name, number in numbers.items():
            self.register_coeff_buffer(name, number, device=options.get("device"))

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("clip_epsilon") and isinstance(value, (int, float)):
            names = [x for x in self._buffers if x.startswith("clip_epsilon")]
            if name not in names:
                raise AttributeError(f"this {type(self).__name__} has {' and '.join(names)}, but no {name}")
            if not (value > 0.0 and (value < 1.0 or name.endswith("_high"))):
                raise ValueError(f"{name} must be above 0, and below 1 on the lower side, got {value}")
        super().__setattr__(name, value)

    @override
    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = self.log_ratio(inputs, log_prob)
        if "clip_epsilon" in self._buffers:
            low = as_number(self.clip_epsilon)
            high = low
        else:
            low = as_number(self.clip_epsilon_low)
            high = as_number(self.clip_epsilon_high)
        log1p: Any = math.log1p if isinstance(low, float) else torch.log1p
        least = log1p(-low)  # log(1 - low)
        most = log1p(high)

        # min(ratio * A, clip(ratio) * A) bounds the ratio on one side only: from above if A >= 0, from below
        # if A < 0. Clamp the logarithm, before exp: otherwise an overflowing ratio has a NaN gradient at the
        # limit (inf * 0).
        free = log_ratio.detach()
        negative = advantage < 0
        lowest = torch.full_like(free, -math.inf).masked_fill_(negative, least)
        highest = torch.full_like(free, math.inf).masked_fill_(~negative, most)
        loss = log_ratio.clamp(lowest, highest).exp() * -advantage

        if not self.with_diagnostics:
            return loss, {}

        fraction = masked_mean((free.clamp(least, most) != free).to(free.dtype), inputs.mask)
        return loss, ratio_statistics(free, inputs.mask) | {"clip_fraction": fraction}


class KLPENPPOLoss(PPOLoss):
    """PPO with a penalty: ``-ratio * advantage + beta * KL(sampled | current)`` per row.

    The distribution that an action was sampled from is rebuilt from its parameters in the batch (e.g.
    ``"logits"``, or ``"loc"`` and ``"scale"``), so the policy must write them when it acts. After each call in
    training mode ``beta`` follows the mean divergence: it grows by ``increment`` where that is above
    ``1.5 * dtarg``, and shrinks by ``decrement`` where it is below ``dtarg / 1.5``.

    Args:
        actor_network, critic_network, options: see :class:`~flatroll.estimators.PolicyGradientLoss`.
        dtarg: target divergence. Default: 0.01.
        beta: initial factor of the penalty. Default: 1.
        increment, decrement: factors of ``beta``, at least 1 and at most 1. Default: 2 and 0.5.
        samples_mc_kl: samples per row if the divergence has no closed form. Default: 1.

    Writes what :class:`PPOLoss` writes, and ``kl``, the mean divergence.

    Raises:
        TypeError: the actor has no ``build_dist_from_params``.
        ValueError: ``increment`` below 1, ``decrement`` above 1.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> actor = ProbabilisticTensorDictSequential(net, head)
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 2), "logits": torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log(),
        ...     "action": torch.tensor([0, 1]), "action_log_prob": torch.tensor([0.5, 0.9]).log(),
        ...     "advantage": torch.ones(2, 1),
        ... }, [2])
        >>> loss = KLPENPPOLoss(actor, dtarg=0.05)
        >>> loss(batch)["kl"], loss.beta                     # (0 + KL(0.1, 0.9 | 0.5, 0.5)) / 2: beta grows
        (tensor(0.1840), tensor(2.))

    References:
        J. Schulman et al., Proximal policy optimization algorithms, https://arxiv.org/abs/1707.06347
    """

    diagnostics: ClassVar[tuple[str, ...]] = (*PPOLoss.diagnostics, "kl")
    tuple_order: ClassVar[tuple[str, ...] | None] = ("loss_objective", "kl", *PPOLoss._of_all)
    beta: Tensor

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        critic_network: TensorDictModuleBase | None = None,
        *,
        dtarg: float = 0.01,
        beta: Coefficient = 1.0,
        increment: float = 2.0,
        decrement: float = 0.5,
        samples_mc_kl: int = 1,
        **options: Unpack[PolicyOptions],
    ) -> None:
        checks.check_number("dtarg", dtarg)
        checks.check_number("beta", beta)
        checks.check_whole_number("samples_mc_kl", samples_mc_kl)
        checks.check_number("increment", increment, least=1)
        checks.check_number("decrement", decrement, above=0, most=1)

        super().__init__(actor_network, critic_network, **options)

        if not hasattr(self.actor_network, "build_dist_from_params"):
            raise TypeError(
                "actor_network must have build_dist_from_params, like a ProbabilisticTensorDictSequential, "
                f"got {type(self.actor_network).__name__}"
            )

        self.dtarg = dtarg
        self.increment = increment
        self.decrement = decrement
        self.samples_mc_kl = samples_mc_kl
        self.register_coeff_buffer("beta", beta, device=options.get("device"))
        self._beta_at_first = float(beta)

    def reset(self) -> None:
        """Reset ``beta`` to its initial value."""
        self.beta = torch.full_like(self.beta, self._beta_at_first)

    @override
    def set_keys(self, **keys: NestedKey | list[NestedKey] | None) -> None:
        super().set_keys(**keys)
        actor: Any = self.actor_network
        self.in_keys = list(dict.fromkeys((*self.in_keys, *getattr(actor, "dist_params_keys", ()))))

    @override
    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, diagnostics = super().objective(inputs, dist, log_prob, advantage)
        actor: Any = self.actor_network
        for key in actor.dist_params_keys:
            if inputs.batch.get(key, None) is None:
                hint = ". It says how the actions were sampled: the policy must write it when it acts"
                raise self.missing_entry_error(inputs, key, hint=hint)

        sampled = components(actor.build_dist_from_params(inputs.batch))
        current = components(dist)
        pairs = [compute_divergence(part, current[key], self.samples_mc_kl) for key, part in sampled.items()]
        divergence = reduce(torch.add, [joint(pair, inputs.batch) for pair in pairs])
        divergence = zero_masked(divergence, inputs.mask)
        mean = masked_mean(divergence.detach(), inputs.mask)
        loss = loss + self.beta * divergence

        if self.training:  # update beta for the next call: see the class
            larger = self.beta * self.increment
            smaller = self.beta * self.decrement
            steady = torch.where(mean < self.dtarg / 1.5, smaller, self.beta)
            # a new tensor, not an in-place change: the graph of this loss keeps the old beta
            self.beta = torch.where(mean > 1.5 * self.dtarg, larger, steady)

        return loss, diagnostics | {"kl": mean}


class A2CLoss(PolicyGradientLoss):
    """Advantage actor-critic: ``-log_prob * advantage`` per row.

    Args:
        actor_network, critic_network, options: see :class:`~flatroll.estimators.PolicyGradientLoss`.

    With ``make_value_estimator("td1")`` it is REINFORCE with a learned baseline and an entropy term.

    Writes ``loss_objective``, ``loss_critic``, ``loss_entropy``, and detached ``entropy``,
    ``explained_variance``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 2), "action": torch.tensor([0, 1]),
        ...     "advantage": torch.tensor([[2.0], [4.0]]),
        ... }, [2])
        >>> A2CLoss(ProbabilisticTensorDictSequential(net, head))(batch)["loss_objective"]      # 3 log 2
        tensor(2.0794)

    References:
        V. Mnih et al., Asynchronous methods for deep reinforcement learning,
        https://arxiv.org/abs/1602.01783
    """

    tuple_order: ClassVar[tuple[str, ...] | None] = (
        "loss_objective",
        "loss_critic",
        "entropy",
        "loss_entropy",
    )

    @override
    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -log_prob * advantage, {}


class ReinforceLoss(PolicyGradientLoss):
    """REINFORCE, with or without a learned baseline: ``-log_prob * advantage`` per row, the advantage held constant.

    Args:
        actor_network: tensordict module with ``get_dist(batch)``.
        critic_network: tensordict module that writes the value, the baseline. Default: no critic loss.
        delay_value: the loss computes advantages (``make_value_estimator``) with a delayed copy of the critic,
            ``target_critic_network``, which :class:`~flatroll.estimators.SoftUpdate` or
            :class:`~flatroll.estimators.HardUpdate` moves. Default: False.
        options: ``critic_coeff``, ``loss_critic_type``, ``clip_value``, ``normalize_advantage``, ``separate_losses``,
            ``burn_in`` and ``reduction``: see :class:`~flatroll.estimators.PolicyGradientLoss`.

    Without a critic the advantage in the batch is used as it is: a return, or a return minus a baseline of your own.
    There is no entropy term: REINFORCE with a learned baseline and an entropy term is
    ``A2CLoss(actor, critic).make_value_estimator("td1")``.

    Writes ``loss_actor`` and, with a critic, ``loss_value`` and the detached ``explained_variance``.

    Raises:
        ValueError: ``delay_value`` without a critic.
        TypeError: an option of the entropy term.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["logits"])
        >>> head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        >>> batch = TensorDict({
        ...     "observation": torch.zeros(2, 2), "action": torch.tensor([0, 1]),
        ...     "advantage": torch.tensor([[2.0], [4.0]]),
        ... }, [2])
        >>> ReinforceLoss(ProbabilisticTensorDictSequential(net, head))(batch)["loss_actor"]    # 3 log 2
        tensor(2.0794)

    References:
        R. J. Williams, Simple statistical gradient-following algorithms for connectionist reinforcement
        learning, 1992.
    """

    loss_names: ClassVar[tuple[str, str]] = ("loss_actor", "loss_value")
    tuple_order: ClassVar[tuple[str, ...] | None] = loss_names

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        critic_network: TensorDictModuleBase | None = None,
        *,
        delay_value: bool = False,
        **options: Unpack[CriticOptions],
    ) -> None:
        for name in _OF_ENTROPY:
            if name in options:
                raise TypeError(
                    f"{type(self).__name__} has no entropy term and does not take {name}=: use A2CLoss instead"
                )
        super().__init__(actor_network, critic_network, entropy_bonus=False, **options)

        critic = self.critic_network
        checks.check_flags(delay_value=delay_value)
        if delay_value and critic is None:
            raise ValueError("delay_value=True needs a critic_network")

        self.delay_value = delay_value
        if delay_value and critic:
            self.target_critic_network = target_copy(critic)
        else:
            self.target_critic_network = None

    @override
    def objective(
        self, inputs: LossInputs, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -log_prob * advantage.detach(), {}
