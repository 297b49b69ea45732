"""In-memory storages: columns allocated at the first batch, or the caller's own tensors."""

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from flatroll.buffers.columns.column import Column, RowForm, TensorColumn
from flatroll.buffers.columns.frame_stack import FrameColumn, check_stack
from flatroll.buffers.columns.sparse import SparseColumn
from flatroll.buffers.columns.zstd import ZstdColumn
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.storages.access import Access, AccessedStorage, WithoutBuffer
from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.buffers.storages.free_space import check_memory
from flatroll.buffers.storages.item_kinds import Structure, as_tensor, map_rows
from flatroll.buffers.storages.records import Rows
from flatroll.kernels.rows.host_memory import host_memory
from flatroll.layout.checks import check_choice, check_key_names, check_whole_number
from flatroll.layout.keys import NestedKey, as_tuple, next_key, plain_key

CODECS = ("zstd",)


class Encodings:
    """The encoding options of a storage: which entries are frame stacks, compressed or sparse, by key.

    `ColumnStorage.make_column` is asked first, for columns of the user's own, lossy ones too; the form of all others,
    which give back what they were given, is decided here. A new form needs a `Column` that keeps it, its option checked
    in ``__init__``, its bytes in :meth:`row_bytes` and its column in :meth:`column`. The arguments and errors
    are those of `LazyTensorStorage`; ImportError if the codec's package is not installed.
    """

    def __init__(
        self,
        frame_stack: Mapping[NestedKey, int] | None = None,
        codec: Mapping[NestedKey, str] | None = None,
        sparse: Collection[NestedKey] = (),
    ) -> None:
        for name, value, example in (("frame_stack", frame_stack, 4), ("codec", codec, "zstd")):
            if value is not None and not isinstance(value, Mapping):
                raise TypeError(
                    f"{name} must be a dict by entry, e.g. {name}={{'observation': {example!r}}}, got {value!r}"
                )

        stacks = {plain_key(key): frames for key, frames in (frame_stack or {}).items()}
        codecs = {plain_key(key): name for key, name in (codec or {}).items()}
        for key, frames in stacks.items():
            check_whole_number(f"frame_stack of {key!r}", frames)
        for key, name in codecs.items():
            check_choice(f"codec of {key!r}", name, CODECS)
        if codecs:
            ZstdColumn(0, (1,), torch.uint8)  # raise the ImportError now, not at the first extend

        # A stack of one frame is an entry like others: pipelines have the number as a setting.
        self._single_frames = [key for key, frames in stacks.items() if frames == 1]
        stacks = {key: frames for key, frames in stacks.items() if frames > 1}
        # A storage that is not compact has separate columns for next observations, in the same form.
        self.frame_stack = stacks | {next_key(key): frames for key, frames in stacks.items()}
        self.codec = codecs | {next_key(key): name for key, name in codecs.items()}

        self.sparse = set(map(plain_key, check_key_names("sparse", sparse)))
        both = self.sparse & {*self.frame_stack, *self.codec}
        if both:
            raise ValueError(
                f"sparse names {sorted(both, key=repr)}, which frame_stack or codec name as well"
            )

    def row_bytes(self, like: RowForm) -> int:
        """Estimate the bytes of one row from dtypes and shapes ``like``; compressed entries count as 0.

        ValueError if an option names an entry that is not in ``like``, or one that is no stack.
        """
        present = sorted(like, key=repr)
        stacks = [*self.frame_stack, *self._single_frames]
        for option, asked in (("frame_stack", stacks), ("codec", [*self.codec])):
            for key in asked:
                if as_tuple(key)[0] != "next" and key not in like:
                    raise ValueError(f"{option} names {key!r}, which the batch lacks: it has {present}")

        total = 0
        for key, (dtype, shape) in like.items():
            size = math.prod(shape) * dtype.itemsize
            if key in self.frame_stack:
                check_stack(self.frame_stack[key], shape, key)
                # One frame, plus 4 bytes for each frame number of the stack.
                size = size // self.frame_stack[key] + 4 * self.frame_stack[key]
            if key in self.sparse:
                size = 4
            if key not in self.codec:
                total += size

        absent = self.sparse - set(like)
        if absent:
            raise ValueError(f"sparse names {sorted(absent, key=repr)}, not in the batch: it has {present}")
        return total

    def column(
        self, key: NestedKey, rows: int, dtype: torch.dtype, shape: torch.Size, device: torch.device
    ) -> Column:
        """Create an in-memory column of ``rows`` rows for the entry ``key``, in its encoding."""
        if key in self.sparse:
            return SparseColumn(rows, shape, dtype, device)
        if key in self.frame_stack:
            make = None
            if key in self.codec:
                make = partial(ZstdColumn, device=device)
            return FrameColumn(rows, self.frame_stack[key], shape, dtype, device, make)

        if key in self.codec:
            return ZstdColumn(rows, shape, dtype, device)
        if device.type != "cpu":
            return TensorColumn(torch.empty((rows, *shape), dtype=dtype, device=device))
        return TensorColumn(host_memory(rows, dtype, shape))


class LazyTensorStorage(ColumnStorage):
    """Stores rows in memory, one tensor per entry, allocated at the first ``extend``.

    Every batch must have the entries, shapes and dtypes of the first one; nothing is dropped or cast silently. To
    store an entry in a custom form, for example as bfloat16, override ``make_column`` (see `ColumnStorage`).

    Args:
        max_size: number of rows; with ``ndim`` of 2 or more, of all lanes together, rounded up to whole steps.
        device: device of the tensors, default ``"cpu"``.
        ndim: number of batch dimensions, default 1 (flat batches). With 2, batches are ``[lanes, time]`` and the
            storage is ``[max_size / lanes, lanes]``; rows of a lane follow each other.
        compact_obs: keep each observation once. Every entry that is both at the root and under ``"next"``
            (observations, step counts, recurrent states) is stored at the root only; ``("next", ...)`` of a row
            is read from the next row, or from a side pool if no stored row equals it bitwise (ends of trajectories
            and of interrupted writes). Samples are bit-equal to those of a full storage.
        frame_stack: frames per stack by key, ``{"observation": 4}``: observations ``[4, *frame]`` are kept as
            single frames, each once, and stacked again on reading, bit-equal. 1 stores the entry as it is.
        codec: compression by key, ``{"observation": "zstd"}``: lossless, decoded in threads on reading. Needs the
            extra ``zstd``.
        sparse: keys of entries most of whose rows are zeros, ``["recurrent_state"]`` of a collector with
            ``state_stride``: such rows take 4 bytes. Lossless.
        compilable: see `Storage`.

    Raises:
        ValueError: ``max_size`` or ``ndim`` below 1, an unknown codec, a frame stack of less than 1 frame, or an entry
            that is both sparse and one of these; at the first extend, ``sparse`` names an entry that is not there.
        TypeError: ``sparse`` is a single name; ``codec`` or ``frame_stack`` names no entries.
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

    copies_rows = True

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
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, device=device, ndim=ndim, compact_obs=compact_obs)
        self._encodings = Encodings(frame_stack, codec, sparse)
        self.frame_stack = self._encodings.frame_stack
        self.codec = self._encodings.codec
        self.sparse = self._encodings.sparse
        self.shares = bool(self.frame_stack)

    @override
    def _allocate(self, like: RowForm) -> dict[NestedKey, Column]:
        other = "LazyMemmapStorage" if self.device.type == "cpu" else "device='cpu'"
        instead = [other]
        if not self.compact_obs and any(next_key(key) in like for key in like):
            instead.append("compact_obs=True")
        if not self.frame_stack and not self.codec:
            instead.append("frame_stack and codec for images")

        check_memory(self.capacity, self._encodings.row_bytes(like), self.device, instead)
        return {
            key: self._encodings.column(key, self.capacity, dtype, shape, self.device)
            for key, (dtype, shape) in like.items()
        }

    @override
    def _blank_column(self, key: NestedKey, dtype: torch.dtype, shape: torch.Size) -> Column:
        return self._encodings.column(key, 0, dtype, shape, self.device)


class TensorStorage(ColumnStorage):
    """Uses existing tensors, such as a data set: a tensordict, a tensor or a tree of tensors.

    Nothing is copied, except tensors whose rows share memory (``expand``): the buffer reads and writes the caller's
    tensors. All rows count as stored from the start, so a data set can be sampled at once, and ``storage[3]`` reads
    it without a buffer; the first row written overwrites row 0. Call ``buffer.empty()`` to start empty.

    Args:
        storage: the data, all of one leading size, ``[max_size, ...]``.
        max_size: number of rows to use, default all.
        device: required device of the tensors, default their own.
        ndim: number of batch dimensions of ``storage``, time first, default 1.
        compact_obs: as in `LazyTensorStorage`; the entries under ``"next"`` are read once, and then no longer used.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: leaves of different lengths, or on another device.

    >>> import torch
    >>> from flatroll.buffers import ReplayBuffer
    >>> buffer = ReplayBuffer(storage=TensorStorage(torch.arange(4.0)))
    >>> buffer.add(torch.tensor(9.0)), buffer[:]
    (0, tensor([9., 1., 2., 3.]))
    """

    def __init__(
        self,
        storage: object,
        max_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        ndim: int = 1,
        compact_obs: bool = False,
        compilable: bool = False,
    ) -> None:
        check_whole_number("ndim", ndim)
        if max_size is not None:
            check_whole_number("max_size", max_size)

        try:
            columns = Structure.of(storage).columns(storage)
        except (TypeError, ValueError) as error:
            raise type(error)(f"storage must be tensors of one length: {error}") from error
        if not columns:
            raise ValueError("storage has no tensors: LazyTensorStorage allocates them from the first batch")

        first = next(iter(columns.values()))
        if any(c.ndim < ndim or c.shape[:ndim] != first.shape[:ndim] for c in columns.values()):
            sizes = {key: list(c.shape) for key, c in columns.items()}
            raise ValueError(f"all tensors of storage must have the same first {ndim} sizes, got {sizes}")

        rows = math.prod(first.shape[:ndim])
        if not rows:
            raise ValueError(f"storage must have at least one row, got tensors of shape {list(first.shape)}")
        if max_size is not None and max_size > rows:
            raise ValueError(f"max_size={max_size} is more than the {rows} rows of storage")

        if max_size is None:
            max_size = rows
        if device is None:
            device = first.device
        super().__init__(max_size, device=device, ndim=ndim, compact_obs=compact_obs)
        for key, column in columns.items():
            if column.device != first.device or column.device.type != self.device.type:
                raise ValueError(f"storage's {key!r} is on {column.device}, expected {self.device}")
        self.lanes = first.shape[1:ndim]

        # Until a buffer makes columns of it, the caller's data is read as it is, cut to whole steps of all lanes.
        steps = self.capacity // self.lanes.numel()
        whole_steps = map_rows(storage, lambda leaf: as_tensor(leaf)[:steps])
        self._alone = GivenRows(pytree.tree_map(_copy_shared_rows, whole_steps), self.capacity)
        self._first_columns: dict[NestedKey, Tensor] = {}

    @override
    def fill(self, write: Callable[[Any, None], Any]) -> None:
        given = self._alone
        if not isinstance(given, GivenRows):
            return

        def flat(leaf: Any) -> Any:
            if self.ndim > 1:
                return leaf.view(-1, *leaf.shape[self.ndim :])
            return leaf

        self.filling = True
        try:
            write(map_rows(given.data, flat), None)
        finally:
            self.filling = False

    @override
    def prepare(
        self, batch: object, final: TensorDictBase | None, keys: BoundaryKeys | None, whole: bool = False
    ) -> Rows:
        # The first batch is the storage's own contents: its tensors become the columns without a copy.
        if not self.filling:
            return super().prepare(batch, final, keys, whole)

        self._first_columns = Structure.of(batch).columns(batch)
        rows = super().prepare(batch, final, keys)

        self._first_columns = {}
        self._alone = WithoutBuffer()
        return rows

    @override
    def _allocate(self, like: RowForm) -> dict[NestedKey, Column]:
        return {key: TensorColumn(self._first_columns[key]) for key in like}


class GivenRows(Access):
    """Access to the ``rows`` rows of tensors that no buffer has made columns of.

    Args:
        data: a tensordict, a tensor or a tree of tensors.
        rows: number of rows of all lanes.
    """

    def __init__(self, data: Any, rows: int) -> None:
        self.data = data
        self.rows = rows

    @override
    def count(self) -> int:
        return self.rows

    @override
    def get(self, storage: AccessedStorage, index: Any) -> Any:
        return map_rows(self.data, lambda leaf: leaf[index].clone())

    @override
    def set(self, storage: AccessedStorage, index: Any, data: object) -> None:
        if isinstance(self.data, TensorDictBase):
            self.data[index] = data
            return

        for column, values in zip(pytree.tree_leaves(self.data), pytree.tree_leaves(data), strict=True):
            column[index] = as_tensor(values)


def _copy_shared_rows(leaf: Any) -> Any:
    """A tensor, or a tensordict of them, copied where values share memory: a row written would change others."""
    if isinstance(leaf, TensorDictBase):
        return leaf.apply(_copy_shared_rows)
    if leaf.layout is not torch.strided:
        return leaf

    extent = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    if leaf.numel() > extent:
        return leaf.clone(memory_format=torch.contiguous_format)
    return leaf
