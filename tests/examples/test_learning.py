"""The learning examples run in small, and learn a little; the benchmark prints its table."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forms import scaled

from benchmarks.peers import sb3
from flatroll.examples import hindsight, ppo

ROOT = Path(__file__).parents[2]


def test_the_readmes_first_training_learns_cartpole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture, the training and the curve are one script, which saves both pictures.

    The quick form trains for a tenth of the frames.
    """
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    training = next(number for number, block in enumerate(blocks) if "ClipPPOLoss" in block)
    assert sum(bool(line.strip()) for line in blocks[training].splitlines()) <= 15
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    torch.manual_seed(0)
    space: dict[str, Any] = {}
    assert blocks[training].count("204_800") == 2  # of the collector and of the learning rate
    frames, solved = scaled(quick=(20_480, 60), long=(204_800, 475))
    for block in blocks[: training + 2]:
        exec(compile(block.replace("204_800", str(frames)), "README.md", "exec"), space)
    space["plt"].close("all")
    printed = capsys.readouterr().out
    assert float(re.findall(r"^return ([\d.]+) \[.* over 100 episodes", printed, re.M)[0]) > solved
    # Every step pays 1: a row belongs to a counted return, or to one of 32 episodes of at most 500 steps still open.
    rows, counted = space["collector"].frames, sum(space["returns"])
    assert rows == frames
    assert 0 <= rows - counted <= 32 * 500
    assert [(tmp_path / name).stat().st_size > 5_000 for name in ("batch.svg", "curve.png")] == [True, True]


def test_ppo_learns_a_little(capsys: pytest.CaptureFixture[str]) -> None:
    assert ppo.main(["--frames", "12000", "--seed", "1"]) == 0
    outcome = capsys.readouterr().out
    assert outcome.startswith("CartPole-v1, seed 1: return ")
    assert float(outcome.split("return ")[1].split(",")[0]) > 40  # random actions: 22


@pytest.mark.parametrize("name", ["hindsight", "ppo"])
def test_each_is_short_enough_to_read(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 150


def test_hindsight_goals_make_the_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """With 10 bits random actions reach one goal in a hundred."""
    assert hindsight.train(10, 12_000, seed=1)["reached"] > 0.6
    assert hindsight.main(["--bits", "10", "--frames", "2000", "--without"]) == 0
    printed = capsys.readouterr().out
    assert int(printed.split("seed 1: ")[1].split("%")[0]) < 10


def test_the_benchmark_at_the_settings_of_stable_baselines3(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("stable_baselines3")
    sb3.main(["ppo-cartpole", "sac-pendulum", "--seeds", "1", "--frames", "300"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == 2 * ["| ppo-cartpole"] + 2 * ["| sac-pendulum"]
    assert [row[1] for row in rows[1:]] == 2 * ["flatroll", "stable-baselines3"]
    with pytest.raises(SystemExit):
        sb3.main(["chess"])
