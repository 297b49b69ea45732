"""Ctrl-C at many places of collectors, buffers and saves, and random programs with forks, threads, copies and saves.

``python tests/support/any_order.py N SEED`` presses at every place and plays N programs.
"""

from pathlib import Path

import any_order
import pytest

from flatroll.sharing import Nursery

#: The distance between the places that are tried here.
EVERY = {any_order.Making: 211, any_order.Actors: 331, any_order.AsyncActors: 331}
EVERY |= {any_order.FirstSave: 401, any_order.Save: 401, any_order.Load: 601, any_order.LogStorage: 401}
EVERY |= {any_order.Copies: 401}


@pytest.mark.parametrize("kind", any_order.CASES, ids=lambda kind: kind.__name__)
def test_a_second_call_works_wherever_the_first_is_interrupted(
    kind: type[any_order.Case], nursery: Nursery, tmp_path: Path
) -> None:
    tried, _ = any_order.sweep(kind, nursery, tmp_path, EVERY.get(kind, 97), first=7)
    assert tried


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("seed", [0, 1])
def test_programs_in_any_order(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    any_order.play(nursery, tmp_path, seed, 12)
