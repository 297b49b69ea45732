"""What a batch says about its trajectories, read once when it is stored."""

from dataclasses import dataclass

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.ring import Array
from flatroll.layout.boundaries import run_ends
from flatroll.layout.keys import DONE, IS_INIT, STEP_COUNT, TRAJ_IDS, NestedKey

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
    def of(cls, batch: TensorDictBase, keys: BoundaryKeys, cuts: Tensor | None = None) -> "Runs":
        """Read the markers of ``batch``, ``[N]``; ``cuts`` (bool ``[N]``) ends fragments inside runs as well.

        Raises:
            KeyError: the batch has no marker at all.
            TypeError: a marker has the wrong dtype.
            ValueError: a marker has the wrong shape.
        """
        ends = run_ends(batch, is_init_key=keys.is_init, done_key=keys.done, traj_key=keys.traj)
        run_end = ends.numpy(force=True)
        lasts = np.flatnonzero(run_end if cuts is None else (ends | cuts).numpy(force=True))
        firsts = np.empty_like(lasts)
        firsts[0] = 0
        np.add(lasts[:-1], 1, out=firsts[1:])
        unset = np.zeros(len(firsts), np.bool_)
        if cuts is None:
            joined = unset
        else:
            joined = ~run_end[firsts - 1]
            joined[0] = False
        ids, step = _integers(batch, keys.traj), _integers(batch, keys.step_count)
        init, done = _column(batch, keys.is_init), _column(batch, keys.done)
        return cls(
            rows=len(run_end),
            firsts=firsts,
            lasts=lasts,
            joined=joined,
            ids=ids[firsts] if len(ids) else _NONE,
            init=unset if init is None else init[firsts],
            done=unset if done is None else done[lasts],
            step_first=step[firsts] if len(step) else _NONE,
            step_last=step[lasts] if len(step) else _NONE,
        )


def _column(batch: TensorDictBase, key: NestedKey) -> Array | None:
    """A marker of ``batch`` as a flat host array; None if there is none. `run_ends` has checked its shape."""
    column = batch.get(key, None)
    if column is None:
        return None
    values: Array = column.numpy(force=True).reshape(-1)
    return values


def _integers(batch: TensorDictBase, key: NestedKey) -> Array:
    values = _column(batch, key)
    if values is None:
        return _NONE
    if values.dtype.kind not in "iu":
        raise TypeError(f"batch[{key!r}] must be an integer column, got {values.dtype}")
    if len(values) != len(batch):
        raise ValueError(
            f"batch[{key!r}] must have one number per row, got {len(values)} for {len(batch)} rows"
        )
    return values.astype(np.int64, copy=False)
