"""The base class of storages made of columns: checks, flattens, writes and reads batches."""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import (
    After,
    Column,
    Columns,
    RowForm,
    TensorColumn,
    differ,
    put_rows,
)
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Array, Draw, Follow, Ring
from flatroll.buffers.index.saved_tables import damaged
from flatroll.buffers.index.trajectory_index import NOTHING, TrajectoryIndex
from flatroll.buffers.storages.arrangements import (
    Arrangement,
    Arriving,
    Compact,
    Tracked,
    Unordered,
)
from flatroll.buffers.storages.column_facts import ColumnFacts
from flatroll.buffers.storages.continuity import (
    Compared,
    LinkCheck,
    compared_keys,
)
from flatroll.buffers.storages.item_kinds import (
    Structure,
    check_kinds,
    shown,
    structure_from_plain,
    structure_to_plain,
)
from flatroll.buffers.storages.next_pool import NextPool, check_final_covers
from flatroll.buffers.storages.records import Links, Rows
from flatroll.buffers.storages.storage import Storage, other_capacity_error
from flatroll.layout.boundaries import run_ends
from flatroll.layout.checks import check_flags, check_usable_device, check_whole_number
from flatroll.layout.final import Final, check_final, read_final
from flatroll.layout.keys import NestedKey, next_key, without_next
from flatroll.layout.transfers import upload


class ColumnStorage(Storage):
    """A storage with one column per entry of the batches; subclasses decide where a column's memory is.

    Every batch must have the entries, shapes and dtypes of the first one; nothing is dropped or cast silently.

    To keep an entry in a column of your own (see `Column`), subclass `LazyTensorStorage` and override
    :meth:`make_column`. The how-to "Write your own storage column" says what each method must do.

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> class HalfColumn(TensorColumn):
    ...     '''Keeps float32 values in two bytes each.'''
    ...     def __init__(self, rows, shape):
    ...         super().__init__(torch.zeros(rows, *shape, dtype=torch.float16))
    ...         self.dtype = torch.float32  # of values as they come and go
    ...     def write(self, slot, values, after=None):
    ...         super().write(slot, values.half())
    ...     def put(self, slots, values, after=None):
    ...         super().put(slots, values.half())
    ...     def take(self, slots):
    ...         return super().take(slots).float()
    ...     def pool(self):
    ...         return HalfColumn(0, self.shape)
    >>> class HalfStorage(LazyTensorStorage):
    ...     def make_column(self, key, dtype, shape):
    ...         return HalfColumn(self.capacity, shape) if key == "observation" else None
    >>> buffer = ReplayBuffer(storage=HalfStorage(4))
    >>> rows = buffer.extend({"observation": torch.tensor([0.1, 2.0]), "action": torch.tensor([1, 2])})
    >>> buffer[:], buffer.storage.columns["observation"].nbytes
    ({'observation': tensor([0.1000, 2.0000]), 'action': tensor([1, 2])}, 8)
    """

    def __init__(
        self, max_size: int, *, device: torch.device | str = "cpu", ndim: int = 1, compact_obs: bool = False
    ) -> None:
        super().__init__(max_size)
        check_flags(compact_obs=compact_obs)
        self.device = check_usable_device("device", device)
        self.ndim = check_whole_number("ndim", ndim)
        self.compact_obs = compact_obs
        self.pool: NextPool | None = None  # pool of next observations that no row holds, if compact
        self.known: ColumnFacts | None = None
        self.arrangement: Arrangement | None = (
            None  # how batches are laid out, from the buffer's first one on
        )
        self._own_keys: frozenset[NestedKey] = frozenset()  # keys of the columns made by make_column

    @abstractmethod
    def _allocate(self, like: RowForm) -> dict[NestedKey, Column]:
        """Columns of ``capacity`` rows; raises before it takes anything that is not there."""

    def make_column(self, key: NestedKey, dtype: torch.dtype, shape: torch.Size) -> Column | None:
        """Create the column of an entry of the first batch, or return None for the default; for subclasses.

        Args:
            key: key of the entry, ``"reward"`` or ``("next", "reward")``.
            dtype: dtype of its values.
            shape: shape of one row's value.

        Returns:
            a column of ``self.capacity`` rows of that dtype and shape, or None for the storage's default kind.
        """
        return None

    def _make_columns(self, like: RowForm) -> dict[NestedKey, Column]:
        """Columns for entries like these: those of :meth:`make_column`, and the storage's own."""
        made: dict[NestedKey, Column] = {}
        if not self.filling:  # when filling, the caller's tensors become the columns
            columns = {key: self.make_column(key, *kind) for key, kind in like.items()}
            made = {key: column for key, column in columns.items() if column is not None}

            for option in ("frame_stack", "codec", "sparse"):
                twice = [key for key in getattr(self, option, ()) if key in made]
                if twice:
                    raise ValueError(
                        f"{option} names {twice[0]!r}, which make_column keeps in a {type(made[twice[0]]).__name__}: "
                        "leave it out of one of them"
                    )

            self.own_column = next((type(column).__name__ for column in made.values()), None)
            self._own_keys = frozenset(made)
            self.not_compared.update(map(without_next, made))  # custom columns may change values

        made |= self._allocate({key: kind for key, kind in like.items() if key not in made})
        return {key: made[key] for key in like}

    @property
    def allocated(self) -> bool:
        """Whether the columns exist, that is, whether a first batch was stored."""
        return bool(self.columns)

    @property
    @override
    def bytes_per_row(self) -> int:
        return sum(column.row_bytes for column in self.columns.values())

    @property
    @override
    def nbytes(self) -> int:
        nbytes = sum(column.nbytes for column in self.columns.values())
        if self.pool is not None:
            nbytes += sum(column.nbytes for column in self.pool.entries.values())  # free entries too
        return nbytes

    @property
    def bytes_saved(self) -> int:
        """Bytes saved compared with plain tensors for every entry, next observations included."""
        if not self.columns:
            return 0

        plain = sum(column.value_bytes for column in self.columns.values())
        if self.pool is not None:
            plain += sum(self.columns[key].value_bytes for key in self.pool.pairs)
        return plain * self.capacity - self.nbytes

    def _find_facts(self) -> ColumnFacts:
        """Find what holds of the columns there are."""
        known = ColumnFacts(self.columns, self.device, self.compiled, self.pool)
        self.known = known if self.columns else None
        return known

    @override
    def prepare(
        self, batch: object, final: TensorDictBase | None, keys: BoundaryKeys | None, whole: bool = False
    ) -> Rows:
        structure = self.structure
        if structure is None:
            structure = Structure.of(batch)
        columns = structure.columns(batch)
        if not columns:
            raise ValueError("the batch has no entries to store")

        if keys is None and self.compact_obs:
            if not isinstance(batch, TensorDictBase):
                raise TypeError(f"compact_obs=True needs tensordict batches, got {type(batch).__name__}")
            keys = BoundaryKeys.probe(batch)
        arrangement = self.arrangement
        if arrangement is None or arrangement.tracks is (keys is None):
            arrangement = self._choose_arrangement(keys)

        rows = Rows(next(iter(columns.values())).shape[0], columns)
        facts = self.known
        if facts is None or facts.compiled is not self.compiled:
            facts = self._find_facts()

        # Most batches have the form of the stored rows and need no further checks.
        if facts.arriving is not None and final is None and rows.count <= self.max_size:
            addresses = facts.arriving.find(columns, rows.count)
            if addresses is not None and len(addresses) == len(columns):
                rows.source = addresses
                arrangement.lay_out_known(self, rows, keys)
                self.arrangement = arrangement
                return rows

        check_kinds(columns, facts.memory)
        skip = 0
        # If lanes make the capacity smaller than max_size, the count is a multiple of the lanes as well.
        if not whole and rows.count > self.max_size:
            skip = rows.count - self.capacity
        given = None
        if final is not None:
            if not isinstance(batch, TensorDictBase):
                raise ValueError("final is only for compact tensordict batches")
            given = _check_final(read_final(final), batch, columns, keys or BoundaryKeys.probe(batch), skip)
        if skip:
            self.warn_left_out(skip)
            rows.columns = {key: column[skip:] for key, column in columns.items()}
            rows.count -= skip

        arrangement.lay_out(self, rows, Arriving(structure, keys, given, skip))
        self.arrangement = arrangement
        return rows

    def _choose_arrangement(self, keys: BoundaryKeys | None) -> Arrangement:
        """Choose how batches are laid out, by the first one that a buffer brings."""
        if keys is None:
            return Unordered()

        self.compiled = True
        if self.compact_obs:
            return Compact()
        return Tracked()

    def keys_compared_in(self, columns: Columns, pool: NextPool | None) -> tuple[NestedKey, ...]:
        """Return the root keys in a batch's ``columns`` by which a row is known to follow another."""
        if self.known is not None:
            compared = self.known.compared_without(self.not_compared)
            if compared is not None:
                return compared.keys

        if pool is not None:
            columns = {name: columns[key] for key in pool.pairs for name in (key, next_key(key))}
        return compared_keys({key: column[0] for key, column in columns.items()}, self.not_compared)

    def match_columns(self, rows: Rows, structure: Structure) -> None:
        """Find the addresses of the ``rows`` that one call copies; ValueError unless they have the columns of the
        first batch, which allocates."""
        columns = rows.columns
        host = (self.known or self._find_facts()).host
        if host is not None:
            rows.source = host.find(columns, rows.count)
            if rows.source is not None and len(rows.source) == len(columns) == len(self.columns):
                return

        if not self.columns:
            self.columns = self._make_columns(
                {key: (column.dtype, column.shape[1:]) for key, column in columns.items()}
            )
            self.structure = structure
            self.known = None
            return

        for key, column in columns.items():
            kept = self.columns.get(key)
            if kept is None:
                raise ValueError(
                    f"the batch has an entry {key!r} that the first extend did not have: "
                    f"the storage keeps {sorted(self.columns, key=repr)}"
                )
            if kept.dtype is not column.dtype or kept.shape != column.shape[1:]:
                raise ValueError(
                    f"{shown(key)} is {column.dtype} {tuple(column.shape[1:])} per row, the storage has kept "
                    f"{kept.dtype} {tuple(kept.shape)} since the first extend"
                )

        if len(columns) != len(self.columns):  # all keys are known, so some are missing
            missing = next(key for key in self.columns if key not in columns)
            raise ValueError(f"the batch lacks the entry {missing!r} that the first extend had")

    def use_pool(self, pool: NextPool) -> None:
        """Keep next observations that no row holds in ``pool``, from the first batch on."""
        pool.allocate(self.columns, self._own_keys)
        self.pool = pool
        self.known = None

    @override
    def write(self, slot: int, rows: Rows, after: After | None = None) -> None:
        host = (self.known or self._find_facts()).host
        written: Collection[NestedKey] = ()
        if host is not None and rows.source is not None:
            if host.write_found(slot, rows.source, rows.count):
                written = host.columns
        elif host is not None:
            written = host.write(slot, rows.columns, rows.count, host.rows)
        if len(written) == len(rows.columns):
            return

        # As many as fit before the last slot; the rest wraps around to slot 0.
        fit = min(rows.count, self.capacity - slot)
        whole = fit == rows.count
        parts = [(0, fit, slot)]
        if not whole:
            parts.append((fit, rows.count, 0))

        for first, stop, to in parts:
            hint = after
            if after is not None and not whole:
                among = (after.rows >= first) & (after.rows < stop)
                hint = After(after.rows[among] - first, after.slots[among])

            for key, values in rows.columns.items():
                if key in written:
                    continue
                if not whole:
                    values = values[first:stop]
                self.columns[key].write(to, values, hint)

    @override
    def put(self, slots: Tensor, rows: Rows, at: Tensor | None = None) -> None:
        for key, values in rows.columns.items():
            if at is None:
                chosen = values
            else:
                chosen = values.index_select(0, upload(at, values.device))
            self.columns[key].put(slots, chosen)

    @override
    def link(self, ring: Ring, rows: Rows, keys: BoundaryKeys | None) -> Links | None:
        if not isinstance(ring, TrajectoryIndex):
            return None
        assert rows.fragments is not None

        known = self.known or self._find_facts()
        source = rows.source
        pool = self.pool
        compared = known.compared_without(self.not_compared)
        if compared is None:
            compared = Compared.of(self, pool, known.host)
            known.compared = compared

        compare = NOTHING
        if source is not None and compared.pairs is not None:
            ends: list[Tensor] = []
            if pool is not None:  # the pool's columns may have been reallocated
                ends = [rows.tails[key] for key in compared.order]
                entries: list[Any] = [pool.entries[key] for key in compared.order]
                compared.pairs[:, 0] = [column.data.data_ptr() for column in entries]
                heads = [rows.columns[key] for key in compared.order]
                source = np.array([values.data_ptr() for values in heads + ends], np.int64)
            if all(end.is_cpu and end.is_contiguous() for end in ends):
                compare = compared.pairs, source, len(compared.keys), pool is not None

        found, wrong = ring.link(rows.fragments, compare)

        if wrong or compare is NOTHING:
            check = LinkCheck(self, pool, ring, rows, found)
            if compare is NOTHING:
                check.compare(compared.keys)
            named = keys is not None and keys.traj in rows.columns
            check.settle(compared.keys, check.unlike(), named)
        return Links(*found)

    @override
    def keep_next(self, ring: Ring, rows: Rows, links: Links, first: int) -> tuple[Array, Array]:
        assert self.pool is not None and rows.fragments is not None and isinstance(ring, TrajectoryIndex)
        return self.pool.place(ring, rows.fragments, links.before, links.agree, rows.tails, first)

    @override
    def needs_follow(self, keys: Iterable[NestedKey] | None) -> bool:
        return self.pool is not None and (
            keys is None or not set(keys).isdisjoint(self.pool.next_keys.values())
        )

    @override
    def write_drawn(self, draw: Draw, data: object, shape: torch.Size, keys: BoundaryKeys | None) -> None:
        # A tensordict may have only some of the entries.
        assert self.structure is not None
        columns = self.structure.columns_of_rows(data, shape)
        check_kinds(columns, (self.known or self._find_facts()).memory)
        fixed = set()
        if keys is not None:
            fixed = {keys.is_init, keys.done, *keys.more_done, keys.traj, keys.step_count}
        if self.pool is not None:
            fixed |= {*self.pool.pairs, *self.pool.next_keys.values()}

        # Check all entries before writing any: an error changes nothing.
        kept = self.read_rows(draw.slots, draw.follow, keys=frozenset(columns))
        for key, values in columns.items():
            if key not in kept:
                raise ValueError(f"no entry {key!r}: the storage keeps {sorted(self.columns, key=repr)}")

            stored = kept[key]
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
                self.not_compared.add(without_next(key))

    @override
    def read_rows(
        self,
        slots: Tensor,
        follow: Follow | None = None,
        *,
        keys: frozenset[NestedKey] | None = None,
    ) -> Columns:
        if follow is None and self.pool is not None and self.needs_follow(keys):
            raise RuntimeError(
                "a compact storage reads next observations from the rows that follow: the sampler must set "
                "Draw(..., follow=ring.follow(slots)) where draw is called with follow=True"
            )

        known = self.known
        pool = None if follow is None else self.pool
        if known is None or known.compiled is not self.compiled:
            known = self._find_facts()

        columns: Columns = {}
        if keys is None and known.host is not None and pool is not None and follow is not None and pool.plain:
            # The variable keeps the pool's memory alive: a thread that writes may replace it by a larger one.
            entries = pool.tensors
            columns = known.host.take_all(slots, follow.slots, follow.patch, entries)
            if columns:
                return columns

        # First the columns that one call copies, then the others one by one.
        if known.host is not None:
            columns = known.host.take(slots, keys)

        asked: Collection[NestedKey] = self.columns
        if keys is not None:
            asked = self.columns.keys() & keys
        if len(columns) < len(asked):
            copied = columns
            columns = {}
            placed = upload(slots, self.device)
            for key, column in self.columns.items():
                if key in copied:
                    columns[key] = copied[key]
                elif key in asked:
                    where = slots if column.looks_up_on_host else placed
                    columns[key] = column.take(where)

        # Last the next observations: from the next rows, or from the pool where no row holds them.
        if pool is not None and follow is not None:
            following = follow.slots.clamp(min=0)
            following_placed = upload(following, self.device)
            patch_placed = upload(follow.patch, self.device)

            for key, name in pool.next_keys.items():
                if keys is not None and name not in keys:
                    continue

                where = following_placed
                patch = patch_placed
                if self.columns[key].looks_up_on_host:
                    where = following
                    patch = follow.patch

                rows = self.columns[key].take(where)
                if patch.shape[1]:
                    unheld = upload(patch_placed[0], rows.device)
                    put_rows(rows, unheld, pool.entries[key].take(patch[1]))
                columns[name] = rows
        return columns

    @property
    @override
    def copies_bytes(self) -> bool:
        host = None if self.known is None else self.known.host
        if host is None or len(host.columns) != len(self.columns):
            return False
        return self.pool is None or self.pool.plain

    @override
    def build(self, values: Columns | list[Any], shape: torch.Size) -> Any:
        assert self.structure is not None and isinstance(values, dict)

        return self.structure.build(values, shape)

    @override
    def state_dict(self, rows: int, pool_rows: int = 0) -> dict[str, Any]:
        columns = {key: column.state_dict(rows) for key, column in self.columns.items()}
        return self.tables(pool_rows) | {"columns": columns}

    @override
    def tables(self, pool_rows: int) -> dict[str, Any]:
        entries = {} if self.pool is None else self.pool.entries
        return {
            "lanes": self.lanes,
            "structure": structure_to_plain(self.structure),
            "like": {key: (column.dtype, column.shape) for key, column in self.columns.items()},
            "kinds": {key: _column_kind(column) for key, column in self.columns.items()},
            "pool": {key: column.state_dict(pool_rows) for key, column in entries.items()},
        }

    def columns_like(self, state: dict[str, Any]) -> dict[NestedKey, Column]:
        """Return the columns, or, before the first batch, blank ones like those that the tables in ``state`` describe;
        ValueError if the tables are invalid, or differ from the columns in shape, dtype or kind."""
        like = state["like"]
        if not self.columns or structure_to_plain(self.structure) != state["structure"]:
            _check_row_form(like, structure_from_plain(state["structure"]))

        columns = self.columns or {
            key: self.make_column(key, *kind) or self._blank_column(key, *kind) for key, kind in like.items()
        }

        expected = {
            key: (column.dtype, column.shape, _column_kind(column)) for key, column in columns.items()
        }
        saved = {key: (dtype, shape, state["kinds"][key]) for key, (dtype, shape) in like.items()}
        if saved != expected:
            key = next(key for key in {**saved, **expected} if saved.get(key) != expected.get(key))
            raise ValueError(
                f"the state has {_show_form(saved.get(key))} as {shown(key)}, this storage keeps "
                f"{_show_form(expected.get(key))}: load it into a storage created like the saved one, and extend this "
                "buffer with other.oldest_first(), changed as needed"
            )
        return columns

    @override
    def check_tables(self, state: dict[str, Any], ring: Ring) -> None:
        if "like" not in state:
            raise ValueError(f"the state is of a ListStorage, this is a {type(self).__name__}")

        lanes = torch.Size(state["lanes"])
        own = self.lanes if self.columns else None
        if min(lanes, default=1) < 1:
            raise damaged(f"it has the lanes {list(lanes)}")
        if len(lanes) != self.ndim - 1 or own not in (None, lanes):
            own_lanes = "" if own is None else f" and lanes {list(own)}"
            raise ValueError(
                f"the state is of a storage with lanes {list(lanes)} after the time dim, this one has ndim={self.ndim}"
                f"{own_lanes}"
            )

        whole_steps = self.max_size // lanes.numel() * lanes.numel()  # older states
        room = whole_steps if self.columns else self.room(lanes)
        if ring.capacity not in (room, whole_steps):
            raise other_capacity_error(ring.capacity, room)

        if state["like"] and bool(state["pool"]) != self.compact_obs:
            raise ValueError(
                f"the state is of a storage with compact_obs={bool(state['pool'])}, this one has "
                f"compact_obs={self.compact_obs}"
            )

    @override
    def check_state_dict(self, state: dict[str, Any], ring: Ring) -> None:
        columns = self.columns_like(state)
        pool = state["pool"]
        if state["columns"].keys() != columns.keys():
            raise damaged(f"it has the columns {list(state['columns'])}, expected {list(columns)}")

        unpaired = any(key not in columns or next_key(key) in columns for key in pool)
        if unpaired or (ring.pool_size and not pool):
            raise damaged(f"it has a pool of next observations of {list(pool)}, which are not stored once")

        expected = [(key, column, state["columns"][key], ring.used) for key, column in columns.items()]
        expected += [
            (next_key(key), columns[key].pool(), saved, ring.pool_size) for key, saved in pool.items()
        ]
        for key, column, saved, count in expected:
            try:
                found = column.check_state_dict(saved)
            except ValueError as error:
                raise ValueError(f"the entry {key!r}: {error}") from None
            if found not in (None, count):
                raise damaged(f"the entry {key!r} has {found} values, the index counts {count}")

    def _blank_column(self, key: NestedKey, dtype: torch.dtype, shape: torch.Size) -> Column:
        """Return an empty column of the kind that `_allocate` creates, to check a state."""
        return TensorColumn(torch.empty((0, *shape), dtype=dtype))

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state["like"]:
            return

        new = not self.columns
        if new:
            before = self.lanes
            self.lanes = torch.Size(state["lanes"])
            try:
                self.columns = self._make_columns(state["like"])
            finally:
                if not self.columns:
                    self.lanes = before
            # together: an interrupt must not leave what is known of other columns
            self.structure, self.known = structure_from_plain(state["structure"]), None

        for key, column in self.columns.items():
            saved = state["columns"][key]
            # The memory of a new column and of unshared values has no other references, so the values can
            # replace the column without a copy. Only for TensorColumn itself: a subclass may store rows
            # elsewhere, for example in a file.
            if new and self.own_column is None and type(column) is TensorColumn:
                values = saved["values"]
                own = column.data
                if saved.get("unshared") and own.device.type == "cpu" and values.shape == own.shape:
                    column.data = values
                    continue
            column.load_state_dict(saved)

        if self.compact_obs:
            # together: what is known depends on the pool
            self.pool, self.known = NextPool(list(state["pool"])), None
            self.pool.allocate(self.columns, self._own_keys)
            for key, column in self.pool.entries.items():
                column.load_state_dict(state["pool"][key])

    def enter_process(self) -> None:
        """Raise RuntimeError if the tensors are shared with the parent process, as the counters are not."""
        for column in self.columns.values():
            if isinstance(column, TensorColumn) and bool(column.data.is_shared()):  # type: ignore[no-untyped-call]
                raise RuntimeError(
                    "the storage's tensors are shared with the process that made the buffer, which does not see "
                    "what is written here: pass buffer.handle(), or use LazyMemmapStorage with shared=True"
                )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"known": None}  # a copy has its own memory


def _check_final(
    final: Final, batch: TensorDictBase, columns: Columns, keys: BoundaryKeys, skip: int
) -> Final:
    """``final``, checked against the batch, for its rows from number ``skip`` on, counted from there."""
    row = check_final(final, columns, len(batch))
    late = row >= skip
    kept = batch
    if skip:
        final = Final(row[late] - skip, {key: obs[late] for key, obs in final.next.items()})
        kept = batch[skip:]

    ends = run_ends(kept, is_init_key=keys.is_init, done_key=keys.done, traj_key=keys.traj)
    check_final_covers(row[late] - skip, ends, {key: column[skip:] for key, column in columns.items()})
    return final


def _column_kind(column: Column) -> str:
    """Return the kind of a column, for saved tables and errors; memory and file columns are the same kind."""
    if isinstance(column, TensorColumn):
        return ""
    return f" in a {column.saved_as}"


def _check_row_form(like: Mapping[Any, tuple[Any, Any]], structure: Structure | None) -> None:
    """Raise ValueError unless each entry of a state's table has a key, a dtype and a shape, and together they are
    those of rows of this structure."""
    for key, (dtype, shape) in like.items():
        names = key if isinstance(key, tuple) else (key,)
        if not names or not all(isinstance(name, str) for name in names):
            raise damaged(f"{key!r} is not the key of an entry")
        is_shape = isinstance(shape, torch.Size) and all(size >= 0 for size in shape)
        if not isinstance(dtype, torch.dtype) or not is_shape:
            raise damaged(f"its entry {key!r} has the dtype {dtype!r} and the shape {shape!r}")

    if structure is None:
        raise damaged("its rows are of an unknown kind")

    # Build and flatten an empty batch of that kind.
    rows = {key: torch.empty((0, *shape), dtype=dtype) for key, (dtype, shape) in like.items()}
    try:
        again = structure.columns(structure.build(rows, torch.Size([0])))
    except (KeyError, RuntimeError, TypeError) as error:
        raise damaged(f"its entries do not make rows of its kind ({error})") from None

    flattened = {key: (column.dtype, column.shape[1:]) for key, column in again.items()}
    if flattened != dict(like):
        raise damaged("its entries are not those of its kind of rows")


def _show_form(form: tuple[torch.dtype, torch.Size, str] | None) -> str:
    """Return the dtype, shape and kind of a column in words, for errors."""
    if form is None:
        return "nothing"
    dtype, shape, kind = form
    return f"{dtype} {tuple(shape)} per row{kind}"
