"""What every policy-gradient loss does around its objective: policy terms, entropy, critic, reductions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import functional as F

from flatroll.estimators.keyed import VALID, renamed
from flatroll.estimators.reductions import (
    Reduction,
    both,
    masked_mean,
    masked_variance,
    reduced,
    standardized,
)
from flatroll.layout.keys import ACTION, MASK, NestedKey, flat_column, marker, missing_marker
from flatroll.modules import set_recurrent_mode

CriticLoss = Literal["l1", "l2", "smooth_l1"]

_DISTANCES = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}

_WRITTEN_BY = {
    "advantage": "call an estimator, e.g. flatroll.estimators.GAE, on the batch first",
    "value_target": "call an estimator, e.g. flatroll.estimators.GAE, on the batch first",
    "value": "call an estimator, e.g. flatroll.estimators.GAE, on the batch first",
    "sample_log_prob": "the policy must write it when it acts (return_log_prob=True)",
    "action": "the policy must write it when it acts",
}


@dataclass(frozen=True)
class Rows:
    """A batch on its way through a loss.

    Attributes:
        batch: the batch as it came.
        work: a shallow copy, into which the networks write (a critic may read what the actor wrote).
        mask: bool ``[*B]``, the rows that count, or None.
    """

    batch: TensorDictBase
    work: TensorDictBase
    mask: Tensor | None


class PolicyGradientLoss(TensorDictModuleBase):
    """Base of the losses of an actor and, if given, a critic; a subclass gives :meth:`objective`.

    Args:
        actor: tensordict module with ``get_dist(batch)``, e.g. a ``ProbabilisticTensorDictSequential``.
        critic: tensordict module that writes the value; it may read what the actor wrote (a shared trunk that
            runs once). Default: no critic loss.
        entropy_bonus: add the entropy term. Default: True.
        entropy_coeff: factor of the entropy. Default: 0.01.
        samples_mc_entropy: samples per row where the distribution has no closed form. Default: 1.
        critic_coeff: factor of the critic loss; None leaves it out. Default: 1.
        loss_critic_type: ``"l1"``, ``"l2"`` or ``"smooth_l1"``. Default: ``"smooth_l1"``.
        clip_value: largest move of the value away from the one in the batch; the larger of the clipped and
            the plain critic loss counts. Default: None, no clipping.
        normalize_advantage: zero mean and unit deviation of the advantage over the real rows. Default: False.
        reduction: ``"mean"`` over the real rows, ``"sum"``, or ``"none"``, 0 in rows that are not real.

    Raises:
        TypeError: the actor has no ``get_dist``, or the critic is no tensordict module.
        ValueError: unknown ``loss_critic_type`` or ``reduction``.
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        "action": ACTION,
        "sample_log_prob": "action_log_prob",
        "advantage": "advantage",
        "value_target": "value_target",
        "value": "state_value",
        "mask": MASK,
        "valid": VALID,
    }
    #: The keys that this loss reads from the batch besides what its networks read.
    reads: ClassVar[tuple[str, ...]] = ("action", "advantage")
    #: The diagnostics that :meth:`objective` reports.
    diagnostics: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        actor: TensorDictModuleBase,
        critic: TensorDictModuleBase | None = None,
        *,
        entropy_bonus: bool = True,
        entropy_coeff: float = 0.01,
        samples_mc_entropy: int = 1,
        critic_coeff: float | None = 1.0,
        loss_critic_type: CriticLoss = "smooth_l1",
        clip_value: float | None = None,
        normalize_advantage: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        if not hasattr(actor, "get_dist"):
            raise TypeError(
                "actor must be a tensordict module with get_dist, e.g. ProbabilisticTensorDictSequential, "
                f"got {type(actor).__name__}"
            )
        if critic is not None and not hasattr(critic, "in_keys"):
            raise TypeError(
                "critic must be a tensordict module, e.g. TensorDictModule(net, in_keys=['observation'], "
                f"out_keys=['state_value']), got {type(critic).__name__}"
            )
        if loss_critic_type not in _DISTANCES:
            raise ValueError(f"loss_critic_type must be 'l1', 'l2' or 'smooth_l1', got {loss_critic_type!r}")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        self.actor, self.critic = actor, critic
        self.entropy_bonus, self.entropy_coeff = entropy_bonus, entropy_coeff
        self.samples_mc_entropy = samples_mc_entropy
        self.critic_coeff, self.clip_value = critic_coeff, clip_value
        self.loss_critic_type: CriticLoss = loss_critic_type
        self.normalize_advantage = normalize_advantage
        self.reduction: Reduction = reduction
        self.tensor_keys: dict[str, NestedKey] = dict(self.default_keys)
        self.set_keys()

    def set_keys(self, **keys: NestedKey | None) -> None:
        """Rename entries.

        Args:
            keys: any of ``action``, ``sample_log_prob``, ``advantage``, ``value_target``, ``value``, ``mask``,
                ``valid``; None leaves a name as it is.

        Raises:
            ValueError: there is no such key.
        """
        self.tensor_keys = renamed(self.tensor_keys, keys)
        critic_reads = ("value_target", "value")[: 2 if self.clip_value else 1] if self._has_critic else ()
        of_networks = [network.in_keys for network in (self.actor, self.critic) if network is not None]
        of_loss = [self.tensor_keys[name] for name in (*self.reads, *critic_reads)]
        read: dict[Any, None] = dict.fromkeys(key for keys_ in (*of_networks, of_loss) for key in keys_)
        written: list[Any] = ["loss_objective", *self.diagnostics]
        if self.entropy_bonus:
            written += ["entropy", "loss_entropy"]
        if self._has_critic:
            written += ["loss_critic", "explained_variance"]
            written += ["value_clip_fraction"] if self.clip_value else []
        self.in_keys, self.out_keys = list(read), written

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
            tensordict of ``loss_objective``, ``loss_critic``, ``loss_entropy``, whose sum is to be minimised,
            and detached diagnostics.

        Raises:
            KeyError: an entry is missing; the text says what writes it.
        """
        masks = [self.tensor_keys[name] for name in ("mask", "valid")]
        mask = both(
            *(None if tensordict.get(key, None) is None else marker(tensordict, key) for key in masks)
        )
        rows = Rows(tensordict, tensordict.copy(), mask)
        with set_recurrent_mode(True):
            losses, diagnostics = self._policy_losses(rows)
            if self._has_critic:
                losses["loss_critic"], of_critic = self._critic_loss(rows)
                diagnostics |= of_critic
        out = {name: reduced(loss, mask, self.reduction) for name, loss in losses.items()}
        return TensorDict(out | {name: number.detach() for name, number in diagnostics.items()})

    @property
    def _has_critic(self) -> bool:
        return self.critic is not None and self.critic_coeff is not None

    def entry(self, rows: Rows, name: str) -> Tensor:
        """The batch's entry called ``name`` in :meth:`set_keys`, as it is."""
        key = self.tensor_keys[name]
        entry: Tensor | None = rows.batch.get(key, None)
        if entry is None:
            error = missing_marker(key, rows.batch.keys(True, True))
            raise KeyError(f"{error.args[0]}. To have it, {_WRITTEN_BY[name]}")
        return entry

    def column(self, rows: Rows, name: str) -> Tensor:
        """The same in the batch's shape ``[*B]``."""
        return flat_column(self.entry(rows, name), rows.batch, self.tensor_keys[name])

    def _policy_losses(self, rows: Rows) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        advantage = self.column(rows, "advantage")
        if self.normalize_advantage:
            advantage = standardized(advantage, rows.mask)
        action = self.entry(rows, "action")
        get_dist: Callable[[TensorDictBase], Distribution] = getattr(self.actor, "get_dist")  # noqa: B009
        dist = get_dist(rows.work)
        if action.ndim != len(dist.batch_shape) + len(dist.event_shape):
            raise ValueError(
                f"the action must have the shape {tuple(dist.batch_shape + dist.event_shape)} of the actor's "
                f"{type(dist).__name__}, got {tuple(action.shape)}"
            )
        log_prob = joint(dist.log_prob(action), rows.batch)
        loss, diagnostics = self.objective(rows, dist, log_prob, advantage)
        losses = {"loss_objective": loss}
        if self.entropy_bonus:
            entropy = joint(entropy_of(dist, self.samples_mc_entropy), rows.batch)
            losses["loss_entropy"] = -self.entropy_coeff * entropy
            diagnostics["entropy"] = masked_mean(entropy.detach(), rows.mask)
        return losses, diagnostics

    def _critic_loss(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.critic is not None and self.critic_coeff is not None
        key = self.tensor_keys["value"]
        target = self.column(rows, "value_target")
        before = self.column(rows, "value") if self.clip_value else None
        out = self.critic(rows.work).get(key, None)
        if out is None:
            raise KeyError(
                f"critic wrote no entry {key!r}: its out_keys are {list(self.critic.out_keys)}; "
                "name the one that holds the value with set_keys(value=...)"
            )
        value = flat_column(out, rows.batch, key)
        distance = _DISTANCES[self.loss_critic_type]
        loss = distance(value, target, reduction="none")
        diagnostics = {"explained_variance": explained_variance(value.detach(), target.detach(), rows.mask)}
        if before is not None and self.clip_value:
            moved = value - before
            clipped = moved.clamp(-self.clip_value, self.clip_value)
            loss = torch.maximum(loss, distance(before + clipped, target, reduction="none"))
            diagnostics["value_clip_fraction"] = masked_mean((moved != clipped).to(value.dtype), rows.mask)
        return self.critic_coeff * loss, diagnostics


def joint(log_prob: Tensor, batch: TensorDictBase) -> Tensor:
    """Log-probabilities (or entropies) of independent action dims summed to the batch's shape ``[*B]``."""
    extra = log_prob.ndim - batch.batch_dims
    return log_prob.flatten(-extra).sum(-1) if extra > 0 else log_prob


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
