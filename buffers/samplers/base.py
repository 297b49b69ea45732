"""Which rows a sample is made of, and how it is marked: the base of all samplers, and uniform draws."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.base import Column, Columns
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Draw, Ring
from flatroll.layout.keys import DONE, IS_INIT, TRAJ_IDS, NestedKey

#: Entries by which runs are told apart; a batch with one of them holds trajectories.
_MARKERS: tuple[NestedKey, ...] = (IS_INIT, DONE, TRAJ_IDS, "episode")


class StoredColumns(Protocol):
    """The storage as samplers see it: its columns by key, none before the first batch."""

    @property
    def columns(self) -> Mapping[NestedKey, Column]:
        """One entry of every stored row each; ``column.take(slots)`` reads rows."""
        ...


class Sampler(ABC):
    """Chooses the rows of a sample. A subclass defines :meth:`draw`; one sampler belongs to one buffer.

    ``draw`` asks the ring how many rows there are, ``len(ring)``, chooses among them by age, from 0 for the oldest to
    ``len(ring) - 1`` for the newest, and lets the ring say which slots those are, `Ring.slots_by_age`. That is right
    under every writer; a row's number modulo the capacity is not.

    To draw single rows, subclass `RandomSampler`: its :meth:`mark` makes each drawn row a run of its own, where this
    class leaves the stored markers as they are. To draw whole slices, subclass `SliceSampler`.

    The buffer calls :meth:`claimed`, :meth:`entered` and :meth:`draw` under its lock, the first two only if they are
    overridden. It then reads the rows, and draws again if one of them was overwritten meanwhile.

    Attributes:
        ran_out: whether the last sample ended a pass over the rows (samplers without replacement); iterating over
            the buffer stops there.
        stateful: whether draws depend on something that the sampler remembers, so that processes cannot share the
            buffer. By default True for a class that overrides a method which keeps such a memory up to date.
        follows_writes: whether the buffer calls :meth:`claimed` and :meth:`entered`; True if one is overridden.
        needs_index: whether :meth:`draw` gets a `TrajectoryIndex`; True if :meth:`boundary_keys` is overridden.

    A sampler that draws the newest rows twice as often as the others:

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> class RecencySampler(RandomSampler):
    ...     def draw(self, ring, batch_size, generator, follow):
    ...         version = ring.version  # before anything else is asked of the ring
    ...         ring.check_not_empty()
    ...         chances = torch.linspace(1, 2, len(ring))  # by age: the oldest row, ..., the newest row
    ...         ranks = torch.multinomial(chances, batch_size, replacement=True, generator=generator)
    ...         slots = ring.slots_by_age(ranks)  # int64 [batch_size]; a rank must be below len(ring)
    ...         return Draw(slots, follow=ring.follow(slots) if follow else None, version=version)
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=RecencySampler(), batch_size=1000)
    >>> rows = buffer.extend(torch.arange(6))
    >>> sample = buffer.sample()
    >>> sorted(set(sample.tolist())), int((sample == 5).sum()) > int((sample == 2).sum())
    ([2, 3, 4, 5], True)
    """

    ran_out: bool = False
    stateful: bool = False
    follows_writes: bool = False
    needs_index: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "stateful" not in vars(cls):
            hooks = ("claimed", "entered", "emptied", "update_priority", "state_dict")
            cls.stateful = overrides(cls, Sampler, *hooks)
        cls.follows_writes = overrides(cls, Sampler, "claimed", "entered")
        cls.needs_index = overrides(cls, Sampler, "boundary_keys")

    def attach(self, storage: StoredColumns) -> None:
        """The storage whose rows will be drawn; called once, when the buffer is made."""
        return

    def boundary_keys(self, batch: TensorDictBase) -> BoundaryKeys | None:
        """Names of the markers of the trajectories in ``batch`` (the first one), None if the sampler needs none."""
        return None

    def check(self, batch_size: int | None) -> int:
        """``batch_size``, or what the sampler's own numbers say; ValueError if they do not fit."""
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
        """Write the sampler's markers into the columns of a sample, ``[N, ...]`` by key."""
        return

    def claimed(self, ring: Ring, first: int, rows: int) -> None:
        """The rows ``first ... first + rows - 1`` are about to be written: what stood in their slots is gone."""
        return

    def entered(self, ring: Ring, first: int, rows: int) -> None:
        """The rows ``first ... first + rows - 1`` may be drawn."""
        return

    def emptied(self) -> None:
        """The buffer forgot its rows."""
        return

    def update_priority(self, ring: Ring, slots: Tensor, priority: Tensor, generation: Tensor | None) -> None:
        """Set the priorities of rows; TypeError for a sampler that has none."""
        raise TypeError(f"{type(self).__name__} has no priorities: use PrioritizedSampler")

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to go on as this sampler would; empty for one without a state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the sampler that gave ``state`` stood."""
        return


def overrides(cls: type, base: type, *methods: str) -> bool:
    """Whether ``cls``, a subclass of ``base``, has a definition of its own of one of these methods."""
    return any(getattr(cls, method) is not getattr(base, method) for method in methods)


class RandomSampler(Sampler):
    """Rows drawn uniformly, with replacement, each a run of its own.

    In the sample every row has ``is_init`` True, in mid-episode too, so that two rows of one trajectory side by
    side are never read as a transition (shifted GAE, recurrent modules, `audit`). Only a batch of plain rows,
    without any of ``is_init``, ``done``, ``("collector", "traj_ids")`` and ``"episode"``, is left as it is, and so
    are rows that are whole trajectories. The stored flags are in ``buffer[info["index"]]``
    (``sample(return_info=True)``).

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=4).batch_size
    4
    """

    @override
    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        draw = ring.uniform(batch_size, generator)
        if follow:
            draw.follow = ring.follow(draw.slots)
        return draw

    def mark(self, columns: Columns, draw: Draw) -> None:
        """Make each row the first of its run, where columns tell runs apart."""
        mark_single_rows(columns, draw)


def mark_single_rows(columns: Columns, draw: Draw) -> None:
    """Make each row the first of its run, where columns tell runs apart; rows that are whole trajectories stay."""
    marker = next((columns[key] for key in _MARKERS if key in columns), None)
    rows = len(draw.slots)
    if marker is not None and marker.numel() == rows:
        shape = columns[IS_INIT].shape if IS_INIT in columns else (rows, 1)
        columns[IS_INIT] = torch.ones(shape, dtype=torch.bool, device=marker.device)
