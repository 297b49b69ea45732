"""A heap of the slots that hold rows, the worst row on top, with compiled kernels.

``heap`` (int64 ``[capacity]``) holds every slot once: the first ``state["live"]`` entries are the heap, the others
are the free slots in the order in which they will be taken. ``rank`` (float64) and ``number`` (int64) are by slot.
Of two rows of equal rank the later one, by number, is the worse.

This module imports numba: import it inside the function that needs it. All kernels are in one file because
numba's cache does not notice a change in a callee that stands in another file.
"""

from typing import Any

from numpy.typing import NDArray

from flatroll.kernels.scans.scan import compiled

Array = NDArray[Any]
Int = Any  # a 64-bit integer of NumPy's or Python's


@compiled()
def _worse(rank: Array, number: Array, a: Int, b: Int) -> Any:
    """Whether the row in slot ``a`` has to go before the one in slot ``b``."""
    return rank[a] < rank[b] or (rank[a] == rank[b] and number[a] > number[b])


@compiled()
def _sink(heap: Array, rank: Array, number: Array, live: Int) -> None:
    """Move the entry on top down to its place."""
    slot, i = heap[0], 0
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
    """Take the rows out of the heap that better ones replace; how many of ``best`` there is room for.

    Their slots are the first free ones. Rows taken out get the number ``gone``.

    Args:
        best: ranks of the new rows, highest first.
    """
    live = state[0]["live"]
    room = min(len(best), len(heap) - live)
    while room < len(best) and live > 0 and best[room] > rank[heap[0]]:
        live -= 1
        slot = heap[0]
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
    """Put the first free slots into the heap, with these ranks and numbers; ``offered`` rows have been dealt with."""
    live, used = state[0]["live"], state[0]["used"]
    for k in range(len(ranks)):
        i = live + k
        slot = heap[i]
        used = max(used, slot + 1)
        rank[slot], number[slot] = ranks[k], numbers[k]
        while i > 0:
            parent = (i - 1) // 2
            if not _worse(rank, number, slot, heap[parent]):
                break
            heap[i] = heap[parent]
            i = parent
        heap[i] = slot
    state[0]["live"], state[0]["used"] = live + len(ranks), used
    state[0]["written"] += offered
    state[0]["head"] = state[0]["written"] - state[0]["live"]
