"""What the losses of action values share: transitions, their targets, priorities."""

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, Self

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.estimators.functional.returns import (
    td0_return_estimate,
    td_lambda_return_estimate,
    unit_interval,
)
from flatroll.estimators.losses.base import LossModule, Rows
from flatroll.estimators.masked import Distance, Reduction, both, check_distance, reduced
from flatroll.estimators.values.base import ValueEstimator
from flatroll.estimators.values.batch_inputs import on_host
from flatroll.estimators.values.estimators import ValueEstimators, name_of
from flatroll.estimators.values.evaluate import fill_missing
from flatroll.layout import run_ends
from flatroll.layout.keys import NEXT_KNOWN, NestedKey, flat_column, marker, next_key, require

#: Written by an n-step transform: rows that a reward spans, and the discount over them.
STEPS, DISCOUNT = "steps_to_next_obs", "gamma"


class OffPolicyLoss(LossModule):
    """Base of the losses of action values.

    Args:
        loss_function: ``"l1"``, ``"l2"`` or ``"smooth_l1"``.
        use_prioritized_weights: whether ``"priority_weight"`` (``[N]``) weights the rows: True, False, or
            ``"auto"``, if it is there. A mean is divided by the sum of the weights.
        burn_in, reduction: see :class:`~flatroll.estimators.losses.base.LossModule`.

    Raises:
        ValueError: unknown ``loss_function``, ``use_prioritized_weights`` or ``reduction``.
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        **LossModule.default_keys,
        "priority": "td_error",
        "priority_weight": "priority_weight",
    }

    def __init__(
        self,
        *,
        loss_function: Distance,
        use_prioritized_weights: bool | Literal["auto"] = "auto",
        burn_in: int = 0,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(reduction=reduction, burn_in=burn_in)
        check_distance("loss_function", loss_function)
        if use_prioritized_weights not in (True, False, "auto"):
            raise ValueError(
                f"use_prioritized_weights must be True, False or 'auto', got {use_prioritized_weights!r}"
            )
        self.loss_function: Distance = loss_function
        self.use_prioritized_weights = use_prioritized_weights
        self.make_value_estimator()

    def make_value_estimator(
        self, value_type: str | type[ValueEstimator] = ValueEstimators.TD0, **hyperparams: float
    ) -> Self:
        """Choose what the values are drawn to.

        ``"td0"`` (default): ``reward + gamma * next_value``, on rows in any order. ``"td1"`` and
        ``"td_lambda"``, whose targets are those of ``"gae"``, too: returns along each run, for batches of slices;
        rewards that an exploring or older policy earned stand in them uncorrected.

        N-step rows (``"steps_to_next_obs"``, as ``MultiStepTransform`` writes it) need ``"td0"``; there
        ``"gamma"`` of the batch, or else ``gamma ** steps``, takes the place of ``gamma``.

        Args:
            value_type: ``"td0"``, ``"td1"``, ``"td_lambda"`` or ``"gae"``, or the class. Default: ``"td0"``.
            hyperparams: ``gamma``, default 0.99; ``lmbda`` of the last two, default 0.95. Both in [0, 1].

        Returns:
            the loss itself.

        Raises:
            ValueError: another estimator, or a number out of range.
            TypeError: another hyperparameter.
        """
        kind = name_of(value_type)
        if kind == ValueEstimators.VTrace:
            raise ValueError(
                "'vtrace' corrects values of states by how probable the actor finds the actions of a run, and "
                f"{type(self).__name__} learns values of actions: take 'td0', 'td1' or 'td_lambda'"
            )
        traced = kind in (ValueEstimators.TDLambda, ValueEstimators.GAE)
        defaults = {"gamma": 0.99} | ({"lmbda": 0.95} if traced else {})
        if unknown := sorted(set(hyperparams) - set(defaults)):
            raise TypeError(f"{kind} takes {' and '.join(defaults)}, got {', '.join(unknown)}")
        numbers = defaults | hyperparams
        self.gamma = unit_interval("gamma", numbers["gamma"])
        if traced:
            self.lmbda = unit_interval("lmbda", numbers["lmbda"])
        else:
            self.lmbda = float(kind == ValueEstimators.TD1)
        return self

    def transitions(self, batch: TensorDictBase, observed: Iterable[NestedKey]) -> tuple[Rows, Tensor | None]:
        """The rows that count, and those whose next observation nobody knows, which do not.

        They are rows that are not terminated and whose next observation the env hid
        (``("collector", "next_known")``), or of which a number is NaN, e.g. where ``NextStateReconstructor`` found
        no next row; in a batch without next observations, the last rows of runs.
        """
        rows = self.rows(batch)
        unknown = None if batch.get(NEXT_KNOWN, None) is None else ~marker(batch, NEXT_KNOWN)
        for key in observed:
            column = batch.get(next_key(key), None)
            bad = self.ends(rows) if column is None else rows_with_nan(column, batch.batch_dims)
            if bad is not None:
                unknown = bad if unknown is None else unknown | bad
        if unknown is None:
            return rows, None
        unknown = unknown & ~self.terminated(rows)
        lost = int(unknown.sum()) if on_host(unknown) else 0
        if 2 * lost > unknown.numel():
            self._warn_once(
                f"of most rows of the batch ({lost} of {unknown.numel()}) the next observation is not "
                "known, and they count nowhere: draw slices (SliceSampler), whose rows hold each other's next "
                "observations, or keep them (compact_obs=False)"
            )
        return Rows(rows.batch, rows.work, both(rows.mask, ~unknown)), unknown

    def terminated(self, rows: Rows) -> Tensor:
        """Rows behind which there is no value; bool ``[*B]``."""
        self.entry(rows, "terminated")
        return marker(rows.batch, self.key("terminated"))

    def ends(self, rows: Rows) -> Tensor:
        """Last rows of runs; bool ``[*B]``."""
        return run_ends(rows.batch, **self.boundary_keys)

    @torch.no_grad()
    def target(self, rows: Rows, next_value: Tensor, unknown: Tensor | None) -> Tensor:
        """What each row's value is drawn to, ``[*B]``.

        Args:
            rows: the batch.
            next_value: ``[*B]``; any number where terminated.
            unknown: rows whose ``next_value`` is not known.
        """
        reward = self.entry(rows, "reward")
        if not reward.is_floating_point():
            key = self.key("reward")
            raise TypeError(f"batch[{key!r}] must be floating, got {reward.dtype}: cast it with .float()")
        reward = flat_column(reward, rows.batch, self.key("reward"))
        terminated = self.terminated(rows)
        steps = rows.batch.get(STEPS, None)
        if self.lmbda == 0.0:
            return td0_return_estimate(self._discount(rows.batch, steps), next_value, reward, terminated)
        if steps is not None:
            raise ValueError(
                f"batch[{STEPS!r}] says that its rewards span several rows, which a return along the run would "
                "count more than once: make_value_estimator('td0'), or leave the n-step transform out"
            )
        ends = self.ends(rows)
        if unknown is not None:  # what follows the row before is known, what follows that is not
            ends[..., :-1] |= unknown[..., 1:]
        return td_lambda_return_estimate(
            self.gamma, self.lmbda, next_value, reward, ends, terminated, time_dim=-1
        )

    def _discount(self, batch: TensorDictBase, steps: Tensor | None) -> Tensor | float:
        if steps is None:
            return self.gamma
        discount = batch.get(DISCOUNT, None)
        if discount is not None:
            return flat_column(discount, batch, DISCOUNT)
        return self.gamma ** flat_column(steps, batch, STEPS)

    def finish(self, rows: Rows, loss: Tensor, unknown: Tensor | None, error: Tensor) -> Tensor:
        """The reduced loss; writes the error of each row (0 where unknown) into the batch, as its priority."""
        error = error.detach().abs()
        rows.batch.set(self.key("priority"), error if unknown is None else error.masked_fill(unknown, 0.0))
        return self.reduce(rows, loss)

    def reduce(self, rows: Rows, loss: Tensor) -> Tensor:
        """The loss of each row ``[*B]`` as ``reduction`` says, weighted by the priority weights."""
        return reduced(loss, rows.mask, self.reduction, self._weights(rows))

    def _weights(self, rows: Rows) -> Tensor | None:
        key = self.key("priority_weight")
        there = rows.batch.get(key, None) is not None
        if self.use_prioritized_weights is False or not (there or self.use_prioritized_weights is True):
            return None
        return flat_column(require(rows.batch, key), rows.batch, key)


def rows_with_nan(column: Tensor, batch_dims: int) -> Tensor | None:
    """Rows ``[*B]`` in which a number is NaN; None if there is none, as far as one can tell on the host."""
    if not column.is_floating_point():
        return None
    if on_host(column) and bool(column.sum().isfinite()):
        return None
    return column.isnan().reshape(*column.shape[:batch_dims], -1).any(-1)


def here(batch: TensorDictBase, keys: Iterable[NestedKey]) -> TensorDict:
    """The named columns of the batch, in a tensordict of their own."""
    return TensorDict({key: require(batch, key) for key in keys}, batch_size=batch.batch_size)


def following(batch: TensorDictBase, keys: Iterable[NestedKey], unknown: Tensor | None) -> TensorDict:
    """The named columns one step later; the row's own number stands in for NaN and where ``unknown``."""
    columns = {key: fill_missing(require(batch, next_key(key)), require(batch, key), unknown) for key in keys}
    return TensorDict(columns, batch_size=batch.batch_size)
