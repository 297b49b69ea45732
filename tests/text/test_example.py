"""The example that teaches a model a token, in a short form."""

import csv
from pathlib import Path

import pytest

from flatroll.layout import audit


def test_it_learns_to_emit_the_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    from flatroll.examples.text import emit_a_token

    result = emit_a_token.main(["--updates", "12", "--out", str(tmp_path)])
    assert result["curve"][-1] > result["curve"][0] + 1
    assert audit(result["batch"]) == []
    assert '" tea" per text' in capsys.readouterr().out
    assert (tmp_path / "emit_a_token.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("name", "options", "gain"), [("grpo", "--frames 24000", 0.3), ("tool_use", "--frames 7000", 0.4)]
)
def test_the_programs_learn_in_a_few_batches(
    name: str, options: str, gain: float, seed: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from importlib import import_module

    program = import_module(f"flatroll.examples.{name}")
    assert program.main([*options.split(), "--seed", str(seed), "--folder", str(tmp_path)]) == 0
    with (tmp_path / "log.csv").open() as file:
        returns = [float(row["value"]) for row in csv.DictReader(file) if row["name"] == "return"]
    # Digits drawn at random are right once in ten times; texts that end at once cost 0.1.
    assert returns[0] < 0.2 and sum(returns[-5:]) / 5 > returns[0] + gain
