"""When short segments are merged."""

from collections.abc import Sequence
from typing import NamedTuple

#: Parts are merged into one that has so many times the rows of the largest of them. So a row is written once more each
#: time its segment has grown by this factor: twice in all, if parts are larger than 1/32 of a whole segment.
FAN_IN = 32


class Size(NamedTuple):
    """The size of a segment."""

    rows: int
    bytes: int


def first_to_merge(sizes: Sequence[Size], whole: Size) -> int:
    """Position of the first of the last segments that should become one; the last position if none should.

    Segments of at least ``whole.rows`` rows or ``whole.bytes`` bytes stay as they are. Of the shorter ones at the end,
    all are merged once they make a whole segment together; before, as many as have `FAN_IN` times the bytes of the
    largest of them.

    Args:
        sizes: of all segments in order; the last one is about to be written.
        whole: of a segment that is not short.

    >>> part, whole = Size(10, 100), Size(10_000, 100_000)
    >>> first_to_merge([whole, *[part] * 31], whole), first_to_merge([whole, *[part] * 32], whole)
    (31, 1)
    >>> first_to_merge([whole, Size(9_000, 90_000), Size(1_000, 10_000)], whole)
    1
    """
    last = len(sizes) - 1
    first, rows, total, largest = last, 0, 0, 0
    for position in range(last, -1, -1):
        size = sizes[position]
        if size.rows >= whole.rows or size.bytes >= whole.bytes:
            break
        rows, total, largest = rows + size.rows, total + size.bytes, max(largest, size.bytes)
        if position < last and total >= FAN_IN * largest:
            first = position
        if rows >= whole.rows or total >= whole.bytes:
            return position
    return first
