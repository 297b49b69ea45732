"""What soft actor-critic of continuous and of discrete actions share."""

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Literal, TypedDict, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution

from flatroll.estimators.distributions import distribution, require_actor
from flatroll.estimators.losses.action_values import OffPolicyLoss, following
from flatroll.estimators.losses.base import Rows, delayed, frozen, shared
from flatroll.estimators.masked import Distance, Reduction, distance, masked_mean
from flatroll.estimators.values.options import NetworkInputs
from flatroll.layout.fast_call import written
from flatroll.layout.keys import NestedKey, as_tuple, next_key


class SACOptions(TypedDict, total=False):
    """Arguments of both losses; see :class:`SoftActorCritic`."""

    num_qvalue_nets: int
    loss_function: Distance
    alpha_init: float
    min_alpha: float | None
    max_alpha: float | None
    fixed_alpha: bool
    target_entropy: float | Literal["auto"]
    delay_actor: bool
    delay_qvalue: bool
    separate_losses: bool
    use_prioritized_weights: bool | Literal["auto"]
    reduction: Reduction


class SoftActorCritic(OffPolicyLoss):
    """Base of the two losses; a subclass says what an action is worth.

    Args:
        actor_network: tensordict module with ``get_dist(batch)``.
        qvalue_network: tensordict module of action values, of which ``num_qvalue_nets - 1`` copies are made
            whose layers are initialised anew (``reset_parameters``); or a list of such modules, taken as they
            are. It may read what the actor writes on its way (a shared trunk).
        num_qvalue_nets: number of networks; the smallest of their values counts. Default: 2.
        loss_function: ``"smooth_l1"`` (default), ``"l2"`` or ``"l1"``.
        alpha_init: first factor of the entropy. Default: 1.
        min_alpha, max_alpha: bounds of it. Default: none.
        fixed_alpha: leave the factor as it is. Default: False.
        target_entropy: entropy that the factor aims at. Default: ``"auto"``, see the subclass.
        delay_actor, delay_qvalue: whether targets come from delayed copies, ``target_actor_network`` and
            ``target_qvalue_network``. Default: False, True.
        separate_losses: the loss of the values leaves parameters that the actor has, too, alone. Default: False.
        use_prioritized_weights: whether ``"priority_weight"`` of the batch weights the rows; ``"auto"``
            (default): if it is there.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. Default: ``"mean"``.

    Raises:
        TypeError: the actor has no ``get_dist``, a network is no tensordict module, or is recurrent.
        ValueError: numbers out of range, or a network that cannot be initialised anew.
    """

    #: The entry a qvalue network writes.
    value_name: ClassVar[str]
    log_alpha: Tensor

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
        target_entropy: float | Literal["auto"] = "auto",
        delay_actor: bool = False,
        delay_qvalue: bool = True,
        separate_losses: bool = False,
        use_prioritized_weights: bool | Literal["auto"] = "auto",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            loss_function=loss_function, use_prioritized_weights=use_prioritized_weights, reduction=reduction
        )
        require_actor(actor_network)
        low, high = min_alpha or 0.0, math.inf if max_alpha is None else max_alpha
        if not 0.0 <= low <= alpha_init <= high or alpha_init <= 0.0:
            raise ValueError(
                "alpha_init must be above 0 and between min_alpha and max_alpha, "
                f"got {alpha_init}, {min_alpha} and {max_alpha}"
            )
        if target_entropy != "auto" and not isinstance(target_entropy, (int, float)):
            raise ValueError(f"target_entropy must be a number or 'auto', got {target_entropy!r}")
        self.actor_network = actor_network
        self.qvalue_network = nn.ModuleList(ensemble(qvalue_network, num_qvalue_nets))
        self.target_actor_network = delayed(actor_network) if delay_actor else None
        self.target_qvalue_network = delayed(self.qvalue_network) if delay_qvalue else None
        log_alpha = torch.tensor(math.log(alpha_init))
        if fixed_alpha:
            self.register_buffer("log_alpha", log_alpha)
        else:
            self.register_parameter("log_alpha", nn.Parameter(log_alpha))
        self._bounds = math.log(low) if low else -math.inf, math.log(high)
        self.target_entropy, self.separate_losses = target_entropy, separate_losses
        self.set_keys()

    def set_keys(self, **keys: NestedKey | None) -> None:
        super().set_keys(**keys)
        networks: list[Any] = [self.actor_network, *self.qvalue_network]
        for network in networks:
            if NetworkInputs.of(network, self.key("is_init")).recurrent:
                raise TypeError(
                    f"{type(self).__name__} reads rows one by one, and a recurrent module remembers others: "
                    "let it write its features when it acts, and give networks that read those"
                )
        writes: list[NestedKey] = [*cast(list[Any], self.actor_network.out_keys), self.key("action")]
        made = {as_tuple(key) for key in writes}
        read: list[Any] = list(dict.fromkeys(key for network in networks for key in network.in_keys))
        #: What stands in the batch at the root and under "next".
        self._observed: list[Any] = [key for key in read if as_tuple(key) not in made]
        inputs: list[Any] = [*self._observed, *(next_key(key) for key in self._observed)]
        self.in_keys = inputs + [self.key(name) for name in ("action", "reward", "terminated")]
        self.out_keys = ["loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"]

    @property
    def alpha(self) -> Tensor:
        """The factor of the entropy, without gradients."""
        return self.log_alpha.detach().exp()

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The losses of a batch ``[N]`` or ``[*B, T]``, into which ``"td_error"`` is written.

        The gradient of each loss reaches its own networks only, so that their sum may be minimised.

        Raises:
            KeyError: an entry is missing; the text says what writes it.
        """
        rows, unknown = self.transitions(tensordict, self._observed)
        with torch.no_grad():
            self.log_alpha.clamp_(*self._bounds)
            after = following(rows.batch, self._observed, unknown)
            dist = distribution(self.target_actor_network or self.actor_network, after)
            target = self.target(rows, self._next_value(dist, after), unknown)
        dist = distribution(self.actor_network, rows.work)
        action, values = self.entry(rows, "action"), self._learning(rows)
        chosen = torch.stack([self._of_action(value, action) for value in values])
        distances = distance(chosen, target.expand_as(chosen), self.loss_function)
        loss_actor, log_prob = self._actor_loss(rows, dist, values)
        entropy = -log_prob.detach()
        aim = self._aim(action, values[0]) if self.target_entropy == "auto" else float(self.target_entropy)
        return TensorDict(
            {
                "loss_actor": self.reduce(rows, loss_actor),
                "loss_qvalue": self.finish(rows, distances.sum(0), unknown, (chosen - target).abs().amax(0)),
                "loss_alpha": self.reduce(rows, self.log_alpha * (entropy - aim)),
                "alpha": self.alpha,
                "entropy": masked_mean(entropy, rows.mask),
            }
        )

    def _next_value(self, dist: Distribution, after: TensorDict) -> Tensor:
        """What follows each row is worth, ``[*B]``."""
        raise NotImplementedError(f"{type(self).__name__} must define _next_value")

    def _of_action(self, value: Tensor, action: Tensor) -> Tensor:
        """The value ``[*B]`` of the action taken, of what a network wrote."""
        raise NotImplementedError(f"{type(self).__name__} must define _of_action")

    def _actor_loss(self, rows: Rows, dist: Distribution, values: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Loss of the actor and (expected) log-probability of its actions, both ``[*B]``."""
        raise NotImplementedError(f"{type(self).__name__} must define _actor_loss")

    def _aim(self, action: Tensor, value: Tensor) -> float:
        """The entropy that ``target_entropy="auto"`` aims at."""
        raise NotImplementedError(f"{type(self).__name__} must define _aim")

    @property
    def _targets(self) -> nn.ModuleList:
        return self.qvalue_network if self.target_qvalue_network is None else self.target_qvalue_network

    def _evaluate(self, networks: nn.ModuleList, batch: TensorDictBase) -> list[Tensor]:
        """What each network writes; the batch is left as it is."""
        key = self.key(self.value_name)
        found = []
        members: Any = networks
        for network in members:
            value = written(network, batch, key)
            if value is None:
                raise KeyError(
                    f"qvalue_network wrote no entry {key!r}: its out_keys are {list(network.out_keys)}; name "
                    f"the one that holds the value with set_keys({self.value_name}=...)"
                )
            found.append(value)
        return found

    def _learning(self, rows: Rows) -> list[Tensor]:
        """What each network writes of the rows as they are, for their own loss."""
        if not self.separate_losses:
            return self._evaluate(self.qvalue_network, rows.work)
        with frozen(shared(self.qvalue_network, self.actor_network)):
            return self._evaluate(self.qvalue_network, rows.work.detach())


def ensemble(
    networks: TensorDictModuleBase | Sequence[TensorDictModuleBase], number: int
) -> list[TensorDictModuleBase]:
    """The networks of a list; or one network and copies of it that start from other numbers.

    Raises:
        TypeError: one is no tensordict module.
        ValueError: fewer than one network, or layers that cannot be initialised anew.
    """
    one = isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList)
    found: list[Any] = [networks] if one else list(cast(Iterable[Any], networks))
    if number < 1 or not found:
        raise ValueError(f"num_qvalue_nets must be at least 1, got {number if found else 0}")
    for network in found:
        if not isinstance(network, TensorDictModuleBase):
            raise TypeError(
                "qvalue_network must be a tensordict module or a list of them, e.g. TensorDictModule(net, "
                f"in_keys=['observation', 'action'], out_keys=[...]), got {type(network).__name__}"
            )
    return [*found, *(anew(found[0]) for _ in range(number - 1))] if one else found


def anew(network: TensorDictModuleBase) -> TensorDictModuleBase:
    """A copy of the network whose layers are initialised anew."""
    copy = deepcopy(network)
    for layer in copy.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            reset()
        elif next(layer.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"qvalue_network has a {type(layer).__name__}, whose parameters cannot be initialised anew (it "
                "has no reset_parameters): give a list of networks instead of one"
            )
    return copy
