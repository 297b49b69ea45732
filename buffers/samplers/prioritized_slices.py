"""Prioritized replay of slices: a slice is drawn in proportion to the priority of its first row."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from flatroll.buffers.index.ring import Draw, Ring
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.samplers.filling import bounds
from flatroll.buffers.samplers.prioritized import PrioritizedSampler
from flatroll.buffers.samplers.slices import SliceSampler, Span, indexed, spans
from flatroll.layout.keys import IS_INIT, TRUNCATED, NestedKey


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws slices of trajectories in proportion to the priority of their first row.

    The slices are those of `SliceSampler`, marked as there; the priorities and the info are those of
    `PrioritizedSampler`. A priority is that of the slices that start at its row: rows that cannot start a slice are
    never drawn as a start and do not count in the minimum, whatever their priority. Where a slice of
    ``slice_len`` rows can start is known at each write; a draw costs time in its own rows and the logarithm of the
    capacity.

    Every row of a slice has the weight of its first row in ``info["priority_weight"]``.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer: see `PrioritizedSampler`.
        num_slices, slice_len, end_key, end_keys, traj_key, truncated_key, init_key, fill: see `SliceSampler`. With
            ``num_slices``, the length is ``batch_size // num_slices``; a draw of another length than the last takes
            time in the capacity.
        strict_length: a slice starts only where ``slice_len`` rows (less ``span``) are there. Default False: the first
            stored row of a shorter trajectory starts a slice, too, a short one.
        cache_values, compile: accepted and without effect.
        span: the end of a trajectory may cut slices short: to one row with True, by up to ``span`` rows with an
            integer. Of a pair (before, after), the first must be False: a slice starts at the row that was drawn.
        max_policy_lag: rows that are older start no slice, see `PrioritizedSampler`; later rows of a trajectory are
            never older than its first ones.

    Raises:
        TypeError, ValueError: as `SliceSampler` and `PrioritizedSampler`.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> sampler = PrioritizedSliceSampler(9, alpha=1.0, beta=1.0, eps=0.0, slice_len=2)
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=4)
    >>> step = torch.arange(9)
    >>> rows = buffer.extend(TensorDict({"step": step % 3, "episode": step // 3}, [9]))
    >>> buffer.update_priority(rows, torch.tensor([0.0, 3, 3, 0, 0, 0, 0, 0, 1]))
    >>> sample, info = buffer.sample(return_info=True)
    >>> sample["episode"].tolist(), sample["step"].tolist(), info["priority_weight"].tolist()
    ([0, 0, 0, 0], [1, 2, 1, 2], [1.0, 1.0, 1.0, 1.0])
    """

    _every_row = False
    _not_at = "it draws them by the priority of their first row"

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        traj_key: NestedKey | None = None,
        truncated_key: NestedKey | None = TRUNCATED,
        init_key: NestedKey | None = IS_INIT,
        strict_length: bool = False,
        cache_values: bool = False,
        compile: bool | dict[str, Any] = False,
        span: Span = False,
        max_priority_within_buffer: bool = False,
        end_keys: Sequence[NestedKey] | None = None,
        fill: bool | None = None,
        max_policy_lag: int | None = None,
    ) -> None:
        before, after = span if isinstance(span, Sequence) and len(span) == 2 else (False, span)
        if before:
            raise ValueError(f"span[0] must be False: a slice starts at the row that was drawn, got {span!r}")
        SliceSampler.__init__(
            self,
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            traj_key=traj_key,
            truncated_key=truncated_key,
            strict_length=strict_length,
            init_key=init_key,
            span=(False, after),  # type: ignore[arg-type]
            end_keys=end_keys,
            fill=fill,
        )
        PrioritizedSampler.__init__(
            self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, max_policy_lag
        )
        self._least: int | None = None  # rows of its trajectory that must be stored from a start on

    @override
    def _allow_starts(self, ring: Ring, first: int | None) -> None:
        # Only rows that can start a slice are drawable. A write changes few of them: the index says which.
        if self._least is None or not isinstance(ring, TrajectoryIndex):
            return
        if first is not None:
            self._priorities.weigh(ring.new_starts(first, self._least, strict=self.strict_length), allow=True)
        elif not self.strict_length:
            self._priorities.weigh(ring.shortened_trajectories(self._least, self._head), allow=True)

    @override
    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """Draw slices with ``batch_size`` rows in all, fewer if some slices are short.

        Raises:
            RuntimeError: nothing is stored, no trajectory is long enough, or all priorities are 0 and so is ``eps``.
        """
        index, length = indexed(ring, self), self._length(batch_size)
        least = length - spans(self.span, length)[1]
        if least != self._least:  # other starts than before: all are looked for again
            self._least, self._changing = least, True
        self._catch_up(ring)
        if len(ring) and not self._priorities.tree.total > 0 and not self._priorities.drawable.any():
            raise index.too_short(least)
        more = partial(self._slices, index, length, generator, follow)
        draw = more(batch_size // length)
        return draw if len(draw.slots) == batch_size else self._complete(draw, batch_size, length, ring, more)

    def _slices(
        self, index: TrajectoryIndex, length: int, generator: torch.Generator | None, follow: bool, count: int
    ) -> Draw:
        """Draw ``count`` slices by priority; every row gets the weight of its slice, and its own generation."""
        starts, weights, _ = self._choose(index, count, generator)
        draw = index.slices_from(starts, length, follow=follow)
        firsts, lasts = (ends.numpy() for ends in bounds(draw))
        row_weights = torch.empty(len(draw.slots), dtype=torch.float32)
        generation = torch.empty_like(draw.slots)
        rows = draw.slots.numpy(), row_weights.numpy(), generation.numpy()
        self._priorities.kernels.spread(index.head, index.capacity, weights.numpy(), firsts, lasts, *rows)
        draw.info = {"priority_weight": row_weights, "index_generation": generation}
        return draw
