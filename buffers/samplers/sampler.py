"""The base class of samplers, which choose and mark a sample's rows, and the uniform sampler."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import Column, Columns
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Draw, Ring
from flatroll.buffers.index.saved_tables import damaged
from flatroll.layout.checks import check_whole_number
from flatroll.layout.inspect.text import Facts
from flatroll.layout.keys import DONE, IS_INIT, POLICY_VERSION, TRAJ_IDS, NestedKey, require

#: Entries that mark runs; a batch with any of them holds trajectories.
_MARKERS: tuple[NestedKey, ...] = (IS_INIT, DONE, TRAJ_IDS, "episode")
_TRIES = 4  # rejection draws before all stored rows are searched
_MOST = 10_000  # slices drawn per requested one before giving up


class StoredColumns(Protocol):
    """The part of a storage that samplers use."""

    @property
    def columns(self) -> Mapping[NestedKey, Column]:
        """The stored columns by key, empty before the first batch; ``column.take(slots)`` reads rows."""
        ...


class Freshness:
    """Finds stored rows that are at most ``max_lag`` policy versions older than the newest.

    The newest version is the maximum over stored rows at any draw and versions passed to :meth:`tell`. It never
    decreases.

    Args:
        max_lag: maximum difference to the newest version, at least 0.
    """

    def __init__(self, max_lag: int) -> None:
        self.max_lag = check_whole_number("max_policy_lag", max_lag, 0)
        self.newest = -1
        self.storage: StoredColumns | None = None
        self._seen = 0  # rows below this number have been searched for the newest version
        # Key of the cached list, and its fresh slots.
        self._fresh: tuple[tuple[int, int, int], Tensor] | None = None

    def tell(self, version: int) -> None:
        """Announce a policy version, even before rows of it arrive."""
        self.newest = max(self.newest, check_whole_number("policy_version", version, 0))

    def begin_from(self, newest: int) -> None:
        """Reset to ``newest``, -1 for no version, after the stored rows were replaced."""
        self.newest = newest
        self._seen = 0
        self._fresh = None

    def versions(self, slots: Tensor) -> Tensor:
        """Return the policy versions of the rows in ``slots`` (int64 ``[N]``), int64 ``[N]`` on the host."""
        column = None
        if self.storage is not None:
            column = self.storage.columns.get(POLICY_VERSION)
        if column is None:
            raise KeyError(f"no column {POLICY_VERSION!r} is stored, which max_policy_lag needs")
        return torch.as_tensor(column.take(slots)).reshape(-1).cpu()

    def look(self, ring: Ring) -> int:
        """Scan the rows written since the last call; return the lowest fresh version."""
        ring.check_not_empty()
        first = max(self._seen, ring.head)
        written = ring.written
        if written < self._seen:  # a state has been loaded meanwhile
            self.newest = -1
            first = ring.head

        if written > first:
            stored = ring.stored()
            # The newest rows by age: with a selecting writer, row numbers do not tell the slots.
            new = stored
            if written - first < len(stored):
                new = stored[len(stored) - (written - first) :]
            if len(new):
                self.newest = max(self.newest, int(self.versions(new).max()))
            self._seen = written

        return self.newest - self.max_lag

    def fresh_slices(self, draw: Draw, least: int) -> tuple[Tensor, Tensor]:
        """Return first slots and lengths of the slices of ``draw`` without a row older than version ``least``."""
        firsts = draw.firsts
        lasts = draw.lasts
        assert firsts is not None and lasts is not None
        stale = torch.cat([torch.zeros(1, dtype=torch.int64), (self.versions(draw.slots) < least).cumsum(0)])
        kept = stale[lasts + 1] == stale[firsts]  # stale[i]: number of stale rows before row i of the draw
        return draw.slots[firsts[kept]], (lasts - firsts + 1)[kept]

    def stored(self, ring: Ring) -> Tensor:
        """Return the slots of all fresh rows, oldest first, int64; RuntimeError if there are none."""
        basis = self.look(ring), ring.head, ring.written
        if self._fresh is None or self._fresh[0] != basis:
            slots = ring.stored()
            self._fresh = basis, slots[self.versions(slots) >= basis[0]]

        if not len(self._fresh[1]):
            raise self.too_old_error()
        return self._fresh[1]

    def uniform(self, ring: Ring, count: int, generator: torch.Generator | None) -> Draw:
        """Draw ``count`` fresh rows uniformly, with replacement; RuntimeError if there are none."""
        version = ring.version  # read first, because other processes may write meanwhile
        least = self.look(ring)

        kept = []
        missing = count
        for _ in range(_TRIES):
            slots = ring.uniform(missing, generator).slots
            kept.append(slots[self.versions(slots) >= least])
            missing -= len(kept[-1])
            if not missing:
                break
        else:  # few rows are fresh: list them, and draw the rest from the list
            slots = self.stored(ring)
            kept.append(slots[torch.randint(len(slots), (missing,), generator=generator)])

        return Draw(torch.cat(kept), version=version)

    def slices(
        self,
        ring: Ring,
        lay_out: Callable[..., Draw],
        way: Callable[..., Draw],
        count: int,
        length: int,
        *,
        follow: bool,
        **options: Any,
    ) -> Draw:
        """Draw ``count`` slices with ``way(count, length, follow=, **options)``, rejecting those with a stale row.

        ``lay_out(first slots, lengths, follow=)`` lists the rows of slices. RuntimeError if too few are found.
        """
        least = self.look(ring)
        self.stored(ring)  # raises if no row is fresh

        found = 0
        drawn = 0
        ask = count
        starts = []
        lengths = []
        while found < count:
            if drawn > _MOST * count:
                raise RuntimeError(
                    f"only {found} of {drawn} slices drawn have no row older than version {least}, but {count} were "
                    "requested: allow a larger max_policy_lag, or draw shorter slices"
                )

            start, rows = self.fresh_slices(way(ask, length, follow=False, **options), least)
            starts.append(start)
            lengths.append(rows)
            found += len(start)
            drawn += ask

            # Ask for twice the expected number, but at most 65,536 at once.
            ask = max(1, min(2 * (count - found) * drawn // max(found, 1), 1 << 16))

        return lay_out(torch.cat(starts)[:count], torch.cat(lengths)[:count], follow=follow)

    def too_old_error(self) -> RuntimeError:
        """Return the error for no fresh row."""
        return RuntimeError(
            f"all stored rows are too old: the newest policy version is {self.newest}, and max_policy_lag="
            f"{self.max_lag} allows only versions from {self.newest - self.max_lag} on: collect with the newest policy"
        )


def freshness(max_policy_lag: int | None) -> Freshness | None:
    """Return the `Freshness` for a sampler's option, None for None."""
    if max_policy_lag is None:
        return None
    return Freshness(max_policy_lag)


def check_versions(batch: TensorDictBase) -> None:
    """Raise KeyError or TypeError unless ``batch`` has policy versions."""
    versions = require(batch, POLICY_VERSION)
    if versions.dtype is not torch.int64:
        raise TypeError(f"batch[{POLICY_VERSION!r}] must be int64, got {versions.dtype}")


class Sampler(Facts, ABC):
    """Chooses the rows of a sample. A subclass defines :meth:`draw`; one sampler belongs to one buffer.

    ``draw`` gets the number of rows from `Ring.snapshot`, chooses rows by age, from 0 for the oldest to ``rows - 1``
    for the newest, and converts ages to slots with `Ring.slots_by_age`. This works with every writer, also in other
    processes; a row's number modulo the capacity does not.

    To draw single rows, subclass `RandomSampler`: its :meth:`mark` makes each drawn row a separate run, while this
    class leaves the stored markers unchanged. To draw slices, subclass `SliceSampler`.

    The buffer calls :meth:`claimed`, :meth:`entered` (both only if overridden) and :meth:`draw` under its lock. It
    then reads the rows, and draws again what was overwritten meanwhile.

    Attributes:
        ran_out: whether the last sample ended a pass over the rows (samplers without replacement); iterating over
            the buffer stops there.
        stateful: whether draws depend on the sampler's state, so that processes cannot share the buffer. By default
            True if the class overrides a method that updates such state; set ``stateful = False`` in the class if its
            :meth:`state_dict` only has constructor arguments.
        state_key: an entry in every :meth:`state_dict` of this kind of sampler; :meth:`check_state_dict` refuses
            states without it. Default: None, any state is loaded.
        follows_writes: whether the buffer calls :meth:`claimed` and :meth:`entered`; True if one is overridden.
        independent: whether :meth:`draw` chooses each row (or slice) independently of the others, so that the buffer
            may draw again only those that were overwritten while they were read, by :meth:`redraw`. False for a class
            that overrides :meth:`draw`, unless it sets it; the buffer then draws the whole sample again.
        needs_index: whether :meth:`draw` gets a `TrajectoryIndex`; True if :meth:`boundary_keys` is overridden.

    A sampler that draws the newest rows twice as often as the others:

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> class RecencySampler(RandomSampler):
    ...     def draw(self, ring, batch_size, generator, follow):
    ...         version, rows = ring.snapshot()  # an error if nothing is stored
    ...         chances = torch.linspace(1, 2, rows)  # by age: the oldest row, ..., the newest row
    ...         ranks = torch.multinomial(chances, batch_size, replacement=True, generator=generator)
    ...         slots = ring.slots_by_age(ranks, version)  # int64 [batch_size]
    ...         return Draw(slots, follow=ring.follow(slots) if follow else None, version=version)
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=RecencySampler(), batch_size=1000)
    >>> rows = buffer.extend(torch.arange(2)), buffer.extend(torch.arange(2, 6))
    >>> sample = buffer.sample()
    >>> sorted(set(sample.tolist())), int((sample == 5).sum()) > int((sample == 2).sum())
    ([2, 3, 4, 5], True)
    """

    ran_out: bool = False
    stateful: bool = False
    follows_writes: bool = False
    needs_index: bool = False
    independent: bool = False
    freshness: Freshness | None = None  # set by the option max_policy_lag
    state_key: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "stateful" not in vars(cls):
            hooks = ("claimed", "entered", "emptied", "update_priority", "state_dict")
            cls.stateful = overrides(cls, Sampler, *hooks)
        if "draw" in vars(cls) and "independent" not in vars(cls):
            cls.independent = False
        cls.follows_writes = overrides(cls, Sampler, "claimed", "entered")
        cls.needs_index = overrides(cls, Sampler, "boundary_keys")

    def attach(self, storage: StoredColumns) -> None:
        """Set the storage to draw from; called once, when the buffer is created."""
        if self.freshness is not None:
            if not hasattr(storage, "allocated"):
                raise TypeError(
                    "max_policy_lag needs a storage of columns, such as LazyTensorStorage(max_size), got "
                    f"{type(storage).__name__}"
                )
            self.freshness.storage = storage

    def boundary_keys(self, batch: TensorDictBase) -> BoundaryKeys | None:
        """Name the columns of ``batch`` that mark trajectories; None if the sampler ignores them.

        With ``max_policy_lag``, KeyError or TypeError if the rows have no policy version.
        """
        if self.freshness is not None:
            check_versions(batch)
        return None

    @property
    def policy_version(self) -> int:
        """The newest policy version, for ``max_policy_lag``: the highest seen at a draw or set by the learner."""
        return self._need_freshness().newest

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._need_freshness().tell(version)

    def _need_freshness(self) -> Freshness:
        if self.freshness is None:
            raise TypeError(f"{type(self).__name__} does not use policy versions: pass max_policy_lag=")
        return self.freshness

    @property
    def nbytes(self) -> int:
        """Bytes of tables with an entry per row, such as priorities; 0 without them. ``buffer.stats()`` counts them."""
        return 0

    def check(self, batch_size: int | None) -> int:
        """Return ``batch_size`` or the sampler's default; ValueError if the sampler cannot draw it."""
        if batch_size is None:
            raise ValueError("batch_size must be given to ReplayBuffer(...) or to sample(...)")
        return batch_size

    @abstractmethod
    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """Choose the rows of a sample.

        Args:
            ring: tells which rows are stored, and where.
            batch_size: number of rows to choose, from :meth:`check`.
            generator: CPU random generator of all draws; None is torch's global one.
            follow: whether the draw must include ``ring.follow(slots)``, where the next observations are.

        Returns:
            a `Draw` with ``slots`` int64 ``[N]``, ``version`` and, if asked for, ``follow``.

        Raises:
            RuntimeError: nothing is stored (`Ring.check_not_empty`).
        """

    def redraw(
        self,
        ring: Ring,
        batch_size: int,
        units: int,
        rows: int,
        generator: torch.Generator | None,
        follow: bool,
    ) -> Draw:
        """Choose rows in the place of some of a draw's rows; only of `independent` samplers.

        Args:
            ring, generator, follow: see :meth:`draw`.
            batch_size: number of rows of the whole draw.
            units: number of rows to replace, or of slices.
            rows: number of their rows.

        Returns:
            a `Draw` of ``rows`` rows, or of ``units`` slices if a draw has a fixed number of slices instead of rows.
        """
        return self.draw(ring, rows, generator, follow)

    def mark(self, columns: Columns, draw: Draw) -> None:
        """Set the markers, such as ``is_init``, in the sample's ``columns`` (tensors ``[N, ...]`` by key)."""
        return

    def claimed(self, ring: Ring, first: int, rows: int) -> None:
        """Called when a write begins: rows ``first ... first + rows - 1`` will overwrite their slots."""
        return

    def entered(self, ring: Ring, first: int, rows: int) -> None:
        """Called after a write: rows ``first ... first + rows - 1`` can be drawn from now on."""
        return

    def emptied(self) -> None:
        """Called by `ReplayBuffer.empty`: no row is stored any more."""
        return

    def update_priority(self, ring: Ring, slots: Tensor, priority: Tensor, generation: Tensor | None) -> None:
        """Set the priorities of rows; samplers without priorities raise TypeError."""
        raise TypeError(f"{type(self).__name__} has no priorities: use PrioritizedSampler")

    def mark_update(self, ring: Ring, slots: Tensor) -> None:
        """Called after in-place changes of rows: reset their priorities, if any, to that of new rows."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state for :meth:`load_state_dict`: the newest policy version, or nothing."""
        if self.freshness is None:
            return {}
        return {"policy_version": self.freshness.newest}

    def check_state_dict(self, state: dict[str, Any], ring: Ring) -> None:
        """Raise ValueError if :meth:`load_state_dict` cannot load ``state`` with ``ring``; nothing is changed."""
        if self.state_key is not None and self.state_key not in state:
            raise ValueError(
                f"the state was saved with a sampler of another kind, this buffer has a {type(self).__name__}: load it "
                "into a buffer with a sampler like that one, and extend this buffer with other.oldest_first()"
            )

        newest = state.get("policy_version", -1)
        if type(newest) is not int or not -1 <= newest < 2**63:
            raise damaged(f"its newest policy version is {newest!r}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sampler from a checked :meth:`state_dict`."""
        if self.freshness is not None:
            self.freshness.begin_from(state.get("policy_version", -1))


def overrides(cls: type, base: type, *methods: str) -> bool:
    """Return whether ``cls``, a subclass of ``base``, overrides at least one of these methods."""
    return any(getattr(cls, method) is not getattr(base, method) for method in methods)


class RandomSampler(Sampler):
    """Draws single rows uniformly with replacement, and marks each as the first of its run.

    Every row of the sample has ``is_init`` True, even in mid-episode, so that adjacent rows are never read as a
    transition (shifted GAE, recurrent modules, `audit`). Batches without any of ``is_init``, ``done``,
    ``("collector", "traj_ids")`` and ``"episode"``, and rows that are whole trajectories, are left unchanged. The
    stored flags are in ``buffer[info["index"]]`` (``sample(return_info=True)``).

    Args:
        max_policy_lag: draw only rows whose ``("collector", "policy_version")`` is at most this much below the newest
            one (`policy_version`), at least 0. Default: all rows.

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=4).batch_size
    4
    """

    independent = True

    def __init__(self, max_policy_lag: int | None = None) -> None:
        self.freshness = freshness(max_policy_lag)

    @override
    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        if self.freshness is None:
            draw = ring.uniform(batch_size, generator)
        else:
            draw = self.freshness.uniform(ring, batch_size, generator)
        if follow:
            draw.follow = ring.follow(draw.slots)
        return draw

    def mark(self, columns: Columns, draw: Draw) -> None:
        """Set ``is_init`` at every row, so that neighbouring rows are not read as one trajectory."""
        mark_single_rows(columns, draw)


def mark_single_rows(columns: Columns, draw: Draw) -> None:
    """Set ``is_init`` at every row; a sample without markers, or of whole trajectories, is left unchanged."""
    marker = next((columns[key] for key in _MARKERS if key in columns), None)
    rows = len(draw.slots)
    if marker is not None and marker.numel() == rows:
        shape = columns[IS_INIT].shape if IS_INIT in columns else (rows, 1)
        columns[IS_INIT] = torch.ones(shape, dtype=torch.bool, device=marker.device)
