"""Samplers of slices: consecutive rows of one trajectory each."""

from typing import TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.base import Columns
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Draw, Ring
from flatroll.buffers.index.trajectory_index import By, TrajectoryIndex
from flatroll.buffers.samplers.base import Pass, PassSampler, Sampler
from flatroll.buffers.samplers.marks import mark_slices
from flatroll.buffers.samplers.start_rows import HAS_STATE, StartRows
from flatroll.buffers.storages.base import Storage
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import IS_INIT, TRUNCATED, NestedKey, as_tuple, marker, require

Span: TypeAlias = bool | int | tuple[bool | int, bool | int]


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
        init_key: bool entry marked at the start of slices, default ``"is_init"``. None leaves what the env said.
        span: let slices begin up to so many rows before their trajectory and end up to so many after it; rows that
            are not there are left out, so such slices are shorter by as many, and the first and last rows of a
            trajectory come as often as the others. A pair is (before, after), True stands for
            ``slice_len - 1``: a slice then has at least one row. All places are equally likely. Default False.
        by: ``"trajectory"`` as said above, or ``"start"``: uniform over all starts of all trajectories, so that
            long trajectories are not under-represented.
        cache_values: accepted and without effect: the index is always up to date.
        start_key: bool entry that marks the rows at which slices may begin. Default ``("collector", "has_state")``,
            used if it is there: ``Collector(state_stride=m)`` marks the rows that keep their recurrent state. A slice
            then begins at the marked row at or before the one drawn; to reach the end of a trajectory its last slice
            may be shorter by what lies between two marks (not with ``strict_length``). None: anywhere.

    Raises:
        TypeError: neither ``num_slices`` nor ``slice_len``.
        ValueError: a number below 1, an unknown ``by``, a ``span`` that leaves no row, or ``pad_output`` with
            ``strict_length``.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
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

    _not_at = ""  # why slices cannot begin at marked rows only

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
        init_key: NestedKey | None = IS_INIT,
        span: Span = False,
        by: By = "trajectory",
        cache_values: bool = False,
        start_key: NestedKey | None = HAS_STATE,
    ) -> None:
        if num_slices is None and slice_len is None:
            raise TypeError(f"{type(self).__name__} needs num_slices or slice_len")
        for name, number in (("num_slices", num_slices), ("slice_len", slice_len)):
            if number is not None:
                whole_number(name, number)
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
        self.span = span
        self.by: By = by
        self._flags: list[NestedKey] = []  # done, terminated and truncated, which stand side by side
        if truncated_key is not None:
            *path, _ = as_tuple(truncated_key)
            done, terminated = ((*path, name) if path else name for name in ("done", "terminated"))
            self._flags = [done, terminated, truncated_key]
        spans(span, slice_len)
        self.start_key = start_key
        self._starts = StartRows(start_key)

    def attach(self, storage: Storage) -> None:
        """See `Sampler`."""
        self._starts.attach(storage)

    def boundary_keys(self, batch: TensorDictBase) -> BoundaryKeys | None:
        """The markers by which trajectories are told apart, as far as ``batch`` has them.

        Raises:
            KeyError: ``batch`` lacks the ``traj_key``, ``end_key`` or ``start_key`` that was asked for.
            TypeError: done, terminated, truncated or the ``start_key`` is not bool.
            ValueError: the ``start_key`` is there, and other options or the sampler ask for other starts.
        """
        for key in (self.traj_key, self.end_key):
            if key is not None:
                require(batch, key)
        why_not = self._not_at or ("span asks for others" if self.span else "")
        self._starts.check(batch, type(self).__name__, why_not)
        for key in self._flags:
            if batch.get(key, None) is not None:
                marker(batch, key)
        init_key = IS_INIT if self.init_key is None else self.init_key
        return BoundaryKeys.probe(batch, traj_key=self.traj_key, end_key=self.end_key, init_key=init_key)

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
        if self.span:
            spans(self.span, self._length(batch_size))
        return batch_size

    def _length(self, batch_size: int) -> int:
        """Rows per slice."""
        return self.slice_len or batch_size // (self.num_slices or 1)

    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """``batch_size`` rows in slices, fewer if slices are short and nothing is padded."""
        index, length = indexed(ring, self), self._length(batch_size)
        marks = self._starts.marks()
        if marks is not None:
            starts = index.marked_starts(
                batch_size // length,
                length,
                marks,
                by=self.by,
                strict=self.strict_length,
                generator=generator,
            )
            draw = index.slices_from(starts, length, follow=follow)
            return _pad(draw, length, ring) if self.pad_output else draw
        draw = index.draw(
            batch_size // length,
            length,
            by=self.by,
            strict=self.strict_length,
            span=spans(self.span, length) if self.span else (0, 0),
            generator=generator,
            follow=follow,
        )
        return _pad(draw, length, ring) if self.pad_output else draw

    def mark(self, columns: Columns, draw: Draw) -> None:
        """Mark where slices begin and end (see the class)."""
        mark_slices(columns, draw, self.init_key, self._flags)


class SliceSamplerWithoutReplacement(PassSampler, SliceSampler):
    """Slices as those of `SliceSampler`, none of them twice per pass over the buffer.

    With ``by="trajectory"`` a pass takes one slice of each trajectory, its start drawn uniformly. With
    ``by="start"`` it takes all rows: each trajectory is cut into slices of ``slice_len`` rows one after another, at
    a random phase, so that it may begin and end with a shorter one; a trajectory of at most ``slice_len`` rows is
    one slice.

    Every sample has the same number of slices, the last one of a pass fewer. It sets ``ran_out``, which ends an
    iteration over the buffer, and the next sample begins a new pass; so does the first one after any write, since
    what is stored is then no longer the same. Beginning a pass takes time in the stored fragments. A pass that was
    begun goes on after ``load_state_dict``.

    Args:
        num_slices: slices per sample, see `SliceSampler`, as all others up to ``truncated_key``.
        slice_len: rows per slice.
        drop_last: leave out the slices at the end of a pass that do not fill a batch. Default False: they are a
            smaller sample.
        end_key: marks the last row of an episode.
        traj_key: constant within a trajectory.
        truncated_key: marked at the end of slices.
        strict_length: only slices of ``slice_len`` rows: trajectories that are shorter take no part, and with
            ``by="start"`` as many slices as fit are cut from each, the rows before and after them left out of
            this pass. Default False.
        shuffle: draw the order of each pass. Default True. False: in the order in which the slices' first rows were
            stored, and with ``by="start"`` cut from the first row on.
        pad_output: see `SliceSampler`.
        init_key: marked at the start of slices.
        by: ``"trajectory"`` (default) or ``"start"``, as said above.
        cache_values: accepted and without effect.

    Raises:
        TypeError, ValueError: as `SliceSampler`.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement
    >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, by="start", shuffle=False)
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=4)
    >>> step = torch.arange(9)
    >>> rows = buffer.extend(TensorDict({"step": step, "episode": step // 5}, [9]))
    >>> [sample["step"].tolist() for sample in buffer]
    [[0, 1, 2, 3], [4, 5, 6], [7, 8]]
    """

    _not_at = "the slices of a pass lie where they were cut"

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: NestedKey | None = None,
        traj_key: NestedKey | None = None,
        truncated_key: NestedKey | None = TRUNCATED,
        strict_length: bool = False,
        shuffle: bool = True,
        pad_output: bool = False,
        init_key: NestedKey | None = IS_INIT,
        by: By = "trajectory",
        cache_values: bool = False,
    ) -> None:
        super().__init__(
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            traj_key=traj_key,
            truncated_key=truncated_key,
            strict_length=strict_length,
            pad_output=pad_output,
            init_key=init_key,
            by=by,
        )
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._pass = Pass(drop_last)

    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """The next slices of the pass, fewer at its end.

        Raises:
            RuntimeError: nothing is stored, no trajectory is long enough, or, with ``drop_last``, a pass has fewer
                slices than a sample.
        """
        index, length = indexed(ring, self), self._length(batch_size)
        index.check_not_empty()

        def begin() -> Tensor:
            places = index.places(
                length, by=self.by, strict=self.strict_length, shuffle=self.shuffle, generator=generator
            )
            if self.shuffle:
                places = places[:, torch.randperm(places.shape[1], generator=generator)]
            return places

        key = (index.head, index.written, length)
        starts, lengths = self._pass.take(key, batch_size // length, begin, "slices")
        self.ran_out = self._pass.ended
        draw = index.slices_from(starts, lengths, follow=follow)
        return _pad(draw, length, ring) if self.pad_output else draw


def indexed(ring: Ring, sampler: Sampler) -> TrajectoryIndex:
    """``ring``, if it knows its trajectories; RuntimeError if nothing is stored, else TypeError."""
    if isinstance(ring, TrajectoryIndex):
        return ring
    ring.check_not_empty()
    raise TypeError(
        f"{type(sampler).__name__} draws from a TrajectoryIndex, got {type(ring).__name__}: give the sampler to "
        "ReplayBuffer(sampler=...)"
    )


def spans(span: Span, length: int | None) -> tuple[int, int]:
    """Rows by which a slice of ``length`` rows may reach beyond the first and the last row of its trajectory.

    Raises:
        ValueError: ``span`` is no bool, number or pair of them, or leaves no row of the slice.

    >>> spans(True, 5), spans((2, False), 5)
    ((4, 4), (2, 0))
    """
    pair = span if isinstance(span, tuple) else (span, span)
    if len(pair) != 2 or any(not isinstance(number, int) or number < 0 for number in pair):
        raise ValueError(
            f"span must be a bool, a number of rows, or a pair (before, after) of them, got {span!r}"
        )
    most = max(pair) + 1 if length is None else length - 1
    if any(number is not True and number > most for number in pair):
        raise ValueError(f"span={span!r} leaves no row of a slice of {length}: use at most {most}, or True")
    before, after = (most if number is True else int(number) for number in pair)
    return before, after


def _pad(draw: Draw, length: int, ring: Ring) -> Draw:
    """Repeat the last row of each short slice."""
    assert draw.firsts is not None and draw.lasts is not None
    step = torch.arange(length)
    at = torch.minimum(draw.firsts[:, None] + step, draw.lasts[:, None])
    mask = draw.firsts[:, None] + step <= draw.lasts[:, None]
    firsts = torch.arange(len(at)) * length
    slots = draw.slots[at.flatten()]
    follow = None if draw.follow is None else ring.follow(slots)
    return Draw(slots, firsts, firsts + mask.sum(1) - 1, follow, mask.flatten(), draw.stamp)
