"""Writes the pages that follow one batch and one save through the functions: ``python -m docs.draw_ways``.

The calls are those of ``benchmarks.shape.hops``, made for the second time. Each function's sentence is the first of
its docstring.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.shape.hops import NOT_PRODUCT, PACKAGE, make_calls

DOCS = Path(__file__).parent
BATCH = """# One batch's way through the library

From the env to the gradient: every function of the library that a batch passes, in the order in which it is first
entered, with the first sentence of its docstring. The program is the one of the README: CartPole with three markers, a
`Collector`, a compact `ReplayBuffer` with a `SliceSampler`, `GAE`, `ClipPPOLoss`. Where you see a function twice, a
later stage uses it again. `python -m docs.draw_ways` writes this page; [one save](one_save.md) follows `dumps` and
`loads`.
"""
SAVE = """# One save's way through the library

Every function that `dumps` and `loads` of a compact buffer enter, in order, with the first sentence of its docstring.
`python -m docs.draw_ways` writes this page; [one batch](one_batch.md) goes from the env to the gradient.
[Keep what you collected](disk.md) says what a save promises.
"""
#: Call of `make_calls` -> title and what happens.
STAGES = {
    "collector step": (
        "Collect",
        "The runner asks the policy, steps the env and writes both into the cells of a window. When the window has "
        "enough transitions, they are laid out as one flat batch.",
    ),
    "extend, compact": (
        "Store",
        "The buffer splits the batch into fragments of trajectories, claims slots in its ring, copies the columns and "
        "then publishes the rows. Next observations that no row holds go to a side pool.",
    ),
    "sample slices, compact": (
        "Sample",
        "The sampler draws slices from the index of trajectories under the lock; rows are read without it, and drawn "
        "again if a writer was faster.",
    ),
    "GAE": (
        "Estimate advantages",
        "The critic values the observations and those that follow; one scan over the runs adds up the residuals.",
    ),
    "ClipPPOLoss": (
        "Compute the loss",
        "The actor's distribution gives log-probabilities and the entropy; losses are averages over the valid rows. "
        "`backward()` is PyTorch's.",
    ),
    "dumps": (
        "dumps",
        "State and tables are packed, rows that are not yet in the folder are copied and written as a segment, and a "
        "manifest, renamed last, publishes both.",
    ),
    "loads": (
        "loads",
        "The newest manifest that is whole names the files; each is checked while it is read. Only when all fits does "
        "the buffer take it over.",
    ),
}


def functions_of(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Return file and name of the library's functions in the order in which a call first enters them."""
    found: dict[tuple[str, str], None] = {}

    def note(frame: Any, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE):
            return
        file, name = path.relative_to(PACKAGE), frame.f_code.co_qualname
        if file.parts[0] not in NOT_PRODUCT and not name.endswith(">") and "<locals>" not in name:
            found[str(file), name] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def sentence(file: str, name: str) -> str:
    """Return the first sentence of a function's docstring, inherited if it has none of its own."""
    value: Any = importlib.import_module("flatroll." + file.removesuffix(".py").replace("/", "."))
    parts = name.split(".")
    for part in parts:
        value = inspect.getattr_static(value, part)
    if isinstance(value, property):
        value = value.fget
    owner = getattr(importlib.import_module(value.__module__), parts[0])
    text = (
        inspect.getdoc(getattr(owner, parts[-1]) if len(parts) > 1 else value) or inspect.getdoc(value) or ""
    )
    if not text or (parts[-1] in ("__init__", "__call__") and len(parts) > 1 and not value.__doc__):
        text = inspect.getdoc(owner) or ""
    text = (
        re.sub(r":\w+:(?=`)", "", text.split("\n\n")[0].replace("\n", " "))
        .replace("``", "`")
        .replace("|", r"\|")
    )
    return re.split(r"(?<=[a-z`)\]\d])\. ", text)[0].rstrip(".:") + "."


def page(head: str, stages: list[str], calls: dict[str, Callable[[], object]]) -> str:
    """Return a page: its head, and for each stage a table of functions."""
    parts = [head]
    for stage in stages:
        calls[stage]()
        title, text = STAGES[stage]
        rows = [
            f"| `{name}` | {file.removesuffix('.py')} | {sentence(file, name)} |"
            for file, name in functions_of(calls[stage])
        ]
        parts.append(
            "\n".join(
                [f"## {title}", "", text, "", "| function | file | what it does |", "|---|---|---|", *rows]
            )
            + "\n"
        )
    return "\n".join(parts)


def main() -> None:
    """Write both pages."""
    calls = make_calls()
    (DOCS / "one_batch.md").write_text(page(BATCH, list(STAGES)[:5], calls))
    (DOCS / "one_save.md").write_text(page(SAVE, list(STAGES)[5:], calls))


if __name__ == "__main__":
    main()
