"""Splits a batch into fragments: consecutive rows of one trajectory, found from the batch's markers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.index.ring import Array
from flatroll.disk.state_tree import damaged
from flatroll.layout.keys import DONE, IS_INIT, MASK, STEP_COUNT, TRAJ_IDS, NestedKey, missing_marker

NONE: Array = np.zeros(0, np.int64)
#: Addresses of columns of observations and of next observations, and bytes per row; int64 ``[K]`` each.
Pairs: TypeAlias = tuple[Array, Array, Array]
_NO_PAIRS: Pairs = NONE, NONE, NONE
_NAMES = ("is_init", "done", "traj", "step_count")  # fields of BoundaryKeys with a single key
Batch: TypeAlias = TensorDictBase | Mapping[NestedKey, Tensor]


@dataclass(frozen=True, slots=True)
class BoundaryKeys:
    """Names the columns that mark trajectory boundaries; columns that a batch lacks are ignored.

    A trajectory ends where ``done`` or one of ``more_done`` is True. With ``in_order``, rows of a run whose
    ``step_count`` is not consecutive are an error, since slices would join them.
    """

    is_init: NestedKey = IS_INIT
    done: NestedKey = DONE
    traj: NestedKey = TRAJ_IDS
    step_count: NestedKey = STEP_COUNT
    more_done: tuple[NestedKey, ...] = ()
    in_order: bool = True

    @classmethod
    def probe(
        cls,
        batch: TensorDictBase,
        *,
        traj_key: NestedKey | None = None,
        end_key: NestedKey | None = None,
        init_key: NestedKey = IS_INIT,
    ) -> "BoundaryKeys":
        """Return the given names; without ``traj_key``, ``("collector", "traj_ids")``, or ``"episode"`` if
        ``batch`` has only that; without ``end_key``, ``("next", "done")``."""
        if traj_key is None:
            only_episode = batch.get(TRAJ_IDS, None) is None and batch.get("episode", None) is not None
            traj_key = "episode" if only_episode else TRAJ_IDS
        if end_key is None:
            end_key = DONE
        return cls(is_init=init_key, done=end_key, traj=traj_key)

    def to_plain(self) -> dict[str, Any]:
        """Return the names as plain values, which a state holds."""
        names = {name: getattr(self, name) for name in _NAMES}
        return {**names, "more_done": list(self.more_done), "in_order": self.in_order}

    @classmethod
    def from_plain(cls, plain: Any) -> "BoundaryKeys":
        """Invert :meth:`to_plain`; ValueError if ``plain`` is not valid."""
        more = plain.get("more_done") if isinstance(plain, dict) else None
        if not isinstance(more, list) or plain.keys() != {*_NAMES, "more_done", "in_order"}:
            raise damaged("its markers have other names")

        for key in (*more, *(plain[name] for name in _NAMES)):
            parts = key if isinstance(key, tuple) else (key,)
            if not parts or not all(isinstance(part, str) for part in parts):
                raise damaged(f"one of its markers is named {key!r}")
        if type(plain["in_order"]) is not bool:
            raise damaged(f"its entry in_order is {plain['in_order']!r:.40}, not a bool")

        return cls(**{**plain, "more_done": tuple(more)})


class Fragments(NamedTuple):
    """The F fragments of a batch, in host memory. Columns that the batch lacks are empty, or all False.

    Attributes:
        rows: rows of the batch.
        firsts: int64 ``[F]``, first row of each fragment, as a number within the batch.
        lasts: int64 ``[F]``, last row of each fragment.
        joined: bool ``[F]``, whether a fragment continues the run of the previous one.
        ids: int64 ``[F]``, trajectory ids.
        init: bool ``[F]``, whether the first row is ``is_init``.
        done: bool ``[F]``, whether the last row is done.
        step_first: int64 ``[F]``, step count of the first row.
        step_last: int64 ``[F]``, step count of the last row.
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
    def read(
        cls, batch: Batch, keys: BoundaryKeys, cuts: Tensor | None = None, pairs: Pairs = _NO_PAIRS
    ) -> "Fragments":
        """Split ``batch`` (``[N]``, or its columns by key, which is faster) into fragments. They end where
        `layout.run_ends` ends a run, where ``cuts`` (bool ``[N]``) is True, and at rows whose next observations are not
        those of the row after (``pairs``).

        Raises:
            KeyError: the batch has no marker.
            TypeError: a marker has the wrong dtype.
            ValueError: a marker has the wrong shape, or a run's step counts do not go up by one (``keys.in_order``).
        """
        from flatroll.kernels.rows.run_marks import fragments  # numba

        done = _read_marker(batch, keys.done, True)
        init = _read_marker(batch, keys.is_init, True)

        for key in keys.more_done:
            further = _read_marker(batch, key, True)
            if done is None:
                done = further
            elif further is not None:
                done = done.view(-1) | further.view(-1)
        ids = _read_marker(batch, keys.traj, False)
        step = _read_marker(batch, keys.step_count, False)

        marker = ids
        if marker is None:
            marker = done
        if marker is None:
            marker = init
        if marker is None:
            if isinstance(batch, TensorDictBase):
                present = batch.keys(True, True)
            else:
                present = batch.keys()
            error = missing_marker(keys.is_init, present)
            raise KeyError(
                f"{error.args[0]}. Any one of {keys.is_init!r}, {keys.done!r}, {keys.traj!r} is enough"
            )

        rows = marker.shape[0]
        mask = _read_marker(batch, MASK, True)
        # The kernel reads columns by address; these variables keep the memory alive.
        cut = None if cuts is None else cuts.cpu().contiguous()
        columns = (done, init, ids, step, mask, cut)
        markers = tuple([0 if column is None else column.data_ptr() for column in columns])

        # One row per field; there are at most as many fragments as rows.
        numbers = np.empty((5, rows), np.int64)
        marks = np.empty((3, rows), np.bool_)
        count = fragments(rows, markers, pairs, keys.in_order, numbers, marks)

        if count < 0 and step is not None:
            before, now = step.view(-1)[-count - 1 : -count + 1].tolist()
            raise ValueError(
                f"row {-count} of the batch does not follow row {-count - 1} in its trajectory: {keys.step_count!r} is "
                f"{now} after {before}. Keep trajectories whole, or set {keys.is_init!r} or a new id where each begins"
            )

        firsts, lasts, names, step_first, step_last = numbers[:, :count]
        joined, first_init, last_done = marks[:, :count]

        if ids is None:
            names = names[:0]
        if step is None:
            step_first = step_first[:0]
            step_last = step_first
        return cls(rows, firsts, lasts, joined, names, first_init, last_done, step_first, step_last)


def _read_marker(batch: Batch, key: NestedKey, flags: bool) -> Tensor | None:
    """Return a marker of ``batch``, contiguous in host memory: bool if ``flags``, else int64; None if missing."""
    column: Tensor | None = batch.get(key, None)
    if column is None:
        return None

    if flags and column.dtype is not torch.bool:
        raise TypeError(f"batch[{key!r}] must be bool, got {column.dtype}: cast it with .bool()")
    if not flags and column.dtype is not torch.int64:
        if column.is_floating_point() or column.is_complex() or column.dtype is torch.bool:
            raise TypeError(f"batch[{key!r}] must be an integer column, got {column.dtype}")
        column = column.to(torch.int64)

    if column.numel() != column.shape[0]:
        raise ValueError(
            f"batch[{key!r}] must have one number per row, got {column.numel()} for {len(column)} rows"
        )

    if column.is_cpu and column.is_contiguous():
        return column
    return column.cpu().contiguous()
