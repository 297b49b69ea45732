"""Writes the table of versions in compatibility.md: ``python docs/versions.py``.

What is allowed comes from pyproject.toml, what is tested from constraints.txt; a test compares the page with them.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
TABLE = re.compile(r"\| package \|.*?(?=\n\n)", re.S)
PACKAGES = {
    "torch": "everything",
    "tensordict": "everything",
    "gymnasium": "environments",
    "numpy": "everything",
    "numba": "kernels",
    "envpool": "environments",
    "matplotlib": "`timeline`",
    "pandas": "`flatroll.export`",
    "pyarrow": "`flatroll.export`",
    "zstandard": "compressed columns",
    "triton": '`recurrent_backend="triton"`, Linux only',
    "stable-baselines3": "`trainers.sb3`",
    "sb3-contrib": "`trainers.sb3_recurrent`",
    "skrl": "`trainers.skrl`",
    "rsl-rl-lib": "`trainers.rsl_rl`",
    "tianshou": "`trainers.tianshou`",
    "rl-games": "`trainers.rl_games`",
    "torchrl": "`trainers.torchrl`; compared with in tests",
}


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


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(), count=1))
