"""The example with its envs in this process, and in two others."""

import re

import pytest

from flatroll.examples import many_workers


@pytest.mark.parametrize(("arguments", "most"), [(["here"], 0), (["processes", "--workers", "2"], 9)])
def test_the_same_script_runs_here_and_with_processes(
    arguments: list[str], most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert many_workers.main([*arguments, "--frames", "1120"]) == 0
    printed = capsys.readouterr().out
    found = re.fullmatch(
        r"(\w+): return -?[\d,]+ after 1,120 frames, .*; lag .* windows, (\d+) at most\n", printed
    )
    assert found and found[1] == arguments[0] and int(found[2]) <= most, printed
