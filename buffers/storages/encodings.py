"""In which form a storage keeps each column: plain, stacks of frames, compressed, or mostly zeros."""

import math
from collections.abc import Collection, Mapping
from functools import partial

import numpy as np
import torch

from flatroll.buffers.columns.base import Column, TensorColumn
from flatroll.buffers.columns.frame_stack import FrameColumn, check_stack
from flatroll.buffers.columns.sparse import SparseColumn
from flatroll.buffers.columns.zstd import ZstdColumn
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import NestedKey, as_tuple, next_key, plain_key

CODECS = ("zstd",)


class Encodings:
    """Which entries of a storage are kept in a smaller form, by key, for the root and for ``"next"``.

    The form of every column is decided here and nowhere else. A new form needs a `Column` that keeps it, its option
    checked in ``__init__``, its bytes in :meth:`row_bytes` and its column in :meth:`column`. The arguments and errors
    are those of `LazyTensorStorage`; ImportError if the codec's package is not installed.
    """

    def __init__(
        self,
        frame_stack: Mapping[NestedKey, int] | None = None,
        codec: Mapping[NestedKey, str] | None = None,
        sparse: Collection[NestedKey] = (),
    ) -> None:
        stacks = {plain_key(key): frames for key, frames in (frame_stack or {}).items()}
        codecs = {plain_key(key): name for key, name in (codec or {}).items()}
        for key, frames in stacks.items():
            whole_number(f"frame_stack of {key!r}", frames, 2)
        for key, name in codecs.items():
            if name not in CODECS:
                raise ValueError(f"codec of {key!r} must be one of {CODECS}, got {name!r}")
        if codecs:
            ZstdColumn(0, (1,), torch.uint8)  # the ImportError now, not at the first extend
        # A storage that is not compact keeps next observations in columns of their own, in the same form.
        self.frame_stack = stacks | {next_key(key): frames for key, frames in stacks.items()}
        self.codec = codecs | {next_key(key): name for key, name in codecs.items()}
        if isinstance(sparse, str):
            raise TypeError(f"sparse must be a list of keys, got the string {sparse!r}: write [{sparse!r}]")
        self.sparse = set(map(plain_key, sparse))
        if both := self.sparse & {*self.frame_stack, *self.codec}:
            raise ValueError(
                f"sparse names {sorted(map(repr, both))}, which frame_stack or codec keep already"
            )

    def row_bytes(self, like: Mapping[NestedKey, tuple[torch.dtype, torch.Size]]) -> int:
        """Bytes of a row of columns ``like`` these, as far as known beforehand: compressed values count as nothing.

        ValueError if an option names an entry that is not in ``like``, or one that is no stack.
        """
        present = sorted(map(repr, like))
        for option, asked in (("frame_stack", self.frame_stack), ("codec", self.codec)):
            for key in asked:
                if as_tuple(key)[0] != "next" and key not in like:
                    raise ValueError(
                        f"{option} names {key!r}, which the batch does not have: it has {present}"
                    )
        total = 0
        for key, (dtype, shape) in like.items():
            size = math.prod(shape) * dtype.itemsize
            if key in self.frame_stack:
                check_stack(self.frame_stack[key], shape, key)
                # One frame, and 4 bytes for the number of each frame in the stack.
                size = size // self.frame_stack[key] + 4 * self.frame_stack[key]
            if key in self.sparse:
                size = 4
            total += 0 if key in self.codec else size
        if absent := self.sparse - set(like):
            raise ValueError(
                f"sparse names {sorted(map(repr, absent))}, which the batch does not have: it has {present}"
            )
        return total

    def column(
        self, key: NestedKey, rows: int, dtype: torch.dtype, shape: torch.Size, device: torch.device
    ) -> Column:
        """A column in memory of ``rows`` rows for the entry ``key``, in the form asked for."""
        if key in self.sparse:
            return SparseColumn(rows, shape, dtype, device)
        if key in self.frame_stack:
            make = partial(ZstdColumn, device=device) if key in self.codec else None
            return FrameColumn(rows, self.frame_stack[key], shape, dtype, device, make)
        if key in self.codec:
            return ZstdColumn(rows, shape, dtype, device)
        if device.type != "cpu":
            return TensorColumn(torch.empty((rows, *shape), dtype=dtype, device=device))
        # Host memory from NumPy, which asks the system for large pages where they pay, from a cache line on.
        size = rows * math.prod(shape) * dtype.itemsize
        memory = np.empty(size + 64, np.uint8)
        first = -memory.ctypes.data % 64
        return TensorColumn(torch.from_numpy(memory[first : first + size]).view(dtype).view(rows, *shape))
