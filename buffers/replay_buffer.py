"""The replay buffer: stores batches and draws samples."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, TypeAlias, overload

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.checkpoint import BufferState
from flatroll.buffers.checkpointers.base import StorageCheckpointerBase
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Draw, Ring
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.remote.owner import Served
from flatroll.buffers.samplers.sampler import RandomSampler, Sampler
from flatroll.buffers.step_writer import StepWriting
from flatroll.buffers.storages.item_kinds import TensorDicts, batched, dense, entry, map_rows, not_flat
from flatroll.buffers.storages.list import ListStorage
from flatroll.buffers.storages.positions import Index, positions, slots_at, slots_of
from flatroll.buffers.storages.storage import Rows, Storage
from flatroll.buffers.transforms.transform import (
    Transforming,
    TransformLike,
    apply,
    check_row_count,
    check_transform,
    chooser_of,
    looks_ahead,
    read_others,
    reads_others,
)
from flatroll.buffers.writers import RoundRobinWriter, Writer, before_storing, check_rows
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import MASK, NestedKey

Informed: TypeAlias = tuple[Any, dict[str, Tensor]]  # a sample and its info
Made: TypeAlias = tuple[Any, dict[str, Tensor], bool]  # and whether a pass over the rows ended with it


class ReplayBuffer(Transforming, StepWriting, BufferState, Served):
    """Stores rows in a ring and samples from it.

    Rows are those of flat tensordict batches; tensors and trees of tensors (tuples, dicts, nested) will do, and with
    `ListStorage` any items at all. When the storage is full, each new row overwrites the oldest one. A sample
    owns its memory, has the same entries every time, and carries the sampler's marks before transforms see it.

    ``extend`` and ``sample`` may run on several threads: a row is sampled only when all its columns are in, and a
    sample during which one of its rows was overwritten is drawn again.

    Args:
        storage: where the rows are kept, default ``ListStorage(1000)``.
        sampler: which rows a sample takes, default :class:`RandomSampler`.
        writer: where new rows go, default :class:`RoundRobinWriter`.
        collate_fn: makes a batch of what the storage gives: a list of items from `ListStorage`, else a batch.
        prefetch: samples made ahead by as many threads, default none; needs ``batch_size``. Rows are drawn in order
            in the caller's thread, so samples do not depend on the threads, but up to ``prefetch`` of them were
            drawn before the latest ``extend`` or ``update_priority``.
        transform: applied to samples, see :meth:`append_transform`.
        batch_size: rows per sample; ``sample(batch_size)`` overrides it.
        dim_extend: for a storage with ``ndim`` of 2 or more, the time dimension of batches, default the last.
        generator: CPU random generator of all draws; None is torch's global one (``torch.manual_seed``).
        checkpointer: in what form :meth:`dumps` writes the rows; default that of the storage.
        shared, compilable: whether other processes will write (`LazyMemmapStorage` only); see `Storage`.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    >>> buffer.extend(TensorDict({"observation": torch.arange(6.0)}, [6]))
    tensor([0, 1, 2, 3])
    >>> len(buffer), buffer[:]["observation"], buffer.sample().batch_size
    (4, tensor([2., 3., 4., 5.]), torch.Size([2]))
    """

    def __init__(
        self,
        storage: Storage | None = None,
        *,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int | None = None,
        transform: TransformLike | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        checkpointer: StorageCheckpointerBase | None = None,
        shared: bool = False,
        compilable: bool | None = None,
    ) -> None:
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(
                f"generator must be a CPU generator (rows are drawn on the host), got {generator.device}"
            )
        if not isinstance(storage, Storage | None):
            raise TypeError(
                f"storage must be a storage such as LazyTensorStorage(max_size), got {type(storage).__name__}"
            )
        self.storage: Storage = ListStorage() if storage is None else storage
        if shared and not self.storage.by_reference:
            raise ValueError(
                "shared=True needs rows that other processes see: give LazyMemmapStorage(max_size)"
            )
        if checkpointer is not None:
            self.storage.checkpointer = checkpointer
        self.sampler: Sampler = RandomSampler() if sampler is None else sampler
        self.sampler.attach(self.storage)
        self.writer: Writer = RoundRobinWriter() if writer is None else writer
        self.collate_fn = collate_fn
        self.prefetch = prefetch
        self.batch_size = batch_size
        self.dim_extend = self.storage.ndim - 1 if dim_extend is None else dim_extend
        self.generator = generator
        if not 0 <= self.dim_extend < self.storage.ndim:
            raise ValueError(
                f"dim_extend must be one of the {self.storage.ndim} dimensions of the storage (its ndim), "
                f"got {dim_extend}"
            )
        if batch_size is not None:
            whole_number("batch_size", batch_size)
        if batch_size is not None or prefetch:
            self.sampler.check(batch_size)
        self._keys, self._started = None, False
        self._ring = Ring(self.storage.max_size)
        self._transforms: list[TransformLike] = []
        if transform is not None:
            self.append_transform(transform)
        self._make_locks()
        self.writer.fits(self.storage, self.sampler)
        self.storage.fill(self._write)

    @override
    def insert_transform(self, index: int, transform: TransformLike, *, invert: bool = False) -> Self:
        check_transform(transform)
        if not invert and reads_others(transform) and self._started and self.index is None:
            raise RuntimeError(
                f"{type(transform).__name__} follows trajectories, which the rows stored so far cannot: append it "
                "before the first extend, or give it to ReplayBuffer(transform=...)"
            )
        return super().insert_transform(index, transform, invert=invert)

    # -- writing -----------------------------------------------------------------------------------------------

    def extend(
        self, data: Any, final: TensorDictBase | None = None, *, update_priority: bool | None = None
    ) -> Tensor:
        """Store the rows of ``data``; return their positions, int64 ``[N]`` (``[N, ndim]`` if ndim > 1).

        A batch of more rows than the storage leaves its last ones. Nothing is stored of a batch that raises an error.

        Args:
            data: a tensordict ``[N]`` (consecutive rows, trajectories end to end, any number of them, whole or
                cut), a tensor ``[N, ...]``, a tree of such tensors (a tuple is a tree), or a list of items.
            final: the next observations that no row of a compact batch holds (``collector.final``).
            update_priority: False ignores priorities in the batch (see `TensorDictReplayBuffer`).

        Raises:
            TypeError: data of another kind than before, or a marker of the wrong dtype.
            ValueError: the batch is not flat where trajectories are followed, holds padding, or differs from the
                first one in entries, shapes or dtypes; or rows do not continue the trajectory that their id names,
                as those of two collectors with one number (``Collector(writer=)``) do not.
            KeyError: a marker that the sampler or the storage needs is missing.
            MemoryError, OSError: at the first extend, if the storage does not fit in memory or on the disk.
        """
        listed = isinstance(self.storage, ListStorage)
        if isinstance(data, list) and not listed:
            if not data:
                return torch.zeros(0, dtype=torch.int64)
            data = batched(data)
        if self._transforms:
            data = before_storing(data, self._transforms, self.storage.loose, final)
        if isinstance(data, LazyStackedTensorDict) and not listed:
            data = dense(data)
        if isinstance(data, TensorDictBase) and (not data.batch_dims or data.get(MASK, None) is not None):
            check_rows(data, self.storage.ndim)
        if self.storage.ndim > 1:
            data = self.storage.lay_flat(data, self.dim_extend, self._started)
        return self._write(data, final, update_priority is not False)

    def add(self, data: Any) -> int:
        """Store one item: a row (tensordict of batch size ``[]``), a tensor, a tree, or with `ListStorage`
        anything. Return its position in the storage, -1 if the writer rejected it."""
        if self.storage.ndim > 1:
            return int(self.extend(map_rows(data, lambda leaf: leaf.unsqueeze(self.dim_extend)))[0, 0])
        kind = self.storage.structure
        flat = isinstance(kind, TensorDicts) and not kind.inner
        if isinstance(data, TensorDictBase) and data.batch_dims and flat:
            raise ValueError(f"add takes one row of batch size [], got {list(data.batch_size)}: use extend")
        return int(self.extend(self.storage.batch_of_one(data))[0])

    def _write(self, data: Any, final: TensorDictBase | None, prioritize: bool = True) -> Tensor:
        """Store a batch whose batch dimensions are one; positions of its rows."""
        if self._process != os.getpid():
            self._after_fork()
        filled = self.storage.filling
        if self.writer.checks and not filled:
            self.writer.check(data)
        with self._write_lock:
            # The first batch says whether trajectories are followed, so the ring is made with it.
            ring = self._ring if self._started else self._first_ring(data)
            if isinstance(data, (TensorDictBase, list)) and not len(data):
                slots = torch.zeros(0, dtype=torch.int64)
            else:
                rows = self.storage.prepare(data, final, self._keys, whole=self.writer.chooses)
                if not self._started:
                    # Only after the batch was found to fit: an error leaves the buffer as it was.
                    self._own_parts()
                    self.storage.use_ring(ring, self._unshareable_part(ring), first=True)
                    with self._lock:
                        self._ring, self._started = ring, True
                slots = self._store(ring, rows, filled, prioritize)
        return positions(slots, self.storage.lanes) if self.storage.lanes else slots

    def _first_ring(self, data: Any) -> Ring:
        """Counters for what is to come; known when the first batch is."""
        needs_index = self._needs_index()
        self._keys = None
        if isinstance(data, TensorDictBase):
            self._keys = self.sampler.boundary_keys(data)
            if self._keys is None and needs_index is not None:
                # Where compact_obs alone needs the index, trajectories are not followed: any order of rows will do.
                followed = self.sampler.needs_index or any(map(looks_ahead, self._transforms))
                self._keys = replace(BoundaryKeys.probe(data), in_order=followed)
            if self._keys is not None and data.batch_dims != 1:
                raise not_flat(data)
        elif (needs_index is not None and not self.storage.compact_obs) or self.sampler.freshness:
            raise TypeError(
                f"{needs_index or 'max_policy_lag'} follows {'trajectories' if needs_index else 'policy versions'}, "
                f"which needs tensordict batches, got {type(data).__name__}"
            )
        return self.writer.ring(self.storage.capacity, self._keys is not None)

    def _store(self, ring: Ring, rows: Rows, filled: bool, prioritize: bool) -> Tensor:
        """Claim slots, copy the rows (unless the storage is ``filled`` with them), publish them; int64 ``[N]``.

        The copy is made without the lock of readers: nobody draws the claimed slots, and a sample that was drawn
        before is drawn again if it had one of them.
        """
        storage, sampler, count, fragments = self.storage, self.sampler, rows.count, rows.fragments
        links = storage.link(ring, rows, self._keys)  # may refuse the rows, so before any others are given up
        with self._lock:  # from here on nobody draws the rows that will be overwritten
            chosen = self.writer.choose(ring, rows) if self.writer.stateful else None
            first = ring.claim(count) if chosen is None else 0
            if chosen is None and sampler.follows_writes:
                sampler.claimed(ring, first, count)
        if chosen is not None:  # the writer has taken the rows out of the draw whose slots it gives away
            at, slots = chosen
            storage.put(slots, rows, at)
            with self._lock:
                ring.publish(len(slots))
            return torch.full((count,), -1).index_copy_(0, at, slots)
        slot = first % ring.capacity  # row r takes slot r modulo the capacity
        if isinstance(ring, TrajectoryIndex) and fragments is not None and links is not None:
            if not filled:
                storage.write(slot, rows, links.after(fragments.firsts) if storage.shares else None)
            entries = released = None
            if storage.compact_obs:
                entries, released = storage.keep_next(ring, rows, links, first)
            with self._lock:
                ring.enter(fragments, links.before, entries, released)
                if sampler.follows_writes:
                    sampler.entered(ring, first, count)
        else:
            if not filled:
                storage.write(slot, rows)
            with self._lock:
                ring.publish(count)
                if sampler.follows_writes:
                    sampler.entered(ring, first, count)
        # Slots go on at 0 after the last one; most writes do not reach it and save the division.
        slots = torch.arange(slot, slot + count)
        return slots if slot + count <= ring.capacity else slots.remainder_(ring.capacity)

    def __setitem__(self, index: Any, data: Any) -> None:
        """Write ``data`` (after the transforms' ``inv``) over stored rows; length and cursor stay.

        A tensordict may have some of the entries only.

        Raises:
            IndexError: no row is stored there.
            ValueError: an entry by which trajectories are told apart, or one that a compact storage reads twice,
                would change.
        """
        self._put_at(index, before_storing(data, self._transforms, self.storage.loose))

    def _put_at(self, index: Any, data: Any) -> None:
        self._after_fork()
        self.writer.check_change(data)
        with self._write_lock:
            slots = slots_at(index, self._ring, self.storage.lanes)
            draw = self._ring.draw_slots(slots.reshape(-1), strict=True, follow=self.storage.compact_obs)
            self._note_edit(draw.slots)
            self.storage.write_drawn(draw, data, slots.shape, self._keys)

    def empty(self) -> None:
        """Remove all rows and prefetched samples. The storage keeps its memory and its columns."""
        self._after_fork()
        if self._prefetcher is not None:
            self._prefetcher.wait()
        with self._write_lock:
            with self._lock:
                self._count_by(self._empty_ring())
                self.sampler.emptied()
            if self._prefetcher is not None:
                self._prefetcher.clear()

    def update_priority(
        self, index: Index, priority: Tensor | float, generation: Tensor | None = None
    ) -> None:
        """Set the priorities of stored rows, given their positions.

        Args:
            index: positions as in the info of a sample, or their coordinates as a tuple, on any device; -1 is left out.
            priority: one value for all rows or one per row, not negative.
            generation: ``info["index_generation"]``; rows overwritten since are then left out.

        Raises:
            TypeError: the sampler has no priorities.
            ValueError: a negative priority or NaN, or sizes that differ.
            IndexError: a position outside the storage.
        """
        slots = slots_of(index, self.storage.lanes)
        with self._lock:
            self.sampler.update_priority(self._ring, slots, torch.as_tensor(priority), generation)

    def mark_update(self, index: Index) -> None:
        """Reset the priorities of rows to that of new rows; nothing happens with a sampler without priorities."""
        with self._lock:
            self.sampler.mark_update(self._ring, slots_of(index, self.storage.lanes))

    # -- reading -----------------------------------------------------------------------------------------------

    @overload
    def sample(self, batch_size: int | None = None, return_info: Literal[False] = False) -> Any: ...

    @overload
    def sample(self, batch_size: int | None = None, *, return_info: Literal[True]) -> Informed: ...

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a sample, a batch ``[n]`` of the stored kind; with ``return_info`` also return an info dict.

        Args:
            batch_size: rows, default that of the buffer. Short trajectories may give fewer (see the sampler).
            return_info: return ``(sample, info)``: ``info["index"]`` holds the rows' positions (int64 ``[n]``, or
                ``[n, ndim]``), further entries are the sampler's.

        Raises:
            RuntimeError: the buffer is empty, or holds no trajectory long enough.
            ValueError: no batch size, or one that does not fit the sampler.
        """
        sample, info, _ = self._next_sample(batch_size)
        return (sample, info) if return_info else sample

    def __iter__(self) -> Iterator[Any]:
        """Samples without end, or, with a sampler without replacement, until each row was in one."""
        ended = False
        while not ended:
            sample, _, ended = self._next_sample(None)
            yield sample

    def _next_sample(self, batch_size: int | None) -> Made:
        """The oldest sample made ahead, or one made now."""
        if self._process != os.getpid():
            self._after_fork()
        size = self.batch_size if batch_size is None else batch_size
        if size is not None and (type(size) is not int or size < 1):
            whole_number("batch_size", size)
        size = self.sampler.check(size)
        # Samples made ahead are of the buffer's own size; one of another size is made apart.
        if not (self._prefetcher and (batch_size is None or size == self.sampler.check(self.batch_size))):
            return self._draw_sample(size)()
        made: Made = self._prefetcher.next(partial(self._draw_sample, size))
        return made

    def _draw_sample(self, size: int) -> Callable[[], Made]:
        """Draw rows in this thread; what is left to do, on any thread."""
        with self._lock:
            ring = self._ring
            draw = self._draw(ring, size)
            ended = self.sampler.ran_out
        return partial(self._finish_sample, ring, draw, size, ended)

    def _draw(
        self, ring: Ring, size: int = 0, slots: Tensor | None = None, strict: bool = True, ahead: bool = True
    ) -> Draw:
        """Let the sampler draw ``size`` rows, or draw these ``slots``; if ``ahead`` with what transforms read."""
        if slots is None:
            draw = self.sampler.draw(ring, size, self.generator, self.storage.compact_obs)
        else:
            draw = ring.draw_slots(slots, strict, self.storage.compact_obs)
        if ahead and self._transforms and isinstance(ring, TrajectoryIndex):
            steps = max(map(looks_ahead, self._transforms))
            if steps:
                draw.ahead = ring.ahead(draw.slots, steps)
            chooser = chooser_of(self._transforms)
            if chooser is not None:
                draw.chosen = ring.choose(draw, partial(chooser.choose, generator=self.generator))
        return draw

    def _finish_sample(self, ring: Ring, draw: Draw, size: int, ended: bool) -> Made:
        """Read what was drawn, mark it, and put it through the transforms."""
        storage = self.storage
        draw, values = self._read(ring, draw, partial(self._draw, size=size))
        info = {"index": positions(draw.slots, storage.lanes) if storage.lanes else draw.slots, **draw.info}
        structure, shape = storage.structure, draw.slots.shape
        if isinstance(structure, TensorDicts):
            self.sampler.mark(values, draw)
        values = self._inform(values, info)
        listed = isinstance(storage, ListStorage)
        data = values if listed else structure.build(values, shape)
        if self.collate_fn is not None:
            data = self.collate_fn(data)
        elif listed:
            data = storage.build(values, shape)
        for transform in self._transforms:
            data = apply(transform, data, draw.ends)
        return data, info, ended

    def _inform(self, values: Any, info: dict[str, Tensor]) -> Any:
        """What the storage gave (columns by key, or a list of items), with entries of the info."""
        return values

    def __getitem__(self, index: Any) -> Any:
        """Stored rows by position in the storage (not by age), transformed but not marked.

        An entry's name gives that entry of all rows. Positions that a write under way, or one that failed, has
        given up are left out of slices; asked for one by one they raise IndexError.
        """
        if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
            names = (index,) if isinstance(index, str) else index
            return entry(self[:], names[1:] if names[0] == "_data" and len(names) > 1 else names)
        return self._rows_at(index, self._transforms)

    def _rows_at(self, index: Any, transforms: list[TransformLike]) -> Any:
        """The rows at these positions, changed by ``transforms``."""
        self._after_fork()
        slots = slots_at(index, self._ring, self.storage.lanes)
        strict, ahead = not isinstance(index, slice), bool(transforms)
        draw_again = partial(self._draw, slots=slots.reshape(-1), strict=strict, ahead=ahead)
        with self._lock:
            ring = self._ring
            draw = draw_again(ring)
        draw, values = self._read(ring, draw, draw_again)
        rows, listed = draw.slots, isinstance(self.storage, ListStorage)
        if listed and slots.ndim == 0:
            return values[0]
        ends = torch.ones(len(rows), dtype=torch.bool)
        numbers = ring.numbers(rows, draw.version[0])
        ends[:-1] = numbers[1:] != numbers[:-1] + 1  # where the next row was not written right after
        data = values if listed else self.storage.build(values, rows.shape)
        for transform in transforms:
            data = apply(transform, data, lambda: ends)
        if listed:
            return data
        if slots.ndim != 1:
            check_row_count(self._transforms, data, len(rows))
        if slots.ndim == 0:
            return map_rows(data, lambda leaf: leaf[0])
        # Rows were left out of slices only, whose first dimension is time.
        shape = slots.shape if len(rows) == slots.numel() else torch.Size([-1, *self.storage.lanes])
        return data if len(shape) == 1 else map_rows(data, lambda leaf: leaf.unflatten(0, shape))

    def _read(self, ring: Ring, draw: Draw, draw_again: Callable[[Ring], Draw]) -> tuple[Draw, Any]:
        """Gather what was drawn, without a lock; draw again if a writer overwrote one of the rows meanwhile."""
        for _ in range(8):
            # Other threads may write meanwhile; what they overwrote shows in the counters afterwards.
            values = self._gather(ring, draw)
            with self._lock:
                if ring is self._ring and ring.unchanged_since(draw):
                    return draw, values
                ring = self._ring
                draw = draw_again(ring)
        with self._write_lock:  # the ring is small and the writers fast: they wait for once
            with self._lock:
                draw = draw_again(self._ring)
            return draw, self._gather(self._ring, draw)

    def _gather(self, ring: Ring, draw: Draw) -> Any:
        """The drawn rows as the storage gives them, changed by the transforms that read other rows."""
        values = self.storage.read_rows(draw.slots, draw.follow, slices=draw.firsts is not None)
        if draw.ahead is None and draw.chosen is None:
            return values

        def get(slots: Tensor, keys: Iterable[NestedKey] | None = None) -> Any:
            asked = None if keys is None else frozenset(keys)
            follow = None
            if self.storage.needs_follow(asked):
                with self._lock:
                    follow = ring.follow(slots)
            return self.storage.read_rows(slots, follow, keys=asked)

        return read_others(self._transforms, values, draw.ahead, draw.chosen, get)
