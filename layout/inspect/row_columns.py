"""What the audit rules look at: the markers of a batch in one shape, and how a broken rule is reported."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.layout.boundaries import run_ends, starts_from
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    MASK,
    NEXT_KNOWN,
    REWARD,
    STEP_COUNT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    next_key,
)

Severity = Literal["error", "suspicious"]
WHOLE_BATCH = -1

#: What the contract fixes of each marker: the dims after the batch's, and the dtype.
CONTRACT: dict[NestedKey, tuple[tuple[int, ...], torch.dtype]] = {
    IS_INIT: ((1,), torch.bool),
    STEP_COUNT: ((1,), torch.int64),
    next_key(STEP_COUNT): ((1,), torch.int64),
    REWARD: ((1,), torch.float32),
    TERMINATED: ((1,), torch.bool),
    TRUNCATED: ((1,), torch.bool),
    DONE: ((1,), torch.bool),
    TRAJ_IDS: ((), torch.int64),
    MASK: ((), torch.bool),
    NEXT_KNOWN: ((), torch.bool),
}


@dataclass(frozen=True)
class Breach:
    """A rule that is broken: at which rows (of the batch, ascending), and what that means."""

    rule: str
    rows: Sequence[int]
    text: str
    severity: Severity = "error"


class Columns:
    """The real rows of a batch: each marker as ``[N]``, or None where it is missing or unusable."""

    def __init__(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> None:
        self.at = torch.arange(batch.shape[0], device=batch.device)
        mask = usable(batch, MASK)
        if mask is not None:
            self.at = mask.nonzero().squeeze(-1)
            batch = cast(TensorDictBase, batch[self.at])
        self.batch: TensorDictBase = batch
        self.keys = keys
        self.is_init, self.done = usable(batch, IS_INIT), usable(batch, DONE)
        self.terminated, self.truncated = usable(batch, TERMINATED), usable(batch, TRUNCATED)
        self.ids, self.step = usable(batch, TRAJ_IDS), usable(batch, STEP_COUNT)
        markers = {IS_INIT: self.is_init, DONE: self.done, TRAJ_IDS: self.ids}
        there = TensorDict(
            {key: column for key, column in markers.items() if column is not None}, batch.batch_size
        )
        self.marked = bool(there.keys())
        self.ends = run_ends(there) if self.marked else torch.ones_like(self.at, dtype=torch.bool)
        starts = starts_from(self.ends)
        # Only a slice sampler marks every run's first row; a collector's windows begin anywhere.
        self.sliced = self.is_init is not None and bool((self.is_init | ~starts).all())

    def rows(self, breaks: Tensor, shift: int = 0) -> list[int]:
        """Row numbers in the batch of the True entries (``shift=1``: of the rows after them)."""
        found: list[int] = self.at[breaks.nonzero().squeeze(-1) + shift].tolist()
        return found

    def pairs(self) -> list[tuple[NestedKey, Tensor, Tensor]]:
        """The observations that stand both at the root and under next, in one shape and dtype."""
        found = []
        for key in self.keys:
            now, later = self.batch.get(key, None), self.batch.get(next_key(key), None)
            if (
                now is not None
                and later is not None
                and now.shape == later.shape
                and now.dtype == later.dtype
            ):
                found.append((key, now, later))
        return found


def same(x: Tensor, y: Tensor) -> Tensor:
    """Rows at which two columns are equal, NaN equal to NaN: bool ``[N]``."""
    equal = x == y
    if x.is_floating_point():
        equal = equal | (x.isnan() & y.isnan())
    return equal.flatten(1).all(1) if equal.dim() > 1 else equal


def usable(batch: TensorDictBase, key: NestedKey) -> Tensor | None:
    """The marker ``key`` as ``[N]``; None if it is missing, of a wrong shape or kind of dtype."""
    column = batch.get(key, None)
    if column is None or column.shape not in (batch.batch_size, (*batch.batch_size, 1)):
        return None
    wants_bool = CONTRACT[key][1] is torch.bool
    if wants_bool != (column.dtype is torch.bool) or (not wants_bool and column.is_floating_point()):
        return None
    flat: Tensor = column.reshape(batch.batch_size)
    return flat


def whole(rule: str, text: str, severity: Severity = "error") -> Breach:
    """A breach of the batch as a whole."""
    return Breach(rule, [WHOLE_BATCH], text, severity)
