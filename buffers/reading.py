"""The reading side of a replay buffer."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from flatroll.buffers.index.ring import Draw, Ring, given
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.parts import BufferParts, Made
from flatroll.buffers.storages.base import ListStorage
from flatroll.buffers.storages.item_kinds import TensorDicts, entry, map_rows
from flatroll.buffers.storages.parallel_lanes import positions
from flatroll.buffers.transforms.base import apply, looks_ahead
from flatroll.layout.keys import NestedKey, next_key

Informed: TypeAlias = tuple[Any, dict[str, Tensor]]


class BufferReading(BufferParts):
    """Samples, indexes and iterates."""

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
        self._enter()
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
        return self._with_ahead(ring, self.sampler.draw(ring, size, self.generator, self.storage.compact_obs))

    def _with_ahead(self, ring: Ring, draw: Draw) -> Draw:
        steps = max(map(looks_ahead, self._transforms), default=0)
        if not steps or not isinstance(ring, TrajectoryIndex):
            return draw
        return replace(draw, ahead=ring.ahead(draw.slots, steps))

    def _finish(self, ring: Ring, draw: Draw, size: int) -> tuple[Any, dict[str, Tensor]]:
        draw, values = self._read(ring, draw, lambda now: self._draw(now, size))
        info = {"index": positions(draw.slots, self.storage.lanes), **draw.info}
        if isinstance(self.storage.structure, TensorDicts):
            self.sampler.mark(values, draw)
        values = self._inform(values, info)
        data = self.storage.build(values, draw.slots.shape) if self.collate_fn is None else None
        if self.collate_fn is not None:
            listed = isinstance(self.storage, ListStorage)
            data = self.collate_fn(values if listed else self.storage.build(values, draw.slots.shape))
        return self._transformed(data, lambda: _slice_ends(draw)), info

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
        self._enter()
        slots = self._slots(index)
        listed = not isinstance(index, slice)

        def choose(ring: Ring) -> Draw:
            return self._with_ahead(ring, given(ring, slots.reshape(-1), listed, self.storage.compact_obs))

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

        pool = self.storage.pool

        def get(slots: Tensor, keys: Iterable[NestedKey] | None = None) -> Any:
            asked = None if keys is None else frozenset(keys)
            follow = None
            if pool is not None and (asked is None or not asked.isdisjoint(map(next_key, pool.pairs))):
                with self._lock:
                    follow = ring.follow(slots)
            return self.storage.get(slots, follow, keys=asked)

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


def _slice_ends(draw: Draw) -> Tensor:
    """Rows after which the sample goes on elsewhere."""
    if draw.lasts is None:
        return torch.ones(len(draw.slots), dtype=torch.bool)
    ends = torch.zeros(len(draw.slots), dtype=torch.bool)
    ends[draw.lasts] = True
    return ends if draw.mask is None else ends | ~draw.mask
