"""`Stacked` and `StackedComposite`: stacks of different specs along a dim."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import lazy_stack
from torch import Tensor
from typing_extensions import override

from flatroll.layout.checks import check_type, check_whole_number
from flatroll.layout.keys import NestedKey
from flatroll.specs.composite import Composite, SpecLike, is_key
from flatroll.specs.shapes import Operation, Shape, as_shape
from flatroll.specs.tensor_spec import Device, TensorSpec, implements


@implements(torch.stack)
def stack(specs: Sequence[Any], dim: int = 0) -> Any:
    """Stack specs along a new dim: equal ones are expanded, others become `Stacked` or `StackedComposite`.

    Raises:
        ValueError: there are no specs, or they differ in class, dtype, device or number of dims.

    >>> from flatroll.specs import Bounded
    >>> torch.stack([Bounded(0, 1, (3,)), Bounded(0, 1, (3,))]).shape
    torch.Size([2, 3])
    >>> torch.stack([Bounded(0, 1, (3,)), Bounded(0, 2, (4,))])
    Stacked(shape=(2, -1), 2 of BoundedContinuous, dim=0, dtype=torch.float32)
    """
    specs = list(check_type("specs", specs, (list, tuple), "a list of specs"))
    for i, spec in enumerate(specs):
        check_type(f"specs[{i}]", spec, TensorSpec, "a spec")
    check_whole_number("dim", dim, -(2**31))

    if specs and all(spec == specs[0] for spec in specs[1:]):
        _, at = _stacked_shape(specs, dim)
        wider = specs[0].unsqueeze(at)
        return wider.expand(*wider.shape[:at], len(specs), *wider.shape[at + 1 :])

    if specs and isinstance(specs[0], Composite):
        return StackedComposite(*specs, dim=dim)
    return Stacked(*specs, dim=dim)


class Parallel(TensorSpec):
    """Base of stacks: applies each method to every spec and joins the results."""

    specs: tuple[Any, ...]
    dim: int

    @abstractmethod
    def __init__(self, *specs: TensorSpec, dim: int) -> None: ...

    @property
    def stack_dim(self) -> int:
        """The stacked dim."""
        return self.dim

    @abstractmethod
    def _join(self, parts: list[Any], dim: int) -> Any:
        """The specs' values as one, along a dim."""

    def _split_value(self, value: Any) -> list[Any]:
        """The part of a value that belongs to each spec."""
        if isinstance(value, Tensor) and value.is_nested:
            return list(value.unbind())
        return list(value.unbind(value.ndim - self.ndim + self.dim))

    def _map_specs(self, change: Callable[[Any], Any]) -> Self:
        return type(self)(*map(change, self.specs), dim=self.dim)

    @override
    def map_dims(self, operation: Operation, dims: int) -> Any:
        # The operation is opaque, so its effect on the stacked dim is read off a probe: a tensor that holds
        # the number of the spec at each position.
        specs = self.specs
        dim = self.dim
        if dim >= dims:  # not reached by the operation, which may change the dims before it
            done: Any = [spec.map_dims(operation, dims) for spec in specs]
            return type(self)(*done, dim=dim + done[0].ndim - specs[0].ndim)

        inner = zip(*(spec._frame.shape[: dims - 1] for spec in specs), strict=True)
        sizes = [max(parts) for parts in inner]  # the largest size where they differ
        sizes.insert(dim, len(specs))
        along_dim = [1] * dims
        along_dim[dim] = -1
        numbers = torch.arange(len(specs)).reshape(along_dim)
        probe = operation(numbers.expand(sizes))

        # The dims of the result along which the number of the spec changes.
        along = []
        for d, size in enumerate(probe.shape):
            if size > 1 and bool((probe != probe.narrow(d, 0, 1)).any()):
                along.append(d)
        if len(along) > 1 or probe.numel() == 0:
            raise ValueError(
                f"a {type(self).__name__} of shape {tuple(self.shape)}, stacked along dim {dim}, cannot be "
                "reshaped or indexed this way: its specs would no longer be along one dim, or none would be left"
            )

        def place(number: int, at: int | None) -> Any:
            """The spec of a number after the operation, without the dim along which the numbers change."""
            alone = specs[number]
            filled = alone.map_dims(lambda t: t.unsqueeze(dim), dims - 1)
            wide = filled.map_dims(lambda t: t.expand(*t.shape[:dim], len(specs), *t.shape[dim + 1 :]), dims)
            changed = wide.map_dims(operation, dims)
            if at is None:
                return changed
            index = (*(slice(None),) * along[0], at)
            return changed.map_dims(lambda t: t[index], probe.ndim)

        if not along:
            number = int(probe.reshape(-1)[0])
            alone = place(number, None)
            # itself, so that later changes to it are visible
            if alone == specs[number]:
                return specs[number]
            return alone

        order = probe.movedim(along[0], 0).reshape(probe.shape[along[0]], -1)[:, 0].tolist()
        return stack([place(number, at) for at, number in enumerate(order)], along[0])

    @override
    def _open_dims(self) -> set[int]:
        # A dim whose size differs between the specs is not open: each spec knows its size.
        return {dim + (dim >= self.dim) for spec in self.specs for dim in spec._open_dims()}

    @override
    def to(self, dest: torch.dtype | Device) -> Self:
        if dest is None:
            return self
        return self._map_specs(lambda spec: spec.to(dest))

    @override
    def clone(self) -> Self:
        return self._map_specs(lambda spec: spec.clone())

    def _draw_all(self, shape: Shape, draw: Callable[[Any], Any]) -> Any:
        added = 0 if shape is None else len(as_shape(shape))
        return self._join([draw(spec) for spec in self.specs], self.dim + added)

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw values of all specs, joined: ``[*shape, *self.shape]``."""
        return self._draw_all(shape, lambda spec: spec.rand(shape, generator=generator))

    @override
    def zero(self, shape: Shape = ()) -> Any:
        return self._draw_all(shape, lambda spec: spec.zero(shape))

    @override
    def one(self, shape: Shape = ()) -> Any:
        return self._draw_all(shape, lambda spec: spec.one(shape))

    @override
    def is_in(self, value: object) -> bool:
        return self.problem(value) is None

    @override
    def problem(self, value: Any) -> str | None:
        nested = isinstance(value, Tensor) and value.is_nested
        if not hasattr(value, "unbind"):
            return f"a value of shape {tuple(self.shape)} was expected, got {type(value).__name__}"
        if value.ndim < self.ndim and not nested:
            return f"a value of shape {tuple(self.shape)} was expected, got {tuple(value.shape)}"

        parts = self._split_value(value)
        if len(parts) != len(self.specs):
            return f"{len(self.specs)} parts were expected along dim {self.dim}, got {len(parts)}"
        for number, (spec, part) in enumerate(zip(self.specs, parts, strict=True)):
            text = spec.problem(part)
            if text is not None:
                return f"part {number}: {text}"
        return None

    @override
    def project(self, value: Any) -> Any:
        if self.is_in(value):
            return value

        added = value.ndim - self.ndim
        if isinstance(value, Tensor) and value.is_nested:
            added = 0
        parts = zip(self.specs, self._split_value(value), strict=True)
        return self._join([spec.project(part) for spec, part in parts], self.dim + added)

    @override
    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Encode one value for each spec: a sequence of them, or an array with the stacked dim."""
        if isinstance(value, np.ndarray):
            value = torch.as_tensor(value)
        if hasattr(value, "unbind"):
            parts = value.unbind(self.dim)
        else:
            parts = list(value)
        if len(parts) != len(self.specs):
            raise ValueError(f"{len(self.specs)} values were expected, one for each spec, got {len(parts)}")

        encoded = [s.encode(p, ignore_device=ignore_device) for s, p in zip(self.specs, parts, strict=True)]
        return self._join(encoded, self.dim)

    @override
    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Apply each spec to its part; return a list, or one array if all results are arrays of one shape.

        ``safe=True`` checks the value first.
        """
        if safe:
            self.assert_is_in(value)
        parts = [spec.to_numpy(part) for spec, part in zip(self.specs, self._split_value(value), strict=True)]
        shapes = {getattr(part, "shape", None) for part in parts}
        if len(shapes) == 1 and None not in shapes:
            return np.stack(parts, self.dim)
        return parts

    @override
    def cardinality(self) -> int | float:
        """Return the number of combined values."""
        counts: list[int | float] = [spec.cardinality() for spec in self.specs]
        return math.prod(counts)

    @override
    def enumerate(self, use_mask: bool = False) -> Any:
        """Iterate over the first values of all specs, the second ones, and so on; all must have equally many."""
        listed = [spec.enumerate(use_mask) for spec in self.specs]
        if any(len(values) != len(listed[0]) for values in listed):
            raise ValueError(
                "the specs have different numbers of values: list them one by one, from spec.unbind()"
            )
        return self._join(listed, self.dim + 1)

    @override
    def _settings(self) -> tuple[Any, ...]:
        return self.specs, self.dim


class Stacked(Parallel):
    """A stack of specs of one class and dtype that differ in domain or size.

    Sizes that differ are -1 in its shape, and its values then are nested tensors. ``torch.stack`` makes it.

    Args:
        *specs: the specs, in order.
        dim: where the new dim is.

    >>> from flatroll.specs import Categorical
    >>> spec = torch.stack([Categorical(2), Categorical(3)])
    >>> spec.is_in(torch.tensor([1, 2])), spec.is_in(torch.tensor([2, 1])), spec[1].n
    (True, False, 3)
    """

    _default_device = None

    def __init__(self, *specs: TensorSpec, dim: int) -> None:
        shape, dim = _stacked_shape(specs, dim)
        self.value_dims = specs[0].value_dims
        TensorSpec.__init__(self, shape, None, specs[0].device, specs[0].dtype, specs[0].domain)
        self.specs = specs
        self.dim = dim

    @property
    @override
    def space(self) -> list[Any]:
        """The domain of each spec."""
        return [spec.space for spec in self.specs]

    @override
    def _join(self, parts: list[Any], dim: int) -> Any:
        if all(part.shape == parts[0].shape for part in parts):
            return torch.stack(parts, dim)

        sizes = [tuple(part.shape) for part in parts]
        if dim:
            raise ValueError(
                f"values of sizes {sizes} can be stacked only along dim 0: draw from spec.unbind() instead"
            )
        try:
            return torch.nested.nested_tensor(parts, layout=torch.jagged)
        except RuntimeError as error:
            raise ValueError(
                f"torch has no nested tensor of sizes {sizes}: draw from spec.unbind() instead"
            ) from error

    @override
    def _repr_parts(self) -> list[str]:
        return [f"{len(self.specs)} of {type(self.specs[0]).__name__}", f"dim={self.dim}"]


class StackedComposite(Parallel, Composite):
    """A stack of different Composites. Its keys are those that all of them have.

    Its values are lazily stacked tensordicts.

    Args:
        *specs: the Composites, in order.
        dim: where the new dim is.

    >>> from flatroll.specs import Bounded, Composite
    >>> one, two = Composite(a=Bounded(0, 1, (3,))), Composite(a=Bounded(0, 1, (4,)), b=Bounded(0, 1, (1,)))
    >>> spec = torch.stack([one, two])
    >>> spec.keys(), spec["a"].shape, spec.is_in(spec.rand())
    (['a'], torch.Size([2, -1]), True)
    """

    specs: tuple[Composite, ...]

    def __init__(self, *specs: Composite, dim: int) -> None:
        shape, dim = _stacked_shape(specs, dim)
        Composite.__init__(self, shape=shape, device=specs[0].device, data_cls=specs[0].data_cls)
        self.specs = specs
        self.dim = dim

    @override
    def __iter__(self) -> Iterator[str]:
        return (key for key in self.specs[0] if all(key in spec for spec in self.specs))

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    @override
    def __getitem__(self, index: Any) -> Any:
        if not is_key(index):
            return TensorSpec.__getitem__(self, index)

        entries = [spec[index] for spec in self.specs]
        if None in entries:
            return None
        return stack(entries, self.dim)

    @override
    def __setitem__(self, key: NestedKey, spec: SpecLike) -> None:
        self._check_unlocked()
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self.shape, device=self.device)
        parts = [None] * len(self.specs) if spec is None else spec.unbind(self.dim)

        for own, part in zip(self.specs, parts, strict=True):
            own[key] = part

    @override
    def __delitem__(self, key: NestedKey) -> None:
        self._check_unlocked()
        holders = [spec for spec in self.specs if key in spec]
        if not holders:
            raise KeyError(key)
        for spec in holders:
            del spec[key]

    @override
    def type_check(self, value: Any, key: NestedKey | None = None) -> None:
        if key is not None:
            super().type_check(value, key)
            return

        for spec, part in zip(self.specs, self._split_value(value), strict=True):
            spec.type_check(part)

    @override
    def _composites(self) -> list[Composite]:
        return list(self.specs)

    @override
    def is_empty(self, recurse: bool = False) -> bool:
        return all(spec.is_empty(recurse) for spec in self.specs)

    @override
    def empty(self) -> Self:
        return self._map_specs(lambda spec: spec.empty())

    @override
    def present(self) -> dict[str, TensorSpec]:
        return {key: spec for key in self if (spec := self[key]) is not None}

    @override
    def _join(self, parts: list[Any], dim: int) -> Any:
        return lazy_stack(parts, dim)

    @override
    def __repr__(self) -> str:
        parts = "".join(f"    {spec!r},\n".replace("\n", "\n    ").rstrip(" ") for spec in self.specs)
        return f"{type(self).__name__}(\n{parts}    shape={tuple(self.shape)}, dim={self.dim})"


def _stacked_shape(specs: Sequence[Any], dim: int) -> tuple[list[int], int]:
    """The shape of a stack, -1 where sizes differ, and the dim counted from the front."""
    if not specs:
        raise ValueError("specs must hold at least one spec")

    first = specs[0]
    for spec in specs[1:]:
        same = all(isinstance(s, Composite) for s in (first, spec)) or _kind(spec) is _kind(first)
        devices = {s.device for s in (first, spec) if s.device is not None}
        if not same or len(devices) > 1 or (spec.dtype, spec.ndim) != (first.dtype, first.ndim):
            raise ValueError(
                f"specs to stack must have one class, dtype, device and number of dims, got {first!r} and {spec!r}"
            )

    at = dim + first.ndim + 1 if dim < 0 else dim
    if not 0 <= at <= first.batch_ndim:
        raise IndexError(f"dim must be in [0, {first.batch_ndim}] for specs of {first.ndim} dims, got {dim}")

    sizes = []
    for d, size in enumerate(first.shape):
        if any(spec.shape[d] != size for spec in specs):
            size = -1
        sizes.append(size)
    return [*sizes[:at], len(specs), *sizes[at:]], at


def _kind(spec: TensorSpec) -> type[TensorSpec]:
    """The class of a spec; of a stack, that of its specs."""
    if isinstance(spec, Stacked):
        return _kind(spec.specs[0])
    return type(spec)


def contains_lazy_spec(spec: TensorSpec) -> bool:
    """Return whether a spec is or contains a stack of different specs."""
    if isinstance(spec, Stacked | StackedComposite):
        return True
    return isinstance(spec, Composite) and any(map(contains_lazy_spec, spec.present().values()))


def check_no_exclusive_keys(spec: TensorSpec, recurse: bool = True) -> bool:
    """Return whether all Composites of each stack have the same keys; ``recurse`` looks into nested ones."""
    if isinstance(spec, StackedComposite) and any(
        len(part) > len(spec) or not check_no_exclusive_keys(part, recurse) for part in spec.specs
    ):
        return False
    if isinstance(spec, Composite) and recurse:
        return all(map(check_no_exclusive_keys, spec.present().values()))
    return True


def consolidate_spec(
    spec: TensorSpec, recurse_through_entries: bool = True, recurse_through_stack: bool = True
) -> TensorSpec:
    """Return a spec whose stacks have the same keys everywhere; missing keys get specs of size 0.

    Args:
        spec: any spec; not modified.
        recurse_through_entries: nested Composites, too.
        recurse_through_stack: the Composites of a stack, too.

    Raises:
        ValueError: specs of one key are of different classes.

    >>> from flatroll.specs import Unbounded
    >>> one, two = Composite(a=Unbounded((3,))), Composite(a=Unbounded((3,)), b=Unbounded((2,)))
    >>> consolidate_spec(torch.stack([one, two]))["b"].shape
    torch.Size([2, -1])
    """
    settings: Any = (recurse_through_entries, recurse_through_stack)

    if isinstance(spec, StackedComposite):
        parts: list[Any] = []
        for part in spec.specs:
            if recurse_through_stack:
                parts.append(consolidate_spec(part, *settings))
            else:
                parts.append(part.clone())

        examples: dict[str, list[TensorSpec]] = {}
        for part in parts:
            for key, entry in part.present().items():
                examples.setdefault(key, []).append(entry)

        for part in parts:
            for key, entries in examples.items():
                if key not in part:
                    part[key] = _empty_like(entries, part.shape)
        spec = stack(parts, spec.dim)
    else:
        spec = spec.clone()

    if isinstance(spec, Composite) and recurse_through_entries:
        for key, entry in spec.present().items():
            if isinstance(entry, Composite):
                spec[key] = consolidate_spec(entry, *settings)
    return spec


def _empty_like(specs: list[TensorSpec], batch: torch.Size) -> TensorSpec:
    """Return a spec of size 0 for missing data, with the same number of dims."""
    first = specs[0]
    if any(type(spec) is not type(first) for spec in specs):
        raise ValueError(f"specs of one key must be of one class, got {first!r} and others")
    if isinstance(first, Composite):
        return first.empty()

    # Size 0 where the sizes differ; if none does, in the dims after the batch's.
    sizes = list(first.shape[: first.batch_ndim])
    for d, size in enumerate(sizes):
        if size == -1 or any(spec.shape[d] != size for spec in specs):
            sizes[d] = 0
    if 0 not in sizes:
        for d in range(len(batch), len(sizes)):
            sizes[d] = 0

    if isinstance(first, Stacked):
        rest = sizes[: first.dim] + sizes[first.dim + 1 :]
        return Stacked(*(_drop_rows(spec, rest) for spec in first.specs), dim=first.dim)
    return _drop_rows(first, sizes)


def _drop_rows(spec: TensorSpec, sizes: list[int]) -> TensorSpec:
    """Return the spec with size 0 along the dims whose size is 0 in ``sizes``."""
    index = tuple(slice(0, 0) if size == 0 else slice(None) for size in sizes)
    return spec.map_dims(lambda tensor: tensor[index], len(sizes))
