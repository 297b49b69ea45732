"""Copies rows of many columns as raw memory in one compiled call.

For small samples ``index_select`` per column spends most of its time on calls, on copying adjacent rows one by one, and
on cache misses at the start of each slice. One loop over all columns copies stretches of adjacent rows at once and
prefetches the next ones: 0.45 of the time for 32 slices of 64 rows of 11 columns.

This module imports numba: import it inside the function that needs it.
"""

from bisect import bisect
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from flatroll.kernels.compiled import Array, Int, Records, compiled, helper
from flatroll.kernels.rows.host_memory import HUGE_FROM, host_memory
from flatroll.kernels.rows.raw_memory import ask, copy_bytes, numbers
from flatroll.kernels.rows.spans import Spans
from flatroll.kernels.threads import run_blocks

K = TypeVar("K", bound=Hashable)

_NONE = np.zeros(0, np.int64)
_ANY = 2**62  # rows of a column whose size is not checked
_AHEAD = 16  # prefetch distance in stretches
_THREAD_BYTES = 2**21  # fewest bytes per thread
_BLOCKS = 4  # per thread, so that a thread that starts late gets fewer
_WIDE = 2**12  # bytes of a row; `index_select` copies wider ones as fast, in threads that torch keeps
_DENSE = torch.strided
#: A stretch of adjacent rows that are copied at once.
STRETCH = np.dtype(
    [
        ("row", "i8"),  # its first row in the source
        ("at", "i8"),  # its first row in the copy
        ("rows", "i8"),
        ("near", "i8"),  # 1 if ``row`` is one of a copy that was made before
    ]
)
_LINES = 64  # cache lines prefetched per stretch; the hardware prefetches the rest


@compiled()
def gather(
    source: Array,
    near: Array,
    target: Array,
    size: Array,
    rows: Int,
    slots: Array,
    follow: Array,
    stretches: Records,
) -> Int:
    """Copy row ``slots[i]`` of each column at address ``source[k]`` to row i of the one at ``target[k]``.

    Args:
        source, target: int64 addresses of the columns, each of ``rows`` rows, and of their copies.
        near: addresses of columns that already hold the rows ``slots``; read only with ``follow``.
        size: bytes per row of each column.
        rows: rows of a source column; nothing outside of them is read.
        slots: int64, rows to copy.
        follow: empty, or rows to copy instead of ``slots``, row 0 where negative. If ``follow[i]`` is ``slots[i + 1]``,
            row i + 1 of the column at ``near[k]`` is copied, which is still in the cache.
        stretches: `STRETCH` records, one per row; overwritten.

    Returns:
        the position of a row out of range, with nothing copied, or -1.
    """
    # adjacent rows form a stretch, which is copied at once; all row numbers are checked here
    count = 0
    before = -2
    before_near = False

    for i in range(len(slots)):
        row = slots[i]
        is_near = False
        if len(follow):
            row = follow[i]
            if row < 0:
                row = 0
            if i + 1 < len(slots) and row == slots[i + 1]:
                row = i + 1
                is_near = True
        if row < 0 or (row >= rows and not is_near):
            return i

        if row != before + 1 or is_near != before_near:
            stretches[count].row = row
            stretches[count].at = i
            stretches[count].rows = 0
            stretches[count].near = is_near
            count += 1
        stretches[count - 1].rows += 1

        before = row
        before_near = is_near

    # Copy column by column, and prefetch _AHEAD stretches earlier: the round k = -1 only prefetches the first ones,
    # then each copied stretch prefetches one more, in the same order, across the ends of columns.
    asked = 0  # column to prefetch next
    following = 0  # stretch to prefetch next
    for k in range(-1, len(source)):
        turns = count
        if k < 0:
            turns = min(_AHEAD, len(source) * count)

        for j in range(turns):
            if asked < len(source):
                s = stretches[following]
                if not s.near:
                    first = source[asked] + s.row * size[asked]
                    # cache lines of 64 bytes, rounded up
                    lines = min(s.rows * size[asked] + 63 >> 6, _LINES)
                    for line in range(lines):
                        ask(first + 64 * line)
                following += 1
                if following == count:
                    asked += 1
                    following = 0

            if k >= 0:
                s = stretches[j]
                column = source[k]
                if s.near:
                    column = near[k]
                copy_bytes(target[k] + s.at * size[k], column + s.row * size[k], s.rows * size[k])

    return -1


@compiled()
def copy(source: Array, target: Array, size: Array, first: Int, slot: Int, rows: Int) -> None:
    """Copy ``rows`` rows per column, from ``first`` on in ``source[k]`` to ``slot`` on in ``target[k]``."""
    for k in range(len(source)):
        copy_bytes(target[k] + slot * size[k], source[k] + first * size[k], rows * size[k])


@compiled()
def scatter(source: Array, target: Array, size: Array, most: Int, rows: Array, at: Array) -> Int:
    """For each column k, copy row ``rows[j]`` at address ``source[k]`` to row ``at[j]`` at address ``target[k]``.

    Return the position of a row below 0 or from ``most`` on, with nothing copied, or -1.
    """
    for j in range(len(rows)):
        if rows[j] < 0 or rows[j] >= most:
            return j

    for k in range(len(source)):
        for j in range(len(rows)):
            copy_bytes(target[k] + at[j] * size[k], source[k] + rows[j] * size[k], size[k])
    return -1


@helper
def gather_next(
    source: Array,
    target: Array,
    size: Array,
    rows: Int,
    roots: Array,
    slots: Array,
    follow: Array,
    patch: Array,
    pool: Array,
) -> None:
    """Copy the rows ``slots`` of all columns and the rows ``follow`` of some, except for rows in a pool.

    Args:
        source, target, size, rows: as for :func:`gather`. The last columns are those read at ``follow``.
        roots: int64, for each of the last columns, the index of the same column among the first ones.
        slots, follow: int64 ``[N]``, as for :func:`gather`; all rows exist.
        patch: int64 ``[2, P]``, positions in ``follow`` and the pool entries to copy there instead.
        pool: addresses of pool columns, for the last columns.
    """
    own = len(target) - len(roots)
    stretches: Records = np.empty(len(slots), STRETCH)
    gather(source[:own], target[:own], target[:own], size[:own], rows, slots, follow[:0], stretches)
    if not len(roots):
        return

    gather(source[own:], target[roots], target[own:], size[own:], rows, slots, follow, stretches)
    scatter(pool, target[own:], size[own:], _ANY, patch[1], patch[0])


class HostBlock:
    """Equally long columns in host memory that one compiled call reads or writes together.

    Args:
        columns: contiguous CPU tensors ``[rows, ...]``; their memory must stay where it is.
        roots: indices of columns that :meth:`take` also reads at other rows. Default: none.

    >>> block = HostBlock([torch.arange(10), torch.arange(20.0).view(10, 2)])
    >>> block.take(torch.tensor([3, 4, 0]))
    [tensor([3, 4, 0]), tensor([[6., 7.],
            [8., 9.],
            [0., 1.]])]
    >>> block.write(8, [torch.tensor([5, 6, 7]), torch.zeros(3, 2)], 1, 2)
    >>> block.columns[0].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 6, 7]
    """

    def __init__(self, columns: Sequence[Tensor], roots: Sequence[int] = ()) -> None:
        self.columns = list(columns)
        self.roots: Array = np.array(roots, np.int64)
        self.rows = len(self.columns[0])
        for column in self.columns:
            if column.device.type != "cpu" or not column.is_contiguous() or len(column) != self.rows:
                raise ValueError("columns must be contiguous CPU tensors of one length")

        # meta tensors, which have the strides of a new copy
        like = [
            torch.empty((1, *column.shape[1:]), dtype=column.dtype, device="meta")
            for column in (*self.columns, *(self.columns[k] for k in roots))
        ]
        self._forms = [(one.shape[1:], one.stride(), one.dtype) for one in like]

        addresses = [column.data_ptr() for column in self.columns]
        self.address: Array = np.array([*addresses, *(addresses[k] for k in roots)], np.int64)
        self.size: Array = np.array([one.numel() * one.element_size() for one in like], np.int64)
        self.row_bytes = int(self.size.sum())
        own = len(self.columns)
        self._own = self.address[:own], self.size[:own]
        self._later = self.address[own:], self.size[own:]

    def take(
        self,
        slots: Tensor,
        follow: Tensor | None = None,
        patch: Tensor | None = None,
        pool: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Return copies of the rows in ``slots`` (int64 ``[N]``, on the host), by column.

        Args:
            slots: rows to copy.
            follow: int64 ``[N]``, rows to copy of ``roots``, mostly those that follow in ``slots``; row 0 for -1.
            patch: int64 ``[2, P]``, positions in ``follow`` and rows of ``pool`` to copy there instead.
            pool: contiguous CPU tensors ``[entries, ...]``, one for each of ``roots``.

        Raises:
            IndexError: a slot is out of range.

        >>> block = HostBlock([torch.arange(10), torch.arange(20, 30)], roots=[1])
        >>> pool = [torch.tensor([7])]
        >>> block.take(torch.tensor([3, 4, 8]), torch.tensor([4, 5, -1]), torch.tensor([[2], [0]]), pool)
        [tensor([3, 4, 8]), tensor([23, 24, 28]), tensor([24, 25,  7])]
        """
        rows = len(slots)
        asked = slots.numpy()
        if follow is None and rows * self.row_bytes > HUGE_FROM:
            return self._take_many(asked)

        # 1 µs per column; torch.empty takes 1.7
        copies = [
            torch.empty_strided((rows, *shape), stride, dtype=dtype) for shape, stride, dtype in self._forms
        ]
        target = np.array([copy.data_ptr() for copy in copies], np.int64)

        own = len(self.columns)
        near = target[:own]
        stretches = np.empty(rows, STRETCH)
        address, size = self._own
        wrong = gather(address, near, near, size, self.rows, asked, _NONE, stretches)
        if wrong >= 0:
            raise self._no_slot_error(int(asked[wrong]))
        if follow is None or patch is None:
            return copies

        address, size = self._later
        later = target[own:]
        after = follow.numpy()
        wrong = gather(address, near[self.roots], later, size, self.rows, asked, after, stretches)
        if wrong >= 0:
            raise self._no_slot_error(int(after[wrong]))

        at, entries = patch.numpy()
        if len(at):
            addresses = np.array([column.data_ptr() for column in pool], np.int64)
            most = min(map(len, pool))
            wrong = scatter(addresses, later, size, most, entries, at)
            if wrong >= 0:
                raise IndexError(f"pool entry {entries[wrong]} is out of range: there are {most} entries")
        return copies

    def _no_slot_error(self, slot: int) -> IndexError:
        """Return the error for a slot that the columns do not have."""
        return IndexError(f"slot {slot} is out of range: there are {self.rows} slots")

    def _take_many(self, asked: Array) -> list[Tensor]:
        """Do the work of :meth:`take` in blocks of rows, into huge pages."""
        rows = len(asked)
        most = torch.get_num_threads()
        threads = max(1, min(most, rows * self.row_bytes // _THREAD_BYTES))
        copies = [host_memory(rows, dtype, tuple(shape)) for shape, _, dtype in self._forms]
        blocks = threads * _BLOCKS if threads > 1 else 1
        bounds = [rows * block // blocks for block in range(blocks + 1)]
        for wrong in run_blocks(partial(self._copy_block, copies, asked), bounds, threads):
            if wrong >= 0:
                raise self._no_slot_error(int(asked[wrong]))
        return copies

    def _copy_block(self, copies: list[Tensor], asked: Array, first: int, stop: int) -> int:
        """Fill the rows ``first ... stop - 1`` of ``copies``; return the position of a row out of range, or -1."""
        target = np.array([copy.data_ptr() for copy in copies], np.int64) + first * self.size
        slots = asked[first:stop]
        stretches = np.empty(len(slots), STRETCH)
        wrong = int(gather(self.address, target, target, self.size, self.rows, slots, _NONE, stretches))
        if wrong < 0:
            return wrong
        return first + wrong

    def write(self, slot: int, values: Sequence[Tensor], first: int, rows: int) -> None:
        """Copy the rows ``first ... first + rows - 1`` of ``values`` to ``slot`` and the slots after it.

        ``values`` has one tensor per column, of its dtype and row shape. IndexError if a slot is out of range.
        """
        if slot < 0 or rows < 0 or slot + rows > self.rows:
            raise IndexError(f"slots {slot} ... {slot + rows - 1} are not all among the block's {self.rows}")

        # Contiguous values in host memory, as in most batches.
        plain = []
        for value in values:
            if value.is_cpu and value.is_contiguous() and not value.is_neg() and not value.is_complex():
                plain.append(value)
            else:
                plain.append(value.cpu().resolve_conj().resolve_neg().contiguous())

        source = np.array([value.data_ptr() for value in plain], np.int64)
        copy(source, self.address, self.size, first, slot, rows)


class HostColumns(Generic[K]):
    """Columns in host memory by key; one compiled call reads or writes several of them.

    Addresses are cached: create a new object if a column's memory moves, and for a copy of the columns.

    Args:
        columns: contiguous CPU tensors of one length, ``[rows, ...]``.
        next_keys: keys of columns that :meth:`take_all` also reads at the rows that follow, and the keys of these
            copies. Default: none.

    >>> columns = HostColumns({"x": torch.zeros(4), "y": torch.zeros(4, 2)})
    >>> columns.write(3, {"x": torch.tensor([5.0, 6.0]), "y": torch.ones(2, 2)}, 2, 4)
    ('x', 'y')
    >>> columns.take(torch.tensor([3, 0]), ["x"])
    {'x': tensor([5., 6.])}
    """

    def __init__(self, columns: Mapping[K, Tensor], next_keys: Mapping[K, K] | None = None) -> None:
        self.columns = dict(columns)
        self.rows = len(next(iter(self.columns.values()), ()))

        # Blocks of columns that were requested together; an empty request has none.
        self._joint: dict[tuple[K, ...], HostBlock | None] = {(): None}
        names = tuple(self.columns)
        plain = names and not any(column.is_complex() for column in self.columns.values())
        self._all = self._join(names) if plain else None

        self._names = names
        self._both: HostBlock | None = None
        if next_keys is not None:
            self._names = (*names, *next_keys.values())
        if next_keys:
            self._both = HostBlock(list(self.columns.values()), [names.index(key) for key in next_keys])

        self._spans = Spans.of(self.columns.values())
        # for batches with as many rows as the previous one
        self._forms: list[tuple[K, torch.dtype, torch.Size]] = []
        self._form_rows = -1

    def take(self, slots: Tensor, keys: Collection[K] | None = None) -> dict[K, Tensor]:
        """Return copies of the rows in ``slots`` (int64 ``[N]``) of ``keys`` (default: all), by key.

        Unknown keys are left out, and in large samples wide rows if torch uses several threads for them.
        """
        if keys is None:
            names = tuple(self.columns)
        else:
            names = tuple([key for key in keys if key in self.columns])
        if names in self._joint:
            block = self._joint[names]
        else:
            block = self._join(names)
        if block is None:
            return {}

        if len(slots) * block.row_bytes > HUGE_FROM and torch.get_num_threads() > 1:
            names = tuple([key for key, size in zip(names, block.size, strict=True) if size < _WIDE])
            if names in self._joint:
                block = self._joint[names]
            else:
                block = self._join(names)
            if block is None:
                return {}

        return dict(zip(names, block.take(slots), strict=True))

    def take_all(
        self, slots: Tensor, follow: Tensor, patch: Tensor, pool: Sequence[Tensor]
    ) -> dict[K, Tensor]:
        """Return copies of the rows in ``slots`` of all columns, and of the next rows under ``next_keys``.

        The arguments are those of `HostBlock.take`. Empty if there is too much to copy for one thread, or without
        ``next_keys``.
        """
        block = self._both
        if block is None or len(slots) * block.row_bytes > HUGE_FROM:
            return {}

        return dict(zip(self._names, block.take(slots, follow, patch, pool), strict=True))

    def write(self, slot: int, values: Mapping[K, Tensor], rows: int, capacity: int) -> tuple[K, ...]:
        """Copy ``rows`` rows of ``values`` to the slots from ``slot`` on, wrapping around at ``capacity``.

        Return the written keys, none if there is too much to copy for one thread.
        """
        names = tuple([key for key in values if key in self.columns])
        if names in self._joint:
            block = self._joint[names]
        else:
            block = self._join(names)
        if block is None or rows * block.row_bytes > HUGE_FROM:
            return ()

        columns = [values[key] for key in names]
        fit = min(rows, capacity - slot)  # rows up to the last slot
        block.write(slot, columns, 0, fit)
        if fit < rows:
            block.write(0, columns, fit, rows - fit)
        return names

    def find(self, values: Mapping[K, Tensor], rows: int) -> Array | None:
        """Return the addresses (int64) of ``values``, in the order of the columns here, for :meth:`write_found`.

        Returns:
            None unless ``values`` has, for each column, a plain tensor in host memory with ``rows`` rows of its dtype
            and shape that shares no memory with the columns. It may require gradients.
        """
        if self._all is None:
            return None

        if rows != self._form_rows:
            forms = [(key, column.dtype, column.shape[1:]) for key, column in self.columns.items()]
            self._forms = [(key, dtype, torch.Size((rows, *shape))) for key, dtype, shape in forms]
            self._form_rows = rows

        addresses = []
        low, high, starts, stops = self._spans
        for key, dtype, shape in self._forms:
            value = values.get(key)
            # the layout is checked first: the other checks raise on sparse tensors
            if (
                value is None
                or value.dtype is not dtype
                or value.shape != shape
                or value.layout is not _DENSE
            ):
                return None
            if not value.is_cpu or not value.is_contiguous() or value.is_neg():
                return None

            address = value.data_ptr()
            # `Spans.hold`, inlined
            if low <= address < high and address < stops[bisect(starts, address) - 1]:
                return None
            addresses.append(address)

        return np.array(addresses, np.int64)

    def copy_into(self, values: Mapping[K, Tensor], at: Array, rows: Array) -> None:
        """Copy ``rows`` over the rows ``at`` of ``values``, both int64 ``[M]``, without checks.

        ``values`` must be contiguous, in host memory, of each column's dtype and row shape; all rows must exist.

        >>> columns, values = HostColumns({"x": torch.arange(5)}), {"x": torch.zeros(3, dtype=torch.int64)}
        >>> columns.copy_into(values, np.array([0, 1]), np.array([4, 2]))
        >>> values["x"]
        tensor([4, 2, 0])
        """
        names = tuple(self.columns)
        if names in self._joint:
            block = self._joint[names]
        else:
            block = self._join(names)

        if block is not None:
            target = np.array([values[key].data_ptr() for key in names], np.int64)
            scatter(block.address, target, block.size, block.rows, rows, at)

    def pair(self, key: K, later: K) -> tuple[int, int, int, int]:
        """Return an entry of ``pairs`` for `flatroll.kernels.slices.publishing.link`.

        It has the address of the column ``later``, its bytes per row, and the indices of the columns ``key`` and
        ``later``.
        """
        names = list(self.columns)
        column = self.columns[later]
        size = column.element_size() * column.shape[1:].numel()
        return column.data_ptr(), size, names.index(key), names.index(later)

    def write_found(self, slot: int, source: Array, rows: int) -> bool:
        """Copy ``rows`` rows from the addresses that :meth:`find` returned to the slots from ``slot`` on.

        It wraps around at the end. Return False, with nothing copied, if there is too much to copy for one thread.
        """
        block = self._all
        if block is None or rows * block.row_bytes > HUGE_FROM:
            return False
        if not (0 <= slot < self.rows and 0 <= rows <= self.rows):
            raise IndexError(f"{rows} rows from slot {slot} on do not fit into {self.rows} slots")

        fit = min(rows, self.rows - slot)  # rows up to the last slot
        copy(source, block.address, block.size, 0, slot, fit)
        if fit < rows:
            copy(source, block.address, block.size, fit, 0, rows - fit)
        return True

    def _join(self, names: tuple[K, ...]) -> HostBlock:
        """Create and cache the block of these columns."""
        block = HostBlock([self.columns[key] for key in names])
        self._joint[names] = block
        return block


@compiled()
def gather_pieces(
    firsts: Array, source: Array, ends: Array, size: Array, unit: Array, rows: Array, target: Array
) -> Int:
    """Copy row ``rows[i]`` of each of K columns to row i of the one at address ``target[k]``.

    Args:
        firsts: int64 ``[P + 1]``, ascending: piece p holds the rows ``firsts[p] ... firsts[p + 1] - 1``.
        source: int64 ``[P, K]``, address of each column in each piece.
        ends: int64 ``[P, K]``: 0 if each row has one value. Else the address of an int64 per row of the piece: the
            number of values up to and including that row; its own are the last of these.
        size: int64 ``[K]``, bytes to copy per row.
        unit: int64 ``[K]``, bytes per value of columns with ``ends``.
        rows: int64 ``[N]``, numbers of rows.
        target: int64 ``[K]``, addresses of the copies.

    Returns:
        the position of a row outside all pieces, with nothing copied, or -1.
    """
    pieces = len(firsts) - 1
    # Adjacent rows of a piece form a stretch; all row numbers are checked here.
    stretches = np.empty((len(rows), 4), np.int64)  # piece, first row in it, first position, row count
    count = 0
    piece = 0
    before = np.int64(-2)
    for i in range(len(rows)):
        row = rows[i]
        if row < firsts[0] or row >= firsts[pieces]:
            return i

        if row < firsts[piece] or row >= firsts[piece + 1]:
            piece = 0
            above = pieces
            while above - piece > 1:
                middle = (piece + above) // 2
                if firsts[middle] <= row:
                    piece = middle
                else:
                    above = middle
            before = np.int64(-2)

        if row != before + 1:
            stretches[count, 0] = piece
            stretches[count, 1] = row - firsts[piece]
            stretches[count, 2] = i
            stretches[count, 3] = 0
            count += 1
        stretches[count - 1, 3] += 1

        before = row

    # Copy column by column, and prefetch _AHEAD stretches earlier, in the same order.
    asked = 0  # column to prefetch next
    following = 0  # stretch to prefetch next
    for k in range(-1, len(size)):
        for j in range(count if k >= 0 else min(_AHEAD, len(size) * count)):
            if asked < len(size):
                p = stretches[following, 0]
                if ends[p, asked] == 0:
                    first = source[p, asked] + stretches[following, 1] * size[asked]
                    # cache lines of 64 bytes, rounded up
                    lines = min(stretches[following, 3] * size[asked] + 63 >> 6, _LINES)
                    for line in range(lines):
                        ask(first + 64 * line)
                following += 1
                if following == count:
                    asked += 1
                    following = 0

            if k < 0:
                continue
            p, first, position, length = stretches[j]
            to = target[k] + position * size[k]
            if ends[p, k] == 0:
                copy_bytes(to, source[p, k] + first * size[k], length * size[k])
                continue

            counts = numbers(ends[p, k] + 8 * first, length)
            for i in range(length):
                copy_bytes(to + i * size[k], source[p, k] + counts[i] * unit[k] - size[k], size[k])
    return -1
