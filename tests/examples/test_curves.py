"""Curves over seeds: interquartile means of the logs of the programs, between the lines of each."""

from pathlib import Path

import pytest
import torch

from flatroll.examples.curves import draw, find_logs, main, over_seeds
from flatroll.rollouts import interquartile_mean


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Seven seeds of a program: the return of seed s is s times a thousandth of the frames, but of one that failed."""
    for seed in range(7):
        folder = tmp_path / "sac" / f"Pendulum-v1-seed{seed}"
        folder.mkdir(parents=True)
        steps = range(100 + 10 * seed, 1200 + 10 * seed, 50)
        rows = [(frames, -1e6 if seed == 6 else seed * frames / 1000) for frames in steps]
        lines = [f"{frames},1.0,return,{value}\n{frames},1.0,lr,0.1\n" for frames, value in rows]
        (folder / "log.csv").write_text("frames,seconds,name,value\n" + "".join(lines))
    return tmp_path


def test_a_curve_is_the_interquartile_mean_at_each_number_of_frames(runs: Path) -> None:
    found = find_logs([runs, runs / "sac"])
    assert {name: len(logs) for name, logs in found.items()} == {"sac Pendulum-v1": 7}
    curve = over_seeds(found["sac Pendulum-v1"], points=11)
    assert (curve.frames[0], curve.frames[-1]) == (160.0, 1150.0)  # what all seeds have
    for frames, *point in zip(*curve, strict=True):
        scores = torch.tensor([seed * frames / 1000 for seed in range(6)] + [-1e6], dtype=torch.float64)
        assert point == pytest.approx(list(interquartile_mean(scores)), rel=1e-9)
    assert curve.mean[-1] == pytest.approx(2 * 1.15)  # of 0 to 4: the worst and the best seed do not count


def test_the_command_draws_them(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([str(runs), "--out", str(runs / "curves.png")]) == 0
    assert (runs / "curves.png").stat().st_size > 5_000
    assert capsys.readouterr().out.startswith("sac Pendulum-v1, 7 seeds: at 1,150 frames 2.3 [")
    axes = draw({"a": over_seeds(find_logs([runs])["sac Pendulum-v1"])}).axes[0]
    assert len(axes.lines) == len(axes.collections) == 1


def test_logs_without_the_number_are_named(runs: Path) -> None:
    with pytest.raises(ValueError, match=r"got 'loss', which is not in .*seed0.log[.]csv"):
        over_seeds(find_logs([runs])["sac Pendulum-v1"], "loss")
    with pytest.raises(ValueError, match=r"at least one log\.csv, got none"):
        over_seeds([])
