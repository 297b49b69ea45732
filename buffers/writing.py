"""The writing side of a replay buffer."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.base import After
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Array, Ring, given
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.parts import BufferParts
from flatroll.buffers.storages.base import ListStorage, Rows
from flatroll.buffers.storages.item_kinds import TensorDicts, batched, dense, map_rows, not_flat, one_row
from flatroll.buffers.storages.parallel_lanes import positions, slots_of, time_first
from flatroll.layout.keys import MASK, marker


class BufferWriting(BufferParts):
    """Extends, overwrites and empties."""

    def extend(self, data: Any, final: TensorDictBase | None = None) -> Tensor:
        """Store the rows of ``data``; their positions in the storage, int64 ``[N]`` (``[N, ndim]`` if ndim > 1).

        A batch larger than the storage leaves its last rows. A batch that does not fit raises before anything is
        stored.

        Args:
            data: a tensordict ``[N]`` (consecutive rows, trajectories end to end, any number of them, whole or
                cut), a tensor ``[N, ...]``, a tree of such tensors (a tuple is a tree), or a list of items.
            final: the next observations that no row of a compact batch holds (``collector.final``).

        Raises:
            TypeError: data of another kind than before, or a marker of the wrong dtype.
            ValueError: the batch is not flat where trajectories are followed, holds padding, or differs from the
                first one in entries, shapes or dtypes.
            KeyError: a marker that the sampler or the storage needs is missing.
            MemoryError, OSError: at the first extend, if the storage does not fit in memory or on the disk.
        """
        if isinstance(data, list) and not isinstance(self.storage, ListStorage):
            if not data:
                return torch.zeros(0, dtype=torch.int64)
            data = batched(data)
        for transform in reversed(self._transforms):
            inverse = getattr(transform, "inv", None)
            data = data if inverse is None else inverse(data)
        if not isinstance(self.storage, ListStorage):
            data = dense(data)
        if isinstance(data, TensorDictBase):
            _check_rows(data, self.storage.ndim)
        return self._write(self._time_first(data), final)

    def add(self, data: Any) -> int:
        """Store one item: a row (tensordict of batch size ``[]``), a tensor, a tree, or with `ListStorage` anything.
        Its position in the storage, -1 if the writer did not take it."""
        if isinstance(self.storage, ListStorage):
            return int(self.extend([data])[0])
        if self.storage.ndim > 1:
            return int(self.extend(map_rows(data, lambda leaf: leaf.unsqueeze(self.dim_extend)))[0, 0])
        kind = self.storage.structure
        if (
            isinstance(data, TensorDictBase)
            and data.batch_dims
            and isinstance(kind, TensorDicts)
            and not kind.inner
        ):
            raise ValueError(f"add takes one row of batch size [], got {list(data.batch_size)}: use extend")
        return int(self.extend(one_row(data))[0])

    def _time_first(self, data: Any) -> Any:
        """``data`` with its batch dimensions in one, time before lanes."""
        storage = self.storage
        if storage.ndim == 1:
            return data
        data, lanes = time_first(data, storage.ndim, self.dim_extend)
        if self._started and lanes != storage.lanes:
            raise ValueError(
                f"every batch must have the lanes of the first, {list(storage.lanes)}, got {list(lanes)}"
            )
        if lanes.numel() > storage.max_size:
            raise ValueError(f"max_size={storage.max_size} holds no step of {list(lanes)} lanes")
        if not self._started:
            storage.lanes = lanes
        return data

    def _write(self, data: Any, final: TensorDictBase | None) -> Tensor:
        self._enter()
        filled = self.storage.contents is not None
        if not filled:
            self.writer.check(data)
        with self._write_lock:
            ring = self._ring if self._started else self._first_ring(data)
            if isinstance(data, (TensorDictBase, list)) and not len(data):
                return positions(torch.zeros(0, dtype=torch.int64), self.storage.lanes)
            rows = self.storage.prepare(data, final, self._keys, whole=self.writer.chooses)
            if not self._started:
                self.storage.attach(ring, self._alone(ring), first=True)
                with self._lock:
                    self._ring, self._started = ring, True
            return positions(self._store(ring, rows, filled), self.storage.lanes)

    def _first_ring(self, data: Any) -> Ring:
        """Counters for what is to come; known when the first batch is."""
        follows = self._follows()
        self._keys = None
        if isinstance(data, TensorDictBase):
            self._keys = self.sampler.boundary_keys(data)
            if self._keys is None and follows is not None:
                self._keys = BoundaryKeys.probe(data)
            if self._keys is not None and data.batch_dims != 1:
                raise not_flat(data)
        elif follows is not None and not self.storage.compact_obs:
            raise TypeError(
                f"{follows} follows trajectories, which needs tensordict batches, got {type(data).__name__}"
            )
        return self.writer.ring(self.storage.capacity, self._keys is not None)

    def _store(self, ring: Ring, rows: Rows, filled: bool) -> Tensor:
        """Claim, copy (unless ``filled``), publish."""
        with self._lock:
            chosen = self.writer.choose(ring, rows)
            first = ring.claim(rows.count) if chosen is None else 0
            if chosen is None:
                self.sampler.claimed(ring, first, rows.count)
        if chosen is not None:
            return self._place(ring, rows, *chosen)
        if not isinstance(ring, TrajectoryIndex) or rows.runs is None:
            if not filled:
                self.storage.write(first % ring.capacity, rows)
            with self._lock:
                ring.publish(rows.count)
                self.sampler.entered(ring, first, rows.count)
            return ring.slots(first, rows.count)
        before = ring.link(rows.runs)
        if not filled:
            self.storage.write(first % ring.capacity, rows, self._after(ring, rows, before))
        pool = self.storage.pool
        entries = released = None
        if pool is not None:
            entries, released = pool.place(ring, rows.runs, before, rows.columns, rows.tails, first)
        with self._lock:
            ring.enter(rows.runs, before, entries, released)
            self.sampler.entered(ring, first, rows.count)
        return ring.slots(first, rows.count)

    def _after(self, ring: TrajectoryIndex, rows: Rows, before: Array) -> After | None:
        """Which of the rows go on where a stored one ended, for columns that share what neighbours have in common."""
        if rows.runs is None or not self.storage.shares:
            return None
        follows = np.flatnonzero(before >= 0)
        return After(torch.from_numpy(rows.runs.firsts[follows]), ring.last_slots(before[follows]))

    def _place(self, ring: Ring, rows: Rows, at: Tensor, slots: Tensor) -> Tensor:
        """Write the rows ``at`` to ``slots`` that the writer chose and took out of the draw."""
        self.storage.put(slots, rows, at)
        with self._lock:
            ring.publish(len(slots))
        positions = torch.full((rows.count,), -1)
        positions[at] = slots
        return positions

    def __setitem__(self, index: Any, data: Any) -> None:
        """Write ``data`` (after the transforms' ``inv``) over stored rows; length and cursor stay.

        A tensordict may have some of the entries only.

        Raises:
            IndexError: no row is stored there.
            ValueError: an entry by which trajectories are told apart, or one that a compact storage reads twice,
                would change.
        """
        for transform in reversed(self._transforms):
            inverse = getattr(transform, "inv", None)
            data = data if inverse is None else inverse(data)
        self._enter()
        self.writer.check_change(data)
        with self._write_lock:
            slots = self._slots(index)
            draw = given(self._ring, slots.reshape(-1), True, self.storage.compact_obs)
            self.storage.set(draw, data, slots.shape, self._keys)

    def empty(self) -> None:
        """Forget all rows, and the samples made ahead. The storage keeps its memory and its columns."""
        self._enter()
        if self._ahead is not None:
            self._ahead.wait()
        with self._write_lock:
            with self._lock:
                ring, capacity = self._ring, self._ring.capacity
                first = (
                    -(-ring.written // capacity) * capacity
                )  # the next row takes slot 0, and is no old one
                self._ring = self.writer.ring(capacity, self.index is not None, first)
                if self._started:
                    self.storage.attach(self._ring, self._alone(self._ring))
                self.sampler.emptied()
            if self._ahead is not None:
                self._ahead.clear()

    def update_priority(
        self, index: Tensor | int, priority: Tensor | float, generation: Tensor | None = None
    ) -> None:
        """Set the priorities of rows.

        Args:
            index: positions as in the info of a sample, on any device; -1 is left out.
            priority: one value for all rows or one per row, not negative.
            generation: ``info["index_generation"]``; rows overwritten since are then left out.

        Raises:
            TypeError: the sampler has no priorities.
            ValueError: a negative priority or NaN, or sizes that differ.
            IndexError: a position outside the storage.
        """
        slots = slots_of(torch.as_tensor(index), self.storage.lanes)
        with self._lock:
            self.sampler.update_priority(self._ring, slots, torch.as_tensor(priority), generation)


def _check_rows(batch: TensorDictBase, ndim: int) -> None:
    if batch.batch_dims == 0:
        raise ValueError("batch has batch size []: use add for one row, or batch.unsqueeze(0)")
    if batch.batch_dims != ndim or batch.get(MASK, None) is None:
        return
    padding = ~marker(batch, MASK)
    if bool(padding.any()):
        raise ValueError(
            f"the batch has {int(padding.sum())} rows of padding, where batch[{MASK!r}] is False, which would be "
            'stored as transitions: extend with batch[batch["collector", "mask"]], or with '
            "flatroll.layout.join(batch) of what split_trajectories gave"
        )
