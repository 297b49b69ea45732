"""Shape operations of specs: one map over their parameters, which copies nothing."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

Shape: TypeAlias = Any  # an int, or a sequence of ints
#: An operation on the first k dims of a tensor, which leaves those after them alone.
Operation: TypeAlias = Callable[[Any], Any]

#: Stands for a dim of any length (-1) inside of `TensorSpec._frame`: a prime that no real dim is likely to have, small
#: enough for four such dims and a batch to have fewer than 2**63 elements.
ANY_LENGTH = 16_381


def as_shape(*shape: Shape) -> torch.Size:
    """A shape given as an int, as a sequence, or as several ints.

    >>> as_shape(3), as_shape((2, 3)), as_shape(2, 3)
    (torch.Size([3]), torch.Size([2, 3]), torch.Size([2, 3]))
    """
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int | np.integer) else shape
    return torch.Size([operator.index(size) for size in sizes])


def shortened(parameter: Tensor, kept: int = 0) -> Tensor:
    """A parameter without what repeats: size 1 along dims of stride 0, and no leading dims of size 1.

    The last ``kept`` dims stay. It broadcasts to what it was.
    """
    cut = parameter.ndim - kept
    strides = parameter.stride()
    if any(stride == 0 and size > 1 for stride, size in zip(strides[:cut], parameter.shape, strict=False)):
        parameter = parameter[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides[:cut])]
    while parameter.ndim > kept and parameter.shape[0] == 1:
        parameter = parameter[0]
    return parameter


def frame_of(shape: torch.Size) -> Tensor:
    """One number in memory with these dims, ANY_LENGTH for -1: operations on it tell the new shape."""
    if any(size < -1 or size == ANY_LENGTH for size in shape):
        raise ValueError(
            f"shape must have dims of at least 0, or -1 for any length, and none of {ANY_LENGTH}, which stands for -1 "
            f"inside, got {tuple(shape)}"
        )
    return torch.empty(()).expand([ANY_LENGTH if size == -1 else size for size in shape])


@dataclass(frozen=True)
class Gather:
    """Indexes by tensors, which copies."""

    index: tuple[Any, ...]

    def __call__(self, tensor: Any) -> Any:
        """The indexed tensor."""
        return tensor[self.index]


class Shaped:
    """Base of specs: the shape operations of tensors on the dims in front of a value's own.

    Attributes:
        shape: the dims of a batch, then those of one value. A dim of -1 takes any length.
    """

    shape: torch.Size
    _own_dims: int = 0  # how many of the last dims belong to one value
    _frame: Tensor  # one number with the dims in front of these
    _parameters: dict[str, Tensor]  # each broadcasts to [*dims of the frame, ...]; see `shortened`
    _kept: int = 0  # how many of a parameter's last dims belong to one value
    _cache: dict[str, Any]  # what follows from the parameters, once it was needed

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def ndimension(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def _changed(self, **attributes: Any) -> Self:
        new = object.__new__(type(self))
        state = new.__dict__
        state.update(self.__dict__)
        state["_cache"], state["_parameters"] = {}, self._parameters.copy()  # in which a mask is replaced
        state.update(attributes)
        return new

    def _map(self, operation: Operation, dims: int) -> Self:
        """The spec after an operation on its first ``dims`` dims."""
        frame = self._frame
        if isinstance(
            operation, Gather
        ):  # in front of the other dims only: one number is to stay one in memory
            sizes = operation(frame.as_strided(frame.shape[:dims], (0,) * dims)).shape + frame.shape[dims:]
            frame = frame.as_strided(sizes, (0,) * len(sizes))
        else:
            frame = operation(frame)
        shape = frame.shape
        if -1 in self.shape or ANY_LENGTH in shape:
            shape = _with_any(shape)
        if self._own_dims:
            shape = shape + self.shape[len(self.shape) - self._own_dims :]
        parameters: dict[str, Tensor] = {}
        behind = self._frame.ndim - dims
        for name, parameter in self._parameters.items():
            own = parameter.ndim - self._kept
            if own > behind:  # else it is the same for all of these dims, so also afterwards
                full = parameter.expand((*self._frame.shape, *parameter.shape[own:]))
                parameter = shortened(operation(full), self._kept)
            parameters[name] = parameter
        return self._changed(_frame=frame, shape=shape, _parameters=parameters)

    def _full(self, name: str) -> Tensor:
        """A parameter with all dims of the spec; those of any length have size 1."""
        parameter = self._parameters[name]
        sizes = [1 if size == ANY_LENGTH else size for size in self._frame.shape]
        return parameter.expand((*sizes, *parameter.shape[parameter.ndim - self._kept :]))

    def _outer(self, what: str, *dims: int) -> list[int]:
        """Dims counted from the front, all of them in front of a value's own dims."""
        outer = self.ndim - self._own_dims
        counted = [dim + self.ndim if dim < 0 else dim for dim in dims]
        if any(not 0 <= dim < outer for dim in counted):
            own = f", and its last {self._own_dims} belong to one value" if self._own_dims else ""
            raise IndexError(
                f"{what} is not possible: {type(self).__name__} has shape {tuple(self.shape)}{own}"
            )
        return counted

    def _split(self, shape: torch.Size, what: str) -> torch.Size:
        """The batch part of a new shape, whose last dims must stay those of one value."""
        cut = len(shape) - self._own_dims
        own = self.shape[self.ndim - self._own_dims :]
        if cut < 0 or any(new not in (-1, old) for new, old in zip(shape[cut:], own, strict=True)):
            raise ValueError(
                f"{what} to {tuple(shape)} is not possible: the last dims of {type(self).__name__} with shape "
                f"{tuple(self.shape)} belong to one value and stay {tuple(own)}"
            )
        return shape[:cut]

    def expand(self, *shape: Shape) -> Self:
        """Repeat along new leading dims, or along dims of size 1. Nothing is copied."""
        outer, dims = self._split(as_shape(*shape), "expand"), self._frame.ndim
        new = len(outer) - dims  # in these -1 is any length, in those that there are it keeps them
        outer = torch.Size([ANY_LENGTH if size == -1 and d < new else size for d, size in enumerate(outer)])
        try:
            return self._map(lambda tensor: tensor.expand((*outer, *tensor.shape[dims:])), dims)
        except RuntimeError as error:
            raise ValueError(
                f"expand to {tuple(as_shape(*shape))} is not possible for {type(self).__name__} with shape "
                f"{tuple(self.shape)}: its dims must be the last ones, or have size 1"
            ) from error

    def reshape(self, *shape: Shape) -> Self:
        """Give the batch dims another shape of as many elements."""
        outer, dims = self._split(as_shape(*shape), "reshape"), self._frame.ndim
        try:
            sizes = self._frame.reshape(outer).shape
            return self._map(lambda tensor: tensor.reshape((*sizes, *tensor.shape[dims:])), dims)
        except RuntimeError as error:
            raise ValueError(
                f"reshape to {tuple(as_shape(*shape))} is not possible for {type(self).__name__} with shape "
                f"{tuple(self.shape)}"
            ) from error

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Make one dim of several; ``end_dim=-1`` is the last one in front of a value's own dims."""
        end_dim = end_dim - self._own_dims if end_dim < 0 else end_dim
        start, end = self._outer("flatten", start_dim, end_dim)
        return self._map(lambda tensor: tensor.flatten(start, end), self._frame.ndim)

    def unflatten(self, dim: int, sizes: Shape) -> Self:
        """Make several dims of one."""
        (dim,), parts = self._outer("unflatten", dim), as_shape(sizes)
        return self._map(lambda tensor: tensor.unflatten(dim, parts), self._frame.ndim)

    def squeeze(self, dim: int | None = None) -> Self:
        """Drop a dim, or all dims, of size 1 in front of a value's own dims."""
        if dim is None:
            drop = tuple(d for d, size in enumerate(self._frame.shape) if size == 1)
        else:
            drop = tuple(self._outer("squeeze", dim))
        full = tuple(
            0 if d in drop and size == 1 else slice(None) for d, size in enumerate(self._frame.shape)
        )
        return self._map(lambda tensor: tensor[full], self._frame.ndim)

    def unsqueeze(self, dim: int) -> Self:
        """Insert a dim of size 1."""
        at = dim + self.ndim + 1 if dim < 0 else dim
        if not 0 <= at <= self._frame.ndim:
            self._outer("unsqueeze", at)
            raise IndexError(f"unsqueeze({dim}) is not possible for a spec of {self.ndim} dims")
        return self._map(lambda tensor: tensor.unsqueeze(at), at)

    def __getitem__(self, index: Any) -> Any:
        """Index the dims in front of a value's own, as a tensor of these dims is indexed."""
        full = self._resolved(index)
        dims = sum(map(_dims_used, full))
        if any(isinstance(item, Tensor) for item in full):
            return self._map(Gather(full), dims)
        return self._map(lambda tensor: tensor[full], dims)

    def _resolved(self, index: Any) -> tuple[Any, ...]:
        """The index as a tuple without ``...``, so that dims behind the batch's do not shift it."""
        items = list(index) if isinstance(index, tuple) else [index]
        items = [
            torch.as_tensor(item) if isinstance(item, list | tuple | range | np.ndarray) else item
            for item in items
        ]
        free = self._frame.ndim - sum(map(_dims_used, items))
        places = [place for place, item in enumerate(items) if item is Ellipsis]
        if free < 0 or len(places) > 1:
            self._outer(f"the index {index}", self.ndim)
        for place in places:
            items[place : place + 1] = [slice(None)] * free
        return tuple(items)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """One spec for each index along a dim."""
        (dim,) = self._outer("unbind", dim)
        return tuple(self[(*(slice(None),) * dim, i)] for i in range(self._frame.shape[dim]))

    def __len__(self) -> int:
        """Size of the first dim."""
        if not self.shape:
            raise TypeError(f"a {type(self).__name__} without dims has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))


def _with_any(sizes: torch.Size) -> torch.Size:
    """Sizes of a frame with -1 for dims of any length."""
    if any(size > ANY_LENGTH and size % ANY_LENGTH == 0 for size in sizes):
        raise ValueError("a dim of any length (-1) cannot be merged with other dims")
    return torch.Size([-1 if size == ANY_LENGTH else size for size in sizes])


def _dims_used(item: Any) -> int:
    """How many dims an item of an index takes away or selects from."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype is torch.bool else 1


def grid(ranges: list[Tensor]) -> Tensor:
    """All combinations of the entries of ranges ``[count, len(ranges)]``, the last one changing fastest."""
    if not ranges:
        return torch.zeros(1, 0, dtype=torch.int64)
    parts = torch.meshgrid(*ranges, indexing="ij")
    return torch.stack([part.reshape(-1) for part in parts], -1)
