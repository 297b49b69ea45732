"""The pool of a compact storage: keeps the next observations that cannot be read from the following row."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.columns.column import After, Column, Columns, TensorColumn, differ, put_rows
from flatroll.buffers.index.fragments import NONE, Fragments
from flatroll.buffers.index.ring import Array
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.layout.final import Final
from flatroll.layout.keys import NEXT_KNOWN, NestedKey, next_key
from flatroll.layout.transfers import upload


def check_final_covers(row: Tensor, ends: Tensor, columns: Columns) -> None:
    """Raise ValueError if a run's last row (``ends``, bool ``[N]``) has a known next observation that is not
    in ``final``, whose row numbers are ``row``."""
    needed = ends.clone()
    needed[row] = False
    known = columns.get(NEXT_KNOWN)
    if known is not None:
        needed &= known.reshape(-1)

    if bool(needed.any()):
        raise ValueError(
            f"row {int(needed.nonzero()[0])} ends a run, and its next observation is neither in the batch nor in "
            "final: pass the collector.final that came with this batch"
        )


def next_columns(columns: Columns, final: Final, at: Tensor | None = None) -> Columns:
    """Next observations of the rows ``at`` (int64 ``[M]``, default: all), by root key: those of ``final`` (checked)
    at its rows, else the row after.

    The last row, if it is not among them, and rows whose next observation the env hid, get NaN (their own
    observation where the dtype has no NaN).
    """
    result: Columns = {}
    known = columns.get(NEXT_KNOWN)
    assert final.row is not None
    for root, value in final.next.items():
        column = columns[root]
        if at is None:
            rows = torch.arange(len(column), device=column.device)
        else:
            rows = at

        following = column.index_select(0, (rows + 1).clamp_(max=len(column) - 1))

        hidden = rows == len(column) - 1
        if known is not None:
            hidden = hidden | ~known.reshape(-1).index_select(0, rows)
        fill = column.index_select(0, rows)
        if column.is_floating_point():
            fill = torch.full_like(following, torch.nan)
        following = torch.where(hidden.view(-1, *[1] * (column.ndim - 1)), fill, following)

        # The indices of final's rows within `rows`, which contains them all in ascending order.
        places = final.row if at is None else torch.searchsorted(rows, final.row)
        put_rows(following, places, value)
        result[root] = following
    return result


class NextPool:
    """Stores the next observations that no stored row holds, one entry each, and reads them back.

    A row's next observation is the observation of the row that continues it, if that agrees bit by bit;
    otherwise it is kept here. Reading is therefore always exact, whatever the batches contain.

    Args:
        pairs: root keys kept once.

    Attributes:
        next_keys: the key of the next observation, by root key.
        entries: the columns of the pool, by root key.
        lossy: those that may not give back what they were given, each as an empty column to try rows on.
        plain: whether all of them are tensors in host memory.
        row_bytes: bytes of one entry of each, int64.
    """

    def __init__(self, pairs: list[NestedKey]) -> None:
        self.pairs = pairs
        self.next_keys: dict[NestedKey, NestedKey] = {key: next_key(key) for key in pairs}
        self.entries: dict[NestedKey, Column] = {}
        self.lossy: dict[NestedKey, Column] = {}
        self.plain = False
        self.row_bytes: Array = NONE
        self._room = 0  # entries that the columns have room for, at least

    def allocate(self, columns: Mapping[NestedKey, Column], own: Collection[NestedKey] = ()) -> None:
        """Create empty pool columns of the same kinds as the storage's ``columns``; those of ``own`` may round."""
        self.entries = {key: columns[key].pool() for key in self.pairs}
        self.lossy = {key: columns[key].pool() for key in self.pairs if key in own}
        self.plain = all(
            type(column) is TensorColumn and column.data.is_cpu and not column.dtype.is_complex
            for column in self.entries.values()
        )
        self.row_bytes = np.array([column.value_bytes for column in self.entries.values()], np.int64)

    def cuts(self, columns: Columns, final: Final | None) -> Tensor:
        """Return where the next observation differs from the following row's observation; bool ``[N]``."""
        first = columns[self.pairs[0]]
        cut = torch.zeros(len(first), dtype=torch.bool, device=first.device)
        if final is not None and final.row is not None:
            cut[final.row] = True

        for key, next_name in self.next_keys.items():
            later = columns.get(next_name)
            if later is not None and len(cut) > 1:
                # row i is cut if its next observation is not the observation of row i + 1
                cut[:-1].logical_or_(differ(later[:-1], columns[key][1:]))
        return cut

    def tails(self, columns: Columns, final: Final | None, lasts: Array) -> Columns:
        """Next observations of the rows ``lasts`` (int64 ``[F]``), by root key: ``[F, *obs]``."""
        at = upload(torch.from_numpy(lasts), columns[self.pairs[0]].device)
        tails: Columns = {} if final is None else next_columns(columns, final, at)
        for key, next_name in self.next_keys.items():
            if key not in tails:
                tails[key] = columns[next_name].index_select(0, at)
        return tails

    def compare_heads(
        self,
        index: TrajectoryIndex,
        fragments: Fragments,
        before: Array,
        heads: Mapping[NestedKey, Tensor],
        tails: Columns,
        keys: Collection[NestedKey],
    ) -> Array:
        """Return which fragments begin with the next observation of the row that they continue; int64 ``[F]``: 1 if
        they do, -1 if one of ``keys`` differs, else 0.

        Args:
            index, fragments, before: see `Storage.keep_next`.
            heads: the batch's columns ``[N, *obs]``, by root key.
            tails: the next observations ``[F, *obs]`` of its fragments' last rows, by root key.
        """
        agree = np.zeros(len(before), np.int64)
        inner = np.flatnonzero(before < -1)  # fragments that continue fragment -2 - before of the same batch
        if len(inner):
            at = torch.from_numpy(-2 - before[inner])
            ends = {key: tails[key].index_select(0, upload(at, tails[key].device)) for key in self.pairs}
            agree[inner] = self._compare_values(ends, heads, fragments.firsts[inner], keys)

        # Fragments that continue a stored chain: its last next observation is in the pool.
        outer = np.flatnonzero(before >= 0)
        if len(outer):
            entries = torch.from_numpy(index.tail_entries(before[outer]))
            ends = {key: self.entries[key].take(entries) for key in self.pairs}
            firsts = fragments.firsts[outer]

            if self.lossy:
                # stored entries were rounded, so round the new rows as well before comparing
                at = torch.from_numpy(firsts)
                heads = {key: heads[key].index_select(0, upload(at, heads[key].device)) for key in self.pairs}

                for key, column in self.lossy.items():
                    slots = torch.arange(len(outer))
                    column.grow(len(outer))
                    column.put(slots, heads[key])
                    heads[key] = column.take(slots)
                firsts = np.arange(len(outer))

            agree[outer] = self._compare_values(ends, heads, firsts, keys)
        return agree

    def place(
        self,
        index: TrajectoryIndex,
        fragments: Fragments,
        before: Array,
        agree: Array,
        tails: Columns,
        first: int,
    ) -> tuple[Array, Array]:
        """Store next observations that no row will hold (`Storage.keep_next`); :meth:`compare_heads` gave ``agree``."""
        pool, kept, released = index.keep(before, agree)

        # The remaining tails get free entries, which become readable once the rows are published.
        taken = pool[kept]
        size = index.pool_size
        if size > self._room:
            for column in self.entries.values():
                column.grow(size)
            self._room = size

        if self.plain and all(tails[key].is_cpu and tails[key].is_contiguous() for key in self.pairs):
            from flatroll.kernels.rows.gather import scatter  # numba

            source = np.array([tails[key].data_ptr() for key in self.pairs], np.int64)
            target = np.array([values.data_ptr() for values in self.tensors], np.int64)
            scatter(source, target, self.row_bytes, len(fragments.lasts), kept, taken)
            return pool, released

        where = torch.from_numpy(taken)
        at = torch.from_numpy(kept)
        # Each observation follows the last row of its fragment: columns that share frames look there.
        slots = torch.from_numpy((first + fragments.lasts[kept]) % index.capacity)
        after = After(torch.arange(len(kept)), slots)
        for key, column in self.entries.items():
            column.put(where, tails[key].index_select(0, upload(at, tails[key].device)), after)
        return pool, released

    @property
    def tensors(self) -> list[Tensor]:
        """The entries of each of ``pairs``, if they are `plain`; growing replaces them."""
        columns: list[Any] = [self.entries[key] for key in self.pairs]
        return [column.data for column in columns]

    def _compare_values(
        self,
        tails: Columns,
        heads: Mapping[NestedKey, Tensor],
        firsts: Array,
        keys: Collection[NestedKey],
    ) -> Array:
        """Compare next observations ``tails[key]`` with rows ``heads[key][firsts]``, see :meth:`compare_heads`."""
        device = heads[self.pairs[0]].device
        at = upload(torch.from_numpy(firsts), device)
        unlike, wrong = torch.zeros((2, len(firsts)), dtype=torch.bool, device=device)

        for key in self.pairs:
            different = differ(tails[key].to(device), heads[key].index_select(0, at))
            if key in keys:
                unlike |= different
            else:
                wrong |= different

        return np.where(unlike.numpy(force=True), -1, ~wrong.numpy(force=True))
