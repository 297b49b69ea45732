"""What every policy-gradient loss does around its objective: policy terms, entropy, critic, advantages."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import reduce
from typing import Any, ClassVar, Self, TypedDict

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution

from flatroll.estimators.distributions import components, distribution, joint, log_prob_of, require_actor
from flatroll.estimators.losses.base import LossModule, Rows, frozen, shared
from flatroll.estimators.masked import (
    Distance,
    Reduction,
    check_distance,
    distance,
    masked_mean,
    masked_variance,
    reduced,
    standardized,
)
from flatroll.estimators.values.base import ValueEstimator
from flatroll.estimators.values.estimators import Kind, ValueEstimators, make_estimator
from flatroll.layout.fast_call import through, writes
from flatroll.layout.keys import NestedKey, flat_column, missing_marker, require
from flatroll.modules import set_recurrent_mode


class CriticOptions(TypedDict, total=False):
    """Arguments of every policy-gradient loss; see :class:`PolicyGradientLoss`."""

    critic_coeff: float | None
    loss_critic_type: Distance
    clip_value: bool | float | None
    normalize_advantage: bool
    separate_losses: bool
    burn_in: int
    reduction: Reduction


class PolicyOptions(CriticOptions, total=False):
    """Arguments of the losses with an entropy term; see :class:`PolicyGradientLoss`."""

    entropy_bonus: bool
    entropy_coeff: float
    samples_mc_entropy: int


class PolicyGradientLoss(LossModule):
    """Base of the losses of an actor and, if given, a critic; a subclass gives :meth:`objective`.

    Args:
        actor_network: tensordict module with ``get_dist(batch)``, e.g. a
            ``ProbabilisticTensorDictSequential``.
        critic_network: tensordict module that writes the value; it may read what the actor wrote (a shared
            trunk that runs once). Default: no critic loss.
        entropy_bonus: add the entropy term. Default: True.
        entropy_coeff: factor of the entropy. Default: 0.01.
        samples_mc_entropy: samples per row where the distribution has no closed form. Default: 1.
        critic_coeff: factor of the critic loss; None leaves it out. Default: 1.
        loss_critic_type: ``"l1"``, ``"l2"`` or ``"smooth_l1"``. Default: ``"smooth_l1"``.
        clip_value: largest move of the value away from the one in the batch; the larger of the clipped and
            the plain critic loss counts. Default: None, no clipping.
        normalize_advantage: zero mean and unit deviation of the advantage over the real rows. Default: False.
        separate_losses: the critic loss leaves parameters that the actor has, too, alone. Default: False.
        burn_in: rows at the beginning of each run (slice) that warm the memory of recurrent networks up and
            count nowhere in the loss, and through which no gradient flows. Default: 0.
        reduction: ``"mean"`` over the real rows, ``"sum"``, or ``"none"``, 0 in rows that are not real.

    Raises:
        TypeError: the actor has no ``get_dist``, or the critic is no tensordict module.
        ValueError: unknown ``loss_critic_type`` or ``reduction``, ``burn_in`` below 0.
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        **LossModule.default_keys,
        "sample_log_prob": "action_log_prob",
        "advantage": "advantage",
        "value_target": "value_target",
        "value": "state_value",
    }
    #: The keys that this loss reads from the batch besides what its networks read.
    reads: ClassVar[tuple[str, ...]] = ("action", "advantage")
    #: The diagnostics that :meth:`objective` reports.
    diagnostics: ClassVar[tuple[str, ...]] = ()
    #: What the losses of policy and critic are called.
    loss_names: ClassVar[tuple[str, str]] = ("loss_objective", "loss_critic")

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        entropy_bonus: bool = True,
        entropy_coeff: float = 0.01,
        samples_mc_entropy: int = 1,
        critic_coeff: float | None = 1.0,
        loss_critic_type: Distance = "smooth_l1",
        clip_value: bool | float | None = None,
        normalize_advantage: bool = False,
        separate_losses: bool = False,
        burn_in: int = 0,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(reduction=reduction, burn_in=burn_in)
        require_actor(actor_network)
        if critic_network is not None and not hasattr(critic_network, "in_keys"):
            raise TypeError(
                "critic_network must be a tensordict module, e.g. TensorDictModule(net, "
                f"in_keys=['observation'], out_keys=['state_value']), got {type(critic_network).__name__}"
            )
        check_distance("loss_critic_type", loss_critic_type)
        if not isinstance(entropy_coeff, (int, float)):
            raise TypeError(f"entropy_coeff must be a number, one for all actions, got {entropy_coeff!r}")
        if clip_value is True:
            raise ValueError("clip_value=True takes the clip_epsilon of ClipPPOLoss: give a number here")
        self.actor_network, self.critic_network = actor_network, critic_network
        self.entropy_bonus, self.entropy_coeff = entropy_bonus, entropy_coeff
        self.samples_mc_entropy = samples_mc_entropy
        self.critic_coeff, self.clip_value = critic_coeff, clip_value or None
        self.loss_critic_type: Distance = loss_critic_type
        self.normalize_advantage, self.separate_losses = normalize_advantage, separate_losses
        self.__dict__["value_estimator"] = None  # its networks are not this module's own
        self.set_keys()

    value_estimator: ValueEstimator | None

    def set_keys(self, **keys: NestedKey | None) -> None:
        super().set_keys(**keys)
        critic_reads = ("value_target", "value")[: 2 if self.clip_value else 1] if self._has_critic else ()
        networks = [network for network in (self.actor_network, self.critic_network) if network is not None]
        of_networks = [key for network in networks for key in network.in_keys]
        of_loss = [self.tensor_keys[name] for name in (*self.reads, *critic_reads)]
        read: dict[Any, None] = dict.fromkeys((*of_networks, *of_loss))
        objective, critic = self.loss_names
        written: list[Any] = [objective, *self.diagnostics]
        if self.entropy_bonus:
            written += ["entropy", "loss_entropy"]
        if self._has_critic:
            written += [critic, "explained_variance"]
            written += ["value_clip_fraction"] if self.clip_value else []
        self.in_keys, self.out_keys = list(read), written
        self._name_keys_of_estimator()

    def make_value_estimator(self, value_type: Kind = ValueEstimators.GAE, **hyperparams: Any) -> Self:
        """Let the loss compute advantages of batches that come without them.

        Each call of the loss then evaluates the batch anew, on the networks as they are, without gradients.
        A batch that has an advantage keeps it. To estimate once for many updates, call an estimator yourself.

        Args:
            value_type: a name, e.g. ``"gae"``, a class, or an estimator that is ready. Default: GAE.
            hyperparams: arguments of the estimator. Default: ``gamma=0.99``, ``lmbda=0.95``, and the critic
                of this loss as ``value_network``. A critic that only reads what the actor wrote cannot stand
                alone: give a ``value_network`` that can.

        Returns:
            the loss itself.

        Raises:
            ValueError: unknown name, hyperparameters out of range, or no critic.
        """
        networks = {"value_network": self._evaluated, "actor_network": self.actor_network}
        self.__dict__["value_estimator"] = make_estimator(value_type, networks, hyperparams)
        self._name_keys_of_estimator()
        return self

    @property
    def _evaluated(self) -> TensorDictModuleBase | None:
        """The network whose values advantages are computed from."""
        return self.critic_network

    def _name_keys_of_estimator(self) -> None:
        estimator = self.value_estimator
        if estimator is not None:
            known = {name: key for name, key in self.tensor_keys.items() if name in estimator.tensor_keys}
            estimator.set_keys(**known)

    def objective(
        self, rows: Rows, dist: Distribution, log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each row ``[*B]`` and the :attr:`diagnostics` from log-probabilities and advantages."""
        raise NotImplementedError(f"{type(self).__name__} must define objective")

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The losses of a batch ``[N]`` or ``[*B, T]``, which is left as it is.

        Recurrent networks run in recurrent mode, whatever the mode around the call. Rows at which
        ``("collector", "mask")`` or ``"shifted_valid"`` is False count nowhere.

        Returns:
            tensordict of the losses, whose sum is to be minimised, and detached diagnostics.

        Raises:
            KeyError: an entry is missing; the text says what writes it.
        """
        batch = tensordict
        if self.value_estimator is not None and batch.get(self.key("advantage"), None) is None:
            with torch.no_grad():
                batch = self.value_estimator(tensordict.copy())
        rows = self.rows(batch)
        objective, critic = self.loss_names
        with set_recurrent_mode(True, burn_in=self.burn_in):
            losses, diagnostics = self._policy_losses(rows, objective)
            if self._has_critic:
                losses[critic], of_critic = self._critic_loss(rows)
                diagnostics |= of_critic
        out = {name: reduced(loss, rows.mask, self.reduction) for name, loss in losses.items()}
        return TensorDict(out | {name: number.detach() for name, number in diagnostics.items()})

    @property
    def _has_critic(self) -> bool:
        return self.critic_network is not None and self.critic_coeff is not None

    def _policy_losses(self, rows: Rows, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        advantage = self._advantage(rows)
        dist = distribution(self.actor_network, rows.work)
        log_prob = self._log_prob(rows, dist)
        loss, diagnostics = self.objective(rows, dist, log_prob, advantage)
        losses = {name: loss}
        if self.entropy_bonus:
            parts = list(components(dist).values()) or [dist]
            entropy = sum_of(joint(entropy_of(part, self.samples_mc_entropy), rows.batch) for part in parts)
            losses["loss_entropy"] = -self.entropy_coeff * entropy
            diagnostics["entropy"] = masked_mean(entropy.detach(), rows.mask)
        return losses, diagnostics

    def _log_prob(self, rows: Rows, dist: Distribution) -> Tensor:
        """Log-probability ``[*B]`` of each row's action, of all parts that it has."""
        parts = components(dist)
        if not parts:
            return joint(log_prob_of(dist, self.entry(rows, "action")), rows.batch)
        return sum_of(
            joint(log_prob_of(part, require(rows.batch, key)), rows.batch) for key, part in parts.items()
        )

    def _advantage(self, rows: Rows) -> Tensor:
        key = self.key("advantage")
        if rows.batch.get(key, None) is None:
            error = missing_marker(key, rows.batch.keys(True, True), self.default_keys["advantage"])
            raise KeyError(f"{error.args[0]}. Or let the loss compute it: loss.make_value_estimator(...)")
        advantage = self.column(rows, "advantage")
        if self.normalize_advantage and advantage.numel() > 1:
            return standardized(advantage, rows.mask)
        return advantage

    def _critic_loss(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.critic_network is not None and self.critic_coeff is not None
        key = self.tensor_keys["value"]
        target = self.column(rows, "value_target")
        before = self.column(rows, "value") if self.clip_value else None
        work = rows.work.detach() if self.separate_losses else rows.work
        alone = shared(self.critic_network, self.actor_network) if self.separate_losses else []
        with frozen(alone) if alone else nullcontext():
            out = through(self.critic_network, work)
            out = out.get(key, None) if writes(self.critic_network, key) else None
        if out is None:
            raise KeyError(
                f"critic_network wrote no entry {key!r}: its out_keys are "
                f"{list(self.critic_network.out_keys)}; name the one that holds the value with "
                "set_keys(value=...)"
            )
        value = flat_column(out, rows.batch, key)
        loss = distance(value, target, self.loss_critic_type)
        diagnostics = {"explained_variance": explained_variance(value.detach(), target.detach(), rows.mask)}
        if before is not None and self.clip_value:
            moved = value - before
            clipped = moved.clamp(-self.clip_value, self.clip_value)
            loss = torch.maximum(loss, distance(before + clipped, target, self.loss_critic_type))
            diagnostics["value_clip_fraction"] = masked_mean((moved != clipped).to(value.dtype), rows.mask)
        return self.critic_coeff * loss, diagnostics


def sum_of(columns: Iterable[Tensor]) -> Tensor:
    """Their sum; there is at least one."""
    return reduce(torch.add, columns)


def entropy_of(dist: Distribution, samples: int) -> Tensor:
    """The entropy in closed form, or from ``samples`` samples where there is none."""
    try:
        return dist.entropy()
    except NotImplementedError:
        drawn = dist.rsample((samples,)) if dist.has_rsample else dist.sample((samples,))
        return -dist.log_prob(drawn).mean(0)


def explained_variance(value: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """``1 - Var(target - value) / Var(target)``: 1 for a perfect critic, 0 for a constant one."""
    tiny = torch.finfo(target.dtype).eps
    total = masked_variance(target, mask, correction=0)
    return 1.0 - masked_variance(target - value, mask, correction=0) / (total + tiny)
