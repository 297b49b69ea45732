"""From the cells of a window to a flat batch."""

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.boundaries import run_ends, run_starts
from flatroll.layout.delta import check_delta, encode_delta
from flatroll.layout.keys import (
    DELTA,
    DONE,
    HAS_STATE,
    NEXT_KNOWN,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
)
from flatroll.rollouts.batch_columns import ColumnKeys
from flatroll.rollouts.policies import Columns
from flatroll.rollouts.window import DEAD, Window
from flatroll.wrappers.arrays import Array, select


class FlatLayout:
    """Lays chosen cells of a window out as one batch, trajectory after trajectory.

    Args:
        keys: the columns.
        num_envs: E.
        device: where the window's columns are.
        dense_finals: whether the window has the true next observation of every cell in columns of its own.
    """

    def __init__(self, keys: ColumnKeys, num_envs: int, device: torch.device, dense_finals: bool) -> None:
        self._keys = keys
        self._num_envs = num_envs
        self._device = device
        self._dense_finals = dense_finals

    def lay_out(self, window: Window, mask: Array, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """The True cells of the window, and the batch's *final* if compact."""
        keys = self._keys
        host_cells = window.cells(mask)
        cells = torch.from_numpy(host_cells).to(self._device, non_blocking=True)
        columns = self._gather(window, cells)
        if not keys.has_ids and self._num_envs > 1:
            # Nothing else tells a row that goes on from another env's row that was cut.
            starts = torch.from_numpy(np.diff(host_cells % self._num_envs, prepend=-1) != 0)
            columns[keys.init] |= starts.to(self._device, non_blocking=True).unsqueeze(-1)
        following = {key: self._next_obs(window, key, cells, host_cells, columns) for key in keys.obs}
        batch = TensorDict({}, batch_size=[len(host_cells)], device=None)
        for key, column in columns.items():
            batch.set(key, column)
        for key in keys.counts:
            batch.set(next_key(key), columns[key] + 1)
        if keys.strided:
            self._thin_states(batch)
        for key in keys.deltas:
            column = following.pop(key)
            delta = encode_delta(columns[key], column, keys.delta_dtype)
            check_delta(delta, columns[key], column, key)
            batch.set((*DELTA, *as_tuple(key)), delta)
        if compact:
            return self.compact(batch, following)
        for key, column in following.items():
            batch.set(next_key(key), column)
        return batch, None

    def _thin_states(self, batch: TensorDict) -> None:
        """Zeros for the states of rows that are not to keep theirs; the first rows of runs always do."""
        keys = self._keys
        kept = batch.get(HAS_STATE) | run_starts(batch, is_init_key=keys.init, traj_key=keys.traj)
        batch.set(HAS_STATE, kept)
        for key in keys.states:
            state = batch.get(key)
            state.masked_fill_(~kept.view(-1, *(1,) * (state.ndim - 1)), 0)
            batch.exclude(next_key(key), inplace=True)

    def compact(self, batch: TensorDict, following: Columns | None = None) -> tuple[TensorDict, TensorDict]:
        """The batch without what its own later rows say, and its *final*: the observations no row holds."""
        keys = self._keys
        if following is None:
            following = {key: batch.get(next_key(key)) for key in keys.obs if key not in keys.deltas}
        ends = run_ends(batch, is_init_key=keys.init, traj_key=keys.traj)
        known = batch.get(NEXT_KNOWN, None)
        rows = (ends if known is None else ends & known).nonzero().squeeze(-1)
        final = TensorDict({"row": rows}, batch_size=[len(rows)])
        for key, column in following.items():
            final.set(next_key(key), column.index_select(0, rows))
        repeated = [*keys.obs, *keys.counts, *keys.states]
        return batch.exclude(*(next_key(key) for key in repeated)), final

    def _gather(self, window: Window, cells: Tensor) -> Columns:
        """All columns but the next observations, in the shapes of the layout contract."""
        columns: Columns = {}
        skipped: set[NestedKey] = {DEAD, *(next_key(key) for key in self._keys.obs)}
        for key in window.columns:
            if key in skipped:
                continue
            column = window.gather(key, cells)
            columns[key] = column.unsqueeze(-1) if key in self._keys.trailing else column
        columns[DONE] = columns[TERMINATED] | columns[TRUNCATED]
        return columns

    def _next_obs(
        self, window: Window, key: NestedKey, cells: Tensor, host_cells: Array, columns: Columns
    ) -> Tensor:
        if self._dense_finals:
            column = window.gather(next_key(key), cells)
        else:
            column = window.gather(key, cells, shift=1)
            window.patch_finals(key, host_cells, column)
        if NEXT_KNOWN in columns:
            known = columns[NEXT_KNOWN]
            if column.is_floating_point():
                column.masked_fill_(~known.view(-1, *(1,) * (column.ndim - 1)), torch.nan)
            else:
                column = select(known, column, columns[key])
        return column
