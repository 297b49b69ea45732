"""The quick form leaves out repetitions, and no kind of check."""

from itertools import combinations, product

import forms
import pytest

AXES = {"storage": range(5), "sampler": range(4), "steps": range(3)}
GRID = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]


def pairs(choices: list[dict[str, int]]) -> set[object]:
    return {pair for choice in choices for pair in combinations(sorted(choice.items()), 2)}


def test_each_pair_of_values_meets_in_less_than_half_of_the_grid() -> None:
    kept = [choice for choice, stays in zip(GRID, forms.covering(GRID, 2), strict=True) if stays]
    assert pairs(kept) == pairs(GRID)
    assert 5 * 4 <= len(kept) <= len(GRID) / 2


def test_each_value_occurs_in_as_many_as_the_longest_axis_has() -> None:
    kept = [choice for choice, stays in zip(GRID, forms.covering(GRID, 1), strict=True) if stays]
    assert len(kept) == 5
    assert all({choice[name] for choice in kept} == set(axis) for name, axis in AXES.items())


def test_a_combination_that_is_missing_is_not_asked_for() -> None:
    some = [choice for choice in GRID if choice["storage"] != choice["sampler"]]
    kept = [choice for choice, stays in zip(some, forms.covering(some, 2), strict=True) if stays]
    assert pairs(kept) == pairs(some)


@pytest.mark.cover(2)
@pytest.mark.parametrize("storage", [object() for _ in AXES["storage"]])
@pytest.mark.parametrize("sampler", AXES["sampler"])
@pytest.mark.parametrize("steps", AXES["steps"])
def test_a_marked_test_has_fewer_combinations(
    storage: object, sampler: int, steps: int, request: pytest.FixtureRequest
) -> None:
    mine = [
        item
        for item in request.session.items
        if item.nodeid.partition("[")[0] == request.node.nodeid.partition("[")[0]
    ]
    if forms.is_long():
        assert len(mine) == 60
    else:
        assert len(mine) <= 30


@pytest.mark.long
def test_what_is_marked_long_runs_there_alone() -> None:
    assert forms.is_long()
