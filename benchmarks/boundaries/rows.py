"""Runs the rows of the table: each library in a process of its own, so that one that crashes spoils no other row.

``python -m benchmarks.boundaries.rows MODULE FILE`` runs one in this process.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import import_module, metadata
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeAlias

from benchmarks.boundaries import libraries
from benchmarks.boundaries.cells import Cell
from benchmarks.boundaries.fixtures import FIXTURES

#: What a library's row is in JSON: its version, and its cells by the names of fixtures.
Entry: TypeAlias = dict[str, Any]
ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds for one library


def packages() -> dict[str, str]:
    """Return the libraries: name of the package to name of the module, flatroll first."""
    modules = [found.name for found in iter_modules(libraries.__path__)]
    named = {str(module_of(name).PACKAGE): name for name in modules}
    return dict(sorted(named.items(), key=lambda pair: (pair[0] != "flatroll", pair[0])))


def module_of(name: str) -> Any:
    """Import the module of a library; it imports the library itself only when a fixture runs."""
    return import_module(f"{libraries.__name__}.{name}")


def skipped(reason: str) -> Entry:
    """Return the row of a library that did not run."""
    return {"version": None, "fixtures": {}, "skipped": reason}


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not there."""
    try:
        return metadata.version(package.partition("[")[0])
    except metadata.PackageNotFoundError:
        return None


def run_here(name: str) -> Entry:
    """Run the fixtures of one library in this process."""
    module = module_of(name)
    parts: dict[str, Callable[[], Cell]] = module.fixtures()
    unknown = set(parts) - set(FIXTURES)
    if unknown:
        raise ValueError(f"there is no fixture named {', '.join(sorted(unknown))}")

    cells = {fixture: parts[fixture]().as_dict() for fixture in FIXTURES if fixture in parts}
    return {"version": version_of(module.PACKAGE), "fixtures": cells}


def run_row(package: str, name: str, python: str = sys.executable) -> Entry:
    """Run one library's row with an interpreter, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        command = [python, "-m", __name__, name, str(file)]
        try:
            # Warnings of the libraries go to stderr, which is shown only where the row fails.
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return skipped(f"took more than {LIMIT} s")
        if done.returncode or not file.is_file():
            print(done.stderr, file=sys.stderr)
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return skipped(f"did not run: {last[:200]}")
        entry: Entry = json.loads(file.read_text())
    return entry


def run_rows(names: Iterable[str], named: bool) -> dict[str, Entry]:
    """Run the rows of several packages in this environment; those that are not installed are skipped.

    Args:
        names: packages, keys of `packages`.
        named: whether the user named them: else packages that are not installed are left out.
    """
    known = packages()
    rows: dict[str, Entry] = {}
    for package in names:
        if version_of(package) is None:
            if named:
                rows[package] = skipped("not installed in this environment")
            continue
        rows[package] = run_row(package, known[package])
    return rows


def main() -> None:
    """Run one library in this process, and write its row."""
    _, name, file = sys.argv
    entry = run_here(name)
    Path(file).write_text(json.dumps(entry))


if __name__ == "__main__":
    main()
