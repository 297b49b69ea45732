"""A pool of single frames that rows of stacks name, each kept once."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.columns.base import Column, TensorColumn
from flatroll.buffers.index.ring import Array

Make = Callable[[int, tuple[int, ...], torch.dtype], Column]

_STATE = np.dtype(
    [
        ("high", "i8"),  # frames ever used, the blank one included
        ("free", "i8"),  # first of the frames given up, 0 if none
        ("last", "i8"),  # last of them
        ("spare", "i8"),  # how many they are
    ]
)
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
_NOTHING, _STORED, _BEFORE = 0, 1, 2  # as in kernels.frames, which needs numba


class FramePool:
    """Frames in columns, one after the other, and how often each is named. Frame 0 is blank and belongs to nobody.

    Frames are kept as integers ``[words]`` as wide as divides them.

    Args:
        frames: how many there is room for at first, the blank one included.
        size: bytes of a frame.
        device: where they are kept.
        make: makes a column of so many frames, given (frames, shape, integer dtype).

    Attributes:
        state: counters, see `flatroll.kernels.rows.frame_rows`.
        counts: how often each frame is named, int32.
    """

    def __init__(self, frames: int, size: int, device: torch.device, make: Make) -> None:
        self._word = next(word for word in _WORDS if size % word.itemsize == 0)
        self._size, self._shape = size, (size // self._word.itemsize,)
        self._device, self._make, self._first_size = device, make, frames
        self.state: Array = np.zeros(1, _STATE)
        self.state["high"] = 1
        self.counts: Array = np.zeros(frames, np.int32)
        column = make(frames, self._shape, self._word)
        column.write(0, torch.zeros((1, *self._shape), dtype=self._word))
        # (first frame, column); a tuple that is replaced as a whole, so that a reader sees one or the other
        self._columns: tuple[tuple[int, Column], ...] = ((0, column),)

    @property
    def in_use(self) -> int:
        """Frames that are named."""
        return int(self.state["high"][0] - self.state["spare"][0]) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the frames, free ones included, and the counts."""
        return sum(column.nbytes for _, column in self._columns) + int(self.counts.nbytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one frame and its count."""
        return self._columns[0][1].row_bytes + self.counts.itemsize

    def words(self, values: Tensor, rows: int, stack: int) -> Tensor:
        """``values`` as integers ``[rows, stack, words]`` on the device, aligned."""
        flat, wide = values.detach().to(self._device).contiguous(), self._word.itemsize
        if flat.storage_offset() * flat.element_size() % wide or flat.data_ptr() % wide:
            flat = flat.clone()
        flat = flat.view(rows * stack, self._size // flat.element_size()).view(self._word)
        return flat.view(rows, stack, *self._shape)

    def look_up(self, refs: Array) -> tuple[Tensor, Array]:
        """Frames ``[F, words]`` among which are those that ``refs[:, 1:]`` names, and their numbers there."""
        memory = self._memory
        if memory is not None:
            return memory, refs
        at = np.zeros_like(refs)
        at[:, 1:] = np.arange(at[:, 1:].size).reshape(at[:, 1:].shape)
        return self.take(refs[:, 1:]), at

    def take(self, refs: Array) -> Tensor:
        """Copies of the frames ``refs``, int32 of any shape: ``[refs.size, words]`` on the device."""
        memory = self._memory
        if memory is not None:
            return _gather(memory, refs.reshape(-1))
        frames = refs.reshape(-1).astype(np.int64)
        (_, first), *more = self._columns
        if not more:
            return first.take(torch.from_numpy(frames))
        values = first.take(torch.from_numpy(np.where(frames < more[0][0], frames, 0)))
        for at, column, there in self._found(frames, 1):
            values.index_copy_(0, at.to(values.device), column.take(there))
        return values

    def put(self, frames: Array, words: Tensor, source: Array) -> None:
        """Copy ``words[source]`` into ``frames`` (both int64 ``[N]``)."""
        memory = self._memory
        if memory is not None:
            kernels().copy(words.numpy(), source, memory.numpy(), frames)
            return
        for at, column, there in self._found(frames):
            column.put(there, words.index_select(0, torch.from_numpy(source)[at].to(words.device)))

    @property
    def _memory(self) -> Tensor | None:
        """The frames ``[F, words]`` if they stand in one piece of host memory."""
        column = self._columns[0][1]
        if len(self._columns) > 1 or not isinstance(column, TensorColumn) or self._device.type != "cpu":
            return None
        return column.data

    def _found(self, frames: Array, skip: int = 0) -> Iterator[tuple[Tensor, Column, Tensor]]:
        """Per column that holds any of ``frames``: their positions, the column, and their rows in it."""
        columns = self._columns[skip:]
        ends = [begin for begin, _ in columns[1:]] + [len(self.counts)]
        for (begin, column), end in zip(columns, ends, strict=True):
            at = np.flatnonzero((frames >= begin) & (frames < end))
            if len(at):
                yield torch.from_numpy(at), column, torch.from_numpy(frames[at] - begin)

    def allocate(self, count: int) -> Array:
        """``count`` frames that nobody names, int64; the pool grows by another column if it has not as many.

        The columns stay where they are: growing copies nothing, and a reader loses nothing.
        """
        missing = int(self.state["high"][0] - self.state["spare"][0]) + count - len(self.counts)
        if missing > 0:
            more = max(missing, len(self.counts) // 16)
            column = self._make(more, self._shape, self._word)
            self._columns = (*self._columns, (len(self.counts), column))
            self.counts = np.concatenate([self.counts, np.zeros(more, np.int32)])
        frames = np.empty(count, np.int64)
        kernels().allocate(self.state, self.counts, frames)
        return frames

    def state_dict(self) -> dict[str, Any]:
        """The frames ever used, column by column."""
        high = int(self.state["high"][0])
        begins = [begin for begin, _ in self._columns]
        sizes = np.diff([*begins, len(self.counts)]).tolist()
        used = [min(size, max(0, high - begin)) for size, begin in zip(sizes, begins, strict=True)]
        columns = [column.state_dict(n) for n, (_, column) in zip(used, self._columns, strict=True)]
        return {"sizes": sizes, "columns": columns}

    def load_state_dict(self, state: dict[str, Any], refs: Array) -> None:
        """Hold the frames of ``state``, named by ``refs`` and by nothing else."""
        sizes: list[int] = state["sizes"]
        begins = np.cumsum([0, *sizes]).tolist()
        there = [self._columns[0][1]] if sizes[0] == self._first_size else []
        columns = there + [self._make(size, self._shape, self._word) for size in sizes[len(there) :]]
        for column, held in zip(columns, state["columns"], strict=True):
            column.load_state_dict(held)
        counts = np.bincount(refs.reshape(-1), minlength=begins[-1]).astype(np.int32)
        counts[0] = 0
        used = np.flatnonzero(counts)
        high = int(used[-1]) + 1 if len(used) else 1
        free = np.flatnonzero(counts[1:high] == 0) + 1
        counts[free] = -1 - np.append(free[1:], 0)
        self.state[0] = (high, free[0], free[-1], len(free)) if len(free) else (high, 0, 0, 0)
        self.counts, self._first_size = counts, sizes[0]
        self._columns = tuple(zip(begins[:-1], columns, strict=True))


def match(words: Tensor, stored: Tensor, held: Array, hint: Array) -> tuple[Array, Array, int]:
    """Which frames of new stacks ``words [N, S, words]`` are there already.

    Args:
        words: the stacks, as integers.
        stored: frames, ``[F, words]``, on the same device.
        held: which of them are the stacks of some stored rows, ``[K, S]``; the oldest is not looked at.
        hint: which of the K each new row may continue, -1 for none; int64 ``[N]``.

    Returns:
        Per row, whether it shares all frames but the newest with nothing, a stored row, or the row before it in
        the batch (0, 1, 2); per frame, whether it equals the one before it in its stack (False in shared ones); how
        many frames are left, which are new.
    """
    rows, stack = words.shape[:2]
    shares, repeats = np.zeros(rows, np.int8), np.zeros((rows, stack), np.bool_)
    if words.device.type == "cpu":
        new: int = kernels().match(words.numpy(), stored.numpy(), held, hint, shares, repeats)
        return shares, repeats, new
    return match_by_torch(words, stored, held, hint)


def match_by_torch(words: Tensor, stored: Tensor, held: Array, hint: Array) -> tuple[Array, Array, int]:
    """`match` on any device; one wait for the device."""
    rows, stack = words.shape[:2]
    hinted = np.flatnonzero(hint >= 0)
    at, picked = (torch.from_numpy(a).to(words.device) for a in (hinted, held[hint[hinted], 1:].reshape(-1)))
    old = words[:, :-1].index_select(0, at)
    continues = ~old.ne(stored.index_select(0, picked).view_as(old)).flatten(1).any(1)
    rolls = ~words[1:, :-1].ne(words[:-1, 1:]).flatten(1).any(1)
    equal = ~words[:, 1:].ne(words[:, :-1]).any(2)
    found = torch.cat([continues, rolls, equal.flatten()]).numpy(force=True)
    continues_, rolls_, equal_ = np.split(found, [len(hinted), len(hinted) + rows - 1])
    shares, repeats = np.zeros(rows, np.int8), np.zeros((rows, stack), np.bool_)
    shares[1:][rolls_] = _BEFORE
    shares[hinted[continues_]] = _STORED
    repeats[:, 1:] = equal_.reshape(rows, stack - 1)
    repeats[shares != _NOTHING, :-1] = False
    new = int(np.where(shares == _NOTHING, stack, 1).sum() - repeats.sum())
    return shares, repeats, new


def in_memory(frames: int, shape: tuple[int, ...], word: torch.dtype, device: torch.device) -> Column:
    """A column of memory that is taken as it is touched."""
    if device.type == "cpu":
        return TensorColumn(_empty((frames, *shape), word))
    return TensorColumn(torch.empty((frames, *shape), dtype=word, device=device))


def _empty(shape: tuple[int, ...], word: torch.dtype) -> Tensor:
    """Unset host memory from NumPy, which asks the system for large pages where torch does not."""
    return torch.from_numpy(np.empty(shape, f"i{word.itemsize}"))


def _gather(memory: Tensor, frames: Array) -> Tensor:
    """``memory.index_select(0, frames)``; one thread gets by with less waiting, several do not need it."""
    copies = _empty((len(frames), *memory.shape[1:]), memory.dtype)
    if torch.get_num_threads() > 1:
        return torch.index_select(memory, 0, torch.from_numpy(frames), out=copies)
    size = memory.shape[1] * memory.element_size()
    kernels().gather(memory.data_ptr(), copies.data_ptr(), size, frames)
    return copies


def kernels() -> ModuleType:
    """`flatroll.kernels.rows.frame_rows`."""
    from flatroll.kernels.rows import frame_rows as frames  # numba: 0.3 s, only where frames are kept

    return frames
