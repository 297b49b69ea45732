"""The suite has two forms: the quick one, which a change must pass, and the long one, ``pytest --long``.

Both make every kind of check. The long form makes more of each: more random examples, whole grids instead of the
combinations in which each two values meet once, every program instead of one of each family.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")

#: Of the examples that a test asks for, the quick form draws this share.
QUICK_SHARE = 1 / 4
#: But at least so many.
FEWEST = 6

_chosen = {"long": False}


def choose(config: pytest.Config) -> None:
    """Called by conftest.py before any test file is imported."""
    _chosen["long"] = config.getoption("--long")

    try:
        from hypothesis import settings
    except ModuleNotFoundError:  # of an environment for some of the tests
        return

    # The quick form draws the same examples in each run: whether a change passes does not depend on the day.
    count = examples_count(100)
    settings.register_profile("quick", max_examples=count, deadline=None, derandomize=True)
    settings.register_profile("long", max_examples=count, deadline=None, print_blob=True)
    settings.load_profile("long" if is_long() else "quick")


def is_long() -> bool:
    return _chosen["long"]


def scaled(quick: Value, long: Value) -> Value:
    """The first in the quick form, the second in the long one."""
    return long if is_long() else quick


def examples_count(count: int) -> int:
    """How many examples a test draws that asks for ``count``."""
    return scaled(quick=max(FEWEST, round(count * QUICK_SHARE)), long=count)


def examples(count: int, **others: Any) -> Any:
    """``hypothesis.settings`` for a test that asks for ``count`` examples; ``others`` are further settings."""
    from hypothesis import settings

    return settings(max_examples=examples_count(count), **others)


def covering(choices: Sequence[dict[str, int]], strength: int) -> list[bool]:
    """Which of these combinations to keep, so that any values of ``strength`` parameters that meet in one still do.

    Args:
        choices: the combinations, each with a number of its value for each parameter.
        strength: 1 keeps each value once, 2 each pair of values.
    """
    wanted = [
        {tuple((name, choice[name]) for name in names) for names in combinations(sorted(choice), strength)}
        for choice in choices
    ]
    missing = set().union(*wanted)
    kept = [False] * len(choices)

    while missing:
        gains = [len(one & missing) for one in wanted]
        best = gains.index(max(gains))
        kept[best] = True
        missing -= wanted[best]

    return kept


def quick(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of the quick form, and the others.

    Others are those with ``@pytest.mark.long``, and of a test with ``@pytest.mark.cover(strength)`` the combinations
    of parameters that `covering` leaves out.
    """
    others = {item for item in items if item.get_closest_marker("long")}

    grids: dict[tuple[str, int], list[pytest.Function]] = {}
    for item in items:
        cover = item.get_closest_marker("cover")
        if cover is not None and isinstance(item, pytest.Function):
            grids.setdefault((item.nodeid.partition("[")[0], *cover.args), []).append(item)

    for (_, strength), grid in grids.items():
        choices = [{name: id(value) for name, value in item.callspec.params.items()} for item in grid]
        kept = covering(choices, strength)
        others.update(item for item, stays in zip(grid, kept, strict=True) if not stays)

    return [item for item in items if item not in others], [item for item in items if item in others]
