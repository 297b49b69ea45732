"""The replay buffer: stores batches and draws samples."""

import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypeVar, overload

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from flatroll.buffers.checkpointers.own_files import OwnFiles
from flatroll.buffers.checkpointers.rows import (
    StorageCheckpointerBase,
    checkpointer_with_hooks,
    find_checkpointer,
)
from flatroll.buffers.checkpointers.saving import SavedFolders, SavesToFolders
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Draw, Ring
from flatroll.buffers.index.saved_tables import check_saved_generator, damaged, reading_tables
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.prefetcher import Prefetcher
from flatroll.buffers.redrawing import Lost, put_part
from flatroll.buffers.remote import BufferHandle, Service
from flatroll.buffers.samplers.sampler import RandomSampler, Sampler
from flatroll.buffers.sharing import pickle_by_value, reseed_in_worker
from flatroll.buffers.steps.writer import StepWriter
from flatroll.buffers.storages.item_kinds import TensorDicts, batched, dense, entry, map_rows, not_flat_error
from flatroll.buffers.storages.list import ListStorage
from flatroll.buffers.storages.positions import Index, find_slots, in_shape, positions, slots_at
from flatroll.buffers.storages.records import Rows
from flatroll.buffers.storages.storage import Storage, other_capacity_error
from flatroll.buffers.transforms.transform import (
    TransformLike,
    apply,
    check_row_count,
    check_transform,
    insert_transform,
    lookahead,
    needs_trajectory,
    read_others,
    row_chooser,
)
from flatroll.buffers.writers import RoundRobinWriter, Writer, before_storing, check_rows
from flatroll.disk import LoadedVersion, Version
from flatroll.disk.checkpoint import Apply, Others, SaveOptions, read_tree
from flatroll.disk.state_tree import Packer, from_plain, to_plain
from flatroll.layout.checks import (
    SCALED,
    as_numbers,
    check_cpu_generator,
    check_flags,
    check_function,
    check_tensors,
    check_type,
    check_whole_number,
    warn_of_scales,
)
from flatroll.layout.inspect.text import Facts
from flatroll.layout.keys import MASK, NestedKey
from flatroll.layout.profiling import call_in_range, is_profiling
from flatroll.layout.tensordict_seam import get_entry
from flatroll.specs import Composite, as_space, make_composite_from_td

T = TypeVar("T")
Informed: TypeAlias = tuple[Any, dict[str, Tensor]]  # a sample and its info
Drawn: TypeAlias = tuple[Draw, Any]  # the rows of a sample, and their columns or items
Made: TypeAlias = tuple[Any, dict[str, Tensor], bool]  # as above, and whether a pass over the rows has ended

#: Attributes that are recreated in another process and in a copy.
_PER_PROCESS = (
    "lock",
    "write_lock",
    "_prefetcher",
    "_process",
    "_ready_in",
    "_home",
    "_failure",
    "step_writers",
)
#: Attributes changed by a write, in this order.
_WRITTEN = ("storage", "sampler", "writer", "ring", "markers", "started")
#: How often a sample is read, in whole or in part, before writers have to wait for it.
_TRIES = 8
#: Entries of a saved state.
_ENTRIES = {"storage", "ring", "keys", "sampler", "writer", "generator"}

#: The buffer that last began to use a sampler or writer.
_USERS: weakref.WeakKeyDictionary[Any, "weakref.ref[ReplayBuffer]"] = weakref.WeakKeyDictionary()


class ReplayBuffer(SavesToFolders, Facts):
    """Stores rows in a ring and samples from it.

    Rows come from flat tensordict batches, from tensors or trees of tensors (nested tuples and dicts), or with
    `ListStorage` from any items. Once the storage is full, each new row overwrites the oldest one. A sample owns its
    memory and always has the same entries; the sampler marks it before transforms are applied.

    ``extend`` and ``sample`` are thread-safe: a row is sampled only once all its columns are written, and rows (with a
    `SliceSampler`: slices) that were overwritten while they were read are drawn again.

    Args:
        storage: stores the rows, default ``ListStorage(1000)``.
        sampler: chooses the rows of a sample, default :class:`RandomSampler`.
        writer: chooses the slots of new rows, default :class:`RoundRobinWriter`.
        collate_fn: makes a sample from the storage's output: a list of items of a `ListStorage`, else a batch.
        prefetch: number of samples prepared ahead, by as many threads, default none; needs ``batch_size``. Rows are
            drawn in order in the caller's thread, and a write first reads the rows of pending samples, so samples do
            not depend on thread timing (unless a transform draws its own random numbers). Up to ``prefetch`` samples
            were drawn before the latest ``extend`` or ``update_priority``.
        transform: applied to samples, see :meth:`append_transform`.
        batch_size: rows per sample; ``sample(batch_size)`` overrides it.
        dim_extend: for a storage with ``ndim`` of 2 or more, the time dimension of batches, default the last.
        generator: CPU random generator of all draws; None is torch's global one (``torch.manual_seed``).
        checkpointer: how :meth:`dumps` writes the rows; default the storage's.
        shared, compilable: whether other processes will write (`LazyMemmapStorage` only); see `Storage`.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    >>> buffer.extend(TensorDict({"observation": torch.arange(3.0)}, [3]))
    tensor([0, 1, 2])
    >>> len(buffer), buffer[:]["observation"], buffer.sample().batch_size
    (3, tensor([0., 1., 2.]), torch.Size([2]))
    """

    #: The spec from `note_spec`.
    noted_spec: Composite | None = None

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
        checkpointer: StorageCheckpointerBase | OwnFiles | None = None,
        shared: bool = False,
        compilable: bool | None = None,
    ) -> None:
        _check_parts(storage, sampler, writer)
        if collate_fn is not None:
            check_function("collate_fn", collate_fn, "a function of a sample")
        if prefetch is not None:
            check_whole_number("prefetch", prefetch, 0)
        check_flags(shared=shared)
        if compilable is not None:
            check_flags(compilable=compilable)

        self.storage: Storage = ListStorage() if storage is None else storage
        if shared and not self.storage.by_reference:
            raise ValueError("shared=True needs rows that other processes see: use LazyMemmapStorage")
        if checkpointer is not None:
            self.storage.checkpointer = checkpointer

        self.sampler: Sampler = RandomSampler() if sampler is None else sampler
        self.sampler.attach(self.storage)
        self.writer: Writer = RoundRobinWriter() if writer is None else writer

        self.collate_fn = collate_fn
        self.prefetch = prefetch
        self.batch_size = batch_size
        last = self.storage.ndim - 1
        if dim_extend is None:
            dim_extend = last
        self.dim_extend = check_whole_number("dim_extend", dim_extend, 0, last)
        self.generator = check_cpu_generator(generator)
        if batch_size is not None:
            check_whole_number("batch_size", batch_size)
        if batch_size is not None or prefetch:
            self.sampler.check(batch_size)

        self.markers: BoundaryKeys | None = None
        self.ring = Ring(self.storage.max_size)
        self.started = False
        self.saves = SavedFolders()
        self.service = Service()

        self.transforms: list[TransformLike] = []
        if transform is not None:
            self.append_transform(transform)

        self._home = os.getpid()  # the process of the last write
        self._make_locks()
        self.writer.fits(self.storage, self.sampler)
        self.storage.fill(self._write)

    def append_transform(self, transform: TransformLike, *, invert: bool = False) -> Self:
        """Append a transform: an object with ``forward(td)`` and perhaps ``inv(td)``, or a function. Samples pass
        through ``forward`` in order, batches to store through ``inv`` in reverse order.

        Args:
            transform: see `Transform`.
            invert: apply ``forward`` to what is stored and ``inv`` to samples, so that deterministic work is done
                once.

        Raises:
            TypeError: ``transform`` is not a transform.
            RuntimeError: a transform that reads ahead (n-step), but the rows stored so far are not indexed.
            ValueError: ``invert`` with a transform that reads trajectories.
        """
        return self.insert_transform(len(self.transforms), transform, invert=invert)

    def insert_transform(self, index: int, transform: TransformLike, *, invert: bool = False) -> Self:
        """Insert a transform before the one at ``index``; see :meth:`append_transform`.

        Raises:
            ValueError: there are fewer than ``index`` transforms, or a second `HindsightTransform`.
        """
        check_transform(transform)
        check_flags(invert=invert)
        if not invert and needs_trajectory(transform) and self.started and self.index is None:
            raise RuntimeError(
                f"{type(transform).__name__} follows trajectories, which were not tracked for the rows stored "
                "so far: append it before the first extend, or pass it to ReplayBuffer(transform=...)"
            )

        insert_transform(self.transforms, index, transform, invert)
        return self

    # -- writing -----------------------------------------------------------------------------------------------

    def extend(
        self, data: Any, final: TensorDictBase | None = None, *, update_priority: bool | None = None
    ) -> Tensor:
        """Store the rows of ``data``; return their positions, int64 ``[N]`` (``[N, ndim]`` if ndim > 1).

        If a batch has more rows than the storage holds, only the last ones are stored, with one warning. If it
        raises, nothing is stored.

        Args:
            data: a tensordict ``[N]`` (whole or cut trajectories, concatenated), a tensor ``[N, ...]``, a tree of
                such tensors (a tuple is a tree), or a list of items.
            final: the next observations that no row of a compact batch holds (``collector.final``).
            update_priority: False ignores priorities in the batch (see `TensorDictReplayBuffer`).

        Raises:
            TypeError: the kind of data has changed, or a marker has the wrong dtype.
            ValueError: the batch is not flat although trajectories are tracked, has padding, or differs from the
                first one in entries, shapes or dtypes; or rows do not continue the trajectory of their id, for
                example if two collectors have the same number (``Collector(writer=)``).
            KeyError: a marker that the sampler or the storage needs is missing.
            MemoryError, OSError: at the first extend, if the storage does not fit in memory or on the disk.
        """
        if self.transforms or type(data) is not TensorDict:
            if isinstance(data, list) and not data and not self.storage.keeps_items:
                return torch.zeros(0, dtype=torch.int64)
            data = self._as_batch(data, final)

        if isinstance(data, TensorDictBase) and (not data.batch_dims or get_entry(data, MASK) is not None):
            check_rows(data, self.storage.ndim)
        if self.storage.ndim > 1:
            data = self.storage.lay_flat(data, self.dim_extend, self.started)

        prioritize = update_priority is not False
        if is_profiling():
            return call_in_range("extend", self._write, data, final, prioritize)
        return self._write(data, final, prioritize)

    def _as_batch(self, data: Any, final: TensorDictBase | None) -> Any:
        """Return ``data``, which may be anything, as one batch to store, after the transforms' ``inv``."""
        keeps_items = self.storage.keeps_items
        if isinstance(data, list) and not keeps_items:
            data = batched(data)

        if self.transforms:
            data = before_storing(data, self.transforms, self.storage.not_compared, final)

        if isinstance(data, LazyStackedTensorDict) and not keeps_items:
            data = dense(data)
        return data

    def add(self, data: Any) -> int:
        """Store one item (a row ``[]``, a tensor, a tree, ...); return its position, -1 if the writer rejected it."""
        if self.storage.ndim > 1:
            return int(self.extend(map_rows(data, lambda leaf: leaf.unsqueeze(self.dim_extend)))[0, 0])

        kind = self.storage.structure
        flat = isinstance(kind, TensorDicts) and not kind.inner
        if isinstance(data, TensorDictBase) and data.batch_dims and flat:
            raise ValueError(f"add takes one row of batch size [], got {list(data.batch_size)}: use extend")

        return int(self.extend(self.storage.batch_of_one(data))[0])

    def _write(self, data: Any, final: TensorDictBase | None, prioritize: bool = True) -> Tensor:
        """Store a batch of one batch dimension; return the positions of its rows."""
        self._enter_to_write()
        filled = self.storage.filling
        if self.writer.checks and not filled:
            self.writer.check(data)
        if self._prefetcher is not None:  # otherwise the samples would depend on thread timing
            self._prefetcher.read_all()

        with self.write_lock:
            # The first batch decides whether trajectories are tracked; create the ring accordingly.
            ring = self.ring if self.started else self._first_ring(data)
            if isinstance(data, (TensorDictBase, list)) and not len(data):
                slots = torch.zeros(0, dtype=torch.int64)
            else:
                rows = self.storage.prepare(data, final, self.markers, whole=self.writer.chooses)
                if not self.started:
                    # Only after the checks: an error leaves the buffer unchanged.
                    self._own_parts()
                    self.storage.use_ring(ring, self._unshareable_part(ring), first=True)
                    self.storage.belong_to(self)
                    with self.lock:
                        self.ring = ring
                        self.started = True

                slots = self._store(ring, rows, filled, prioritize)

        if self.storage.lanes:
            return positions(slots, self.storage.lanes)
        return slots

    def _first_ring(self, data: Any) -> Ring:
        """Create the ring; the first batch decides whether trajectories are tracked."""
        needs_index = self._needs_index()
        if needs_index is not None and getattr(data, SCALED, False):
            warn_of_scales(stacklevel=4)

        self.markers = None
        if isinstance(data, TensorDictBase):
            self.markers = self.sampler.boundary_keys(data)
            if self.markers is None and needs_index is not None:
                # If only compact_obs needs the index, trajectories are not tracked, and rows may come in any order.
                in_order = self.sampler.needs_index or any(map(needs_trajectory, self.transforms))
                self.markers = replace(BoundaryKeys.probe(data), in_order=in_order)
            if self.markers is not None and data.batch_dims != 1:
                raise not_flat_error(data)
        elif (needs_index is not None and not self.storage.compact_obs) or self.sampler.freshness:
            part = needs_index or "max_policy_lag"
            followed = "trajectories" if needs_index else "policy versions"
            raise TypeError(
                f"{part} follows {followed}, which needs tensordict batches, got {type(data).__name__}"
            )

        return self.writer.ring(self.storage.capacity, self.markers is not None)

    def _store(self, ring: Ring, rows: Rows, filled: bool, prioritize: bool) -> Tensor:
        """Claim slots, copy the rows (unless the storage is ``filled`` with them), publish them; int64 ``[N]``.

        The copy runs without the readers' lock: claimed slots are not drawn, and earlier draws of one of them are
        drawn again.
        """
        storage = self.storage
        sampler = self.sampler
        count = rows.count
        fragments = rows.fragments
        # May raise, so do it before other rows are dropped.
        links = storage.link(ring, rows, self.markers)

        chosen = None
        first = 0
        with self.lock:  # from here on, rows about to be overwritten are not drawn
            if self.writer.stateful:
                chosen = self.writer.choose(ring, rows)
            if chosen is None:
                first = ring.claim(count)
                if sampler.follows_writes:
                    sampler.claimed(ring, first, count)

        if chosen is not None:  # the writer has excluded these slots from draws
            at, slots = chosen
            storage.put(slots, rows, at)
            with self.lock:
                ring.publish(len(slots))
            return torch.full((count,), -1).index_copy_(0, at, slots)

        slot = first % ring.capacity  # row r goes to slot r modulo the capacity
        if isinstance(ring, TrajectoryIndex) and fragments is not None and links is not None:
            if not filled:
                after = None
                if storage.shares:
                    after = links.after(fragments.firsts)
                storage.write(slot, rows, after)

            entries = None
            released = None
            if storage.compact_obs:
                entries, released = storage.keep_next(ring, rows, links, first)

            with self.lock:
                ring.enter(fragments, links.before, entries, released)
                if sampler.follows_writes:
                    sampler.entered(ring, first, count)
        else:
            if not filled:
                storage.write(slot, rows)
            with self.lock:
                ring.publish(count)
                if sampler.follows_writes:
                    sampler.entered(ring, first, count)

        # Slots wrap around to 0. Most writes do not reach the end and skip the modulo.
        slots = torch.arange(slot, slot + count)
        if slot + count <= ring.capacity:
            return slots
        return slots.remainder_(ring.capacity)

    def __setitem__(self, index: Any, data: Any) -> None:
        """Overwrite stored rows with ``data`` (after the transforms' ``inv``); length and cursor do not change.

        A tensordict may have a subset of the entries.

        Raises:
            IndexError: no row is stored there.
            ValueError: a trajectory marker, or an entry that a compact storage shares between rows, would change.
        """
        self.overwrite(index, before_storing(data, self.transforms, self.storage.not_compared))

    def overwrite(self, index: Any, data: Any) -> None:
        self._enter_to_write()
        self.writer.check_change(data)
        if self._prefetcher is not None:
            self._prefetcher.read_all()

        with self.write_lock:
            slots = slots_at(index, self.ring, self.storage.lanes)
            draw = self.ring.draw_slots(slots.reshape(-1), strict=True, follow=self.storage.compact_obs)

            for saved in self.saves.folders.values():  # the next save must write these rows again
                saved.note_edit(self.ring.numbers(draw.slots, self.ring.head))

            self.storage.write_drawn(draw, data, slots.shape, self.markers)

    def empty(self) -> None:
        """Remove all rows and prefetched samples. The storage keeps its memory and its columns."""
        self._enter_to_write()
        if self._prefetcher is not None:
            self._prefetcher.wait()

        with self.write_lock:
            with self.lock:
                ring = self._empty_ring()
                self.storage.check_removable()
                self._count_by(ring)
                self.sampler.emptied()
            if self._prefetcher is not None:
                self._prefetcher.clear()

    def update_priority(
        self, index: Index, priority: Tensor | float, generation: Tensor | None = None
    ) -> None:
        """Set the priorities of stored rows, given their positions.

        Args:
            index: positions as in a sample's info, or a tuple of coordinates, on any device; -1 is skipped.
            priority: one value for all rows or one per row, not negative.
            generation: ``info["index_generation"]``; rows overwritten since then are skipped.

        Raises:
            TypeError: the sampler has no priorities.
            ValueError: a negative priority or NaN, or sizes that differ.
            IndexError: a position outside the storage.
        """
        self._enter_to_write()
        slots = find_slots(index, self.storage.lanes)
        priorities = as_numbers("priority", priority)
        if generation is not None:
            check_tensors(generation=generation)

        with self.lock:
            self.sampler.update_priority(self.ring, slots, priorities, generation)

    def mark_update(self, index: Index) -> None:
        """Reset the priorities of rows to that of new rows; does nothing for samplers without priorities."""
        self._enter_to_write()
        with self.lock:
            self.sampler.mark_update(self.ring, find_slots(index, self.storage.lanes))

    # -- reading -----------------------------------------------------------------------------------------------

    @overload
    def sample(self, batch_size: int | None = None, return_info: Literal[False] = False) -> Any: ...

    @overload
    def sample(self, batch_size: int | None = None, *, return_info: Literal[True]) -> Informed: ...

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a sample, a batch ``[n]`` of the stored kind of data; with ``return_info`` also return an info dict.

        Args:
            batch_size: number of rows, default the buffer's. Short trajectories may give fewer (see the sampler).
            return_info: return ``(sample, info)``: ``info["index"]`` are the rows' positions (int64 ``[n]``, or ``[n,
                ndim]``); other entries come from the sampler.

        Raises:
            RuntimeError: the buffer is empty, or holds no trajectory long enough.
            ValueError: the batch size is missing or does not fit the sampler.
        """
        if return_info is not False and return_info is not True:
            check_flags(return_info=return_info)

        sample, info, _ = self.next_sample(batch_size)
        if return_info:
            return sample, info
        return sample

    def __iter__(self) -> Iterator[Any]:
        """Return an infinite iterator of samples; with a sampler without replacement it ends after one pass."""
        ended = False
        while not ended:
            sample, _, ended = self.next_sample(None)
            yield sample

    def next_sample(self, batch_size: int | None) -> Made:
        """Return the oldest prefetched sample or a new one: the sample, its info, and whether a pass ended."""
        if self._ready_in != os.getpid():
            self.enter_process()

        size = self.batch_size if batch_size is None else batch_size
        if size is not None and (type(size) is not int or not 0 < size < 2**63):
            size = check_whole_number("batch_size", size)
        size = self.sampler.check(size)

        # Prefetched samples have the buffer's batch size; other sizes are drawn directly.
        if not (self._prefetcher and (batch_size is None or size == self.sampler.check(self.batch_size))):
            if is_profiling():
                return call_in_range("sample", self._sample_now, size)
            return self._sample_now(size)

        made: Made = self._prefetcher.next(partial(self._draw_sample, size))
        return made

    def _sample_now(self, size: int) -> Made:
        """Draw rows and make the sample in this thread."""
        read, finish = self._draw_sample(size)
        return finish(read())

    def _draw_sample(self, size: int) -> tuple[Callable[[], Drawn], Callable[[Drawn], Made]]:
        """Draw rows in this thread; return functions to read them and to make the sample, for any thread."""
        with self.lock:
            ring = self.ring
            draw = self._draw(ring, size)
            ended = self.sampler.ran_out

        draw_again = partial(self._draw, size=size)
        draw_part = partial(self._draw_part, size)
        read = partial(self.read_drawn, ring, draw, draw_again, self._gather, draw_part)
        return read, partial(self._finish_sample, ended)

    def _draw(self, ring: Ring, size: int = 0, slots: Tensor | None = None, strict: bool = True) -> Draw:
        """Draw ``size`` rows by the sampler, or these ``slots``, and the rows that transforms read."""
        if slots is None:
            draw = self.sampler.draw(ring, size, self.generator, self.storage.compact_obs)
        else:
            draw = ring.draw_slots(slots, strict, self.storage.compact_obs)
        return self._add_rows_to_read(ring, draw)

    def _draw_part(self, size: int, ring: Ring, lost: Lost) -> Draw | None:
        """Draw rows in the place of the lost ones of a sample of ``size`` rows; None if all must be drawn again."""
        sampler = self.sampler
        if not sampler.independent or lost.draw.chosen is not None:
            return None

        compact = self.storage.compact_obs
        draw = sampler.redraw(ring, size, len(lost.units), len(lost.rows), self.generator, compact)
        # Else the weights of the rows that are left would be relative to another minimum.
        if draw.scale != lost.draw.scale:
            return None
        return self._add_rows_to_read(ring, draw)

    def _add_rows_to_read(self, ring: Ring, draw: Draw) -> Draw:
        """Add to a draw which other rows transforms read."""
        if self.transforms and isinstance(ring, TrajectoryIndex):
            steps = max(map(lookahead, self.transforms))
            if steps:
                draw.ahead = ring.ahead(draw.slots, steps)

            chooser = row_chooser(self.transforms)
            if chooser is not None:
                draw.chosen = ring.choose(draw, partial(chooser.choose, generator=self.generator))

        return draw

    def _finish_sample(self, ended: bool, drawn: Drawn) -> Made:
        """Mark the rows and apply the transforms."""
        draw, values = drawn
        storage = self.storage
        index = positions(draw.slots, storage.lanes) if storage.lanes else draw.slots
        info = {"index": index, **draw.info}

        structure = storage.structure
        if isinstance(structure, TensorDicts):
            self.sampler.mark(values, draw)
        values = self._inform(values, info)

        shape = draw.slots.shape
        data = values if structure is None else structure.build(values, shape)
        if self.collate_fn is not None:
            data = self.collate_fn(data)
        elif isinstance(storage, ListStorage):
            data = storage.build(values, shape)

        for transform in self.transforms:
            data = apply(transform, data, draw.ends)

        return data, info, ended

    def read_drawn(
        self,
        ring: Ring,
        draw: Draw,
        draw_again: Callable[[Ring], Draw],
        read: Callable[[Ring, Draw], T],
        draw_part: Callable[[Ring, Lost], Draw | None] | None = None,
    ) -> tuple[Draw, T]:
        """Return ``read(ring, draw)``, called without a lock, and its draw.

        If another thread overwrote some of the rows meanwhile, ``draw_part(ring, lost)`` draws others in their place
        under the lock, and only these are read; the others were complete when they were read. Without ``draw_part``,
        or if that returns None, ``draw_again(ring)`` draws all rows again.
        """
        # What was read before, from the whole draw to smaller and smaller parts, each without its lost rows.
        before: list[tuple[Lost, T]] = []

        def draw_next() -> tuple[Ring, Draw]:
            if before and draw_part is not None and ring is self.ring:
                part = draw_part(ring, before[-1][0])
                if part is not None:
                    return ring, part
            before.clear()
            return self.ring, draw_again(self.ring)

        for _ in range(_TRIES):
            # Other threads may write meanwhile; the counters then reveal overwritten rows.
            values = read(ring, draw)
            with self.lock:
                if ring is self.ring:
                    overwritten = ring.overwritten(draw)
                    if overwritten is None:
                        break
                    if draw_part is not None:
                        before.append((Lost.of(draw, overwritten), values))
                ring, draw = draw_next()
        else:
            with self.write_lock:  # a small ring with fast writers: block them this once
                with self.lock:
                    ring, draw = draw_next()
                values = read(ring, draw)

        for lost, kept in reversed(before):
            draw, values = put_part(lost, kept, draw, values)
        return draw, values

    def _inform(self, values: Any, info: dict[str, Tensor]) -> Any:
        """Add info entries to the storage's output (columns by key, or a list of items)."""
        return values

    def __getitem__(self, index: Any) -> Any:
        """Return stored rows by position in the storage (not by age), transformed but not marked.

        An entry's name returns that entry of all rows. Slices skip positions that a running or failed write has
        claimed; indexing them individually raises IndexError.
        """
        if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
            names = (index,) if isinstance(index, str) else index
            if names[0] == "_data" and len(names) > 1:
                names = names[1:]
            return entry(self[:], names)

        self.enter_process()
        slots = slots_at(index, self.ring, self.storage.lanes)
        strict = not isinstance(index, slice)
        draw_again = partial(self._draw, slots=slots.reshape(-1), strict=strict)
        with self.lock:
            ring = self.ring
            draw = draw_again(ring)
        draw, values = self.read_drawn(ring, draw, draw_again, self._gather)

        rows = draw.slots
        listed = isinstance(self.storage, ListStorage)
        if listed and slots.ndim == 0:
            return values[0]

        ends = torch.ones(len(rows), dtype=torch.bool)
        numbers = ring.numbers(rows, draw.version[0])
        ends[:-1] = numbers[1:] != numbers[:-1] + 1  # True where the next row was not written directly after

        data = values if listed else self.storage.build(values, rows.shape)
        for transform in self.transforms:
            data = apply(transform, data, lambda: ends)
        if listed:
            return data

        if slots.ndim != 1:
            check_row_count(self.transforms, data, len(rows))
        return in_shape(data, slots, len(rows), self.storage.lanes)

    def _gather(self, ring: Ring, draw: Draw) -> Any:
        """Return the drawn rows, changed by the transforms that read other rows."""
        values = self.storage.read_rows(draw.slots, draw.follow)
        if draw.ahead is None and draw.chosen is None:
            return values

        def get(slots: Tensor, keys: Iterable[NestedKey] | None = None) -> Any:
            asked = None
            if keys is not None:
                asked = frozenset(keys)

            follow = None
            if self.storage.needs_follow(asked):
                with self.lock:
                    follow = ring.follow(slots)

            return self.storage.read_rows(slots, follow, keys=asked)

        return read_others(self.transforms, values, draw.ahead, draw.chosen, get)

    # -- what it holds -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of rows stored."""
        return len(self.ring)

    @property
    def index(self) -> TrajectoryIndex | None:
        """The trajectory index; None before the first extend, or if no part of the buffer needs one."""
        if isinstance(self.ring, TrajectoryIndex):
            return self.ring
        return None

    @property
    def spec(self) -> Composite:
        """The shapes and dtypes of rows as read: a spec of shape ``(-1,)``; RuntimeError if empty.

        Entries that match :meth:`note_spec` also have the limits of that spec.
        """
        if not len(self):
            raise RuntimeError("an empty buffer has no spec yet: extend it first")

        row: Any = make_composite_from_td(self[:1], unsqueeze_null_shapes=False)[0]
        spec: Composite = row.expand(-1)
        if self.noted_spec is None:
            return spec

        for key, noted in self.noted_spec.items(True, True):
            read = spec.get(key, None)
            if read is not None and (read.shape, read.dtype) == (noted.shape, noted.dtype):
                spec[key] = noted

        return spec

    @property
    def _storage(self) -> Storage:
        """The storage, under the name that torchrl programs use."""
        return self.storage

    def note_spec(self, spec: Composite) -> None:
        """Record the spec of the rows, ``collector.spec`` or `flatroll.rollouts.batch_spec`.

        It is used by :attr:`spec` and by exported files that store the env's spaces (`export`). A `Collector` with
        ``replay_buffer=`` calls it.

        Copies and pickles keep the spec; saved states do not, so call it again after a load.
        """
        self.noted_spec = check_type("spec", spec, Composite, "a Composite such as collector.spec")

    def noted_space(self, key: NestedKey) -> Any:
        """Return the Gymnasium space of one row of an entry from `note_spec`; None if unknown."""
        if self.noted_spec is None:
            return None

        spec = self.noted_spec.get(key, None)
        if spec is None:
            return None
        return as_space(spec[0])

    def oldest_first(self) -> Any:
        """Return all stored rows in writing order (``buffer[:]`` returns slot order), for `extend` of another buffer.

        >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> slots = buffer.extend(torch.tensor([0, 1])), buffer.extend(torch.tensor([2, 3]))
        >>> buffer[:], buffer.oldest_first()
        (tensor([3, 1, 2]), tensor([1, 2, 3]))
        """
        lanes = self.storage.lanes.numel()
        with self.lock:
            slots = self.ring.stored()

        return self[slots[::lanes] // lanes]  # slot = step * lanes + lane

    def stats(self) -> dict[str, int | float]:
        """Return statistics for logging: rows, capacity, rows ever written, bytes and, with an index, its counts.

        ``bytes`` counts storage, index and the sampler's priorities: memory, or disk for storages of files; 0 where
        the storage cannot tell (`ListStorage`). Memory reserved for rows to come counts, although the process takes
        it only when they are written; batches, samples made ahead and steps that wait do not. ``bytes_saved`` counts
        the savings of ``compact_obs``, ``frame_stack`` and ``codec``. ``size``, ``write_count`` and
        ``utilization`` are torchrl's names for rows, rows ever written and rows / capacity.
        """
        storage = self.storage
        with self.lock:
            ring = self.ring
            numbers: dict[str, int | float] = {
                "rows": len(ring),
                "capacity": ring.capacity,
                "rows_written": ring.written,
                "bytes_per_row": storage.bytes_per_row,
                "bytes": storage.nbytes and storage.nbytes + self.sampler.nbytes,
                "bytes_saved": storage.bytes_saved,
                **storage.counts(),
            }
            if isinstance(ring, TrajectoryIndex):
                numbers["bytes"] += ring.nbytes
                numbers["trajectories"] = ring.trajectories
                numbers["open_trajectories"] = ring.open_trajectories

        return numbers | torchrl_names(numbers)

    def __repr__(self) -> str:
        name, kind, sampler = (type(part).__name__ for part in (self, self.storage, self.sampler))
        return f"{name}({len(self)} of {self.ring.capacity} rows, {kind}, {sampler})"

    def _facts(self) -> dict[str, Any]:
        """Return what a notebook shows: the statistics, and the parts with their options."""
        stats = self.stats()
        facts = {
            **stats,
            "storage": self.storage,
            "sampler": self.sampler,
            "writer": type(self.writer).__name__,
            "transforms": ", ".join(map(repr, self.transforms)) or None,
            "batch_size": self.batch_size,
        }
        rows = f"{facts.pop('rows'):,} of {facts.pop('capacity'):,}"
        hidden = {name for name in ("bytes", "bytes_per_row", "bytes_saved") if not facts[name]}
        hidden |= set(torchrl_names(stats))

        shown: dict[str, Any] = {"": f"{rows} rows"}
        for name, fact in facts.items():
            if fact is not None and name not in hidden:
                shown[name] = f"{fact:,}" if isinstance(fact, int) else fact
        return shown

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state of the buffer, including prefetched samples, for :meth:`load_state_dict`.

        It owns its memory and consists of plain Python values and tensors, so ``torch.save`` and ``torch.load`` work
        with it (except for custom objects in a `ListStorage`). It does not contain transforms.
        """
        self.enter_process()
        ahead = self.prefetched()

        with self.write_lock, self.lock:
            rows = self.storage.state_dict(self.ring.used, self.ring.pool_size)
            tables = self.tables(ahead)

        return tables | {"storage": rows} | {name: to_plain(tables[name]) for name in ("ring", "ahead")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore rows and random state from a :meth:`state_dict`; the same samples follow.

        Existing rows are dropped. Open trajectories are cut: new rows do not continue them, because the envs are not
        in the state. A state that does not fit changes nothing.

        Args:
            state: state of a buffer whose storage, sampler and writer have the same arguments; one storage may be in
                memory and the other in files. Prefetched samples are restored if both buffers prefetch.

        Raises:
            ValueError: the storage's capacity, kind or entries differ; a required trajectory index is missing; only
                one side has a generator; or the state is damaged (its columns, counters, tables or priorities are
                inconsistent).
            MemoryError, OSError: the storage had no rows yet, and they do not fit in memory or on the disk.
        """
        check_type("state", state, Mapping, "what state_dict returned")
        self._load(_convert_tables(dict(state)))

    def _load(self, state: dict[str, Any], ring: Ring | None = None, checked_for: Ring | None = None) -> None:
        """Restore a state; ``ring`` is `_check_state`'s result if the buffer still has the ring ``checked_for``."""
        self.enter_process()
        if self._prefetcher is not None:
            self._prefetcher.wait()  # pending reads of rows that will be overwritten must finish first

        with self.write_lock, self.lock:
            if ring is None or checked_for is not self.ring:
                ring = self._check_state(state)
            ahead = copy.deepcopy(state.get("ahead", []))

            # Sampler and writer first: a custom one may refuse its state, and rows cannot be rolled back.
            before = self.sampler.state_dict(), self.writer.state_dict()
            try:
                if state["ring"] is None:
                    self.sampler.emptied()
                self.sampler.load_state_dict(state["sampler"])
                self.writer.load_state_dict(state["writer"])

                keys = state["keys"]
                first = not self.started
                if state["ring"] is None:
                    self._count_by(ring)
                else:
                    if first:
                        self._own_parts()
                        self.storage.max_size = ring.capacity  # now with the saved lanes
                    elif not self.storage.loads_whole:
                        # Prevent readers, also in other processes, from seeing a mixture of old and new rows.
                        self._count_by(self.writer.ring(ring.capacity, keys is not None))
                    self.storage.load_state_dict(state["storage"])
                    self.storage.use_ring(ring, self._unshareable_part(ring), first)
                    self.storage.belong_to(self)
                    markers = None if keys is None else BoundaryKeys.from_plain(keys)
                    self.ring, self.markers = ring, markers  # together: an interrupt must not come between
                    self.started = True
            except BaseException:
                self.sampler.load_state_dict(before[0])
                self.writer.load_state_dict(before[1])
                if not len(self.ring):  # the copy was interrupted
                    self.sampler.emptied()
                raise

            if self.generator is not None:
                self.generator.set_state(state["generator"])
            if self._prefetcher is not None:
                self._prefetcher.replace(ahead)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Call ``hook(rows, path=path)`` before rows are written; its result is written instead.

        Rows are passed in chunks, oldest first, as a batch (a compact storage passes each observation once) or a list
        of items. The hook returns as many rows, or a tensordict of batch size ``[]``. A hook with attributes
        ``shift`` and ``is_full``, such as `TED2Flat` and `TED2Nested`, is called without ``path`` and may return
        anything; the attributes are set before the call, to 0 and True if the buffer is full, else to the number of
        rows and False. Load with the inverse hooks (`Flat2TED`, `Nested2TED`).
        """
        checkpointer_with_hooks(self.storage).register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Call ``hook(rows)`` on loaded rows before they are stored, to undo the save hooks."""
        checkpointer_with_hooks(self.storage).register_load_hook(hook)

    def save_version(self, path: Path, others: Others, options: SaveOptions) -> Version:
        """Publish a version of the buffer and of ``others`` (plain values by name) in a folder; see `Checkpoint`."""
        self.enter_process()
        self._store_steps()
        packer = Packer()
        packer.add("others", dict(others))  # refuse unsupported values before writing rows
        checkpointer = find_checkpointer(self.storage)

        # Block writers until everything is copied, because they may write rows out of order, or the first
        # rows with a new ring.
        alone = not self.ring.in_order or not self.started
        ahead = self.prefetched() if alone else []
        outer_lock = self.write_lock if alone else nullcontext()
        inner_lock = nullcontext() if alone else self.write_lock
        with outer_lock:
            ring = self.ring

            with closing(checkpointer.save(self.storage, ring, self.saves.of(path), options)) as save:
                save.begin(self.lock)
                if not alone:
                    # Without a lock, because the prefetching threads may wait for it.
                    ahead = self.prefetched()

                with inner_lock:
                    if ring is not self.ring:
                        raise RuntimeError(
                            "the buffer was emptied or loaded while it was saved: nothing was saved"
                        )
                    head, end = ring.saved_rows
                    save.hold(head, end)
                    with self.lock:  # the readers' lock as well, because a draw changes the sampler
                        tables = self.tables(ahead)

                packer.add("buffer", tables)
                return save.publish(packer, {"kind": "buffer", "buffer": repr(self), "rows": end - head})

    def load_version(self, path: Path, number: int | None, strict: bool) -> tuple[Others, Apply]:
        """Read and check a version; return the values saved with the buffer, and a function that loads the rest."""
        self.enter_process()
        checkpointer = find_checkpointer(self.storage)
        saved = self.saves.of(path)

        @reading_tables()
        def read(version: LoadedVersion) -> tuple[Others, dict[str, Any], Ring]:
            tree = read_tree(version, self.storage.max_size)
            state = tree["buffer"]
            if state is None:
                raise ValueError(
                    "a run without a buffer was saved: load it with a Checkpoint without buffer="
                )
            if isinstance(state, dict) and "members" in state:
                raise ValueError(
                    "an ensemble was saved: load it into a ReplayBufferEnsemble with the same number of members"
                )
            if not isinstance(state, dict) or not isinstance(state.get("storage"), dict):
                raise damaged(f"it is a {type(state).__name__}")

            with self.write_lock, self.lock:
                ring = self._saved_ring(state)

            if state["ring"] is not None:
                tables = state["storage"]
                state["storage"] = checkpointer.restore_version(self.storage, tables, version, ring)

            return tree["others"], state, ring

        (others, state, ring), folder = checkpointer.load_with(self.storage, path, read, number, strict)

        try:
            with self.write_lock, self.lock:
                self._check_state(state, ring)
                checked_for = self.ring
        except ValueError as error:
            error.add_note(f"while {path} was read")
            raise

        def apply() -> None:
            # If the state is empty, the ring continues the row numbers of the buffer that loads it.
            checked = None if state["ring"] is None else ring
            self._load(state, checked, checked_for)
            saved.folder = folder
            saved.note(self.ring)

        return others, apply

    def reopen(self) -> None:
        """Let new rows continue the trajectories that were open when the loaded state was saved.

        Only for a collector that goes on in the middle of them, see `flatroll.disk.Checkpoint`. Call it right after
        the load; without it they count as closed.
        """
        with self.write_lock, self.lock:
            if self.index is not None:
                self.index.reopen()

    def saved_versions(self, path: Path) -> list[int]:
        """Return the numbers of the versions in a folder, the newest first."""
        return find_checkpointer(self.storage).versions(path)

    def tables(self, ahead: list[Any]) -> dict[str, Any]:
        """Return the state without the rows; ``ahead`` are prefetched samples. The caller holds both locks."""
        ring = self.ring.state_dict() if self.started else None
        keys = None if self.markers is None else self.markers.to_plain()
        generator = None if self.generator is None else self.generator.get_state()

        return {
            "storage": self.storage.tables(self.ring.pool_size),
            "ring": ring,
            "keys": keys,
            "sampler": self.sampler.state_dict(),
            "writer": self.writer.state_dict(),
            "generator": generator,
            "ahead": ahead,
        }

    def prefetched(self) -> list[Any]:
        """Return copies of the prefetched samples; waits for pending ones."""
        if self._prefetcher is None:
            return []
        return copy.deepcopy(self._prefetcher.results())

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise the error of :meth:`load_state_dict` if ``state`` cannot be loaded; change nothing."""
        state = _convert_tables(state)
        with self.write_lock, self.lock:
            self._check_state(state)

    @reading_tables()
    def _check_state(self, state: dict[str, Any], ring: Ring | None = None) -> Ring:
        """Check ``state`` and return the ring for its rows, without changes; the caller holds both locks."""
        if missing := _ENTRIES - set(state):
            raise ValueError(
                f"state is not that of a ReplayBuffer: it lacks {sorted(missing)}, and has {sorted(state)}"
            )

        check_saved_generator(state["generator"], self.generator, "buffer")
        for made in state.get("ahead", []):
            if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[1], dict)):
                raise damaged("its prefetched samples are invalid")
        if state["keys"] is not None:
            BoundaryKeys.from_plain(state["keys"])

        if ring is None:
            ring = self._saved_ring(state)
        if state["ring"] is not None:
            self.storage.check_state_dict(state["storage"], ring)
        self.sampler.check_state_dict(state["sampler"], ring)
        return ring

    def _saved_ring(self, state: dict[str, Any]) -> Ring:
        """Return the ring for the rows of ``state``; raise if it does not fit this buffer."""
        if state["ring"] is None:
            return self._empty_ring()

        needs_index = self._needs_index()
        if needs_index is not None and state["keys"] is None:
            raise ValueError(
                f"the state was saved without a trajectory index, which {needs_index} needs: load it into a buffer "
                "like the saved one, and extend this buffer with other.oldest_first()"
            )

        capacity = check_whole_number("capacity", state["ring"]["capacity"])
        if capacity > self.storage.most_rows:  # before allocating tables of that size
            raise other_capacity_error(capacity, self.storage.max_size)

        ring = self.writer.ring(capacity, state["keys"] is not None)
        ring.load_state_dict(state["ring"])
        self.storage.check_tables(state["storage"], ring)
        return ring

    def _empty_ring(self) -> Ring:
        """Return an empty ring whose numbers continue after all written rows; the next row goes to slot 0."""
        ring = self.ring
        capacity = ring.capacity
        # The new first row number: `written` rounded up to a multiple of the capacity, so that no number is reused.
        return self.writer.ring(capacity, self.index is not None, -(-ring.written // capacity) * capacity)

    def _count_by(self, ring: Ring) -> None:
        """Use ``ring`` to count the rows, in other processes too."""
        self.ring = ring
        if self.started:
            self.storage.use_ring(ring, self._unshareable_part(ring))

    def _needs_index(self) -> str | None:
        """Return the name of the part that needs a trajectory index (for errors), or None."""
        if self.sampler.needs_index:
            return type(self.sampler).__name__

        for transform in self.transforms:
            if needs_trajectory(transform):
                return type(transform).__name__
        if self.storage.compact_obs:
            return "compact_obs=True"
        return None

    def _unshareable_part(self, ring: Ring) -> str | None:
        """Return the name of the part whose state other processes cannot see (for errors), or None."""
        if isinstance(ring, TrajectoryIndex):
            return "a trajectory index"

        names = [type(part).__name__ for part in (self.sampler, self.writer) if part.stateful]
        if type(ring) is not Ring:
            names.append(type(ring).__name__)
        name = next(iter(names), self.storage.own_column)

        if name is None:
            return None
        return f"a {name}"

    # -- other threads, processes and copies ---------------------------------------------------------------------

    def writer_for(self, num_envs: int, *, window: int | None = None, writer: int = 0) -> StepWriter:
        """Return a `StepWriter`, which stores single steps of ``num_envs`` envs as efficiently as long batches.

        Args:
            num_envs: number E of envs per step.
            window: number of steps stored at a time; ``E * window`` rows must divide the capacity. Default: the
                largest divisor up to 64 steps and 8,192 rows.
            writer: number of this writer in trajectory ids, 0 to 2**23 - 1; writers to the same buffer need different
                numbers (see `TrajId`).

        Raises:
            ValueError: a capacity that ``num_envs`` and ``window`` do not divide, or a ``writer`` out of range.
            TypeError: the storage has no columns (`ListStorage`) or ``ndim`` of 2 or more, or the writer selects
                rows.
        """
        return StepWriter(self, num_envs, window=window, writer=writer)

    def handle(self) -> BufferHandle:
        """Return a `BufferHandle` with which other processes extend and sample this buffer.

        This process is the owner: one of its threads serves the handles as long as the buffer exists. A buffer has
        one handle, returned by every call. (Pickling the buffer itself copies it.)

        Raises:
            RuntimeError: this buffer is a copy, by pickle or fork, of one that a running process owns.
        """
        return self.service.handle(self)

    def note_waiting(self, rows: int) -> None:
        """Record how many rows a collector holds back, for the error of an empty buffer."""
        self.ring.waiting = rows

    @property
    def copies_rows(self) -> bool:
        """Whether `extend` only copies its batch, so that the batch's memory may be reused."""
        storage = self.storage
        plain = not self.transforms and not self.writer.stateful
        return self.started and storage.copies_rows and storage.own_column is None and plain

    def _make_locks(self, ahead: list[Any] | None = None) -> None:
        self.lock = threading.Lock()  # guards the bookkeeping: held for microseconds
        # Serialises the writers of all processes. Acquired before ``lock``, never after it.
        self.write_lock = self.storage.write_lock()

        self._prefetcher: Prefetcher[Any] | None = None
        if self.prefetch:
            self._prefetcher = Prefetcher(self.prefetch)
            if ahead:
                self._prefetcher.replace(ahead)

        # The process that created these locks, and the process that enter_process was called for.
        process = os.getpid()
        self._process = process
        self._ready_in = process

        # Raises an error of the thread that writes into the buffer.
        self._failure: Callable[[], Any] | None = None
        # Step writers that may hold waiting steps.
        self.step_writers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.storage.attach(self)
        self.storage.belong_to(self)

    def note_failure(self, tell: Callable[[], Any]) -> None:
        """Make the next use of the buffer call this function, which raises the error of a writing thread."""
        self._failure = tell
        self._ready_in = 0  # forces a check at the next use; costs nothing otherwise

    def enter_process(self) -> None:
        """Prepare the buffer for this process after a fork or unpickling.

        Raises:
            RuntimeError: the storage does not work in a forked process.
        """
        process = os.getpid()
        if self._ready_in == process:
            return

        if self._process != process:
            # The lock may be held by a thread that does not exist in this process and would never release it.
            self.storage.enter_process()
            self._make_locks()

        self._ready_in = process
        reseed_in_worker(self.generator)

        tell = self._failure
        self._failure = None
        if tell is not None:
            tell()

    def _enter_to_write(self) -> None:
        """Call `enter_process`; raise RuntimeError if writes would be lost with this process."""
        process = os.getpid()
        if self._ready_in != process:
            self.enter_process()

        if self._home != process and not self.storage.by_reference:
            raise RuntimeError(
                f"this buffer belongs to process {self._home}, which would not see what process {process} writes: "
                "pass buffer.handle(), or use LazyMemmapStorage with shared=True (copy.deepcopy makes another "
                "buffer)"
            )

    def _own_parts(self) -> None:
        """Raise ValueError if the sampler or writer has state about another live buffer's rows."""
        for part in (self.sampler, self.writer):
            user = _USERS.get(part, lambda: None)()
            if part.stateful and user is not None and user is not self:
                raise ValueError(
                    f"the {type(part).__name__} already belongs to another buffer: make one for each buffer"
                )

        _USERS.update({part: weakref.ref(self) for part in (self.sampler, self.writer)})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: a consistent snapshot of the rows, even while other threads write.

        Waiting steps of step writers are stored first; prefetched samples are included. A shared storage is not
        copied: the pickle refers to its files.
        """
        self.enter_process()
        self._store_steps()
        ahead = self.prefetched()

        state = {name: value for name, value in self.__dict__.items() if name not in _PER_PROCESS}
        state["ahead"] = ahead
        if get_spawning_popen() is not None:  # passed as an argument to a new process
            state["_home"] = self._home

        if self.storage.by_reference:
            return state
        # pickle reads the parts after the locks have been released, so it gets copies.
        return state | self._copy_written({id(self): self})

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = {name: value for name, value in state.items() if name != "ahead"}
        self._home = os.getpid()  # unless it is in the state
        self.__dict__.update(kept)
        self._make_locks(state.get("ahead", []))

        # A DataLoader worker can be recognised only at the first use: unpickling happens too early.
        self._ready_in = 0
        self.storage.reattach(self.ring)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a consistent copy, even while other threads write; see `__getstate__`."""
        self.enter_process()
        self._store_steps()
        ahead = self.prefetched()

        other = object.__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(self._copy_written(memo))
        rest = self.__dict__.keys() - {*_WRITTEN, *_PER_PROCESS}
        other.__dict__.update(copy.deepcopy({name: self.__dict__[name] for name in rest}, memo))

        other._home = os.getpid()
        other._make_locks(ahead)
        other.storage.reattach(other.ring)
        return other

    def _store_steps(self) -> None:
        """Store the waiting steps of the step writers."""
        # A step writer may be copied after its buffer, so store its waiting steps first.
        for writer in list(self.step_writers):
            writer.flush()

    def _copy_written(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Return a consistent copy of the parts that writes and draws change."""
        with self.write_lock:
            # Slow, so without the readers' lock: readers do not change the storage.
            copy.deepcopy(self.storage, memo)
            with self.lock:  # ``memo`` already contains the storage's copy
                return copy.deepcopy({name: self.__dict__[name] for name in _WRITTEN}, memo)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        pickle_by_value(cls)


def _check_parts(storage: Storage | None, sampler: Sampler | None, writer: Writer | None) -> None:
    """Raise TypeError if a part given to a buffer is not of its kind."""
    if storage is not None:
        check_type("storage", storage, Storage, "a storage such as LazyTensorStorage(max_size)")
    if sampler is not None:
        check_type("sampler", sampler, Sampler, "a sampler such as RandomSampler()")
    if writer is not None:
        check_type("writer", writer, Writer, "a writer such as RoundRobinWriter()")


def torchrl_names(numbers: dict[str, int | float]) -> dict[str, int | float]:
    """Return torchrl's names of these statistics."""
    rows = numbers["rows"]
    capacity = numbers["capacity"]
    return {"size": rows, "write_count": numbers["rows_written"], "utilization": rows / capacity}


def _convert_tables(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with its tables in the form that the buffer's parts expect."""
    found = state | {name: from_plain(state[name]) for name in ("ring", "ahead") if name in state}
    if not isinstance(found.get("ring"), dict | None):
        raise damaged(f"its ring is a {type(found['ring']).__name__}")
    return found


pickle_by_value(ReplayBuffer)
