"""Slice samplers: draw slices (consecutive rows of one trajectory) and mark their starts and ends."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import Columns, TensorColumn
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Array, Draw, Follow, Ring
from flatroll.buffers.index.trajectory_index import BY, By, TrajectoryIndex, missing_slices
from flatroll.buffers.samplers.sampler import Sampler, StoredColumns, freshness
from flatroll.layout.checks import check_choice, check_flags, check_key_names, check_keys, check_whole_number
from flatroll.layout.keys import HAS_STATE, IS_INIT, MASK, TRUNCATED, NestedKey, as_tuple, marker, require
from flatroll.layout.transfers import upload

Span: TypeAlias = bool | int | Sequence[bool | int]


class SliceSampler(Sampler):
    """Draws slices (consecutive rows of one trajectory) and concatenates them into one flat batch.

    A slice is drawn by drawing a trajectory uniformly, then its start within the trajectory uniformly, both with
    replacement. Slices run across the windows of a collector and the writes of interleaved workers, never across
    trajectories or the write head.

    In the sample, the first row of each slice has ``is_init`` True, whatever was stored, and the last row has ``done``
    True, and ``truncated`` True unless it is terminated. Other rows keep the stored flags. These entries are always in
    the sample, so code that splits at ``is_init`` or ``done`` separates the slices.

    Args:
        num_slices: slices per sample; ``slice_len`` is then ``batch_size // num_slices``.
        slice_len: rows per slice; ``num_slices`` is then ``batch_size // slice_len``. Both may be given if their
            product is the batch size.
        end_key: bool entry that marks the last row of an episode, default ``("next", "done")``. A list is ``end_keys``.
        end_keys: several such entries, any of which marks it; not with ``end_key``. Batches may lack some of them, or
            all if they have trajectory ids.
        traj_key: integer entry, constant within a trajectory. Default: ``("collector", "traj_ids")`` or else
            ``"episode"`` if the first batch has one of them; without any, ``end_key`` and ``init_key`` decide.
        truncated_key: entry marked at the end of slices, default ``("next", "truncated")``; ``done`` and
            ``terminated`` are looked up next to it. None keeps the env's flags.
        strict_length: skip trajectories of fewer than ``slice_len`` rows. Default False: they give shorter slices.
        fill: if slices are short, draw more until the sample has exactly ``batch_size`` rows, and cut the last one to
            fit; ``num_slices`` then only determines the slice length. False: draw ``batch_size // slice_len`` slices,
            so a sample with short ones has fewer rows. Default True. With ``pad_output`` samples have ``batch_size``
            rows anyway, padding included, and ``fill`` has no effect.
        pad_output: repeat the last row of short slices up to ``slice_len`` and write a bool
            ``("collector", "mask")``, False at repeated rows. The mask is written even if nothing is short.
            Repeated rows have ``is_init`` False.
        init_key: bool entry marked at the start of slices, default ``"is_init"``. None keeps the env's flags.
        span: let slices begin up to this many rows before their trajectory and end up to this many after it; missing
            rows are left out, so these slices are shorter, and the first and last rows of a trajectory are drawn as
            often as the others. A pair is (before, after), False is 0, True is ``slice_len - 1``. All positions are
            equally likely. Default False.
        by: ``"trajectory"``, see above, or ``"start"``: uniform over all starts of all trajectories, so that long
            trajectories are not under-represented.
        cache_values, compile, use_gpu: accepted for compatibility, without effect.
        start_key: bool entry that marks the rows at which slices may begin. Default ``("collector", "has_state")`` if
            present: ``Collector(state_stride=m)`` marks the rows with recurrent states. A slice then begins at the
            last marked row up to the drawn one. A trajectory's last slice may be shorter than ``slice_len`` by up to
            the distance of two marks (not with ``strict_length``). None: anywhere.
        max_policy_lag: draw only slices whose rows all have a ``("collector", "policy_version")`` at most this much
            below the newest one (`policy_version`); relative probabilities do not change.

    Raises:
        TypeError: neither ``num_slices`` nor ``slice_len`` is given, or both ``end_key`` and ``end_keys``.
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

    independent = True
    _not_at = ""  # why slices of this sampler cannot begin at marked rows; empty if they can

    _shown: ClassVar[tuple[str, ...]] = (
        "num_slices",
        "slice_len",
        "strict_length",
        "pad_output",
        "span",
        "by",
    )

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | list[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        truncated_key: NestedKey | None = TRUNCATED,
        strict_length: bool = False,
        pad_output: bool = False,
        init_key: NestedKey | None = IS_INIT,
        span: Span = False,
        by: By = "trajectory",
        cache_values: bool = False,
        start_key: NestedKey | None = HAS_STATE,
        end_keys: Sequence[NestedKey] | None = None,
        compile: bool | dict[str, Any] = False,
        use_gpu: bool | torch.device = False,
        fill: bool = True,
        max_policy_lag: int | None = None,
    ) -> None:
        self.freshness = freshness(max_policy_lag)

        if num_slices is None and slice_len is None:
            raise TypeError(f"{type(self).__name__} needs num_slices or slice_len")
        if num_slices is not None:
            check_whole_number("num_slices", num_slices)
        if slice_len is not None:
            check_whole_number("slice_len", slice_len)
        check_choice("by", by, BY)
        check_flags(strict_length=strict_length, pad_output=pad_output, cache_values=cache_values, fill=fill)
        check_keys(
            optional=True,
            traj_key=traj_key,
            truncated_key=truncated_key,
            init_key=init_key,
            start_key=start_key,
        )
        if not isinstance(end_key, list):
            check_keys(optional=True, end_key=end_key)
        if pad_output and strict_length:
            raise ValueError("pad_output=True needs strict_length=False: otherwise no slice is short")

        self.end_key, self.end_keys = _end_keys(end_key, end_keys)
        self.traj_key = traj_key
        self.truncated_key = truncated_key
        self.init_key = init_key
        self.start_key = start_key
        self._flags: list[NestedKey] = []  # done, terminated and truncated, which have a common parent
        if truncated_key is not None:
            *path, _ = as_tuple(truncated_key)
            if path:
                self._flags = [(*path, "done"), (*path, "terminated"), truncated_key]
            else:
                self._flags = ["done", "terminated", truncated_key]

        self.num_slices = num_slices
        self.slice_len = slice_len
        self.fill = fill
        self.strict_length = bool(strict_length)
        self.pad_output = pad_output
        self.by: By = by
        spans(span, slice_len)
        if not isinstance(span, Sequence):
            span = (span, span)
        self.span = (span[0], span[1])

        self._storage: StoredColumns | None = None

    @override
    def attach(self, storage: StoredColumns) -> None:
        super().attach(storage)
        self._storage = storage

    def boundary_keys(self, batch: TensorDictBase) -> BoundaryKeys | None:
        """Name the columns of ``batch`` that mark trajectories.

        Raises:
            KeyError: ``batch`` lacks a given ``traj_key``, ``end_key`` or ``start_key``, or all ``end_keys`` and ids.
            TypeError: done, terminated, truncated or the ``start_key`` is not bool.
            ValueError: ``start_key`` conflicts with other options or the sampler.
        """
        super().boundary_keys(batch)
        for key in (self.traj_key, self.end_key):
            if key is not None:
                require(batch, key)

        ends = [key for key in self.end_keys or [] if batch.get(key, None) is not None]
        self._check_start_key(batch)
        for key in self._flags:
            if batch.get(key, None) is not None:
                marker(batch, key)

        init_key = IS_INIT if self.init_key is None else self.init_key
        end_key = ends[0] if ends else self.end_key
        keys = BoundaryKeys.probe(batch, traj_key=self.traj_key, end_key=end_key, init_key=init_key)
        if self.end_keys and not ends and batch.get(keys.traj, None) is None:
            require(batch, self.end_keys[0])

        if ends:
            return replace(keys, more_done=tuple(ends[1:]))
        return keys

    def _check_start_key(self, batch: TensorDictBase) -> None:
        """Raise an error unless slices can begin at the rows that ``start_key`` marks in ``batch``."""
        if self.start_key is None:
            return
        if self.start_key != HAS_STATE:
            require(batch, self.start_key)
        if batch.get(self.start_key, None) is None:
            return

        marker(batch, self.start_key)  # raises TypeError unless bool
        why_not = self._not_at
        if not why_not and any(self.span):
            why_not = "span allows other start rows"
        if why_not:
            raise ValueError(
                f"{type(self).__name__} cannot begin slices at rows that {self.start_key!r} marks: {why_not}. "
                "Use SliceSampler(slice_len=...), collect with state_stride=1, or exclude the entry"
            )

    def check(self, batch_size: int | None) -> int:
        """Return ``batch_size``, by default ``num_slices * slice_len``; ValueError if they do not fit."""
        slices = self.num_slices
        length = self.slice_len
        if batch_size is None:
            if slices is None or length is None:
                raise ValueError("batch_size must be given to ReplayBuffer(...) or to sample(...)")
            return slices * length

        for name, number in (("num_slices", slices), ("slice_len", length)):
            if number is not None and batch_size % number:
                raise ValueError(f"batch_size={batch_size} is not divisible by {name}={number}")
        if slices is not None and length is not None and slices * length != batch_size:
            raise ValueError(f"num_slices={slices} times slice_len={length} is not batch_size={batch_size}")

        if any(self.span):
            spans(self.span, self._length(batch_size))
        return batch_size

    def _length(self, batch_size: int) -> int:
        """Rows per slice."""
        return self.slice_len or batch_size // (self.num_slices or 1)

    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """Draw slices with ``batch_size`` rows in all; without ``fill``, fewer if slices are short and not padded."""
        return self._draw_rows(ring, batch_size, self._length(batch_size), generator, follow)

    @override
    def redraw(
        self,
        ring: Ring,
        batch_size: int,
        units: int,
        rows: int,
        generator: torch.Generator | None,
        follow: bool,
    ) -> Draw:
        length = self._length(batch_size)
        draw = self._draw_rows(ring, units * length, length, generator, follow)
        if self.pad_output or not self.fill or len(draw.slots) == rows:
            return draw

        # A lost slice may be shorter: of as many rows as asked for, these are the first ones.
        shorter = cut(draw, rows)
        shorter.scale = draw.scale
        return shorter

    def _draw_rows(
        self, ring: Ring, batch_size: int, length: int, generator: torch.Generator | None, follow: bool
    ) -> Draw:
        """Do the same as :meth:`draw` with slices of up to ``length`` rows."""
        if isinstance(ring, TrajectoryIndex):
            index = ring
        else:
            index = indexed(ring, self)

        marks = None
        if self._storage is not None and self.start_key is not None:
            marks = self._storage.columns.get(self.start_key)

        way: dict[str, Any] = {"by": self.by, "strict": self.strict_length, "generator": generator}
        draw_slices: Callable[..., Draw]
        if isinstance(marks, TensorColumn):  # bool [capacity], True for rows at which slices may begin
            marked = marks.data.view(-1).numpy(force=True)
            draw_slices = partial(_draw_marked, index, marked)
        else:
            draw_slices = index.draw
            if any(self.span):
                way["span"] = spans(self.span, length)
            if self.freshness is None and self.fill and not self.pad_output:
                return index.draw(batch_size // length, length, follow=follow, rows=batch_size, **way)

        if self.freshness is not None:
            draw_slices = partial(self.freshness.slices, index, index.slices_from, draw_slices)

        draw = draw_slices(batch_size // length, length, follow=follow, **way)

        if self.pad_output:
            return pad_slices(draw, length, ring)
        if len(draw.slots) == batch_size or not self.fill:
            return draw
        return fill(draw, batch_size, partial(draw_slices, length=length, follow=follow, **way))

    def mark(self, columns: Columns, draw: Draw) -> None:
        """Set ``is_init`` and done flags at the ends of each slice; missing columns are added.

        The last row gets done, and truncated unless terminated. Padding gets no marks.
        """
        if draw.firsts is None or draw.lasts is None:
            return

        rows = len(draw.slots)
        device = next(iter(columns.values())).device

        init = None
        if self.init_key is not None:
            init = _flag(columns, self.init_key, (rows, 1), device)

        done = None
        terminated = None
        truncated = None
        if self._flags:
            done_key, terminated_key, truncated_key = self._flags
            shape = next((columns[key].shape for key in self._flags if key in columns), (rows, 1))
            done = _flag(columns, done_key, shape, device)
            truncated = _flag(columns, truncated_key, shape, device)
            if terminated_key not in columns:  # other entries that could have ended an episode
                columns[terminated_key] = done & ~truncated
            terminated = _flag(columns, terminated_key, shape, device)

        _mark((init, done, terminated, truncated), draw.firsts, draw.lasts)

        if draw.mask is not None:
            columns[MASK] = upload(draw.mask, device)
            if init is not None:
                init.view(rows).logical_and_(columns[MASK])  # a first row repeated as padding is not a start


def indexed(ring: Ring, sampler: Sampler) -> TrajectoryIndex:
    """Return ``ring`` if it is a `TrajectoryIndex`; else RuntimeError if it is empty, or TypeError."""
    if isinstance(ring, TrajectoryIndex):
        return ring
    ring.check_not_empty()
    raise TypeError(
        f"{type(sampler).__name__} draws from a TrajectoryIndex, got {type(ring).__name__}: pass the sampler to "
        "ReplayBuffer(sampler=...)"
    )


def _end_keys(
    end_key: NestedKey | list[NestedKey] | None, end_keys: Sequence[NestedKey] | None
) -> tuple[NestedKey | None, list[NestedKey] | None]:
    """Return the options ``end_key`` and ``end_keys``, at most one of them; a list as ``end_key`` is ``end_keys``."""
    both = end_key is not None and end_keys is not None
    name = "end_keys"
    if isinstance(end_key, list):
        name = "end_key"
        end_keys = end_key
        end_key = None

    listed = None
    if end_keys is not None:
        listed = check_key_names(name, end_keys)
    if both or listed == []:
        raise TypeError(
            f"end_keys must be a list of entries, without end_key, got end_keys={end_keys!r}, end_key={end_key!r}"
        )
    return end_key, listed


def _draw_marked(
    index: TrajectoryIndex, marks: Array, count: int, length: int, *, follow: bool, **way: Any
) -> Draw:
    """Draw slices that begin at rows marked in ``marks`` (bool ``[capacity]``)."""
    return index.slices_from(index.marked_starts(count, length, marks, **way), length, follow=follow)


def spans(span: Span, length: int | None) -> tuple[int, int]:
    """Return how many rows a slice may extend before and after its trajectory, given the option ``span``.

    Raises:
        ValueError: ``span`` is not a bool, number or pair of them, or may leave an empty slice.

    >>> spans(True, 5), spans((2, False), 5)
    ((4, 4), (2, 0))
    """
    pair = span if isinstance(span, Sequence) else (span, span)
    if len(pair) != 2 or any(not isinstance(number, int) or number < 0 for number in pair):
        raise ValueError(f"span must be a bool, a number of rows or a pair of them, got {span!r}")

    most = max(pair) + 1
    if length is not None:
        most = length - 1
    if any(number is not True and number > most for number in pair):
        raise ValueError(f"span={span!r} leaves no row of a slice of {length}: use at most {most}, or True")

    before, after = pair
    if before is True:
        before = most
    if after is True:
        after = most
    return int(before), int(after)


def pad_slices(draw: Draw, length: int, ring: Ring) -> Draw:
    """Pad slices to ``length`` rows by repeating the last row of each."""
    firsts, lasts = bounds(draw)
    step = torch.arange(length)
    # [S, length]: positions in draw.slots, and whether they are rows of the slice
    at = torch.minimum(firsts[:, None] + step, lasts[:, None])
    mask = firsts[:, None] + step <= lasts[:, None]

    firsts = torch.arange(len(at)) * length
    slots = draw.slots[at.flatten()]
    follow = None if draw.follow is None else ring.follow(slots)
    return Draw(slots, firsts, firsts + mask.sum(1) - 1, follow, mask.flatten(), draw.version)


def _flag(columns: Columns, key: NestedKey, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return the bool column ``key``, contiguous, one flag per row; create it with zeros if missing."""
    column = columns.get(key)
    if column is None:
        column = columns[key] = torch.zeros(shape, dtype=torch.bool, device=device)
    elif column.dtype is not torch.bool or column.numel() != len(column):  # the kernel writes by address
        raise ValueError(
            f"{key!r} must have one bool per row to mark the ends of slices, the storage keeps {column.dtype} "
            f"{list(column.shape[1:])} per row: name other entries (truncated_key, init_key) or None"
        )
    elif not column.is_contiguous():
        column = columns[key] = column.contiguous()
    return column


def _mark(flags: Sequence[Tensor | None], firsts: Tensor, lasts: Tensor) -> None:
    """Set init at ``firsts``, done at ``lasts``, and truncated at ``lasts`` that are not terminated."""
    if any(flag is not None and not flag.is_cpu for flag in flags):
        _mark_on_device(flags, firsts, lasts)
        return
    from flatroll.kernels.slices.drawing import mark  # needs numba; five times faster than in torch

    addresses = [0 if column is None else column.data_ptr() for column in (*flags, firsts, lasts)]
    mark(*addresses, len(firsts))


def _mark_on_device(flags: Sequence[Tensor | None], firsts: Tensor, lasts: Tensor) -> None:
    """The same in torch, for any device."""
    init, done, terminated, truncated = flags
    if init is not None:
        init.view(-1).index_fill_(0, upload(firsts, init.device), True)
    if done is not None and terminated is not None and truncated is not None:
        ends = upload(lasts, done.device)
        done.view(-1).index_fill_(0, ends, True)
        # a <= b of bools is "not a, or b"
        final = terminated.view(-1).index_select(0, ends)
        cut = truncated.view(-1).index_select(0, ends)
        truncated.view(-1).index_copy_(0, ends, final.le(cut))


def fill(first: Draw, rows: int, more: Callable[[int], Draw]) -> Draw:
    """Draw more slices until there are ``rows`` rows, and cut the last slice to fit; `TrajectoryIndex.draw` does the
    same for the slices that it draws.

    The slices are a prefix of a longer draw: later slices do not affect which are kept.

    Args:
        first: the slices drawn so far, at least one, of fewer rows than that.
        rows: target number of rows.
        more: draws the given number of further slices, each of at least one row.
    """
    parts = [first]
    slices = len(bounds(first)[0])
    drawn = len(first.slots)

    while drawn < rows:
        part = more(missing_slices(rows, slices, drawn))
        parts.append(part)
        slices += len(bounds(part)[0])
        drawn += len(part.slots)

    return cut(_join(parts), rows)


def cut(draw: Draw, rows: int) -> Draw:
    """Keep the first ``rows`` rows of ``draw``, which has slices, enough rows and no padding."""
    firsts, lasts = bounds(draw)
    kept = int(torch.searchsorted(firsts, rows))  # slices that begin before row number ``rows``

    follow = draw.follow
    if follow is not None:
        follow = Follow(follow.slots[:rows], follow.patch[:, follow.patch[0] < rows])

    return Draw(
        draw.slots[:rows],
        firsts[:kept],
        lasts[:kept].clamp(max=rows - 1),
        follow,
        version=draw.version,
        info={key: entry[:rows] for key, entry in draw.info.items()},
    )


def _join(parts: list[Draw]) -> Draw:
    """Concatenate draws with slices."""
    at = 0
    firsts = []
    lasts = []
    follows = []

    for part in parts:
        # ``at`` is the position of the part's first row
        firsts.append(bounds(part)[0] + at)
        lasts.append(bounds(part)[1] + at)
        if part.follow is not None:
            part.follow.patch[0] += at
            follows.append(part.follow)
        at += len(part.slots)

    follow = None
    if follows:
        slots = [each.slots for each in follows]
        patches = [each.patch for each in follows]
        follow = Follow(torch.cat(slots), torch.cat(patches, 1))

    return Draw(
        torch.cat([part.slots for part in parts]),
        torch.cat(firsts),
        torch.cat(lasts),
        follow,
        version=parts[0].version,
        info={key: torch.cat([part.info[key] for part in parts]) for key in parts[0].info},
    )


def bounds(draw: Draw) -> tuple[Tensor, Tensor]:
    """Return where the slices of ``draw`` begin and end, int64 ``[S]`` each; it must have slices."""
    assert draw.firsts is not None and draw.lasts is not None
    return draw.firsts, draw.lasts
