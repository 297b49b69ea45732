"""A column that compresses each row losslessly with zstd."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import After, Column, Dumped, Part, check_dumped, check_values
from flatroll.buffers.index.ring import Array
from flatroll.buffers.index.saved_tables import damaged
from flatroll.kernels.threads import run_blocks
from flatroll.layout.checks import check_whole_number
from flatroll.layout.transfers import upload

_THREAD_BYTES = 2**23  # bytes of values that are worth another thread
_DICTIONARY_BYTES = 2**14  # longer dictionaries are slower and compress no better
_FEW_ROWS = 16  # up to this many rows decoding duplicates is faster than finding them
_MOST_PER_BYTE = 2**15  # a zstd block has at least 4 bytes and holds at most 128 KiB
_POINTER = 8  # bytes of a pointer
_HEADER = 33  # and of an empty Python bytes object


class ZstdColumn(Column):
    """A column that stores each row as a Python ``bytes`` object, compressed with zstd.

    The last 16 KiB of the first non-zero value serve as the dictionary of all rows: content that later rows share
    with it takes almost no space, which shrinks Atari frames by a third to two thirds. Rows are compressed on write
    and decoded on read, with several threads for large batches; a row requested several times at once is decoded
    once. Compressing and decoding release the GIL.

    One thread at a time writes to this column and its side columns; any number read.

    Args:
        rows: number of rows.
        shape: shape of one row's value.
        dtype: dtype of the values, any.
        device: device of decoded values, default ``"cpu"``; compressed rows stay on the host.
        level: zstd level, 1 to 22, default 3. Higher ones save a few percent of Atari frames and take 2 to 4 times
            the time to write, none to read.
        threads: maximum number of threads, default that of torch.

    Raises:
        ImportError: zstandard is not installed.
        ValueError: ``level`` or ``threads`` is out of range.

    >>> column = ZstdColumn(100, torch.Size([84, 84]), torch.uint8)
    >>> column.write(0, torch.arange(3, dtype=torch.uint8).view(3, 1, 1).expand(3, 84, 84))
    >>> column.take(torch.tensor([2, 0]))[:, 0, 0], column.row_bytes < 100
    (tensor([2, 0], dtype=torch.uint8), True)
    """

    looks_up_on_host = True

    def __init__(
        self,
        rows: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        level: int = 3,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            check_whole_number("threads", threads)

        self.dtype = dtype
        self.shape = torch.Size(shape)
        self.device = torch.device(device)
        self.codec = _Codec(level, threads)

        # bytes objects are replaced atomically: a reader gets the old row or the new one, never a mixture.
        self._rows: Array = np.empty(0, object)
        self._filled = 0
        self._bytes = 0
        self.grow(rows)

    @cached_property
    def _blank(self) -> bytes:
        """Zeros compressed without a dictionary: every decoder can read them."""
        # Lazy: a state that claims a huge shape must be checked before anything is compressed.
        return _compress(_zstandard().ZstdCompressor(), bytes(self.value_bytes))

    @override
    def write(self, slot: int, values: Tensor, after: After | None = None) -> None:
        self.put(torch.arange(slot, slot + len(values)), values)

    @override
    def put(self, slots: Tensor, values: Tensor, after: After | None = None) -> None:
        if not len(values):
            return

        # reshape normalises the strides of a single row, which contiguous() does not
        flat = values.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        rows = flat.as_strided(flat.shape, (1,)).view(torch.uint8).view(len(values), self.value_bytes)
        if not self.codec.prefix:
            self.codec.begin(rows[0, -_DICTIONARY_BYTES:].numpy().tobytes())
        self._replace(slots.numpy(force=True), self.codec.encode(rows.numpy()))

    @override
    def take(self, slots: Tensor) -> Tensor:
        """Return the rows in ``slots`` decompressed, ``[N, *shape]``; rows never written are zeros."""
        distinct = slots.numpy(force=True)
        inverse = None
        if len(slots) > _FEW_ROWS:
            unique, positions = np.unique(distinct, return_inverse=True)
            # With fewer duplicates, copying decoded rows costs more than decoding them again.
            if 4 * len(unique) < 3 * len(slots):
                distinct = unique
                inverse = positions

        values = self.codec.decode(self._rows[distinct], self.value_bytes)
        if inverse is not None:
            values = values.take(inverse, 0)

        shaped = torch.from_numpy(values).view(-1).view(self.dtype).view(len(slots), *self.shape)
        return upload(shaped, self.device)

    @override
    def pool(self) -> "ZstdColumn":
        side = ZstdColumn(0, self.shape, self.dtype, self.device)
        side.codec = self.codec  # they share a dictionary
        return side

    @override
    def grow(self, rows: int) -> None:
        if rows > len(self._rows):
            larger: Array = np.empty(rows, object)
            larger[: len(self._rows)] = self._rows
            larger[len(self._rows) :].fill(self._blank)
            self._rows = larger

    @property
    @override
    def nbytes(self) -> int:
        """Bytes of the compressed rows, plus one pointer for each slot."""
        return _POINTER * len(self._rows) + _HEADER * self._filled + self._bytes

    @property
    @override
    def row_bytes(self) -> int:
        """Mean bytes of the compressed rows written so far; 0 before the first."""
        return self._filled and _POINTER + _HEADER + self._bytes // self._filled

    @override
    def state_dict(self, rows: int) -> dict[str, Any]:
        return _join(self._rows[:rows].tolist(), self.codec.prefix)

    @override
    def dump(self, slots: Tensor) -> Dumped:
        """Return the compressed rows; the first row carries the dictionary."""
        state = _join(self._rows[slots.numpy(force=True)].tolist(), self.codec.prefix)
        of_first = torch.zeros(len(slots), dtype=torch.int64)
        dictionary = state["dictionary"]
        if len(slots):
            of_first[0] = len(dictionary)
        return {
            "rows": (state["rows"], state["sizes"]),
            "dictionary": (dictionary[: int(of_first.sum())], of_first),
        }

    @override
    def restore(self, parts: Sequence[Part], rows: int) -> dict[str, Any]:
        """Return the state of these rows; parts with a different dictionary are recompressed."""
        codec = _Codec(self.codec.level, self.codec.threads)
        compressed: Array = np.empty(rows, object)  # None where no part has the row
        for slots, dumped in parts:
            check_dumped(dumped, {"rows": True, "dictionary": True})
            joined, sizes = dumped["rows"]
            dictionary, lengths = dumped["dictionary"]

            # Several dumps may be concatenated; each begins with its dictionary.
            begins = sorted({0, *lengths.nonzero().flatten().tolist()})
            for first, stop in zip(begins, [*begins[1:], len(slots)], strict=True):
                low = int(sizes[:first].sum())
                high = int(sizes[:stop].sum())
                own = dictionary
                if len(lengths):
                    before = int(lengths[:first].sum())
                    own = dictionary[before : before + int(lengths[first])]

                part = {"rows": joined[low:high], "sizes": sizes[first:stop], "dictionary": own}
                self.check_state_dict(part)
                at = slots[first:stop].numpy()
                recoded = self._cut(part)

                prefix = own.numpy(force=True).tobytes()
                codec.begin(prefix)  # keeps the first dictionary
                if prefix not in (b"", codec.prefix):
                    values = self._decode_rows(recoded, prefix)
                    recoded = np.concatenate([recoded[:0], *map(codec.encode, values)])

                compressed[at[at >= 0]] = recoded[at >= 0]
        return _join([row or self._blank for row in compressed], codec.prefix)

    @override
    def check_state_dict(self, state: dict[str, Any]) -> int:
        joined = state["rows"]
        sizes = state["sizes"]
        dictionary = state["dictionary"]
        check_values("compressed rows", joined, torch.uint8, ())
        check_values("dictionary", dictionary, torch.uint8, ())
        count = check_values("sizes", sizes, torch.int64, ())
        invalid = count and (int(sizes.min()) < 1 or int(sizes.max()) > len(joined))
        if invalid or int(sizes.sum()) != len(joined):
            raise damaged(f"its {count} sizes do not add up to {len(joined)} compressed bytes")

        rows = self._cut(state)
        expected = self.value_bytes
        zstandard = _zstandard()

        try:
            wrong = next((i for i, row in enumerate(rows) if frame_size(zstandard, row) != expected), None)
            prefix = dictionary.numpy(force=True).tobytes()
            if wrong is None and self.codec.prefix not in (b"", prefix):
                for _ in self._decode_rows(rows, prefix):  # all are recompressed, so all must be readable
                    pass
        except zstandard.ZstdError as error:
            raise damaged(f"its compressed rows cannot be read ({error})") from None

        if wrong is not None:
            raise damaged(f"its compressed row {wrong} does not have {expected} bytes")
        return count

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values from a state; rows compressed with another dictionary are recompressed."""
        rows = self._cut(state)
        self.grow(len(rows))
        prefix = state["dictionary"].numpy(force=True).tobytes()
        self.codec.begin(prefix)
        if self.codec.prefix == prefix:
            self._replace(slice(0, len(rows)), rows)
            return

        first = 0
        for values in self._decode_rows(rows, prefix):
            self._replace(slice(first, first + len(values)), self.codec.encode(values))
            first += len(values)

    def _cut(self, state: dict[str, Any]) -> Array:
        """Split a state into compressed rows, objects ``[N]``."""
        joined = state["rows"].numpy(force=True).tobytes()
        sizes = state["sizes"].tolist()
        ends = np.cumsum(sizes).tolist()
        rows: Array = np.empty(len(sizes), object)
        rows[:] = [joined[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return rows

    def _decode_rows(self, rows: Array, prefix: bytes) -> Iterator[Array]:
        """Yield the decoded values of ``rows`` compressed with dictionary ``prefix``, in chunks."""
        other = _Codec(self.codec.level, self.codec.threads, prefix)
        step = max(1, 4 * _THREAD_BYTES // max(1, self.value_bytes))  # number of rows decoded at a time

        for first in range(0, len(rows), step):
            yield other.decode(rows[first : first + step], self.value_bytes)

    def _replace(self, slots: Array | slice, rows: Array) -> None:
        """Put compressed ``rows`` into ``slots`` and update the byte count."""
        replaced = [row for row in self._rows[slots] if row is not self._blank]
        self._filled += len(rows) - len(replaced)
        self._bytes += sum(map(len, rows)) - sum(map(len, replaced))
        self._rows[slots] = rows


def frame_size(zstandard: ModuleType, frame: bytes) -> int:
    """Return the decoded size in a zstd frame's header; ValueError if unreadable or too short for that size."""
    try:
        size: int = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise damaged(f"a compressed frame cannot be read ({error})") from None

    if size > len(frame) * _MOST_PER_BYTE:
        raise damaged(f"a compressed frame of {len(frame)} bytes claims {size}")
    return size


def _join(compressed: list[bytes], prefix: bytes) -> dict[str, Tensor]:
    """Return the state of compressed rows: concatenated bytes, sizes and dictionary."""
    joined = torch.zeros(0).byte()
    if compressed:
        joined = torch.frombuffer(bytearray(b"".join(compressed)), dtype=torch.uint8)

    sizes = torch.tensor([len(row) for row in compressed], dtype=torch.int64)
    return {"rows": joined, "sizes": sizes, "dictionary": torch.tensor(list(prefix), dtype=torch.uint8)}


class _Codec:
    """zstd with one dictionary for all rows and several threads for large batches."""

    def __init__(self, level: int, threads: int | None, prefix: bytes = b"") -> None:
        check_whole_number("level", level, 1, 22)
        _zstandard()
        self.level = level
        self.threads = threads
        self.prefix = b""

        self._dictionary: Any = None
        # Idle objects, used by one thread at a time: creating one takes longer than decoding a frame.
        self._compressors: list[Any] = []
        self._decompressors: list[Any] = []
        self.begin(prefix)

    def begin(self, prefix: bytes) -> None:
        """Use ``prefix`` as the dictionary, unless there is one already or it is all zeros."""
        if self.prefix or not prefix.strip(b"\0"):
            return

        zstandard = _zstandard()
        self.prefix = prefix
        self._dictionary = zstandard.ZstdCompressionDict(prefix, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        self._compressors = []
        self._decompressors = []

    @contextmanager
    def _borrow(self, idle: list[Any], kind: str, **options: Any) -> Iterator[Any]:
        """Context manager: lend a compressor or decompressor to this thread."""
        try:
            worker = idle.pop()  # atomic: two threads never get the same one
        except IndexError:
            worker = getattr(_zstandard(), kind)(dict_data=self._dictionary, **options)
        yield worker
        idle.append(worker)

    def encode(self, values: Array) -> Array:
        """Compress the rows of ``values`` (uint8 ``[N, size]``); returns objects ``[N]``."""
        rows: Array = np.empty(len(values), object)

        def encode_part(first: int, stop: int) -> None:
            with self._borrow(self._compressors, "ZstdCompressor", level=self.level) as compressor:
                rows[first:stop] = [_compress(compressor, row) for row in values[first:stop]]

        self._run_in_threads(encode_part, len(values), values.nbytes)
        return rows

    def decode(self, rows: Array, size: int) -> Array:
        """Invert `encode`; returns uint8 ``[N, size]``."""
        values: Array = np.empty((len(rows), size), np.uint8)

        def decode_part(first: int, stop: int) -> None:
            # One call for all rows, in place, is 3 times faster than one call per row and acquires the GIL
            # once.
            joined = b"".join(rows[first:stop])
            with (
                self._borrow(self._decompressors, "ZstdDecompressor") as decompressor,
                decompressor.stream_reader(joined, read_across_frames=True) as reader,
            ):
                got = reader.readinto(values[first:stop].reshape(-1))
            if got != (stop - first) * size:
                raise RuntimeError(f"{stop - first} compressed rows of {size} bytes gave {got} bytes")

        if values.size:
            self._run_in_threads(decode_part, len(rows), values.nbytes)
        return values

    def _run_in_threads(self, work: Callable[[int, int], None], rows: int, size: int) -> None:
        """Call ``work(first, stop)`` on shares of ``rows``, in a number of threads that suits ``size`` bytes."""
        threads = torch.get_num_threads() if self.threads is None else self.threads
        parts = max(1, min(threads, size // _THREAD_BYTES, rows))
        # Part i is rows * i // parts ... rows * (i + 1) // parts - 1; sizes differ by at most one.
        bounds = [rows * i // parts for i in range(parts + 1)]
        run_blocks(work, bounds, parts)

    def __reduce__(self) -> tuple[type["_Codec"], tuple[int, int | None, bytes]]:
        return _Codec, (self.level, self.threads, self.prefix)


def _compress(compressor: Any, row: Any) -> bytes:
    """Return a row compressed, in an object of just its size."""
    # zstandard's own object keeps the memory that it reserved for incompressible values: 7 KB for a frame that
    # takes 100 bytes.
    return bytes(memoryview(compressor.compress(row)))


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError('codec "zstd" needs zstandard: pip install "flatroll[zstd]"') from error
    return zstandard
