"""Argument checks shared by several packages."""


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
