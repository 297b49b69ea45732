"""The rule of n-step transitions: rewards summed over several rows, next entries taken from the last of them."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from flatroll.buffers.columns.base import Columns, take_rows
from flatroll.buffers.storages.next_pool import check_final_covers, final_columns, next_columns
from flatroll.layout.checks import whole_number
from flatroll.layout.delta import decode_delta
from flatroll.layout.keys import (
    DELTA,
    MASK,
    NEXT,
    NEXT_KNOWN,
    NestedKey,
    as_tuple,
    missing_marker,
    next_key,
    observation_keys,
)

#: The named columns of the rows that stand at given places (int64).
Get: TypeAlias = Callable[[Tensor, Sequence[NestedKey]], Columns]

STEPS, GAMMA, NONTERMINAL = "steps_to_next_obs", "gamma", "nonterminal"


class NStep:
    """The rule behind `MultiStep` and `MultiStepTransform`; where the rows ahead stand is for them to say."""

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        reward_keys: NestedKey | Sequence[NestedKey] | None,
        done_key: NestedKey | None,
        mask_key: NestedKey | None,
    ) -> None:
        if not 0.0 <= float(gamma) <= 1.0:
            raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
        self.n_steps = n_steps
        self.gamma = float(gamma)
        named = ["reward"] if reward_keys is None else reward_keys
        self.reward_keys = [_under_next(key) for key in ([named] if isinstance(named, str) else named)]
        self.done_key = _under_next("done" if done_key is None else done_key)
        self.mask_key = MASK if mask_key is None else mask_key
        self._checked: frozenset[NestedKey] | None = None

    @property
    def n_steps(self) -> int:
        """Rows that a return looks ahead, itself included; may be set at any time."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, n_steps: int) -> None:
        whole_number("n_steps", n_steps)
        self._n_steps = n_steps

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_steps={self.n_steps}, gamma={self.gamma})"

    def written(self, columns: Columns, ahead: Tensor, get: Get) -> Columns:
        """The changed columns; see :class:`MultiStepTransform` for what is in them.

        Args:
            columns: of N rows.
            ahead: int64 ``[N, n]``: where each row and the rows after it in its trajectory stand, -1 for none.
            get: columns of the rows that stand at given places.
        """
        if STEPS in columns:
            raise ValueError(
                f"the rows have {STEPS!r}: they are n-step transitions already, take one of the two transforms out"
            )
        steps, last, rewards = self._summed(columns, ahead, get)
        moved = [key for key in columns if as_tuple(key)[0] == NEXT and key not in rewards]
        deltas = {key: _key(*as_tuple(key)[2:]) for key in moved if as_tuple(key)[:2] == DELTA}
        known = [NEXT_KNOWN] if NEXT_KNOWN in columns else []
        reached = get(last, [*moved, *known, *deltas.values()])
        changed = {key: column for key, column in columns.items() if key not in deltas}
        for key, root in deltas.items():  # a difference to another row's observation
            changed[next_key(root)] = decode_delta(reached[root], reached[key])
        for key in (*moved, *known):
            if key not in deltas:
                changed[key] = reached[key]
        for key in (*rewards, *([self.done_key] if self.done_key in columns else [])):
            *path, name = as_tuple(key)
            changed[(*path, f"original_{name}")] = columns[key]
        changed |= rewards
        done = changed.get(self.done_key)
        going = torch.ones_like(steps, dtype=torch.bool) if done is None else ~done.reshape(-1, 1)
        if (mask := columns.get(self.mask_key)) is not None:
            going &= mask.reshape(-1, 1)
        wide = torch.promote_types(next(iter(rewards.values())).dtype, torch.float32)
        changed[STEPS] = steps
        changed[GAMMA] = (self.gamma ** steps.double()).to(wide)
        changed[NONTERMINAL] = going
        self._check_next(changed, len(steps))
        return changed

    def _summed(self, columns: Columns, ahead: Tensor, get: Get) -> tuple[Tensor, Tensor, Columns]:
        """Steps ``[N, 1]``, the place ``[N]`` of the last row of each window, and the summed rewards."""
        for key in self.reward_keys:
            if key not in columns:
                raise missing_marker(key, columns)
        rows, n = ahead.shape
        device = columns[self.reward_keys[0]].device
        ahead = ahead.to(device)
        used = ahead >= 0
        ended = self.done_key in columns
        window = get(
            torch.where(used, ahead, ahead[:, :1]).flatten(),
            [*self.reward_keys, *([self.done_key] if ended else [])],
        )
        if ended:
            done = _flag(window, self.done_key, rows * n).view(rows, n)
            used[:, 1:] &= ~done[:, :-1]
        used = used.long().cumprod(1).bool()
        steps = used.sum(1, keepdim=True)
        rewards: Columns = {}
        for key in self.reward_keys:
            each = window[key].reshape(rows, n, *window[key].shape[1:])
            dtype = each.dtype if each.is_floating_point() else torch.float32
            weight = (self.gamma ** torch.arange(n, device=device, dtype=torch.float64)).to(dtype)
            shape = (-1, n, *[1] * (each.ndim - 2))
            rewards[key] = torch.where(used.view(shape), each * weight.view(shape), 0.0).sum(1)
        return steps, ahead.gather(1, steps - 1).squeeze(1), rewards

    def _check_next(self, columns: Columns, rows: int) -> None:
        """ValueError unless every observation has its next one; looked at once per set of entries."""
        keys = frozenset(columns)
        if keys == self._checked:
            return
        roots = observation_keys(TensorDict(dict(columns), [rows]))
        lacking = [next_key(key) for key in roots if next_key(key) not in columns]
        if lacking or not roots:
            raise ValueError(
                f"n-step transitions need the next observation of every row, and there is no "
                f"{lacking[0] if lacking else ('next', '<observation>')!r}: store compact batches with "
                "LazyTensorStorage(..., compact_obs=True) and extend(batch, final=collector.final), or call "
                "MultiStep.forward(batch, final=collector.final)"
            )
        self._checked = keys

    def within(self, td: TensorDictBase, final: TensorDictBase | None, ends: Tensor) -> TensorDictBase:
        """The rule over a flat batch, looking ahead no further than the run of each row."""
        columns: Columns = dict(td.items(True, True))
        for key in td.keys(True, True, is_leaf=is_leaf_nontensor):
            if key not in columns and as_tuple(key)[0] == NEXT:
                raise TypeError(
                    f"batch[{key!r}] is no tensor and cannot be moved: leave it out with .exclude"
                )
        rows = len(td)
        if final is not None:
            row, kept = final_columns(final, columns, rows)
            check_final_covers(row, ends, columns)
            columns |= {next_key(key): column for key, column in next_columns(columns, row, kept).items()}
        at = torch.arange(rows, device=ends.device)
        lasts = ends.nonzero().squeeze(1)
        ahead = at[:, None] + torch.arange(self.n_steps, device=ends.device)
        ahead.masked_fill_(ahead > lasts[torch.searchsorted(lasts, at)][:, None], -1)

        def get(places: Tensor, keys: Sequence[NestedKey]) -> Columns:
            return {key: take_rows(columns[key], places.to(columns[key].device)) for key in keys}

        changed = self.written(columns, ahead, get)
        result = td.clone(recurse=False).exclude(DELTA)
        for key, column in changed.items():
            result.set(key, column)
        return result


def _key(*names: str) -> NestedKey:
    return names[0] if len(names) == 1 else names


def _under_next(key: NestedKey) -> tuple[str, ...]:
    names = as_tuple(key)
    return names if names[0] == NEXT and len(names) > 1 else next_key(key)


def _flag(columns: Columns, key: NestedKey, rows: int) -> Tensor:
    """The bool column ``key``, flat."""
    column = columns[key]
    if column.dtype is not torch.bool:
        raise TypeError(f"batch[{key!r}] must be bool, got {column.dtype}: cast it with .bool()")
    if column.numel() != rows:
        raise ValueError(f"batch[{key!r}] must have one value per row, got {tuple(column.shape[1:])} per row")
    return column.reshape(-1)
