"""Real simulators, collected from and compared with their own physics: `make simulators`."""

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from traces import Counts

from flatroll.wrappers import as_vector_env


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Import no simulator where none of these tests runs: some import JAX, whose threads stay for all other tests."""
    left_out = "not simulators" in config.getoption("markexpr")
    return True if left_out else None


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark what stands in this folder, which hears of all tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.simulators)


class Report:
    """A simulator's row of the table in docs/compatibility/simulators.md, which `make simulators` writes.

    Args:
        record: pytest's ``record_property``.
    """

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def start(self, make: Callable[[], Any], action: Any = None, *, steps: int = 1, **adapt: Any) -> Any:
        """Make a simulator, adapt it (``adapt``: arguments of `as_vector_env`), reset and step it; record the seconds.

        Simulators compile in these. The action is a random one by default.
        """
        began = time.perf_counter()
        env = as_vector_env(make(), **adapt)
        env.reset(seed=1 if env.capabilities.seedable else None)  # type: ignore[attr-defined]
        for _ in range(steps):
            env.step(env.action_space.sample() if action is None else action)
        self._record("first", f"{time.perf_counter() - began:.0f}")
        return env

    def add(self, simulator: str, package: str, mode: str, counts: Counts) -> None:
        """Record the other cells: the simulator's name and the task's, the package whose version is shown."""
        cells = {
            "simulator": simulator,
            "version": f"{package} {version(package)}",
            "mode": mode,
            "rows": f"{counts.rows:,}",
            "false": f"{counts.false:,}",
            "known": f"{counts.known:,}",
            "unknown": f"{counts.unknown:,}",
        }
        for name, cell in cells.items():
            self._record(name, cell)


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    return Report(record_property)
