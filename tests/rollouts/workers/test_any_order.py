"""Ctrl-C at some places of collectors, buffers and saves, and random programs with forks, threads, copies and saves.

The command in `any_order` presses at N places of each, and plays N programs.
"""

from pathlib import Path

import any_order
import pytest
from forms import scaled

from flatroll.sharing import Nursery


@pytest.mark.parametrize("kind", any_order.CASES, ids=lambda kind: kind.__name__)
def test_a_second_call_works_wherever_the_first_is_interrupted(
    kind: type[any_order.Case], nursery: Nursery, tmp_path: Path
) -> None:
    places = scaled(quick=3, long=20)
    _, presses, interrupts = any_order.sweep(kind, nursery, tmp_path, places)
    assert presses >= places and interrupts


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Ctrl-C in a function of a fork
@pytest.mark.parametrize("seed", scaled(quick=[0], long=range(6)))
def test_programs_in_any_order(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    any_order.play(nursery, tmp_path, seed, 12)
