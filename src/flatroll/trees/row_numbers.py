"""Numbers the distinct rows of columns, and checks that all batches have columns of the same kinds."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatroll.kernels.rows.row_index import RowIndex
from flatroll.kernels.rows.words import hash_words, pack_rows, view_rows
from flatroll.layout.keys import NestedKey

Kind = tuple[torch.dtype, torch.Size]


class RowNumbers:
    """Numbers the distinct rows of some columns; their dtypes and shapes are fixed by the first insertion.

    >>> rows = RowNumbers(["x"])
    >>> rows.insert([torch.tensor([3.0, 5.0, 3.0])])
    tensor([0, 1, 0])
    """

    def __init__(self, names: Sequence[NestedKey]) -> None:
        self.names = names
        self.index: RowIndex | None = None
        self.kinds: list[Kind] | None = None

    def __len__(self) -> int:
        return 0 if self.index is None else len(self.index)

    def insert(self, columns: Sequence[Tensor]) -> Tensor:
        """The number of each row, int64 ``[N]``; new rows get new numbers."""
        return self.number(columns)[0]

    def find(self, columns: Sequence[Tensor]) -> Tensor:
        """The number of each row, int64 ``[N]``; -1 for unknown rows."""
        return self.number(columns, extend=False)[0]

    def number(self, columns: Sequence[Tensor], extend: bool = True) -> tuple[Tensor, Tensor]:
        """Numbers and hashes, int64 ``[N]`` each, of the rows of columns ``[N, *F]``.

        Unknown rows get new numbers if ``extend``, else -1.

        Raises:
            TypeError: a column is of another dtype or shape than in the rows before.
        """
        for name, column, kind in zip(self.names, columns, self.kinds or (), strict=False):
            if (column.dtype, column.shape[1:]) != kind:
                raise TypeError(
                    f"{name!r} must be {kind[0]} {tuple(kind[1])} per row as in the rows before, "
                    f"got {column.dtype} {tuple(column.shape[1:])}"
                )
        words, floats = view_rows(columns)
        if self.index is None:
            if not extend:
                return torch.full((len(words),), -1, dtype=torch.int64, device=words.device), hash_words(
                    pack_rows(columns)
                )
            self.index = RowIndex(words.shape[1], words.device)
            self.kinds = [(column.dtype, column.shape[1:]) for column in columns]
        return self.index.number(words, floats=floats, extend=extend)

    def truncate(self, count: int) -> None:
        """Forget the rows with numbers from ``count`` on; with 0, also what kinds of columns they had."""
        if self.index is not None:
            self.index.truncate(count)
        if not count:
            self.index = self.kinds = None

    def state_dict(self) -> dict[str, Any]:
        """The rows, by number."""
        return {"words": None if self.index is None else self.index.words.clone(), "kinds": self.kinds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the numbers from :meth:`state_dict`."""
        self.index, self.kinds = None, state["kinds"]
        if state["words"] is not None:
            self.index = RowIndex(state["words"].shape[1], state["words"].device)
            self.index.insert(state["words"])
