"""Nothing between processes waits by the clock: each wait ends when something comes."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "flatroll"
FOLDERS = ("sharing", "rollouts/workers", "buffers/remote")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_sleeps(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "sleep"
    ]
    assert not calls
