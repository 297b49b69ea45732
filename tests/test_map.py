"""The map of the house names what there is: records with their files, folders, and where things are registered."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "map.md").read_text()
RECORDS = re.findall(r"`(\w+)` \(`([\w/.]+\.py)`\)", PAGE)
PATHS = sorted(set(re.findall(r"`([\w.]+/[\w/.]*)`", PAGE)))


def found(path: str) -> Path:
    """A path of the page, in the repository or in the package."""
    return next(
        (base / path for base in (ROOT, ROOT / "src" / "flatroll") if (base / path).exists()), ROOT / path
    )


def test_the_page_names_its_records() -> None:
    assert {name for name, _ in RECORDS} == {"Window", "Fragments", "Draw", "Version"}


@pytest.mark.parametrize(("name", "file"), RECORDS)
def test_a_record_is_defined_in_its_file(name: str, file: str) -> None:
    assert re.search(rf"^class {name}\b", found(file).read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_there(path: str) -> None:
    assert found(path).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([A-Z]\w+|[a-z_]+)(?:\.\w+)?(?:\(.*?\))?`", PAGE))))
def test_a_name_is_in_the_code(name: str) -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    for room in ("wrappers", "buffers", "estimators"):
        files += (ROOT / room).rglob("*.py")
    known = {"flatroll", "examples", "docs", *(path.name for path in (ROOT / "src" / "flatroll").iterdir())}
    assert name in known or any(re.search(rf"\b{name}\b", file.read_text()) for file in files)
