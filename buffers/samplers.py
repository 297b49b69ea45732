"""Which rows a sample is made of, and how it is marked."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns import Columns
from flatroll.buffers.index import By, TrajectoryIndex
from flatroll.buffers.ring import Draw, Ring
from flatroll.buffers.runs import BoundaryKeys
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    MASK,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    marker,
    require,
)

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
    without any of ``is_init``, ``done``, ``("collector", "traj_ids")`` and ``"episode"``, is left as it is. The
    stored flags are in ``buffer[info["index"]]`` (``sample(return_info=True)``).

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=4).batch_size
    4
    """

    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """``batch_size`` rows."""
        draw = ring.uniform(batch_size, generator)
        if not follow or not isinstance(ring, TrajectoryIndex):
            return draw
        return Draw(draw.slots, follow=ring.follow(draw.slots), stamp=draw.stamp)

    def mark(self, columns: Columns, draw: Draw) -> None:
        """Make each row the first of its run, where columns tell runs apart."""
        there = next((columns[key] for key in _MARKERS if key in columns), None)
        if there is not None:
            shape = columns[IS_INIT].shape if IS_INIT in columns else (len(draw.slots), 1)
            columns[IS_INIT] = torch.ones(shape, dtype=torch.bool, device=there.device)


class SliceSampler(Sampler):
    """Slices of consecutive rows of one trajectory each, end to end in one flat batch.

    A slice is drawn by drawing a trajectory uniformly, then its start within the trajectory uniformly, both with
    replacement. Slices run across the windows of a collector and the writes of interleaved workers, never across
    trajectories or the write head.

    In the sample, the first row of each slice has ``is_init`` True (or-ed with the stored value) and its last row
    has ``done`` True, and ``truncated`` True unless it is terminated. Other rows keep what the env said. These
    entries are always there, stored or not. So whoever splits at ``is_init`` or ``done`` keeps slices apart.

    Args:
        num_slices: slices per sample; ``slice_len`` is then ``batch_size // num_slices``.
        slice_len: rows per slice; ``num_slices`` is then ``batch_size // slice_len``. Both may be given if their
            product is the batch size.
        end_key: bool entry that marks the last row of an episode, default ``("next", "done")``.
        traj_key: integer entry, constant within a trajectory. Default: ``("collector", "traj_ids")`` or else
            ``"episode"`` if the first batch has one of them; without any, ``end_key`` and ``init_key`` decide.
        truncated_key: entry marked at the end of slices, default ``("next", "truncated")``; ``done`` and
            ``terminated`` are its neighbours. None leaves what the env said.
        strict_length: leave trajectories of fewer than ``slice_len`` rows out. Default False: they give shorter
            slices, and the sample fewer rows.
        pad_output: repeat the last row of short slices up to ``slice_len`` and write a bool
            ``("collector", "mask")``, False at repeated rows. The mask is written even if nothing is short.
            Repeated rows have ``is_init`` False.
        init_key: bool entry marked at the start of slices, default ``"is_init"``.
        by: ``"trajectory"`` as said above, or ``"start"``: uniform over all starts of all trajectories, so that
            long trajectories are not under-represented.
        cache_values: accepted and without effect: the index is always up to date.

    Raises:
        TypeError: neither ``num_slices`` nor ``slice_len``.
        ValueError: a number below 1, an unknown ``by``, or ``pad_output`` with ``strict_length``.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> done = torch.zeros(50, 1, dtype=torch.bool)
    >>> batch = TensorDict({"x": torch.arange(50), "next": {"done": done, "terminated": done}}, [50])
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(50), sampler=SliceSampler(slice_len=3), batch_size=6)
    >>> rows = buffer.extend(batch)
    >>> sample = buffer.sample()
    >>> (sample["x"] - sample["x"][[0, 0, 0, 3, 3, 3]]).tolist()
    [0, 1, 2, 0, 1, 2]
    >>> sample["is_init"].flatten().tolist()
    [True, False, False, True, False, False]
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        traj_key: NestedKey | None = None,
        truncated_key: NestedKey | None = TRUNCATED,
        strict_length: bool = False,
        pad_output: bool = False,
        init_key: NestedKey = IS_INIT,
        by: By = "trajectory",
        cache_values: bool = False,
    ) -> None:
        if num_slices is None and slice_len is None:
            raise TypeError("SliceSampler needs num_slices or slice_len")
        for name, number in (("num_slices", num_slices), ("slice_len", slice_len)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {number!r}")
        if by not in ("trajectory", "start"):
            raise ValueError(f"by must be 'trajectory' or 'start', got {by!r}")
        if pad_output and strict_length:
            raise ValueError(
                "pad_output=True needs strict_length=False: with strict_length=True no slice is short"
            )
        self.num_slices = num_slices
        self.slice_len = slice_len
        self.end_key = end_key
        self.traj_key = traj_key
        self.truncated_key = truncated_key
        self.strict_length = strict_length
        self.pad_output = pad_output
        self.init_key = init_key
        self.by: By = by
        self._flags: list[NestedKey] = []  # done, terminated and truncated, which stand side by side
        if truncated_key is not None:
            *path, _ = as_tuple(truncated_key)
            self._flags = [_key(*path, "done"), _key(*path, "terminated"), truncated_key]

    def boundary_keys(self, batch: TensorDictBase) -> BoundaryKeys | None:
        """The markers by which trajectories are told apart, as far as ``batch`` has them.

        Raises:
            KeyError: ``batch`` lacks the ``traj_key`` or ``end_key`` that was asked for.
            TypeError: done, terminated or truncated is not bool.
        """
        for key in (self.traj_key, self.end_key):
            if key is not None:
                require(batch, key)
        for key in self._flags:
            if batch.get(key, None) is not None:
                marker(batch, key)
        return BoundaryKeys.probe(batch, traj_key=self.traj_key, end_key=self.end_key, init_key=self.init_key)

    def check(self, batch_size: int | None) -> int:
        """``batch_size``, by default ``num_slices * slice_len``; ValueError if they do not fit."""
        slices, length = self.num_slices, self.slice_len
        if batch_size is None:
            if slices is None or length is None:
                raise ValueError("batch_size must be given to ReplayBuffer(...) or to sample(...)")
            return slices * length
        for name, number in (("num_slices", slices), ("slice_len", length)):
            if number is not None and batch_size % number:
                raise ValueError(f"batch_size={batch_size} is not divisible by {name}={number}")
        if slices is not None and length is not None and slices * length != batch_size:
            raise ValueError(f"num_slices={slices} times slice_len={length} is not batch_size={batch_size}")
        return batch_size

    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """``batch_size`` rows in slices, fewer if trajectories are short and nothing is padded."""
        if not isinstance(ring, TrajectoryIndex):
            ring.check_not_empty()
            raise TypeError("SliceSampler draws from a TrajectoryIndex: give it to ReplayBuffer(sampler=...)")
        length = self.slice_len or batch_size // (self.num_slices or 1)
        draw = ring.draw(
            batch_size // length,
            length,
            by=self.by,
            strict=self.strict_length,
            generator=generator,
            follow=follow,
        )
        return _pad(draw, length, ring) if self.pad_output else draw

    def mark(self, columns: Columns, draw: Draw) -> None:
        """Mark where slices begin and end (see the class)."""
        if draw.firsts is None or draw.lasts is None:
            return
        rows = len(draw.slots)
        device = next(iter(columns.values())).device
        firsts, lasts = draw.firsts.to(device), draw.lasts.to(device)
        init = _flag(columns, self.init_key, (rows, 1), device).index_fill_(0, firsts, True)
        if draw.mask is not None:
            columns[MASK] = draw.mask.to(device)
            init.view(rows).logical_and_(columns[MASK])  # a repeated first row begins nothing
        if not self._flags:
            return
        done_key, terminated_key, truncated_key = self._flags
        shape = next((columns[key].shape for key in self._flags if key in columns), (rows, 1))
        done = _flag(columns, done_key, shape, device)
        truncated = _flag(columns, truncated_key, shape, device)
        if terminated_key not in columns:
            columns[terminated_key] = done & ~truncated
        terminated = columns[terminated_key].index_select(0, lasts)
        # of two bools, a <= b is "not a, or b"
        truncated.index_copy_(0, lasts, terminated.le(truncated.index_select(0, lasts)))
        done.index_fill_(0, lasts, True)


def _flag(columns: Columns, key: NestedKey, shape: Sequence[int], device: torch.device) -> Tensor:
    """The bool column ``key``; if there is none, one of zeros is put in."""
    if key not in columns:
        columns[key] = torch.zeros(shape, dtype=torch.bool, device=device)
    return columns[key]


def _key(*names: str) -> NestedKey:
    return names[0] if len(names) == 1 else names


def _pad(draw: Draw, length: int, ring: TrajectoryIndex) -> Draw:
    """Repeat the last row of each short slice."""
    assert draw.firsts is not None and draw.lasts is not None
    step = torch.arange(length)
    at = torch.minimum(draw.firsts[:, None] + step, draw.lasts[:, None])
    mask = draw.firsts[:, None] + step <= draw.lasts[:, None]
    firsts = torch.arange(len(at)) * length
    slots = draw.slots[at.flatten()]
    follow = None if draw.follow is None else ring.follow(slots)
    return Draw(slots, firsts, firsts + mask.sum(1) - 1, follow, mask.flatten(), draw.stamp)
