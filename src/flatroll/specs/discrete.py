"""`Categorical` and `OneHot`: one of n categories, as a number or as flags."""

import operator
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.layout.checks import whole_number
from flatroll.specs.draws import draw_categories, draw_masked
from flatroll.specs.leaf import Device, OutsideSpec, Ranged, TensorSpec
from flatroll.specs.ranges import check_holds
from flatroll.specs.shapes import Operation, Shape, as_shape, shortened


@dataclass(frozen=True)
class Categories:
    """The domain of a spec of categories: how many there are."""

    n: int


class Numbered(Ranged):
    """Base of specs of categories as numbers, some of which a mask may forbid."""

    _kept = 1  # the last dim of a mask

    @abstractmethod
    def _counts(self) -> list[int]:
        """The number of categories in each part of one value."""

    @property
    def mask(self) -> Tensor | None:
        """Which categories are allowed, bool: batch dims, then all categories, part after part. None for all."""
        return self._full("mask") if "mask" in self._parameters else None

    def update_mask(self, mask: Any) -> None:
        """Set which categories are allowed: bool, it broadcasts to the batch dims and all categories. None allows all.

        Raises:
            ValueError: it has another shape, allows none in some part, or the parts differ within the batch.
        """
        if mask is None:
            self._parameters.pop("mask", None)
            return
        given, counts = torch.as_tensor(mask, device=self.device), self._counts()
        if given.dtype is not torch.bool:
            raise ValueError(f"the mask must be bool, got {given.dtype}")
        sizes = (*self._full_shape(())[: self._frame.ndim], sum(counts))
        try:
            short = shortened(given.expand(sizes), 1).clone()  # the caller may write to its own
        except RuntimeError as error:
            raise ValueError(f"the mask must broadcast to shape {sizes}, got {tuple(given.shape)}") from error
        for k, part in enumerate(short.split_with_sizes(counts, -1)):
            if not bool(part.any(-1).all()):
                where = f" (in part {k})" if len(counts) > 1 else ""
                raise ValueError(f"the mask must allow a category everywhere{where}")
        self._parameters["mask"] = short

    @override
    def _all_allowed(self, value: Tensor) -> bool:
        return super()._all_allowed(value) if self.mask is None else bool(self._allowed(value).all())

    @override
    def _domain_text(self, index: tuple[int, ...]) -> str:
        return super()._domain_text(index) + ("" if self.mask is None else " that the mask allows")

    @override
    def _with_dtype(self, dtype: torch.dtype) -> Self:
        self._check_dtype(dtype)
        return self._changed(dtype=dtype)

    @abstractmethod
    def _check_dtype(self, dtype: torch.dtype | None) -> None:
        """Raise ValueError if a dtype cannot hold the categories."""

    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """The value itself; ``safe=True`` checks it first."""
        if safe:
            self.assert_is_in(value)
        return value

    def to_categorical_spec(self) -> Self:
        """The spec itself."""
        return self


class Categorical(Numbered):
    """Whole numbers from ``start`` to ``start + n - 1``, such as the actions of a `gymnasium.spaces.Discrete`.

    Args:
        n: number of categories, at least 1.
        shape: shape of the tensors, all of it batch dims. Default ``()``: one number.
        device: default the CPU.
        dtype: default int64.
        mask: bool, broadcastable to ``[*shape, n]``: True where a category is allowed.
        start: the first category. Values are the env's own, not counted from 0.

    Raises:
        ValueError: n is below 1, the dtype cannot hold the categories, or a mask allows none.

    >>> spec = Categorical(3, start=5)
    >>> spec.rand((4,), generator=torch.Generator().manual_seed(0)).tolist(), spec.is_in(torch.tensor(8))
    ([7, 5, 7, 5], False)
    >>> Categorical(3, mask=torch.tensor([True, False, True])).enumerate(use_mask=True).tolist()
    [0, 2]
    """

    def __init__(
        self,
        n: int,
        shape: Shape = (),
        device: Device = None,
        dtype: Any = torch.int64,
        mask: Any = None,
        *,
        start: int = 0,
    ) -> None:
        self.n = as_count("n", n)
        self.start = as_count("start", start, least=-(2**62))
        super().__init__(() if shape is None else shape, Categories(self.n), device, dtype, "discrete")
        self._check_dtype(self.dtype)
        self.update_mask(mask)

    @override
    def _counts(self) -> list[int]:
        return [self.n]

    @override
    def _check_dtype(self, dtype: torch.dtype | None) -> None:
        check_holds(dtype, self.start, self.start + self.n - 1)

    @override
    def _limits(self) -> tuple[Tensor, Tensor]:
        ends = torch.tensor([self.start, self.start + self.n - 1], device=self.device).to(self.dtype)
        return ends[0], ends[1]

    @override
    def _allowed(self, value: Tensor) -> Tensor:
        allowed, mask = super()._allowed(value), self.mask
        if mask is None:
            return allowed
        counted = (value.long() - self.start).clamp(0, self.n - 1).unsqueeze(-1)
        return allowed & mask.expand(*value.shape, self.n).gather(-1, counted).squeeze(-1)

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw categories ``[*shape, *self.shape]`` uniformly among the allowed ones."""
        mask = self.mask
        if mask is None:
            return self._valued(draw_categories(self.n, self._full_shape(shape), self.device, generator))
        return self._valued(draw_masked(mask, as_shape(() if shape is None else shape), generator))

    def _valued(self, counted: Tensor) -> Tensor:
        """The values of categories counted from 0."""
        assert self.dtype is not None
        return (counted + self.start if self.start else counted).to(self.dtype)

    @override
    def _projected(self, value: Tensor) -> Tensor:
        """The closest allowed category; of two equally close the smaller one."""
        closest, mask = super()._projected(value), self.mask
        if mask is None:
            return closest
        away = (torch.arange(self.n, device=self.device) - (closest.long() - self.start).unsqueeze(-1)).abs()
        return self._valued(away.masked_fill(~mask.expand(away.shape), self.n).argmin(-1))

    @override
    def index(self, index: Tensor, tensor_to_index: Tensor) -> Tensor:
        at = (index.long() - self.start).unsqueeze(-1)
        front = np.broadcast_shapes(at.shape[:-1], tensor_to_index.shape[:-1])
        return tensor_to_index.expand(*front, -1).gather(-1, at.expand(*front, 1)).squeeze(-1)

    @override
    def cardinality(self) -> int:
        return self.n

    @override
    def enumerate(self, use_mask: bool = False) -> Tensor:
        counted = torch.arange(self.n, device=self.device)
        if use_mask and self.mask is not None:
            rows = self._parameters["mask"].reshape(-1, self.n)
            if not bool((rows == rows[0]).all()):
                raise ValueError(
                    "the mask differs within the batch: index the spec first, then list its values"
                )
            counted = counted[rows[0]]
        return self._valued(counted).reshape(-1, *(1,) * self.ndim).expand(-1, *self._full_shape(()))

    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Flags ``[..., n]``, bool, of categories ``[...]``; ``safe=True`` checks them first."""
        if safe:
            self.assert_is_in(value)
        return torch.nn.functional.one_hot(value.long() - self.start, self.n).bool()

    def to_one_hot_spec(self) -> "OneHot":
        """The same categories as flags."""
        return OneHot._of(self, torch.bool)

    @override
    def _settings(self) -> tuple[Any, ...]:
        return self.n, self.start

    @override
    def _repr_parts(self) -> list[str]:
        parts = [f"n={self.n}", *([f"start={self.start}"] if self.start else [])]
        return parts if self.mask is None else [*parts, "masked"]


class Encoded(TensorSpec):
    """Base of specs whose last dim holds flags: one True for each category of another spec."""

    categories: Any  # the spec of the categories as numbers
    _own_dims = 1

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        check_holds(self.dtype, 0, 1)

    @classmethod
    def _of(cls, categories: Any, dtype: torch.dtype) -> Self:
        """The one-hot spec of these categories."""
        raise NotImplementedError

    @property
    def mask(self) -> Tensor | None:
        """Which categories are allowed, bool, of the spec's shape; None for all."""
        return self.categories.mask  # type: ignore[no-any-return]

    def update_mask(self, mask: Any) -> None:
        """Set which categories are allowed, bool, broadcastable to the spec's shape; None allows all.

        Raises:
            ValueError: it has another shape, or allows none somewhere.
        """
        self.categories.update_mask(mask)

    @override
    def _changed(self, **attributes: Any) -> Self:
        return super()._changed(**{"categories": self.categories.clone(), **attributes})

    @override
    def _map(self, operation: Operation, dims: int) -> Self:
        new = super()._map(operation, dims)
        new.categories = self.categories._map(operation, dims)
        return new

    @override
    def _with_device(self, device: torch.device) -> Self:
        return self._changed(device=device, categories=self.categories.to(device))

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw categories uniformly among the allowed ones; flags ``[*shape, *self.shape]``."""
        return self._flags(self.categories.rand(shape, generator=generator))

    def _flags(self, values: Tensor) -> Tensor:
        assert self.dtype is not None
        return self.categories.to_one_hot(values).to(self.dtype)  # type: ignore[no-any-return]

    @override
    def zero(self, shape: Shape = ()) -> Tensor:
        """Flags of the category closest to zero: no flags at all would be no category."""
        return self._flags(self.categories.zero(shape))

    @override
    def one(self, shape: Shape = ()) -> Tensor:
        """Flags of the category closest to one."""
        return self._flags(self.categories.one(shape))

    @override
    def encode(self, value: Any, *, ignore_device: bool = False) -> Tensor:
        """Flags of categories, which are numbers or an array of them.

        Raises:
            OutsideSpec: there is no such category.
        """
        return self._flags(self.categories.encode(value, ignore_device=ignore_device))

    @override
    def problem(self, value: Any) -> str | None:
        text = self._misfit(value)
        if text is not None or self.is_in(value):
            return text
        row = tuple((~self._beside(value)._allowed(value).all(-1)).nonzero()[0].tolist())
        where = f"at index {row[0] if len(row) == 1 else row} " if row else ""
        return f"{where}{self._domain_text(row)} was expected, got {value[row].tolist()}"

    @override
    def to_numpy(self, value: Tensor, safe: bool | None = None) -> Any:
        """The categories as an array of numbers; ``safe=True`` checks the flags first."""
        return self.categories.to_numpy(self.to_categorical(value, safe))

    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """The categories of flags; ``safe=True`` checks the flags first."""
        raise NotImplementedError

    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """The value itself; ``safe=True`` checks it first."""
        if safe:
            self.assert_is_in(value)
        return value

    def to_one_hot_spec(self) -> Self:
        """The spec itself."""
        return self

    def to_categorical_spec(self) -> Any:
        """The same categories as numbers."""
        return self.categories.clone()

    @override
    def index(self, index: Tensor, tensor_to_index: Tensor) -> Tensor:
        return self.categories.index(self.to_categorical(index), tensor_to_index)  # type: ignore[no-any-return]

    @override
    def cardinality(self) -> int:
        return self.categories.cardinality()  # type: ignore[no-any-return]

    @override
    def enumerate(self, use_mask: bool = False) -> Tensor:
        return self._flags(self.categories.enumerate(use_mask))

    @override
    def _settings(self) -> tuple[Any, ...]:
        return (self.categories,)

    @override
    def _repr_parts(self) -> list[str]:
        return self.categories._repr_parts()  # type: ignore[no-any-return]


class OneHot(Encoded):
    """One of n categories as n flags ``[..., n]``, one of which is set.

    Args:
        n: number of categories, at least 1.
        shape: shape of the tensors; its last dim is n. Default ``(n,)``.
        device: default the CPU.
        dtype: default bool.
        use_register: `encode` takes anything hashable and gives each new thing the next category.
        mask: bool, broadcastable to the shape: True where a category is allowed.

    >>> spec = OneHot(3, mask=torch.tensor([False, True, True]))
    >>> spec.zero().tolist(), spec.encode(2).tolist(), spec.is_in(torch.ones(3, dtype=torch.bool))
    ([False, True, False], [False, False, True], False)
    """

    categories: Categorical

    def __init__(
        self,
        n: int,
        shape: Shape = None,
        device: Device = None,
        dtype: Any = torch.bool,
        use_register: bool = False,
        mask: Any = None,
    ) -> None:
        n = as_count("n", n)
        sizes = as_shape((n,) if shape is None else shape)
        if not sizes or sizes[-1] != n:
            raise ValueError(f"the last dim of the shape must be n={n}, got shape {tuple(sizes)}")
        super().__init__(sizes, Categories(n), device, dtype, "discrete")
        self.categories = Categorical(n, sizes[:-1], device, mask=mask)
        self.use_register = use_register
        self._register: dict[Any, int] = {}

    @classmethod
    @override
    def _of(cls, categories: Categorical, dtype: torch.dtype) -> Self:
        new = cls(categories.n, (*categories.shape, categories.n), categories.device, dtype)
        new.categories = categories.to(torch.int64).clone()
        return new

    @property
    def n(self) -> int:
        """Number of categories."""
        return self.categories.n

    @override
    def _allowed(self, value: Tensor) -> Tensor:
        """One answer for each one-hot vector ``[..., 1]``."""
        flags = value == 1
        right = flags.sum(-1, keepdim=True) == 1
        if value.dtype is not torch.bool:
            right &= ((value == 0) | flags).all(-1, keepdim=True)
        mask = self.mask
        return right if mask is None else right & (flags & mask).any(-1, keepdim=True)

    @override
    def _settings(self) -> tuple[Any, ...]:
        return self.categories, self.use_register

    @override
    def _domain_text(self, index: tuple[int, ...]) -> str:
        return "one set flag" if self.mask is None else "one set flag that the mask allows"

    @override
    def encode(self, value: Any, *, ignore_device: bool = False) -> Tensor:
        if not self.use_register:
            return super().encode(value, ignore_device=ignore_device)
        key = value.item() if isinstance(value, Tensor | np.generic) else value
        if key not in self._register:
            if len(self._register) == self.n:
                raise OutsideSpec(f"{key!r} would be category {self.n}, and there are {self.n}")
            self._register[key] = len(self._register)
        return super().encode(self._register[key] + self.categories.start, ignore_device=ignore_device)

    @override
    def to_numpy(self, value: Tensor, safe: bool | None = None) -> Any:
        numbers = super().to_numpy(value, safe)
        if not self.use_register:
            return numbers
        names = list(self._register)  # in order of their numbers
        return np.array([names[i] for i in numbers.reshape(-1)]).reshape(numbers.shape)

    @override
    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        if safe:
            self.assert_is_in(value)
        return self.categories._valued(value.to(torch.uint8).argmax(-1))

    @override
    def _projected(self, value: Tensor) -> Tensor:
        """The flag of the largest number; with a mask, of the largest allowed one."""
        scores = value.to(self.device).double().nan_to_num(0.0)
        mask = self.mask
        if mask is not None:
            scores = scores.masked_fill(~mask.expand(scores.shape), -torch.inf)
        return self._flags(self.categories._valued(scores.argmax(-1)))


def as_count(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least ``least``, also one of NumPy or torch, such as the ``n`` of a Gymnasium space."""
    return whole_number(name, operator.index(value) if hasattr(value, "dtype") else value, least)
