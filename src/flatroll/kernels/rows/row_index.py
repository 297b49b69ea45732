"""Numbers the distinct rows of columns, exactly: equal rows get equal numbers, different rows different ones."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from flatroll.kernels.rows.words import hash_words, pack_rows

Array = NDArray[Any]
_SMALLEST = 64  # rows for which a new index has room
_LARGE = 2**16  # rows from which on memory doubles; below, it is quadrupled


class Numbering(ABC):
    """Numbers rows of 64-bit words."""

    @abstractmethod
    def number(self, words: Tensor, floats: int = 0, extend: bool = True) -> tuple[Tensor, Tensor]:
        """Number rows, and hash them in the same pass.

        Args:
            words: int64 ``[N, W]``.
            floats: what `flatroll.kernels.rows.words.view_rows` returns with them. Default 0.
            extend: give new rows new numbers. Default True. False: they get -1.

        Returns:
            Their numbers and their hashes (those of `flatroll.kernels.rows.words.hash_words`), int64 ``[N]`` each.
        """

    def insert(self, words: Tensor) -> Tensor:
        """Return the numbers of the rows of ``words`` (int64 ``[N, W]``), new numbers for new rows; int64 ``[N]``."""
        return self.number(words)[0]

    def find(self, words: Tensor) -> Tensor:
        """Return the numbers of the rows of ``words`` (int64 ``[N, W]``), -1 for unknown ones; int64 ``[N]``."""
        return self.number(words, extend=False)[0]


class RowIndex(Numbering):
    """Numbers distinct rows of 64-bit words from 0 on, in the order in which they are first seen.

    Whole rows are compared, so different rows never share a number. It grows on demand. On the CPU it is a hash table
    in compiled code; on other devices a sorted list of hashes, which each insertion of new rows sorts again.

    Args:
        width: 64-bit words per row, at least 0.
        device: device of the rows and numbers. Default the CPU.

    >>> index = RowIndex(width=1)
    >>> index.insert(torch.tensor([[7], [9], [7]]))
    tensor([0, 1, 0])
    >>> index.find(torch.tensor([[9], [8]])), len(index)
    (tensor([ 1, -1]), 2)
    """

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.width = width
        self.device = torch.device(device)
        if self.device.type == "cpu":
            self._rows: HashedRows | SortedRows = HashedRows(width)
        else:
            self._rows = SortedRows(width, self.device)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def words(self) -> Tensor:
        """The distinct rows, int64 ``[len, W]``: row i has number i. A view; do not write to it."""
        return self._rows.words

    @override
    def number(self, words: Tensor, floats: int = 0, extend: bool = True) -> tuple[Tensor, Tensor]:
        if words.dtype is not torch.int64 or words.ndim != 2 or words.shape[1] != self.width:
            raise ValueError(
                f"words must be int64 of shape [N, {self.width}], got {words.dtype} {list(words.shape)}"
            )
        if words.device != self.device:
            words = words.to(self.device)
        return self._rows.number(words, floats, extend)

    @property
    def hashed(self) -> "HashedRows":
        """The hash table of an index on the CPU."""
        assert isinstance(self._rows, HashedRows)
        return self._rows

    def truncate(self, count: int) -> None:
        """Drop the rows with numbers from ``count`` on, which are the newest."""
        self._rows.truncate(count)


class HashedRows(Numbering):
    """Rows in a hash table in host memory; see `flatroll.kernels.rows.hash_table`.

    Attributes:
        count: number of distinct rows.
    """

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        from flatroll.kernels.rows import hash_table

        self._number_rows = hash_table.number_rows
        self._rebuild = hash_table.rebuild

        self.count = 0
        self._keys = np.empty((_SMALLEST, width), np.int64)
        self._hashes = np.empty(_SMALLEST, np.uint64)
        self._table: Array = np.zeros(2 * _SMALLEST, np.int32)

    def __len__(self) -> int:
        return self.count

    @property
    def words(self) -> Tensor:
        return torch.from_numpy(self._keys[: self.count])

    @override
    def number(self, words: Tensor, floats: int = 0, extend: bool = True) -> tuple[Tensor, Tensor]:
        tables = self._table, self._keys, self._hashes
        if extend:
            tables = self.reserve(len(words))
        numbers, hashes = np.empty((2, len(words)), np.int64)
        self.count = self._number_rows(tables, self.count, words.numpy(), floats, extend, numbers, hashes)
        return torch.from_numpy(numbers), torch.from_numpy(hashes)

    def truncate(self, count: int) -> None:
        self.count = min(count, self.count)
        self._table.fill(0)
        self._rebuild(self._table, self._hashes, self.count)

    def reserve(self, new: int) -> tuple[Array, Array, Array]:
        """Make room for ``new`` more rows; return ``table, keys, hashes``, which a kernel may fill."""
        rows = self.count + new
        if rows <= len(self._keys):
            return self._table, self._keys, self._hashes

        room = 1 << (rows - 1).bit_length()
        # When rows come in small batches, allocating memory costs more than the rows themselves.
        if self.count and room < _LARGE:
            room *= 2

        keys = np.empty((room, self._keys.shape[1]), np.int64)
        hashes = np.empty(room, np.uint64)
        keys[: self.count] = self._keys[: self.count]
        hashes[: self.count] = self._hashes[: self.count]

        table = np.zeros(2 * room, np.int32 if room < 2**31 else np.int64)
        self._rebuild(table, hashes, self.count)

        self._keys = keys
        self._hashes = hashes
        self._table = table
        return table, keys, hashes


class SortedRows(Numbering):
    """Rows found by binary search among their sorted hashes, on any device."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.words = torch.empty(0, width, dtype=torch.int64, device=device)
        self._hashes = torch.empty(0, dtype=torch.int64, device=device)  # ascending
        self._ids = torch.empty(0, dtype=torch.int64, device=device)  # number of the row with each hash

    def __len__(self) -> int:
        return len(self.words)

    @override
    def number(self, words: Tensor, floats: int = 0, extend: bool = True) -> tuple[Tensor, Tensor]:
        if floats:  # host rows come unpacked, for a kernel that normalises 0.0 and NaN
            kind = torch.float32 if floats == 4 else torch.float64
            words = pack_rows([words.view(kind)])

        hashes = hash_words(words)
        ids = self._find(words, hashes)
        if extend:
            ids = self._insert(words, ids)
        return ids, hashes

    def _find(self, words: Tensor, wanted: Tensor) -> Tensor:

        ids = torch.full((len(words),), -1, dtype=torch.int64, device=words.device)
        place = torch.searchsorted(self._hashes, wanted)
        rows = torch.arange(len(words), device=words.device)  # those not found yet

        while len(rows):  # once, and once more per row with the same hash
            at = place[rows]
            near = at < len(self._hashes)
            near[near.clone()] &= self._hashes[at[near]] == wanted[rows[near]]

            rows = rows[near]
            number = self._ids[place[rows]]
            same = (self.words[number] == words[rows]).all(-1)
            ids[rows[same]] = number[same]

            rows = rows[~same]
            place[rows] += 1

        return ids

    def _insert(self, words: Tensor, ids: Tensor) -> Tensor:
        new = (ids < 0).nonzero().squeeze(-1)
        if not len(new):
            return ids

        if self.words.shape[1]:
            distinct, inverse = torch.unique(words[new], dim=0, return_inverse=True)
        else:  # rows without words are all equal, and torch.unique does not accept them
            distinct = words[new[:1]]
            inverse = torch.zeros_like(new)

        # torch.unique sorts the rows: number them by their first place in the batch instead
        first = torch.full((len(distinct),), len(new), dtype=torch.int64, device=words.device)
        first.scatter_reduce_(0, inverse, torch.arange(len(new), device=words.device), "amin")
        order = first.argsort()
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=words.device)
        ids[new] = len(self.words) + rank[inverse]

        numbers = torch.arange(len(distinct), device=words.device) + len(self.words)
        hashes = torch.cat([self._hashes, hash_words(distinct[order])])
        self._hashes, by_hash = hashes.sort(stable=True)
        self._ids = torch.cat([self._ids, numbers])[by_hash]
        self.words = torch.cat([self.words, distinct[order]])
        return ids

    def truncate(self, count: int) -> None:
        kept = self._ids < count
        self.words, self._hashes, self._ids = self.words[:count], self._hashes[kept], self._ids[kept]


def occurrences(ids: Tensor) -> Tensor:
    """Count the equal numbers before each of ``ids`` (int64 ``[N]``); int64 ``[N]``.

    >>> occurrences(torch.tensor([4, 9, 4, 4]))
    tensor([0, 0, 1, 2])
    """
    ordered, order = ids.sort(stable=True)

    at = torch.arange(len(ids), device=ids.device)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]

    before = torch.empty_like(ids)
    before[order] = at - torch.where(starts, at, 0).cummax(0).values
    return before
