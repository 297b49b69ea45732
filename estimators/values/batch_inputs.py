"""What a value estimator reads of a batch besides values: reward, boundaries, discount, time."""

from collections.abc import Mapping
from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.estimators.functional.time_columns import factor_over
from flatroll.estimators.values.keyed import under_next
from flatroll.estimators.values.next_observations import Boundaries, beside
from flatroll.layout import run_ends
from flatroll.layout.keys import NEXT_KNOWN, REWARD, NestedKey, flat_column, marker, require

BootstrapMissing = Literal["error", "current", "mask"]


def reward_of(batch: TensorDictBase, key: NestedKey) -> Tensor:
    """The reward ``[*B, T, *F]``; one without feature dims gets a dim of 1.

    Raises:
        KeyError: there is none.
        TypeError: it is not floating.
    """
    reward = require(batch, key, REWARD)
    if not reward.is_floating_point():
        raise TypeError(f"batch[{key!r}] must be floating, got {reward.dtype}: cast it with .float()")
    return reward.unsqueeze(-1) if reward.shape == batch.batch_size else reward


def boundaries_of(
    batch: TensorDictBase, keys: Mapping[str, NestedKey], bootstrap_missing: BootstrapMissing
) -> Boundaries:
    """Where runs end, by :func:`flatroll.layout.run_ends`, and what is known behind them.

    Args:
        keys: names of ``is_init``, ``done``, ``terminated``, ``traj_ids`` and ``mask``.
        bootstrap_missing: ``"error"`` looks whether a bootstrapped observation is hidden.

    Raises:
        KeyError: a flag is missing.
        TypeError: a flag is not bool.
        ValueError: the env hid an observation, and nobody said what to do about it.
    """
    ends = run_ends(
        batch,
        is_init_key=keys["is_init"],
        done_key=under_next(keys["done"]),
        traj_key=keys["traj_ids"],
        mask_key=keys["mask"],
    )
    terminated = marker(batch, under_next(keys["terminated"]))
    if batch.get(NEXT_KNOWN, None) is None:
        return Boundaries(ends, terminated, None)
    unknown = ~marker(batch, NEXT_KNOWN) & ends & ~terminated
    if bootstrap_missing == "error" and bool(unknown.any()):
        rows = unknown.reshape(-1).nonzero().squeeze(-1)
        raise ValueError(
            f"the env hid the final observation of {rows.shape[0]} truncated rows (the first is row "
            f"{int(rows[0])}), so their next value is unknown: choose bootstrap_missing='current' (the "
            "value of the row's own observation) or 'mask' (leave the rows out), or collect from an env "
            "that reports final observations"
        )
    return Boundaries(ends, terminated, unknown)


def discount_over(
    gamma: float | Tensor, batch: TensorDictBase, steps_key: NestedKey, reward: Tensor
) -> float | Tensor:
    """``gamma``, to the power of the steps that each row spans where the batch says how many."""
    steps = batch.get(steps_key, None)
    if steps is None:
        return gamma
    spanned = beside(flat_column(steps, batch, steps_key).to(reward.dtype), reward)
    base = torch.as_tensor(gamma, dtype=reward.dtype, device=reward.device)
    return (factor_over("gamma", base, reward.shape, batch.batch_dims) if base.ndim else base) ** spanned


def time_last(batch: TensorDictBase, time_dim: int | None) -> tuple[TensorDictBase, int | None]:
    """The batch with its time dim last, and where that dim was if it was not there.

    Args:
        time_dim: the dim; None is the one named ``"time"``, else the last.

    Raises:
        ValueError: no such dim, or no dim at all.
    """
    last = batch.batch_dims - 1
    if last < 0:
        raise ValueError("the batch must have at least one batch dimension (time), got batch size []")
    dim = time_dim
    if dim is None and "time" in batch.names:
        dim = batch.names.index("time")
    if dim is None or dim in (last, -1):
        return batch, None
    if not -last - 1 <= dim < last:
        raise ValueError(f"time_dim must name a batch dim of {tuple(batch.batch_size)}, got {dim}")
    return batch.transpose(dim, last), dim % (last + 1)
