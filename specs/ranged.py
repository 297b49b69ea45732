"""`Ranged`: base of the specs whose entries lie between two numbers."""

import operator
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.layout.checks import whole_number
from flatroll.specs.leaf import TensorSpec, is_whole
from flatroll.specs.shapes import Shape

_NOT_ORDERED = {torch.bool, torch.uint16, torch.uint32, torch.uint64}  # torch has no clamp for these
#: The largest float64 that these dtypes hold: their own largest number is rounded up in float64.
_LARGEST_DOUBLE = {torch.int64: 2.0**63 - 1024, torch.uint64: 2.0**64 - 2048}


class Ranged(TensorSpec):
    """Base of specs whose entries lie between two numbers, both included."""

    _whole = True  # only whole numbers are allowed, also in a dtype of floats
    _range_text = "{} to {}"

    @abstractmethod
    def _limits(self) -> tuple[Tensor, Tensor]:
        """The least and the largest value: tensors of this dtype that broadcast to the shape."""

    def _ordered_limits(self) -> tuple[Tensor, Tensor]:
        limits: tuple[Tensor, Tensor] | None = self._cache.get("limits")
        if limits is None:
            low, high = self._limits()
            limits = self._cache["limits"] = ordered(low), ordered(high)
        return limits

    @override
    def _all_allowed(self, value: Tensor) -> bool:
        low, high = self._ordered_limits()
        numbers = ordered(value)
        if not torch.equal(numbers.clamp(low, high), numbers):  # NaN is equal to nothing
            return False
        return not (self._whole and numbers.is_floating_point()) or torch.equal(numbers.round(), numbers)

    @override
    def _allowed(self, value: Tensor) -> Tensor:
        low, high = self._ordered_limits()
        numbers = ordered(value)
        inside = (numbers >= low) & (numbers <= high)
        return (
            inside & (numbers == numbers.round()) if self._whole and numbers.is_floating_point() else inside
        )

    def _clamped(self, value: Tensor) -> Tensor:
        """The closest values inside to values of this dtype."""
        assert self.dtype is not None
        return unordered(ordered(value).clamp(*self._ordered_limits()), self.dtype)

    @override
    def _projected(self, value: Tensor) -> Tensor:
        assert self.dtype is not None
        value = value.to(self.device)
        if is_whole(value.dtype) and is_whole(self.dtype) and torch.uint64 not in (value.dtype, self.dtype):
            low, high = (limit.long() for limit in self._limits())
            numbers = value.long().clamp(low, high)
        else:
            low, high = (as_double(limit) for limit in self._limits())
            numbers = value.double().nan_to_num(0.0, torch.inf, -torch.inf)
            numbers = numbers.round() if self._whole or is_whole(self.dtype) else numbers
            numbers = numbers.clamp(low, high)  # in float64, for what the dtype cannot hold
        return self._clamped(numbers.to(self.dtype))

    @override
    def zero(self, shape: Shape = ()) -> Tensor:
        return self._projected(torch.zeros(self._full_shape(shape), dtype=torch.int64, device=self.device))

    @override
    def one(self, shape: Shape = ()) -> Tensor:
        return self._projected(torch.ones(self._full_shape(shape), dtype=torch.int64, device=self.device))

    @override
    def _domain_text(self, index: tuple[int, ...]) -> str:
        sizes = self._full_shape(())
        at = tuple(
            0 if size == 1 else i for i, size in zip(index[len(index) - self.ndim :], sizes, strict=True)
        )
        return self._range_text.format(*(limit.expand(sizes)[at].item() for limit in self._limits()))


def ordered(numbers: Tensor) -> Tensor:
    """The numbers in a dtype that torch can clamp and compare, in the same order."""
    if numbers.dtype not in _NOT_ORDERED:
        return numbers
    if numbers.dtype is torch.uint64:  # with its highest bit flipped int64 has the same order
        return numbers.view(torch.int64) ^ torch.iinfo(torch.int64).min
    return numbers.long()


def unordered(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `ordered`."""
    if dtype is torch.uint64:
        return (numbers ^ torch.iinfo(torch.int64).min).view(torch.uint64)
    return numbers.to(dtype)


def as_double(numbers: Tensor) -> Tensor:
    """The numbers in float64, not rounded up beyond what their dtype holds."""
    return numbers.double().clamp(max=_LARGEST_DOUBLE.get(numbers.dtype, torch.inf))


def whole_range(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the largest number up to which a dtype holds all whole numbers."""
    if dtype.is_complex:
        raise ValueError(f"numbers in a range cannot be {dtype}: choose a dtype of real numbers")
    if dtype is torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        most = round(2 / torch.finfo(dtype).eps)
        return -most, most
    info = torch.iinfo(dtype)
    return info.min, info.max


def as_count(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least ``least``, also one of NumPy or torch, such as the ``n`` of a Gymnasium space."""
    return whole_number(name, operator.index(value) if hasattr(value, "dtype") else value, least)


def check_holds(dtype: Any, least: int, most: int) -> None:
    """Raise ValueError unless a dtype holds the categories from ``least`` to ``most``."""
    low, high = whole_range(dtype)
    if least < low or most > high:
        raise ValueError(f"{dtype} cannot hold the categories {least} to {most}: choose a wider dtype")
