"""The forms that an entry of the rows has in files: as it is, as single frames, or compressed."""

from abc import ABC
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.base import differ
from flatroll.buffers.index.ring import Array
from flatroll.buffers.index.saved_tables import damaged
from flatroll.disk import Ragged
from flatroll.layout.export import optional_package

BLOCK_ROWS = 8  # rows that are compressed together: neighbours have most of their bytes in common


class Form(ABC):
    """What files hold of an entry. This one holds its values as they are.

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
        self.dtype, self.shape = dtype, torch.Size(shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's value in memory."""
        return self.shape.numel() * self.dtype.itemsize

    def encode(self, values: Tensor) -> Tensor | Ragged:
        """Return what a file holds of the values ``[N, *shape]``; rows of it can be joined with those of others."""
        return values

    def check(self, column: Tensor | Ragged) -> None:
        """Raise ValueError if a file's ``column`` is not what `encode` gives; nothing is decoded."""
        if isinstance(column, Ragged) or column.dtype is not self.dtype or column.shape[1:] != self.shape:
            raise damaged(f"a file has other values than {self.dtype} {list(self.shape)}")

    def decode(self, column: Ragged, ends: Array, rows: Array) -> Tensor:
        """Return the ``rows`` (int64 ``[N]``) of a file, where ``ends`` has the running sum of the lengths."""
        raise NotImplementedError


class FrameForm(Form):
    """Frame stacks ``[stack, *frame]`` as single frames, those that a row adds to the stack before it.

    The stack of row r is the last ``stack`` frames up to and with its own: a row that does not go on from the one
    before it, as the first of every part, adds a whole stack. So rows are right in whatever file they come to stand.

    >>> form = FrameForm(torch.float32, torch.Size([3]))
    >>> form.encode(torch.arange(5.0).unfold(0, 3, 1))
    Ragged(values=tensor([0., 1., 2., 3., 4.]), lengths=tensor([3, 1, 1]))
    """

    name = "frames"

    @override
    def encode(self, values: Tensor) -> Ragged:
        adds = torch.ones(values.shape[:2], dtype=torch.bool)  # [N, stack], the frames that a row adds
        if len(values) > 1:
            # Row r rolls on from row r - 1 if its first frames are the last ones of that, bit by bit.
            adds[1:, :-1] = differ(values[1:, :-1].contiguous(), values[:-1, 1:].contiguous()).unsqueeze(1)
        return Ragged(values[adds], adds.sum(1))

    @override
    def check(self, column: Tensor | Ragged) -> None:
        if not isinstance(column, Ragged) or column.values.dtype is not self.dtype:
            raise damaged(f"a file has other frames than of {self.dtype}")
        if column.values.shape[1:] != self.shape[1:]:
            raise damaged(f"a file has other frames than {list(self.shape[1:])}")
        if len(column.lengths) and int(column.lengths[0]) < self.shape[0]:
            raise damaged("the first row of a file has no whole stack of frames")


class ZstdForm(Form):
    """Values compressed losslessly with zstd, a few neighbouring rows together; the first of them has the bytes.

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
        return Ragged(torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8), lengths)

    @override
    def check(self, column: Tensor | Ragged) -> None:
        if (
            not isinstance(column, Ragged)
            or column.values.dtype is not torch.uint8
            or column.values.ndim != 1
        ):
            raise damaged("a file has no compressed rows where it should")
        if len(column.lengths) and not int(column.lengths[0]):
            raise damaged("the first row of a file has no compressed bytes")

    @override
    def decode(self, column: Ragged, ends: Array, rows: Array) -> Tensor:
        lengths = column.lengths.numpy()
        heads = np.flatnonzero(lengths)  # the rows that have a block's bytes: it reaches to the next of them
        stops = np.append(heads[1:], len(lengths))
        blocks, inverse = np.unique(np.searchsorted(heads, rows, "right") - 1, return_inverse=True)
        memory, decompressor = column.values.numpy(), self._zstandard.ZstdDecompressor()
        counts = stops[blocks] - heads[blocks]
        begins = np.cumsum(counts) - counts  # where each block's rows stand among those decoded
        decoded = np.empty((int(counts.sum()), self.row_bytes), np.uint8)
        for block, begin, count in zip(blocks, begins, counts, strict=True):
            end = ends[heads[block]]
            data = memory[end - lengths[heads[block]] : end]
            # The size is in the block's head: nothing is allocated that it only claims.
            try:
                if self._zstandard.frame_content_size(data.tobytes()[:32]) != count * self.row_bytes:
                    raise damaged(f"a compressed block is not one of {count} rows")
                values = decompressor.decompress(data)
            except self._zstandard.ZstdError as error:
                raise damaged(f"a compressed block cannot be read ({error})") from None
            decoded[begin : begin + count] = np.frombuffer(values, np.uint8).reshape(count, -1)
        wanted = decoded[begins[inverse] + rows - heads[blocks[inverse]]]
        return torch.from_numpy(wanted).view(-1).view(self.dtype).view(len(rows), *self.shape)


FORMS: dict[str, type[Form]] = {form.name: form for form in (Form, FrameForm, ZstdForm)}
