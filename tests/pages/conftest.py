"""Each test of a page runs its blocks in an empty folder, in a namespace that is a module."""

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import page_blocks
import pytest

Until = Callable[..., dict[str, Any]]


@pytest.fixture
def until(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Until]:
    """``until(page, text)`` runs a page's blocks up to the one that contains ``text``; returns what they define."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")

    def run(page: str, text: str, *, marked: bool = False) -> dict[str, Any]:
        # A real module, so that classes of a page can be pickled.
        module = types.ModuleType(f"pages_{Path(page).stem}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return page_blocks.run_until(page, text, module, marked=marked)

    yield run
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
