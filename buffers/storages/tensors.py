"""Where rows are kept in memory: in columns allocated from the first batch, or given by the caller."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.base import Column, TensorColumn
from flatroll.buffers.columns.sparse import SparseColumn, checked_sparse
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.storages.base import Rows
from flatroll.buffers.storages.columns import ColumnStorage
from flatroll.buffers.storages.encodings import checked_encodings, encoded, encoded_bytes
from flatroll.buffers.storages.free_space import check_memory
from flatroll.buffers.storages.item_kinds import Structure, map_rows
from flatroll.layout.keys import NestedKey, next_key


class LazyTensorStorage(ColumnStorage):
    """Rows in contiguous tensors, one per entry, allocated at the first extend.

    Every batch must have the entries, shapes and dtypes of the first one; nothing is dropped or cast silently.

    Args:
        max_size: number of rows; with ``ndim`` of 2 or more, of all lanes together.
        device: where the tensors are kept, default ``"cpu"``.
        ndim: number of batch dimensions, default 1 (flat batches). With 2, batches are ``[lanes, time]`` and the
            storage is ``[max_size // lanes, lanes]``; rows of a lane follow each other.
        compact_obs: keep each observation once. Every entry that stands both at the root and under ``"next"``
            (observations, step counts, recurrent states) is stored at the root only; ``("next", ...)`` of a row
            is read from the row that follows it, or from a side pool where no stored row agrees with it bit by
            bit (ends of trajectories and of interrupted writes). Samples are bit-equal to those of a full storage.
        frame_stack: frames per stack by key, ``{"observation": 4}``: observations ``[4, *frame]`` are kept as
            single frames, each once, and stacked again on reading, bit-equal.
        codec: compression by key, ``{"observation": "zstd"}``: lossless, decoded in threads on reading. Needs the
            extra ``zstd``.
        sparse: keys of entries most of whose rows are zeros, ``["recurrent_state"]`` of a collector with
            ``state_stride``: such rows take 4 bytes. Lossless.

    Raises:
        ValueError: ``max_size`` or ``ndim`` below 1, an unknown codec, a frame stack of less than 2 frames, or an entry
            that is both sparse and one of these; at the first extend, ``sparse`` names an entry that is not there.
        TypeError: ``sparse`` is a single name.
        MemoryError: at the first extend, if the columns do not fit in the memory that is free.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import ReplayBuffer
    >>> obs = torch.arange(4.0)
    >>> batch = TensorDict({"observation": obs[:3], "next": {"observation": obs[1:],
    ...     "done": torch.tensor([False, False, True])}}, [3])
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100, compact_obs=True))
    >>> rows = buffer.extend(batch)
    >>> buffer[:]["next", "observation"], buffer.storage.bytes_per_row  # 4 for obs, 1 for done
    (tensor([1., 2., 3.]), 5)
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compact_obs: bool = False,
        frame_stack: Mapping[NestedKey, int] | None = None,
        codec: Mapping[NestedKey, str] | None = None,
        sparse: Collection[NestedKey] = (),
    ) -> None:
        super().__init__(max_size, device=device, ndim=ndim, compact_obs=compact_obs)
        self.frame_stack, self.codec = checked_encodings(frame_stack, codec)
        self.sparse = checked_sparse(sparse)
        if both := self.sparse & {*self.frame_stack, *self.codec}:
            raise ValueError(
                f"sparse names {sorted(map(repr, both))}, which frame_stack or codec keep already"
            )
        self.shares = bool(self.frame_stack)

    def _allocate(self, like: Mapping[NestedKey, tuple[torch.dtype, torch.Size]]) -> dict[NestedKey, Column]:
        sizes = encoded_bytes(like, self.frame_stack, self.codec) | dict.fromkeys(self.sparse, 4)
        if absent := self.sparse - set(like):
            raise ValueError(
                f"sparse names {sorted(map(repr, absent))}, which the batch does not have: it has "
                f"{sorted(map(repr, like))}"
            )
        check_memory(self.capacity, sum(sizes.values()), self.device, self._ways_out(like))
        columns: dict[NestedKey, Column] = {}
        for key, (dtype, shape) in like.items():
            if key in self.sparse:
                columns[key] = SparseColumn(self.capacity, shape, dtype, self.device)
                continue
            stack, codec = self.frame_stack.get(key), self.codec.get(key)
            columns[key] = encoded(self.capacity, dtype, shape, self.device, stack, codec) or TensorColumn(
                _empty((self.capacity, *shape), dtype, self.device)
            )
        return columns

    def _ways_out(self, like: Mapping[NestedKey, Any]) -> list[str]:
        """What takes less memory than this storage, for errors."""
        ways = ["LazyMemmapStorage" if self.device.type == "cpu" else "device='cpu'"]
        if not self.compact_obs and any(next_key(key) in like for key in like):
            ways.append("compact_obs=True")
        if not self.frame_stack and not self.codec:
            ways.append("frame_stack and codec for images")
        return ways


class TensorStorage(ColumnStorage):
    """Rows in tensors that the caller made: a tensordict, a tensor or a tree of tensors with one leading size.

    Nothing is copied: the buffer reads and writes the caller's tensors. All rows count as stored from the start, so
    a dataset can be sampled at once; the first row written overwrites row 0. Start empty with ``buffer.empty()``.

    Args:
        storage: the data, ``[max_size, ...]``.
        max_size: number of rows to use, default all.
        device: where the tensors must be, default where they are.
        ndim: number of batch dimensions of ``storage``, time first, default 1.
        compact_obs: as in `LazyTensorStorage`; the entries under ``"next"`` are read once, and then no longer used.

    Raises:
        TypeError: a leaf is no tensor.
        ValueError: leaves of different lengths, or on another device.

    >>> import torch
    >>> from flatroll.buffers import ReplayBuffer
    >>> buffer = ReplayBuffer(storage=TensorStorage(torch.arange(4.0)))
    >>> buffer.add(torch.tensor(9.0)), buffer[:]
    (0, tensor([9., 1., 2., 3.]))
    """

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        ndim: int = 1,
        compact_obs: bool = False,
    ) -> None:
        columns = Structure.of(storage).columns(storage)
        if not columns:
            raise ValueError("storage has no tensors: LazyTensorStorage allocates them from the first batch")
        first = next(iter(columns.values()))
        if any(c.ndim < ndim or c.shape[:ndim] != first.shape[:ndim] for c in columns.values()):
            sizes = {key: list(c.shape) for key, c in columns.items()}
            raise ValueError(f"all tensors of storage must have the same first {ndim} sizes, got {sizes}")
        rows = math.prod(first.shape[:ndim])
        if max_size is not None and max_size > rows:
            raise ValueError(f"max_size={max_size} is more than the {rows} rows of storage")
        super().__init__(
            rows if max_size is None else max_size,
            device=device or first.device,
            ndim=ndim,
            compact_obs=compact_obs,
        )
        wrong = [
            key for key, c in columns.items() if c.device != first.device or c.device.type != self.device.type
        ]
        if wrong:
            raise ValueError(
                f"storage's {wrong[0]!r} is on {columns[wrong[0]].device}, expected {self.device}"
            )
        self.lanes = first.shape[1:ndim]
        self._given: dict[NestedKey, Tensor] = {}
        steps = self.capacity // self.lanes.numel()
        self._contents: Any = _flattened(storage, steps, ndim)

    @property
    def contents(self) -> Any:
        """See `Storage`."""
        return self._contents

    def prepare(
        self, batch: Any, final: TensorDictBase | None, keys: BoundaryKeys | None, whole: bool = False
    ) -> Rows:
        """See `ColumnStorage`; the storage's own contents come first and are not copied."""
        if self.columns or self._contents is None:
            return super().prepare(batch, final, keys, whole)
        self._given = Structure.of(batch).columns(batch)
        rows = super().prepare(batch, final, keys)
        self._given, self._contents = {}, None
        return rows

    def _allocate(self, like: Mapping[NestedKey, tuple[torch.dtype, torch.Size]]) -> dict[NestedKey, Column]:
        return {key: TensorColumn(self._given[key]) for key in like}


def _flattened(storage: Any, steps: int, ndim: int) -> Any:
    if ndim == 1:
        return map_rows(storage, lambda t: t[:steps])
    if isinstance(storage, TensorDictBase):
        return storage[:steps].view(-1, *storage.batch_size[ndim:])
    return map_rows(storage, lambda t: t[:steps].view(-1, *t.shape[ndim:]))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Unset memory; on the host from NumPy, which asks the system for large pages where they pay."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    first = -memory.ctypes.data % 64  # the start of a cache line
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(shape)
