"""What a batch says about its trajectories, read once when it is stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.index.ring import Array
from flatroll.layout.keys import DONE, IS_INIT, MASK, STEP_COUNT, TRAJ_IDS, NestedKey, missing_marker

Batch: TypeAlias = TensorDictBase | Mapping[NestedKey, Tensor]

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class BoundaryKeys:
    """Names of the columns that tell trajectories apart; those a batch lacks take no part."""

    is_init: NestedKey = IS_INIT
    done: NestedKey = DONE
    traj: NestedKey = TRAJ_IDS
    step_count: NestedKey = STEP_COUNT

    @classmethod
    def probe(
        cls,
        batch: TensorDictBase,
        *,
        traj_key: NestedKey | None = None,
        end_key: NestedKey | None = None,
        init_key: NestedKey = IS_INIT,
    ) -> "BoundaryKeys":
        """The given names; ids by default under ``("collector", "traj_ids")``, or ``"episode"`` if only that is
        in ``batch``; ends under ``("next", "done")``."""
        if traj_key is None:
            only_episode = batch.get(TRAJ_IDS, None) is None and batch.get("episode", None) is not None
            traj_key = "episode" if only_episode else TRAJ_IDS
        return cls(is_init=init_key, done=DONE if end_key is None else end_key, traj=traj_key)


class Runs(NamedTuple):
    """The fragments of one batch, one entry per fragment, in host memory.

    ``firsts`` are row numbers within the batch; ``joined`` is True where a fragment goes on within the run of
    the fragment before it. Columns the batch lacks are empty arrays, or of False.
    """

    rows: int
    firsts: Array
    lasts: Array
    joined: Array
    ids: Array
    init: Array
    done: Array
    step_first: Array
    step_last: Array

    @classmethod
    def of(cls, batch: Batch, keys: BoundaryKeys, cuts: Tensor | None = None) -> "Runs":
        """Read the markers of ``batch`` (``[N]``, or its columns by key, which is faster): runs end where
        `layout.run_ends` says. ``cuts`` (bool ``[N]``) ends fragments inside runs as well.

        Raises:
            KeyError: the batch has no marker at all.
            TypeError: a marker has the wrong dtype.
            ValueError: a marker has the wrong shape.
        """
        from flatroll.kernels.rows.run_marks import fragments  # numba

        done, init = _flags(batch, keys.done), _flags(batch, keys.is_init)
        ids, step = _integers(batch, keys.traj), _integers(batch, keys.step_count)
        there = ids if ids is not None else done if done is not None else init
        if there is None:
            present = batch.keys(True, True) if isinstance(batch, TensorDictBase) else batch.keys()
            error = missing_marker(keys.is_init, present)
            raise KeyError(
                f"{error.args[0]}. Any one of {keys.is_init!r}, {keys.done!r}, {keys.traj!r} would do"
            )
        rows = there.shape[0]
        columns = (done, init, ids, step, _flags(batch, MASK), None if cuts is None else _host(cuts))
        whole, marks = np.empty((5, rows), np.int64), np.empty((3, rows), np.bool_)
        count = fragments(rows, *(0 if c is None else c.data_ptr() for c in columns), whole, marks)
        firsts, lasts, names, step_first, step_last = whole[:, :count]
        joined, begun, ended = marks[:, :count]
        if ids is None:
            names = _NONE
        if step is None:
            step_first = step_last = _NONE
        return cls(rows, firsts, lasts, joined, names, begun, ended, step_first, step_last)


def _flags(batch: Batch, key: NestedKey) -> Tensor | None:
    """A bool marker of ``batch``, contiguous in host memory; None if there is none."""
    column: Tensor | None = batch.get(key, None)
    if column is None:
        return None
    if column.dtype is not torch.bool:
        raise TypeError(f"batch[{key!r}] must be bool, got {column.dtype}: cast it with .bool()")
    return _host(_checked(column, key))


def _integers(batch: Batch, key: NestedKey) -> Tensor | None:
    """An integer marker of ``batch`` as int64, contiguous in host memory; None if there is none."""
    column: Tensor | None = batch.get(key, None)
    if column is None:
        return None
    if column.dtype is not torch.int64:
        if column.is_floating_point() or column.is_complex() or column.dtype is torch.bool:
            raise TypeError(f"batch[{key!r}] must be an integer column, got {column.dtype}")
        column = column.to(torch.int64)
    return _host(_checked(column, key))


def _checked(column: Tensor, key: NestedKey) -> Tensor:
    if column.numel() != column.shape[0]:
        raise ValueError(
            f"batch[{key!r}] must have one number per row, got {column.numel()} for {column.shape[0]} rows"
        )
    return column


def _host(column: Tensor) -> Tensor:
    return column if column.is_cpu and column.is_contiguous() else column.cpu().contiguous()
