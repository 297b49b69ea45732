"""Public names called with one wrong argument: a short run of `wrong_arguments`, which takes N and SEED."""

import random

from wrong_arguments import EXPLAINED, every_call, public_cases, run


def test_errors_of_wrong_arguments_are_ours_and_name_them() -> None:
    cases = [case for case in public_cases() if case.name in EXPLAINED]
    assert len(cases) == len(EXPLAINED)
    calls = list(every_call(cases))
    random.Random(0).shuffle(calls)
    found = [f"{called}: {problem}" for called, problem in run(calls[:200])]
    assert not found, "\n".join(found)
