"""Three ways to lay out a batch for a `ColumnStorage`: a buffer's first batch decides which one is used.

A batch arrives as `Rows` whose columns are its entries. Its arrangement checks it against the stored rows, splits it
into fragments if trajectories are tracked, and leaves the columns that the storage keeps.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from typing_extensions import override

from flatroll.buffers.columns.column import Column, Columns
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.buffers.storages.column_facts import ColumnFacts
from flatroll.buffers.storages.continuity import (
    check_followed,
    check_tails,
    find_pairs,
    state_pairs,
)
from flatroll.buffers.storages.item_kinds import Structure
from flatroll.buffers.storages.next_pool import NextPool, next_columns
from flatroll.buffers.storages.records import Rows
from flatroll.layout.final import Final
from flatroll.layout.keys import NestedKey, next_key


class ArrangedStorage(Protocol):
    """The part of `ColumnStorage` that an arrangement uses.

    Attributes:
        lanes: sizes of the batch dimensions after the first.
        columns: the stored entries by key; empty before the first batch.
        not_compared: root keys whose next values need not be those of the following rows.
        known: what is known of the columns; None before the first batch.
        pool: compact storage: the next observations that no row holds; None before the first batch.
    """

    lanes: torch.Size
    columns: dict[NestedKey, Column]
    not_compared: set[NestedKey]
    known: ColumnFacts | None
    pool: NextPool | None

    def match_columns(self, rows: Rows, structure: Structure) -> None:
        """Find the addresses of the ``rows`` that one call copies; ValueError unless they have the columns of the
        first batch, which allocates."""
        ...

    def keys_compared_in(self, columns: Columns, pool: NextPool | None) -> tuple[NestedKey, ...]:
        """Return the root keys in a batch's ``columns`` by which a row is known to follow another."""
        ...

    def use_pool(self, pool: NextPool) -> None:
        """Keep next observations that no row holds in ``pool``, from the first batch on."""
        ...


class Arriving(NamedTuple):
    """What a batch is, besides its columns.

    Attributes:
        structure: its kind.
        keys: markers by which to find its fragments; None where nothing follows trajectories.
        final: the next observations that came apart from it, checked.
        skip: number of its rows that were left out before the others.
    """

    structure: Structure
    keys: BoundaryKeys | None
    final: Final | None
    skip: int


class Arrangement(ABC):
    """Lays out the batches of a storage in one way. The methods change ``rows``.

    Attributes:
        tracks: whether batches are split into fragments of trajectories.
    """

    tracks: bool = True

    @abstractmethod
    def lay_out_known(self, storage: ArrangedStorage, rows: Rows, keys: BoundaryKeys | None) -> None:
        """Lay out a batch of the stored rows' form, all of which one call copies. Most batches are such.

        ``rows.source`` has the addresses of its columns, in the order of the storage's ``known.arriving``.
        """

    @abstractmethod
    def lay_out(self, storage: ArrangedStorage, rows: Rows, batch: Arriving) -> None:
        """Check and lay out any ``batch``, whose columns are those of ``rows``; the first one allocates."""


class Unordered(Arrangement):
    """Rows in any order: nothing follows trajectories."""

    tracks = False

    @override
    def lay_out_known(self, storage: ArrangedStorage, rows: Rows, keys: BoundaryKeys | None) -> None:
        pass  # its columns are those of the storage

    @override
    def lay_out(self, storage: ArrangedStorage, rows: Rows, batch: Arriving) -> None:
        _add_final(rows, batch.final)
        storage.match_columns(rows, batch.structure)


class Tracked(Arrangement):
    """Fragments of trajectories; every row holds its next observation."""

    @override
    def lay_out_known(self, storage: ArrangedStorage, rows: Rows, keys: BoundaryKeys | None) -> None:
        facts = storage.known
        assert keys is not None and facts is not None

        rows.fragments = Fragments.read(_mark_lanes(storage, rows, keys), keys)
        if not keys.in_order:
            return
        compared = facts.compared_without(storage.not_compared)
        if compared is None:
            check_followed(rows.columns, rows.fragments, storage.keys_compared_in(rows.columns, None))
        else:
            check_followed(rows.columns, rows.fragments, compared, rows.source)

    @override
    def lay_out(self, storage: ArrangedStorage, rows: Rows, batch: Arriving) -> None:
        keys = batch.keys
        assert keys is not None
        _add_final(rows, batch.final)

        rows.fragments = Fragments.read(_mark_lanes(storage, rows, keys), keys)
        if keys.in_order:
            compared = storage.keys_compared_in(rows.columns, None)
            check_followed(rows.columns, rows.fragments, compared, skip=batch.skip)

        storage.match_columns(rows, batch.structure)


class Compact(Arrangement):
    """Fragments of trajectories with each observation once, but for the next observations of their last rows."""

    @override
    def lay_out_known(self, storage: ArrangedStorage, rows: Rows, keys: BoundaryKeys | None) -> None:
        pool = storage.pool
        facts = storage.known
        addresses = rows.source
        assert keys is not None and pool is not None and facts is not None and addresses is not None
        columns = rows.columns
        marked = _mark_lanes(storage, rows, keys)

        # The addresses of the next observations come after those of the columns that the storage keeps.
        stored = len(storage.columns)
        rows.source = addresses[:stored]
        pairs = (rows.source[facts.now], addresses[stored:], pool.row_bytes)
        fragments = Fragments.read(marked, keys, None, pairs)
        rows.fragments = fragments
        rows.tails = pool.tails(columns, None, fragments.lasts)

        if keys.in_order:
            compared = facts.compared_without(storage.not_compared)
            if compared is None:
                check_tails(columns, fragments, storage.keys_compared_in(columns, pool), rows.tails)
            else:
                check_tails(columns, fragments, compared.keys, rows.tails)

        rows.columns = {key: columns[key] for key in storage.columns}

    @override
    def lay_out(self, storage: ArrangedStorage, rows: Rows, batch: Arriving) -> None:
        keys = batch.keys
        final = batch.final
        assert keys is not None
        columns = rows.columns
        marked = _mark_lanes(storage, rows, keys)
        pool = storage.pool or NextPool(find_pairs(columns, marked, final, keys))
        once = {*pool.next_keys.values()}
        rows.columns = {key: column for key, column in columns.items() if key not in once}
        from_final: Columns = {} if final is None else final.next
        _check_pairs(storage, columns, rows.columns, pool, from_final)

        fragments = Fragments.read(marked, keys, pool.cuts(columns, final))
        rows.fragments = fragments
        rows.tails = pool.tails(columns, final, fragments.lasts)
        if keys.in_order:
            check_tails(columns, fragments, storage.keys_compared_in(columns, pool), rows.tails, batch.skip)

        storage.match_columns(rows, batch.structure)
        if storage.pool is None:
            storage.use_pool(pool)


def _add_final(rows: Rows, final: Final | None) -> None:
    """Add the next observations that ``final`` and the rows after hold, as columns."""
    if final is not None:
        later = next_columns(rows.columns, final)
        rows.columns |= {next_key(key): obs for key, obs in later.items()}


def _mark_lanes(storage: ArrangedStorage, rows: Rows, keys: BoundaryKeys) -> Columns:
    """Return the columns by which fragments are found. Rows of lanes come step by step, one of each lane; where they
    have no ids, the lane's number is the id."""
    if not storage.lanes or keys.traj in rows.columns:
        return rows.columns
    lanes = storage.lanes.numel()
    return rows.columns | {keys.traj: torch.arange(lanes).repeat(rows.count // lanes)}


def _check_pairs(
    storage: ArrangedStorage, columns: Columns, stored: Columns, pool: NextPool, from_final: Columns
) -> None:
    """Raise ValueError unless a compact batch has the next observations of ``pool``, and no others.

    ``stored`` are the ``columns`` without these next observations.
    """
    for key, next_name in pool.next_keys.items():
        if key in from_final:
            continue
        now = columns.get(key)
        later = columns.get(next_name)
        if now is None or later is None or now.dtype is not later.dtype or now.shape != later.shape:
            raise ValueError(
                f"the batch lacks {next_name!r}, which the first extend had: pass it in the batch or in final"
            )

    if storage.pool is None or stored.keys() == storage.columns.keys():
        return

    known = {*pool.next_keys.values(), *storage.columns}
    pairs = {*state_pairs(columns), *from_final}
    for key in columns:
        if key in pairs and next_key(key) not in known:
            raise ValueError(f"the batch has {next_key(key)!r}, which the first extend did not have")
