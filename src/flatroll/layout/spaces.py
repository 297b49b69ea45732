"""The leaves of Gymnasium spaces (batch keys, tree paths), the space of all rows, the choices of an action space."""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from flatroll.layout.keys import OBSERVATION, RESERVED, NestedKey

#: What the numbers of a mask are about: the options of each choice, or the combinations of all choices.
MaskForm: TypeAlias = Literal["options", "combinations"]

#: An integer Box with more options than this, over all its numbers, is not treated as choices.
MOST_OPTIONS = 4096


def space_leaves(
    space: "spaces.Space[Any]", key: tuple[str, ...], path: tuple[Any, ...] = ()
) -> list[tuple[NestedKey, tuple[Any, ...]]]:
    """List the batch key (starting with ``key``) and the tree path (with ``path``) of each leaf of a space.

    >>> space_leaves(spaces.Tuple((spaces.Discrete(2), spaces.Dict(a=spaces.Discrete(3)))), ("action",))
    [(('action', '0'), (0,)), (('action', '1', 'a'), (1, 'a'))]
    """
    if isinstance(space, spaces.Dict):
        items: Any = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        items = enumerate(space.spaces)
    else:
        only = key[0] if len(key) == 1 else key
        return [(only, path)]

    leaves = []
    for name, child in items:
        leaves += space_leaves(child, (*key, str(name)), (*path, name))
    return leaves


def observation_leaves(space: "spaces.Space[Any]") -> list[tuple[NestedKey, tuple[Any, ...]]]:
    """List the batch key and the tree path of each observation entry; see `column_name`.

    >>> from gymnasium.spaces import Box, Dict
    >>> observation_leaves(Box(0, 1, (2,)))
    [('observation', ())]
    >>> observation_leaves(Dict(eye=Box(0, 1, (2,)), body=Dict(leg=Box(0, 1))))
    [('eye', ('eye',)), (('body', 'leg'), ('body', 'leg'))]
    """
    if not isinstance(space, spaces.Dict):
        return space_leaves(space, (OBSERVATION,))

    names = {key: column_name(key) for key in space.spaces}
    if len(set(names.values())) < len(names):
        raise ValueError(
            f"observation entries {list(names)} would become columns of the same name, {[*names.values()]}: rename "
            "one with gymnasium.wrappers.TransformObservation"
        )

    leaves = []
    for key, child in space.spaces.items():
        leaves += space_leaves(child, (names[key],), (key,))
    return leaves


def column_name(entry: object) -> str:
    """Return the name of an entry of a Dict observation in a batch; one that batches reserve gets an underscore.

    >>> column_name("eye"), column_name("step_count")
    ('eye', 'step_count_')
    """
    if entry in RESERVED:
        return f"{entry}_"
    return str(entry)


def find_part(space: "spaces.Space[Any]", path: tuple[Any, ...]) -> "spaces.Space[Any]":
    """Return the part of a space at a path of keys and positions.

    >>> find_part(spaces.Dict(a=spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))), ("a", 1))
    Discrete(3)
    """
    for name in path:
        space = space[name]  # type: ignore[index]
    return space


def widest_space(single: "spaces.Space[Any]", batched: "spaces.Space[Any] | None") -> "spaces.Space[Any]":
    """Return the space of one row that holds the values of all rows of a batched space.

    The rows of a vector env may differ in bounds and numbers of options, as with Gymnasium's
    ``SyncVectorEnv(observation_mode="different")``, whose single space is that of the first row.

    Args:
        single: the vector env's space of one row.
        batched: its space of all rows, as `gymnasium.vector.utils.batch_space` makes it. One of another form (envpool
            has a single env's) is ignored.

    Returns:
        ``single`` itself where it holds all rows.

    >>> widest_space(spaces.Discrete(2), spaces.MultiDiscrete([2, 9]))
    Discrete(9)
    >>> widest_space(spaces.Box(0, 1, (1,)), spaces.Box(np.array([[0], [-5]]), np.array([[1], [3]])))
    Box(-5.0, 3.0, (1,), float32)
    """
    if isinstance(single, spaces.Dict) and isinstance(batched, spaces.Dict):
        if single.spaces.keys() != batched.spaces.keys():
            return single

        parts = {name: widest_space(part, batched[name]) for name, part in single.spaces.items()}
        if all(parts[name] is part for name, part in single.items()):
            return single
        return spaces.Dict(parts)

    if isinstance(single, spaces.Tuple) and isinstance(batched, spaces.Tuple):
        if len(single.spaces) != len(batched.spaces):
            return single

        each = [widest_space(part, rows) for part, rows in zip(single.spaces, batched.spaces, strict=True)]
        same = all(wide is part for wide, part in zip(each, single.spaces, strict=True))
        if same:
            return single
        return spaces.Tuple(each)

    ends = _find_ends(single)
    rows = _find_ends(batched)
    if ends is None or rows is None:
        return single
    if not rows[0].size or rows[0].ndim == 0 or rows[0].shape[1:] != ends[0].shape:
        return single

    low = np.minimum(ends[0], rows[0].min(0))
    high = np.maximum(ends[1], rows[1].max(0))
    if np.array_equal(low, ends[0]) and np.array_equal(high, ends[1]):
        return single

    if isinstance(single, spaces.Box):
        dtype: Any = single.dtype
        return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype.type)
    if isinstance(single, spaces.Discrete):
        count = int(high) - int(low) + 1
        if single.dtype == np.int64:
            return spaces.Discrete(count, start=int(low))
        small: Any = single.dtype  # Gymnasium before 1.2.2 has int64 only
        return spaces.Discrete(count, start=int(low), dtype=small.type)
    if isinstance(single, spaces.MultiDiscrete):
        whole: Any = single.dtype
        return spaces.MultiDiscrete((high - low + 1).astype(whole), dtype=whole.type, start=low.astype(whole))
    return single


def _find_ends(space: "spaces.Space[Any] | None") -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """Return the least and greatest values of a Box, Discrete or MultiDiscrete; None for other spaces."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return np.asarray(space.start), np.asarray(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return None


def option_counts(space: "spaces.Space[Any]") -> tuple[int, ...] | None:
    """Return the number of options of each choice of a space; None if its values are no choices.

    A flag of a MultiBinary is a choice of two options, a number of an integer Box one of those within its bounds, if
    they are at most `MOST_OPTIONS` in all.

    >>> option_counts(spaces.MultiDiscrete([2, 3])), option_counts(spaces.MultiBinary(2))
    ((2, 3), (2, 2))
    >>> option_counts(spaces.Box(-1, 1, (2,), np.int8)), option_counts(spaces.Box(-1, 1, (2,)))
    ((3, 3), None)
    """
    counts: tuple[int, ...] = ()
    if isinstance(space, spaces.Discrete):
        counts = (int(space.n),)
    elif isinstance(space, spaces.MultiDiscrete):
        counts = tuple(space.nvec.reshape(-1).tolist())
    elif isinstance(space, spaces.MultiBinary):
        counts = (2,) * math.prod(space.shape)
    elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        if space.low.size <= MOST_OPTIONS:
            # Python's integers: the difference of the widest bounds overflows.
            ends = zip(space.low.reshape(-1).tolist(), space.high.reshape(-1).tolist(), strict=True)
            counts = tuple(high - low + 1 for low, high in ends)
        if sum(counts) > MOST_OPTIONS:
            counts = ()
    return counts or None


def first_options(space: "spaces.Space[Any]") -> npt.NDArray[np.int64]:
    """Return the number of the first option of each choice, int64 ``[choices]``; see `option_counts`.

    >>> first_options(spaces.Discrete(3, start=5)), first_options(spaces.MultiBinary(2))
    (array([5]), array([0, 0]))
    """
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(math.prod(space.shape), np.int64)

    if isinstance(space, spaces.Box):
        first: Any = space.low
    else:
        first = space.start  # type: ignore[attr-defined]
    return np.asarray(first, np.int64).reshape(-1)


def mask_form(counts: Sequence[int], shape: Sequence[int]) -> MaskForm | None:
    """Return what the numbers of a legal-action mask of this shape are about; None if the shape fits neither form.

    A mask of ``"options"`` has shape ``[sum(counts)]``, choice after choice, or ``[..., k]`` if every choice has k
    options; one of ``"combinations"`` has the shape ``counts``. A mask ``[2, 2]`` of two choices could be either.

    Args:
        counts: number of options of each choice.
        shape: of one row's mask.

    >>> mask_form((3, 3), (6,)), mask_form((3, 3), (2, 3)), mask_form((4, 10), (4, 10)), mask_form((3,), (4,))
    ('options', 'options', 'combinations', None)
    """
    counts = tuple(counts)
    shape = tuple(shape)

    if shape == (sum(counts),):
        return "options"

    by_choice = len(shape) > 1 and set(counts) == {shape[-1]} and math.prod(shape[:-1]) == len(counts)
    combined = len(counts) > 1 and shape == counts
    if by_choice == combined:
        return None
    if by_choice:
        return "options"
    return "combinations"


def mask_shapes(space: "spaces.Space[Any]") -> str:
    """Describe the shapes that a legal-action mask of one row may have, for errors.

    >>> mask_shapes(spaces.MultiDiscrete([4, 10]))
    '(14,), the options of each choice, or (4, 10), all combinations'
    >>> mask_shapes(spaces.Discrete(4)), mask_shapes(spaces.Box(-1, 1))
    ('(4,)', 'none, since it has no choices')
    """
    counts = option_counts(space)
    if counts is None:
        return "none, since it has no choices"
    flat = f"({sum(counts)},)"
    if len(counts) == 1 or counts == (2, 2):
        return flat
    by_choice = ""
    if len(set(counts)) == 1:
        by_choice = f" or {(len(counts), counts[0])}"
    return f"{flat}{by_choice}, the options of each choice, or {counts}, all combinations"
