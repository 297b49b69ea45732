"""Argument checks: each error names the argument, what it must be and what was passed.

| check | wants |
|---|---|
| `check_whole_number` | an integer within limits |
| `check_number` | a real number within limits |
| `check_choice` | one of some choices |
| `did_you_mean` | (adds the nearest name to an error) |
| `check_type` | an instance of a type |
| `check_iterable` | an iterable, but no tensor or tensordict |
| `check_function` | something that can be called |
| `check_flags` | each argument True or False |
| `check_keys` | each argument the name of an entry: a string or a tuple of strings |
| `check_key_names` | a list of keys |
| `check_tensors` | each argument a tensor |
| `as_numbers` | a number, an array or a tensor with values, as a tensor |
| `check_dense_tensor` | a dense tensor of real numbers, on a given device |
| `check_floating_tensor` | likewise, of a floating dtype |
| `blame_entries` | (says which entry made a call fail) |
| `check_device` | a device, or its name |
| `check_path` | a path |
| `check_seed` | a seed of torch's generators |
| `check_sizes` | the sizes of a shape |
| `check_floating_dtype` | a floating dtype |
| `check_cpu_generator` | a random generator of the CPU, or None |
| `check_rows` | a tensordict of rows |
| `check_writer_number` | the number of a writer |
| `check_options` | a mask that leaves each choice an option |
| `warn_of_scales` | rows of one scale |
| `optional_package` | a package that an extra installs |

Each returns the checked value, for assignments such as ``self.slots = check_whole_number("slots", slots)``. ``hint``
is a suggested fix, added after a colon. Arguments that Python or torch already check well need no check.
"""

import importlib
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, KeysView, Sequence
from difflib import get_close_matches
from operator import index
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, cast

import numpy as np
import torch
from tensordict import TensorDictBase

#: Attribute that collectors set on a batch whose observations were scaled by changing statistics.
SCALED = "scaled_by_running_statistics"

T = TypeVar("T")
Number = TypeVar("Number", bound=SupportsFloat)


def _text(name: str, wanted: str, got: object, hint: str = "") -> str:
    """``name must wanted, got got: hint``."""
    if hint:
        hint = f": {hint}"
    return f"{name} must {wanted}, got {got}{hint}"


def as_text(value: object) -> str:
    """Return a value as text for an error: its repr if short, else its type; for an array, its dtype and shape.

    >>> as_text("3"), as_text(torch.zeros(2, 3)), as_text(list(range(100)))
    ("'3'", 'a torch.float32 Tensor of shape (2, 3)', 'list')
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        sparse = ""
        place = ""
        if isinstance(value, torch.Tensor):
            sparse = "sparse " * value.is_sparse
            if not value.is_cpu:
                place = f" on {value.device}"
        return f"a {sparse}{value.dtype} {type(value).__name__} of shape {tuple(value.shape)}{place}"

    text = repr(value)
    if len(text) <= 80 and "\n" not in text:
        return text
    return type(value).__name__


def check_whole_number(
    name: str, value: object, least: int = 1, most: int | None = None, *, hint: str = ""
) -> int:
    """Return an argument after checking that it is an integer (no bool) from ``least`` to ``most``.

    Args:
        name: of the argument, for the error.
        value: of the argument.
        least: default 1.
        most: included; default None, what 64 bits hold.
        hint: a way out, added to the error.

    Raises:
        ValueError: it is not.

    >>> check_whole_number("rows", 3)
    3
    >>> check_whole_number("level", 30, 1, 22)
    Traceback (most recent call last):
    ...
    ValueError: level must be an integer from 1 to 22, got 30
    """
    largest = 2**63 - 1 if most is None else most
    if (
        isinstance(value, (int, np.integer))
        and not isinstance(value, bool)
        and least <= value
        and value <= largest
    ):
        return int(value)

    if most is not None:
        limits = f"from {least} to {most}"
    else:
        limits = f"of at least {least}"
        if isinstance(value, int) and value >= 2**63:
            limits += ", of 64 bits"
    raise ValueError(_text(name, f"be an integer {limits}", as_text(value), hint))


def check_number(
    name: str,
    value: Number,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    hint: str = "",
) -> Number:
    """Return an argument after checking that it is a real number within limits; NaN never is.

    Args:
        name: of the argument, for the error.
        value: of the argument: a float, an integer or a tensor with one element.
        least: smallest value allowed; default None, no lower limit.
        most: largest value allowed; default None, no upper limit.
        above: a limit that is not allowed itself, in place of ``least``.
        below: a limit that is not allowed itself, in place of ``most``; ``math.inf`` wants a finite number.
        hint: a way out, added to the error.

    Raises:
        TypeError: it is not a number.
        ValueError: it is outside the limits.

    >>> check_number("gamma", 0.99, least=0, most=1)
    0.99
    >>> check_number("gamma", 1.5, least=0, most=1)
    Traceback (most recent call last):
    ...
    ValueError: gamma must lie in [0, 1], got 1.5
    >>> check_number("fps", 0, above=0)
    Traceback (most recent call last):
    ...
    ValueError: fps must be above 0, got 0
    """
    # float first: isinstance() with a protocol takes as long as the rest of the function.
    if isinstance(value, bool) or not isinstance(value, (float, int, SupportsFloat)):
        raise TypeError(_text(name, "be a number", as_text(value), hint))

    try:
        real = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # an array of several numbers, or an empty one
        raise TypeError(_text(name, "be a number", as_text(value), hint)) from error

    # whether the limits are allowed themselves
    low_is_in = above is None
    high_is_in = below is None
    low = least if low_is_in else above
    high = most if high_is_in else below

    fits = real == real  # not NaN
    if low is not None:
        fits &= real >= low if low_is_in else real > low
    if high is not None:
        fits &= real <= high if high_is_in else real < high
    if fits:
        return value

    if low is not None and high is not None:
        opening = "[" if low_is_in else "("
        closing = "]" if high_is_in else ")"
        limits = f"lie in {opening}{low}, {high}{closing}"
    elif low is not None:
        word = "at least" if low_is_in else "above"
        limits = f"be {word} {low}"
    elif high is not None:
        word = "at most" if high_is_in else "below"
        limits = f"be {word} {high}"
    else:
        limits = "be a number"
    got = real if isinstance(value, torch.Tensor) else as_text(value)
    raise ValueError(_text(name, limits, got, hint))


def did_you_mean(got: object, known: Iterable[object]) -> str:
    """``did you mean 'observation'?``, the nearest of the known names; empty if none is near.

    >>> did_you_mean("obsevation", ["action", "observation"])
    "did you mean 'observation'?"
    """
    names = {str(name): name for name in known}
    near = get_close_matches(str(got), names, 1)
    if near:
        return f"did you mean {names[near[0]]!r}?"
    return ""


def check_choice(name: str, value: T, choices: Collection[T], *, hint: str = "") -> T:
    """Return an argument after checking that it is one of ``choices``.

    Raises:
        ValueError: it is not; the message lists the choices.

    >>> check_choice("by", "end", ("trajectory", "start"))
    Traceback (most recent call last):
    ...
    ValueError: by must be 'trajectory' or 'start', got 'end'
    """
    try:
        if value in choices:
            return value
    except (TypeError, ValueError, RuntimeError):  # unhashable, or an array
        pass

    *others, last = map(repr, choices)
    if not hint and isinstance(value, str):
        hint = did_you_mean(value, choices)
    raise ValueError(
        _text(name, f"be {', '.join(others)}{' or ' * bool(others)}{last}", as_text(value), hint)
    )


def check_type(
    name: str, value: object, kind: type[T] | tuple[type[T], ...], wanted: str, *, hint: str = ""
) -> T:
    """Return an argument after checking that it is an instance of ``kind``.

    Args:
        name: of the argument, for the error.
        value: of the argument.
        kind: one type or several.
        wanted: says the type in words, with its article.
        hint: a way out, added to the error.

    Raises:
        TypeError: it is not.

    >>> check_type("space", 4, str, "a gymnasium space", hint="give it env.action_space")
    Traceback (most recent call last):
    ...
    TypeError: space must be a gymnasium space, got int: give it env.action_space
    """
    if not isinstance(value, kind):
        raise TypeError(_text(name, f"be {wanted}", type(value).__name__, hint))
    return value


def check_iterable(name: str, value: T, wanted: str, *, hint: str = "") -> T:
    """Return an argument after checking that it can be iterated over; a tensor or tensordict would yield its rows.

    Raises:
        TypeError: it cannot, or is a tensor or tensordict; ``wanted`` says what it should be.

    >>> check_iterable("episodes", torch.zeros(3), "an iterable of episodes", hint="give it [episode]")
    Traceback (most recent call last):
    ...
    TypeError: episodes must be an iterable of episodes, got a torch.float32 Tensor of shape (3,): give it [episode]
    """
    if isinstance(value, torch.Tensor | TensorDictBase) or not isinstance(value, Iterable):
        raise TypeError(_text(name, f"be {wanted}", as_text(value), hint))
    return value


def check_function(name: str, value: T, wanted: str = "a function", *, hint: str = "") -> T:
    """Return an argument after checking that it can be called.

    Raises:
        TypeError: it cannot; ``wanted`` says which function it should be.

    >>> check_function("create_env_fn", 3, "a function that makes an env")
    Traceback (most recent call last):
    ...
    TypeError: create_env_fn must be a function that makes an env, got 3
    """
    if not callable(value):
        raise TypeError(_text(name, f"be {wanted}", as_text(value), hint))
    return value


def check_flags(**named: object) -> None:
    """Check that each argument is True or False; 1 and 0 are accepted, too.

    Raises:
        TypeError: one is not; a text such as ``"False"`` would be taken for True.

    >>> check_flags(strict=True, shared="no")
    Traceback (most recent call last):
    ...
    TypeError: shared must be True or False, got 'no'
    """
    for name, value in named.items():
        if not isinstance(value, (bool, np.bool_)) and not (isinstance(value, int) and value in (0, 1)):
            raise TypeError(_text(name, "be True or False", as_text(value)))


def is_key(value: object) -> bool:
    """Whether a value can name an entry: it is a string, or a tuple of strings (or such tuples) with at least one."""
    return isinstance(value, str) or (isinstance(value, tuple) and len(value) > 0 and all(map(is_key, value)))


def check_keys(*, optional: bool = False, **named: object) -> None:
    """Check that each argument names an entry: a string, or a tuple of strings for an entry of a nested tensordict.

    Args:
        optional: None is allowed, too.
        named: the arguments.

    Raises:
        TypeError: one does not.

    >>> check_keys(done_key=("next", "done"), traj_key=3)
    Traceback (most recent call last):
    ...
    TypeError: traj_key must be a key (a string or a tuple of strings), got 3
    """
    for name, value in named.items():
        if not is_key(value) and not (optional and value is None):
            none = " or None" * optional
            raise TypeError(_text(name, f"be a key (a string or a tuple of strings){none}", as_text(value)))


def check_key_names(name: str, keys: object, *, one: bool = False) -> list[str | tuple[str, ...]]:
    """Return keys as a list after checking them; a string is refused, as its letters would be taken for keys.

    Args:
        name: of the argument, for the error.
        keys: a list of keys, or another iterable of them.
        one: a single key is allowed, too: a string, or a tuple of strings.

    Raises:
        TypeError: it is a string, or no list of keys.

    >>> check_key_names("in_keys", "observation")
    Traceback (most recent call last):
    ...
    TypeError: in_keys must be a list of keys, got the string 'observation': write ['observation']
    >>> check_key_names("action_keys", "action", one=True)
    ['action']
    """
    if one and is_key(keys):
        return [cast(str, keys)]
    if isinstance(keys, str):
        raise TypeError(f"{name} must be a list of keys, got the string {keys!r}: write [{keys!r}]")
    if isinstance(keys, (list, tuple, set, frozenset, KeysView, Iterator)):
        listed = list(keys)
        if all(map(is_key, listed)):
            return listed

    raise TypeError(
        _text(name, f"be {'a key or ' * one}a list of keys (strings or tuples of strings)", as_text(keys))
    )


def check_tensors(**named: object) -> None:
    """Check that each argument is a tensor.

    Raises:
        TypeError: one is not.

    >>> check_tensors(value=torch.zeros(2), count=[1, 2])
    Traceback (most recent call last):
    ...
    TypeError: count must be a tensor, got [1, 2]
    """
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(_text(name, "be a tensor", as_text(value)))


def as_numbers(
    name: str, value: object, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return an argument as a tensor; TypeError with its name unless it is a number, array or tensor with values.

    >>> as_numbers("low", [1, 2])
    tensor([1, 2])
    """
    try:
        numbers = torch.as_tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(_text(name, "be a number, an array or a tensor", as_text(value))) from error

    if numbers.is_meta or numbers.layout is not torch.strided:
        raise TypeError(_text(name, "be a dense tensor with values", as_text(numbers)))
    return numbers


def check_dense_tensor(
    name: str, value: object, device: torch.device | None = None, owner: str = "the others"
) -> torch.Tensor:
    """Return an argument after checking that it is a dense tensor of real numbers.

    Args:
        name: of the argument, for the error.
        value: of the argument.
        device: where it must be; default None, anywhere.
        owner: what else is there, in words.

    Raises:
        TypeError: it is not a tensor, a sparse one, or one of complex numbers.
        ValueError: it is on another device.

    >>> check_dense_tensor("reward", [1.0, 2.0])
    Traceback (most recent call last):
    ...
    TypeError: reward must be a tensor, got list: torch.as_tensor(reward)
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(_text(name, "be a tensor", type(value).__name__, f"torch.as_tensor({name})"))
    if value.layout is not torch.strided or value.is_complex():
        raise TypeError(_text(name, "be a dense tensor of real numbers", f"{value.dtype}, {value.layout}"))

    if device is not None and value.device != device:
        raise ValueError(_text(name, f"be on {device} like {owner}", value.device, f"{name}.to({device})"))
    return value


def check_floating_tensor(
    name: str, value: object, device: torch.device | None = None, owner: str = "the others"
) -> torch.Tensor:
    """Return an argument after checking that it is a :func:`check_dense_tensor` of a floating dtype.

    Raises:
        TypeError, ValueError: it is not.

    >>> check_floating_tensor("logits", torch.tensor([1, 2]))
    Traceback (most recent call last):
    ...
    TypeError: logits must be floating, got torch.int64: cast it, e.g. with .float()
    """
    tensor = check_dense_tensor(name, value, device, owner)
    if not tensor.is_floating_point():
        raise TypeError(_text(name, "be floating", tensor.dtype, "cast it, e.g. with .float()"))
    return tensor


def check_device(name: str, value: object) -> torch.device:
    """Return a device after checking that the argument is one, or the name or number of one.

    Raises:
        ValueError: it is not.

    >>> check_device("storing_device", "cpu")
    device(type='cpu')
    >>> check_device("device", "gpu")
    Traceback (most recent call last):
    ...
    ValueError: device must be a torch device such as 'cpu' or 'cuda:0', got 'gpu'
    """
    if isinstance(value, torch.device):
        return value
    try:
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return torch.device(value)
    except (RuntimeError, ValueError):
        pass
    raise ValueError(_text(name, "be a torch device such as 'cpu' or 'cuda:0'", as_text(value)))


def check_usable_device(name: str, value: object) -> torch.device:
    """Return a device, with its number, after checking that torch can use it here.

    Raises:
        ValueError: the argument is no device, or torch cannot use it.

    >>> check_usable_device("device", "cpu")
    device(type='cpu')
    """
    wanted = check_device(name, value)
    try:
        return torch.empty(0, device=wanted).device
    except (AssertionError, RuntimeError) as error:  # torch was not compiled for it; no such device
        raise ValueError(f"{name}={str(wanted)!r} cannot be used here: {error}") from error


def check_path(name: str, value: object) -> Path:
    """Return a path after checking that the argument is a string or a path.

    Raises:
        TypeError: it is not.

    >>> check_path("path", 3)
    Traceback (most recent call last):
    ...
    TypeError: path must be a path (a string or a pathlib.Path), got 3
    """
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value):
        return Path(value)
    raise TypeError(_text(name, "be a path (a string or a pathlib.Path)", as_text(value)))


def check_seed(name: str, value: object) -> int:
    """Return a seed after checking that torch's generators take it.

    Raises:
        ValueError: it is not an integer, or has more than 64 bits.

    >>> check_seed("seed", 1.5)
    Traceback (most recent call last):
    ...
    ValueError: seed must be an integer from 0 to 18446744073709551615, got 1.5
    """
    return check_whole_number(name, value, 0, 2**64 - 1)


def check_sizes(name: str, value: object) -> tuple[int, ...]:
    """Return the sizes of a shape after checking that they are integers of at least 0.

    Raises:
        TypeError: it is not a list or tuple.
        ValueError: one of them is not such an integer.

    >>> check_sizes("shape", [3, 4])
    (3, 4)
    >>> check_sizes("shape", 3)
    Traceback (most recent call last):
    ...
    TypeError: shape must be a tuple of integers, got 3
    """
    if type(value) is tuple and set(map(type, value)) <= {int} and min(value, default=0) >= 0:
        return value
    if not isinstance(value, (list, tuple)):
        raise TypeError(_text(name, "be a tuple of integers", as_text(value)))
    return tuple(check_whole_number(name, size, 0) for size in value)


def check_floating_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return a dtype after checking that it is a floating one.

    Raises:
        ValueError: it is not.

    >>> check_floating_dtype("dtype", torch.float16)
    torch.float16
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(_text(name, "be a floating dtype such as torch.float16", dtype))
    return dtype


def check_cpu_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return a random generator (None: torch's global one) after checking that it is a CPU generator.

    Raises:
        TypeError: it is not a generator.
        ValueError: it belongs to another device.

    >>> check_cpu_generator(None)
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(_text("generator", "be a torch.Generator or None", as_text(generator)))
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(
            f"generator must be a CPU generator (draws are made on the host), got {generator.device}"
        )
    return generator


def check_rows(batch: object, *, values: bool = False) -> None:
    """Raise TypeError if a batch is not a tensordict but, say, a buffer or another library's sample.

    Args:
        batch: the argument.
        values: the rows are read, so a batch on the device meta, which has none, is an error, too.

    >>> check_rows([1, 2])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    TypeError: batch must be a tensordict of rows, got list; the rows of a buffer are buffer[:], ...
    """
    if not hasattr(batch, "batch_dims"):
        raise TypeError(
            f"batch must be a tensordict of rows, got {type(batch).__name__}; the rows of a buffer are buffer[:], and "
            "those of a trainer's FlatReplayBuffer are buffer.flat[:]"
        )

    if values and getattr(getattr(batch, "device", None), "type", None) == "meta":
        raise TypeError("batch must be a tensordict of rows with values, got one on the device meta")


#: What Python and torch raise for an entry with the wrong class, dtype, shape or device.
BLAMED = (RuntimeError, TypeError, IndexError, AttributeError)


def blame_entries(
    caller: object, batch: TensorDictBase, keys: Iterable[str | tuple[str, ...]], error: Exception
) -> None:
    """Raise an error that names the faulty entry of a batch; called only after a call has failed.

    Args:
        caller: the object whose call has failed.
        batch: the batch passed to it.
        keys: the entries that it reads.
        error: its error; it gets a note with the dtype, shape and device of each entry.

    Raises:
        TypeError: an entry is not a dense tensor of real numbers.
        ValueError: two entries are on two devices.

    >>> from tensordict import TensorDict
    >>> batch = TensorDict({"reward": torch.zeros(2, dtype=torch.complex64)}, [2])
    >>> blame_entries(object(), batch, ["reward"], RuntimeError())
    Traceback (most recent call last):
    ...
    TypeError: batch['reward'] must be a dense tensor of real numbers, got torch.complex64, torch.strided
    """
    read = []
    device = None

    for key in keys:
        column = batch.get(key, None)
        if column is None:
            continue
        try:
            device = check_dense_tensor(f"batch[{key!r}]", column, device).device
        except (TypeError, ValueError) as wrong:
            raise wrong from error
        read.append(f"{key!r}: {as_text(column)}")

    error.add_note(f"{type(caller).__name__} read {', '.join(read)}")


def check_options(
    name: str,
    mask: torch.Tensor,
    counts: Sequence[int] | None = None,
    *,
    each: str = "row",
    strict: bool = True,
    real: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Split a mask of legal actions by choice; a choice without a legal option is an error.

    This is checked on the CPU only, without a sync; on other devices such a choice allows all its options.

    Args:
        name: of the mask, for the error.
        mask: True (or 1) where an option is legal, ``[*B, sum(counts)]``.
        counts: number of options of each choice. Default None: there is one choice.
        each: what an element of the batch is, for the error.
        strict: if False, allow all options of such a choice on the CPU, too.
        real: bool ``[*B]``, the elements that count. Default None: all.

    Returns:
        A bool ``[*B, count]`` per choice.

    Raises:
        ValueError: a choice of a real element has no option.

    >>> check_options("action_mask", torch.tensor([[1, 0, 1]]), (1, 2))
    [tensor([[True]]), tensor([[False,  True]])]
    """
    allowed = mask.bool()
    parts = [allowed]
    if counts is not None:
        parts = list(allowed.split_with_sizes(list(counts), -1))

    some = [part.any(-1, keepdim=True) for part in parts]

    if strict and mask.is_cpu and not torch.compiler.is_compiling():
        if all(bool(one.all()) for one in some):
            return parts

        lacking = ~torch.cat(some, -1).all(-1)
        if real is not None:
            lacking = lacking & real
        if bool(lacking.any()):
            where = lacking.flatten().nonzero().squeeze(-1).tolist()[:8]
            raise ValueError(
                f"{name} must leave at least one action in each {each}, got none in {each}s {where} of "
                f"{lacking.numel()}: end the episode where there is nothing to do"
            )

    return [part | ~one for part, one in zip(parts, some, strict=True)]


def warn_of_scales(stacklevel: int) -> None:
    """Warn that a buffer stores rows scaled differently by a running normalisation."""
    warnings.warn(
        "NormalizeObservation scales each row by the statistics of its step, so the rows of a buffer differ in scale: "
        "store raw observations and normalise in the network or in samples, or freeze it (update_running_mean=False)",
        stacklevel=stacklevel + 1,
    )


def check_writer_number(writer: object) -> int:
    """Return a writer number, the high bits of trajectory ids, after checking it.

    Raises:
        ValueError: it is not an integer from 0 to 2**23 - 1.

    >>> check_writer_number(3)
    3
    """
    try:
        if isinstance(writer, SupportsIndex) and not isinstance(writer, bool) and 0 <= index(writer) < 2**23:
            return index(writer)
    except (TypeError, RuntimeError):  # a tensor of several numbers, or an empty one
        pass
    raise ValueError(f"writer must be in [0, 2**23), got {as_text(writer)}")


def optional_package(name: str, extra: str, needed_by: str) -> Any:
    """Import the package ``name``; the ImportError names the extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f'{needed_by} needs {name}, which is not installed: pip install "flatroll[{extra}]"'
        ) from error
