"""The table of returns beside published ones, from the folders of finished runs."""

import json
from pathlib import Path

import pytest

from benchmarks import published
from flatroll.examples.common import parse

TASK = published.TASKS[0]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four seeds of one task: 1 to 3, and 100, which settings were tuned on; and a run that is too short."""
    for seed, frames in (
        (1, TASK.frames),
        (2, TASK.frames + 48),
        (3, TASK.frames),
        (100, TASK.frames),
        (2, 10),
    ):
        folder = tmp_path / f"{frames}" / f"seed{seed}"
        folder.mkdir(parents=True)
        numbers = {"seed": seed, "frames": frames, "return": 1000.0 * seed, "evaluation": 1500.0 * seed}
        (folder / "result.json").write_text(json.dumps({"program": TASK.program, "env": TASK.env, **numbers}))
        lines = [f"{at},1.0,return,{seed * at}\n" for at in range(0, 101, 10)]
        (folder / "log.csv").write_text("frames,seconds,name,value\n" + "".join(lines))
    return tmp_path


def test_the_table_has_the_whole_runs_of_its_seeds(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert published.main([str(runs)]) == 0
    (row,) = capsys.readouterr().out.splitlines()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["`ppo_continuous`", "HalfCheetah-v4", "1,000,000", "3"]
    assert cells[4].startswith("2,000 [") and cells[5] == TASK.training
    assert cells[6].startswith("3,000 [") and cells[7] == TASK.evaluation


def test_it_writes_a_page_and_its_picture(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    page = runs / "docs" / "benchmarks" / "learning.md"
    page.parent.mkdir(parents=True)
    (runs / "docs" / "img").mkdir()
    page.write_text(f"above\n{published.MARK}old\n{published.MARK}below\n")
    for _ in range(2):  # again the same
        assert published.main([str(runs), "--page", str(page)]) == 0
        above, table, below = page.read_text().split(published.MARK)
        assert (
            (above, below) == ("above\n", "below\n") and "| HalfCheetah-v4 |" in table and "old" not in table
        )
    assert (runs / "docs" / "img" / "published.png").stat().st_size > 5_000


def test_without_runs_it_prints_their_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert published.main([]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == len(set(commands)) == 3 * len(published.TASKS)
    for command in commands:
        program, *options = command.removeprefix("python -m flatroll run ").split()
        parse(program, options)
    with pytest.raises(SystemExit):
        published.main([str(tmp_path)])
