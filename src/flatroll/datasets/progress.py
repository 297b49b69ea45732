"""The progress bar of long operations on rows."""

from typing import Any


def progress_bar(total: int | None, progress: bool | None, what: str, unit: str = "row") -> Any:
    """Return a tqdm bar, to be used in ``with``; ``update(count)`` advances it.

    Args:
        total: expected count; None if unknown.
        progress: True for a bar, False for none, None for one if stderr is a terminal.
        what: label of the bar.
        unit: what is counted. Default ``"row"``.

    >>> with progress_bar(10, False, "converting") as bar:
    ...     shown = bar.update(10)
    """
    from tqdm.auto import tqdm

    disable = None if progress is None else not progress
    return tqdm(total=total, disable=disable, desc=what, unit=unit, unit_scale=True)
