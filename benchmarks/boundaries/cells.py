"""`Cell`: what one library does in one fixture; `Tally` counts it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

HOW_WORDS = 8  # a cell says how it is wrong in at most this many words
TOLERANCE = 1e-2  # the smallest difference that a fault makes is larger, a float32's error smaller


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Args:
        wrong: wrong rows or values.
        of: rows or values that were compared, at least 1.
        how: how the first wrong value is wrong, in at most eight words; empty where nothing is wrong.
        documented: where the library's own documentation says that it behaves so; empty where it does not.
        note: doubts, and the second way that was tried.
        thread: upstream's issue, as ``owner/name#number``.
        script: the file in ``findings/`` that shows it without flatroll.

    Raises:
        ValueError: ``wrong`` is not within 0 to ``of``, ``how`` is too long, or says something where nothing is wrong.

    >>> Cell(2, 9, "bootstraps from the next episode").wrong
    2
    """

    wrong: int
    of: int
    how: str = ""
    documented: str = ""
    note: str = ""
    thread: str = ""
    script: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.wrong <= self.of or self.of < 1:
            raise ValueError(f"wrong must be within 0 to of, of at least 1, got {self.wrong} of {self.of}")
        if len(self.how.split()) > HOW_WORDS:
            raise ValueError(f"how must have at most {HOW_WORDS} words, got {self.how!r}")
        if bool(self.wrong) != bool(self.how):
            raise ValueError(f"how must be said where something is wrong, and only there, got {self.how!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that say something; ``wrong``, ``of`` and ``how`` always."""
        fields = asdict(self)
        return {name: value for name, value in fields.items() if value or name in ("wrong", "of", "how")}


@dataclass
class Tally:
    """Counts wrong values of those that are shown to it, and keeps the first wrong one in words.

    >>> tally = Tally()
    >>> tally.compare("row (0, 1, 2)", 5.0, 4.0)
    >>> tally.compare("row (0, 1, 3)", 6.0, 6.0)
    >>> tally.wrong, tally.of, tally.first
    (1, 2, 'row (0, 1, 2): 5.0 instead of 4.0')
    """

    wrong: int = 0
    of: int = 0
    first: str = ""
    places: list[Any] = field(default_factory=list)  # of the wrong values, for a look at them

    def compare(self, place: Any, seen: npt.ArrayLike, right: npt.ArrayLike) -> None:
        """Count one value: wrong if its shape differs, or any number by more than ``TOLERANCE``; NaN is wrong."""
        got = np.asarray(seen, np.float64)
        want = np.asarray(right, np.float64)
        same = got.shape == want.shape and bool(np.all(np.abs(got - want) <= TOLERANCE))
        self.check(place, same, f"{got.tolist()} instead of {want.tolist()}")

    def check(self, place: Any, right: bool, words: str = "wrong") -> None:
        """Count one value that the caller has judged."""
        self.of += 1
        if right:
            return
        self.wrong += 1
        self.places.append(place)
        if not self.first:
            self.first = f"{place}: {words}"

    def compare_all(self, places: Iterable[Any], seen: Iterable[Any], right: Iterable[Any]) -> None:
        """Count one value for each place; all three are equally long."""
        for place, got, want in zip(places, seen, right, strict=True):
            self.compare(place, got, want)

    def cell(
        self, how: str = "", documented: str = "", note: str = "", thread: str = "", script: str = ""
    ) -> Cell:
        """Return the cell; what is said about a fault is left out where nothing was wrong, ``note`` stays.

        Where something was wrong and ``how`` says nothing, the cell says that it is unexplained.
        """
        if not self.wrong:
            return Cell(0, self.of, note=note)
        return Cell(self.wrong, self.of, how or "unexplained", documented, note, thread, script)
