"""Reads the fragments of a saved trajectory index, checked, to build its tables anew."""

from typing import Any, NamedTuple

import numpy as np

from flatroll.buffers.index.saved_tables import Array, check_table, damaged
from flatroll.kernels.rows.records import CHAIN, FRAGMENT


class SavedFragments(NamedTuple):
    """The F stored fragments of a saved trajectory index, from which all its tables are built anew.

    Attributes:
        firsts: int64 ``[F]``, number of each fragment's first row, ascending; the first one holds the oldest row.
        chains: int64 ``[F]``, the trajectory that each is of: its place in the table of trajectories.
        pool: int64 ``[F]``, pool entry with the next observation of the last row, -1 for none; all distinct.
        ids: int64 ``[C]``, trajectory ids by place, of places in use and free ones.
        free: int64, the free places, in the order in which they will be taken.
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
        """Read the fragments of ``state``, whose record ``counters`` has right counts of rows; ValueError if they are
        not those of these rows."""
        table, chains = state["fragments"], state["chains"]
        check_table("fragments", table, FRAGMENT)
        check_table("trajectories", chains, CHAIN)
        check_table("spare entries", state["spare"], np.dtype(np.int64))
        names = ("first", "end", "slots", "head", "written")
        begin, end, used, head, written = (int(counters[name]) for name in names)
        size, pool_size = len(table), len(state["spare"])
        if not 0 <= end - begin <= size or size & (size - 1) or not 0 <= used <= len(chains):
            raise damaged(
                f"fragments {begin} ... {end - 1} of {used} trajectories are more than its tables hold"
            )
        # Fragment n stands at n modulo the table's length, a power of two.
        live = table[np.arange(begin, end) & (size - 1)]
        firsts, chain, pool = (live[name].astype(np.int64) for name in ("first", "chain", "pool"))
        # The oldest row is in the first fragment; the others begin after it, each after the one before.
        begins = np.append(firsts, written)
        in_order = len(live) > 0 and 0 <= begins[0] <= head < begins[1] and bool((np.diff(begins) > 0).all())
        if not in_order and (len(live) or head != written):
            raise damaged(f"its {len(live)} fragments are not the rows {head} ... {written - 1}")
        if bool((chain < 0).any()) or bool((chain >= used).any()):
            raise damaged(f"a fragment is of none of its {used} trajectories")
        taken = np.sort(pool[pool >= 0])
        if bool((pool < -1).any()) or taken.max(initial=-1) >= pool_size or bool((np.diff(taken) == 0).any()):
            raise damaged(f"its fragments do not name distinct ones of {pool_size} pool entries")
        free = _free_places(chains["last"], int(counters["free"]), used, chain)
        is_spare = np.ones(pool_size, np.bool_)
        is_spare[taken] = False
        return cls(firsts, chain, pool, chains["id"][:used], free, np.flatnonzero(is_spare))


def _free_places(following: Array, first: int, used: int, chain: Array) -> Array:
    """The places below ``used`` that no fragment's ``chain`` names, in the order of the list from ``first`` on.

    ``following[c]`` is 1 + the place after place c, as ``first`` is; 0 ends the list. ValueError if they are others.
    """
    is_free = np.ones(used, np.bool_)
    is_free[chain] = False
    order, at = list[int](), first - 1
    while 0 <= at < used and is_free[at]:
        is_free[at] = False  # each once: a circle would have no end
        order.append(at)
        at = int(following[at]) - 1
    if at != -1 or is_free.any():
        raise damaged("its list of free trajectories does not hold each of them once")
    return np.array(order, np.int64)
