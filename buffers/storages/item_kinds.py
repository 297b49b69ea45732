"""Converts items (tensordicts, tensors or trees of tensors) to columns and back.

A `Structure` turns a batch of its kind into columns, tensors ``[N, ...]`` by key, and columns into a batch.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from flatroll.buffers.columns.column import Columns
from flatroll.disk.state_tree import damaged
from flatroll.kernels.rows.spans import Spans
from flatroll.layout import tensordict_seam
from flatroll.layout.keys import NestedKey, missing_marker, plain_key

VALUE: NestedKey = "_value"  # the single column of tensor data

_SINGLE = (Tensor, np.ndarray, np.generic, bool, int, float)  # types treated as one tensor


class Structure(ABC):
    """Converts items of one kind (tensordicts, tensors or trees) to columns and back."""

    @abstractmethod
    def columns(self, batch: object) -> Columns:
        """Return the tensors of ``batch`` by key; ValueError or TypeError if it has a different structure."""

    @abstractmethod
    def build(self, columns: Columns, shape: torch.Size) -> Any:
        """A batch of batch shape ``shape`` from columns ``[*shape, ...]``."""

    def columns_of_rows(self, data: object, shape: torch.Size) -> Columns:
        """Return the tensors of ``data`` by key, with its batch shape ``shape`` flattened to ``[N, ...]``."""

        def flat(leaf: object) -> Any:
            rows = as_tensor(leaf)
            return rows.reshape(math.prod(rows.shape[: len(shape)]), *rows.shape[len(shape) :])

        rows = map_rows(data, flat) if shape else one_row(data)
        return self.columns(rows)

    @staticmethod
    def of(batch: object) -> "Structure":
        """Return the structure of a batch: a tensordict, a tensor or a tree of tensors."""
        if isinstance(batch, TensorDictBase):
            return TensorDicts(batch.batch_size[1:])
        if isinstance(batch, _SINGLE):
            return Tensors()
        return Trees(pytree.tree_structure(batch))


def structure_to_plain(structure: Structure | None) -> Any:
    """Return a structure as plain values, for a state."""
    if isinstance(structure, TensorDicts):
        return ["tensordicts", structure.inner]
    if isinstance(structure, Trees):  # as an example tree that contains the numbers of its leaves
        return ["tree", pytree.tree_unflatten(list(range(structure.spec.num_leaves)), structure.spec)]
    if structure is None:
        return None
    return ["tensors"]


def structure_from_plain(plain: Any) -> Structure | None:
    """Invert `structure_to_plain`; ValueError if ``plain`` is invalid."""
    match plain:
        case None:
            return None
        case ["tensordicts", torch.Size() as inner]:
            return TensorDicts(inner)
        case ["tensors"]:
            return Tensors()
        case ["tree", (dict() | list() | tuple()) as tree]:
            return Trees(pytree.tree_structure(tree))

    if isinstance(plain, Structure):
        raise ValueError(
            "the state was pickled by an older flatroll, with objects in it: load it with that "
            "version, buffer.dumps(folder), and buffer.loads(folder) here"
        )
    raise damaged(f"its rows are of an unknown kind, {str(plain)[:40]}")


def not_flat_error(batch: TensorDictBase) -> ValueError:
    """Return the error for a batch of several dimensions given to a storage of single rows."""
    return ValueError(
        f"batch must be flat, [N], got {list(batch.batch_size)}: batch.reshape(-1) flattens [envs, time], and "
        '("collector", "traj_ids") tells the trajectories apart; a storage with ndim=2 takes it as it is'
    )


class TensorDicts(Structure):
    """Structure of tensordicts; ``inner`` is an item's batch size: ``[]`` for a row, ``[T]`` for T steps."""

    def __init__(self, inner: torch.Size) -> None:
        self.inner = inner

    @override
    def columns(self, batch: object) -> Columns:
        if not isinstance(batch, TensorDictBase):
            raise TypeError(f"the storage holds tensordicts, got {type(batch).__name__} as data")
        if batch.batch_size[1:] != self.inner:
            if not self.inner:
                raise not_flat_error(batch)
            raise ValueError(f"rows have batch size {list(self.inner)}, got {list(batch.batch_size[1:])}")
        return tensordict_seam.leaves(batch)

    @override
    def build(self, columns: Columns, shape: torch.Size) -> Any:
        return tensordict_seam.nest(columns, *shape, *self.inner)


class Tensors(Structure):
    """Structure of single tensors."""

    @override
    def columns(self, batch: object) -> Columns:
        if not isinstance(batch, _SINGLE):
            raise TypeError(f"the storage holds single tensors, got {type(batch).__name__}")

        values = as_tensor(batch)
        if not values.ndim:
            raise ValueError("a batch needs a leading dimension, got a single number: use add")
        return {VALUE: values}

    @override
    def build(self, columns: Columns, shape: torch.Size) -> Any:
        return columns[VALUE]


class Trees(Structure):
    """Structure of trees of tensors: nested tuples, dicts and named tuples, and lists below the root."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self.spec = spec
        # Each leaf's column has the leaf's path as its key, ("a", "1") for tree["a"][1]. A tree that is a
        # single leaf has VALUE.
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))

        self.keys: list[NestedKey] = []
        for path, _ in paths:
            names = tuple(
                str(getattr(step, "key", getattr(step, "idx", getattr(step, "name", step)))) for step in path
            )
            self.keys.append(plain_key(names) if names else VALUE)

        if len(set(self.keys)) != len(self.keys):  # for example {1: ..., "1": ...}
            self.keys = [str(i) for i in range(len(self.keys))]

    @override
    def columns(self, batch: object) -> Columns:
        leaves, spec = pytree.tree_flatten(batch)
        if spec != self.spec:
            raise ValueError(f"the storage holds items of the form {self.spec}, got {spec}")

        columns = {key: as_tensor(leaf) for key, leaf in zip(self.keys, leaves, strict=True)}
        lengths = {key: c.shape[0] if c.ndim else None for key, c in columns.items()}

        if len(set(lengths.values())) > 1 or None in lengths.values():
            raise ValueError(
                f"all leaves must have one length along their first dimension, got {lengths}: "
                "use add for a single item, or a list of items"
            )
        return columns

    @override
    def build(self, columns: Columns, shape: torch.Size) -> Any:
        return pytree.tree_unflatten([columns[key] for key in self.keys], self.spec)

    def __reduce__(self) -> tuple[Any, ...]:
        # As an example tree and not the spec, whose format may change with torch's version.
        return Structure.of, (pytree.tree_unflatten(list(range(self.spec.num_leaves)), self.spec),)


def check_kinds(columns: Columns, own: Spans) -> None:
    """Detach the ``columns`` of a batch that require gradients, in the dict, and copy views of the storage's ``own``
    memory, which would be written while they are read.

    TypeError for sparse tensors and others without memory for each row.

    >>> check_kinds({"x": torch.eye(2).to_sparse()}, Spans())
    Traceback (most recent call last):
    TypeError: batch['x'] is a tensor of layout torch.sparse_coo, this storage takes dense ones: pass x.to_dense()
    """
    low, high, starts, stops = own
    for key, column in columns.items():
        if column.layout is torch.strided and not (column.requires_grad or column.is_meta):
            address = column.data_ptr()
            # `Spans.hold`, inlined
            if low <= address < high and address < stops[bisect(starts, address) - 1]:
                columns[key] = column.clone()
            continue  # the common case

        if column.is_meta:
            raise TypeError(f"{shown(key)} is a meta tensor, which has no values to store")
        if column.layout is not torch.strided:
            raise TypeError(
                f"{shown(key)} is a tensor of layout {column.layout}, this storage takes dense ones: pass x.to_dense()"
            )

        detached = column.detach()
        if own.hold(column.data_ptr()):
            detached = detached.clone()
        columns[key] = detached


def batched(items: list[Any]) -> Any:
    """Stack several items of one kind, tensordicts, tensors or trees of tensors; ValueError if they differ in form.

    >>> batched([(torch.zeros(2), 1), (torch.ones(2), 2)])[1]
    tensor([1, 2])
    """
    first = items[0]
    if isinstance(first, TensorDictBase):
        _check_alike(items)
        return torch.stack(items)

    spec = pytree.tree_structure(first)
    rows = []
    for i, item in enumerate(items):
        leaves, other = pytree.tree_flatten(item)
        if other != spec:
            raise ValueError(f"data must be items of one form: item 0 is {spec}, item {i} {other}")

        rows.append([as_tensor(leaf) for leaf in leaves])
        for expected, got in zip(rows[0], rows[-1], strict=True):
            if expected.shape != got.shape or expected.dtype is not got.dtype:
                raise ValueError(
                    f"items must have the same shapes and dtypes to be stored in tensors: item 0 has {expected.dtype} "
                    f"{list(expected.shape)} where item {i} has {got.dtype} {list(got.shape)}"
                )

    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return pytree.tree_unflatten(columns, spec)


def stacked(items: list[Any]) -> Any:
    """Stack items that are tensors, tensordicts or trees of equal structure; else return the list unchanged.

    >>> stacked(["a", 1]), stacked([torch.zeros(1), torch.ones(1)])
    (['a', 1], tensor([[0.],
            [1.]]))
    """
    if not items:
        return items

    if all(isinstance(item, TensorDictBase) for item in items):
        kinds = {(item.batch_size, _forms(item)) for item in items}
        if len(kinds) == 1:
            return batched(items)
        return items

    trees = [pytree.tree_leaves(item) for item in items]
    if not all(tree and all(isinstance(leaf, Tensor) for leaf in tree) for tree in trees):
        return items
    try:
        return batched(items)
    except ValueError:  # items of different forms
        return items


def apart(batch: object, most: int | None = None) -> tuple[list[Any], int]:
    """Split a batch into its items: those of a list or range, or slices along the leading dimension.

    Items of one call are views of one copy: the caller may write into the batch later.

    Args:
        most: number of last items to return, default all: the others are not copied.

    Returns:
        the items, and how many were left out before them.

    >>> apart(torch.arange(3), 2)
    ([tensor(1), tensor(2)], 1)
    """
    if isinstance(batch, (list, range)):
        skip = _left_out(len(batch), most)
        return list(batch[skip:]), skip
    if isinstance(batch, (TensorDictBase, Tensor)):
        skip = _left_out(len(batch), most)
        return list(batch[skip:].clone().unbind(0)), skip

    tree, spec = pytree.tree_flatten(batch)
    columns = [as_tensor(leaf) for leaf in tree]
    if not columns or any(c.ndim == 0 or len(c) != len(columns[0]) for c in columns):
        raise ValueError(
            "extend takes a list of items, or tensors (tensordicts, trees of tensors) with one leading dimension: "
            "use add for a single item"
        )

    skip = _left_out(len(columns[0]), most)
    columns = [column[skip:].clone() for column in columns]
    items = [pytree.tree_unflatten([c[i] for c in columns], spec) for i in range(len(columns[0]))]
    return items, skip


def _left_out(items: int, most: int | None) -> int:
    if most is None:
        return 0
    return max(0, items - most)


def dense(batch: object) -> Any:
    """Convert a lazy stack to a plain tensordict; return anything else unchanged."""
    if not isinstance(batch, LazyStackedTensorDict):
        return batch

    # Otherwise entries that only some items have would be dropped, and dtypes cast.
    _check_alike(batch.tensordicts)
    return batch.contiguous()


def _check_alike(items: list[Any]) -> None:
    """ValueError unless all items are tensordicts with the first one's entries."""
    form: frozenset[Any] = _forms(items[0]) if items else frozenset()
    for i, item in enumerate(items):
        if not isinstance(item, TensorDictBase):
            raise ValueError(
                f"items must all be tensordicts if item 0 is one, but item {i} has the type {type(item).__name__}"
            )

        differing = _forms(item) ^ form
        if differing:
            raise ValueError(
                "items must have the same entries, shapes and dtypes to be stored in tensors: item 0 and "
                f"item {i} differ in {sorted(str(entry) for entry in differing)}"
            )


def _forms(item: TensorDictBase) -> frozenset[Any]:
    """Key, shape and dtype of all entries."""
    return frozenset(
        (key, getattr(value, "shape", None), getattr(value, "dtype", None))
        for key, value in item.items(True, True)
    )


def one_row(item: object) -> Any:
    """Return a batch of one item: adds a leading dimension of size 1."""
    return map_rows(item, lambda leaf: as_tensor(leaf).unsqueeze(0))


def map_rows(batch: object, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to a tensordict, or to each tensor of a tree."""
    if isinstance(batch, TensorDictBase):
        return change(batch)
    return pytree.tree_map(change, batch)


def as_tensor(leaf: object) -> Any:
    """Convert a leaf to a tensor (a tensordict is returned unchanged); TypeError with a hint for other types."""
    if isinstance(leaf, (Tensor, TensorDictBase)):
        return leaf
    if isinstance(leaf, _SINGLE):
        return torch.as_tensor(leaf)
    raise TypeError(
        f"data of type {type(leaf).__name__} cannot be kept in tensors: ListStorage takes any object"
    )


def entry(batch: object, names: tuple[Any, ...]) -> Any:
    """Return the entry with this name, or path of names, in a tensordict or a tree.

    >>> entry({"a": (torch.zeros(1), torch.ones(1))}, ("a", 1))
    tensor([1.])
    """
    if isinstance(batch, TensorDictBase):
        found = batch.get(names, None)
        if found is None:
            raise missing_marker(names, batch.keys(True, True))
        return found

    for name in names:
        if not isinstance(batch, (dict, list, tuple)):
            raise TypeError(f"there is no entry {name!r}: rows are {type(batch).__name__}s, not tensordicts")

        if isinstance(batch, list) and not isinstance(name, int):
            raise TypeError(
                f"index {name!r} names an entry, but rows are lists: use the position of the entry instead"
            )
        # The entries of a named tuple can also be selected by field name.
        place: Any = batch
        if isinstance(batch, tuple) and isinstance(name, str):
            batch = getattr(place, str(name))
        else:
            batch = place[name]
    return batch


def shown(key: NestedKey) -> str:
    """Format a key for an error message."""
    if key == VALUE:
        return "the data"
    return f"batch[{key!r}]"


def collate(samples: Any) -> Any:
    """Combine items of a data set into a batch, for ``DataLoader(collate_fn=collate)``; supports tensordicts.

    Args:
        samples: with ``DataLoader(batch_size=None)`` a sample, returned unchanged; else a list: batches (tensordicts
            with a batch size) are concatenated; rows, tensors and trees of tensors are stacked. Other items stay a
            list.

    >>> from tensordict import TensorDict
    >>> rows = [TensorDict({"x": torch.tensor(i)}, []) for i in range(3)]
    >>> collate(rows)["x"], collate([collate(rows), collate(rows[:1])])["x"]
    (tensor([0, 1, 2]), tensor([0, 1, 2, 0]))
    """
    if not isinstance(samples, list):
        return samples
    if samples and all(isinstance(sample, TensorDictBase) and sample.batch_dims for sample in samples):
        return torch.cat(samples)
    return stacked(samples)
