"""The Python blocks of the pages: find, run and count them.

``python tests/support/page_blocks.py`` prints, for each page, how many of its blocks run, and how many store, save,
collect or compute rows.
"""

import ast
import contextlib
import doctest
import importlib.util
import io
import re
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONAL = {"envpool", "matplotlib", "minari", "moviepy", "pandas", "pyarrow", "pygame", "rsl_rl", "torchrl"}
OPTIONAL |= {"brax", "gymnax", "jax", "jumanji", "navix"}
OPTIONAL |= {"sb3_contrib", "skrl", "stable_baselines3", "tensorboard", "transformers"}
NOT_RUN = re.compile(r"<!-- (not run|run by tests/[\w/]+\.py) -->\s*\Z")

FENCE = re.compile(r"^(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=fence)[ \t]*$", re.M | re.S)
COMPARED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    before: str  # what stands between it and the block before

    @property
    def skipped(self) -> bool:
        return NOT_RUN.search(self.before) is not None

    @property
    def is_doctest(self) -> bool:
        return self.text.startswith(">>>")


def blocks_of(markdown: str) -> list[Block]:
    found, end = [], 0
    for match in FENCE.finditer(markdown):
        line = markdown.count("\n", 0, match.start("text"))
        found.append(Block(match["language"], match["text"], line, markdown[end : match.start()]))
        end = match.end()
    return found


def runnable(blocks: list[Block]) -> Iterator[tuple[Block, str | None]]:
    """The Python blocks that run, each with the output it claims, if it claims one."""
    for block, after in zip_longest(blocks, blocks[1:]):
        if block.language == "python" and not block.skipped and not missing_in(block):
            claims = after is not None and after.language == "text" and not after.before.strip()
            yield block, after.text if claims else None


def missing_in(block: Block) -> list[str]:
    """The optional packages that the block names and that are not installed."""
    return [
        name
        for name in sorted(OPTIONAL)
        if importlib.util.find_spec(name) is None and re.search(rf"^[^#]*\b{name}\b", block.text, re.M)
    ]


def run_block(block: Block, namespace: dict[str, Any], page: Path) -> str:
    """What the block prints; errors and failed doctests name the page and the line."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if not block.is_doctest:
            # Blank lines in front, so that tracebacks show the line of the page.
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
            return printed.getvalue()
        test = doctest.DocTestParser().get_doctest(block.text, namespace, page.name, str(page), block.line)
        runner = doctest.DocTestRunner(verbose=False, optionflags=COMPARED)
        runner.run(test, clear_globs=False)
        namespace.update(test.globs)  # the doctest works on a copy
    if runner.failures:
        pytest.fail(printed.getvalue())
    return ""


def block_with(page: Path, text: str) -> int:
    """The position of the page's only Python block that contains the text."""
    blocks = blocks_of(page.read_text())
    found = [at for at, block in enumerate(blocks) if block.language == "python" and text in block.text]
    if len(found) != 1:
        raise LookupError(f"{len(found)} Python blocks of {page.name} contain {text!r}, not one")
    return found[0]


def run_until(page: str, text: str, module: types.ModuleType, *, marked: bool = False) -> dict[str, Any]:
    """Run a page's blocks, up to and with the one that contains ``text``; return all that they define.

    Args:
        page: a path from the root, ``"docs/tour.md"``.
        text: what stands in this block alone.
        module: the blocks run in its namespace.
        marked: also run those of the blocks before that are marked as not run, or as run by another test.
    """
    path = ROOT / page
    blocks = blocks_of(path.read_text())
    target = block_with(path, text)
    missing = missing_in(blocks[target])
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    for at, block in enumerate(blocks[: target + 1]):
        wanted = at == target or marked or not block.skipped
        if block.language == "python" and wanted and not missing_in(block):
            run_block(block, module.__dict__, path)
    return dict(module.__dict__)


# What a block's calls do with rows, by the name of the function or method.
CALLS = {
    "stores": {
        *("extend", "add", "write", "handle", "writer_for", "learn", "TensorStorage"),
        *("update_priority", "update_tensordict_priority", "mark_update"),
    },
    "saves": {
        *("dumps", "loads", "save", "load", "state_dict", "load_state_dict", "memmap", "load_memmap"),
        *("export", "write_table", "writerows", "add_scalar", "write_text", "Checkpoint", "RecordVideo"),
        *("to_numpy", "from_numpy", "to_pandas", "from_pandas", "to_arrow", "from_arrow"),
    },
    "collects": {
        *("Collector", "rollout", "evaluate", "Evaluator", "MultiSyncCollector", "MultiAsyncCollector"),
        *("MultiCollector", "RayCollector", "GroupCollector", "SyncDataCollector", "rollout_from_data"),
    },
}
KEYWORDS = {"replay_buffer": "stores", "replay_buffer_class": "stores"}
NO_ROWS = {"policy"}  # whose state_dict holds weights
KINDS = (*CALLS, "computes")


def source_of(block: Block) -> str:
    """The block's code, without the prompts and outputs of a doctest."""
    if not block.is_doctest:
        return block.text
    return "".join(example.source for example in doctest.DocTestParser().get_examples(block.text))


def kinds_of(block: Block) -> set[str]:
    """What the block does with rows: any of `KINDS`; empty if it does nothing with them."""
    if block.language != "python":
        return set()
    try:
        tree = ast.parse(source_of(block))
    except SyntaxError:  # a block that is not run may leave out arguments
        return set()

    found = set()
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        owner = getattr(getattr(call.func, "value", None), "id", "")
        if owner not in NO_ROWS:
            found |= {kind for kind, names in CALLS.items() if name in names}
        found |= {KEYWORDS[word.arg] for word in call.keywords if word.arg in KEYWORDS}
    if not found and re.search(r"^(>>> )?from flatroll", block.text, re.M):
        found.add("computes")
    return found


def main() -> None:
    """Print a line for each page with Python blocks, and the sums."""
    total: Counter[str] = Counter()
    print("| page | Python blocks | run |", *(f"{kind} |" for kind in KINDS))
    print("|---|---|---|" + "---|" * len(KINDS))
    for page in PAGES:
        blocks = [block for block in blocks_of(page.read_text()) if block.language == "python"]
        if not blocks:
            continue
        count = Counter(kind for block in blocks for kind in kinds_of(block))
        count["blocks"] = len(blocks)
        count["run"] = sum(not block.skipped for block in blocks)
        count["store or save"] = sum(bool(kinds_of(block) & {"stores", "saves"}) for block in blocks)
        total += count
        numbers = (count["blocks"], count["run"], *(count[kind] for kind in KINDS))
        print(f"| {page.relative_to(ROOT)} |", *(f"{number} |" for number in numbers))
    print("| all |", *(f"{total[name]} |" for name in ("blocks", "run", *KINDS)))
    print(f"{total['store or save']} blocks store or save rows")


if __name__ == "__main__":
    main()
