"""The base class of samplers, which choose and mark the rows of a sample, and the uniform sampler."""

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
from flatroll.layout.checks import whole_number
from flatroll.layout.inspect.text import Facts
from flatroll.layout.keys import DONE, IS_INIT, POLICY_VERSION, TRAJ_IDS, NestedKey, require

#: Entries by which runs are told apart; a batch with one of them holds trajectories.
_MARKERS: tuple[NestedKey, ...] = (IS_INIT, DONE, TRAJ_IDS, "episode")
_TRIES = 4  # draws of rows of which the stale ones are thrown away, before all stored rows are looked at
_MOST = 10_000  # slices drawn for each one that is asked for, before the search is given up


class StoredColumns(Protocol):
    """The part of a storage that samplers use: its columns by key, empty before the first batch."""

    @property
    def columns(self) -> Mapping[NestedKey, Column]:
        """The stored columns by key; ``column.take(slots)`` reads rows of one."""
        ...


class Freshness:
    """Knows which stored rows are at most ``max_lag`` policy versions older than the newest version.

    The newest version is the highest among the rows that were stored when a sample was drawn, and among those told
    by :meth:`tell`. It never falls.

    Args:
        max_lag: how much less than the newest a row's version may be, at least 0.
    """

    def __init__(self, max_lag: int) -> None:
        self.max_lag = whole_number("max_policy_lag", max_lag, 0)
        self.newest = -1
        self.storage: StoredColumns | None = None
        self._seen = 0  # rows below this number were looked at for the newest version
        self._fresh: tuple[tuple[int, int, int], Tensor] | None = (
            None  # what the list rests on, and fresh slots
        )

    def tell(self, version: int) -> None:
        """Say that there is a policy of this version, of which perhaps no row has come yet."""
        self.newest = max(self.newest, whole_number("policy_version", version, 0))

    def begin_from(self, newest: int) -> None:
        """Know of ``newest`` only, -1 for no version: other rows are stored now."""
        self.newest, self._seen = newest, 0
        self._fresh = None

    def versions(self, slots: Tensor) -> Tensor:
        """The policy versions of the rows in ``slots`` (int64 ``[N]``), int64 ``[N]`` in host memory."""
        column = None if self.storage is None else self.storage.columns.get(POLICY_VERSION)
        if column is None:
            raise KeyError(f"no column {POLICY_VERSION!r} is stored, which max_policy_lag needs")
        return torch.as_tensor(column.take(slots)).reshape(-1).cpu()

    def look(self, ring: Ring) -> int:
        """Take notice of the rows written since the last time; the least version that is fresh."""
        ring.check_not_empty()
        first, written = max(self._seen, ring.head), ring.written
        if written < self._seen:  # another state was loaded
            self.newest, first = -1, ring.head
        if written > first:
            stored = ring.stored()
            # The newest rows; a writer that chooses among rows numbers them otherwise.
            new = stored[len(stored) - (written - first) :] if written - first < len(stored) else stored
            if len(new):
                self.newest = max(self.newest, int(self.versions(new).max()))
            self._seen = written
        return self.newest - self.max_lag

    def fresh_slices(self, draw: Draw, least: int) -> tuple[Tensor, Tensor]:
        """First slots and lengths of the slices of ``draw`` whose rows are all of version ``least`` or later."""
        firsts, lasts = draw.firsts, draw.lasts
        assert firsts is not None and lasts is not None
        stale = torch.cat([torch.zeros(1, dtype=torch.int64), (self.versions(draw.slots) < least).cumsum(0)])
        kept = stale[lasts + 1] == stale[firsts]  # stale[i]: stale rows before row i of the draw
        return draw.slots[firsts[kept]], (lasts - firsts + 1)[kept]

    def stored(self, ring: Ring) -> Tensor:
        """The slots of all fresh rows, oldest first, int64; RuntimeError if there are none."""
        basis = self.look(ring), ring.head, ring.written
        if self._fresh is None or self._fresh[0] != basis:
            slots = ring.stored()
            self._fresh = basis, slots[self.versions(slots) >= basis[0]]
        if not len(self._fresh[1]):
            raise self.too_old()
        return self._fresh[1]

    def uniform(self, ring: Ring, count: int, generator: torch.Generator | None) -> Draw:
        """Draw ``count`` fresh rows uniformly, with replacement; RuntimeError if there are none."""
        version = ring.version  # first: other processes may write meanwhile
        least, kept, missing = self.look(ring), list[Tensor](), count
        for _ in range(_TRIES):
            slots = ring.uniform(missing, generator).slots
            kept.append(slots[self.versions(slots) >= least])
            missing -= len(kept[-1])
            if not missing:
                break
        else:  # few rows are fresh: the rest is drawn from a list of them
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
        """Draw ``count`` slices of fresh rows: as ``way(count, length, follow=, **options)`` does, given that no row of
        the slice is stale. RuntimeError if too few were found.

        ``lay_out(first slots, lengths, follow=)`` lists the rows of slices.
        """
        least, found, drawn, ask = self.look(ring), 0, 0, count
        starts, lengths = list[Tensor](), list[Tensor]()
        self.stored(ring)  # an error if no row is fresh
        while found < count:
            if drawn > _MOST * count:
                raise RuntimeError(
                    f"of {drawn} slices drawn, {found} have rows of version {least} and later only, {count} were asked "
                    "for: allow a larger max_policy_lag, or draw shorter slices"
                )
            start, rows = self.fresh_slices(way(ask, length, follow=False, **options), least)
            starts.append(start)
            lengths.append(rows)
            found, drawn = found + len(start), drawn + ask
            # Twice as many as are likely to do, but not more than 65,536 at once.
            ask = max(1, min(2 * (count - found) * drawn // max(found, 1), 1 << 16))
        return lay_out(torch.cat(starts)[:count], torch.cat(lengths)[:count], follow=follow)

    def too_old(self) -> RuntimeError:
        """The error where no row that could be drawn is fresh."""
        return RuntimeError(
            f"all stored rows are too old: the newest policy version is {self.newest}, and max_policy_lag="
            f"{self.max_lag} leaves rows of version {self.newest - self.max_lag} and later: collect with a newer policy"
        )


def freshness(max_policy_lag: int | None) -> Freshness | None:
    """The `Freshness` for the option of a sampler, None for None."""
    return None if max_policy_lag is None else Freshness(max_policy_lag)


def check_versions(batch: TensorDictBase) -> None:
    """Raise KeyError or TypeError unless the rows of ``batch`` say their policy version."""
    versions = require(batch, POLICY_VERSION)
    if versions.dtype is not torch.int64:
        raise TypeError(f"batch[{POLICY_VERSION!r}] must be int64, got {versions.dtype}")


class Sampler(Facts, ABC):
    """Chooses the rows of a sample. A subclass defines :meth:`draw`; one sampler belongs to one buffer.

    ``draw`` asks the ring how many rows there are, `Ring.snapshot`, chooses among them by age, from 0 for the oldest to
    ``rows - 1`` for the newest, and lets the ring say which slots those are, `Ring.slots_by_age`. That is right under
    every writer, in other processes too; a row's number modulo the capacity is not.

    To draw single rows, subclass `RandomSampler`: its :meth:`mark` makes each drawn row a run of its own, where this
    class leaves the stored markers as they are. To draw whole slices, subclass `SliceSampler`.

    The buffer calls :meth:`claimed`, :meth:`entered` and :meth:`draw` under its lock, the first two only if they are
    overridden. It then reads the rows, and draws again if one of them was overwritten meanwhile.

    Attributes:
        ran_out: whether the last sample ended a pass over the rows (samplers without replacement); iterating over
            the buffer stops there.
        stateful: whether draws depend on something that the sampler remembers, so that processes cannot share the
            buffer. By default True for a class that overrides a method which keeps such a memory up to date; set
            ``stateful = False`` in the class if its :meth:`state_dict` only has what the constructor was given.
        state_key: an entry that every :meth:`state_dict` of this kind of sampler has, by which
            :meth:`check_state_dict` refuses the states of others. Default: None, any state is loaded.
        follows_writes: whether the buffer calls :meth:`claimed` and :meth:`entered`; True if one is overridden.
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
    freshness: Freshness | None = None  # of the option max_policy_lag
    state_key: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "stateful" not in vars(cls):
            hooks = ("claimed", "entered", "emptied", "update_priority", "state_dict")
            cls.stateful = overrides(cls, Sampler, *hooks)
        cls.follows_writes = overrides(cls, Sampler, "claimed", "entered")
        cls.needs_index = overrides(cls, Sampler, "boundary_keys")

    def attach(self, storage: StoredColumns) -> None:
        """Receive the storage to draw from; called once, when the buffer is created."""
        if self.freshness is not None:
            if not hasattr(storage, "allocated"):
                raise TypeError(
                    "max_policy_lag needs a storage of columns, such as LazyTensorStorage(max_size), got "
                    f"{type(storage).__name__}"
                )
            self.freshness.storage = storage

    def boundary_keys(self, batch: TensorDictBase) -> BoundaryKeys | None:
        """Name the columns of ``batch`` that mark trajectories; None if the sampler ignores them.

        With ``max_policy_lag``, KeyError or TypeError if the rows do not say their policy version.
        """
        if self.freshness is not None:
            check_versions(batch)
        return None

    @property
    def policy_version(self) -> int:
        """The newest policy version, for ``max_policy_lag``: the highest that was seen in stored rows when a sample was
        drawn, or that was set here, where the learner may tell it before rows of it come. It never falls."""
        return self._lagging().newest

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._lagging().tell(version)

    def _lagging(self) -> Freshness:
        if self.freshness is None:
            raise TypeError(f"{type(self).__name__} does not use policy versions: pass max_policy_lag=")
        return self.freshness

    def check(self, batch_size: int | None) -> int:
        """Return ``batch_size`` or the sampler's default; ValueError if the sampler cannot draw it."""
        if batch_size is None:
            raise ValueError("batch_size must be given to ReplayBuffer(...) or to sample(...)")
        return batch_size

    @abstractmethod
    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """Choose the rows of a sample.

        Args:
            ring: says which rows are stored, and where.
            batch_size: how many rows to choose, as :meth:`check` gave it.
            generator: CPU random generator of all draws; None is torch's global one.
            follow: whether the draw must say where the next observations are, ``ring.follow(slots)``.

        Returns:
            a `Draw` with ``slots`` int64 ``[N]``, ``version`` and, if asked for, ``follow``.

        Raises:
            RuntimeError: nothing is stored (`Ring.check_not_empty`).
        """

    def mark(self, columns: Columns, draw: Draw) -> None:
        """Set the markers, such as ``is_init``, in the sample's ``columns`` (tensors ``[N, ...]`` by key)."""
        return

    def claimed(self, ring: Ring, first: int, rows: int) -> None:
        """React to a write that begins: rows ``first ... first + rows - 1`` now overwrite their slots."""
        return

    def entered(self, ring: Ring, first: int, rows: int) -> None:
        """React to a finished write: rows ``first ... first + rows - 1`` can be drawn from now on."""
        return

    def emptied(self) -> None:
        """React to `ReplayBuffer.empty`: no row is stored any more."""
        return

    def update_priority(self, ring: Ring, slots: Tensor, priority: Tensor, generation: Tensor | None) -> None:
        """Set the priorities of rows; samplers without priorities raise TypeError."""
        raise TypeError(f"{type(self).__name__} has no priorities: use PrioritizedSampler")

    def mark_update(self, ring: Ring, slots: Tensor) -> None:
        """React to rows that were changed in place: reset their priorities to that of new rows, if there are any."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state for :meth:`load_state_dict`: with ``max_policy_lag`` the newest policy version;
        empty if it has none."""
        return {} if self.freshness is None else {"policy_version": self.freshness.newest}

    def check_state_dict(self, state: dict[str, Any], ring: Ring) -> None:
        """Raise ValueError if :meth:`load_state_dict` cannot load ``state`` along with ``ring``. Nothing changes."""
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
    """Draws single rows uniformly, with replacement, and marks each as the first of its run.

    In the sample every row has ``is_init`` True, in mid-episode too, so that two rows of one trajectory side by
    side are never read as a transition (shifted GAE, recurrent modules, `audit`). Only a batch of plain rows,
    without any of ``is_init``, ``done``, ``("collector", "traj_ids")`` and ``"episode"``, is left as it is, and so
    are rows that are whole trajectories. The stored flags are in ``buffer[info["index"]]``
    (``sample(return_info=True)``).

    Args:
        max_policy_lag: leave out rows whose ``("collector", "policy_version")`` is more than so much below the newest
            one (`policy_version`), at least 0; the others are uniform. Default: all rows are drawn.

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=4).batch_size
    4
    """

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
