"""The example that teaches a model a token, in a short form."""

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
