"""One table for all adapters: scripted envs in every autoreset mode, and nothing that a trainer gets is wrong."""

from typing import Any

import pytest

from benchmarks.trainers.bench_adapters import STEPS, WAYS, Counts, counts_of, installed, main

CASES = [
    pytest.param(
        way, mode, id=f"{way.name}, {mode}", marks=pytest.mark.skipif(not installed(way), reason="no trainer")
    )
    for way in WAYS
    for mode in way.modes
]


@pytest.mark.parametrize(("way", "mode"), CASES)
def test_what_a_trainer_sees(way: Any, mode: str) -> None:
    seen = counts_of(way, mode)
    if way.ours or way.package == "stable_baselines3":
        assert seen == Counts(2 * STEPS, 0, 0, 0)
    else:  # the count is not blind
        assert seen.dead + seen.wrong_next > 0


def test_the_table_has_a_row_for_each(capsys: Any) -> None:
    main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == sum(len(way.modes) if installed(way) else 1 for way in WAYS)
