"""Samplers without replacement: each stored row or slice once per pass over the buffer."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import Columns
from flatroll.buffers.index.ring import Draw, Ring
from flatroll.buffers.index.saved_tables import damaged
from flatroll.buffers.index.trajectory_index import By
from flatroll.buffers.samplers.sampler import Sampler, freshness, mark_single_rows
from flatroll.buffers.samplers.slices import SliceSampler, cut, indexed, pad_slices
from flatroll.layout.checks import check_flags
from flatroll.layout.keys import IS_INIT, TRUNCATED, NestedKey


class PassSampler(Sampler):
    """Base class: draws each row or slice once per pass, in an order fixed when the pass begins."""

    _shown: ClassVar[tuple[str, ...]] = ("drop_last", "shuffle")
    state_key = "pass"
    drop_last: bool
    _left: Tensor | None = None  # remainder of the pass, [..., n]; None: the next draw begins a new pass
    _key: tuple[int, ...] = ()  # what the current order depends on
    _form: tuple[int, ...] = ()  # shape of the remainder without the last dim

    def _take(self, key: tuple[int, ...], count: int, begin: Callable[[], Tensor], things: str) -> Tensor:
        """Return the next ``count`` rows or slices, fewer at the end of the pass.

        If ``key`` has changed, ``begin`` makes the order ``[..., n]`` of a new pass. RuntimeError with ``drop_last``
        if a whole pass has fewer ``things`` than ``count``.
        """
        left = self._left if key == self._key else None
        if left is None or (self.drop_last and self._amount(left, count) < count):
            left = begin()
            if self.drop_last and self._amount(left, count) < count:
                raise RuntimeError(
                    f"drop_last=True leaves nothing to sample: a pass has {self._amount(left, count)} {things}, fewer "
                    f"than the {count} of a batch. Use drop_last=False, smaller batches, or store more"
                )

        taken, left = self._split(left, count)
        least = count if self.drop_last else 1
        self.ran_out = self._amount(left, count) < least
        rest = None if self.ran_out else left
        self._left, self._key = rest, key  # together: an interrupt must not come between
        return taken

    def _amount(self, left: Tensor, count: int) -> int:
        """Return the number of rows or slices in ``left``; may stop at ``count``."""
        return left.shape[-1]

    def _split(self, left: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Split ``left`` into the part drawn now and the rest; both are views, since the order is fixed per pass."""
        return left[..., :count], left[..., count:]

    @override
    def emptied(self) -> None:
        self._left = None

    @override
    def state_dict(self) -> dict[str, Any]:
        left = None if self._left is None else self._left.clone()
        return {**super().state_dict(), "pass": {"left": left, "key": self._key}, "ran_out": self.ran_out}

    @override
    def check_state_dict(self, state: dict[str, Any], ring: Ring) -> None:
        super().check_state_dict(state, ring)

        left = state["pass"]["left"]
        key = tuple(state["pass"]["key"])
        if not all(type(number) is int for number in key) or type(state["ran_out"]) is not bool:
            raise damaged(f"its pass over the rows has the invalid key {key}")

        if left is None:
            return
        if not (
            isinstance(left, Tensor)
            and left.dtype is torch.int64
            and not left.is_meta
            and list(left.shape[:-1]) == list(self._form)
        ):
            raise damaged("the rest of its pass over the rows is not a list of rows")
        if key[:2] == (ring.head, ring.written):  # otherwise a new pass begins
            self._check_rest(left, ring)

    def _check_rest(self, left: Any, ring: Ring) -> None:
        """Raise ValueError unless ``left`` has stored rows or slices of them, each once."""
        slots = left[0] if self._form else left
        in_range = not len(slots) or 0 <= int(slots.min()) <= int(slots.max()) < ring.capacity
        if not in_range or (ring.numbers(slots, ring.head) >= ring.written).any():
            raise damaged("the rest of its pass over the rows has slots without a row")

        has_empty_slice = self._form and (left[1] < 1).any()
        if has_empty_slice or len(slots.unique()) != len(slots):
            raise damaged("the rest of its pass over the rows has a row twice, or an empty slice")

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        left = state["pass"]["left"]
        self._key = tuple(state["pass"]["key"])
        if left is not None:
            left = left.clone()
        self._left, self.ran_out = left, state["ran_out"]


class SamplerWithoutReplacement(PassSampler):
    """Draws single rows without replacement: each stored row once per pass over the buffer.

    A pass covers the rows stored when it begins. Its last sample sets ``ran_out``, which ends an iteration over the
    buffer; the next sample begins a new pass. Any write also begins a new pass. ``load_state_dict`` resumes a pass.

    Rows are marked as by `RandomSampler`. Without ``shuffle`` they are drawn in storage order and keep their stored
    marks: a sample is then a contiguous part of the data, whose runs `layout.run_ends` finds.

    Args:
        drop_last: drop the rows at the end of a pass that do not fill a batch. Default False: they form a shorter
            sample.
        shuffle: draw the order of each pass. Default True.
        max_policy_lag: a pass covers only rows that are not too old, see `RandomSampler`; a newer version begins a
            new pass. Default: all rows.

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    >>> sampler = SamplerWithoutReplacement(shuffle=False)
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, batch_size=2)
    >>> rows = buffer.extend(torch.arange(2)), buffer.extend(torch.arange(2, 7))
    >>> [sample.tolist() for sample in buffer]
    [[2, 3], [4, 5], [6]]
    """

    def __init__(
        self, drop_last: bool = False, shuffle: bool = True, max_policy_lag: int | None = None
    ) -> None:
        check_flags(drop_last=drop_last, shuffle=shuffle)
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.freshness = freshness(max_policy_lag)

    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """Return the next rows of the pass, fewer at its end; RuntimeError if ``drop_last`` leaves none."""
        version = ring.version  # read first, because other processes may write meanwhile
        ring.check_not_empty()

        def begin() -> Tensor:
            if self.freshness is None:
                slots = ring.stored()  # oldest first
            else:
                slots = self.freshness.stored(ring)

            if self.shuffle:
                return slots[torch.randperm(len(slots), generator=generator)]
            return slots

        key: tuple[int, ...] = (ring.head, ring.written)
        if self.freshness is not None:
            key = (*key, self.freshness.look(ring))
        slots = self._take(key, batch_size, begin, "rows")
        following = ring.follow(slots) if follow else None
        draw = Draw(slots, follow=following, version=version)

        if not self.shuffle:
            # Slices end where the next row was not written directly after the row, as happens with selecting writers.
            numbers = ring.numbers(slots, ring.head)
            breaks = (numbers.diff() != 1).nonzero()[:, 0]
            draw.firsts = torch.cat([torch.tensor([0]), breaks + 1])
            draw.lasts = torch.cat([breaks, torch.tensor([len(slots) - 1])])

        return draw

    def mark(self, columns: Columns, draw: Draw) -> None:
        """Set ``is_init`` at every row if rows are shuffled; in stored order, leave the markers unchanged."""
        if self.shuffle:
            mark_single_rows(columns, draw)


class SliceSamplerWithoutReplacement(PassSampler, SliceSampler):
    """Draws slices like `SliceSampler`, each at most once per pass over the buffer.

    With ``by="trajectory"`` a pass draws one slice of each trajectory, its start uniformly. With ``by="start"`` it
    covers all rows: each trajectory is cut into consecutive slices of ``slice_len`` rows at a random offset, so it
    may begin and end with a shorter one; a trajectory of at most ``slice_len`` rows is one slice.

    Every sample has exactly ``batch_size`` rows (see ``fill``), except the last one of a pass, which may have fewer
    and sets ``ran_out``, which ends an iteration over the buffer. Any write begins a new pass, in time proportional
    to the stored fragments. ``load_state_dict`` resumes a pass.

    Args:
        num_slices: slices per sample, see `SliceSampler`.
        slice_len: rows per slice.
        drop_last: drop the slices at the end of a pass that do not fill a batch. Default False: they form a smaller
            sample.
        fill: draw enough slices for ``batch_size`` rows; the next sample continues with the rest of a cut slice.
            False: draw ``batch_size // slice_len`` slices, so a sample with short ones has fewer rows. Default True.
        end_key, end_keys, traj_key, truncated_key: see `SliceSampler`.
        strict_length: draw only slices of ``slice_len`` rows: shorter trajectories are skipped, and with
            ``by="start"`` rows before and after the full slices are left out of the pass. Default False.
        shuffle: draw the order of each pass. Default True. False: in storage order of the slices' first rows, and
            with ``by="start"`` cut from the first row on.
        pad_output, init_key: see `SliceSampler`.
        by: ``"trajectory"`` (default) or ``"start"``, see above.
        cache_values, compile, use_gpu: accepted for compatibility, without effect.
        max_policy_lag: skip slices with a row that is too old, see `SliceSampler`; a newer version begins a new pass.

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
    [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    """

    _not_at = "its slices are cut once for the whole pass"
    _form = (2,)

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: NestedKey | list[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        truncated_key: NestedKey | None = TRUNCATED,
        strict_length: bool = False,
        shuffle: bool = True,
        pad_output: bool = False,
        init_key: NestedKey | None = IS_INIT,
        by: By = "trajectory",
        cache_values: bool = False,
        end_keys: Sequence[NestedKey] | None = None,
        compile: bool | dict[str, Any] = False,
        use_gpu: bool | torch.device = False,
        fill: bool = True,
        max_policy_lag: int | None = None,
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
            end_keys=end_keys,
            fill=fill,
            max_policy_lag=max_policy_lag,
        )
        check_flags(drop_last=drop_last, shuffle=shuffle)
        self.drop_last = drop_last
        self.shuffle = shuffle

    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """Return the next slices of the pass, fewer at its end; RuntimeError if ``drop_last`` leaves none."""
        index = indexed(ring, self)
        length = self._length(batch_size)
        index.check_not_empty()

        def begin() -> Tensor:
            slices = index.slice_partition(
                length, by=self.by, strict=self.strict_length, shuffle=self.shuffle, generator=generator
            )

            if self.freshness is not None:
                cut_out = index.slices_from(slices[0], slices[1])
                slices = torch.stack(self.freshness.fresh_slices(cut_out, key[-1]))
                if not slices.shape[1]:
                    raise self.freshness.too_old_error()

            if self.shuffle:
                slices = slices[:, torch.randperm(slices.shape[1], generator=generator)]
            return slices

        # Any write changes one of these counters, and may overwrite slices of the old pass.
        key: tuple[int, ...] = (index.head, index.written, length)
        if self.freshness is not None:
            key = (*key, self.freshness.look(index))

        if self._fills:
            starts, lengths = self._take(key, batch_size, begin, "rows")
        else:
            starts, lengths = self._take(key, batch_size // length, begin, "slices")
        draw = index.slices_from(starts, lengths, follow=follow)

        if not self._fills:
            if self.pad_output:
                return pad_slices(draw, length, ring)
            return draw

        if len(draw.slots) > batch_size:
            if self._left is not None:  # continue with the rest of a slice that was cut
                self._left[0, 0] = draw.slots[batch_size]
            return cut(draw, batch_size)
        return draw  # short only at the end of a pass

    @property
    def _fills(self) -> bool:
        """Whether samples are measured in rows instead of slices."""
        return self.fill and not self.pad_output

    @override
    def _amount(self, left: Tensor, count: int) -> int:
        # A slice has at least one row, so it suffices to count the first ``count`` slices.
        if self._fills:
            return int(left[1, :count].sum())
        return left.shape[-1]

    @override
    def _split(self, left: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if not self._fills:
            return super()._split(left, count)

        ends = left[1, :count].cumsum(0)  # cumulative number of rows
        last = int(torch.searchsorted(ends, count))  # the slice that contains row number ``count - 1``
        taken = left[:, : last + 1].clone()
        beyond = int(ends[min(last, len(ends) - 1)]) - count

        if beyond <= 0:
            return taken, left[:, last + 1 :]
        left[1, last] = beyond  # its other rows remain; their start is computed when rows are listed
        return taken, left[:, last:]
