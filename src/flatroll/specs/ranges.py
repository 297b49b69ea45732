"""Ranges of numbers in dtypes: which hold what, and how to compare those that torch cannot."""

from typing import Any

import torch
from torch import Tensor

_NOT_ORDERED = {torch.bool, torch.uint16, torch.uint32, torch.uint64}  # torch has no clamp for these
#: The largest float64 that these dtypes hold: their own largest number is rounded up in float64.
_LARGEST_DOUBLE = {torch.int64: 2.0**63 - 1024, torch.uint64: 2.0**64 - 2048}


def is_whole(dtype: torch.dtype) -> bool:
    """Whether a dtype holds whole numbers or flags only."""
    return not dtype.is_floating_point and not dtype.is_complex


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


def check_holds(dtype: Any, least: int, most: int) -> None:
    """Raise ValueError unless a dtype holds the categories from ``least`` to ``most``."""
    low, high = whole_range(dtype)
    if least < low or most > high:
        raise ValueError(f"{dtype} cannot hold the categories {least} to {most}: choose a wider dtype")
