"""Checks that rows go on where the trajectory that their id names stopped."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.columns.base import Column, Columns, differ, put_rows, take_rows
from flatroll.buffers.index.ring import Array, Follow
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.storages.base import Links, Rows, Storage
from flatroll.layout.keys import NEXT, NEXT_KNOWN, OBSERVATION, STEP_COUNT, NestedKey, as_tuple, next_key

if TYPE_CHECKING:
    from flatroll.kernels.rows.gather import HostColumns

#: Entries under "next" that are facts about the step, not the state after it.
_OF_THE_STEP = {"reward", "done", "terminated", "truncated"}
_NONE = np.zeros(0, np.int64)
_LATEST = 256  # stored rows to look at for what holds of a column


def state_pairs(columns: Mapping[NestedKey, Tensor | Column]) -> list[NestedKey]:
    """List the root keys that ``"next"`` has too, with the same shape and dtype, such as "observation".

    >>> x = torch.zeros(3)
    >>> state_pairs({"pos": x, ("next", "pos"): x, ("next", "reward"): x, "reward": x})
    ['pos']
    """
    pairs = []
    for key, column in columns.items():
        names = as_tuple(key)
        if names[0] == NEXT or names[-1] in _OF_THE_STEP:
            continue
        later = columns.get(next_key(key))
        if later is not None and later.shape == column.shape and later.dtype == column.dtype:
            pairs.append(key)
    return pairs


def compared_keys(columns: Mapping[NestedKey, Column], loose: Collection[NestedKey]) -> tuple[NestedKey, ...]:
    """List the root keys, without ``loose``, by which a row is known to follow another: its observations.

    They are those under ``"observation"``; where there are none, the entries of more than one number that ``"next"``
    has too, and else all that it has. (Counters of two trajectories may agree, values of a network need not.)
    """
    pairs = [key for key in state_pairs(columns) if key not in loose and key != STEP_COUNT]
    named = [key for key in pairs if as_tuple(key)[0] == OBSERVATION]
    wide = [key for key in pairs if columns[key].shape.numel() > 1]
    return tuple(named or wide or pairs)


class LinkCheck:
    """Finds what the fragments of a batch continue, and compares their first rows with what should come next.

    Args:
        storage: where the rows are to be written.
        pool: the `NextPool` of a compact storage, else None.
        ring: the storage's index.
        rows: the batch.
    """

    def __init__(self, storage: Storage, pool: Any, ring: TrajectoryIndex, rows: Rows) -> None:
        assert rows.fragments is not None
        self.storage, self.pool, self.ring, self.rows = storage, pool, ring, rows
        self.fragments = rows.fragments
        self.before, self.slots = ring.link(rows.fragments)

    def links(self, plain: "HostColumns[NestedKey] | None", named: bool) -> Links:
        """Return the links, refused or cut where a row is not what the row before it says comes next.

        Args:
            plain: the storage's columns in host memory.
            named: see :meth:`settle`.
        """
        storage, pool, before, agree = self.storage, self.pool, self.before, _NONE
        if storage.compared[0] != len(storage.loose):
            columns = storage.columns
            if pool is not None:  # the pairs that are kept once
                columns = {name: columns[key] for key in pool.pairs for name in (key, next_key(key))}
            keys = compared_keys(columns, storage.loose)
            storage.compared = len(storage.loose), keys, tuple(map(next_key, keys))
        _, keys, names = storage.compared
        if pool is not None:
            agree = pool.agreeing(self.ring, self.fragments, before, self.rows.columns, self.rows.tails)
            unlike = np.flatnonzero(~(agree | self.fragments.joined) & (before != -1))
        else:
            unlike = self._unlike(keys, names, plain) if keys else _NONE
        if len(unlike):
            self.settle(keys, unlike, named)
        return Links(before, self.slots, agree)

    def _unlike(
        self,
        keys: tuple[NestedKey, ...],
        names: tuple[NestedKey, ...],
        plain: "HostColumns[NestedKey] | None",
    ) -> Array:
        """Return the fragments that differ, bit by bit, in one of ``keys``; of a storage that is not compact."""
        columns, fragments = self.rows.columns, self.fragments
        if plain is not None:
            links = self.slots, self.before, fragments.lasts, fragments.firsts, fragments.joined
            now, later = [columns[key] for key in keys], [columns[name] for name in names]
            found = plain.unlike(names, now, later, links)
            if found is not None:
                return found
        at = np.flatnonzero(self.before != -1)
        if not len(at):
            return at
        wrong: Array = np.zeros(len(at), np.bool_)
        for key in keys:
            said, came = self._said_and_came(key, at)
            wrong |= differ(said, came).numpy(force=True)
        return at[wrong]

    def settle(self, keys: tuple[NestedKey, ...], unlike: Array, named: bool) -> None:
        """Refuse the batch, or cut it, at the fragments ``unlike``.

        A key is trusted if all rows inside trajectories say the next row's value. One that is not trusted becomes
        ``loose``; where no row tells, trajectories are cut.

        Args:
            keys: those that may be compared.
            unlike: int64, numbers of fragments.
            named: whether the batch has ids of trajectories; else the trajectory is cut, which nothing forbids.

        Raises:
            ValueError: a fragment does not continue the trajectory that its id names.
        """
        for key in keys:
            wrong = unlike[self._false(key, unlike)] if len(unlike) else unlike
            if not len(wrong):
                continue
            trusted = self._trusted(key)
            if trusted is False:
                self.storage.loose.add(key)
                continue
            if trusted and named:
                row, traj = int(self.fragments.firsts[wrong[0]]), int(self.fragments.ids[wrong[0]])
                raise ValueError(
                    f"row {row} of the batch is of trajectory {traj} but does not continue it: its {key!r} is not "
                    f"what the last stored row of that id has as {next_key(key)!r}. Collectors that write into one "
                    "buffer need numbers of their own: Collector(..., writer=1). Observations that change between "
                    "two batches (normalised by what was seen so far, say) are to be changed by the inv of a "
                    "transform of the buffer, or in samples. Nothing was stored"
                )
            self.before[wrong] = self.slots[wrong] = -1

    def _false(self, key: NestedKey, at: Array) -> Array:
        """Which of the fragments ``at`` have another value than a next value that is known; bool."""
        said, came = self._said_and_came(key, at)
        false = _values_differ(said, came).numpy(force=True)
        stored, given = self.storage.columns.get(NEXT_KNOWN), self.rows.columns.get(NEXT_KNOWN)
        if stored is not None and given is not None:
            false &= self._rows_before(stored, given, at).reshape(-1).numpy(force=True)
        return np.asarray(false)

    def _said_and_came(self, key: NestedKey, at: Array) -> tuple[Tensor, Tensor]:
        """The next values that the fragments ``at`` should begin with, and their first values; both ``[n, ...]``."""
        came = take_rows(self.rows.columns[key], _on(self.rows.columns[key], self.fragments.firsts[at]))
        if self.pool is None:
            name = next_key(key)
            said = self._rows_before(self.storage.columns[name], self.rows.columns[name], at)
        else:
            tails, before = self.rows.tails[key], self.before[at]
            said = take_rows(tails, _on(tails, np.maximum(-2 - before, 0)))
            outer = np.flatnonzero(before >= 0)
            entries = torch.from_numpy(self.ring.tail_entries(before[outer]))
            put_rows(said, _on(said, outer), self.pool.entries[key].take(entries).to(said.device))
        return said.to(came.device), came

    def _rows_before(self, stored: Column, given: Tensor, at: Array) -> Tensor:
        """Values of the rows that the fragments ``at`` continue, ``stored`` or ``given`` in the batch."""
        before = self.before[at]
        inner = self.fragments.lasts[np.maximum(-2 - before, 0)]  # of stored ones any row, which is replaced
        values = take_rows(given, _on(given, inner))
        outer = np.flatnonzero(before >= 0)
        if len(outer):
            taken = stored.take(torch.from_numpy(self.slots[at[outer]]))
            put_rows(values, _on(values, outer), taken.to(values.device))
        return values

    def _trusted(self, key: NestedKey) -> bool | None:
        """Whether rows inside trajectories say the next row's value: in the batch, else among the latest stored
        ones; None if there are none."""
        columns, lasts = self.rows.columns, self.fragments.lasts
        inside = np.ones(self.rows.count, np.bool_)
        inside[lasts] = False
        at = _on(columns[key], np.flatnonzero(inside))
        if self.pool is None and len(at):
            now, later = columns[key], columns[next_key(key)]
            return not bool(_values_differ(take_rows(later, at), take_rows(now, at + 1)).any())
        # Rows inside the fragments of a compact batch agree, those where a run goes on in the next one may not.
        joined = np.flatnonzero(self.fragments.joined)
        if len(joined) and bool(self._false(key, joined).any()):
            return False
        if len(at):
            return True
        stored = len(self.ring)
        slots = self.ring.slots_by_age(torch.arange(max(0, stored - _LATEST), stored))
        follow = self.ring.follow(slots)
        slots = slots[follow.slots >= 0]
        if not len(slots):
            return None
        follow = self.ring.follow(slots)
        later = self._read(slots, follow, next_key(key))
        return not bool(_values_differ(later, self._read(follow.slots, None, key)).any())

    def _read(self, slots: Tensor, follow: Follow | None, key: NestedKey) -> Tensor:
        values: Columns = self.storage.read_rows(slots, follow, keys=frozenset([key]))
        return values[key]


def _on(column: Tensor, numbers: Array) -> Tensor:
    """Row numbers on the device of ``column``."""
    return torch.from_numpy(numbers).to(column.device)


def _values_differ(said: Tensor, came: Tensor) -> Tensor:
    """Where two columns differ in value, NaN in ``said`` (not known) apart; bool ``[N]``."""
    if said.is_complex():
        said, came = (torch.view_as_real(side.resolve_conj()) for side in (said, came))
    if not said.is_floating_point():
        return differ(said, came)
    wrong = said.double().ne(came.double()).logical_and_(~said.isnan())
    return wrong if wrong.ndim == 1 else wrong.flatten(1).any(1)
