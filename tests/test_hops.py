"""A call enters few functions and files: that is what its reader has to follow."""

import pytest

from flatroll.benchmarks.shape.hops import Function, count_hops, entered

# Call: functions, files.
BUDGETS = {
    "GAE": (25, 8),
    "ClipPPOLoss": (30, 7),
    "extend": (25, 8),
    "extend, compact": (35, 10),
    "sample slices": (25, 8),
    "sample slices, compact": (35, 10),
    "collector step": (35, 9),
}


@pytest.fixture(scope="module")
def hops() -> dict[str, set[Function]]:
    return count_hops()


@pytest.mark.parametrize("call", BUDGETS)
def test_a_call_stays_within_its_budget(call: str, hops: dict[str, set[Function]]) -> None:
    functions, files = len(hops[call]), len({function.file for function in hops[call]})
    most_functions, most_files = BUDGETS[call]
    assert functions <= most_functions and files <= most_files, sorted(hops[call])


def test_a_function_counts_once_and_comprehensions_count_with_it() -> None:
    from flatroll.layout import as_tuple

    found = entered(lambda: [as_tuple(key) for key in ("a", "b", ("c", "d"))])
    assert [(function.file, function.name) for function in found] == [("layout/keys.py", "as_tuple")]
