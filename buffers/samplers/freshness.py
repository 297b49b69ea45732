"""Leaves rows out of the draw whose policy is too old: the option ``max_policy_lag`` of samplers."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.index.ring import Array, Draw, Ring
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import POLICY_VERSION, NestedKey, require

_TRIES = 4  # draws of rows of which the stale ones are thrown away, before all stored rows are looked at
_MOST = 10_000  # slices drawn for each one that is asked for, before the search is given up


class Stores(Protocol):
    """The part of a storage that is needed: its columns by key."""

    @property
    def columns(self) -> Mapping[NestedKey, Any]:
        """The stored columns."""
        ...


class Priorities(Protocol):
    """The part of `PrioritizedSampler`'s priorities that is needed."""

    drawable: Array

    def weigh(self, slots: Array, allow: bool = False) -> None:
        """Compute the weights of ``slots`` anew."""


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
        self.storage: Stores | None = None
        self._seen = 0  # rows below this number were looked at for the newest version
        self._barred: tuple[int, int, int] | None = None  # what the last `bar` rested on
        self._listed: tuple[tuple[int, int, int], Tensor] | None = (
            None  # what the list rests on, and fresh slots
        )

    def tell(self, version: int) -> None:
        """Say that there is a policy of this version, of which perhaps no row has come yet."""
        self.newest = max(self.newest, whole_number("policy_version", version, 0))

    def begin_from(self, newest: int) -> None:
        """Know of ``newest`` only, -1 for no version: other rows are stored now."""
        self.newest, self._seen = newest, 0
        self._barred = self._listed = None

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
        if self._listed is None or self._listed[0] != basis:
            slots = ring.stored()
            self._listed = basis, slots[self.versions(slots) >= basis[0]]
        if not len(self._listed[1]):
            raise self.too_old()
        return self._listed[1]

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

    def bar(self, ring: Ring, priorities: Priorities) -> None:
        """Give stale rows no weight; RuntimeError if all are stale."""
        fresh = self.stored(ring)
        if self._listed is None or self._barred == self._listed[0]:
            return
        stale = priorities.drawable.copy()
        stale[fresh.numpy()] = False
        slots = stale.nonzero()[0]
        priorities.drawable[slots] = False
        priorities.weigh(slots)
        self._barred = self._listed[0]

    def unbar(self) -> None:
        """All weights were computed anew, those of stale rows, too."""
        self._barred = None

    def too_old(self) -> RuntimeError:
        """The error where no row that could be drawn is fresh."""
        return RuntimeError(
            f"all stored rows are too old: the newest policy version is {self.newest}, and max_policy_lag="
            f"{self.max_lag} leaves rows of version {self.newest - self.max_lag} and later. Collect with the newest "
            "policy, or allow a larger lag"
        )


def freshness(max_policy_lag: int | None) -> Freshness | None:
    """The `Freshness` for the option of a sampler, None for None."""
    return None if max_policy_lag is None else Freshness(max_policy_lag)


def check_versions(batch: TensorDictBase) -> None:
    """Raise KeyError or TypeError unless the rows of ``batch`` say their policy version."""
    versions = require(batch, POLICY_VERSION)
    if versions.dtype is not torch.int64:
        raise TypeError(f"batch[{POLICY_VERSION!r}] must be int64, got {versions.dtype}")
