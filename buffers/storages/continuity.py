"""Checks that rows continue the trajectory of their id."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.columns.column import Column, Columns, differ, put_rows, take_rows
from flatroll.buffers.index.fragments import NONE, BoundaryKeys, Fragments
from flatroll.buffers.index.ring import Array, Follow
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.storages.next_pool import NextPool
from flatroll.buffers.storages.records import Rows
from flatroll.buffers.storages.storage import Storage
from flatroll.layout.final import Final
from flatroll.layout.following import follow
from flatroll.layout.keys import (
    IS_INIT,
    NEXT,
    NEXT_KNOWN,
    OBSERVATION,
    STEP_COUNT,
    STEPS_TO_NEXT_OBS,
    NestedKey,
    as_tuple,
    next_key,
)
from flatroll.layout.transfers import upload

if TYPE_CHECKING:
    from flatroll.kernels.rows.gather import HostColumns

#: Entries under "next" that describe the step and not the state after it.
_OF_THE_STEP = {"reward", "done", "terminated", "truncated"}
_LATEST = 256  # maximum number of stored rows compared per column
_CHECKED = 64  # maximum number of rows of a batch that are compared with the next one
_WIDE = 2048  # bytes of observations of a row, above which fewer rows are compared
_SEARCHED = 1 << 26  # maximum bytes of observations searched for a match elsewhere


def state_pairs(columns: Mapping[NestedKey, Tensor | Column]) -> list[NestedKey]:
    """List the root keys that are also under ``"next"``, with the same shape and dtype, such as "observation".

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


def find_pairs(columns: Columns, marked: Columns, final: Final | None, keys: BoundaryKeys) -> list[NestedKey]:
    """Return the root keys of the first batch that a compact storage stores once; ValueError if there are none.

    Their next observations are mostly those of the next row.
    """
    pairs = state_pairs(columns)
    from_final = [] if final is None else list(final.next)
    pairs += [key for key in from_final if key not in pairs]

    if not pairs:
        raise ValueError(
            'compact_obs=True needs ("next", <observation>), but neither the batch nor its final has one: '
            "extend(batch, final=collector.final), or use NextStateReconstructor or NextObservationDelta "
            "instead"
        )
    if len(pairs) == len(from_final):
        return pairs

    first = columns[pairs[0]]
    ends = torch.zeros(len(first), dtype=torch.bool)  # last rows of runs according to the markers alone
    ends[torch.from_numpy(Fragments.read(marked, keys).lasts)] = True
    inside = ~ends[:-1].to(first.device)

    # Store an entry once if at least half of the rows inside runs agree with the next row. Observations do;
    # outputs of a network for both, for example, would need a pool entry per row.
    most = int(inside.sum()) // 2
    shared = []
    for key in pairs:
        if key in from_final:
            shared.append(key)
            continue
        differing = differ(columns[next_key(key)][:-1], columns[key][1:]) & inside
        if int(differing.sum()) <= most:
            shared.append(key)
    return shared or pairs


def compared_keys(
    columns: Mapping[NestedKey, Column | Tensor], not_compared: Collection[NestedKey]
) -> tuple[NestedKey, ...]:
    """List the root keys, without ``not_compared``, by which a row is known to follow another: its observations.

    These are the entries under ``"observation"``; without any, the entries of more than one number that ``"next"`` also
    has, or else all that it has. (Counters of two trajectories may be equal; network outputs may differ.)
    """
    pairs = [key for key in state_pairs(columns) if key not in not_compared and key != STEP_COUNT]
    named = [key for key in pairs if as_tuple(key)[0] == OBSERVATION]
    wide = [key for key in pairs if columns[key].shape.numel() > 1]
    return tuple(named or wide or pairs)


def check_followed(
    batch: Columns,
    fragments: Fragments,
    compared: "Compared | Sequence[NestedKey]",
    source: Array | None = None,
    skip: int = 0,
) -> None:
    """Check some rows inside fragments: their next observation must be the observation of the next row.

    Up to 64 rows, spread over the batch, in host memory; of wide rows at least 16, and one in 32. Rows with consecutive
    step counts were checked already, and n-step rows lead to later ones: neither is compared. A next observation that
    is NaN, or not known by the marker ``("collector", "next_known")``, may be anything.

    Args:
        batch: the batch's columns by key, ``[N, ...]``.
        fragments: its fragments.
        compared: root keys that tell whether a row follows another. Only entries under ``"observation"`` must agree;
            of others (which may be outputs of a network) a row must have the next value of another row to be refused.
        source: addresses of the columns, in the order that ``compared`` says.
        skip: number of rows of the batch before these, for the error.

    Raises:
        ValueError: a row does not lead to the next one.
    """
    rows = fragments.rows
    if rows == len(fragments.lasts) or STEP_COUNT in batch or STEPS_TO_NEXT_OBS in batch:
        return

    if isinstance(compared, Compared) and source is not None and compared.pairs is not None:
        at = _broken(fragments, compared.pairs, source)
        keys = compared.keys
    else:
        given = compared.keys if isinstance(compared, Compared) else compared
        keys = tuple(key for key in given if key in batch and next_key(key) in batch)
        at = _broken_in(batch, fragments, keys) if keys else NONE

    if len(at):
        here = torch.from_numpy(at)
        _refuse(batch, at, {key: batch[next_key(key)][here] for key in keys}, skip)


def check_tails(
    batch: Columns, fragments: Fragments, keys: Sequence[NestedKey], tails: Columns, skip: int = 0
) -> None:
    """Check rows of a compact batch, as `check_followed` does, at the ends of fragments that the next one continues.

    They were cut where the next observation, in ``tails`` ``[F, ...]`` by root key, is not that of the next row.
    """
    if not np.count_nonzero(fragments.joined) or STEP_COUNT in batch or STEPS_TO_NEXT_OBS in batch:
        return

    (ends,) = np.nonzero(fragments.joined[1:])
    ends = ends[:: len(ends) // _CHECKED + 1]
    here = torch.from_numpy(ends)
    said = {key: tails[key][upload(here, tails[key].device)] for key in keys}
    _refuse(batch, fragments.lasts[ends], said, skip)


def _refuse(batch: Columns, at: Array, said: Columns, skip: int) -> None:
    """Raise ValueError if one of the rows ``at``, int64 ``[K]``, does not lead to the next one; ``said`` are their next
    observations ``[K, ...]`` by root key. Rarely reached: NaN, low precision, and errors."""
    if not all(batch[key].is_cpu for key in said) or not said:  # reading values would sync
        return

    if NEXT_KNOWN in batch:
        known = batch[NEXT_KNOWN].reshape(-1).numpy(force=True)[at]
        said = {key: values[torch.from_numpy(known)] for key, values in said.items()}
        at = at[known]
    if not len(at):
        return

    here = torch.from_numpy(at)
    differing = dict[NestedKey, Tensor]()
    for key, later in said.items():
        now = batch[key]
        before = now[here].detach().reshape(len(at), -1)
        behind = now[here + 1].detach().reshape(len(at), -1)
        after = later.detach().reshape(len(at), -1)
        said[key] = after
        differing[key] = ~follow(before, after, behind)

    named = as_tuple(next(iter(said)))[0] == OBSERVATION
    each = torch.stack(list(differing.values()))
    wrong = each.any(0) if named else each.all(0)

    for i in wrong.nonzero().flatten().tolist():
        source = _row_with({key: values[i] for key, values in said.items()}, batch)
        if source is None and not named:
            continue
        key = next(key for key in said if bool(differing[key][i]))
        row = int(at[i]) + skip
        where = "" if source is None else f", but that of row {source + skip}"
        raise ValueError(
            f"row {row + 1} of the batch does not follow row {row} in its trajectory: the {next_key(key)!r} of row "
            f"{row} is not the {key!r} of row {row + 1}{where}. Extend with rows as they were collected, before you "
            f"shuffle, index or filter them, or set {IS_INIT!r} or a new id where each trajectory begins; where a "
            f"next observation is unknown, set {NEXT_KNOWN!r} to False"
        )


def _broken(fragments: Fragments, pairs: Array, source: Array) -> Array:
    """Return rows inside fragments whose next observations are not, bit by bit, those of the row after."""
    from flatroll.kernels.rows.run_marks import broken  # numba

    found: Array = np.empty(_CHECKED, np.int64)
    count = int(broken(fragments.rows, _CHECKED, _WIDE, fragments.lasts, pairs, source, found))
    rows: Array = found[:count]
    return rows


def _broken_in(batch: Columns, fragments: Fragments, keys: Sequence[NestedKey]) -> Array:
    """Do the same as `_broken` for a batch whose columns may lie anywhere."""
    now = [batch[key] for key in keys]
    later = [batch[next_key(key)] for key in keys]
    columns = [*now, *later]
    if not all(column.is_cpu for column in columns):  # reading values would sync
        return NONE

    if all(column.is_contiguous() for column in columns):
        source = np.array([column.data_ptr() for column in columns], np.int64)
        sizes = [column[0].numel() * column.element_size() for column in now]
        pairs = np.array([(0, size, k, len(now) + k) for k, size in enumerate(sizes)], np.int64)
        return _broken(fragments, pairs, source)

    rows = fragments.rows
    compared = min(rows - 1, _CHECKED)
    at = np.arange(compared) * (rows - 1) // compared
    at = at[fragments.lasts[np.searchsorted(fragments.lasts, at)] != at]

    here = torch.from_numpy(at)
    unlike = [differ(column[here], head[here + 1]) for head, column in zip(now, later, strict=True)]
    broken_at: Array = at[torch.stack(unlike).any(0).numpy()]
    return broken_at


def _row_with(values: Mapping[NestedKey, Tensor], batch: Columns) -> int | None:
    """Return the first row of the batch with these values; None if it has none."""
    most = _SEARCHED // max(1, sum(value.nbytes for value in values.values()))
    equal = [
        (batch[key][:most].detach().reshape(min(most, len(batch[key])), -1) == value).all(1)
        for key, value in values.items()
    ]
    rows = torch.stack(equal).all(0).nonzero()
    if len(rows):
        return int(rows[0])
    return None


class Compared(NamedTuple):
    """The columns that determine whether a row follows another, cached.

    Attributes:
        not_compared: number of `Storage.not_compared` keys that were left out.
        keys: root keys of the entries that must agree.
        pairs: these, then the others that a compact storage keeps once, for `TrajectoryIndex.link`; None if one of
            them is not plain numbers in host memory.
        order: compact storage: the root keys of ``pairs``.
    """

    not_compared: int
    keys: tuple[NestedKey, ...]
    pairs: Array | None
    order: tuple[NestedKey, ...]

    @classmethod
    def of(
        cls, storage: Storage, pool: NextPool | None, plain: "HostColumns[NestedKey] | None"
    ) -> "Compared":
        """Find the compared columns of ``storage``, its `NextPool` (if any) and its ``plain`` host columns."""
        columns = storage.columns
        left_out = len(storage.not_compared)
        if pool is not None:  # only the pairs that are stored once
            columns = {name: columns[key] for key in pool.pairs for name in (key, next_key(key))}
        keys = compared_keys(columns, storage.not_compared)
        there = [] if plain is None else list(plain.columns)

        if pool is None:
            order = keys
            if not all(key in there and next_key(key) in there for key in keys):
                return cls(left_out, keys, None, order)
            rows = []
            if plain:
                rows = [plain.pair(key, next_key(key)) for key in keys]
        else:
            order = (*keys, *(key for key in pool.pairs if key not in keys))
            if not pool.plain or not all(key in there for key in order):
                return cls(left_out, keys, None, order)
            sizes = [columns[key].value_bytes for key in order]
            rows = [(0, size, k, len(order) + k) for k, size in enumerate(sizes)]

        return cls(left_out, keys, np.array(rows, np.int64).reshape(-1, 4), order)


class LinkCheck:
    """Compares first rows of fragments with the expected values, where comparing bytes is not enough.

    Args:
        storage: where the rows are to be written.
        pool: the `NextPool` of a compact storage, else None.
        ring: the storage's index.
        rows: the batch.
        found: int64 ``[3, F]``, what `TrajectoryIndex.link` found; changed where a trajectory is cut.
    """

    def __init__(
        self, storage: Storage, pool: NextPool | None, ring: TrajectoryIndex, rows: Rows, found: Array
    ) -> None:
        assert rows.fragments is not None

        self.storage = storage
        self.pool = pool
        self.ring = ring
        self.rows = rows
        self.fragments = rows.fragments
        self.before, self.slots, self.agree = found

    def compare(self, keys: tuple[NestedKey, ...]) -> None:
        """Compare what the kernel could not: fill ``found[2]``, -1 where one of ``keys`` differs bitwise."""
        at = np.flatnonzero(self.before != -1)
        if not len(at):
            return

        if self.pool is not None:
            columns = self.rows.columns
            tails = self.rows.tails
            self.agree[:] = self.pool.compare_heads(
                self.ring, self.fragments, self.before, columns, tails, keys
            )
            return

        wrong: Array = np.zeros(len(at), np.bool_)
        for key in keys:
            said, came = self._expected_and_actual(key, at)
            wrong |= differ(said, came).numpy(force=True)
        self.agree[at] = np.where(wrong, -1, 1)

    def unlike(self) -> Array:
        """Return the fragments, int64, that do not continue their trajectory, except joined ones."""
        return np.flatnonzero((self.agree < 0) & ~self.fragments.joined)

    def settle(self, keys: tuple[NestedKey, ...], unlike: Array, named: bool) -> None:
        """Refuse the batch, or cut it, at the fragments ``unlike``.

        A key is trusted if inside trajectories every next value equals the next row's value. Other keys become
        ``not_compared``; without evidence, trajectories are cut.

        Args:
            keys: keys that may be compared.
            unlike: int64, numbers of fragments.
            named: whether the batch has trajectory ids; without ids the trajectory is cut.

        Raises:
            ValueError: a fragment does not continue the trajectory that its id names.
        """
        for key in keys:
            wrong = unlike
            if len(unlike):
                wrong = unlike[self._find_false(key, unlike)]
            if not len(wrong):
                continue

            trusted = self._is_trusted(key)
            if trusted is False:
                self.storage.not_compared.add(key)
                continue

            if trusted and named:
                row = int(self.fragments.firsts[wrong[0]])
                traj = int(self.fragments.ids[wrong[0]])
                raise ValueError(
                    f"row {row} of the batch has the id of trajectory {traj} but does not continue it: its {key!r} is "
                    f"not the {next_key(key)!r} of the last stored row with that id. If two collectors write, "
                    "give one of them writer=1"
                )

            self.before[wrong] = -1
            self.slots[wrong] = -1

    def _find_false(self, key: NestedKey, at: Array) -> Array:
        """Which of the fragments ``at`` have another value than a next value that is known; bool."""
        said, came = self._expected_and_actual(key, at)
        false = _values_differ(said, came).numpy(force=True)

        stored = self.storage.columns.get(NEXT_KNOWN)
        given = self.rows.columns.get(NEXT_KNOWN)
        if stored is not None and given is not None:
            false &= self._rows_before(stored, given, at).reshape(-1).numpy(force=True)
        return np.asarray(false)

    def _expected_and_actual(self, key: NestedKey, at: Array) -> tuple[Tensor, Tensor]:
        """The next values that the fragments ``at`` should begin with, and their first values; both ``[n, ...]``."""
        given = self.rows.columns[key]
        came = take_rows(given, _rows_on(given, self.fragments.firsts[at]))

        if self.pool is None:
            name = next_key(key)
            said = self._rows_before(self.storage.columns[name], self.rows.columns[name], at)
        else:
            tails = self.rows.tails[key]
            before = self.before[at]
            said = take_rows(tails, _rows_on(tails, np.maximum(-2 - before, 0)))

            outer = np.flatnonzero(before >= 0)
            entries = torch.from_numpy(self.ring.tail_entries(before[outer]))
            put_rows(said, _rows_on(said, outer), self.pool.entries[key].take(entries).to(said.device))

        return said.to(came.device), came

    def _rows_before(self, stored: Column, given: Tensor, at: Array) -> Tensor:
        """Values of the rows that the fragments ``at`` continue, ``stored`` or ``given`` in the batch."""
        before = self.before[at]
        # For fragments that continue stored rows, any row: replaced below.
        inner = self.fragments.lasts[np.maximum(-2 - before, 0)]
        values = take_rows(given, _rows_on(given, inner))

        outer = np.flatnonzero(before >= 0)
        if len(outer):
            taken = stored.take(torch.from_numpy(self.slots[at[outer]]))
            put_rows(values, _rows_on(values, outer), taken.to(values.device))
        return values

    def _is_trusted(self, key: NestedKey) -> bool | None:
        """Return whether next values inside trajectories equal the next row's values; None without such rows.

        Rows of the batch are checked, or else the latest stored ones.
        """
        columns = self.rows.columns
        lasts = self.fragments.lasts
        inside = np.ones(self.rows.count, np.bool_)
        inside[lasts] = False
        at = _rows_on(columns[key], np.flatnonzero(inside))

        if self.pool is None and len(at):
            now = columns[key]
            later = columns[next_key(key)]
            return not bool(_values_differ(take_rows(later, at), take_rows(now, at + 1)).any())
        # In a compact batch rows inside fragments are equal by construction; check only where a run continues
        # in the next batch.
        joined = np.flatnonzero(self.fragments.joined)
        if len(joined) and bool(self._find_false(key, joined).any()):
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


def _rows_on(column: Tensor, numbers: Array) -> Tensor:
    """Row numbers on the device of ``column``."""
    return upload(torch.from_numpy(numbers), column.device)


def _values_differ(said: Tensor, came: Tensor) -> Tensor:
    """Return where two columns differ in value, except NaN (unknown) in ``said``; bool ``[N]``."""
    if said.is_complex():
        said = torch.view_as_real(said.resolve_conj())
        came = torch.view_as_real(came.resolve_conj())
    if not said.is_floating_point():
        return differ(said, came)

    wrong = said.double().ne(came.double()).logical_and_(~said.isnan())
    if wrong.ndim == 1:
        return wrong
    return wrong.flatten(1).any(1)
