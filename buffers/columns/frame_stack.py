"""A column for frame stacks that stores each frame once."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import (
    After,
    Column,
    Dumped,
    Part,
    TensorColumn,
    check_dumped,
    check_values,
    scattered,
)
from flatroll.buffers.index.ring import Array
from flatroll.buffers.index.saved_tables import damaged
from flatroll.layout.checks import check_whole_number
from flatroll.layout.keys import NestedKey
from flatroll.layout.transfers import upload

#: Creates a column of frames: (number of frames, frame shape in words, integer dtype of a word) -> column.
Make = Callable[[int, tuple[int, ...], torch.dtype], Column]

# high: number of frames ever used, with the blank one; free, last: first and last frame of the free list, 0
# if it is empty; spare: its length.
_STATE = np.dtype([("high", "i8"), ("free", "i8"), ("last", "i8"), ("spare", "i8")])
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
# As in kernels.rows.frame_rows, which is not imported here because it needs numba.
_NOTHING = 0
_STORED = 1
_BEFORE = 2


class FrameColumn(Column):
    """A column of frame stacks ``[stack, *frame]`` that stores each frame once, and frame indices per row.

    A stack shares all frames but its newest with the row written before it, or with the stored row that `After`
    names, if they agree bit for bit. Frames equal to the previous one in their stack (the repeated first frame of an
    episode) are stored once. Everything else is stored in full, so reading is always bit-exact. Unreferenced frames
    are reused. A row of a rolling stack costs one frame and ``4 * stack + 4`` bytes.

    Frames are stored on the device as integers of the widest type that divides them, whatever their dtype; the rows'
    frame numbers are on the host. Readers need no lock: frame numbers are always in range.

    Args:
        rows: number of rows.
        stack: frames per row, at least 2, oldest first.
        shape: shape of one row's value, ``[stack, *frame]``.
        dtype: dtype of the values, any.
        device: device of the frames, default ``"cpu"``.
        make: creates a column of frames from (frames, shape in words, integer dtype); default is a `TensorColumn` in
            memory. It is called again when the pool is full.

    Attributes:
        frames: the `FramePool`, which :meth:`pool` columns share.
        refs: frame numbers of each row, oldest first, int32 ``[rows, stack]``.
        main: the column whose slots an `After` names: this one, or the one whose :meth:`pool` was called.

    Raises:
        ValueError: ``stack`` is less than 2, or the first axis of the values is not the stack.

    >>> frames = torch.arange(10.0)
    >>> column = FrameColumn(100, 4, torch.Size([4]), torch.float32)
    >>> column.write(0, frames.unfold(0, 4, 1))  # 7 stacks of 10 frames
    >>> column.take(torch.tensor([6, 0])), column.frames_in_use
    (tensor([[6., 7., 8., 9.],
            [0., 1., 2., 3.]]), 10)
    """

    looks_up_on_host = True

    def __init__(
        self,
        rows: int,
        stack: int,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        make: Make | None = None,
    ) -> None:
        check_stack(stack, shape)
        self.dtype = dtype
        self.shape = torch.Size(shape)

        frame_bytes = math.prod(shape[1:]) * dtype.itemsize
        device = torch.device(device)
        if make is None:
            make = partial(_in_memory, device=device)
        # One frame per row, plus 2 % for the first frames of episodes. The pool grows when needed.
        self.frames = FramePool(rows + rows // 50 + 64, frame_bytes, device, make)
        self.main = self
        self.refs: Array = np.zeros((rows, stack), np.int32)  # frame numbers of each row, oldest first

    @override
    def write(self, slot: int, values: Tensor, after: After | None = None) -> None:
        # The slot before the first one (around the ring) is a candidate even without a hint.
        slot_before = (slot - 1) % len(self.refs) if self.main is self else None
        self._store(np.arange(slot, slot + len(values)), values, after, slot_before)

    @override
    def put(self, slots: Tensor, values: Tensor, after: After | None = None) -> None:
        self._store(slots.numpy(force=True), values, after)

    def _store(
        self, slots: Array, values: Tensor, after: After | None, slot_before: int | None = None
    ) -> None:
        """Store rows, sharing frames with the rows in ``after`` and, for row 0, ``slot_before``."""
        if not len(slots):
            return

        pool = self.frames
        rows = len(slots)
        stack = self.refs.shape[1]
        words = pool.words(values, rows, stack)

        # hint[j]: index in ``candidates`` of the stored row that new row j may continue, -1 for none.
        hint = np.full(rows, -1)
        candidates = np.zeros(0, np.int64)
        if after is not None:
            hint[after.rows.numpy(force=True)] = np.arange(len(after.rows))
            candidates = after.slots.numpy(force=True)
        if slot_before is not None and hint[0] < 0:
            hint[0] = len(candidates)
            candidates = np.append(candidates, slot_before)

        held = self.main.refs.take(candidates, 0)
        shares, repeats, new = match(words, *pool.look_up(held), hint)

        # Count the shared frames of the new rows before releasing those of the old rows: they may be the same frames.
        kernels().replace(pool.state, pool.counts, self.refs, slots, hint, held, shares)

        frames = pool.allocate(new)
        source = np.empty(new, np.int64)
        kernels().assign(pool.counts, self.refs, slots, shares, repeats, frames, source)
        pool.put(frames, words.flatten(0, 1), source)

    @override
    def take(self, slots: Tensor) -> Tensor:
        # Read the numbers before the frames: the pool may only grow in between.
        refs = self.refs.take(slots.numpy(force=True), 0)
        words = self.frames.take(refs)
        return words.view(-1).view(self.dtype).view(len(slots), *self.shape)

    @override
    def pool(self) -> "FrameColumn":
        # A side column uses the same frame pool; `After` still refers to slots of the main column.
        side = object.__new__(FrameColumn)
        side.dtype = self.dtype
        side.shape = self.shape
        side.frames = self.frames
        side.main = self.main
        side.refs = np.zeros((0, self.refs.shape[1]), np.int32)
        return side

    @override
    def grow(self, rows: int) -> None:
        if rows > len(self.refs):  # the frame pool grows on demand
            larger = np.zeros((rows, self.refs.shape[1]), np.int32)
            larger[: len(self.refs)] = self.refs
            self.refs = larger

    @property
    @override
    def nbytes(self) -> int:
        """Bytes of the frame indices and, unless this is a :meth:`pool` column, of all frames."""
        pool = self.frames
        own = int(self.refs.nbytes)
        if self.main is not self:
            return own
        return own + sum(column.nbytes for _, column in pool.columns) + int(pool.counts.nbytes)

    @property
    @override
    def row_bytes(self) -> int:
        """Bytes of a row that shares all frames but one: the frame, its count, and the stack's frame numbers."""
        pool = self.frames
        return pool.columns[0][1].row_bytes + pool.counts.itemsize + 4 * self.shape[0]

    @property
    def frames_in_use(self) -> int:
        """Number of stored frames that rows refer to, including rows of :meth:`pool` columns."""
        return int(self.frames.state["high"][0] - self.frames.state["spare"][0]) - 1

    @override
    def dump(self, slots: Tensor) -> Dumped:
        """Return the frames that each row adds, and how many frames back those of its stack are."""
        refs = self.refs.take(slots.numpy(force=True), 0)
        distinct, firsts, inverse = np.unique(refs, return_index=True, return_inverse=True)
        order = np.argsort(firsts)  # distinct frames in order of first use
        place = np.empty_like(order)
        place[order] = np.arange(len(order))

        added = np.bincount(firsts // self.shape[0], minlength=len(refs))  # frames that each row adds
        # Counted back from the row's last frame, so that dumps can be concatenated.
        back = np.cumsum(added)[:, None] - place[inverse.reshape(refs.shape)]
        dumped = {"back": torch.from_numpy(back.astype(np.int32))}
        return dumped | by_row(self.frames.dump(distinct[order]), added)

    @override
    def restore(self, parts: Sequence[Part], rows: int) -> dict[str, Any]:
        first = 1  # frame 0 is blank
        numbered = list[Part]()
        frames = list[Part]()
        none = np.zeros(0, np.int64)
        kind = dict.fromkeys(by_row(self.frames.dump(none), none), True)

        for slots, dumped in parts:
            check_dumped(dumped, {"back": False, **kind})
            back = dumped["back"]
            check_values("frame numbers", back, torch.int32, self.shape[:1])
            assert isinstance(back, Tensor)

            added, pieces = read_frames(dumped)
            if len(added) and int(added.max()) > 2**31 - first:
                raise damaged("it has more frames than can be numbered")

            total = added.cumsum(0).unsqueeze(1)
            if bool(((back < 1) | (back > total)).any()):
                raise damaged("a row refers to a frame outside of its part")

            numbered.append(Part(slots, {"refs": (total - back + first).int()}))
            count = int(added.sum())
            frames.append(Part(torch.arange(first, first + count), pieces))
            first += count

        refs = scattered(numbered, "refs", rows, torch.int32, self.shape[:1])
        return {"refs": refs, "frames": self.frames.restore(frames, first)}

    @override
    def state_dict(self, rows: int) -> dict[str, Any]:
        if self.main is not self:  # a side column saves values, which makes its state self-contained
            return super().state_dict(rows)
        return {"refs": torch.from_numpy(self.refs[:rows].copy()), "frames": self.frames.state_dict()}

    @override
    def check_state_dict(self, state: dict[str, Any]) -> int:
        if self.main is not self:
            return check_values("values", state["values"], self.dtype, self.shape)

        refs = state["refs"]
        rows = check_values("frame numbers", refs, torch.int32, self.shape[:1])
        frames = self.frames.check_state_dict(state["frames"])
        if rows and not 0 <= int(refs.min()) <= int(refs.max()) < frames:
            raise damaged(f"a row refers to a frame that is not among its {frames} frames")
        return rows

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values from a state; existing :meth:`pool` columns become invalid."""
        if self.main is not self:
            return super().load_state_dict(state)

        refs = state["refs"].numpy(force=True)
        self.grow(len(refs))
        # Let rows refer to the blank frame while the pool is replaced, so that readers stay in range.
        self.refs[:] = 0
        self.frames.load_state_dict(state["frames"], refs)
        self.refs[: len(refs)] = refs


def by_row(dumped: Dumped, added: Array) -> dict[str, tuple[Tensor, Tensor]]:
    """Split a frame column's dump into the ``added[i]`` frames of each row i.

    If frames have variable lengths, these are a separate tensor ``each``.
    """
    cut = {}
    frames = torch.from_numpy(added)
    row = torch.repeat_interleave(frames)  # row of each frame
    for name, values in dumped.items():
        if isinstance(values, Tensor):
            cut[f"frames.{name}"] = values, frames
        else:
            cut[f"frames.{name}.each"] = values[1], frames
            cut[f"frames.{name}"] = values[0], torch.zeros_like(frames).index_add_(0, row, values[1])
    return cut


def read_frames(dumped: Dumped) -> tuple[Tensor, dict[str, Tensor | tuple[Tensor, Tensor]]]:
    """Return the number of frames each row adds and their column's dump; ValueError on mismatch.

    The inverse of `by_row`.
    """
    ragged = {name: pair for name, pair in dumped.items() if isinstance(pair, tuple)}
    pieces: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
    added = list[Tensor]()
    for name, (values, lengths) in ragged.items():
        each = ragged.get(f"{name}.each")
        if each is None:
            added.append(lengths)
            if not name.endswith(".each"):
                pieces[name.removeprefix("frames.")] = values
            continue

        sizes = each[0]
        check_values("sizes", sizes, torch.int64, ())
        if bool(((sizes < 0) | (sizes > len(values))).any()) or int(sizes.sum()) != len(values):
            raise damaged("the sizes of its frames do not add up")
        pieces[name.removeprefix("frames.")] = values, sizes

    if not all(torch.equal(one, added[0]) for one in added):
        raise damaged("its rows add different numbers of frames and of frame sizes")
    return added[0], pieces


class FramePool:
    """Reference-counted frames shared by the rows of a `FrameColumn`; frame 0 is blank and never freed.

    Frames are integers ``[words]``. Unreferenced frames form a free list, linked through ``counts``: see
    `flatroll.kernels.rows.frame_rows`.

    Attributes:
        state: the counters of the free list, one record.
        counts: int32, the reference count of each frame, or the next frame of the free list.
        columns: (first frame, column) of each piece of memory; the tuple is replaced atomically for readers.
    """

    def __init__(self, frames: int, frame_bytes: int, device: torch.device, make: Make) -> None:
        # Compare and copy in words: int64 if the number of bytes per frame is divisible by 8, else the widest
        # type possible.
        self._word = next(word for word in _WORDS if frame_bytes % word.itemsize == 0)
        self._frame_bytes = frame_bytes
        self._shape = (frame_bytes // self._word.itemsize,)
        self._device = device
        self._make = make
        self._first_size = frames

        self.state: Array = np.zeros(1, _STATE)
        self.state["high"] = 1
        self.counts: Array = np.zeros(frames, np.int32)
        column = make(frames, self._shape, self._word)
        column.write(0, torch.zeros((1, *self._shape), dtype=self._word))
        self.columns: tuple[tuple[int, Column], ...] = ((0, column),)

    def words(self, values: Tensor, rows: int, stack: int) -> Tensor:
        """``values`` ``[rows, stack, *frame]`` as integers ``[rows, stack, words]`` on the device, aligned."""
        flat = upload(values.detach(), self._device).resolve_conj().resolve_neg().contiguous()
        wide = self._word.itemsize
        # A view as wider words needs an aligned address, which a slice may lack.
        if flat.storage_offset() * flat.element_size() % wide or flat.data_ptr() % wide:
            flat = flat.clone()

        flat = flat.view(rows * stack, self._frame_bytes // flat.element_size()).view(self._word)
        return flat.view(rows, stack, *self._shape)

    def look_up(self, refs: Array) -> tuple[Tensor, Array]:
        """Return frames ``[F, words]`` and the indices in them of ``refs`` ``[K, stack]``, without the oldest."""
        memory = self._host_memory()
        if memory is not None:  # all frames as one array, without a copy
            return memory, refs

        # Copies of the newer frames of each stack; the oldest is not needed.
        copies = self.take(refs[:, 1:])
        positions = np.zeros_like(refs)
        positions[:, 1:] = np.arange(len(copies)).reshape(len(refs), refs.shape[1] - 1)
        return copies, positions

    def take(self, refs: Array) -> Tensor:
        """Return copies ``[refs.size, words]`` of the frames with indices ``refs`` (int32, any shape)."""
        memory = self._host_memory()
        flat = refs.reshape(-1)
        if memory is not None:
            # NumPy memory, because it uses huge pages where torch's does not.
            copies = torch.from_numpy(np.empty((len(flat), *self._shape), f"i{self._word.itemsize}"))
            if torch.get_num_threads() > 1:
                return torch.index_select(memory, 0, torch.from_numpy(flat), out=copies)

            # A single thread is faster if it prefetches the next frame.
            frame_bytes = self._shape[0] * self._word.itemsize
            kernels().gather(memory.data_ptr(), copies.data_ptr(), frame_bytes, flat)
            return copies

        frames = flat.astype(np.int64)
        (_, first), *more = self.columns
        if not more:
            return first.take(torch.from_numpy(frames))

        # Most frames are in the first column: read all rows from it (the blank frame for others), then patch.
        values = first.take(torch.from_numpy(np.where(frames < more[0][0], frames, 0)))
        for at, column, rows in self._by_column(frames, 1):
            values.index_copy_(0, upload(at, values.device), column.take(rows))
        return values

    def put(self, frames: Array, words: Tensor, source: Array) -> None:
        """Write ``words[source]`` to the frames with indices ``frames`` (both int64 ``[N]``)."""
        memory = self._host_memory()
        if memory is not None:
            kernels().copy(words.numpy(), source, memory.numpy(), frames)
            return

        for at, column, rows in self._by_column(frames):
            column.put(rows, words.index_select(0, upload(torch.from_numpy(source)[at], words.device)))

    def _host_memory(self) -> Tensor | None:
        """Return the frames ``[F, words]`` if they are one piece of host memory, which kernels need; else None."""
        column = self.columns[0][1]
        if len(self.columns) > 1 or not isinstance(column, TensorColumn) or self._device.type != "cpu":
            return None
        return column.data

    def _by_column(self, frames: Array, skip: int = 0) -> Iterator[tuple[Tensor, Column, Tensor]]:
        """Yield for each column with any of ``frames``: positions in ``frames``, the column, rows in it."""
        columns = self.columns[skip:]
        # Column c has the frames begin ... end - 1, where end is the next column's begin.
        ends = [begin for begin, _ in columns[1:]] + [len(self.counts)]

        for (begin, column), end in zip(columns, ends, strict=True):
            at = np.flatnonzero((frames >= begin) & (frames < end))
            if len(at):
                yield torch.from_numpy(at), column, torch.from_numpy(frames[at] - begin)

    def allocate(self, count: int) -> Array:
        """Return the indices (int64) of ``count`` free frames; the pool grows if needed.

        Growing adds a column; existing ones are not copied or moved.
        """
        # high - spare frames are in use, including the blank one; all others are free.
        missing = int(self.state["high"][0] - self.state["spare"][0]) + count - len(self.counts)
        if missing > 0:
            more = max(missing, len(self.counts) // 16)
            column = self._make(more, self._shape, self._word)
            self.columns = (*self.columns, (len(self.counts), column))
            self.counts = np.concatenate([self.counts, np.zeros(more, np.int32)])

        frames = np.empty(count, np.int64)
        kernels().allocate(self.state, self.counts, frames)
        return frames

    def dump(self, frames: Array) -> Dumped:
        """Return the ``frames`` (int, ``[F]``) as their column dumps them."""
        wanted = frames.astype(np.int64)
        if len(self.columns) == 1:
            return self.columns[0][1].dump(torch.from_numpy(wanted))

        # The columns may have different dictionaries: copy all frames into one column of the first one's kind.
        whole = self.columns[0][1].pool()
        whole.grow(len(wanted))
        whole.write(0, self.take(wanted.astype(np.int32)))
        return whole.dump(torch.arange(len(wanted)))

    def restore(self, parts: Sequence[Part], frames: int) -> dict[str, Any]:
        """Return the state of ``frames`` frames made from ``parts``, in one piece."""
        return {
            "sizes": [max(frames, self._first_size)],
            "columns": [self.columns[0][1].restore(parts, frames)],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the frames used so far, one state per allocated column of frames."""
        high = int(self.state["high"][0])
        begins = [begin for begin, _ in self.columns]
        sizes = np.diff([*begins, len(self.counts)]).tolist()
        # Only frames below ``high`` were ever written.
        used = [min(size, max(0, high - begin)) for size, begin in zip(sizes, begins, strict=True)]
        columns = [column.state_dict(n) for n, (_, column) in zip(used, self.columns, strict=True)]
        return {"sizes": sizes, "columns": columns}

    def check_state_dict(self, state: dict[str, Any]) -> int:
        """Return how many frames ``state`` holds; ValueError if it cannot be loaded."""
        sizes = state["sizes"]
        used = self._frames_in(state)
        frames = sum(used)

        # All pieces but the last non-empty one are full; those after it are empty.
        for first, size, rows in zip(np.cumsum([0, *sizes]).tolist(), sizes, used, strict=False):
            if type(size) is not int or rows != min(size, max(0, frames - first)):
                raise damaged(f"its pieces of {sizes} frames hold {used} frames")

        if len(sizes) != len(used) or not frames:
            raise damaged(f"its {len(sizes)} pieces hold {frames} frames, of which one must be blank")
        return frames

    def _frames_in(self, state: dict[str, Any]) -> list[int]:
        """Return the number of frames in each piece of ``state``."""
        return [self.columns[0][1].check_state_dict(piece) or 0 for piece in state["columns"]]

    def load_state_dict(self, state: dict[str, Any], refs: Array) -> None:
        """Restore the frames of a checked ``state`` and count their uses in ``refs`` (int32 ``[rows, stack]``)."""
        used = self._frames_in(state)
        # Allocate each piece for its frames, and the first at least as large as this pool's first.
        keep = state["sizes"][0] == self._first_size or (used[0] <= self._first_size and not any(used[1:]))
        sizes = list(used)
        columns: list[Column] = []
        if keep:
            sizes[0] = self._first_size
            columns = [self.columns[0][1]]
        begins = np.cumsum([0, *sizes]).tolist()
        columns += [self._make(size, self._shape, self._word) for size in sizes[len(columns) :]]
        for column, column_state in zip(columns, state["columns"], strict=True):
            column.load_state_dict(column_state)

        counts = np.bincount(refs.reshape(-1), minlength=begins[-1]).astype(np.int32)
        counts[0] = 0
        named = np.flatnonzero(counts)
        high = int(named[-1]) + 1 if len(named) else 1

        # Unreferenced frames below ``high`` form the free list: each count is -1 - (next frame), 0 at the end.
        free = np.flatnonzero(counts[1:high] == 0) + 1
        counts[free] = -1 - np.append(free[1:], 0)
        if len(free):
            self.state[0] = (high, free[0], free[-1], len(free))
        else:
            self.state[0] = (high, 0, 0, 0)

        self.counts = counts
        self._first_size = sizes[0]
        self.columns = tuple(zip(begins[:-1], columns, strict=True))


def match(words: Tensor, stored: Tensor, held: Array, hint: Array) -> tuple[Array, Array, int]:
    """Find the frames of new stacks ``words``, integers ``[N, stack, words]``, in ``stored`` ``[F, words]``.

    ``held`` ``[K, stack]`` are the indices in ``stored`` of the stacks of K stored rows (the oldest is ignored);
    ``hint`` int64 ``[N]`` is the stored row that each new row may continue, -1 for none.

    Returns:
        The row with which each row shares all but its newest frame, int8 ``[N]``: none (0), a stored row (1), or the
        previous row in the batch (2); whether each unshared frame equals the previous one in its stack, bool ``[N,
        stack]``; and the number of new frames.
    """
    if words.device.type != "cpu":
        return match_by_torch(words, stored, held, hint)

    shares = np.zeros(len(words), np.int8)
    repeats = np.zeros(words.shape[:2], np.bool_)
    new: int = kernels().match(words.numpy(), stored.numpy(), held, hint, shares, repeats)
    return shares, repeats, new


def match_by_torch(words: Tensor, stored: Tensor, held: Array, hint: Array) -> tuple[Array, Array, int]:
    """Do the same as `match` in torch, on any device, with a single sync."""
    rows, stack = words.shape[:2]
    hinted = np.flatnonzero(hint >= 0)
    at = upload(torch.from_numpy(hinted), words.device)
    picked = upload(torch.from_numpy(held[hint[hinted], 1:].reshape(-1)), words.device)

    # A row continues another if its frames 0 ... S - 2 equal the other's frames 1 ... S - 1.
    oldest = words[:, :-1].index_select(0, at)
    continues = ~oldest.ne(stored.index_select(0, picked).view_as(oldest)).flatten(1).any(1)
    rolls = ~words[1:, :-1].ne(words[:-1, 1:]).flatten(1).any(1)
    equal = ~words[:, 1:].ne(words[:, :-1]).any(2)
    flags = torch.cat([continues, rolls, equal.flatten()]).numpy(force=True)  # the only sync
    continues_, rolls_, equal_ = np.split(flags, [len(hinted), len(hinted) + rows - 1])

    shares = np.zeros(rows, np.int8)
    repeats = np.zeros((rows, stack), np.bool_)
    shares[1:][rolls_] = _BEFORE
    shares[hinted[continues_]] = _STORED  # takes precedence over the previous row
    repeats[:, 1:] = equal_.reshape(rows, stack - 1)
    repeats[shares != _NOTHING, :-1] = False
    new = int(np.where(shares == _NOTHING, stack, 1).sum() - repeats.sum())
    return shares, repeats, new


def _in_memory(frames: int, shape: tuple[int, ...], word: torch.dtype, device: torch.device) -> Column:
    """Return a column whose memory is allocated when first touched."""
    if device.type == "cpu":
        # NumPy memory, because it uses huge pages where torch's does not.
        return TensorColumn(torch.from_numpy(np.empty((frames, *shape), f"i{word.itemsize}")))
    return TensorColumn(torch.empty((frames, *shape), dtype=word, device=device))


def kernels() -> ModuleType:
    """Import the compiled kernels of the pool, only when frames are stored: numba takes 0.3 s to load."""
    from flatroll.kernels.rows import frame_rows

    return frame_rows


def check_stack(stack: int, shape: torch.Size, key: NestedKey | None = None) -> None:
    """Raise ValueError unless ``shape`` is a stack of ``stack`` frames, at least 2, on the first axis.

    >>> check_stack(4, torch.Size([84, 84, 4]), "observation")
    Traceback (most recent call last):
    ...
    ValueError: frame_stack=4 of 'observation' needs rows [4, *frame], oldest frame first, got [84, 84, 4]: move the \
stack to the first axis, or leave the key out of frame_stack
    """
    of = "" if key is None else f" of {key!r}"
    check_whole_number(f"frame_stack{of}", stack, 2)
    if not len(shape) or shape[0] != stack:
        raise ValueError(
            f"frame_stack={stack}{of} needs rows [{stack}, *frame], oldest frame first, got {list(shape)}: move the "
            "stack to the first axis, or leave the key out of frame_stack"
        )
