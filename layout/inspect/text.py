"""Strings of several lines that notebooks show as lines."""

from typing import Any


class Text(str):
    """A string like any other, which a notebook (or IPython) shows as `print` does when a cell ends with it.

    >>> Text("row 0: first") == "row 0: first"
    True
    """

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Write the lines themselves; IPython asks for this method."""
        printer.text(str(self))
