"""Operations on trees of NumPy arrays or torch tensors, and checks of a policy's actions."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from flatroll.layout.checks import as_numbers, as_text

#: A NumPy array or a torch tensor with one row per environment.
Array: TypeAlias = Any
#: An array, or dicts and tuples of arrays nested as in a Gymnasium space.
Tree: TypeAlias = Any


def map_tree(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply ``fn`` to the leaves of one or more trees of the same structure.

    >>> map_tree(lambda a, b: a + b, {"x": 1, "y": (2, 3)}, {"x": 10, "y": (20, 30)})
    {'x': 11, 'y': (22, 33)}
    """
    if isinstance(tree, dict):
        return {key: map_tree(fn, value, *(other[key] for other in others)) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(fn, value, *(other[i] for other in others)) for i, value in enumerate(tree))
    return fn(tree, *others)


def copy_array(array: Array) -> Array:
    """Return a copy."""
    if isinstance(array, Tensor):
        return array.clone()
    return array.copy()


def select(mask: Array, chosen: Array, other: Array) -> Array:
    """Copy rows of ``chosen`` where ``mask`` (``(E,)``) is True, else of ``other``; no host sync."""
    mask = mask.reshape(mask.shape[0], *(1,) * (other.ndim - 1))
    if isinstance(other, Tensor):
        return torch.where(mask, chosen, other)
    return np.where(mask, chosen, other)


def fill_rows(array: Array, mask: Array, value: Any) -> Array:
    """Set rows of ``array`` in place where ``mask`` (``(E,)``) is True; no host sync."""
    if array.ndim > 1:
        mask = mask.reshape(mask.shape[0], *(1,) * (array.ndim - 1))
    if isinstance(array, Tensor):
        return array.masked_fill_(mask, value)
    np.copyto(array, value, where=mask)
    return array


def full_for(like: Array, size: int, value: float, dtype: torch.dtype) -> Array:
    """Create a vector of ``size`` equal values in the framework and on the device of ``like``."""
    if isinstance(like, Tensor):
        return torch.full((size,), value, dtype=dtype, device=like.device)
    return np.full(
        size, value, dtype=str(dtype).removeprefix("torch.")
    )  # all of these are float32, int64 or bool


def first_leaf(tree: Tree) -> Array:
    """Return the first leaf of a tree, to find its framework and device."""
    while isinstance(tree, (dict, tuple)):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


def leaves_at(tree: Tree, paths: Sequence[tuple[Any, ...]]) -> list[Array]:
    """Return the leaves of a tree at the given paths: ``("a", 1)`` is ``tree["a"][1]``."""
    leaves = []
    for path in paths:
        leaf = tree
        for name in path:
            leaf = leaf[name]
        leaves.append(leaf)
    return leaves


def to_torch(array: Array, device: torch.device | None = None) -> Tensor:
    """Convert an array to a tensor: a view of NumPy memory on CPU, else a copy to ``device``."""
    if isinstance(array, Tensor):
        tensor = array
    elif isinstance(array, np.ndarray):
        tensor = torch.from_numpy(array)
    elif hasattr(array, "__dlpack__"):  # a JAX array
        tensor = from_dlpack(array)
    else:  # a list or a number
        tensor = torch.from_numpy(np.asarray(array))

    if device is None:
        return tensor
    return tensor.to(device)


class ActionCheck:
    """Converts a policy's actions to the env's dtype and shape, and raises if they do not fit.

    Accepts NumPy arrays, torch tensors and lists; casts to the single space's dtype where that loses no kind
    (int to float, float64 to float32, never float to int); checks the row count and the shape.

    >>> ActionCheck(spaces.Discrete(2), 3, "numpy")(torch.tensor([0, 1, 1]))
    array([0, 1, 1])
    """

    def __init__(
        self,
        space: spaces.Space[Any],  # of one action
        num_envs: int,
        framework: str,  # "numpy" or "torch": the kind of arrays that the env accepts
        device: torch.device | None = None,  # where a torch env expects its actions; None leaves them
        check_range: bool = False,  # refuse discrete actions outside the space, for envs that do not check
    ) -> None:
        self._space = space
        self._framework = framework
        self._device = device
        self._children: list[tuple[Any, ActionCheck]] = []

        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
            self._children = [
                (key, ActionCheck(child, num_envs, framework, device, check_range)) for key, child in items
            ]
            return

        assert space.shape is not None and space.dtype is not None
        self._shape = (num_envs, *space.shape)
        self._dtype = np.dtype(space.dtype)
        self._torch_dtype = torch.from_numpy(np.zeros(0, self._dtype)).dtype

        # For the check of the range; no limit means no check.
        self._limit = 0
        self._start = 0
        if isinstance(space, spaces.Discrete):
            self._start = int(space.start)
            if check_range:
                self._limit = int(space.n)
        self._unsigned = f"u{self._dtype.itemsize}"

    def __call__(self, actions: Tree, drawn: bool = False) -> Tree:
        """Return the actions as the env expects them; ``drawn`` ones come from the space and skip the range check."""
        if self._children:
            return self._check_tree(actions, drawn)

        array: Array = actions
        on_torch = self._framework == "torch"
        if on_torch:
            if not isinstance(actions, Tensor):
                array = as_numbers("actions", actions)
        elif isinstance(actions, Tensor):
            # numpy() shares memory; force=True copies only if sharing is impossible.
            if actions.is_meta:
                raise TypeError("actions must have values, got a tensor on the device meta")
            array = actions.numpy(force=not actions.is_cpu or actions.requires_grad)
        else:
            try:
                array = np.asarray(actions)
            except (TypeError, ValueError, RuntimeError) as error:  # for example a ragged list
                raise TypeError(f"actions must be an array, got {as_text(actions)}") from error

        if array.shape != self._shape:
            hint = "one row for each env"
            discrete = isinstance(self._space, spaces.Discrete)
            if discrete and array.shape[:1] == self._shape and array.ndim == 2:
                hint = "one integer for each env: take .argmax(-1) of one-hot actions, .squeeze(-1) of [E, 1]"
            raise ValueError(f"actions must have shape {self._shape} ({hint}), got {tuple(array.shape)}")

        if on_torch:
            if array.dtype is self._torch_dtype and array.device == self._device and not array.requires_grad:
                return array
            if array.dtype == self._torch_dtype or torch.can_cast(array.dtype, self._torch_dtype):
                return array.detach().to(device=self._device, dtype=self._torch_dtype)
            raise TypeError(f"actions must be castable to {self._dtype} for {self._space}, got {array.dtype}")

        if array.dtype != self._dtype:
            # Accept integers of any width: argmax gives int64, spaces may be uint8.
            whole = array.dtype.kind in "iu" and self._dtype.kind in "iu"
            if not (whole or np.can_cast(array.dtype, self._dtype, "same_kind")):
                raise TypeError(
                    f"actions must be castable to {self._dtype} for {self._space}, got {array.dtype}"
                )
            array = array.astype(self._dtype)

        if self._limit and not drawn:
            shifted = array
            if self._start:
                shifted = array - self._start
            # Viewed as unsigned, values below the range become very large, so one comparison finds both.
            if np.maximum.reduce(shifted.view(self._unsigned), axis=None) >= self._limit:
                raise ValueError(ActionLimits(self._space).problem(array))

        return array

    def _check_tree(self, actions: Tree, drawn: bool) -> Tree:
        if isinstance(self._space, spaces.Dict):
            if not isinstance(actions, dict) or set(actions) != set(self._space.spaces):
                came = sorted(actions) if isinstance(actions, dict) else type(actions).__name__
                raise ValueError(f"actions must be a dict with keys {sorted(self._space.spaces)}, got {came}")
            return {key: check(actions[key], drawn) for key, check in self._children}

        if not isinstance(actions, tuple) or len(actions) != len(self._children):
            raise ValueError(
                f"actions must be a tuple of {len(self._children)} arrays, got {type(actions).__name__}"
            )
        return tuple(check(actions[i], drawn) for i, check in self._children)


class ActionLimits:
    """The lower and upper limits of an action of a Box, Discrete, MultiDiscrete or MultiBinary space.

    Args:
        space: the space.
        name: name of the actions in errors.

    >>> ActionLimits(spaces.Discrete(3)).problem(np.array([0, 2, 5]))
    'actions must lie in [0, 2] for Discrete(3), got 0 to 5'
    """

    def __init__(self, space: spaces.Space[Any], name: str = "actions") -> None:
        self.space = space
        self.name = name

        low: Any = 0
        high: Any = 1  # of a MultiBinary
        if isinstance(space, spaces.Box):
            low = space.low
            high = space.high
        elif isinstance(space, spaces.Discrete):
            low = space.start
            high = space.start + space.n - 1
        elif isinstance(space, spaces.MultiDiscrete):
            low = space.start
            high = space.start + space.nvec - 1

        assert space.shape is not None
        #: Arrays of the space's shape; infinite where a Box is unbounded.
        self.low, self.high = (np.broadcast_to(end, space.shape) for end in (low, high))
        same = self.low.size > 0 and all((end == end.flat[0]).all() for end in (self.low, self.high))
        # One bound for all entries.
        self._ends = (self.low.flat[0], self.high.flat[0]) if same else None

    @property
    def is_limited(self) -> bool:
        """Whether the dtype has values outside the space."""
        return bool(np.isfinite(self.low).any() or np.isfinite(self.high).any())

    def problem(self, actions: np.ndarray[Any, Any]) -> str | None:
        """Describe what is wrong with actions ``[N, *S]``, NaN included; None if they are valid."""
        if self._ends is not None:  # two passes over all values, much faster than checks per entry
            low, high = self._ends
            if np.minimum.reduce(actions, axis=None) >= low and np.maximum.reduce(actions, axis=None) <= high:
                return None
        elif ((actions >= self.low) & (actions <= self.high)).all():
            return None

        least = actions.min(0)
        most = actions.max(0)
        inside = (self.low <= least) & (most <= self.high)
        if inside.all():
            return None

        at = np.unravel_index(int(np.argmin(inside)), np.shape(inside))  # the first entry out of range
        where = f" in place {', '.join(map(str, at))}" if at else ""
        return (
            f"{self.name} must lie in [{self.low[at]}, {self.high[at]}]{where} for {self.space}, got {least[at]} to "
            f"{most[at]}"
        )


def action_limits(
    space: spaces.Space[Any], name: str = "actions"
) -> list[tuple[tuple[Any, ...], ActionLimits]]:
    """Return the path and limits of each limited leaf of a space.

    >>> [(path, str(limits.space)) for path, limits in action_limits(spaces.Tuple([spaces.Discrete(2)]))]
    [((0,), 'Discrete(2)')]
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return [
            ((key, *path), limits)
            for key, child in items
            for path, limits in action_limits(child, f"{name}[{key!r}]")
        ]

    limits = ActionLimits(space, name)
    if limits.is_limited:
        return [((), limits)]
    return []
