"""A heap of the occupied slots, with the lowest-ranked row on top; compiled kernels.

``heap`` (int64 ``[capacity]``) holds every slot once: the first ``state["live"]`` entries are the heap, the others
are the free slots in the order of use. ``rank`` (float64) and ``number`` (int64) are indexed by slot. Of two rows of
equal rank the one with the higher number is the worse.

This module imports numba: import it inside the function that needs it.
"""

from typing import Any

from flatroll.kernels.compiled import Array, Int, compiled, helper


@helper
def _worse(rank: Array, number: Array, a: Int, b: Int) -> Any:
    """Return whether the row in slot ``a`` is dropped before the one in slot ``b``."""
    return rank[a] < rank[b] or (rank[a] == rank[b] and number[a] > number[b])


@helper
def _sink(heap: Array, rank: Array, number: Array, live: Int) -> None:
    """Move the entry on top down to its place."""
    slot = heap[0]
    i = 0

    # the children of entry i are the entries 2 i + 1 and 2 i + 2; the worse of them moves up
    while 2 * i + 1 < live:
        child = 2 * i + 1
        if child + 1 < live and _worse(rank, number, heap[child + 1], heap[child]):
            child += 1

        if not _worse(rank, number, heap[child], slot):
            break

        heap[i] = heap[child]
        i = child

    heap[i] = slot


@compiled()
def make_room(state: Array, heap: Array, rank: Array, number: Array, best: Array, gone: Int) -> Int:
    """Remove rows that new, higher-ranked ones replace; return how many rows of ``best`` fit.

    Their slots are the first free ones. Removed rows get the number ``gone``.

    Args:
        best: ranks of the new rows, highest first.
    """
    live = state[0]["live"]

    # use free slots first, then those of rows that are worse than the best new row without a slot
    room = min(len(best), len(heap) - live)
    while room < len(best) and live > 0 and best[room] > rank[heap[0]]:
        live -= 1
        slot = heap[0]
        # the worst row's slot becomes the first free one; the slot that was there sinks to its place
        heap[0], heap[live] = heap[live], slot
        _sink(heap, rank, number, live)

        number[slot] = gone

        room += 1

    state[0]["live"] = live
    state[0]["head"] = state[0]["written"] - live
    return room


@compiled()
def push(
    state: Array, heap: Array, rank: Array, number: Array, offered: Int, ranks: Array, numbers: Array
) -> None:
    """Insert new rows with these ranks and numbers into the first free slots.

    Args:
        state, heap, rank, number: the heap; there is room for the new rows (:func:`make_room`).
        offered: number of rows offered, including those without room.
        ranks, numbers: ranks and numbers of the rows to insert.
    """
    live = state[0]["live"]
    used = state[0]["used"]

    for k in range(len(ranks)):
        i = live + k
        slot = heap[i]
        used = max(used, slot + 1)  # slots ever used come first
        rank[slot] = ranks[k]
        number[slot] = numbers[k]

        # up towards the top, past parents that are better
        while i > 0:
            parent = (i - 1) // 2
            if not _worse(rank, number, slot, heap[parent]):
                break
            heap[i] = heap[parent]
            i = parent
        heap[i] = slot

    state[0]["live"] = live + len(ranks)
    state[0]["used"] = used
    state[0]["written"] += offered
    state[0]["head"] = state[0]["written"] - state[0]["live"]
