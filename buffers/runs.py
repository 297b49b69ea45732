"""What a batch says about its trajectories, read once when it is stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.ring import Array
from flatroll.layout.boundaries import end_runs
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


@dataclass(frozen=True, slots=True)
class Runs:
    """The fragments of one batch, one entry per fragment, in host memory.

    ``firsts`` are row numbers within the batch; ``joined`` is True where a fragment goes on within the run of
    the fragment before it. Columns the batch lacks are empty arrays.
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
        """Read the markers of ``batch`` (``[N]``, or its columns by key, which is faster); `layout.run_ends` says
        where runs end. ``cuts`` (bool ``[N]``) ends fragments inside runs as well.

        Raises:
            KeyError: the batch has no marker at all.
            TypeError: a marker has the wrong dtype.
            ValueError: a marker has the wrong shape.
        """
        done, init = _flags(batch, keys.done), _flags(batch, keys.is_init)
        ids, step = _integers(batch, keys.traj), _integers(batch, keys.step_count)
        there = next((column for column in (done, init, ids) if column is not None), None)
        if there is None:
            present = batch.keys(True, True) if isinstance(batch, TensorDictBase) else batch.keys()
            error = missing_marker(keys.is_init, present)
            raise KeyError(
                f"{error.args[0]}. Any one of {keys.is_init!r}, {keys.done!r}, {keys.traj!r} would do"
            )
        rows = len(there)
        run_end = np.zeros(rows, np.bool_) if done is None else done.copy()
        end_runs(run_end, init, ids, _flags(batch, MASK))
        lasts = np.flatnonzero(run_end if cuts is None else run_end | cuts.numpy(force=True))
        firsts = np.empty_like(lasts)
        firsts[0] = 0
        np.add(lasts[:-1], 1, out=firsts[1:])
        unset = np.zeros(len(firsts), np.bool_)
        joined = unset
        if cuts is not None:
            joined = ~run_end[firsts - 1]
            joined[0] = False
        return cls(
            rows=rows,
            firsts=firsts,
            lasts=lasts,
            joined=joined,
            ids=_NONE if ids is None else ids[firsts],
            init=unset if init is None else init[firsts],
            done=unset if done is None else done[lasts],
            step_first=_NONE if step is None else step[firsts],
            step_last=_NONE if step is None else step[lasts],
        )


def _column(batch: Batch, key: NestedKey) -> Array | None:
    """A marker of ``batch`` as a flat host array; None if there is none."""
    column: Tensor | None = batch.get(key, None)
    if column is None:
        return None
    rows = column.shape[0]
    if column.numel() != rows:
        raise ValueError(f"batch[{key!r}] must have one number per row, got {column.numel()} for {rows} rows")
    values: Array = column.numpy(force=True).reshape(rows)
    return values


def _flags(batch: Batch, key: NestedKey) -> Array | None:
    values = _column(batch, key)
    if values is not None and values.dtype != np.bool_:
        raise TypeError(f"batch[{key!r}] must be bool, got {batch[key].dtype}: cast it with .bool()")
    return values


def _integers(batch: Batch, key: NestedKey) -> Array | None:
    values = _column(batch, key)
    if values is None:
        return None
    if values.dtype.kind not in "iu":
        raise TypeError(f"batch[{key!r}] must be an integer column, got {values.dtype}")
    return values.astype(np.int64, copy=False)
