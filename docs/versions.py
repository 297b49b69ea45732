"""Writes the tables in compatibility.md and the pages of compatibility/, and the pins of the oldest versions allowed.

``python docs/versions.py`` writes the table of packages: what is allowed comes from pyproject.toml, what is tested from
constraints.txt; a test compares the page with them. ``python docs/versions.py run NAME REPORT`` writes the row of an
environment of `make versions`, by the Python of that environment, from pytest's XML report; ``simulators GROUP REPORT``
those of a group of `make simulators`, and for ``zoo`` the whole of compatibility/zoo.md. ``python docs/versions.py
oldest [torch==VERSION]`` prints the lower bounds of pyproject.toml as pins.
"""

import platform
import re
import sys
import tomllib
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
SIMULATORS = ROOT / "docs" / "compatibility" / "simulators.md"
ZOO = ROOT / "docs" / "compatibility" / "zoo.md"
TABLE = re.compile(r"\| package \|.*?(?=\n\n)", re.S)
RUNS = re.compile(r"\| environment \|.*?(?=\n\n)", re.S)
SIMULATED = re.compile(r"\| simulator \|.*?(?=\n\n)", re.S)
# What the tests of simulators record, in the order of the table's columns.
RECORDED = ("simulator", "version", "mode", "rows", "false", "known", "unknown", "first")
# What the tests of the zoo record, and the heads of its columns.
OF_ZOO = {
    "package": "package",
    "version": "version",
    "id": "environment",
    "modes": "modes",
    "rows": "rows compared",
    "wrong": "wrong",
    "ends": "ends",
    "remarks": "refused, or not compared",
}
# The packages whose versions stand in the table of runs.
SHOWN = ("torch", "tensordict", "gymnasium", "numpy", "numba", "torchrl")
PACKAGES = {
    "torch": "everything",
    "tensordict": "everything",
    "gymnasium": "environments",
    "numpy": "everything",
    "numba": "kernels",
    "envpool": "environments",
    "jax": "[JAX simulators](jax.md)",
    "matplotlib": "`timeline`",
    "pandas": "`flatroll.export`",
    "pyarrow": "`flatroll.export`",
    "zstandard": "compressed columns",
    "pettingzoo": "[multi-agent games](agents.md)",
    "vmas": "[multi-agent games](agents.md)",
    "triton": '`recurrent_backend="triton"`, Linux only',
    "stable-baselines3": "`trainers.sb3`",
    "sb3-contrib": "`trainers.sb3_recurrent`",
    "skrl": "`trainers.skrl`",
    "rsl-rl-lib": "`trainers.rsl_rl`",
    "tianshou": "`trainers.tianshou`",
    "rl-games": "`trainers.rl_games`",
    "torchrl": "`trainers.torchrl`, and comparisons in tests",
}


ZOO_PAGE = """# Compatibility: environment packages

`make simulators NAMES=zoo` plays environments of other packages with random actions and writes this page. Last run:
{date}, with Python {python}, {versions}.

Each row of a batch is compared with a plain loop that steps the bare environment with the same seeds and actions:
observation, next observation, reward, `terminated` and `truncated` must be equal bit for bit. "single" is the
environment itself; the modes are those of `SyncVectorEnv` with two copies, or of ale-py's own vector env. Episodes are
cut after 17 steps, so that every run has ends. The last column quotes the error where an environment is refused, or
says why its rows could not be compared.

{table}
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def allowed() -> dict[str, str]:
    """The range of each package that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    ranges = {}
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        name, _, limits = re.match(r"([\w.-]+)(\[[^]]*\])?([^;]*)", line).groups()
        ranges.setdefault(normal(name), limits.strip())  # what a user gets stands before dev's
    return ranges


def tested() -> dict[str, str]:
    """The version of each package that constraints.txt pins."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {normal(name): pin for name, is_pin, pin in (line.partition("==") for line in lines) if is_pin}


def table() -> str:
    ranges, pins = allowed(), tested()
    rows = [
        f"| {name} | {pins.get(name, 'not in CI')} | {ranges.get(name, '').replace(',', ', ') or 'any'} | {use} |"
        for name, use in PACKAGES.items()
    ]
    return "\n".join(["| package | tested | allowed | for |", "|---|---|---|---|", *rows])


def oldest(*instead: str) -> list[str]:
    """The lower bounds of what is always needed and of what the tests use, as pins; `instead` has other pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = re.match(r"flatroll\[(.*)\]", extras["test"][0])[1].split(",")
    pins = {}
    for line in [*project["dependencies"], *(line for name in used for line in extras[name])]:
        name, bound = re.match(r"([\w.-]+)>=([\w.]+)", line).groups()
        pins[name] = bound
    pins.update(pin.split("==") for pin in instead)
    return [f"{name}=={pin}" for name, pin in pins.items()]


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def run_row(environment: str, report: Path) -> str:
    """One line of the table of runs: this Python, its packages, and what pytest counted."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, skipped, failures, errors = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "skipped", "failures", "errors")
    )
    counts = [tests - skipped - failures - errors, skipped, failures + errors]
    cells = [
        environment,
        platform.python_version(),
        *map(installed, SHOWN),
        *(f"{count:,}" for count in counts),
    ]
    return f"| {' | '.join(cells)} |"


def simulator_rows(group: str, report: Path) -> list[str]:
    """Lines of the table of simulators: what the tests have recorded, and the size of this environment."""
    size = sum(file.lstat().st_size for file in Path(sys.prefix).rglob("*")) / 1e9
    seconds = int((Path(sys.prefix) / ".ready").read_text() or 0)
    rows = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        cells = {found.get("name"): found.get("value") for found in case.iter("property")}
        failed = case.find("failure") is not None or case.find("error") is not None
        if "simulator" in cells and not failed:
            shown = [cells[name] for name in RECORDED]
            rows.append(f"| {' | '.join(shown)} | {group}: {size:.1f} GB, {seconds / 60:.1f} min |")
    return rows


def zoo_page(report: Path) -> str:
    """The page of environment packages, from what their tests have recorded: those that failed, too."""
    lines = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        cells = {found.get("name"): found.get("value") for found in case.iter("property")}
        if "rows" in cells:
            lines.append(f"| {' | '.join(cells[name] for name in OF_ZOO)} |")
    head = f"| {' | '.join(OF_ZOO.values())} |"
    table = "\n".join([head, "|---" * len(OF_ZOO) + "|", *sorted(lines)])
    versions = ", ".join(f"{name} {installed(name)}" for name in ("gymnasium", "numpy", "torch"))
    return ZOO_PAGE.format(
        date=date.today().isoformat(), python=platform.python_version(), versions=versions, table=table
    )


def put_row(table: str, row: str) -> str:
    """The table with this row instead of the one that has its first cell."""
    first = row[: row.index("|", 1) + 1]
    kept = [line for line in table.split("\n") if not line.startswith(first)]
    return "\n".join([*kept[:2], *sorted([*kept[2:], row])])


def write(page: Path, pattern: re.Pattern[str], change: Callable[[str], str]) -> None:
    page.write_text(pattern.sub(lambda found: change(found[0]), page.read_text(), count=1))


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            write(PAGE, TABLE, lambda _: table())
        case ["oldest", *instead]:
            print(*oldest(*instead), sep="\n")
        case ["run", environment, report]:
            row = run_row(environment, Path(report))
            print(row)
            write(PAGE, RUNS, lambda old: put_row(old, row))
        case ["simulators", "zoo", report]:
            ZOO.write_text(zoo_page(Path(report)))
        case ["simulators", group, report]:
            for row in simulator_rows(group, Path(report)):
                print(row)
                write(SIMULATORS, SIMULATED, lambda old, row=row: put_row(old, row))
        case _:
            sys.exit(__doc__)
