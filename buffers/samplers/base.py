"""Which rows a sample is made of, and how it is marked."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.base import Columns
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Draw, Ring
from flatroll.buffers.storages.base import Storage
from flatroll.layout.keys import DONE, IS_INIT, TRAJ_IDS, NestedKey

#: Entries by which runs are told apart; a batch with one of them holds trajectories.
_MARKERS: tuple[NestedKey, ...] = (IS_INIT, DONE, TRAJ_IDS, "episode")


class Sampler:
    """Chooses the rows of a sample. A subclass defines :meth:`draw`; one sampler belongs to one buffer.

    The buffer calls :meth:`claimed`, :meth:`entered` and :meth:`draw` under its lock.

    Attributes:
        ran_out: whether the last sample ended a pass over the rows (samplers without replacement); iterating over
            the buffer stops there.
    """

    ran_out: bool = False

    def attach(self, storage: Storage) -> None:
        """The storage whose rows will be drawn; called once, when the buffer is made."""
        return

    def boundary_keys(self, batch: TensorDictBase) -> BoundaryKeys | None:
        """Markers of the trajectories in ``batch`` (the first one), None if the sampler needs none."""
        return None

    def check(self, batch_size: int | None) -> int:
        """``batch_size``, or what the sampler's own numbers say; ValueError if they do not fit."""
        if batch_size is None:
            raise ValueError("batch_size must be given to ReplayBuffer(...) or to sample(...)")
        return batch_size

    @abstractmethod
    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """Choose rows; ``follow`` asks where their next observations stand (a trajectory index does)."""

    def mark(self, columns: Columns, draw: Draw) -> None:
        """Write the sampler's markers into the columns of a sample."""
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

    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """``batch_size`` rows."""
        draw = ring.uniform(batch_size, generator)
        return replace(draw, follow=ring.follow(draw.slots)) if follow else draw

    def mark(self, columns: Columns, draw: Draw) -> None:
        """Make each row the first of its run, where columns tell runs apart."""
        _set_apart(columns, draw)


class PassSampler(Sampler):
    """A sampler that goes over what is stored in passes, and keeps the pass in its state."""

    _pass: "Pass"

    def emptied(self) -> None:
        """See `Sampler`."""
        self._pass.drop()

    def state_dict(self) -> dict[str, Any]:
        """What is left of the pass."""
        return {"pass": self._pass.state_dict(), "ran_out": self.ran_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the pass of the sampler that gave ``state``."""
        self._pass.load_state_dict(state["pass"])
        self.ran_out = state["ran_out"]


class SamplerWithoutReplacement(PassSampler):
    """Every stored row once per pass over the buffer.

    A pass goes over the rows that are stored when it begins. The sample that ends it sets ``ran_out``, which ends
    an iteration over the buffer, and the next one begins a new pass; so does the first sample after any write,
    since what is stored is then no longer the same. A pass that was begun goes on after ``load_state_dict``.

    Rows are marked as `RandomSampler` does. Without ``shuffle`` they come in the order in which they were stored
    and keep their stored marks: a sample is then a stretch of the data, whose runs `layout.run_ends` finds.

    Args:
        drop_last: leave out the rows at the end of a pass that do not fill a batch. Default False: they are a
            shorter sample.
        shuffle: draw the order of each pass. Default True.

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    >>> sampler = SamplerWithoutReplacement(shuffle=False)
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, batch_size=2)
    >>> rows = buffer.extend(torch.arange(7))
    >>> [sample.tolist() for sample in buffer]
    [[2, 3], [4, 5], [6]]
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._pass = Pass(drop_last)

    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """The next ``batch_size`` rows of the pass, fewer at its end.

        Raises:
            RuntimeError: nothing is stored, or, with ``drop_last``, fewer rows than ``batch_size``.
        """
        stamp = ring.stamp()
        ring.check_not_empty()

        def begin() -> Tensor:
            slots = ring.stored()
            return slots[torch.randperm(len(slots), generator=generator)] if self.shuffle else slots

        slots = self._pass.take((ring.head, ring.written), batch_size, begin, "rows")
        self.ran_out = self._pass.ended
        draw = Draw(slots, follow=ring.follow(slots) if follow else None, stamp=stamp)
        if self.shuffle:
            return draw
        numbers = ring.numbers(slots, ring.head)
        apart = (numbers.diff() != 1).nonzero()[:, 0]  # nowhere, unless the writer chooses its rows
        ends = torch.tensor([len(slots) - 1])
        return replace(draw, firsts=torch.cat([torch.tensor([0]), apart + 1]), lasts=torch.cat([apart, ends]))

    def mark(self, columns: Columns, draw: Draw) -> None:
        """See the class."""
        if self.shuffle:
            _set_apart(columns, draw)


class Pass:
    """Things to draw, each once, in an order fixed when the pass begins.

    >>> once = Pass(drop_last=False)
    >>> [once.take((0,), 2, lambda: torch.arange(3), "rows").tolist() for _ in range(3)], once.ended
    ([[0, 1], [2], [0, 1]], False)
    >>> once.take((1,), 2, lambda: torch.arange(3), "rows").tolist()  # something changed: from the start
    [0, 1]
    """

    def __init__(self, drop_last: bool) -> None:
        self.drop_last = drop_last
        self.ended = False  # with the things taken last
        self._left: Tensor | None = None
        self._key: tuple[int, ...] = ()

    def take(self, key: tuple[int, ...], count: int, begin: Callable[[], Tensor], things: str) -> Tensor:
        """The next ``count`` things, fewer at the end of the pass.

        Args:
            key: what the order rests on; a new pass begins when it changes.
            count: how many.
            begin: makes the order of a new pass, ``[..., n]``.
            things: what they are called in an error.

        Raises:
            RuntimeError: with ``drop_last``, if a whole pass has fewer things than ``count``.
        """
        left = self._left if key == self._key else None
        if left is None or (self.drop_last and left.shape[-1] < count):
            left = begin()
            if self.drop_last and left.shape[-1] < count:
                raise RuntimeError(
                    f"drop_last=True leaves nothing to sample: a pass has {left.shape[-1]} {things}, a batch "
                    f"{count}: use drop_last=False, smaller batches, or store more"
                )
        taken, left = left[..., :count], left[..., count:]
        self.ended = left.shape[-1] < (count if self.drop_last else 1)
        self._left, self._key = None if self.ended else left, key
        return taken

    def drop(self) -> None:
        """Begin a new pass with the next draw."""
        self._left, self.ended = None, False

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs; owns its memory."""
        return {"left": None if self._left is None else self._left.clone(), "key": self._key}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the pass that gave ``state`` stood."""
        left, self._key = state["left"], tuple(state["key"])
        self._left = None if left is None else left.clone()


def _set_apart(columns: Columns, draw: Draw) -> None:
    """Make each row the first of its run, where columns tell runs apart; rows that are whole trajectories stay."""
    there = next((columns[key] for key in _MARKERS if key in columns), None)
    rows = len(draw.slots)
    if there is not None and there.numel() == rows:
        shape = columns[IS_INIT].shape if IS_INIT in columns else (rows, 1)
        columns[IS_INIT] = torch.ones(shape, dtype=torch.bool, device=there.device)
