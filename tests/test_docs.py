"""The documentation runs: every Python block does, shows the output it claims, and every link leads somewhere.

What the pages may contain:

* A ``python`` block runs. The blocks of a page share one namespace, top to bottom, in an empty folder.
* A ``text`` block right behind it is what it prints (``...`` stands for anything).
* A ``python`` block that begins with ``>>>`` is a doctest: each expression has its own output.
* ``<!-- not run -->`` before a block leaves it alone, and so does ``<!-- run by tests/... -->``, a test of its own.
* A block that names an optional package stands alone: where the package is missing, it is skipped.
"""

import doctest
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_blocks import COMPARED, FENCE, PAGES, blocks_of, run_block, runnable

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?P<target>[^)\s]+)[^)]*\)|<(?:img|a)\b[^>]*?(?:src|href)=\"(?P<html>[^\"]+)\"")
HEADING = re.compile(r"^#+ +(?P<text>.+?) *#*$", re.M)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def run_page(page: Path, namespace: dict[str, object]) -> None:
    for block, claimed in runnable(blocks_of(page.read_text())):
        printed = run_block(block, namespace, page)
        if claimed is not None and not doctest.OutputChecker().check_output(claimed, printed, COMPARED):
            pytest.fail(f"{page.name}:{block.line} prints\n{printed}\nand the page says\n{claimed}")


@each_page
def test_the_code_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    module = types.ModuleType(f"docs_{page.stem}")  # a real module, so that classes of a page can be pickled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    try:
        run_page(page, module.__dict__)
    finally:
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")


def targets_of(page: Path) -> Iterator[str]:
    prose = FENCE.sub("", page.read_text())
    for match in LINK.finditer(prose):
        target = match["target"] or match["html"]
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = [match["text"] for match in HEADING.finditer(FENCE.sub("", page.read_text()))]
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text) for text in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in plain}


@each_page
def test_links_and_pictures_exist(page: Path) -> None:
    for target in targets_of(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        link = f"{page.name}: {target}"
        assert there.is_relative_to(ROOT), f"{link} leads out of the repository"
        assert there.exists(), f"{link} does not exist"
        assert not anchor or anchor in anchors_of(there), f"{link} is no heading of {there.name}"


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in targets_of(index)}
    assert {page.name for page in index.parent.glob("*.md") if page.resolve() not in linked} == {index.name}


SAMPLE = """
```python
x = 1
print(x + 1)
```

```text
2
```

```text
a drawing
```

```python
>>> x
1
```

<!-- not run -->
```python
raise SystemExit
```
"""


def test_blocks_are_told_apart() -> None:
    blocks = blocks_of(SAMPLE)
    assert [(block.language, block.skipped, block.is_doctest) for block in blocks] == [
        ("python", False, False),
        ("text", False, False),
        ("text", False, False),
        ("python", False, True),
        ("python", True, False),
    ]
    assert [(block.line, claimed) for block, claimed in runnable(blocks)] == [(2, "2\n"), (15, None)]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("```python\n>>> 1 + 1\n3\n```\n", r'(?s)page\.md", line 4.*Expected:\s+3\s+Got:\s+2'),
        (
            "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n",
            r"page\.md:3 prints\n2\n\nand the page says\n3",
        ),
    ],
    ids=["doctest", "text"],
)
def test_a_page_that_claims_another_output_fails(code: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{code}")
    with pytest.raises(pytest.fail.Exception, match=message):
        run_page(page, {})
