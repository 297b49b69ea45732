"""Writes docs/benchmarks/boundaries.md and its picture from the rows of one run. No number is written by hand."""

from pathlib import Path
from typing import Any

from benchmarks.boundaries.fixtures import FIXTURES
from benchmarks.boundaries.rows import ROOT, Entry
from benchmarks.boundaries.text import NO_PART, cell_text

PAGE = ROOT / "docs/benchmarks/boundaries.md"
PICTURE = ROOT / "docs/img/boundaries.png"
HEAD = Path(__file__).parent / "page_head.md"  # what stands above and below the tables
END = Path(__file__).parent / "page_end.md"


def link(thread: str) -> str:
    """Return a link to an issue or pull request, given as ``owner/name#number``."""
    repository, _, number = thread.partition("#")
    return f"[{thread}](https://github.com/{repository}/issues/{number})"


def short_table(rows: dict[str, Entry]) -> list[str]:
    """Return the table of all cells: a line for each library, a numbered column for each fixture."""
    numbers = [str(number) for number in range(1, len(FIXTURES) + 1)]
    lines = [f"| | {' | '.join(numbers)} |", f"|---|{'---|' * len(numbers)}"]
    for package, entry in rows.items():
        if "skipped" in entry:
            continue
        cells = []
        for name in FIXTURES:
            cell = entry["fixtures"].get(name)
            text = cell_text(cell)
            if cell is not None and cell["wrong"]:
                text = f"**{text}**{mark(cell)}"
            cells.append(text)
        lines.append(f"| {package} {entry['version']} | {' | '.join(cells)} |")
    return lines


def mark(cell: dict[str, Any]) -> str:
    """Return a star for a documented cell."""
    if cell.get("documented"):
        return "\\*"
    return ""


def wrong_cells(rows: dict[str, Entry]) -> list[str]:
    """Return a line for each cell that is not zero: what is wrong, and where to see it."""
    lines = ["| library | fixture | wrong | how | see |", "|---|---|---|---|---|"]
    for package, entry in rows.items():
        for name, cell in entry["fixtures"].items():
            if not cell["wrong"]:
                continue
            places = []
            if cell.get("documented"):
                places.append(f"documented: {cell['documented']}")
            if cell.get("script"):
                places.append(f"`findings/{cell['script']}`")
            if cell.get("thread"):
                places.append(link(cell["thread"]))
            lines.append(
                f"| {package} | {name} | {cell_text(cell)} | {cell['how']} | {escaped('; '.join(places))} |"
            )
    return lines


def escaped(text: str) -> str:
    """Return text that a table may hold."""
    return text.replace("|", "\\|")


def notes(rows: dict[str, Entry]) -> list[str]:
    """Return the doubts and second ways of the cells."""
    return [
        f"* {package}, {name}: {cell['note']}"
        for package, entry in rows.items()
        for name, cell in entry["fixtures"].items()
        if cell.get("note")
    ]


def skipped_rows(rows: dict[str, Entry]) -> list[str]:
    """Return the libraries that did not run."""
    return [f"* {package}: {entry['skipped']}" for package, entry in rows.items() if "skipped" in entry]


def page_text(rows: dict[str, Entry]) -> str:
    """Return the page of the rows of one run."""
    parts = [HEAD.read_text(), "## The table", ""]
    parts += [f"{number}. `{name}`: {each.counts}" for number, (name, each) in enumerate(FIXTURES.items(), 1)]
    parts += ["", *short_table(rows), "", "## What is wrong", "", *wrong_cells(rows), ""]
    parts += ["Doubts, second ways, and how the numbers come about:", "", *notes(rows), ""]
    if skipped_rows(rows):
        parts += ["Not in the table:", "", *skipped_rows(rows), ""]
    return "\n".join([*parts, END.read_text()])


def draw(rows: dict[str, Entry]) -> Any:
    """Return the heat map of the rows: a colour-blind safe pair of hues, and the numbers in the cells."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    ran = {package: entry for package, entry in rows.items() if "skipped" not in entry}
    names = list(FIXTURES)
    figure = Figure(figsize=(13.5, 2.6 + 0.46 * len(ran)), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    oranges = colormaps["Oranges"]
    for y, entry in enumerate(ran.values()):
        for x, name in enumerate(names):
            cell = entry["fixtures"].get(name)
            colour, ink, text = "#F4F4F4", "0.55", NO_PART
            if cell is not None:
                colour, ink, text = "#B9D9EE", "#12405E", "0"
            if cell is not None and cell["wrong"]:
                share = cell["wrong"] / cell["of"]
                colour, ink, text = oranges(0.4 + 0.6 * share), "black", cell_text(cell)
                if share > 0.55:
                    ink = "white"
                if cell.get("documented"):
                    text += "*"
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
            weight = "bold" if text not in ("0", NO_PART) else "normal"
            axes.text(
                x + 0.5, y + 0.52, text, color=ink, ha="center", va="center", fontsize=9.5, weight=weight
            )

    axes.set_xlim(0, len(names))
    axes.set_ylim(len(ran), 0)
    axes.xaxis.tick_top()
    labels = [name.replace("_", "\n") for name in names]
    axes.set_xticks([x + 0.5 for x in range(len(names))], labels, fontsize=9.5)
    versions = [f"{package} {entry['version']}" for package, entry in ran.items()]
    axes.set_yticks([y + 0.5 for y in range(len(ran))], versions, fontsize=10.5)
    for label in axes.get_yticklabels():
        if label.get_text().startswith("flatroll "):
            label.set_fontweight("bold")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(
        "Wrong rows or values at the edges of episodes", loc="left", fontsize=14, weight="bold", pad=14
    )
    legend = f"blue 0: nothing wrong      orange a/b: a of b wrong      {NO_PART}: has no such part      *: documented"
    axes.set_xlabel(legend, fontsize=10.5, labelpad=10)
    return figure


def write_page(rows: dict[str, Entry]) -> None:
    """Write the page and its picture."""
    PAGE.write_text(page_text(rows))
    draw(rows).savefig(PICTURE, dpi=110, facecolor="white")
    print(f"wrote {PAGE.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}")
