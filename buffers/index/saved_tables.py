"""Checks the tables of a saved ring or index: a state is data, and kernels would read by what it says."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def damaged(what: str) -> ValueError:
    """Return the error for a state that says ``what`` cannot be."""
    return ValueError(f"the state is damaged: {what}. Nothing was loaded; use another copy of it")


def check_table(name: str, table: Any, dtype: np.dtype[Any], rows: int | None = None) -> None:
    """Raise ValueError unless a state's ``table`` is an array ``[rows]`` (None: of any length) of ``dtype``."""
    if not isinstance(table, np.ndarray) or table.dtype != dtype or table.ndim != 1:
        raise damaged(f"its {name} are no one-dimensional array of {dtype}")
    if rows is not None and len(table) != rows:
        raise damaged(f"its {name} have {len(table)} entries, expected {rows}")


def check_rows(counted: tuple[int, int], found: tuple[int, int]) -> None:
    """Raise ValueError unless the rows that are ``found`` beside the tables are those that they count: numbers of the
    first row and of the one after the last."""
    if counted != found:
        raise damaged(
            f"it counts the rows {counted[0]} ... {counted[1] - 1}, and has {found[0]} ... {found[1] - 1}"
        )


def check_heap(
    live: int, used: int, written: int, gone: int, heap: Array, rank: Array, number: Array
) -> None:
    """Raise ValueError unless the tables ``[capacity]`` of a `RankedRing` are a heap of ``live`` rows in ``used``
    slots, of numbers below ``written`` and ranks that can be compared; ``gone`` is the number of a free slot."""
    if not np.array_equal(np.sort(heap), np.arange(len(heap))):
        raise damaged("its heap does not hold every slot once")
    rows, free = heap[:live], heap[live:]
    numbers = np.sort(number[rows])
    distinct = not live or (numbers[0] >= 0 and numbers[-1] < written and bool((np.diff(numbers) > 0).all()))
    if not distinct or bool((number[free] != gone).any()) or bool((rows >= used).any()):
        raise damaged(f"its slots do not hold the {live} rows that it counts")
    # Entry i of the heap stands below entry (i - 1) // 2, which has to go before it.
    above, below = rows[(np.arange(1, live) - 1) // 2], rows[1:]
    tie = (rank[above] == rank[below]) & (number[above] > number[below])
    if bool(np.isnan(rank[rows]).any()) or not bool((tie | (rank[above] < rank[below])).all()):
        raise damaged("its heap is not in the order of the ranks")
