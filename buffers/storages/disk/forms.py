"""The file formats of an entry: plain, as single frames, or compressed."""

from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import differ
from flatroll.buffers.columns.zstd import frame_size
from flatroll.buffers.index.ring import Array
from flatroll.buffers.index.saved_tables import damaged
from flatroll.disk import Ragged
from flatroll.layout.checks import optional_package

BLOCK_ROWS = 8  # rows compressed together: adjacent rows share most of their bytes


class Form:
    """The format of an entry in files; this class stores plain values.

    Args:
        dtype: of the values.
        shape: of one row's value.

    Attributes:
        name: of the form, as a folder notes it.
        by_address: whether rows are copied from the file without decoding.
    """

    name = "plain"
    by_address = True

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        self.dtype = dtype
        self.shape = torch.Size(shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's value in memory."""
        return self.shape.numel() * self.dtype.itemsize

    def check_shape(self) -> None:
        """Raise ValueError if there can be no such values."""
        if not all(type(n) is int and n >= 0 for n in self.shape) or prod(self.shape) >= 2**48:
            raise ValueError(f"invalid shape {list(self.shape)} of values")

    def encode(self, values: Tensor) -> Tensor | Ragged:
        """Return what a file holds of the values ``[N, *shape]``; rows of it can be joined with those of others."""
        return values

    def check(self, column: Tensor | Ragged) -> None:
        """Raise ValueError if a file's ``column`` is not what `encode` gives; nothing is decoded."""
        if isinstance(column, Ragged) or column.dtype is not self.dtype or column.shape[1:] != self.shape:
            raise damaged(f"a file has values that are not {self.dtype} {list(self.shape)}")

    def decode(self, column: Ragged, ends: Array, rows: Array, target: Tensor, at: Array) -> None:
        """Read ``rows`` of a file to the rows ``at`` (both int64 ``[N]``) of ``target``.

        ``ends`` has the running sum of the lengths.
        """
        raise NotImplementedError


class FrameForm(Form):
    """Stores frame stacks ``[stack, *frame]`` as the single frames that each row adds.

    The stack of row r is the last ``stack`` frames up to its own: a row that does not continue the previous one, such
    as the first of every part, adds a whole stack. Parts can therefore be concatenated in any file.

    >>> form = FrameForm(torch.float32, torch.Size([3]))
    >>> form.encode(torch.arange(5.0).unfold(0, 3, 1))
    Ragged(values=tensor([0., 1., 2., 3., 4.]), lengths=tensor([3, 1, 1]))
    """

    name = "frames"

    @override
    def check_shape(self) -> None:
        super().check_shape()
        if not self.shape or not self.shape[0]:
            raise ValueError(f"invalid shape {list(self.shape)} of stacks")

    @override
    def encode(self, values: Tensor) -> Ragged:
        adds = torch.ones(values.shape[:2], dtype=torch.bool)  # [N, stack], the frames that each row adds
        if len(values) > 1:
            # Row r continues row r - 1 if its first frames equal the other's last frames bitwise.
            adds[1:, :-1] = differ(values[1:, :-1].contiguous(), values[:-1, 1:].contiguous()).unsqueeze(1)

        return Ragged(values[adds], adds.sum(1))

    @override
    def check(self, column: Tensor | Ragged) -> None:
        if not isinstance(column, Ragged) or column.values.dtype is not self.dtype:
            raise damaged(f"a file has frames that are not {self.dtype}")
        if column.values.shape[1:] != self.shape[1:]:
            raise damaged(f"a file has frames that are not of shape {list(self.shape[1:])}")
        if len(column.lengths) and int(column.lengths[0]) < self.shape[0]:
            raise damaged("the first row of a file has no complete stack of frames")


class ZstdForm(Form):
    """Compresses values losslessly with zstd, a few adjacent rows together; the first row holds the bytes.

    Raises:
        ImportError: zstandard is not installed.
    """

    name = "zstd"
    by_address = False

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        super().__init__(dtype, shape)
        self._zstandard: Any = optional_package("zstandard", "zstd", 'codec "zstd"')

    @override
    def encode(self, values: Tensor) -> Ragged:
        rows = values.contiguous().view(-1).view(torch.uint8).view(len(values), self.row_bytes).numpy()
        compressor = self._zstandard.ZstdCompressor(level=1)
        blocks = [compressor.compress(rows[i : i + BLOCK_ROWS]) for i in range(0, len(rows), BLOCK_ROWS)]

        lengths = torch.zeros(len(rows), dtype=torch.int64)
        lengths[::BLOCK_ROWS] = torch.tensor([len(block) for block in blocks], dtype=torch.int64)

        memory = torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8)
        return Ragged(memory, lengths)

    @override
    def check(self, column: Tensor | Ragged) -> None:
        if (
            not isinstance(column, Ragged)
            or column.values.dtype is not torch.uint8
            or column.values.ndim != 1
        ):
            raise damaged("a file has no compressed rows where it should")

        # Rows of a block are decoded together, so this limits memory use.
        heads = np.flatnonzero(np.append(column.lengths.numpy(), 1))
        if heads[0] or np.diff(heads).max(initial=0) > BLOCK_ROWS:
            raise damaged(f"compressed rows of a file are not in blocks of up to {BLOCK_ROWS}")

        if len(heads) > 1:  # decode one block to detect a wrong shape before allocating rows of that shape
            self._check_size(column.values[: int(column.lengths[0])].numpy().tobytes(), int(heads[1]))

    @override
    def decode(self, column: Ragged, ends: Array, rows: Array, target: Tensor, at: Array) -> None:
        memory = column.values.numpy()
        lengths = column.lengths.numpy()
        heads = np.flatnonzero(lengths)  # first row of each block, which extends to the next such row
        stops = np.append(heads[1:], len(lengths))

        into = target.view(len(target), -1).view(torch.uint8).numpy()
        decompressor = self._zstandard.ZstdDecompressor()

        which = np.searchsorted(heads, rows, "right") - 1
        order = np.argsort(which, kind="stable")
        for asked in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):  # the rows of each block
            block = which[asked[0]]
            head = heads[block]

            count = stops[block] - head
            data = memory[ends[head] - lengths[head] : ends[head]]
            places = at[asked]
            local = rows[asked] - head

            # Slices need most blocks as a whole: decode those directly into the target.
            whole = len(asked) == count and bool((np.diff(places) == 1).all())
            if whole and bool((local == np.arange(len(asked))).all()):
                self._decompress(decompressor, data, into[places[0] : places[0] + count])
            else:
                room = np.empty((count, self.row_bytes), np.uint8)
                self._decompress(decompressor, data, room)
                into[places] = room[local]

    def _check_size(self, compressed: bytes, rows: int) -> None:
        """Raise ValueError unless a block's header has the size of this many rows."""
        if frame_size(self._zstandard, compressed) != rows * self.row_bytes:
            raise damaged(f"a compressed block does not have {rows} rows")

    def _decompress(self, decompressor: Any, data: Array, room: Array) -> None:
        """Fill ``room`` with the values of a block; ValueError if it has others, before anything is allocated."""
        compressed = data.tobytes()
        self._check_size(compressed, len(room))

        try:
            with decompressor.stream_reader(compressed) as reader:
                got = reader.readinto(room.reshape(-1))
        except self._zstandard.ZstdError as error:
            raise damaged(f"a compressed block cannot be read ({error})") from None

        if got != room.nbytes:
            raise damaged("a compressed block is cut short")


FORMS: dict[str, type[Form]] = {form.name: form for form in (Form, FrameForm, ZstdForm)}
