"""The heap of ranked slots against a sorted list."""

from typing import Any

import numpy as np
import pytest

from flatroll.kernels.trees import heap as kernels

STATE = np.dtype([(name, "i8") for name in ("head", "written", "taken", "live", "used")])
GONE = np.iinfo(np.int64).max


def tables(capacity: int) -> tuple[Any, Any, Any, Any]:
    return np.zeros(1, STATE), np.arange(capacity), np.zeros(capacity), np.full(capacity, GONE)


def put(made: tuple[Any, Any, Any, Any], ranks: list[float]) -> int:
    best = np.sort(np.array(ranks, float))[::-1].copy()
    room = int(kernels.make_room(*made, best, GONE))
    first = int(made[0]["written"][0])
    kernels.push(*made, len(ranks), best[:room], first + np.arange(room))
    return room


@pytest.mark.parametrize("capacity", [1, 2, 7, 64])
def test_the_heap_holds_the_highest_ranks(capacity: int) -> None:
    random = np.random.default_rng(capacity)
    made = tables(capacity)
    state, heap, rank, number = made
    best: list[float] = []
    for _ in range(200):
        ranks = random.integers(-8, 8, random.integers(1, 12)).astype(float).tolist()
        put(made, ranks)
        best = sorted(best + ranks)[-capacity:]
        live = int(state["live"][0])
        assert live == len(best) == state["written"][0] - state["head"][0]
        assert sorted(rank[heap[:live]].tolist()) == best
        assert sorted(heap.tolist()) == list(range(capacity))
        assert (number[heap[:live]] < GONE).all() and (number[heap[live:]] == GONE).all()
        for i in range(1, live):  # no row is worse than its parent
            child, parent = heap[i], heap[(i - 1) // 2]
            assert (rank[parent], -number[parent]) < (rank[child], -number[child])


def test_of_equal_ranks_the_later_row_goes_first() -> None:
    made = tables(3)
    for _ in range(3):
        put(made, [1.0])
    assert made[3].tolist() == [0, 1, 2]
    assert put(made, [1.0]) == 0
    assert put(made, [2.0]) == 1
    assert made[3].tolist() == [0, 1, 4]  # row 2 went, the later ones of rank 1 were never in


def test_rows_that_made_room_are_gone_though_nothing_came() -> None:
    made = tables(4)
    state, heap, _, number = made
    put(made, [1.0, 2.0, 3.0, 4.0])
    assert kernels.make_room(*made, np.array([9.0, 2.5, 0.5]), GONE) == 2
    assert int(state["live"][0]) == 2 and sorted(number.tolist())[2:] == [GONE, GONE]
    assert put(made, [0.1, 0.2]) == 2
    assert sorted(heap.tolist()) == [0, 1, 2, 3] and state["used"][0] == 4
