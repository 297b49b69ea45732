"""Real simulators, collected from and compared with their own physics: `make simulators`."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark what stands in this folder, which hears of all tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.simulators)


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Record a simulator's row of the table in docs/compatibility.md, which `make simulators` writes."""

    def record(
        simulator: str,  # its name and the task's
        package: str,  # whose version is shown
        *,
        mode: str,  # the autoreset mode
        rows: int,  # compared with the simulator's own physics or trace
        false: int,  # of these, those that differ
        known: int,  # ends of episodes whose last observation is known
        unknown: int,
        first_seconds: float,  # of the first reset and step, which compile
    ) -> None:
        cells = {
            "simulator": simulator,
            "version": f"{package} {version(package)}",
            "mode": mode,
            "rows": f"{rows:,}",
            "false": f"{false:,}",
            "known": f"{known:,}",
            "unknown": f"{unknown:,}",
            "first": f"{first_seconds:.0f}",
        }
        for name, cell in cells.items():
            record_property(name, cell)

    return record
