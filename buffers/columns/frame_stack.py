"""Frame stacks kept as single frames, each once."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.columns.base import After, Column
from flatroll.buffers.columns.frame_pool import FramePool, Make, in_memory, kernels, match
from flatroll.buffers.index.ring import Array
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import NestedKey


class FrameColumn(Column):
    """Stacks of ``stack`` frames per row, kept as a pool of single frames and the numbers of each row's frames.

    A row's stack shares all frames but its newest with the row written just before it, or with the stored row that
    `After` names, where they agree bit by bit; frames that equal the one before them in their stack (the repeated
    first frame of an episode) are stored once. Whatever cannot be shared is stored in full: nothing is assumed
    about the stacks, and what is read is bit-equal to what was written. Frames that no row names any more are used
    again. A row costs one frame and ``4 * stack + 4`` bytes where stacks roll on.

    Frames are kept as integers as wide as divides them, whatever their dtype, on the device; who names them is
    kept on the host. Readers need no lock: they see the frames of some moment, never a number out of range.

    Args:
        rows: number of rows.
        stack: frames per row, at least 2, oldest first.
        shape: of one row's value, ``[stack, *frame]``.
        dtype: of the values, any.
        device: of the frames, default ``"cpu"``.
        make: makes a column of so many frames, given (frames, shape of the words, integer dtype); default is a
            `TensorColumn` in memory. It is called again when the pool is full, for more of them.

    Raises:
        ValueError: a stack of less than 2, or values whose first axis is not the stack.

    >>> frames = torch.arange(10.0)
    >>> column = FrameColumn(100, 4, torch.Size([4]), torch.float32)
    >>> column.write(0, frames.unfold(0, 4, 1))  # 7 stacks of 10 frames
    >>> column.take(torch.tensor([6, 0])), column.frames_in_use
    (tensor([[6., 7., 8., 9.],
            [0., 1., 2., 3.]]), 10)
    """

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
        self.dtype, self.shape = dtype, torch.Size(shape)
        size = math.prod(shape[1:]) * dtype.itemsize
        where = torch.device(device)
        make = partial(in_memory, device=where) if make is None else make
        self._frames = FramePool(rows + rows // 50 + 64, size, where, make)
        self._main = self
        self._refs: Array = np.zeros((rows, stack), np.int32)

    def write(self, slot: int, values: Tensor, after: After | None = None) -> None:
        """See `Column`; the first row may also continue the slot before it."""
        slots = np.arange(slot, slot + len(values))
        self._store(slots, values, after, (slot - 1) % len(self._refs) if self._main is self else None)

    def put(self, slots: Tensor, values: Tensor, after: After | None = None) -> None:
        """See `Column`."""
        self._store(slots.numpy(force=True), values, after)

    def take(self, slots: Tensor) -> Tensor:
        """See `Column`."""
        # The numbers first, the frames after them: a pool that has grown in between is larger, not smaller.
        refs = self._refs.take(slots.numpy(force=True), 0)
        words = self._frames.take(refs)
        return words.view(-1).view(self.dtype).view(len(slots), *self.shape)

    def pool(self) -> "FrameColumn":
        """A side column that shares the frames; its `After` names slots of the main column."""
        side = object.__new__(FrameColumn)
        side.dtype, side.shape = self.dtype, self.shape
        side._frames, side._main = self._frames, self._main
        side._refs = np.zeros((0, self._refs.shape[1]), np.int32)
        return side

    def grow(self, rows: int) -> None:
        """See `Column`; the frames grow when they are needed."""
        if rows > len(self._refs):
            larger = np.zeros((rows, self._refs.shape[1]), np.int32)
            larger[: len(self._refs)] = self._refs
            self._refs = larger

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers, and for the main column of the whole pool of frames."""
        return int(self._refs.nbytes) + (self._frames.nbytes if self._main is self else 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that shares all frames but one."""
        return self._frames.row_bytes + 4 * self.shape[0]

    @property
    def frames_in_use(self) -> int:
        """Frames that rows name, those of side columns included."""
        return self._frames.in_use

    def state_dict(self, rows: int) -> dict[str, Any]:
        """See `Column`; side columns give values, so that each state stands alone."""
        if self._main is not self:
            return super().state_dict(rows)
        return {"refs": torch.from_numpy(self._refs[:rows].copy()), "frames": self._frames.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Column`. Side columns made before are void: make new ones."""
        if self._main is not self:
            return super().load_state_dict(state)
        refs = state["refs"].numpy(force=True)
        self.grow(len(refs))
        self._refs[:] = 0
        self._frames.load_state_dict(state["frames"], refs)
        self._refs[: len(refs)] = refs

    def _store(self, slots: Array, values: Tensor, after: After | None, before: int | None = None) -> None:
        if not len(slots):
            return
        rows, stack = len(slots), self._refs.shape[1]
        words = self._frames.words(values, rows, stack)
        hint, at = np.full(rows, -1), np.zeros(0, np.int64)
        if after is not None:
            hint[after.rows.numpy(force=True)] = np.arange(len(after.rows))
            at = after.slots.numpy(force=True)
        if before is not None and hint[0] < 0:
            hint[0], at = len(at), np.append(at, before)
        held = self._main._refs.take(at, 0)
        shares, repeats, new = match(words, *self._frames.look_up(held), hint)
        pool = self._frames
        kernels().replace(pool.state, pool.counts, self._refs, slots, hint, held, shares)
        frames, source = pool.allocate(new), np.empty(new, np.int64)
        kernels().assign(pool.counts, self._refs, slots, shares, repeats, frames, source)
        pool.put(frames, words.flatten(0, 1), source)


def check_stack(stack: int, shape: torch.Size, key: NestedKey | None = None) -> None:
    """ValueError unless a row of ``shape`` is a stack of ``stack`` frames, at least 2.

    >>> check_stack(4, torch.Size([84, 84, 4]), "observation")
    Traceback (most recent call last):
    ...
    ValueError: frame_stack=4 of 'observation' needs rows [4, *frame], oldest frame first, got [84, 84, 4]: move the \
stack to the first axis, or leave the key out of frame_stack
    """
    of = "" if key is None else f" of {key!r}"
    whole_number(f"frame_stack{of}", stack, 2)
    if not len(shape) or shape[0] != stack:
        raise ValueError(
            f"frame_stack={stack}{of} needs rows [{stack}, *frame], oldest frame first, got {list(shape)}: move the "
            "stack to the first axis, or leave the key out of frame_stack"
        )
