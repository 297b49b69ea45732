"""Nothing between processes waits by the clock: each wait ends when something comes."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "flatroll"
PLACES = ("sharing/*.py", "rollouts/workers/*.py", "buffers/remote.py")


@pytest.mark.parametrize("place", PLACES)
def test_no_sleeps(place: str) -> None:
    files = sorted(ROOT.glob(place))
    assert files
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "sleep"
    ]
    assert not calls
