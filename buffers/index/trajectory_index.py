"""The trajectory index: tracks which stored rows follow each other, updated at every write."""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.index.fragments import NONE, Fragments
from flatroll.buffers.index.ring import Array, Draw, Follow, Ring
from flatroll.buffers.index.saved_tables import SavedFragments
from flatroll.kernels.rows.records import (
    CHAIN,
    ENTRY,
    FRAGMENT,
    SAVED_STATE,
    SLICE,
    STATE,
    Compare,
    Index,
    Way,
)
from flatroll.layout.checks import check_choice, check_whole_number

By = Literal["trajectory", "start"]
BY: tuple[By, ...] = ("trajectory", "start")

#: ``choose(at, count)``: see `TrajectoryIndex.choose`.
Choose: TypeAlias = Callable[[Array, Array], tuple[Array, Array]]

#: Entries from which on a table grows at once to what all rows will need: to copy more would take too long.
_LARGE = 2**18

NO_PATCH: Array = np.zeros((2, 0), np.int64)
NOTHING: Compare = (np.zeros((0, 4), np.int64), NONE, 0, False)


class _Kernels(NamedTuple):
    publishing: ModuleType
    drawing: ModuleType
    starts: ModuleType


@cache
def _kernels() -> _Kernels:
    """The compiled kernels, imported when they are first needed: numba takes 0.3 s to load."""
    from flatroll.kernels.slices import drawing, publishing, starts

    return _Kernels(publishing, drawing, starts)


class TrajectoryIndex(Ring):
    """A ring that also tracks which trajectory each stored row belongs to, and draws slices.

    A table of fragments (consecutive rows of one trajectory, linked in time order) is updated as rows are written and
    trimmed as the ring overwrites them. A write takes time in the number of its fragments, a draw in its rows and the
    logarithm of the number of trajectories; both are independent of the capacity.

    A batch's first row of a trajectory continues the rows stored before if the last row of its id (without ids:
    the newest row) is not done, the row is not ``is_init``, and ``step_count``, if stored, is consecutive. Slices
    therefore span a collector's windows and the writes of interleaved workers.

    Not thread-safe: the caller locks it.

    Args:
        capacity: number of rows.
        first: number of the first row.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
    >>> done = torch.tensor([False, False, True, False, False])
    >>> index = TrajectoryIndex(capacity=8)
    >>> index.write(Fragments.read(TensorDict({"next": {"done": done}}, [5]), BoundaryKeys()))
    >>> index.trajectories, index.longest, index.starts(length=2)
    (2, 3, 3)
    >>> index.next_row(torch.arange(5))
    tensor([ 1,  2, -1,  4, -1])
    """

    _dtype = STATE
    _saved_dtype = SAVED_STATE

    def __init__(self, capacity: int, first: int = 0) -> None:
        super().__init__(capacity, first)
        self._fragments: Array = np.zeros(64, FRAGMENT)
        self._chains: Array = np.zeros(64, CHAIN)
        #: The record that kernels take, made again wherever one of its tables is.
        self.tables: Index = self._state, self.capacity, self._fragments, self._chains
        self._table: Array = np.zeros(64, ENTRY)
        self._touched: Array = np.zeros(64, np.int64)
        self._spare: Array = np.zeros(0, np.int64)

        self._open_when_saved: Array = NONE  # chains of a loaded index, see reopen
        self._claimed: tuple[int, int] = (-1, 0)  # set by claim: previous oldest row, chains in _touched
        self._changing = False  # whether weights may be stale
        self._weights: OrderedDict[Way, tuple[Array, Array]] = OrderedDict()

    # -- writing -----------------------------------------------------------------------------------------------

    def write(self, fragments: Fragments) -> None:
        """Claim, link and publish the rows of ``fragments`` (at most ``capacity``) at once."""
        self.claim(fragments.rows)
        self.enter(fragments, self.link(fragments)[0][0])

    @override
    def claim(self, rows: int) -> int:
        before = self.head
        written = self.written
        if written + rows - self.capacity <= before:  # there is room: nothing is dropped
            self._claimed = before, 0
            return written

        self._changing = True
        if len(self._touched) <= rows:
            self._touched = np.zeros(_power_of_two(rows + 1), np.int64)

        # Dropping rows shortens trajectories, so update their weights before the next draw.
        count = _kernels().publishing.claim(self.tables, rows, self._spare, self._touched)
        self._claimed = before, count
        self._update_weights(self._touched, count)
        return written

    def link(self, fragments: Fragments, compare: Compare = NOTHING) -> tuple[Array, int]:
        """Find what each of F fragments will continue, before or after the claim of their rows.

        Args:
            fragments: the fragments to enter.
            compare: what their first rows are compared with, see `flatroll.kernels.slices.publishing.link`.

        Returns:
            what that finds, int64 ``[3, F]``, and what it returns.
        """
        found = np.empty((4, len(fragments.firsts)), np.int64)
        seen = np.zeros(_power_of_two(2 * len(fragments.ids)), ENTRY)
        wrong = _kernels().publishing.link(self.tables, self._table, tuple(fragments), compare, seen, found)
        return found[:3], wrong

    def enter(
        self, fragments: Fragments, before: Array, pool: Array | None = None, released: Array | None = None
    ) -> None:
        """Publish the claimed rows of a batch of F fragments; ``before`` is the result of :meth:`link`.

        ``pool`` (int64 ``[F]``) holds the pool entry with the next observation of each fragment's last row, -1 for
        none; ``released`` (int64) the chains that release their last row's entry, because the next row holds the same
        values.
        """
        count = len(fragments.firsts)
        self._reserve(count, fragments.rows, before)
        self._changing = True
        self._claimed = -1, 0

        if pool is None:
            pool = NONE
        if released is None:
            released = NONE
        _kernels().publishing.publish(
            self.tables,
            self._table,
            tuple(fragments),
            before,
            pool,
            self._spare,
            released,
            self._touched,
        )
        self._update_weights(self._touched, count)

    # -- the pool of next observations that no row holds ---------------------------------------------------------

    def keep(self, before: Array, agree: Array) -> tuple[Array, Array, Array]:
        """Take a free pool entry for each fragment whose last row has a next observation that no row holds.

        The pool grows if it has too few. ``before`` and ``agree`` are what :meth:`link` found.

        Returns:
            the entry of each fragment, -1 for none (int64 ``[F]``), the fragments with an entry, and the chains whose
            last entry is released, for :meth:`enter`.
        """
        found = np.empty((3, len(before)), np.int64)
        pool, kept, released = found
        count, free = _kernels().publishing.keep(self._state, self._spare, before, agree, *found)
        if free < 0:
            # _spare[:spare] lists the free entries; the rest of _spare is meaningless.
            size = len(self._spare)
            spare = int(self._state["spare"][0])
            larger = np.empty(max(2 * size, size + count, 64), np.int64)
            larger[:spare] = self._spare[:spare]

            fresh = np.arange(size, len(larger))
            larger[spare : spare + len(fresh)] = fresh
            self._spare = larger
            self._state["spare"] = spare + len(fresh)

            count, free = _kernels().publishing.keep(self._state, self._spare, before, agree, *found)

        return pool, kept[:count], released[:free]

    @property
    @override
    def pool_size(self) -> int:
        """Number of pool entries, free ones included."""
        return len(self._spare)

    @property
    def pool_used(self) -> int:
        """Number of pool entries that hold a next observation."""
        return len(self._spare) - int(self._state["spare"][0])

    def tail_entries(self, chains: Array) -> Array:
        """Return the pool entry of the last row of each trajectory in ``chains`` (int64), -1 for none."""
        # The places of `flatroll.kernels.slices.links.place`.
        at = (self._chains["last"][chains] - self._state["base"][0]) % len(self._fragments)
        return np.asarray(self._fragments["pool"][at], np.int64)

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def trajectories(self) -> int:
        """Number of trajectories that have stored rows."""
        return int(self._state["live"][0])

    @property
    def open_trajectories(self) -> int:
        """Number of stored trajectories whose last row is not done, so that new rows may continue them."""
        return int(self._state["open"][0])

    @property
    def fragments(self) -> int:
        """Number of fragments (runs of consecutive rows) of the stored trajectories."""
        return int(self._state["end"][0] - self._state["first"][0])

    @property
    def longest(self) -> int:
        """Number of stored rows of the longest trajectory; O(number of trajectories)."""
        chains = self._chains[: int(self._state["slots"][0])]
        return int((chains["total"] - chains["dropped"]).max(initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of the index's own tables."""
        tables = [self._fragments, self._chains, self._table, self._touched, self._spare]
        for weight, tree in self._weights.values():
            tables += [weight, tree]
        return sum(table.nbytes for table in tables)

    def starts(self, length: int, *, strict: bool = True) -> int:
        """Count the rows at which a slice of ``length`` rows can start.

        A trajectory of n stored rows has ``n - length + 1`` of them; a shorter one has none, or, unless
        ``strict``, its first row.
        """
        return int(self._tree(length, "start", strict)[-1])

    def draw(
        self,
        count: int,
        length: int,
        *,
        by: By = "trajectory",
        strict: bool = False,
        span: tuple[int, int] = (0, 0),
        generator: torch.Generator | None = None,
        follow: bool = False,
        rows: int | None = None,
    ) -> Draw:
        """Draw ``count`` slices with replacement, each up to ``length`` consecutive rows of one trajectory.

        Args:
            count: number of slices, at least 1.
            length: rows per slice; shorter trajectories give shorter slices, or with ``strict`` are left out.
            by: ``"trajectory"`` draws a trajectory uniformly, then a start within it uniformly; ``"start"`` draws
                uniformly over all starts of all trajectories.
            span: number of rows, less than ``length``, by which a slice may extend beyond its trajectory on either
                side; these rows are left out. Each such start counts.
            strict: only trajectories of at least ``length`` rows.
            generator: CPU random generator; None is torch's global one.
            follow: also return where each row's next observation is.
            rows: draw more slices until there are this many rows, and cut the last slice to fit. Default: ``count``
                slices of whatever length.

        Raises:
            RuntimeError: nothing is stored, or no trajectory is long enough.
        """
        if span != (0, 0) and not (0 <= span[0] < length and 0 <= span[1] < length):
            raise ValueError(f"span must be two numbers from 0 to length - 1 = {length - 1}, got {span}")

        tree = self._tree(length, by, strict, span[0] + span[1])
        if not tree[-1]:
            raise self.too_short_error(length)

        if rows is None:
            wanted = count * length
            most = count
        else:
            wanted = rows
            # Slices have at least one row, so a round asks for at most 9/8 of the missing rows.
            most = max(count, rows + rows // 8 + 1)

        slices = np.empty(most, SLICE)
        firsts = np.empty(most, np.int64)
        lasts = np.empty(most, np.int64)
        rule = length, by == "start", *span
        chosen = slices, firsts, lasts

        so_far = 0, 0  # slices and rows
        asked = count
        while asked:
            # Two random numbers per slice: one for the trajectory, by weight, and one for the start within it.
            uniform = torch.rand(2 * asked, dtype=torch.float64, generator=generator).numpy()
            so_far = _kernels().drawing.choose(self.tables, tree, uniform, rule, wanted, so_far, chosen)

            asked = 0
            if rows is not None and so_far[1] < rows:
                asked = missing_slices(rows, *so_far)

        taken, total = so_far
        return self._list_slices(slices, firsts[:taken], lasts[:taken], total, follow)

    def marked_starts(
        self,
        count: int,
        length: int,
        marks: Array,
        *,
        by: By = "trajectory",
        strict: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw ``count`` slots, with replacement, of marked rows at which slices start; int64 ``[count]``.

        A trajectory is drawn as by :meth:`draw`, then one of its rows, uniformly. The slice begins at the last row up
        to the drawn one that ``marks`` (bool ``[capacity]``, by slot) marks, or at the trajectory's first marked row
        if the ring has dropped that one.

        The last start is the first marked row whose slice reaches the end of the trajectory, and that slice may be
        short; with ``strict``, it is the last marked row with ``length`` rows. Rows are drawn up to the mark after it.

        Raises:
            RuntimeError: nothing is stored, or no trajectory is long enough and marked where a slice could start.
        """
        tree = self._tree(length, by, strict)
        if not tree[-1]:
            raise self.too_short_error(length)

        uniform = torch.rand(2 * count, dtype=torch.float64, generator=generator).numpy()
        starts = np.empty(count, np.int64)
        if _kernels().starts.draw_marked(self.tables, tree, uniform, length, strict, marks, starts) < count:
            raise RuntimeError(
                f"no stored row at which a slice of {length} rows could start is marked as a start: use shorter "
                "slices, strict_length=False, or mark more rows"
            )

        return torch.from_numpy(starts)

    def slices_from(self, starts: Tensor, length: int | Tensor, *, follow: bool = False) -> Draw:
        """Return the slices of up to ``length`` rows (one number, or one per slice) that start at the slots
        ``starts`` (int64 ``[S]``, stored rows); a slice is shorter if its trajectory ends."""
        if isinstance(length, int):
            lengths = np.full(len(starts), length)
        else:
            lengths = length.numpy()

        count = len(starts)
        slices = np.empty(count, SLICE)
        firsts = np.empty(count, np.int64)
        lasts = np.empty(count, np.int64)
        rows = _kernels().drawing.slices_from(self.tables, starts.numpy(), lengths, (slices, firsts, lasts))
        if rows < 0:
            raise IndexError(f"slice {-1 - rows} starts at a slot without a row, or has no length")
        return self._list_slices(slices, firsts, lasts, rows, follow)

    def slice_partition(
        self,
        length: int,
        *,
        by: By = "trajectory",
        strict: bool = False,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Choose the slices of one pass without replacement: first slots and lengths, int64 ``[2, n]``.

        By trajectory: one slice each, its start drawn uniformly. By start: each trajectory is cut into consecutive
        slices of ``length`` rows, from a random row on (without ``shuffle`` from its first row); ``strict`` leaves
        out the shorter slices at both ends. A trajectory of fewer than ``length`` rows is one slice, or with
        ``strict`` none. RuntimeError if none is long enough.
        """
        chains = self._chains[: int(self._state["slots"][0])]
        rows = chains["total"] - chains["dropped"]  # stored rows of each trajectory

        # Number of possible starts of each trajectory's (first) slice.
        if by == "trajectory":
            choices = np.maximum(rows - length, 0) + 1
        elif strict:
            choices = rows % length + 1
        else:
            choices = np.where(rows > length, length, 1)

        begin = np.zeros(len(chains), np.int64)
        if by == "trajectory" or shuffle:
            uniform = torch.rand(len(chains), dtype=torch.float64, generator=generator).numpy()
            # uniform * choices may round up to choices
            np.minimum((uniform * choices).astype(np.int64), choices - 1, out=begin)
        least = length if strict else 1
        begin[rows < least] = -1  # too short for a slice

        # By start, a trajectory yields its full slices and one shorter slice at each end.
        most = len(chains)
        if by != "trajectory":
            most = int((rows // length).sum()) + 2 * len(chains)

        slices = np.empty((2, most), np.int64)
        count = _kernels().starts.slice_partition(self.tables, begin, length, by == "start", strict, slices)
        if not count:
            raise self.too_short_error(length)
        return torch.from_numpy(slices[:, :count])

    def _list_slices(self, slices: Array, firsts: Array, lasts: Array, rows: int, follow: bool) -> Draw:
        """Return the draw of ``slices``, of ``rows`` rows in all, which begin and end at ``firsts`` and ``lasts``."""
        slots = np.empty(rows, np.int64)
        following = NONE
        patch = NO_PATCH
        if follow:
            following = np.empty(rows, np.int64)
            patch = np.empty((2, rows), np.int64)

        patched = _kernels().drawing.walk(self.tables, slices, firsts, slots, following, patch)

        draw = Draw(torch.from_numpy(slots), torch.from_numpy(firsts), torch.from_numpy(lasts))
        if follow:
            draw.follow = Follow(torch.from_numpy(following), torch.from_numpy(patch[:, :patched]))

        state = self._state[0]  # unchanged since the kernels ran, because the caller holds the lock
        draw.version = int(state["head"]), int(state["taken"])
        return draw

    def new_starts(self, first: int, length: int, *, strict: bool) -> Array:
        """Return the slots (int64) of rows at which a slice of ``length`` rows could not start before the rows
        from number ``first`` on were written, but can now. If ``first`` is the oldest row, these are all starts."""
        if not len(self):  # no fragments exist before the first write, or during a write of all rows
            return NONE

        slots = np.empty(self.written - max(first, self.head), np.int64)
        # The kernel fills slots from the front and returns how many it found.
        return slots[: _kernels().starts.new_starts(self.tables, first, length, strict, slots)]

    def shortened_trajectories(self, length: int, head: int) -> Array:
        """Return the first slots (int64) of trajectories that have at least one row but fewer than ``length`` since the
        ring dropped the rows starting at number ``head``; trajectories that were shorter before may be included."""
        claimed, count = self._claimed

        # If claim has just dropped these rows, only the trajectories that it shortened; otherwise all.
        touched = self._touched[:count]
        if head != claimed:
            touched = np.arange(int(self._state["slots"][0]))

        slots = np.empty(len(touched), np.int64)
        return slots[: _kernels().starts.shortened_trajectories(self.tables, touched, length, slots)]

    def too_short_error(self, length: int) -> RuntimeError:
        """Return the error "no trajectory has ``length`` rows"; raise RuntimeError if nothing is stored."""
        self.check_not_empty()
        return RuntimeError(
            f"no stored trajectory has {length} consecutive rows, the longest has {self.longest}: "
            "use shorter slices, strict_length=False, or collect longer trajectories"
        )

    @property
    @override
    def version(self) -> tuple[int, int]:
        return self.head, int(self._state["taken"][0])

    @override
    def overwritten(self, draw: Draw) -> Tensor | None:
        lost = super().overwritten(draw)
        if int(self._state["taken"][0]) == draw.version[1]:
            return lost

        # A released pool entry may be reused for another row's observation.
        if (
            draw.ahead is not None or draw.chosen is not None
        ):  # which entries the transforms read is not known
            return torch.ones(len(draw.slots), dtype=torch.bool)
        if draw.follow is None or not draw.follow.patch.shape[1]:
            return lost

        # An entry is taken for one row when that is written, and this row never gets another one. So a row that is
        # stored and has its entry still has had it since the draw.
        if lost is None:
            lost = torch.zeros(len(draw.slots), dtype=torch.bool)
        at, entries = draw.follow.patch
        stored = ~lost[at]
        at = at[stored]

        now = torch.full_like(at, -1)
        found_at, found = self.follow(draw.slots[at]).patch
        now[found_at] = found
        lost[at] = now != entries[stored]

        if not lost.any():
            return None
        return lost

    @override
    def follow(self, slots: Tensor) -> Follow:
        asked = np.ascontiguousarray(slots.numpy(force=True))
        following = np.empty(len(asked), np.int64)
        patch = np.empty((2, len(asked)), np.int64)
        patched = _kernels().drawing.follow_rows(self.tables, asked, following, patch)
        return Follow(torch.from_numpy(following), torch.from_numpy(patch[:, :patched]))

    def next_row(self, slots: Tensor) -> Tensor:
        """Return the slot (int64) of the row after each of ``slots`` in its trajectory, -1 for none."""
        return self.follow(slots).slots

    # -- other rows of the trajectories of stored rows --------------------------------------------------------------

    def ahead(self, slots: Tensor, n: int) -> Tensor:
        """Return the slots of the stored rows ``slots`` and of the n - 1 rows after each; int64 ``[N, n]``.

        Column 0 is ``slots``, column j the row j steps later in the same trajectory, -1 where none is stored.
        """
        asked = np.ascontiguousarray(slots.numpy(force=True))
        ahead = np.empty((len(asked), n), np.int64)
        _kernels().drawing.ahead_rows(self.tables, asked, ahead)
        return torch.from_numpy(ahead)

    def extents(self, slots: Tensor) -> Array:
        """Return the positions of the stored rows ``slots`` in their trajectories; int64 ``[3, N]``.

        Row 0 is each row's position among the stored rows of its trajectory, from 0; row 1 their number; row 2 the
        trajectory, an index for :meth:`rows_at`.
        """
        asked = np.ascontiguousarray(slots.numpy(force=True))
        found = np.empty((3, len(asked)), np.int64)
        _kernels().drawing.extents(self.tables, asked, found)
        return found

    def rows_at(self, chains: Array, positions: Array) -> Tensor:
        """Return the slots (int64 ``[N]``) of rows, given their trajectories and positions as of :meth:`extents`."""
        return self._slots_of(
            chains, self._chains["dropped"][chains] + positions, np.ones(len(chains), np.int64)
        )

    def _slots_of(self, chains: Array, offsets: Array, rows: Array) -> Tensor:
        """Return the slots (int64) of ``rows[j]`` rows from ``offsets[j]`` on of each of the trajectories ``chains``,
        one after the other."""
        stops = np.cumsum(rows)
        firsts = stops - rows
        slices = np.empty(len(chains), SLICE)
        slices["number"] = self._chains["last"][chains]
        slices["offset"] = offsets
        slices["left"] = rows
        slices["at"] = firsts

        slots = np.empty(rows.sum(), np.int64)
        _kernels().drawing.walk(self.tables, slices, firsts, slots, NONE, NO_PATCH)
        return torch.from_numpy(slots)

    def choose(self, draw: Draw, choose: Choose) -> Tensor:
        """Call ``choose`` to select another row for some rows or slices of a draw; see `Draw.chosen`.

        Args:
            draw: single rows, or slices, which are represented by their first rows.
            choose: maps positions of S rows in their trajectories and the trajectories' lengths, both int64 ``[S]``,
                to ascending indices in S and the chosen positions, both int64 ``[M]``.
        """
        heads = draw.slots if draw.firsts is None else draw.slots[draw.firsts]
        at, count, chains = self.extents(heads)
        which, positions = choose(at, count)
        slots = self.rows_at(chains[which], positions)

        if draw.firsts is None:
            return torch.stack([torch.from_numpy(which), slots])

        # A slice's rows, including padding, extend to the first row of the next slice.
        of_slice = torch.full((len(heads),), -1).index_copy_(0, torch.from_numpy(which), slots)
        bounds = torch.cat([draw.firsts, torch.tensor([len(draw.slots)])])
        of_row = of_slice.repeat_interleave(bounds.diff())
        rows = (of_row >= 0).nonzero().squeeze(1)
        return torch.stack([rows, of_row[rows]])

    def find_rows(self, traj: int) -> Tensor:
        """Return the slots (int64) of the stored rows of trajectory ``traj`` in time order; if several
        trajectories used this id, one after the other. Without ids, they are numbered as they begin.

        Raises:
            KeyError: no row of it is stored.
        """
        chains = self._chains[: int(self._state["slots"][0])]
        length = chains["total"] - chains["dropped"]
        chosen = np.flatnonzero((chains["id"] == traj) & (length > 0))  # several if the id was reused
        if not len(chosen):
            raise KeyError(f"no row of trajectory {traj} is stored")

        chosen = chosen[np.argsort(chains["last"][chosen])]  # in writing order
        return self._slots_of(chosen, chains["dropped"][chosen], length[chosen])

    # -- state -----------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        # Saved as in earlier versions: fragment n is at index n modulo the length of its table, a power of two.
        first = int(self._state["first"][0])
        fragments = np.zeros(_power_of_two(self.fragments), FRAGMENT)
        self._copy_fragments(fragments, first - first % len(fragments))

        return {
            "capacity": self.capacity,
            "state": self._state[list(SAVED_STATE.names or ())].astype(SAVED_STATE),
            "fragments": fragments,
            "chains": self._chains[: int(self._state["slots"][0])].copy(),
            "table": self._table.copy(),
            "spare": self._spare.copy(),
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the index; stored trajectories count as closed, so new rows do not continue them until `reopen`.

        Its tables are rebuilt from checked fragments; ValueError, without changes, if they are invalid.
        """
        counters = self._checked_counters(state["capacity"], state["state"])
        saved = SavedFragments.read(counters[0], state)

        for name in SAVED_STATE.names or ():
            self._state[name] = counters[name]
        self._fragments = np.zeros(self._size(len(saved.firsts)), FRAGMENT)
        self._chains = np.zeros(self._size(len(saved.ids)), CHAIN)
        self.tables = self._state, self.capacity, self._fragments, self._chains
        self._table = np.zeros(64, ENTRY)
        self._spare = np.zeros(len(state["spare"]), np.int64)
        _kernels().publishing.rebuild(self.tables, self._spare, tuple(saved))

        chains = state["chains"][: len(saved.ids)]
        self._chains["step"][: len(chains)] = chains["step"]
        self._open_when_saved = np.flatnonzero(chains["open"])

        self._weights.clear()
        self._claimed = -1, 0
        self._changing = False

    def reopen(self) -> None:
        """Let new rows continue the trajectories that were open when a loaded index was saved.

        Call it after `load_state_dict`, before anything is written.
        """
        chains = self._chains[self._open_when_saved]
        places = self._open_when_saved[chains["total"] > chains["dropped"]]
        # If an id was used twice, the newest of its trajectories comes last and stays in the table.
        places = places[np.argsort(self._chains["last"][places])]
        self._chains["open"][places] = 1

        entries = np.zeros(len(places), ENTRY)
        entries["id"] = self._chains["id"][places]
        entries["chain"] = places + 1
        self._table = np.zeros(_power_of_two(4 * len(places)), ENTRY)
        self._state["ids"] = _kernels().publishing.rehash(entries, self._chains, self._table)
        self._state["open"] = len(places)

    @override
    def adopt(self, memory: Array) -> None:
        super().adopt(memory)
        self.tables = self._state, self.capacity, self._fragments, self._chains

    # -- weights: one Fenwick tree over the trajectories per way of drawing ----------------------------------------

    def _tree(self, length: int, by: By, strict: bool, span: int = 0) -> Array:
        """Return the Fenwick tree of the weights for this way of drawing; the last entry is the total."""
        if by not in BY:
            check_choice("by", by, BY)
        if length < 1:
            check_whole_number("length", length)

        if by == "trajectory":  # each drawable trajectory has weight 1: all of them, unless strict
            if not strict:
                length = 1
            strict = True
            span = 0
        key = (length, by == "start", strict, span)

        if self._changing:  # a change was interrupted (Ctrl-C) before the weights were updated
            self._weights.clear()
            self._changing = False

        if key not in self._weights:
            used = int(self._state["slots"][0])
            weight = np.zeros(len(self._chains), np.int64)
            tree = np.zeros(_power_of_two(len(weight)) + 1, np.int64)
            _kernels().publishing.weigh(self._chains, np.arange(used), used, weight, tree, key)
            self._weights[key] = weight, tree
            if len(self._weights) > 4:
                self._weights.popitem(last=False)

        self._weights.move_to_end(key)
        return self._weights[key][1]

    def _update_weights(self, touched: Array, count: int) -> None:
        """Update all weights, which completes a change."""
        for key, (weight, tree) in self._weights.items():
            _kernels().publishing.weigh(self._chains, touched, count, weight, tree, key)
        self._changing = False

    def _reserve(self, fragments: int, rows: int, before: Array) -> None:
        """Reserve space for the fragments of a write of ``rows`` rows; ``before`` is what :meth:`link` found."""
        state = self._state[0]
        stored = int(state["written"] - state["head"])

        live = int(state["end"] - state["first"])
        if live + fragments > len(self._fragments):
            size = self._size(live + fragments, max((live + fragments) / (stored + rows), fragments / rows))
            larger = np.zeros(size, self._fragments.dtype)
            first = int(state["first"])
            self._copy_fragments(larger, first)
            self._fragments = larger
            self.tables = self._state, self.capacity, self._fragments, self._chains
            self._state["base"] = first

        used = int(state["slots"])
        if used + fragments > len(self._chains):
            # Trajectories that have lost all their rows leave their places to new ones.
            created = int((before == -1).sum())
            needed = int(state["live"]) + created
            if needed > len(self._chains):
                size = self._size(needed, max(needed / (stored + rows), created / rows))
                larger = np.zeros(size, self._chains.dtype)
                larger[:used] = self._chains[:used]
                self._chains = larger
                self.tables = self._state, self.capacity, self._fragments, self._chains
                self._weights.clear()  # they are as long as the table; the next draw computes new ones

        # The hash table of ids is at most half full; a new one drops the ids of closed trajectories.
        if 2 * (int(state["ids"]) + fragments) > len(self._table):
            larger = np.zeros(_power_of_two(4 * (int(state["open"]) + fragments)), self._table.dtype)
            if self._state["ids"][0]:
                self._state["ids"] = _kernels().publishing.rehash(self._table, self._chains, larger)
            self._table = larger

        if len(self._touched) < fragments:
            self._touched = np.zeros(_power_of_two(fragments), np.int64)

    def _size(self, needed: int, per_row: float = 0.0) -> int:
        """Return the length of a table for ``needed`` entries, given how many entries there are for each row.

        Small tables are doubled. A large one is reserved for as many rows as the ring holds: the operating system
        gives the memory when it is written, and copying millions of entries would keep readers waiting.
        """
        size = _power_of_two(needed)
        if size > _LARGE and per_row:
            size = max(needed, math.ceil(1.05 * per_row * self.capacity))
        return max(needed, min(size, self.capacity))

    def _copy_fragments(self, target: Array, base: int) -> None:
        """Copy the live fragments to a table in which fragment ``base`` is at index 0."""
        number = int(self._state["first"][0])
        end = int(self._state["end"][0])
        size = len(self._fragments)

        while number < end:
            # The longest stretch that ends at the end of neither table; a plain copy is fast.
            at = (number - int(self._state["base"][0])) % size
            to = (number - base) % len(target)
            count = min(end - number, size - at, len(target) - to)
            target[to : to + count] = self._fragments[at : at + count]
            number += count


def missing_slices(rows: int, slices: int, drawn: int) -> int:
    """Return how many more slices to draw for ``rows`` rows in all, after ``slices`` slices of ``drawn`` rows."""
    # As many as hold the missing rows at the mean length so far, plus an eighth as a margin.
    return -(-9 * (rows - drawn) * slices // (8 * drawn))


def _power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least ``least``, and at least 64."""
    return 1 << max(6, (least - 1).bit_length())
