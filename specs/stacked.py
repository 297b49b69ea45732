"""`Stacked` and `StackedComposite`: specs that differ, side by side along a dim."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from tensordict import lazy_stack
from torch import Tensor
from typing_extensions import override

from flatroll.specs.composite import Composite
from flatroll.specs.leaf import TensorSpec, implements
from flatroll.specs.shapes import ANY_LENGTH, Operation, Shape, as_shape


@implements(torch.stack)
def stack(specs: Sequence[Any], dim: int = 0) -> Any:
    """Stack specs along a new dim: equal ones are expanded, others become `Stacked` or `StackedComposite`.

    Raises:
        ValueError: there is none, or they are of other classes, dtypes, devices or numbers of dims.

    >>> from flatroll.specs import Bounded
    >>> torch.stack([Bounded(0, 1, (3,)), Bounded(0, 1, (3,))]).shape
    torch.Size([2, 3])
    >>> torch.stack([Bounded(0, 1, (3,)), Bounded(0, 2, (4,))])
    Stacked(2 of BoundedContinuous, shape=(2, -1), dim=0, dtype=torch.float32)
    """
    specs = list(specs)
    if not specs:
        raise ValueError("there must be at least one spec to stack")
    first = specs[0]
    at = dim + first.ndim + 1 if dim < 0 else dim
    if not 0 <= at <= first._frame.ndim:
        raise IndexError(f"dim must be in [0, {first._frame.ndim}] for specs of {first.ndim} dims, got {dim}")
    if all(spec == first for spec in specs[1:]):
        wider = first.unsqueeze(at)
        return wider.expand(*wider.shape[:at], len(specs), *wider.shape[at + 1 :])
    composite = isinstance(first, Composite)
    for spec in specs[1:]:
        same = isinstance(spec, Composite) if composite else type(spec) is type(first)
        if not same or (spec.dtype, spec.device, spec.ndim) != (first.dtype, first.device, first.ndim):
            raise ValueError(
                f"specs to stack must have one class, dtype, device and number of dims, got {first!r} and {spec!r}"
            )
    return (StackedComposite if composite else Stacked)(*specs, dim=at)


class Stacked(TensorSpec):
    """Specs of one class and dtype that differ in their domains or sizes, along a dim.

    Sizes that differ are -1 in its shape. ``torch.stack`` makes it.

    Args:
        *specs: the specs, in order.
        dim: where the new dim is.

    >>> from flatroll.specs import Categorical
    >>> spec = torch.stack([Categorical(2), Categorical(3)])
    >>> spec.is_in(torch.tensor([1, 2])), spec.is_in(torch.tensor([2, 1])), spec[1].n
    (True, False, 3)
    """

    specs: tuple[TensorSpec, ...]
    dim: int

    def __init__(self, *specs: TensorSpec, dim: int) -> None:
        if not specs:
            raise ValueError("there must be at least one spec to stack")
        first = specs[0]
        self._own_dims = first._own_dims
        shape, dim = _stacked_shape(specs, dim)
        super().__init__(shape, None, first.device, first.dtype, first.domain)
        self.specs, self.dim, self.device = tuple(specs), dim, first.device

    @property
    def stack_dim(self) -> int:
        """Where the stacked dim is."""
        return self.dim

    @property
    @override
    def space(self) -> list[Any]:
        """The domain of each spec."""
        return [spec.space for spec in self.specs]

    @override
    def _map(self, operation: Operation, dims: int) -> Any:
        return mapped(self, operation, dims)

    def _each(self, change: Callable[[TensorSpec], TensorSpec]) -> Self:
        return type(self)(*map(change, self.specs), dim=self.dim)

    @override
    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return self._each(lambda spec: spec.to(dtype))

    @override
    def _with_device(self, device: torch.device) -> Self:
        return self._each(lambda spec: spec.to(device))

    @override
    def clone(self) -> Self:
        return self._each(lambda spec: spec.clone())

    # --- values -------------------------------------------------------------------------------------------------

    def _joined(self, parts: list[Any], added: int) -> Any:
        """The specs' values stacked; a nested tensor where their sizes differ."""
        if all(part.shape == parts[0].shape for part in parts):
            return torch.stack(parts, self.dim + added)
        if self.dim + added:
            raise ValueError(
                f"values of sizes {[tuple(part.shape) for part in parts]} stand beside each other only along dim 0: "
                "draw from spec.unbind() instead"
            )
        try:
            return torch.nested.nested_tensor(parts, layout=torch.jagged)
        except RuntimeError as error:
            raise ValueError(
                f"torch has no nested tensor of sizes {[tuple(part.shape) for part in parts]}: draw from "
                "spec.unbind() instead"
            ) from error

    def _split_value(self, value: Any) -> list[Any]:
        """The part of a value that belongs to each spec."""
        if isinstance(value, Tensor) and value.is_nested:
            return list(value.unbind())
        return list(value.unbind(value.ndim - self.ndim + self.dim))

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw values: a tensor ``[*shape, *self.shape]``, or a nested tensor where sizes differ."""
        return self._joined(
            [s.rand(shape, generator=generator) for s in self.specs], len(as_shape(shape or ()))
        )

    @override
    def zero(self, shape: Shape = ()) -> Any:
        return self._joined([spec.zero(shape) for spec in self.specs], len(as_shape(shape or ())))

    @override
    def one(self, shape: Shape = ()) -> Any:
        return self._joined([spec.one(shape) for spec in self.specs], len(as_shape(shape or ())))

    @override
    def is_in(self, value: Any) -> bool:
        return self.problem(value) is None

    @override
    def problem(self, value: Any) -> str | None:
        return stacked_problem(self, value, self._split_value)

    @override
    def _allowed(self, value: Tensor) -> Tensor:
        parts = zip(self.specs, self._split_value(value), strict=True)
        return torch.stack([spec._allowed(part) for spec, part in parts], value.ndim - self.ndim + self.dim)

    @override
    def project(self, value: Any) -> Any:
        if self.is_in(value):
            return value
        added = 0 if isinstance(value, Tensor) and value.is_nested else value.ndim - self.ndim
        parts = zip(self.specs, self._split_value(value), strict=True)
        return self._joined([spec.project(part) for spec, part in parts], added)

    @override
    def _projected(self, value: Tensor) -> Tensor:
        return self.project(value)  # type: ignore[no-any-return]

    @override
    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Encode one value for each spec: a sequence along dim 0, or an array whose dim is the stacked one."""
        if hasattr(value, "ndim"):
            array = torch.as_tensor(value)
            value = list(
                array.unbind(array.ndim - (self.ndim - self._own_dims) + self.dim if self.dim else 0)
            )
        if len(value) != len(self.specs):
            raise ValueError(f"{len(self.specs)} values were expected, one for each spec, got {len(value)}")
        parts = zip(self.specs, value, strict=True)
        return self._joined([spec.encode(part, ignore_device=ignore_device) for spec, part in parts], 0)

    @override
    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """An array, or a list of arrays where sizes differ; ``safe=True`` checks the value first."""
        if safe:
            self.assert_is_in(value)
        parts = [spec.to_numpy(part) for spec, part in zip(self.specs, self._split_value(value), strict=True)]
        if any(part.shape != parts[0].shape for part in parts):
            return parts
        return torch.stack([torch.as_tensor(part) for part in parts], self.dim).numpy()

    @override
    def cardinality(self) -> int | float:
        """Number of values: one of each spec."""
        total: int | float = 1
        for spec in self.specs:
            total *= spec.cardinality()
        return total

    @override
    def enumerate(self, use_mask: bool = False) -> Any:
        listed = [spec.enumerate(use_mask) for spec in self.specs]
        if any(len(values) != len(listed[0]) for values in listed):
            raise ValueError(
                "the specs have different numbers of values: list them one by one, from spec.unbind()"
            )
        return torch.stack(listed, self.dim + 1)

    @override
    def _settings(self) -> tuple[Any, ...]:
        return self.specs, self.dim

    @override
    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.specs)} of {type(self.specs[0]).__name__}, shape={tuple(self.shape)}, "
            f"dim={self.dim}, dtype={self.dtype})"
        )


class StackedComposite(Composite):
    """Composites that differ, side by side along a dim. Its keys are those that all of them have.

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
    dim: int

    def __init__(self, *specs: Composite, dim: int) -> None:
        if not specs:
            raise ValueError("there must be at least one spec to stack")
        shape, dim = _stacked_shape(specs, dim)
        first = specs[0]
        super().__init__(shape=shape, device=first.device, data_cls=first.data_cls)
        self.specs, self.dim = tuple(specs), dim

    @property
    def stack_dim(self) -> int:
        """Where the stacked dim is."""
        return self.dim

    @override
    def __iter__(self) -> Any:
        return (key for key in self.specs[0] if all(key in spec._specs for spec in self.specs))

    @override
    def __len__(self) -> int:
        return len(list(iter(self)))

    @override
    def __getitem__(self, index: Any) -> Any:
        by_key = isinstance(index, str) or (
            isinstance(index, tuple) and len(index) > 0 and all(isinstance(name, str) for name in index)
        )
        if not by_key:
            return TensorSpec.__getitem__(self, index)
        entries = [spec[index] for spec in self.specs]
        return None if entries[0] is None else stack(entries, self.dim)

    @override
    def __setitem__(self, key: Any, spec: Any) -> None:
        if self._locked:
            raise RuntimeError("this StackedComposite is locked: call unlock_() to change it")
        parts = [None] * len(self.specs) if spec is None else spec.unbind(self.dim)
        for own, part in zip(self.specs, parts, strict=True):
            own[key] = part

    @override
    def __delitem__(self, key: Any) -> None:
        for spec in self.specs:
            if key in spec:
                del spec[key]

    @override
    def _lock(self, locked: bool, recurse: bool) -> Self:
        self._locked = locked
        for spec in self.specs if recurse else ():
            spec._lock(locked, recurse)
        return self

    @override
    def is_empty(self, recurse: bool = False) -> bool:
        return all(spec.is_empty(recurse) for spec in self.specs)

    @override
    def empty(self) -> Self:
        return type(self)(*(spec.empty() for spec in self.specs), dim=self.dim)

    @override
    def _present(self) -> dict[str, TensorSpec]:
        return {key: spec for key in self if (spec := self[key]) is not None}

    @override
    def _each(self, change: Callable[[TensorSpec], Any], **attributes: Any) -> Self:
        return type(self)(*map(change, self.specs), dim=self.dim)

    @override
    def to(self, dest: Any) -> Self:
        return self if dest is None else self._each(lambda spec: spec.to(dest))

    @override
    def _map(self, operation: Operation, dims: int) -> Any:
        return mapped(self, operation, dims)

    def _split_value(self, value: Any) -> list[Any]:
        return list(value.unbind(value.ndim - self.ndim + self.dim))

    def _joined(self, shape: Shape, make: Callable[[Composite], Any]) -> Any:
        return lazy_stack([make(spec) for spec in self.specs], self.dim + len(as_shape(shape or ())))

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw a lazily stacked tensordict ``[*shape, *self.shape]``."""
        return self._joined(shape, lambda spec: spec.rand(shape, generator=generator))

    @override
    def zero(self, shape: Shape = ()) -> Any:
        return self._joined(shape, lambda spec: spec.zero(shape))

    @override
    def one(self, shape: Shape = ()) -> Any:
        return self._joined(shape, lambda spec: spec.one(shape))

    @override
    def is_in(self, value: Any) -> bool:
        return self.problem(value) is None

    @override
    def problem(self, value: Any) -> str | None:
        return stacked_problem(self, value, self._split_value)

    @override
    def project(self, value: Any) -> Any:
        parts = zip(self.specs, self._split_value(value), strict=True)
        return lazy_stack([spec.project(part) for spec, part in parts], value.ndim - self.ndim + self.dim)

    @override
    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        parts = value.unbind(self.dim) if hasattr(value, "unbind") else value
        if len(parts) != len(self.specs):
            raise ValueError(f"{len(self.specs)} values were expected, one for each spec, got {len(parts)}")
        encoded = [
            spec.encode(p, ignore_device=ignore_device) for spec, p in zip(self.specs, parts, strict=True)
        ]
        return lazy_stack(encoded, self.dim)

    @override
    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """A list of dicts of arrays, one for each spec; ``safe=True`` checks the value first."""
        if safe:
            self.assert_is_in(value)
        return [spec.to_numpy(part) for spec, part in zip(self.specs, self._split_value(value), strict=True)]

    @override
    def cardinality(self) -> int | float:
        """Number of values: one of each spec."""
        total: int | float = 1
        for spec in self.specs:
            total *= spec.cardinality()
        return total

    @override
    def enumerate(self, use_mask: bool = False) -> Any:
        return lazy_stack([spec.enumerate(use_mask) for spec in self.specs], self.dim + 1)

    @override
    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StackedComposite)
            and self.dim == other.dim
            and len(self.specs) == len(other.specs)
            and all(mine == its for mine, its in zip(self.specs, other.specs, strict=True))
        )

    __hash__ = None

    @override
    def __repr__(self) -> str:
        parts = "".join(f"    {spec!r},\n".replace("\n", "\n    ").rstrip(" ") for spec in self.specs)
        return f"{type(self).__name__}(\n{parts}    shape={tuple(self.shape)}, dim={self.dim})"


def _stacked_shape(specs: Sequence[TensorSpec], dim: int) -> tuple[list[int], int]:
    """The shape of a stack, -1 where sizes differ, and the dim counted from the front."""
    first = specs[0].shape
    sizes = [size if all(spec.shape[d] == size for spec in specs) else -1 for d, size in enumerate(first)]
    dim = dim + len(sizes) + 1 if dim < 0 else dim
    sizes.insert(dim, len(specs))
    return sizes, dim


def mapped(stacked: "Stacked | StackedComposite", operation: Operation, dims: int) -> Any:
    """The stack after an operation on its first ``dims`` dims.

    The operation is a closure, so what it does to the stacked dim is read off a probe: a tensor that holds the number
    of the spec at each place.
    """
    specs, dim = stacked.specs, stacked.dim
    if dim >= dims:  # behind the dims of the operation, which may change how many there are
        done: Any = [spec._map(operation, dims) for spec in specs]
        return type(stacked)(*done, dim=dim + done[0].ndim - specs[0].ndim)
    sizes = [1 if size == ANY_LENGTH else size for size in stacked._frame.shape[:dims]]
    numbers = torch.arange(len(specs)).reshape([-1 if d == dim else 1 for d in range(dims)])
    probe = operation(numbers.expand(sizes))
    # Along which dim of the result the number of the spec changes.
    along = [
        d for d in range(probe.ndim) if probe.shape[d] > 1 and bool((probe != probe.narrow(d, 0, 1)).any())
    ]
    if len(along) > 1 or probe.numel() == 0:
        raise ValueError(
            f"a {type(stacked).__name__} of shape {tuple(stacked.shape)}, stacked along dim {dim}, cannot be reshaped "
            "or indexed so: its specs would not be along one dim any more"
        )

    def place(number: int, at: int | None) -> Any:
        """The spec of a number after the operation, without the dim along which the numbers change."""
        alone = specs[number]
        filled = alone._map(lambda t: t.unsqueeze(dim), dims - 1)
        wide = filled._map(lambda t: t.expand(*t.shape[:dim], len(specs), *t.shape[dim + 1 :]), dims)._map(
            operation, dims
        )
        if at is None:
            return wide
        index = (*(slice(None),) * along[0], at)
        return wide._map(lambda t: t[index], probe.ndim)

    if not along:
        return place(int(probe.reshape(-1)[0]), None)
    order = probe.movedim(along[0], 0).reshape(probe.shape[along[0]], -1)[:, 0].tolist()
    return stack([place(number, at) for at, number in enumerate(order)], along[0])


def stacked_problem(
    stacked: "Stacked | StackedComposite", value: Any, split: Callable[[Any], list[Any]]
) -> str | None:
    """Say which part of a value is not in the domain of its spec, or return None."""
    nested = isinstance(value, Tensor) and value.is_nested
    if not hasattr(value, "unbind") or (
        not nested and value.ndim < stacked.ndim - (stacked.ndim - stacked._frame.ndim)
    ):
        return f"a value of shape {tuple(stacked.shape)} was expected, got {type(value).__name__}"
    parts = split(value)
    if len(parts) != len(stacked.specs):
        return f"{len(stacked.specs)} parts were expected along dim {stacked.dim}, got {len(parts)}"
    for number, (spec, part) in enumerate(zip(stacked.specs, parts, strict=True)):
        text = spec.problem(part)
        if text is not None:
            return f"part {number}: {text}"
    return None
