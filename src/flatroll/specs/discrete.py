"""Specs of discrete values: categories as numbers (`Categorical`, `MultiCategorical`), as flags (`OneHot`,
`MultiOneHot`), and flags that are independent (`Binary`)."""

import math
import operator
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.layout.checks import as_numbers, as_text, check_device, check_flags, check_whole_number
from flatroll.specs.arithmetic import check_holds, draw_categories, draw_masked, is_whole
from flatroll.specs.shapes import Operation, Shape, as_shape, grid, shorten
from flatroll.specs.tensor_spec import Device, DType, Numbers, OutsideSpecError, Ranged, TensorSpec


@dataclass(frozen=True)
class Categories:
    """The domain of a categorical spec: the number of categories."""

    n: int


class Numbered(Ranged):
    """Base of specs of categories as numbers, with an optional mask of allowed ones."""

    _kept = 1  # masks have their categories in one last dim

    @abstractmethod
    def _counts(self) -> list[int]:
        """The number of categories in each part of one value."""

    @property
    def mask(self) -> Tensor | None:
        """Mask of allowed categories, bool: batch dims, then the categories of all parts. None for all."""
        if "mask" in self._parameters:
            return self._full("mask")
        return None

    def update_mask(self, mask: Numbers | None) -> None:
        """Set the mask of allowed categories, bool, broadcastable to the batch dims and all categories; None for all.

        Raises:
            ValueError: it has another shape, allows none in some part, or the parts differ within the batch.
        """
        if mask is None:
            self._parameters.pop("mask", None)
            return

        given = as_numbers("mask", mask, self.device)
        counts = self._counts()
        if given.dtype is not torch.bool:
            raise ValueError(f"the mask must be bool, got {given.dtype}")

        sizes = (*self._full_shape(())[: self._frame.ndim], sum(counts))
        try:
            short = shorten(given.expand(sizes), 1).clone()  # the caller may write to its own mask
        except RuntimeError as error:
            raise ValueError(f"the mask must broadcast to shape {sizes}, got {tuple(given.shape)}") from error

        for k, part in enumerate(short.split_with_sizes(counts, -1)):
            if not bool(part.any(-1).all()):
                where = f" (in part {k})" if len(counts) > 1 else ""
                raise ValueError(f"the mask must allow a category everywhere{where}")
        self._parameters["mask"] = short

    @override
    def all_allowed(self, value: Tensor) -> bool:
        if self.mask is None:
            return super().all_allowed(value)
        return bool(self.allowed(value).all())

    @override
    def _domain_text(self, index: tuple[int, ...]) -> str:
        text = super()._domain_text(index)
        if self.mask is not None:
            text += " that the mask allows"
        return text

    @override
    def _with_dtype(self, dtype: torch.dtype) -> Self:
        self._check_dtype(dtype)
        return self._copy_with(dtype=dtype)

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
        dtype: DType = torch.int64,
        mask: Numbers | None = None,
        *,
        start: int = 0,
    ) -> None:
        self.n = as_count("n", n)
        self.start = as_count("start", start, least=-(2**62))
        if shape is None:
            shape = ()
        super().__init__(shape, Categories(self.n), device, dtype, "discrete")
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
    def allowed(self, value: Tensor) -> Tensor:
        allowed = super().allowed(value)
        mask = self.mask
        if mask is None:
            return allowed
        counted = (value.long() - self.start).clamp(0, self.n - 1).unsqueeze(-1)
        return allowed & mask.expand(*value.shape, self.n).gather(-1, counted).squeeze(-1)

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw categories ``[*shape, *self.shape]`` uniformly among the allowed ones."""
        mask = self.mask
        if mask is None:
            return self.nth(draw_categories(self.n, self._full_shape(shape), self.device, generator))
        front = as_shape(() if shape is None else shape)
        return self.nth(draw_masked(mask, front, generator))

    def nth(self, counted: Tensor) -> Tensor:
        """The values of categories counted from 0."""
        assert self.dtype is not None
        if self.start:
            counted = counted + self.start
        return counted.to(self.dtype)

    @override
    def closest(self, value: Tensor) -> Tensor:
        """Return the closest allowed category, the smaller one of a tie."""
        closest = super().closest(value)
        mask = self.mask
        if mask is None:
            return closest

        places = closest.long() - self.start
        away = (torch.arange(self.n, device=self.device) - places.unsqueeze(-1)).abs()
        return self.nth(away.masked_fill(~mask.expand(away.shape), self.n).argmin(-1))

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

        return self.nth(counted).reshape(-1, *(1,) * self.ndim).expand(-1, *self._full_shape(()))

    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Flags ``[..., n]``, bool, of categories ``[...]``; ``safe=True`` checks them first."""

        if safe:
            self.assert_is_in(value)
        return torch.nn.functional.one_hot(value.long() - self.start, self.n).bool()

    def to_one_hot_spec(self) -> "OneHot":
        """The same categories as flags."""
        spec = OneHot(self.n, (*self.shape, self.n), self.device)
        spec.categories = self.to(torch.int64).clone()
        return spec

    @override
    def _settings(self) -> tuple[Any, ...]:
        return self.n, self.start

    @override
    def _repr_parts(self) -> list[str]:
        parts = [f"n={self.n}"]
        if self.start:
            parts.append(f"start={self.start}")
        if self.mask is not None:
            parts.append("masked")
        return parts


class Encoded(TensorSpec):
    """Base of specs whose last dim holds flags: one True for each category of another spec."""

    categories: Any  # spec of the categories as integers
    value_dims = 1

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        check_holds(self.dtype, 0, 1)

    @property
    def mask(self) -> Tensor | None:
        """Which categories are allowed, bool, of the spec's shape; None for all."""
        return self.categories.mask  # type: ignore[no-any-return]

    def update_mask(self, mask: Numbers | None) -> None:
        """Set which categories are allowed, bool, broadcastable to the spec's shape; None allows all.

        Raises:
            ValueError: it has another shape, or allows none somewhere.
        """
        self.categories.update_mask(mask)

    @override
    def _copy_with(self, **attributes: Any) -> Self:
        return super()._copy_with(**{"categories": self.categories.clone(), **attributes})

    @override
    def map_dims(self, operation: Operation, dims: int) -> Self:
        new = super().map_dims(operation, dims)
        new.categories = self.categories.map_dims(operation, dims)
        return new

    @override
    def _with_device(self, device: torch.device) -> Self:
        return self._copy_with(device=device, categories=self.categories.to(device))

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw categories uniformly among the allowed ones; flags ``[*shape, *self.shape]``."""
        return self._flags(self.categories.rand(shape, generator=generator))

    def _flags(self, values: Tensor) -> Tensor:
        assert self.dtype is not None
        return self.categories.to_one_hot(values).to(self.dtype)  # type: ignore[no-any-return]

    @override
    def zero(self, shape: Shape = ()) -> Tensor:
        """Return the flags of the category closest to zero."""
        return self._flags(self.categories.zero(shape))

    @override
    def one(self, shape: Shape = ()) -> Tensor:
        """Flags of the category closest to one."""
        return self._flags(self.categories.one(shape))

    @override
    def encode(self, value: Any, *, ignore_device: bool = False) -> Tensor:
        """Flags of categories, which are numbers or an array of them.

        Raises:
            OutsideSpecError: the category does not exist.
        """
        return self._flags(self.categories.encode(value, ignore_device=ignore_device))

    @override
    def problem(self, value: object) -> str | None:
        text = self._misfit(value)
        if text is not None or self.is_in(value):
            return text
        assert isinstance(value, Tensor)

        row = tuple((~self.to(value.device).allowed(value).all(-1)).nonzero()[0].tolist())
        where = ""
        if row:
            place = row[0] if len(row) == 1 else row
            where = f"at index {place} "
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
        dtype: DType = torch.bool,
        use_register: bool = False,
        mask: Numbers | None = None,
    ) -> None:
        n = as_count("n", n)
        check_flags(use_register=use_register)
        sizes = as_shape((n,) if shape is None else shape)
        if not sizes or sizes[-1] != n:
            raise ValueError(f"the last dim of the shape must be n={n}, got shape {tuple(sizes)}")

        super().__init__(sizes, Categories(n), device, dtype, "discrete")
        self.categories = Categorical(n, sizes[:-1], device, mask=mask)
        self.use_register = use_register
        self._register: dict[Any, int] = {}

    @property
    def n(self) -> int:
        """Number of categories."""
        return self.categories.n

    @override
    def allowed(self, value: Tensor) -> Tensor:
        """Reduce to one result per one-hot vector ``[..., 1]``."""
        flags = value == 1
        right = flags.sum(-1, keepdim=True) == 1
        if value.dtype is not torch.bool:
            right &= ((value == 0) | flags).all(-1, keepdim=True)

        mask = self.mask
        if mask is None:
            return right
        return right & (flags & mask).any(-1, keepdim=True)

    @override
    def _settings(self) -> tuple[Any, ...]:
        return self.categories, self.use_register

    @override
    def _domain_text(self, index: tuple[int, ...]) -> str:
        if self.mask is None:
            return "one set flag"
        return "one set flag that the mask allows"

    @override
    def encode(self, value: Any, *, ignore_device: bool = False) -> Tensor:
        if not self.use_register:
            return super().encode(value, ignore_device=ignore_device)

        key = value.item() if isinstance(value, Tensor | np.generic) else value
        if key not in self._register:
            if len(self._register) == self.n:
                raise OutsideSpecError(
                    f"{key!r} would be category {self.n}, but there are only {self.n} categories"
                )
            self._register[key] = len(self._register)
        return super().encode(self._register[key] + self.categories.start, ignore_device=ignore_device)

    @override
    def to_numpy(self, value: Tensor, safe: bool | None = None) -> Any:
        numbers = super().to_numpy(value, safe)
        if not self.use_register:
            return numbers

        names = list(self._register)  # sorted by number
        return np.array([names[i] for i in numbers.reshape(-1)]).reshape(numbers.shape)

    @override
    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        if safe:
            self.assert_is_in(value)
        return self.categories.nth(value.to(torch.uint8).argmax(-1))

    @override
    def closest(self, value: Tensor) -> Tensor:
        """The flag of the largest number; with a mask, of the largest allowed one."""
        scores = value.to(self.device).double().nan_to_num(0.0)
        mask = self.mask
        if mask is not None:
            scores = scores.masked_fill(~mask.expand(scores.shape), -torch.inf)
        return self._flags(self.categories.nth(scores.argmax(-1)))


class MultiCategorical(Numbered):
    """k categories ``[..., k]``, the i-th of ``nvec[i]``, such as a `gymnasium.spaces.MultiDiscrete`.

    Args:
        nvec: numbers of categories ``[k]``, or ``[..., k]`` where they differ within the tensors.
        shape: shape of the tensors; its last dims are those of nvec, or broadcast from them. Default that of nvec.
        device: default the CPU.
        dtype: default int64.
        mask: bool, broadcastable to ``[*shape[:-1], sum(nvec)]``: which categories are allowed, part after part.
        remove_singleton: accepted for scripts that give it, without effect: ``nvec=[n]`` has values ``[..., 1]``.
        start: the first category of each part, a number or as nvec. Values are the env's own.

    >>> spec = MultiCategorical([2, 3], start=[0, 5])
    >>> spec.is_in(torch.tensor([1, 7])), spec.problem(torch.tensor([[0, 5], [2, 5]]))
    (True, 'at index (1, 0) a value of 0 to 1 was expected, got 2')
    """

    value_dims = 1

    def __init__(
        self,
        nvec: Numbers,
        shape: Shape = None,
        device: Device = None,
        dtype: DType = torch.int64,
        mask: Numbers | None = None,
        remove_singleton: bool = True,
        *,
        start: Numbers = 0,
    ) -> None:
        check_flags(remove_singleton=remove_singleton)
        if device is not None:
            device = check_device("device", device)

        counts = as_numbers("nvec", nvec, device)
        if counts.ndim == 0:
            counts = counts.reshape(1)
        if counts.numel() == 0 or not is_whole(counts.dtype) or bool((counts < 1).any()):
            raise ValueError(f"nvec must hold whole numbers of at least 1, got {as_text(nvec)}")
        counts = counts.long()

        sizes = as_shape(counts.shape if shape is None else shape)
        if sizes[-1:] != counts.shape[-1:]:
            raise ValueError(
                f"the last dim of the shape must be that of nvec, {counts.shape[-1]}, got shape {tuple(sizes)}"
            )

        super().__init__(sizes, None, device, dtype, "discrete")
        self.remove_singleton = remove_singleton

        full = (*self._frame.shape, sizes[-1])
        try:
            first = as_numbers("start", start, device).long().expand(full)
            self._parameters = {
                "nvec": shorten(counts.expand(full), 1).clone(),
                "start": shorten(first, 1).clone(),
            }
        except RuntimeError as error:
            raise ValueError(
                f"nvec and start must broadcast to shape {tuple(sizes)}, got {tuple(counts.shape)} and {start!r}"
            ) from error

        self._check_dtype(self.dtype)
        self.update_mask(mask)

    @property
    def nvec(self) -> Tensor:
        """Numbers of categories, int64, of the spec's shape."""
        return self._full("nvec")

    @property
    def start(self) -> Tensor:
        """The first categories, int64, of the spec's shape."""
        return self._full("start")

    @property
    @override
    def space(self) -> list[Categories]:
        """The domain of each part."""
        return [Categories(n) for n in self._counts()]

    @override
    def _counts(self) -> list[int]:
        """The numbers of categories of one value, which must be the same in the whole batch."""
        return self._one_row("nvec").tolist()

    def _rows(self, name: str) -> Tensor:
        """Return the distinct rows ``[r, k]`` of an expanded parameter."""
        return self._parameters[name].reshape(-1, self.shape[-1])

    def _one_row(self, name: str) -> Tensor:
        rows = self._rows(name)
        if not bool((rows == rows[0]).all()):
            raise ValueError(f"{name} differs within the batch: index the spec first")
        return rows[0]

    def parts(self) -> list[Categorical]:
        """The spec of each part, of shape ``shape[:-1]``."""
        counts = self._counts()
        starts = self._one_row("start").tolist()
        masks: Any = [None] * len(counts)
        if self.mask is not None:
            masks = self.mask.split_with_sizes(counts, -1)

        return [
            Categorical(n, self.shape[:-1], self.device, self.dtype, mask, start=first)
            for n, first, mask in zip(counts, starts, masks, strict=True)
        ]

    @override
    def _limits(self) -> tuple[Tensor, Tensor]:
        assert self.dtype is not None
        low = self._parameters["start"]
        counts = self._parameters["nvec"]
        return low.to(self.dtype), (low + counts - 1).to(self.dtype)

    @override
    def allowed(self, value: Tensor) -> Tensor:
        if self.mask is not None:
            parts = zip(self.parts(), value.unbind(-1), strict=True)
            return torch.stack([part.allowed(column) for part, column in parts], -1)
        return super().allowed(value)

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw categories ``[*shape, *self.shape]`` uniformly among the allowed ones."""
        assert self.dtype is not None
        if self.mask is not None:
            return torch.stack([part.rand(shape, generator=generator) for part in self.parts()], -1)

        drawn = draw_categories(self._parameters["nvec"], self._full_shape(shape), self.device, generator)
        return (drawn + self._parameters["start"]).to(self.dtype)

    @override
    def closest(self, value: Tensor) -> Tensor:
        assert self.dtype is not None
        if self.mask is not None:
            parts = zip(self.parts(), value.unbind(-1), strict=True)
            return torch.stack([part.closest(column) for part, column in parts], -1)
        return super().closest(value)

    @override
    def index(self, index: Tensor, tensor_to_index: Tensor) -> Tensor:
        """Index the last dim of ``[..., sum(nvec)]`` by category, per part: ``[..., k]``."""
        columns = tensor_to_index.split_with_sizes(self._counts(), -1)
        parts = zip(self.parts(), index.unbind(-1), columns, strict=True)
        return torch.stack([part.index(chosen, column) for part, chosen, column in parts], -1)

    @override
    def cardinality(self) -> int:
        return math.prod(self._counts())

    @override
    def enumerate(self, use_mask: bool = False) -> Tensor:
        assert self.dtype is not None
        listed = []
        for part in self.parts():
            values = part.enumerate(use_mask)
            if part.ndim:
                values = values.flatten(1)[:, 0]
            listed.append(values)

        rows = grid(listed).to(self.dtype)
        shape = self._full_shape(())
        return rows.reshape(-1, *(1,) * (self.ndim - 1), shape[-1]).expand(-1, *shape)

    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Flags ``[..., sum(nvec)]``, bool, of categories ``[..., k]``; ``safe=True`` checks them first."""
        if safe:
            self.assert_is_in(value)
        parts = zip(self.parts(), value.unbind(-1), strict=True)
        return torch.cat([part.to_one_hot(column) for part, column in parts], -1)

    def to_one_hot_spec(self) -> "MultiOneHot":
        """The same categories as flags."""
        counts = self._counts()
        spec = MultiOneHot(counts, (*self.shape[:-1], sum(counts)), self.device)
        spec.categories = self.to(torch.int64).clone()
        return spec

    @override
    def _check_dtype(self, dtype: torch.dtype | None) -> None:
        low = self._parameters["start"]
        counts = self._parameters["nvec"]
        least = int(low.min())
        most = int((low + counts - 1).max())
        check_holds(dtype, least, most)

    @override
    def _repr_parts(self) -> list[str]:
        rows = self._rows("nvec")
        same = bool((rows == rows[0]).all())
        counts = rows[0] if same else rows
        parts = [f"nvec={counts.tolist()}"]
        if self.mask is not None:
            parts.append("masked")
        return parts


class MultiOneHot(Encoded):
    """k categories as flags ``[..., sum(nvec)]``, part after part, one set in each.

    Args:
        nvec: numbers of categories ``[k]``.
        shape: shape of the tensors; its last dim is ``sum(nvec)``. Default ``(sum(nvec),)``.
        device: default the CPU.
        dtype: default bool.
        use_register: not possible for several categories; False.
        mask: bool, broadcastable to the shape: which categories are allowed.

    >>> spec = MultiOneHot([2, 3])
    >>> spec.encode([1, 0]).tolist(), spec.to_numpy(spec.encode([1, 2])).tolist(), spec.cardinality()
    ([False, True, True, False, False], [1, 2], 6)
    """

    categories: MultiCategorical

    def __init__(
        self,
        nvec: Numbers,
        shape: Shape = None,
        device: Device = None,
        dtype: DType = torch.bool,
        use_register: bool = False,
        mask: Numbers | None = None,
    ) -> None:
        check_flags(use_register=use_register)
        if use_register:
            raise ValueError("use_register=True supports only one category per value: use OneHot")

        counts = as_numbers("nvec", nvec).long().reshape(-1)
        total = int(counts.sum())
        self._counts: list[int] = counts.tolist()
        sizes = as_shape((total,) if shape is None else shape)
        if not sizes or sizes[-1] != total:
            raise ValueError(f"the last dim of the shape must be sum(nvec)={total}, got shape {tuple(sizes)}")

        super().__init__(sizes, None, device, dtype, "discrete")
        self.categories = MultiCategorical(counts, (*sizes[:-1], len(counts)), device, mask=mask)

    @property
    def nvec(self) -> Tensor:
        """Numbers of categories ``[k]``."""
        return torch.tensor(self._counts)

    @property
    @override
    def space(self) -> list[Categories]:
        """The domain of each part."""
        return self.categories.space

    def _parts(self, value: Tensor) -> list[tuple[Any, Tensor]]:
        """The one-hot spec and the flags of each part."""
        columns = value.split_with_sizes(self._counts, -1)
        return [
            (part.to_one_hot_spec().to(self.dtype), column)
            for part, column in zip(self.categories.parts(), columns, strict=True)
        ]

    @override
    def allowed(self, value: Tensor) -> Tensor:
        """Expand to one result per flag, constant within a part."""
        return torch.cat([spec.allowed(flags).expand(flags.shape) for spec, flags in self._parts(value)], -1)

    @override
    def _domain_text(self, index: tuple[int, ...]) -> str:
        return f"one set flag in each part of {self._counts}"

    @override
    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        if safe:
            self.assert_is_in(value)
        return torch.stack([spec.to_categorical(flags) for spec, flags in self._parts(value)], -1)

    @override
    def closest(self, value: Tensor) -> Tensor:
        return torch.cat([spec.project(flags) for spec, flags in self._parts(value)], -1)


class Binary(Ranged):
    """n flags ``[..., n]``, each 0 or 1, such as a `gymnasium.spaces.MultiBinary`.

    Args:
        n: number of flags, at least 1; default the last dim of the shape.
        shape: shape of the tensors; its last dim is n, without dims it is one flag. Default ``(n,)``.
        device: default the CPU.
        dtype: default int8.

    >>> spec = Binary(2)
    >>> spec.cardinality(), spec.enumerate().tolist()
    (4, [[0, 0], [0, 1], [1, 0], [1, 1]])
    """

    def __init__(
        self, n: int | None = None, shape: Shape = None, device: Device = None, dtype: DType = torch.int8
    ) -> None:
        if n is None and shape is None:
            raise TypeError("n or shape must be given")
        if n is not None:
            n = as_count("n", n)

        sizes = as_shape(n if shape is None else shape)
        last = sizes[-1] if sizes else 1
        if n is None:
            n = as_count("n", last)
        self.n = n
        if last != self.n:
            raise ValueError(f"the last dim of the shape must be n={n}, got shape {tuple(sizes)}")

        self.value_dims = min(1, len(sizes))
        self.by_shape = False  # whether the Gymnasium space is given by shape instead of n
        super().__init__(sizes, Categories(2), device, dtype, "discrete")
        check_holds(self.dtype, 0, 1)

    @override
    def _limits(self) -> tuple[Tensor, Tensor]:
        low, high = torch.tensor([0, 1], device=self.device).to(self.dtype).unbind()
        return low, high

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw flags ``[*shape, *self.shape]``, each 0 or 1 with the same probability."""
        assert self.dtype is not None
        return draw_categories(2, self._full_shape(shape), self.device, generator).to(self.dtype)

    @override
    def cardinality(self) -> int:
        return 1 << self.n

    @override
    def enumerate(self, use_mask: bool = False) -> Tensor:
        assert self.dtype is not None
        shape = self._full_shape(())
        values = grid([torch.arange(2, device=self.device)] * self.n).to(self.dtype)
        return values.reshape(-1, *(1,) * (self.ndim - 1), *shape[-1:]).expand(-1, *shape)

    @override
    def _repr_parts(self) -> list[str]:
        return [f"n={self.n}"]


def as_count(name: str, value: SupportsIndex, least: int = 1) -> int:
    """A whole number from ``least`` to 2**62, or one of NumPy's or torch's, such as the ``n`` of a Gymnasium space."""
    try:
        whole = operator.index(value) if hasattr(value, "dtype") else value
        return check_whole_number(name, whole, least, 2**62)
    except (TypeError, RuntimeError) as error:  # an array of several numbers
        raise TypeError(f"{name} must be an integer, got {as_text(value)}") from error
