"""Checks saved tables and generators: states are untrusted, and kernels use their values as addresses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flatroll.disk.state_tree import damaged as damaged
from flatroll.kernels.rows.records import CHAIN, FRAGMENT

Array = NDArray[Any]


@contextmanager
def reading_tables() -> Iterator[None]:
    """Return a context that reports missing or wrong entries as a damaged state."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise damaged(f"its tables are incomplete or invalid ({error!r:.200})") from error


def check_table(name: str, table: Any, dtype: np.dtype[Any], rows: int | None = None) -> None:
    """Raise ValueError unless a state's ``table`` is an array ``[rows]`` (None: of any length) of ``dtype``."""
    if not isinstance(table, np.ndarray) or table.dtype != dtype or table.ndim != 1:
        raise damaged(f"its {name} are not a one-dimensional array of {dtype}")
    if rows is not None and len(table) != rows:
        raise damaged(f"its {name} have {len(table)} entries, expected {rows}")


def check_rows(counted: tuple[int, int], found: tuple[int, int]) -> None:
    """Raise ValueError unless the ``found`` rows (first, after last) are those that the tables count."""
    if counted != found:
        raise damaged(
            f"it counts the rows {counted[0]} ... {counted[1] - 1}, but has {found[0]} ... {found[1] - 1}"
        )


def check_heap(
    live: int, used: int, written: int, gone: int, heap: Array, rank: Array, number: Array
) -> None:
    """Raise ValueError unless the tables ``[capacity]`` of a `RankedRing` are a valid heap.

    It has ``live`` rows in ``used`` slots, with numbers below ``written`` and comparable ranks; free slots have
    the number ``gone``.
    """
    if not np.array_equal(np.sort(heap), np.arange(len(heap))):
        raise damaged("its heap does not hold every slot once")

    rows = heap[:live]
    free = heap[live:]
    numbers = np.sort(number[rows])
    distinct = not live or (numbers[0] >= 0 and numbers[-1] < written and (np.diff(numbers) > 0).all())
    if not distinct or (number[free] != gone).any() or (rows >= used).any():
        raise damaged(f"its slots do not hold the {live} rows that it counts")

    # In a heap, the parent of entry i is entry (i - 1) // 2; it must be dropped first.
    above = rows[(np.arange(1, live) - 1) // 2]
    below = rows[1:]
    tie = (rank[above] == rank[below]) & (number[above] > number[below])
    if np.isnan(rank[rows]).any() or not (tie | (rank[above] < rank[below])).all():
        raise damaged("its heap is not in the order of the ranks")


def check_saved_generator(saved: Any, generator: torch.Generator | None, whose: str) -> None:
    """Raise ValueError unless the state ``saved`` of a generator (None: there was none) fits ``generator``."""
    if (saved is None) != (generator is None):
        kind = "ReplayBuffer" if whose == "buffer" else "ReplayBufferEnsemble"
        raise ValueError(
            f"the state was saved with a generator and this {whose} has none, or the other way round: use "
            f"{kind}(generator=torch.Generator()) on both sides to draw the same rows"
        )

    if saved is not None:
        try:
            torch.Generator().set_state(saved)  # a scratch generator, only to check the state
        except (RuntimeError, TypeError) as error:
            raise damaged(f"its generator cannot be restored ({error})") from None


class SavedFragments(NamedTuple):
    """The F fragments of a saved trajectory index, from which its tables are rebuilt.

    Attributes:
        firsts: int64 ``[F]``, number of each fragment's first row, ascending; the first one holds the oldest row.
        chains: int64 ``[F]``, each fragment's trajectory, as its place in the table of trajectories.
        pool: int64 ``[F]``, pool entry with the next observation of the last row, -1 for none; all distinct.
        ids: int64 ``[C]``, trajectory ids by place, used or free.
        free: int64, the free places in order of use.
        spare: int64, the free pool entries, ascending.
    """

    firsts: Array
    chains: Array
    pool: Array
    ids: Array
    free: Array
    spare: Array

    @classmethod
    def read(cls, counters: Any, state: dict[str, Any]) -> "SavedFragments":
        """Read the fragments of ``state``, whose record ``counters`` has valid row counts; ValueError if the fragments
        do not match these rows."""
        table = state["fragments"]
        chains = state["chains"]
        check_table("fragments", table, FRAGMENT)
        check_table("trajectories", chains, CHAIN)
        check_table("spare entries", state["spare"], np.dtype(np.int64))

        names = ("first", "end", "slots", "head", "written")
        begin, end, used, head, written = (int(counters[name]) for name in names)
        size = len(table)
        pool_size = len(state["spare"])
        if not 0 <= end - begin <= size or size & (size - 1) or not 0 <= used <= len(chains):
            raise damaged(
                f"fragments {begin} ... {end - 1} of {used} trajectories are more than its tables hold"
            )

        # Fragment n is at index n modulo the table's length, a power of two.
        live = table[np.arange(begin, end) & (size - 1)]
        firsts, chain, pool = (live[name].astype(np.int64) for name in ("first", "chain", "pool"))

        # The oldest row is in the first fragment; the others follow in ascending order.
        begins = np.append(firsts, written)
        in_order = head == written
        if len(live):
            in_order = 0 <= begins[0] <= head < begins[1] and bool((np.diff(begins) > 0).all())
        if not in_order:
            raise damaged(f"its {len(live)} fragments do not cover the rows {head} ... {written - 1}")
        if (chain < 0).any() or (chain >= used).any():
            raise damaged(f"a fragment belongs to none of its {used} trajectories")

        taken = np.sort(pool[pool >= 0])
        if (pool < -1).any() or taken.max(initial=-1) >= pool_size or (np.diff(taken) == 0).any():
            raise damaged(f"its fragments do not refer to distinct ones of {pool_size} pool entries")

        free = _free_places(chains["last"], int(counters["free"]), used, chain)
        is_spare = np.ones(pool_size, np.bool_)
        is_spare[taken] = False
        return cls(firsts, chain, pool, chains["id"][:used], free, np.flatnonzero(is_spare))


def _free_places(following: Array, first: int, used: int, chain: Array) -> Array:
    """Return the places below ``used`` that no ``chain`` names, in the order of the linked list from ``first`` on.

    ``following[c]`` is 1 + the place after place c, as ``first`` is; 0 ends the list. ValueError if they are others.
    """
    is_free = np.ones(used, np.bool_)
    is_free[chain] = False
    order = []
    at = first - 1
    while 0 <= at < used and is_free[at]:
        is_free[at] = False  # clear the flag, so that a cycle ends the loop
        order.append(at)
        at = int(following[at]) - 1

    if at != -1 or is_free.any():
        raise damaged("its list of free trajectories does not hold each of them once")
    return np.array(order, np.int64)
