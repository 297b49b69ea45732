"""The replay buffer: rows in, marked samples out."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeAlias, overload

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns import After
from flatroll.buffers.index import TrajectoryIndex
from flatroll.buffers.prefetch import Prefetcher
from flatroll.buffers.ring import Draw, Ring
from flatroll.buffers.runs import BoundaryKeys
from flatroll.buffers.samplers import RandomSampler, Sampler
from flatroll.buffers.storage import ListStorage, Rows, Storage
from flatroll.buffers.structure import TensorDicts, batched, map_rows, one_row
from flatroll.buffers.transforms import TransformLike, apply, looks_ahead
from flatroll.buffers.writers import RoundRobinWriter, Writer
from flatroll.layout.keys import MASK, marker

Informed: TypeAlias = tuple[Any, dict[str, Tensor]]
Made: TypeAlias = tuple[Any, dict[str, Tensor], bool]  # a sample, its info, and whether a pass ended with it

_UNSAVED = ("_lock", "_write_lock", "_ahead")


class ReplayBuffer:
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
        *,
        storage: Storage | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int | None = None,
        transform: TransformLike | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(
                f"generator must be a CPU generator (rows are drawn on the host), got {generator.device}"
            )
        self.storage: Storage = ListStorage() if storage is None else storage
        self.sampler: Sampler = RandomSampler() if sampler is None else sampler
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
        if batch_size is not None or prefetch:
            self._checked(batch_size)
        self._transforms: list[TransformLike] = []
        if transform is not None:
            self.append_transform(transform)
        self._keys: BoundaryKeys | None = None
        self._started = False
        self._ring = Ring(self.storage.max_size)
        self._make_locks()
        if self.storage.contents is not None:
            self._write(self.storage.contents, None)

    def _make_locks(self) -> None:
        self._lock = threading.Lock()  # bookkeeping: held for microseconds
        self._write_lock = threading.Lock()  # one writer at a time
        self._ahead = (
            Prefetcher(self.prefetch, lambda: self._begin(self._checked(None))) if self.prefetch else None
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _UNSAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_locks()

    def __len__(self) -> int:
        return len(self._ring)

    def __repr__(self) -> str:
        name, kind, sampler = (type(part).__name__ for part in (self, self.storage, self.sampler))
        return f"{name}({len(self)} of {self._ring.capacity} rows, {kind}, {sampler})"

    @property
    def index(self) -> TrajectoryIndex | None:
        """The trajectory index; None before the first extend, and where nothing needs one."""
        return self._ring if isinstance(self._ring, TrajectoryIndex) else None

    def append_transform(self, transform: TransformLike) -> "ReplayBuffer":
        """Add a transform after those there are: an object with ``forward(td)`` and perhaps ``inv(td)``, or a
        function. Samples go through ``forward`` in order, batches to store through ``inv`` in reverse order.

        Raises:
            TypeError: neither of the two.
            RuntimeError: a transform that reads ahead (n-step), but the rows stored so far are not indexed.
        """
        if not callable(transform) and not hasattr(transform, "forward"):
            raise TypeError(
                f"transform must have forward(td) or be a function of td, got {type(transform).__name__}"
            )
        if looks_ahead(transform) and len(self._transforms) and self._started and self.index is None:
            raise RuntimeError(
                f"{type(transform).__name__} follows trajectories, which the rows stored so far cannot: append it "
                "before the first extend"
            )
        self._transforms.append(transform)
        return self

    # -- writing -----------------------------------------------------------------------------------------------

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
        return int(self.extend(one_row(data))[0])

    def _time_first(self, data: Any) -> Any:
        """``data`` with its batch dimensions in one, time before lanes."""
        dims = self.storage.ndim
        if dims == 1:
            return data

        def flat(leaf: Any) -> Any:
            if (leaf.batch_dims if isinstance(leaf, TensorDictBase) else leaf.ndim) < dims:
                raise ValueError(
                    f"the storage has ndim={dims}: extend it with batches of {dims} batch dimensions"
                )
            order = [self.dim_extend, *(d for d in range(leaf.ndim) if d != self.dim_extend)]
            leaf = leaf.permute(*order)
            sizes.add(tuple(leaf.shape[1:dims]))
            return leaf.reshape(-1, *leaf.shape[dims:])

        sizes: set[tuple[int, ...]] = set()
        data = map_rows(data, flat)
        lanes = torch.Size(sizes.pop()) if len(sizes) == 1 else None
        if lanes is None or (self._started and lanes != self.storage.lanes):
            raise ValueError(
                f"every batch must have the lanes of the first, {list(self.storage.lanes)}, got {lanes}"
            )
        if not self._started:
            if lanes.numel() > self.storage.max_size:
                raise ValueError(f"max_size={self.storage.max_size} holds no step of {list(lanes)} lanes")
            self.storage.lanes = lanes
        return data

    def _write(self, data: Any, final: TensorDictBase | None) -> Tensor:
        self.writer.check(data)
        with self._write_lock:
            ring = self._ring if self._started else self._first_ring(data)
            if isinstance(data, (TensorDictBase, list)) and not len(data):
                return self._positions(torch.zeros(0, dtype=torch.int64))
            filled = self.storage.contents is not None
            rows = self.storage.prepare(data, final, self._keys)
            if not self._started:
                with self._lock:
                    self._ring, self._started = ring, True
            return self._positions(self._store(ring, rows, filled))

    def _first_ring(self, data: Any) -> Ring:
        """Counters for what is to come; known when the first batch is."""
        asks = type(self.sampler).boundary_keys is not Sampler.boundary_keys
        ahead = any(looks_ahead(transform) for transform in self._transforms)
        self._keys = None
        if isinstance(data, TensorDictBase):
            self._keys = self.sampler.boundary_keys(data)
            if self._keys is None and (self.storage.compact_obs or ahead):
                self._keys = BoundaryKeys.probe(data)
            if self._keys is not None and data.batch_dims != 1:
                raise ValueError(
                    f"batch must be flat, [N], got {list(data.batch_size)}: batch.reshape(-1) lays [envs, time] end "
                    'to end, and ("collector", "traj_ids") tells the trajectories apart'
                )
        elif asks or ahead:
            raise TypeError(
                f"{type(self.sampler).__name__} follows trajectories, which needs tensordict batches, "
                f"got {type(data).__name__}"
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

    def _after(self, ring: TrajectoryIndex, rows: Rows, before: Any) -> After | None:
        """Which of the rows go on where a stored one ended, for columns that share what neighbours have in common."""
        if rows.runs is None or not self.storage.shares:
            return None
        follows = (before >= 0).nonzero()[0]
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
        with self._write_lock:
            slots = self._slots(index)
            draw = _given(self._ring, slots.reshape(-1), True, self.storage.compact_obs)
            self.storage.set(draw, data, slots.shape, self._keys)

    def empty(self) -> None:
        """Forget all rows, and the samples made ahead. The storage keeps its memory and its columns."""
        with self._write_lock:
            with self._lock:
                ring, capacity = self._ring, self._ring.capacity
                first = (
                    -(-ring.written // capacity) * capacity
                )  # the next row takes slot 0, and is no old one
                self._ring = self.writer.ring(capacity, self.index is not None, first)
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
        slots = torch.as_tensor(index)
        if self.storage.lanes and slots.ndim and slots.shape[-1] == self.storage.ndim:
            sizes = [*self.storage.lanes, 1]
            weights = torch.tensor(
                [torch.Size(sizes[i:]).numel() for i in range(len(sizes))], device=slots.device
            )
            slots = (slots * weights).sum(-1)
        with self._lock:
            self.sampler.update_priority(self._ring, slots, torch.as_tensor(priority), generation)

    # -- reading -----------------------------------------------------------------------------------------------

    @overload
    def sample(self, batch_size: int | None = None, return_info: Literal[False] = False) -> Any: ...

    @overload
    def sample(self, batch_size: int | None = None, *, return_info: Literal[True]) -> Informed: ...

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a sample: a batch ``[n]`` of the kind of data stored; with ``return_info`` also a dict.

        Args:
            batch_size: rows, default that of the buffer. Short trajectories may give fewer (see the sampler).
            return_info: return ``(sample, info)``: ``info["index"]`` holds the rows' positions (int64 ``[n]``, or
                ``[n, ndim]``), further entries are the sampler's.

        Raises:
            RuntimeError: the buffer is empty, or holds no trajectory long enough.
            ValueError: no batch size, or one that does not fit the sampler.
        """
        sample, info, _ = self._made(batch_size)
        return (sample, info) if return_info else sample

    def __iter__(self) -> Iterator[Any]:
        """Samples without end, or, with a sampler without replacement, until each row was in one."""
        ended = False
        while not ended:
            sample, _, ended = self._made(None)
            yield sample

    def _made(self, batch_size: int | None) -> Made:
        size = self._checked(batch_size)
        if self._ahead is not None and (batch_size is None or size == self._checked(None)):
            return self._ahead.next()
        return self._begin(size)()

    def _begin(self, size: int) -> Callable[[], Made]:
        """Draw rows; what is left to do, on any thread."""
        with self._lock:
            ring = self._ring
            draw = self._draw(ring, size)
            ended = self.sampler.ran_out
        return lambda: (*self._finish(ring, draw, size), ended)

    def _draw(self, ring: Ring, size: int) -> Draw:
        draw = self.sampler.draw(ring, size, self.generator, self.storage.compact_obs)
        steps = max(map(looks_ahead, self._transforms), default=0)
        if not steps or not isinstance(ring, TrajectoryIndex):
            return draw
        return replace(draw, ahead=ring.ahead(draw.slots, steps))

    def _finish(self, ring: Ring, draw: Draw, size: int) -> tuple[Any, dict[str, Tensor]]:
        draw, values = self._read(ring, draw, lambda now: self._draw(now, size))
        info = {"index": self._positions(draw.slots), **draw.info}
        if isinstance(self.storage.structure, TensorDicts):
            self.sampler.mark(values, draw)
            self._inform(values, info)
        data = self.storage.build(values, draw.slots.shape) if self.collate_fn is None else None
        if self.collate_fn is not None:
            listed = isinstance(self.storage, ListStorage)
            data = self.collate_fn(values if listed else self.storage.build(values, draw.slots.shape))
        return self._transformed(data, lambda: _slice_ends(draw)), info

    def _inform(self, columns: dict[Any, Tensor], info: dict[str, Tensor]) -> None:
        """Write entries of the info into the columns of a tensordict sample."""
        return

    def __getitem__(self, index: Any) -> Any:
        """Stored rows by position in the storage (not by age), transformed but not marked.

        An entry's name gives that entry of all rows. Positions that a write under way, or one that failed, has
        given up are left out of slices; asked for one by one they raise IndexError.
        """
        if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
            names = (index,) if isinstance(index, str) else index
            return self[:][names[1:] if names[0] == "_data" and len(names) > 1 else names]
        slots = self._slots(index)
        listed = not isinstance(index, slice)

        def choose(ring: Ring) -> Draw:
            return _given(ring, slots.reshape(-1), listed, self.storage.compact_obs)

        with self._lock:
            ring = self._ring
            draw = choose(ring)
        draw, values = self._read(ring, draw, choose)
        asked = draw.slots
        ends = torch.ones(len(asked), dtype=torch.bool)
        numbers = ring.numbers(asked, draw.stamp[0])
        ends[:-1] = numbers[1:] != numbers[:-1] + 1
        if isinstance(self.storage, ListStorage):
            return values[0] if slots.ndim == 0 else self._transformed(values, lambda: ends)
        shape = slots.shape if len(asked) == slots.numel() else torch.Size([-1, *self.storage.lanes])
        rows = self._transformed(self.storage.build(values, asked.shape), lambda: ends)
        if slots.ndim == 0:
            return map_rows(rows, lambda leaf: leaf[0])
        return rows if len(shape) == 1 else map_rows(rows, lambda leaf: leaf.unflatten(0, shape))

    def _slots(self, index: Any) -> Tensor:
        """The positions that ``index`` names, in its shape."""
        slots = torch.arange(min(self._ring.written, self._ring.capacity))
        if self.storage.lanes:
            slots = slots.view(-1, *self.storage.lanes)
        try:
            return slots[index]
        except IndexError:
            raise IndexError(f"index {index!r} is out of range: {len(self)} rows are stored") from None

    def _positions(self, slots: Tensor) -> Tensor:
        """``slots`` as positions in a storage of several dimensions, if it is one."""
        lanes = self.storage.lanes
        if not lanes:
            return slots
        return torch.stack(torch.unravel_index(slots, (self.storage.max_size, *lanes)), -1)

    def _checked(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"batch_size must be an integer of at least 1, got {size!r}")
        return self.sampler.check(size)

    def _read(self, ring: Ring, draw: Draw, again: Callable[[Ring], Draw]) -> tuple[Draw, Any]:
        """Gather what was drawn; again if a writer overwrote one of the rows meanwhile."""
        for _ in range(8):
            values = self._gather(ring, draw)
            with self._lock:
                if ring is self._ring and ring.intact(draw):
                    return draw, values
                ring = self._ring
                draw = again(ring)
        with self._write_lock:  # the ring is small and the writers fast: they wait for once
            with self._lock:
                draw = again(self._ring)
            return draw, self._gather(self._ring, draw)

    def _gather(self, ring: Ring, draw: Draw) -> Any:
        values = self.storage.get(draw.slots, draw.follow, slices=draw.firsts is not None)
        if draw.ahead is None:
            return values

        def get(slots: Tensor, keys: Any = None) -> Any:
            follow = None
            if self.storage.compact_obs and isinstance(ring, TrajectoryIndex):
                with self._lock:
                    follow = ring.follow(slots)
            return self.storage.get(slots, follow, keys=None if keys is None else frozenset(keys))

        for transform in self._transforms:
            steps = looks_ahead(transform)
            if steps:
                reader: Any = transform
                values = reader.read(values, draw.ahead[:, :steps], get)
        return values

    def _transformed(self, data: Any, ends: Callable[[], Tensor]) -> Any:
        for transform in self._transforms:
            data = apply(transform, data, ends)
        return data

    # -- state -------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Numbers to log: rows, capacity, rows ever written, bytes, and what the trajectory index counts.

        ``bytes`` are those of the storage and the index, ``bytes_saved`` what ``compact_obs``, ``frame_stack`` and
        ``codec`` save of it.
        """
        storage = self.storage
        with self._lock:
            ring = self._ring
            numbers = {
                "rows": len(ring),
                "capacity": ring.capacity,
                "rows_written": ring.written,
                "bytes_per_row": storage.bytes_per_row,
                "bytes": storage.nbytes,
                "bytes_saved": storage.bytes_saved,
            }
            if isinstance(ring, TrajectoryIndex):
                numbers["bytes"] += ring.nbytes
                numbers["trajectories"] = ring.trajectories
                numbers["open_trajectories"] = ring.open_trajectories
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Rows, counters, index, sampler, writer and generator, for :meth:`load_state_dict`; owns its memory.

        Goes through ``torch.save`` and ``torch.load(..., weights_only=False)``.
        """
        with self._write_lock, self._lock:
            ring = self._ring
            entries = ring.pool_size if isinstance(ring, TrajectoryIndex) else 0
            return {
                "storage": self.storage.state_dict(min(ring.written, ring.capacity), entries),
                "ring": ring.state_dict() if self._started else None,
                "keys": self._keys,
                "sampler": self.sampler.state_dict(),
                "writer": self.writer.state_dict(),
                "generator": None if self.generator is None else self.generator.get_state(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what the buffer that gave ``state`` held, and draw as it would have drawn.

        Trajectories that were open are cut: rows written from now on do not continue them, since the envs that
        wrote them are not in the state.

        Raises:
            ValueError: a storage of another capacity, kind or other entries; a generator on one side only.
        """
        if (state["generator"] is None) != (self.generator is None):
            raise ValueError(
                "the state was saved with a generator and this buffer has none, or the other way round: give "
                "ReplayBuffer(generator=torch.Generator()) on both sides to draw the same rows"
            )
        with self._write_lock:
            ring = None
            if state["ring"] is not None:
                ring = self.writer.ring(state["ring"]["capacity"], state["keys"] is not None)
                ring.load_state_dict(state["ring"])
                if ring.capacity > self.storage.max_size or self.storage.max_size - ring.capacity >= max(
                    1, torch.Size(state["storage"].get("lanes", [])).numel()
                ):
                    raise ValueError(
                        f"the state has room for {ring.capacity} rows, this storage for {self.storage.max_size}"
                    )
                self.storage.load_state_dict(state["storage"])
            with self._lock:
                if ring is not None:
                    self._ring, self._keys, self._started = ring, state["keys"], True
                self.sampler.load_state_dict(state["sampler"])
                self.writer.load_state_dict(state["writer"])
                if self.generator is not None:
                    self.generator.set_state(state["generator"])
            if self._ahead is not None:
                self._ahead.clear()


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


def _slice_ends(draw: Draw) -> Tensor:
    """Rows after which the sample goes on elsewhere."""
    if draw.lasts is None:
        return torch.ones(len(draw.slots), dtype=torch.bool)
    ends = torch.zeros(len(draw.slots), dtype=torch.bool)
    ends[draw.lasts] = True
    return ends if draw.mask is None else ends | ~draw.mask


def _given(ring: Ring, slots: Tensor, listed: bool, follow: bool) -> Draw:
    """The rows in ``slots``; those that may not be read are left out, or refused if ``listed`` one by one."""
    stamp = ring.stamp()
    ring.check_not_empty()
    readable = ring.numbers(slots, ring.head) < ring.written
    if not bool(readable.all()):
        if listed:
            raise IndexError(
                f"position {int(slots[~readable][0])} holds no row: a write has given it up, and its new row is "
                "not there yet"
            )
        slots = slots[readable]
    there = ring.follow(slots) if follow and isinstance(ring, TrajectoryIndex) else None
    return Draw(slots, follow=there, stamp=stamp)
