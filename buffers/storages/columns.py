"""A storage of columns: how batches are checked, laid out, copied in and read again."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.base import After, Column, Columns, TensorColumn
from flatroll.buffers.columns.host_block import PlainColumns
from flatroll.buffers.index.fragments import BoundaryKeys, Runs
from flatroll.buffers.index.ring import Draw, Follow
from flatroll.buffers.storages.base import Rows, Storage
from flatroll.buffers.storages.item_kinds import Structure, like, shown
from flatroll.buffers.storages.next_pool import (
    NextPool,
    check_final_covers,
    differ,
    final_columns,
    mostly_shared,
    next_columns,
    state_pairs,
)
from flatroll.layout.boundaries import run_ends
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import NestedKey, next_key


class ColumnStorage(Storage):
    """A storage of columns. Subclasses say where a column's memory comes from.

    Every batch must have the entries, shapes and dtypes of the first one; nothing is dropped or cast silently.
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compact_obs: bool = False,
    ) -> None:
        super().__init__(max_size)
        whole_number("ndim", ndim)
        self.device = torch.device(device)
        self.ndim = ndim
        self.compact_obs = compact_obs
        self.columns: dict[NestedKey, Column] = {}
        self._plain: PlainColumns | None = None
        self._indexed = False

    @abstractmethod
    def _allocate(self, like: Mapping[NestedKey, tuple[torch.dtype, torch.Size]]) -> dict[NestedKey, Column]:
        """Columns of ``capacity`` rows; raises before it takes anything that is not there."""

    @property
    def allocated(self) -> bool:
        """Whether a first batch has fixed the columns."""
        return bool(self.columns)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row's columns; 0 before the first extend."""
        return sum(column.row_bytes for column in self.columns.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all columns and the pool."""
        columns = sum(column.nbytes for column in self.columns.values())
        return columns + (0 if self.pool is None else self.pool.nbytes)

    @property
    def bytes_saved(self) -> int:
        """Bytes that plain columns, two for each pair, would need on top; 0 unless compact or encoded."""
        if not self.columns:
            return 0
        pairs = [] if self.pool is None else self.pool.pairs
        plain = sum(c.value_bytes * (2 if key in pairs else 1) for key, c in self.columns.items())
        return plain * self.capacity - self.nbytes

    def prepare(
        self, batch: Any, final: TensorDictBase | None, keys: BoundaryKeys | None, whole: bool = False
    ) -> Rows:
        """Check ``batch`` and lay it out; allocates at the first call. Nothing is stored yet.

        Args:
            batch: ``[N]``; if N exceeds the capacity, its last rows are taken, unless ``whole``.
            final: the final observations that come with a compact batch.
            keys: markers by which to find the fragments; None to leave them out.
            whole: take all rows, for a writer that chooses among them.

        Raises:
            ValueError: entries, shapes or dtypes that differ from the first batch; a compact batch without the
                ``final`` that its storage needs.
            MemoryError: what the columns need is not there (first call).
        """
        structure = Structure.of(batch) if self.structure is None else self.structure
        columns = structure.columns(batch)
        if not columns:
            raise ValueError("the batch has no entries to store")
        count = len(next(iter(columns.values())))
        if not isinstance(batch, TensorDictBase):
            if final is not None:
                raise ValueError("final comes with a compact tensordict batch only")
            if self.compact_obs:
                raise TypeError(f"compact_obs=True needs tensordict batches, got {type(batch).__name__}")
            skip = 0 if whole else max(0, count - self.capacity)
            columns = {key: c[skip:] for key, c in columns.items()}
            self._check(columns, structure)
            return Rows(count - skip, columns)
        self._indexed = keys is not None or self.compact_obs
        row, kept = (None, {}) if final is None else final_columns(final, columns, count)
        skip = 0 if whole else max(0, count - self.capacity)
        if skip:
            batch, columns, count = batch[skip:], {k: c[skip:] for k, c in columns.items()}, count - skip
            if row is not None:
                late = row >= skip
                row, kept = row[late] - skip, {k: v[late] for k, v in kept.items()}
        if row is not None:
            found = keys or BoundaryKeys.probe(batch)
            ends = run_ends(batch, is_init_key=found.is_init, done_key=found.done, traj_key=found.traj)
            check_final_covers(row, ends, columns)
        if self.compact_obs:
            return self._prepare_compact(
                structure, batch, columns, row, kept, keys or BoundaryKeys.probe(batch)
            )
        if row is not None:
            columns |= {next_key(k): v for k, v in next_columns(columns, row, kept).items()}
        runs = None if keys is None else Runs.of(self._in_lanes(columns, keys, count), keys)
        self._check(columns, structure)
        return Rows(count, columns, runs)

    def _in_lanes(self, columns: Columns, keys: BoundaryKeys, rows: int) -> Columns:
        """``columns`` with lanes for trajectory ids, if they are of several lanes and have none."""
        if not self.lanes or keys.traj in columns:
            return columns
        lanes = self.lanes.numel()
        return columns | {keys.traj: torch.arange(lanes).repeat(rows // lanes)}

    def _prepare_compact(
        self,
        structure: Structure,
        batch: TensorDictBase,
        columns: Columns,
        row: Tensor | None,
        kept: Columns,
        keys: BoundaryKeys,
    ) -> Rows:
        pairs = state_pairs(columns)
        pairs += [key for key in kept if key not in pairs]
        if not pairs and row is not None:
            raise ValueError(
                "the storage has compact_obs=True, but neither the batch nor the final that came with it has a "
                'next observation ("next", <observation>): there is nothing to keep once. If next observations '
                "are kept as deltas, use a storage without compact_obs and transform=NextObservationDelta()"
            )
        if not pairs:
            raise ValueError(
                'the storage has compact_obs=True, but the batch has no ("next", <observation>) and no final '
                "came with it: extend(batch, final=collector.final), or use a storage without compact_obs and "
                "NextStateReconstructor"
            )
        marked = self._in_lanes(columns, keys, len(batch))
        if self.pool is None and len(pairs) > len(kept):
            ends = torch.zeros(len(batch), dtype=torch.bool)
            ends[torch.from_numpy(Runs.of(marked, keys).lasts)] = True
            ends = ends.to(columns[pairs[0]].device)
            pairs = [key for key in pairs if key in kept or mostly_shared(columns, key, ends)] or pairs
        pool = self.pool or NextPool(pairs)
        if missing := [key for key in pool.pairs if key not in pairs]:
            raise ValueError(
                f"the batch lacks {next_key(missing[0])!r}, which the first extend had: pass it in the batch or "
                "in final"
            )
        if self.pool is not None:
            late = [key for key in pairs if key not in pool.pairs and next_key(key) not in self.columns]
            if late:
                raise ValueError(f"the batch has {next_key(late[0])!r}, which the first extend did not have")
        runs = Runs.of(marked, keys, pool.cuts(columns, row))
        tails = pool.tails(columns, row, kept, runs.lasts)
        twice = {next_key(key) for key in pool.pairs}
        stored = {key: c for key, c in columns.items() if key not in twice}
        self._check(stored, structure)
        if self.pool is None:
            pool.allocate(self.columns)
            self.pool = pool
        return Rows(len(batch), stored, runs, tails)

    def _check(self, columns: Columns, structure: Structure) -> None:
        """ValueError unless ``columns`` are those of the first batch, which allocates."""
        if not self.columns:
            self.columns = self._allocate({key: like(c) for key, c in columns.items()})
            self.structure = structure
            return
        for key, column in columns.items():
            there = self.columns.get(key)
            if there is None:
                raise ValueError(
                    f"the batch has an entry {key!r} that the first extend did not have: "
                    f"the storage keeps {sorted(map(repr, self.columns))}"
                )
            if there.dtype is not column.dtype or there.shape != column.shape[1:]:
                raise ValueError(
                    f"{shown(key)} is {column.dtype} {tuple(column.shape[1:])} per row, the storage keeps "
                    f"{there.dtype} {tuple(there.shape)} since the first extend"
                )
        if len(columns) != len(self.columns):
            missing = next(key for key in self.columns if key not in columns)
            raise ValueError(f"the batch lacks the entry {missing!r} that the first extend had")

    def write(self, slot: int, rows: Rows, after: After | None = None) -> None:
        """See `Storage`."""
        plain = self._together()
        written = () if plain is None else plain.write(slot, rows.columns, rows.count, self.capacity)
        if len(written) == len(rows.columns):
            return
        fit = min(rows.count, self.capacity - slot)
        for key, values in rows.columns.items():
            if key in written:
                continue
            column = self.columns[key]
            if fit == rows.count:
                column.write(slot, values, after)
            else:
                column.write(slot, values[:fit], _between(after, 0, fit))
                column.write(0, values[fit:], _between(after, fit, rows.count))

    def put(self, slots: Tensor, rows: Rows, at: Tensor | None = None) -> None:
        """See `Storage`."""
        for key, values in rows.columns.items():
            self.columns[key].put(
                slots, values if at is None else values.index_select(0, at.to(values.device))
            )

    def set(self, draw: Draw, data: Any, shape: torch.Size, keys: BoundaryKeys | None) -> None:
        """See `Storage`; a tensordict may have some of the entries only."""
        assert self.structure is not None
        columns = self.structure.columns_of_rows(data, shape)
        fixed = set() if keys is None else {keys.is_init, keys.done, keys.traj, keys.step_count}
        if self.pool is not None:
            fixed |= {*self.pool.pairs, *map(next_key, self.pool.pairs)}
        there = self.get(draw.slots, draw.follow, keys=frozenset(columns))
        for key, values in columns.items():
            if key not in there:
                raise ValueError(
                    f"the storage has no entry {key!r}: it keeps {sorted(map(repr, self.columns))}"
                )
            stored = there[key]
            if stored.dtype is not values.dtype or stored.shape != values.shape:
                raise ValueError(
                    f"{shown(key)} must be {stored.dtype} {list(stored.shape)} to be written here, "
                    f"got {values.dtype} {list(values.shape)}"
                )
            if key in fixed and bool(differ(stored, values.to(stored.device)).any()):
                raise ValueError(
                    f"{shown(key)} cannot be changed in place: other rows or the trajectory index depend on it. "
                    "Leave the entry out, or extend with new rows"
                )
        for key, values in columns.items():
            if key not in fixed:
                self.columns[key].put(draw.slots, values)

    def get(
        self,
        slots: Tensor,
        follow: Follow | None = None,
        *,
        slices: bool = False,
        keys: frozenset[NestedKey] | None = None,
    ) -> Columns:
        """See `Storage`."""
        plain = self._together()
        taken = {} if plain is None else plain.take(slots, keys)
        later: Columns = {}
        pairs = () if self.pool is None or follow is None else self.pool.pairs
        if plain is not None and follow is not None and pairs:
            asked = pairs if keys is None else [key for key in pairs if next_key(key) in keys]
            later = plain.take_next(slots, follow.slots, taken, asked)
        slots = slots.to(self.device)
        columns: Columns = {}
        for key, column in self.columns.items():
            if keys is not None and key not in keys:
                continue
            if key in taken:
                columns[key] = taken[key]
            elif column.decodes and follow is not None and key in pairs:
                both = column.take(torch.cat([slots, follow.slots.clamp(min=0).to(slots.device)]))
                columns[key], later[key] = both[: len(slots)], both[len(slots) :]
            else:
                columns[key] = column.take(slots)
        for key in pairs:
            if (keys is None or next_key(key) in keys) and self.pool is not None and follow is not None:
                columns[next_key(key)] = self.pool.read(key, self.columns[key], follow, later.get(key))
        return columns

    def _together(self) -> PlainColumns | None:
        """The columns that are copied by one call; None if the storage is not on the host, or where there is no
        trajectory index, so that random sampling does without numba."""
        if not self._indexed or self.device.type != "cpu":
            return None
        if self._plain is None or self._plain.columns is not self.columns:
            self._plain = PlainColumns(self.columns)
        return self._plain

    def build(self, values: Any, shape: torch.Size) -> Any:
        """See `Storage`."""
        assert self.structure is not None
        return self.structure.build(values, shape)

    def state_dict(self, rows: int, pool_rows: int = 0) -> dict[str, Any]:
        """See `Storage`."""
        entries = {} if self.pool is None else self.pool.entries
        pool = {key: column.state_dict(pool_rows) for key, column in entries.items()}
        return {
            "lanes": self.lanes,
            "structure": self.structure,
            "like": self._like(),
            "kinds": self._column_kinds(),
            "columns": {key: column.state_dict(rows) for key, column in self.columns.items()},
            "pool": pool,
        }

    def check_state_dict(self, state: dict[str, Any], rows: int) -> None:
        """See `Storage`."""
        if "columns" not in state:
            raise ValueError(f"the state is of a ListStorage, this is a {type(self).__name__}")
        there = torch.Size(state["lanes"])
        if len(there) != self.ndim - 1 or (self.columns and there != self.lanes):
            raise ValueError(
                f"the state is of a storage with lanes {list(there)} after the time, this one has ndim={self.ndim}"
                f"{f' and lanes {list(self.lanes)}' if self.columns else ''}"
            )
        room = self.max_size // there.numel() * there.numel()
        if rows != room:
            raise ValueError(
                f"the state has room for {rows} rows, this storage for {room}: make it with max_size={rows}"
            )
        if state["like"] and bool(state["pool"]) != self.compact_obs:
            raise ValueError(
                f"the state is of a storage with compact_obs={bool(state['pool'])}, this one has "
                f"compact_obs={self.compact_obs}"
            )
        if self.columns:
            self._check_columns(state)

    def _check_columns(self, state: dict[str, Any]) -> None:
        held, kept = _kinds(state["like"], state["kinds"]), _kinds(self._like(), self._column_kinds())
        for key in {**held, **kept}:
            if held.get(key) != kept.get(key):
                raise ValueError(
                    f"the state has {held.get(key, 'nothing')} as {shown(key)}, this storage keeps "
                    f"{kept.get(key, 'nothing')}"
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Storage`."""
        if not state["like"]:
            return
        if not self.columns:
            self.lanes = torch.Size(state["lanes"])
            self.columns = self._allocate(state["like"])
            try:
                self._check_columns(state)
            except ValueError:
                self.columns = {}
                raise
            self.structure = state["structure"]
        for key, column in self.columns.items():
            column.load_state_dict(state["columns"][key])
        if self.compact_obs:
            self.pool = NextPool(list(state["pool"]))
            self.pool.allocate(self.columns)
            for key, column in self.pool.entries.items():
                column.load_state_dict(state["pool"][key])

    def _like(self) -> dict[NestedKey, tuple[torch.dtype, torch.Size]]:
        return {key: (column.dtype, column.shape) for key, column in self.columns.items()}

    def _column_kinds(self) -> dict[NestedKey, str]:
        """How columns are kept; in memory or in a file is one kind."""
        return {
            key: "" if isinstance(column, TensorColumn) else f" in a {type(column).__name__}"
            for key, column in self.columns.items()
        }

    def enter_process(self) -> None:
        """See `Storage`; tensors of the caller's may be shared, which counters in memory are not."""
        if any(isinstance(c, TensorColumn) and _shared(c.data) for c in self.columns.values()):
            raise RuntimeError(
                "the storage's tensors are shared with the process that made the buffer, which does not see what is "
                "written here: use LazyMemmapStorage for a buffer of several processes"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plain": None}  # of memory that a copy would not share


def _kinds(
    like: Mapping[NestedKey, tuple[torch.dtype, torch.Size]], kinds: Mapping[NestedKey, str]
) -> dict[NestedKey, str]:
    return {key: f"{dtype} {tuple(shape)} per row{kinds[key]}" for key, (dtype, shape) in like.items()}


def _shared(tensor: Tensor) -> bool:
    shared: bool = tensor.is_shared()  # type: ignore[no-untyped-call]
    return shared


def _between(after: After | None, first: int, stop: int) -> After | None:
    """The hints for the rows ``first ... stop - 1``, counted from ``first``."""
    if after is None:
        return None
    among = (after.rows >= first) & (after.rows < stop)
    return After(after.rows[among] - first, after.slots[among])
