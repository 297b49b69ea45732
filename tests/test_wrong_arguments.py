"""Public names called with one wrong argument: a short run of `wrong_arguments`, which takes N and SEED."""

import random

from wrong_arguments import every_call, public_cases, run

CLEAN = (  # rooms, and names of others
    "buffers",
    "disk",
    "export",
    "layout",
    "modules",
    "rollouts",
    "sharing",
    "specs",
    "trees",
    "StateCounter",
)


def test_errors_of_wrong_arguments_are_ours_and_name_them() -> None:
    calls = list(every_call(list(public_cases(*CLEAN))))
    random.Random(0).shuffle(calls)
    found = [f"{called}: {problem}" for called, problem in run(calls[:250])]
    assert not found, "\n".join(found)
