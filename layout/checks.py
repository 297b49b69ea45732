"""Checks of arguments that several rooms share."""


def whole_number(name: str, value: object, least: int = 1) -> int:
    """Check that an argument is an integer of at least ``least`` (bools are none), and return it.

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
