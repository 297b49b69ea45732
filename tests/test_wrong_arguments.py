"""Public names called with one wrong argument: a short run of `wrong_arguments`, which takes N and SEED."""

import random

import pytest
from wrong_arguments import every_call, public_cases, run

CLEAN = (  # rooms
    "buffers",
    "datasets",
    "deploy",
    "disk",
    "estimators",
    "export",
    "layout",
    "modules",
    "rollouts",
    "sharing",
    "specs",
    "text",
    "trainers",
    "trees",
)


@pytest.mark.parametrize("room", CLEAN)
def test_errors_of_wrong_arguments_are_ours_and_name_them(room: str) -> None:
    calls = list(every_call(list(public_cases(room))))
    random.Random(0).shuffle(calls)
    found = [f"{called}: {problem}" for called, problem in run(calls[:15])]
    assert not found, "\n".join(found)
