"""A sum tree over the slots of a ring, for drawing in proportion to weights; compiled kernels.

A node has ``FAN`` children. It holds the sum of its children and the least positive weight below it, both recomputed
from the children whenever one of them changes, so rounding errors do not accumulate and a tree is a pure function of
its weights. The sums and the least weights of ``FAN`` siblings are adjacent, in two cache lines.

This module imports numba: import it inside the function that needs it.
"""

from typing import Any

import numpy as np

from flatroll.kernels.compiled import Array, Int, compiled, helper

Float = Any

#: Children per node. Of 4, 8, 16 and 32, measured at 1 and 10 million leaves, 8 updates fastest and draws as
#: fast as 4.
FAN = 8
_LINE = 64  # bytes of a cache line
_TINY = float(np.finfo(np.float64).tiny)
#: Weights stay below ``10 ** LARGEST``, so that the sum of 10^18 of them is finite.
LARGEST = 290


@compiled()
def weight(priority: Float, eps: Float, alpha: Float) -> Float:
    """Return ``(priority + eps) ** alpha``; it underflows to 0 only if ``priority + eps`` is 0."""
    base = np.float64(priority) + eps
    value = base**alpha

    if base > 0.0 and value < _TINY:
        return _TINY
    return value


@helper
def _refresh(nodes: Array, levels: Array, k: Int, i: Int) -> None:
    """Compute node ``i`` of level ``k`` from its children."""
    total = 0.0
    least = np.inf

    # leaves hold weights only; a group of FAN siblings of a higher level holds FAN sums, then FAN least weights
    if k == 1:
        at = levels[0, 0] + i * FAN
        for j in range(FAN):
            leaf = nodes[at + j]
            total += leaf
            if 0.0 < leaf < least:
                least = leaf
    else:
        at = levels[k - 1, 0] + i * 2 * FAN
        for j in range(FAN):
            total += nodes[at + j]
            least = min(least, nodes[at + FAN + j])

    # the node's own entries, in the group of its siblings
    at = levels[k, 0] + i // FAN * 2 * FAN + i % FAN
    nodes[at] = total
    nodes[at + FAN] = least


@helper
def _refresh_from(nodes: Array, levels: Array, k: Int) -> None:
    """Recompute all nodes of the levels ``k`` and above."""
    for level in range(k, len(levels)):
        for i in range(levels[level, 1]):
            _refresh(nodes, levels, level, i)


@compiled()
def set_leaves(nodes: Array, levels: Array, slots: Array, weights: Array) -> None:
    """Set the leaves ``slots``; of duplicate slots, the last weight counts."""
    for i in range(len(slots)):
        nodes[levels[0, 0] + slots[i]] = weights[i]

    # level by level, refresh the parents of changed nodes; adjacent nodes with a common parent are merged in place
    children = slots.copy()
    count = len(slots)
    for k in range(1, len(levels)):
        if levels[k, 1] <= count:  # fewer nodes than changes
            _refresh_from(nodes, levels, k)

            return

        last = np.int64(-1)
        parents = 0
        for i in range(count):
            parent = children[i] // FAN
            if parent != last:
                _refresh(nodes, levels, k, parent)
                last = parent
                children[parents] = parent
                parents += 1
        count = parents


@compiled()
def fill_leaves(nodes: Array, levels: Array, first: Int, count: Int, value: Float) -> None:
    """Set ``count`` leaves, at least 1, from ``first`` on to one weight."""
    low = first
    high = first + count - 1
    nodes[levels[0, 0] + low : levels[0, 0] + high + 1] = value
    for k in range(1, len(levels)):
        # parents of the first and the last changed node; all nodes between them are parents of changed nodes as well
        low = low // FAN
        high = high // FAN
        for i in range(low, high + 1):
            _refresh(nodes, levels, k, i)


@compiled()
def find(nodes: Array, levels: Array, uniform: Array, slots: Array) -> None:
    """Find the leaf at each fraction ``uniform`` (float64 in [0, 1)) of the total; never one of weight 0.

    All searches descend level by level together, so that their cache misses overlap, and count the children to skip
    instead of branching at each. If rounding leaves a fraction beyond the last child, the last child with a weight is
    used.
    """
    depth = len(levels) - 1
    total = nodes[levels[depth, 0]]
    rest = uniform * total  # weight between the node's first leaf and the hit
    slots[:] = 0

    for k in range(depth - 1, -1, -1):
        stride = FAN if k == 0 else 2 * FAN
        for i in range(len(uniform)):
            # ``slots[i]`` is the parent; its children are adjacent on this level
            at = levels[k, 0] + slots[i] * stride
            passed = 0.0
            before = 0.0
            child = 0
            for j in range(FAN):
                passed += nodes[at + j]
                if passed <= rest[i]:
                    before = passed
                    child += 1

            # rounding left a remainder beyond all children
            if child == FAN:
                child -= 1
                while child > 0 and nodes[at + child] <= 0.0:
                    child -= 1
            else:
                rest[i] -= before

            slots[i] = slots[i] * FAN + child


@compiled()
def draw(
    nodes: Array,
    levels: Array,
    head: Int,
    capacity: Int,
    uniform: Array,
    slots: Array,
    ratios: Array,
    generation: Array,
) -> None:
    """Draw a slot for each of ``uniform``.

    ``ratios`` becomes its weight divided by the least weight, ``generation`` the number of times its slot was
    overwritten, given the oldest row ``head``.
    """
    find(nodes, levels, uniform, slots)
    least = nodes[levels[len(levels) - 1, 0] + FAN]
    # slots before the head's slot have been written once more than the others
    base = head % capacity
    turn = head // capacity

    for i in range(len(slots)):
        ratios[i] = nodes[slots[i]] / least
        generation[i] = turn + (slots[i] < base)


@compiled()
def spread(
    head: Int,
    capacity: Int,
    ratios: Array,
    firsts: Array,
    lasts: Array,
    slots: Array,
    each: Array,
    generation: Array,
) -> None:
    """Set entries ``firsts[j] ... lasts[j]`` of ``each`` to ``ratios[j]``; set the ``generation`` of these rows."""
    base = head % capacity
    turn = head // capacity
    for j in range(len(ratios)):
        for i in range(firsts[j], lasts[j] + 1):
            each[i] = ratios[j]
            generation[i] = turn + (slots[i] < base)


@compiled()
def weigh(
    nodes: Array, levels: Array, slots: Array, priority: Array, drawable: Array, eps: Float, alpha: Float
) -> None:
    """Set the leaves ``slots`` to the weights of their ``priority`` (of all slots), 0 where not ``drawable``."""

    weights = np.zeros(len(slots))
    for i in range(len(slots)):
        if drawable[slots[i]]:
            weights[i] = weight(priority[slots[i]], eps, alpha)
    set_leaves(nodes, levels, slots, weights)


@compiled()
def weigh_all(
    nodes: Array, levels: Array, priority: Array, drawable: Array, eps: Float, alpha: Float
) -> None:
    """Set all leaves to the weights of their priorities, as :func:`weigh` does."""
    for slot in range(len(priority)):
        nodes[slot] = weight(priority[slot], eps, alpha) if drawable[slot] else 0.0
    _refresh_from(nodes, levels, 1)


@compiled()
def standing(
    head: Int, written: Int, capacity: Int, most: Float, slots: Array, priority: Array, generation: Array
) -> tuple[Int, Int, Int]:
    """Move updates of rows that are still stored to the front of ``slots`` and ``priority``.

    The slot -1, unreadable rows, and, if ``generation`` is not empty, rows of another generation are left out.

    Returns:
        number of updates that remain; position of the first slot that was never written, and of the first priority that
        is negative, NaN or above ``most``, -1 for none.
    """
    front = 0
    base = head % capacity
    turn = head // capacity

    for i in range(len(slots)):
        slot = slots[i]
        value = priority[i]
        if slot == -1:
            continue

        if slot < -1 or slot >= min(capacity, written):
            return front, i, -1
        if not 0 <= value <= most:
            return front, -1, i
        # generation of the row now in the slot; ``now * capacity + slot`` is its row number

        now = turn + (slot < base)
        if now * capacity + slot < written and (len(generation) == 0 or now == generation[i]):
            slots[front] = slot
            priority[front] = value
            front += 1
    return front, -1, -1


class SumTree:
    """A sum tree with the weights of ``capacity`` slots, 0 at first; draws slots by weight.

    Setting and drawing take O(log capacity) per slot; filling consecutive slots takes time in their number. Weights are
    float64. The caller must make sure that their sum is finite.

    Args:
        capacity: number of slots.

    >>> import numpy as np
    >>> tree = SumTree(100)
    >>> tree.fill(96, 4, 0.5)
    >>> tree.set(np.array([7, 7]), np.array([9.0, 2.0]))
    >>> tree.total, tree.least, tree.sample(np.array([0.0, 0.49, 0.5, 0.99])).tolist()
    (4.0, 0.5, [7, 7, 96, 99])
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

        # (first entry, nodes) of each level: the leaves, then sums and least weights, up to one node
        count = _whole_nodes(capacity)
        levels = [(0, count)]
        size = count
        while count > 1:
            count = _whole_nodes(count) // FAN
            levels.append((size, count))
            size += 2 * _whole_nodes(count)

        # the first entry is aligned to a cache line, so that groups of siblings fill whole lines
        memory = np.zeros(size + _LINE // 8)
        skip = -memory.ctypes.data % _LINE // 8

        self.nodes: Array = memory[skip : skip + size]
        self.levels: Array = np.array(levels)
        self.nodes[levels[1][0] :].reshape(-1, 2, FAN)[:, 1] = np.inf

    def __getstate__(self) -> tuple[int, Array]:
        return self.capacity, self.leaves.copy()

    def __setstate__(self, state: tuple[int, Array]) -> None:
        capacity, leaves = state
        # Draws descend the sums: a negative weight or NaN could lead them anywhere.
        if leaves.shape != (capacity,) or not bool((leaves >= 0).all()) or not np.isfinite(leaves.sum()):
            raise ValueError(
                f"the pickle is damaged: {leaves.shape} leaves are not weights of {capacity} slots"
            )

        SumTree.__init__(self, capacity)
        self.leaves[:] = leaves
        _refresh_from(self.nodes, self.levels, 1)

    @property
    def leaves(self) -> Array:
        """The weights, float64 ``[capacity]``; do not write to them."""
        return self.nodes[: self.capacity]

    @property
    def total(self) -> float:
        """Sum of the weights."""
        return float(self.nodes[self.levels[-1, 0]])

    @property
    def least(self) -> float:
        """Least of the weights above 0; infinity if there is none."""
        return float(self.nodes[self.levels[-1, 0] + FAN])

    @property
    def nbytes(self) -> int:
        """Bytes of the tree."""
        return self.nodes.nbytes + self.levels.nbytes

    def set(self, slots: Array, weights: Array) -> None:
        """Set the weights of ``slots`` (int64 ``[N]``); of duplicate slots, the last one counts.

        Raises:
            IndexError: a slot is out of range.
            ValueError: a weight is negative, infinite or NaN, or there is not one per slot.
        """
        places = np.array(slots, np.int64)
        values = np.array(weights, np.float64)
        if places.ndim != 1 or places.shape != values.shape:
            raise ValueError(f"weights must have one number per slot, got {values.shape} for {places.shape}")
        if len(places) and not 0 <= places.min() <= places.max() < self.capacity:
            raise IndexError(f"slots {places} are not all among the {self.capacity} of the tree")
        if not np.all((values >= 0) & (values < np.inf)):
            raise ValueError(f"weights must be finite numbers of at least 0, got {values}")

        set_leaves(self.nodes, self.levels, places, values)

    def fill(self, first: int, count: int, value: float) -> None:
        """Set ``count`` slots from ``first`` on to one weight; errors as for :meth:`set`."""
        if not 0 <= first <= first + count <= self.capacity:
            raise IndexError(
                f"{count} slots from {first} on are not all among the {self.capacity} of the tree"
            )
        if not 0 <= value < np.inf:
            raise ValueError(f"a weight must be a finite number of at least 0, got {value}")

        if count:
            fill_leaves(self.nodes, self.levels, first, count, value)

    def sample(self, uniform: Array) -> Array:
        """Return the slots at the fractions ``uniform`` (float64 ``[N]`` in [0, 1)) of the total.

        Raises:
            ValueError: a fraction is out of this range, or the total is 0.
        """
        shares = np.array(uniform, np.float64)
        if shares.ndim != 1 or not np.all((shares >= 0) & (shares < 1)) or not 0 < self.total < np.inf:
            raise ValueError(
                f"shares must be from 0 up to 1, of a total above 0, got {uniform} of {self.total}"
            )

        slots = np.empty(len(shares), np.int64)
        find(self.nodes, self.levels, shares, slots)
        return slots


def _whole_nodes(count: int) -> int:
    """Return ``count`` rounded up to a multiple of ``FAN``."""
    return -(-count // FAN) * FAN
