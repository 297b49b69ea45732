"""The table as plain text, for the terminal."""

from typing import Any

from benchmarks.boundaries.fixtures import FIXTURES

NO_PART = "\N{EN DASH}"


def cell_text(cell: dict[str, Any] | None) -> str:
    """Return what stands in a cell: wrong of N, or a dash where the library has no such part."""
    if cell is None:
        return NO_PART
    return f"{cell['wrong']}/{cell['of']}"


def library_text(package: str, entry: dict[str, Any]) -> str:
    """Return the name and version of a library."""
    return f"{package} {entry['version'] or '?'}"


def as_text(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table of rows, one line for each library, then a line for each wrong cell."""
    ran = {package: entry for package, entry in rows.items() if "skipped" not in entry}
    width = max([len(library_text(*pair)) for pair in rows.items()] + [8])
    names = list(FIXTURES)
    lines = [" " * width + " | " + " | ".join(names)]
    for package, entry in ran.items():
        cells = [cell_text(entry["fixtures"].get(name)).rjust(len(name)) for name in names]
        lines.append(" | ".join([library_text(package, entry).ljust(width), *cells]))

    for package, entry in ran.items():
        for name, cell in entry["fixtures"].items():
            if cell["wrong"]:
                documented = " (documented)" if cell.get("documented") else ""
                lines.append(f"{package}, {name}: {cell_text(cell)} {cell['how']}{documented}")
    lines += [
        f"{package}: skipped, {entry['skipped']}" for package, entry in rows.items() if "skipped" in entry
    ]
    return "\n".join(lines)
