"""Imports trainers: supported versions, and the extra that installs them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version


@contextmanager
def trainer_imports(
    distribution: str, at_least: str, below: str, extra: str, hint: str = ""
) -> Iterator[None]:
    """Return a context in which to import a trainer; where it is missing or not supported, the error names the extra.

    Args:
        distribution, at_least, below: see `require_version`.
        extra: of flatroll, which installs it.
        hint: what else to say.

    Raises:
        ImportError: see above.
    """
    try:
        require_version(distribution, at_least, below)
        yield
    except ImportError as error:
        raise ImportError(
            f"{distribution} is needed ({error}): pip install 'flatroll[{extra}]'{hint}"
        ) from error


def require_version(distribution: str, at_least: str, below: str) -> None:
    """Raise ImportError if the installed version of a trainer is outside the supported range.

    A trainer without metadata (a folder on the path) is let through: its import tells.

    Args:
        distribution: its name on PyPI.
        at_least, below: the range, as in flatroll's extras: ``at_least <= version < below``.

    >>> require_version("torch", "2.7", "99")
    >>> require_version("torch", "98", "99")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ImportError: torch>=98,<99 is supported, but version ... is installed
    """
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        return

    if not _release(at_least) <= _release(installed) < _release(below):
        raise ImportError(
            f"{distribution}>={at_least},<{below} is supported, but version {installed} is installed"
        )


def _release(text: str) -> tuple[int, ...]:
    """The numbers at the front of a version: (2, 13, 0) of 2.13.0+cpu, (2, 1) of 2.1rc1."""
    found = re.match(r"\d+(\.\d+)*", text)
    if found:
        return tuple(map(int, found[0].split(".")))
    return ()
