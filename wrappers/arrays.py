"""The few array operations the wrappers need, one spelling for NumPy and torch; trees of arrays."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

#: A NumPy array or a torch tensor, with one row for each environment.
Array: TypeAlias = Any
#: An array, or dicts and tuples of them, as a Gymnasium space nests them.
Tree: TypeAlias = Any


def map_tree(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply ``fn`` to the leaves of one or more equally nested trees.

    >>> map_tree(lambda a, b: a + b, {"x": 1, "y": (2, 3)}, {"x": 10, "y": (20, 30)})
    {'x': 11, 'y': (22, 33)}
    """
    if isinstance(tree, dict):
        return {key: map_tree(fn, value, *(other[key] for other in others)) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(fn, value, *(other[i] for other in others)) for i, value in enumerate(tree))
    return fn(tree, *others)


def own(array: Array) -> Array:
    """A copy with its own memory."""
    return array.clone() if isinstance(array, Tensor) else array.copy()


def select(mask: Array, chosen: Array, other: Array) -> Array:
    """Rows of ``chosen`` where ``mask`` (shape ``(E,)``) is True, else of ``other``; new memory, no host sync."""
    mask = mask.reshape(mask.shape[0], *(1,) * (other.ndim - 1))
    if isinstance(other, Tensor):
        return torch.where(mask, chosen, other)
    return np.where(mask, chosen, other)


def fill_rows(array: Array, mask: Array, value: Any) -> Array:
    """Set the rows of ``array`` where ``mask`` (shape ``(E,)``) is True, in place; no host sync."""
    if array.ndim > 1:
        mask = mask.reshape(mask.shape[0], *(1,) * (array.ndim - 1))
    if isinstance(array, Tensor):
        return array.masked_fill_(mask, value)
    np.copyto(array, value, where=mask)
    return array


def full(like: Array, size: int, value: float, dtype: torch.dtype) -> Array:
    """A constant vector of ``size`` rows in the framework and on the device of ``like``."""
    if isinstance(like, Tensor):
        return torch.full((size,), value, dtype=dtype, device=like.device)
    return np.full(size, value, dtype=_NUMPY_DTYPES[dtype])


def rows_of(like: Array, size: int) -> Array:
    """``0 .. size - 1`` as int64 in the framework and on the device of ``like``."""
    if isinstance(like, Tensor):
        return torch.arange(size, device=like.device)
    return np.arange(size, dtype=np.int64)


def first_leaf(tree: Tree) -> Array:
    """Any one leaf: it tells the framework and the device.

    >>> first_leaf({"a": (1, 2), "b": 3})
    1
    """
    while isinstance(tree, (dict, tuple)):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


def leaf_at(tree: Tree, path: tuple[Any, ...]) -> Array:
    """The leaf of a tree at a path of keys and positions."""
    for name in path:
        tree = tree[name]
    return tree


def to_torch(array: Array, device: torch.device | None = None) -> Tensor:
    """The array as a tensor: a view of NumPy memory on CPU, else a copy to ``device``."""
    if isinstance(array, Tensor):
        tensor = array
    else:
        tensor = torch.from_numpy(array if isinstance(array, np.ndarray) else np.asarray(array))
    return tensor if device is None else tensor.to(device)


_NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.float32: np.float32,
    torch.int64: np.int64,
}
