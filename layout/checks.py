"""Arguments that count something."""


def whole_number(name: str, value: object, least: int = 1) -> int:
    """The value, if it is an integer of at least ``least``.

    Raises:
        ValueError: it is not; the text calls it ``name``.

    >>> whole_number("rows", 3)
    3
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value
