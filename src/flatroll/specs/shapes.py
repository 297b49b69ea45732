"""Shapes of specs: arguments, and effects of tensor operations without copies."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from flatroll.layout.checks import as_text

Shape: TypeAlias = "int | np.integer[Any] | Sequence[int] | None"
#: An operation on the first k dims of a tensor.
Operation: TypeAlias = Callable[[Any], Any]

#: Size that represents a dim of any length (-1) in the frame of a spec: an unlikely prime, small enough that four
#: such dims and a batch have fewer than 2**63 elements.
ANY_LENGTH = 16_381


def as_shape(*shape: Shape, name: str = "shape") -> torch.Size:
    """A shape given as an int, as a sequence, or as several ints; TypeError with ``name`` if it is invalid.

    >>> as_shape(3), as_shape((2, 3)), as_shape(2, 3)
    (torch.Size([3]), torch.Size([2, 3]), torch.Size([2, 3]))
    """
    sizes: Any = shape
    if len(shape) == 1 and not isinstance(shape[0], int | np.integer):
        sizes = shape[0]

    try:
        made = torch.Size([operator.index(size) for size in sizes])
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name} must be an int or a sequence of ints, got {as_text(sizes)}") from error

    if any(size >= 2**63 for size in made):
        raise ValueError(f"{name} must have dims below 2**63, got {tuple(made)}")
    return made


def shorten(parameter: Tensor, kept: int = 0) -> Tensor:
    """Strip a parameter's expanded dims: size 1 along dims of stride 0, and no leading dims of size 1.

    The last ``kept`` dims stay. It broadcasts to what it was.
    """
    cut = parameter.ndim - kept
    strides = parameter.stride()
    if any(stride == 0 and size > 1 for stride, size in zip(strides[:cut], parameter.shape, strict=False)):
        index = [slice(0, 1) if stride == 0 else slice(None) for stride in strides[:cut]]
        parameter = parameter[tuple(index)]

    while parameter.ndim > kept and parameter.shape[0] == 1:
        parameter = parameter[0]
    return parameter


def expanded_scalar(shape: torch.Size) -> Tensor:
    """Return an expanded scalar with these dims, ANY_LENGTH for -1; operations on it give the new shape."""
    if any(size < -1 or size == ANY_LENGTH for size in shape):
        raise ValueError(
            f"shape must have dims of at least 0, or -1 for any length, and none of {ANY_LENGTH}, which "
            f"represents -1 internally, got {tuple(shape)}"
        )

    return torch.empty(()).expand([ANY_LENGTH if size == -1 else size for size in shape])


@dataclass(frozen=True)
class Gather:
    """Indexes by tensors, which copies."""

    index: tuple[Any, ...]

    def __call__(self, tensor: Any) -> Any:
        """The indexed tensor."""
        return tensor[self.index]


def with_any(sizes: torch.Size) -> torch.Size:
    """Sizes of a frame with -1 for dims of any length."""
    if any(size > ANY_LENGTH and size % ANY_LENGTH == 0 for size in sizes):
        raise ValueError("a dim of any length (-1) cannot be merged with other dims")
    return torch.Size([-1 if size == ANY_LENGTH else size for size in sizes])


def dims_used(item: object) -> int:
    """Return how many dims an item of an index consumes."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype is torch.bool:
        return item.ndim
    return 1


def grid(ranges: list[Tensor]) -> Tensor:
    """All combinations of the entries of ranges ``[count, len(ranges)]``, the last one changing fastest."""
    if not ranges:
        return torch.zeros(1, 0, dtype=torch.int64)
    parts = torch.meshgrid(*ranges, indexing="ij")
    return torch.stack([part.reshape(-1) for part in parts], -1)
