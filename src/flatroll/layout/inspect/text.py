"""Notebook representations of texts and objects."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, ClassVar, Self


class Text(str):
    """A string that notebooks display as ``html`` and IPython displays as lines.

    Args:
        text: the string.
        html: the notebook representation. Default: the lines.

    >>> Text("row 0: first") == "row 0: first"
    True
    >>> Text("a < b")._repr_html_()
    '<div>a &lt; b</div>'
    """

    html: str

    def __new__(cls, text: str, html: str | None = None) -> Self:
        made = super().__new__(cls, text)
        if html is None:
            html = html_lines(text.split("\n"))
        made.html = html
        return made

    def _repr_html_(self) -> str:
        return self.html

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Write the plain lines; called by IPython."""
        printer.text(str(self))


class Facts:
    """Base of objects with a ``repr`` of names and values, shown as a table in notebooks.

    A class lists in ``_shown`` the attributes that it adds to those of its bases (None is left out), or implements
    ``_facts()``. An entry with the name ``""`` heads the line without a name.

    >>> class Dice(Facts):
    ...     _shown = ("sides", "seed")
    ...     def __init__(self, sides, seed=None):
    ...         self.sides, self.seed = sides, seed
    >>> Dice(6)
    Dice(sides=6)
    >>> Dice(6)._repr_html_()  # doctest: +ELLIPSIS
    '<b>Dice</b><table><tr><td ...>sides</td><td ...>6</td></tr></table>'
    """

    _shown: ClassVar[tuple[str, ...]] = ()

    def _facts(self) -> Mapping[str, object]:
        names = (name for cls in reversed(type(self).__mro__) for name in vars(cls).get("_shown", ()))
        values = {name: getattr(self, name, None) for name in names}
        return {name: repr(value) for name, value in values.items() if value is not None}

    def __repr__(self) -> str:
        facts = [f"{name}={value}" if name else f"{value}" for name, value in self._facts().items()]
        return f"{type(self).__name__}({', '.join(facts)})"

    def _repr_html_(self) -> str:
        facts = {name: str(value) for name, value in self._facts().items()}
        head = type(self).__name__
        if "" in facts:
            head += ": " + facts.pop("")
        return html_lines([head], "b") + html_table([(name.replace("_", " "), facts[name]) for name in facts])


def html_lines(lines: Iterable[str], tag: str = "div") -> str:
    """Wrap each line in a tag."""
    return "".join(f"<{tag}>{escape(line)}</{tag}>" for line in lines)


def html_table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), numbers: int = 0) -> str:
    """Format a table; the last ``numbers`` columns are right-aligned. Text inherits the page's colours."""

    def line(cells: Sequence[str], tag: str) -> str:
        sides = ["left"] * (len(cells) - numbers) + ["right"] * numbers
        pairs = zip(cells, sides, strict=True)
        return "".join(f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>' for cell, side in pairs)

    body = [line(row, "td") for row in rows]
    if head:
        body.insert(0, line(head, "th"))
    return "<table>" + "".join(f"<tr>{cells}</tr>" for cells in body) + "</table>"
