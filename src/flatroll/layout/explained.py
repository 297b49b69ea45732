"""Errors of public calls name the argument: what its annotation says, and what came.

A call that fails inside Python, torch or NumPy because of an argument raises an error that names their internals.
`explain_errors` wraps the public functions and constructors of a room: if one fails, and an argument is not what its
annotation says, the error says so. A constructor also refuses what it would only keep for a later failure: a key that
is no key, a hook that cannot be called. All else that works goes on working, at the cost of one more Python call.
"""

import dis
import enum
import functools
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from tensordict import TensorDictBase

F = TypeVar("F", bound=Callable[..., Any])
_PACKAGE = tuple(  # in a checkout some rooms are links
    str((Path(__file__).parents[1] / name).resolve()) + os.sep
    for name in (".", "wrappers", "buffers", "estimators")
)
_LIBRARIES = re.compile(r"[/\\](?:torch|tensordict|numpy|numba|gymnasium|minari)[/\\]")
_STANDARD = os.path.dirname(os.__file__)
#: What Python and the libraries raise for wrong values; subclasses have a meaning of their own.
_BARE = (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError, OverflowError)
_BARE += (NotImplementedError, AssertionError, ZeroDivisionError, StopIteration)  # type: ignore[assignment]
_WORDS: dict[Any, str] = {
    None: "None",
    type(None): "None",
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    torch.Tensor: "a tensor",
    torch.device: "a device",
    torch.dtype: "a torch dtype",
    torch.Generator: "a torch generator",
    torch.nn.Module: "a module",
    TensorDictBase: "a tensordict",
    os.PathLike: "a path",
    os.PathLike[str]: "a path",
    Path: "a path",
}
_KEY = {str, tuple[str, ...]}
_SOME = str | tuple[str, ...]
_KEYS = {*_KEY, Sequence[_SOME], Iterable[_SOME], list[_SOME], Collection[_SOME]}
_LATE: tuple[tuple[set[Any], Callable[[Any], bool]], ...] = (
    ({str, Path, os.PathLike, os.PathLike[str]}, lambda value: not isinstance(value, (str, os.PathLike))),
    (_KEYS, lambda value: _no_key(value)),
    ({bool}, lambda value: _no_flag(value)),
    ({torch.dtype}, lambda value: not isinstance(value, torch.dtype)),
    ({torch.Generator}, lambda value: not isinstance(value, torch.Generator)),
)


def explain_errors(names: Iterable[str], room: dict[str, Any]) -> None:
    """Wrap the functions, and the constructors of the classes, that a room exports.

    Args:
        names: those of the room's ``__all__``.
        room: its ``globals()``.
    """
    done: dict[Any, Any] = {}  # two names of one function stay one
    for name in names:
        value = room.get(name)
        if isinstance(value, types.FunctionType):
            room[name] = done.setdefault(value, explained(value))
            room[name].__module__ = room["__name__"]  # by which pickle finds it
        elif isinstance(value, type) and isinstance(value.__init__, types.FunctionType):  # type: ignore[misc]
            value.__init__ = explained(value.__init__)  # type: ignore[misc]


def explained(function: F) -> F:
    """Return a function that raises the same errors, in words about its arguments where they had none.

    >>> @explained
    ... def take(values: torch.Tensor, count: int = 1) -> torch.Tensor:
    ...     return values[:count]
    >>> take(torch.arange(3), "2")
    Traceback (most recent call last):
    ...
    TypeError: count must be an integer, got '2'
    """

    if hasattr(function, "__explained__"):
        return function

    makes = function.__name__ == "__init__"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            made = function(*args, **kwargs)
        except Exception as error:
            better = _explanation(function, args, kwargs, error)
            if better is None:
                raise
            raise better from error
        if makes and (kept := _kept(function)):
            for name, place, annotation, wrong in kept:
                value = args[place] if place < len(args) else kwargs.get(name)
                if value is not None and wrong(value):
                    raise TypeError(f"{name} must be {_wanted(annotation)}, got {_shown(value)}")
        return made

    call.__explained__ = True  # type: ignore[attr-defined]
    return cast(F, call)


@functools.cache
def _kept(function: Any) -> list[tuple[str, int, Any, Callable[[Any], bool]]]:
    """The arguments of a constructor that fail late: name, place, annotation, and what no use of them takes."""
    places = {name: place for place, name in enumerate(inspect.signature(function).parameters)}
    found: list[tuple[str, int, Any, Callable[[Any], bool]]] = []
    for name, annotation in _hints(function).items():
        members = set(_members(annotation)) - {type(None)}
        for kind, wrong in _LATE:
            if (members and members <= kind) or (kind is _KEYS and members & _KEY and members <= _KEYS):
                found.append((name, places.get(name, 1 << 30), annotation, wrong))
                break
        else:
            if members and all(typing.get_origin(one) is Callable for one in members):
                found.append((name, places.get(name, 1 << 30), annotation, lambda value: not callable(value)))
    return found


def _no_key(value: Any) -> bool:
    """Whether a value is neither a key nor keys."""
    if isinstance(value, (str, tuple, list, set, frozenset)):
        return (not value and not isinstance(value, str)) or not all(
            isinstance(one, (str, tuple)) for one in value
        )
    return isinstance(value, (torch.Tensor, np.ndarray, TensorDictBase, bytes)) or not isinstance(
        value, Iterable
    )


def _no_flag(value: Any) -> bool:
    """Whether a value is neither true nor false."""
    return (isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0) or isinstance(
        value, TensorDictBase
    )


def _explanation(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Exception | None:
    """An error that names the argument at fault, or None: the error does so, or is not about the arguments."""
    known = type(error) in _BARE or type(error).__module__.startswith(("numba", "numpy"))
    if not known or not _is_bare(error, function):
        return None
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # the arguments are not those of the signature: Python says it well
        return None
    hints = _hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and name in given:
            options = given.pop(name)
            given |= options
            hints = {**(dict.fromkeys(options, hints[name]) if name in hints else {}), **hints}
    for name, value in given.items():
        if name in hints and not _fits(hints[name], value):
            return TypeError(f"{name} must be {_wanted(hints[name])}, got {_shown(value)}")
    given.pop("self", None)
    if not given:
        return None
    told = ", ".join(f"{name}={_shown(value)}" for name, value in given.items())
    text = str(error).partition("\n")[0][:200]
    of = function.__qualname__.removesuffix(".__init__")
    kind = type(error) if type(error) in _BARE else ValueError
    return kind(f"{of} cannot work with {told}: {text}")


def _is_bare(error: Exception, function: Any) -> bool:
    """Whether an operation of flatroll, or a library that it called, raised it: no statement, no code of the user."""
    trace, own, code, at = error.__traceback__, False, function.__code__, 0
    while trace is not None:
        code, at = trace.tb_frame.f_code, trace.tb_lasti
        own = code is function.__code__ or os.path.realpath(code.co_filename).startswith(_PACKAGE)
        standard = (
            code.co_filename.startswith((_STANDARD, "<frozen")) and "site-packages" not in code.co_filename
        )
        if not own and not standard and not _LIBRARIES.search(code.co_filename):
            return False
        trace = trace.tb_next
    raised = ("RAISE_VARARGS", "RERAISE")
    return not own or not any(one.offset == at and one.opname in raised for one in dis.get_instructions(code))


@functools.lru_cache(maxsize=512)
def _hints(function: Any) -> dict[str, Any]:
    """The annotations that can be read, those of keyword options by their names."""
    found: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, function.__globals__)
            except (NameError, TypeError, AttributeError):  # it is imported for type checkers only
                continue
        if typing.get_origin(annotation) is typing.Unpack:
            options = typing.get_args(annotation)[0]
            try:
                found |= typing.get_type_hints(options)
            except (NameError, TypeError):
                continue
        else:
            found[name] = annotation
    found.pop("return", None)
    return found


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(member for one in typing.get_args(annotation) for member in _members(one))
    return (annotation,)


def _fits(annotation: Any, value: Any) -> bool:
    """Whether a value is what the annotation says; True where that cannot be told."""
    members = _members(annotation)
    if set(members) >= _KEY and isinstance(value, (str, tuple)) and not value:
        return False
    if isinstance(value, str) and str in members:
        if torch.device in members:
            try:
                return bool(torch.device(value))
            except RuntimeError:
                return False
        enums = [one for one in members if isinstance(one, type) and issubclass(one, enum.Enum)]
        return not enums or any(
            value.upper() == one.name.upper() or value == one.value for kind in enums for one in kind
        )
    return any(_fits_one(one, value) for one in members)


def _fits_one(annotation: Any, value: Any) -> bool:
    """:func:`_fits` of what is no union."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    match annotation:
        case None | types.NoneType:
            return value is None
        case builtin if builtin is bool:
            return isinstance(value, (bool, np.bool_))
        case builtin if builtin is int:
            return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        case builtin if builtin is float:
            return (
                isinstance(value, (int, float, np.number))
                and not isinstance(value, bool)
                and not math.isnan(value)
            )
    if origin is typing.Literal:
        return isinstance(value, (str, bool, int, enum.Enum, types.NoneType)) and value in inner
    if origin is Callable:
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if origin is tuple or origin is list or origin in (Sequence, Iterable, Collection):
        if isinstance(value, (str, bytes)) or not isinstance(value, origin):
            return False
        of = inner[:1] if origin is not tuple or inner[-1] is Ellipsis else ()
        few = isinstance(value, (list, tuple, set, frozenset)) and len(value) <= 1000
        return not (few and of) or all(_fits(of[0], one) for one in value)
    if origin is Mapping or origin is dict:
        return isinstance(value, origin) and all(
            _fits(inner[0], key) and _fits(inner[1], one) for key, one in list(value.items())[:1000]
        )
    kind = origin or annotation
    if not isinstance(kind, type) or kind is object or kind is Any or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _wanted(annotation: Any) -> str:
    """An annotation in words."""
    members = list(_members(annotation))
    words = []
    if set(members) >= _KEY:
        words.append("a key (a string, or a tuple of strings)")
        members = [one for one in members if one not in _KEY]
    elif torch.device in members and str in members:
        words.append("a device such as 'cpu'")
        members = [one for one in members if one not in (torch.device, str)]
    for one in members:
        origin, inner = typing.get_origin(one), typing.get_args(one)
        if one in _WORDS:
            words.append(_WORDS[one])
        elif origin is typing.Literal:
            words += map(repr, inner)
        elif origin is Callable:
            words.append("a function")
        elif origin in (Mapping, dict):
            words.append(f"a dict of {_wanted(inner[1])}")
        elif origin in (tuple, list, Sequence, Iterable, Collection):
            words.append(
                f"a {'tuple' if origin is tuple else 'list'} of {_wanted(inner[0])}" if inner else "a list"
            )
        else:
            name = getattr(origin or one, "__name__", str(one))
            words.append(f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
    words = [word for word in dict.fromkeys(words) if word != "a string" or "a path" not in words]
    last = [words.pop(words.index("None"))] if "None" in words else []
    return " or ".join(words + last)


def _shown(value: Any) -> str:
    """A value in few characters: what it is, of a tensor its dtype, shape and device."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        device = (
            f" on {value.device}" if isinstance(value, torch.Tensor) and value.device.type != "cpu" else ""
        )
        dtype, size = str(value.dtype).removeprefix("torch."), list(value.shape)
        return f"a {'tensor' if isinstance(value, torch.Tensor) else 'NumPy array'} {dtype} {size}{device}"
    if isinstance(value, TensorDictBase):
        return f"a tensordict {list(value.batch_size)}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__
