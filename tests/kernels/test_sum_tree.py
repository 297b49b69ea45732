"""The sum tree against a list of its weights."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
from forms import examples
from hypothesis import given
from hypothesis import strategies as st

from flatroll.kernels.trees import sum_tree
from flatroll.kernels.trees.sum_tree import LARGEST, SumTree

#: Weights that differ by hundreds of orders of magnitude, and zeros.
WEIGHTS = st.sampled_from([0.0, 0.0, 5e-324, 1e-300, 1e-8, 0.1, 1 / 3, 1.0, 7.0, 1e16, 10.0**LARGEST])
ALMOST_1 = math.nextafter(1.0, 0.0)


@st.composite
def changes(draw: Any) -> tuple[int, list[Any]]:
    """A capacity and a list of changes: ``(slots, weights)`` or ``(first, count, weight)``."""
    capacity = draw(st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65, 500, 513, 4100]))
    slot = st.integers(0, capacity - 1)
    pairs = st.lists(st.tuples(slot, WEIGHTS), max_size=80)
    stretch = st.tuples(slot, st.integers(0, capacity), WEIGHTS)
    return capacity, draw(st.lists(st.one_of(pairs, stretch), max_size=8))


def made(capacity: int, steps: list[Any]) -> tuple[SumTree, list[float]]:
    tree, model = SumTree(capacity), [0.0] * capacity
    for step in steps:
        if isinstance(step, tuple):
            first, count, value = step
            count = min(count, capacity - first)
            tree.fill(first, count, value)
            model[first : first + count] = [value] * count
        else:
            slots, weights = [s for s, _ in step], [w for _, w in step]
            tree.set(np.array(slots, np.int64), np.array(weights, np.float64))
            for slot, weight in step:
                model[slot] = weight
    return tree, model


@examples(60, derandomize=True)
@given(changes())
def test_tree_equals_the_list_of_its_weights(case: tuple[int, list[Any]]) -> None:
    capacity, steps = case
    tree, model = made(capacity, steps)
    assert tree.leaves.tolist() == model
    assert tree.total == pytest.approx(math.fsum(model), rel=1e-12)
    assert tree.least == min((w for w in model if w > 0), default=math.inf)
    fresh = SumTree(capacity)
    fresh.set(np.arange(capacity), np.array(model))
    assert np.array_equal(tree.nodes, fresh.nodes)  # whatever the way there


@examples(60, derandomize=True)
@given(changes(), st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20))
def test_a_share_falls_into_the_weight_that_reaches_it(
    case: tuple[int, list[Any]], shares: list[float]
) -> None:
    tree, model = made(*case)
    if not tree.total:
        return
    shares = [*shares, 0.0, ALMOST_1]
    before, total = np.concatenate([[0.0], np.cumsum(model)]), math.fsum(model)
    for share, slot in zip(shares, tree.sample(np.array(shares)), strict=True):
        assert model[slot] > 0
        assert before[slot] <= share * total * (1 + 1e-9)
        assert before[slot + 1] >= share * total * (1 - 1e-9)


@pytest.mark.parametrize("capacity", [1, 8, 9, 100, 5000])
def test_only_slot_with_a_weight_is_found_whatever_the_share(capacity: int) -> None:
    shares = np.array([0.0, 0.3, ALMOST_1])
    for slot in {0, capacity // 2, capacity - 1}:
        for weight in (5e-324, 0.1, 10.0**LARGEST):
            tree = SumTree(capacity)
            tree.fill(slot, 1, weight)
            assert tree.sample(shares).tolist() == [slot] * 3


def test_frequencies_are_the_weights() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random(300) ** 4
    weights[rng.random(300) < 0.3] = 0.0
    tree = SumTree(300)
    tree.set(np.arange(300), weights)
    count = 200_000
    found = np.bincount(tree.sample(rng.random(count)), minlength=300)
    expected = count * weights / weights.sum()
    kept = expected > 5
    chi_square = ((found - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < kept.sum() + 5 * math.sqrt(2 * kept.sum())
    assert not found[weights == 0].any()


def test_sums_do_not_drift() -> None:
    """A tree of running differences would keep the rounding errors of the large weight."""
    tree = SumTree(10)
    tree.fill(0, 10, 0.1)
    total = tree.total
    for _ in range(100):
        tree.fill(3, 1, 1e18)
        tree.fill(3, 1, 0.1)
    assert tree.total == total


@pytest.mark.parametrize("count", [3, 40, 4000])
def test_the_last_of_several_weights_of_a_slot_stays(count: int) -> None:
    tree = SumTree(1000)
    tree.set(np.arange(count) % 3, np.arange(count, dtype=np.float64))
    assert tree.total == tree.leaves[:3].sum() == sum(range(count - 3, count))


def test_large_tree() -> None:
    tree = SumTree(10_000_000)
    tree.fill(0, 10_000_000, 1.0)
    assert tree.total == 1e7
    assert tree.sample(np.array([0.0, 0.5, ALMOST_1])).tolist() == [0, 5_000_000, 9_999_999]
    assert tree.nbytes < 10.4 * 10_000_000
    tree.fill(5, 9_999_990, 0.0)
    tree.set(np.array([9_999_999]), np.array([95.0]))
    assert tree.sample(np.array([0.0, 0.04, 0.08, 0.5])).tolist() == [0, 4, 9_999_998, 9_999_999]


def test_pickled_tree_is_the_same() -> None:
    tree = SumTree(77)
    tree.set(np.arange(0, 77, 3), np.arange(26.0))
    copy = pickle.loads(pickle.dumps(tree))
    assert np.array_equal(copy.nodes, tree.nodes)
    copy.fill(0, 77, 0.0)
    assert tree.total == sum(range(26)) and copy.total == 0
    assert copy.nodes.ctypes.data % 64 == tree.nodes.ctypes.data % 64 == 0


def test_weight_of_a_priority() -> None:
    assert sum_tree.weight(2.0, 0.0, 0.5) == math.sqrt(2)
    assert sum_tree.weight(np.float32(0.5), 0.25, 2.0) == 0.5625
    assert sum_tree.weight(0.0, 0.0, 1.0) == 0.0
    assert sum_tree.weight(0.0, 1e-8, 50.0) > 0  # 1e-400 would be 0
    assert sum_tree.weight(0.0, 0.0, 0.0) == sum_tree.weight(9.0, 0.0, 0.0) == 1.0
