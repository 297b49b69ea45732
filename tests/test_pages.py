"""What pages say of the sources stays true: quoted messages, versions, arguments."""

import ast
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

from benchmarks.shape.imports import ROOMS, files_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MESSAGE = re.compile(r"^```text\n(.*?)^```", re.M | re.S)


@cache
def literals() -> str:
    """All string literals of the rooms, one a line; what is put into them is a NUL."""
    found = []
    for room in ROOMS:
        for path in files_of(room):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    found.append("".join(str(getattr(part, "value", "\0")) for part in node.values))
    return "\n".join(" ".join(text.split()) for text in found)


def quoted_messages() -> list[str]:
    pages = (DOCS / "faq.md", DOCS / "faq" / "buffers.md")
    return [" ".join(text.split()) for page in pages for text in MESSAGE.findall(page.read_text())]


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_in_the_sources(message: str) -> None:
    """Each stretch between two ellipses; a few, like the writers of missing entries, come from a table."""
    stretches = [text.strip(" .,:()") for text in message.split("…")]
    long_enough = [text for text in stretches if len(text) > 8]
    assert long_enough
    assert [text for text in long_enough if text not in literals()] == []


def test_there_are_enough_messages() -> None:
    assert len(quoted_messages()) >= 20


def test_the_table_of_versions_is_what_the_project_says() -> None:
    """Else: ``python docs/versions.py`` writes it anew."""
    assert runpy.run_path(str(DOCS / "versions.py"))["table"]() in (DOCS / "compatibility.md").read_text()


@pytest.mark.parametrize("page", ["one_batch.md", "one_save.md"])
def test_the_functions_on_a_way_are_there(page: str) -> None:
    """Else: ``python -m docs.draw_ways`` writes both pages anew."""
    rows = re.findall(r"^\| `([\w.]+)` \| ([\w/]+) \|", (DOCS / page).read_text(), re.M)
    assert len(rows) > 50
    for name, file in rows:
        assert set(name.split(".")) <= names_defined_in(file), f"{file} has no {name}"


@cache
def names_defined_in(file: str) -> set[str | None]:
    tree = ast.parse((ROOT / "src" / "flatroll" / f"{file}.py").read_text())
    return {getattr(node, "name", None) for node in ast.walk(tree)}


def test_the_oldest_versions_are_the_lower_bounds_that_are_needed() -> None:
    oldest = runpy.run_path(str(DOCS / "versions.py"))["oldest"]
    pins = dict(pin.split("==") for pin in oldest())
    assert {"torch", "tensordict", "gymnasium", "numpy", "numba"} <= set(pins)
    assert f'"gymnasium>={pins["gymnasium"]},' in (ROOT / "pyproject.toml").read_text()
    assert dict(pin.split("==") for pin in oldest("torch==99.0")) == {**pins, "torch": "99.0"}


def test_a_run_replaces_its_row_of_the_table_of_versions(tmp_path: Path) -> None:
    script = runpy.run_path(str(DOCS / "versions.py"))
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="2010" skipped="7" failures="2" errors="1"/></testsuites>'
    )
    row = script["run_row"]("oldest", report)
    assert row.endswith("| 2,000 | 7 | 3 |")
    table = "| environment | … |\n|---|---|\n| newest | 1 |\n| oldest | 2 |\n| oldest torch | 3 |"
    assert script["put_row"](table, row).split("\n")[2:] == ["| newest | 1 |", "| oldest torch | 3 |", row]


# Pages that a program writes, which grow with what it measures or lists.
WRITTEN = {
    "benchmarks/boundaries.md": "rows of every library, by `make boundaries`",
    "benchmarks/recurrent.md": "tables of `python -m flatroll bench recurrent`",
    "one_batch.md": "a row per function, by `python -m docs.draw_ways`",
    "one_save.md": "a row per function, by `python -m docs.draw_ways`",
}
LONGEST = 1500


def test_a_page_written_by_hand_is_at_most_1500_words() -> None:
    lengths = {str(page.relative_to(DOCS)): len(page.read_text().split()) for page in DOCS.rglob("*.md")}
    long = {page for page, words in lengths.items() if words > LONGEST}
    assert long == set(WRITTEN), "split the page, shorten it, or say here which program writes it"
