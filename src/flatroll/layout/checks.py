"""Argument checks shared by several packages."""

from operator import index
from typing import SupportsIndex


def need_rows(batch: object) -> None:
    """Raise TypeError if a batch is not a tensordict, such as a buffer or another library's sample.

    >>> need_rows([1, 2])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    TypeError: batch must be a tensordict of rows, got list; the rows of a buffer are buffer[:], ...
    """
    if not hasattr(batch, "batch_dims"):
        raise TypeError(
            f"batch must be a tensordict of rows, got {type(batch).__name__}; the rows of a buffer are buffer[:], and "
            "those of a trainer's FlatReplayBuffer are buffer.flat[:]"
        )


def whole_number(name: str, value: object, least: int = 1) -> int:
    """Return an argument after checking that it is an integer (no bool) of at least ``least``.

    Args:
        name: of the argument, for the error.
        value: of the argument.
        least: default 1.

    Raises:
        ValueError: it is not; the text calls it ``name``.

    >>> whole_number("rows", 3)
    3
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def writer_number(writer: object) -> int:
    """Return the number of something that writes to a buffer, the high bits of its trajectories' ids.

    Raises:
        ValueError: it is no integer from 0 to 2**23 - 1.

    >>> writer_number(3)
    3
    """
    if isinstance(writer, bool) or not isinstance(writer, SupportsIndex) or not 0 <= index(writer) < 2**23:
        raise ValueError(f"writer must be in [0, 2**23), got {writer!r}")
    return index(writer)
