"""Writes the pages that follow one batch and one save through the functions: ``python -m docs.draw_ways``.

The calls are those of ``benchmarks.shape.hops``, made for the second time. Each function's sentence is the first of
its docstring.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.shape.hops import NOT_PRODUCT, PACKAGE, call_watched, make_calls

DOCS = Path(__file__).parent
BATCH = """# One batch through the library

Every function of the library that handles a batch, from the env to the gradient: in the order of the first call, with
the first sentence of its docstring. The program uses CartPole with three markers, a `Collector`, a compact
`ReplayBuffer` with a `SliceSampler`, `GAE` and `ClipPPOLoss`. A function is listed again if a later stage calls it
again. `python -m docs.draw_ways` writes this page; [one save](one_save.md) lists the functions of `dumps` and `loads`.
"""
SAVE = """# One save through the library

Every function that `dumps` and `loads` of a compact buffer call, in order, with the first sentence of its docstring.
`python -m docs.draw_ways` writes this page; [one batch](one_batch.md) lists the functions from the env to the gradient.
[Save and resume](disk.md) describes what a save guarantees.
"""
#: Call of `make_calls` -> title and what happens.
STAGES = {
    "collector step": (
        "Collect",
        "The runner calls the policy, steps the env and writes the results into a window. When the window has "
        "enough transitions, they are copied into one flat batch.",
    ),
    "extend, compact": (
        "Store",
        "The buffer splits the batch into fragments of trajectories, claims slots in its ring, copies the columns and "
        "then publishes the rows. Next observations that no row holds go to a side pool.",
    ),
    "sample slices, compact": (
        "Sample",
        "The sampler draws slices from the trajectory index while it holds the lock. Rows are read without the "
        "lock, and drawn again if a writer has overwritten them.",
    ),
    "GAE": (
        "Estimate advantages",
        "The critic computes the values of observations and next observations. One scan over the runs sums up the "
        "residuals.",
    ),
    "ClipPPOLoss": (
        "Compute the loss",
        "The actor's distribution gives log-probabilities and the entropy. Losses are averages over the valid "
        "rows. `backward()` is PyTorch's.",
    ),
    "dumps": (
        "dumps",
        "The state and the tables are packed. Rows that are not yet in the folder are copied and written as a "
        "segment. A manifest, renamed last, publishes both.",
    ),
    "loads": (
        "loads",
        "The newest intact manifest names the files; each is checked while it is read. The buffer changes only "
        "after all checks have passed.",
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

    call_watched(call, note)
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
    of_object = (
        getattr(object, parts[-1], None) is not None and not value.__doc__
    )  # says nothing about this one
    text = inspect.getdoc(getattr(owner, parts[-1]) if len(parts) > 1 and not of_object else value) or ""
    if parts[-1] in ("__init__", "__call__") and len(parts) > 1 and not value.__doc__:
        text = inspect.getdoc(owner) or ""
    text = (
        re.sub(r":\w+:(?=`)", "", text.split("\n\n")[0].replace("\n", " "))
        .replace("``", "`")
        .replace("|", r"\|")
    )
    first = re.split(r"(?<=[a-z`)\]\d])\. ", text)[0].rstrip(":")
    return first if not first or first.endswith(".") else f"{first}."


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
