"""The mode of recurrent modules, single steps or whole runs, set by a context manager."""

import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal, ParamSpec, TypeAlias, TypeVar

from flatroll.layout.checks import check_whole_number

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Mode(threading.local):
    """The mode of this thread. torch.compile guards on it, unlike on a context variable."""

    def __init__(self) -> None:
        self.value: bool | None = None
        self.burn_in = 0


_MODE = _Mode()
_NAMES: dict[str, bool] = {"recurrent": True, "sequential": False}

#: Tests for functions whose body runs after the call has returned.
_BODY_RUNS_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)

#: Accepted values of a mode.
Mode: TypeAlias = bool | Literal["recurrent", "sequential"] | None


def check_mode(name: str, mode: Mode) -> bool | None:
    """Convert a mode (bool, None, ``"recurrent"``, ``"sequential"``) to True, False or None.

    Raises:
        ValueError: it is not a mode; ``name`` is the name in the message.
    """
    named = _NAMES.get(mode) if isinstance(mode, str) else mode
    if not (named is None or isinstance(named, bool)) or (named is None and mode is not None):
        raise ValueError(f"{name} must be True, False, None, 'recurrent' or 'sequential', got {mode!r}")
    return named


def recurrent_mode() -> bool | None:
    """Return the current mode of recurrent modules: True, False, or None if none is set.

    With None each module follows its own ``default_recurrent_mode``.

    >>> recurrent_mode() is None
    True
    """
    return _MODE.value


def burn_in_rows() -> int:
    """Return how many first rows of each run get no gradient in the current context."""
    return _MODE.burn_in


class set_recurrent_mode:
    """Set whether recurrent modules process single steps or runs; a context manager or decorator.

    * sequential (``False``, ``"sequential"``): every row is a separate step; used in rollouts;
    * recurrent (``True``, ``"recurrent"``): the rows are runs of consecutive steps; used in training;
    * ``None``: each module's ``default_recurrent_mode``.

    The mode is local to the current thread, and leaving the block restores the previous one, also after an exception.
    It may be used around or inside a ``torch.compile`` function. Do not hold it over an ``await`` or a ``yield``,
    where other code of the thread runs.

    Args:
        mode: True, False, ``"recurrent"``, ``"sequential"`` or None; default True.
        burn_in: rows at the beginning of each run that only bring the state up to date: this package's modules compute
            them without gradient, and the rest of the run continues from the resulting state. Exclude them from the
            loss, too. Default: 0.

    Raises:
        ValueError: any other mode; ``burn_in`` below 0, or in another mode than the recurrent one.
        TypeError: used as a decorator of a class, or of a generator or coroutine function, whose body would run after
            the block is left.
        RuntimeError: blocks are not left in the reverse order of entry, for example because tasks of one thread hold
            them over an ``await``.

    >>> with set_recurrent_mode("recurrent"):
    ...     recurrent_mode()
    True
    >>> @set_recurrent_mode("sequential")
    ... def act():
    ...     return recurrent_mode()
    >>> act(), recurrent_mode()
    (False, None)
    """

    def __init__(self, mode: Mode = True, *, burn_in: int = 0) -> None:
        # Losses and estimators enter this at every call with True and no burn-in, so skip the checks for both.
        self._mode = mode if isinstance(mode, bool) else check_mode("mode", mode)
        if type(burn_in) is int and burn_in == 0:
            self._burn_in = 0
        else:
            self._burn_in = check_whole_number("burn_in", burn_in, 0)
        if burn_in and not self._mode:
            raise ValueError(f"burn_in={burn_in} needs the recurrent mode, which has runs, got mode={mode!r}")

        self._outer: list[tuple[bool | None, int]] = []

    def __enter__(self) -> None:
        """Set the mode; the outer one is kept."""
        self._outer.append((_MODE.value, _MODE.burn_in))
        # Together: an interrupt must not come between.
        _MODE.value, _MODE.burn_in = self._mode, self._burn_in

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the outer mode."""
        current = _MODE.value
        outer = self._outer.pop()
        if current is not self._mode:
            # Another mode than the one entered: a different block is still open, so reset the mode.
            outer = (None, 0)
        _MODE.value, _MODE.burn_in = outer

        if current is not self._mode and kind is None:
            raise RuntimeError(
                f"a block of set_recurrent_mode({self._mode!r}) ended in mode {current!r}: it was held across "
                "an await or a yield, during which another block began or ended. Set the mode only around the "
                "calls that need it, without await or yield inside"
            )

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        if inspect.isclass(function):
            raise TypeError(
                f"set_recurrent_mode cannot decorate the class {function.__name__!r}: decorate its methods"
            )
        if any(is_kind(function) for is_kind in _BODY_RUNS_LATER):
            raise TypeError(
                f"set_recurrent_mode cannot decorate {function.__name__!r}: its body runs after the call has "
                "returned; write `with set_recurrent_mode(...)` inside it"
            )

        @functools.wraps(function)
        def run_in_mode(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with set_recurrent_mode(self._mode, burn_in=self._burn_in):
                return function(*args, **kwargs)

        return run_in_mode
