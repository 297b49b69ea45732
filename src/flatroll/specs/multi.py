"""`MultiCategorical` and `MultiOneHot`: several categories beside each other."""

import math
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.specs.discrete import Categorical, Categories, Encoded, Numbered
from flatroll.specs.draws import draw_categories
from flatroll.specs.leaf import Device
from flatroll.specs.ranges import check_holds, is_whole
from flatroll.specs.shapes import Shape, as_shape, grid, shortened


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

    _own_dims = 1

    def __init__(
        self,
        nvec: Any,
        shape: Shape = None,
        device: Device = None,
        dtype: Any = torch.int64,
        mask: Any = None,
        remove_singleton: bool = True,
        *,
        start: Any = 0,
    ) -> None:
        counts = torch.as_tensor(nvec, device=device)
        counts = counts.reshape(1) if counts.ndim == 0 else counts
        if counts.numel() == 0 or not is_whole(counts.dtype) or bool((counts < 1).any()):
            raise ValueError(f"nvec must hold whole numbers of at least 1, got {nvec!r}")
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
            first = torch.as_tensor(start, device=device).long().expand(full)
            self._parameters = {
                "nvec": shortened(counts.expand(full), 1).clone(),
                "start": shortened(first, 1).clone(),
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
        """The different rows ``[r, k]`` of a parameter, as far as its memory tells."""
        return self._parameters[name].reshape(-1, self.shape[-1])

    def _one_row(self, name: str) -> Tensor:
        rows = self._rows(name)
        if not bool((rows == rows[0]).all()):
            raise ValueError(f"{name} differs within the batch: index the spec first")
        return rows[0]

    def parts(self) -> list[Categorical]:
        """The spec of each part, of shape ``shape[:-1]``."""
        counts, starts = self._counts(), self._one_row("start").tolist()
        masks = [None] * len(counts) if self.mask is None else self.mask.split_with_sizes(counts, -1)
        return [
            Categorical(n, self.shape[:-1], self.device, self.dtype, mask, start=first)
            for n, first, mask in zip(counts, starts, masks, strict=True)
        ]

    @override
    def _limits(self) -> tuple[Tensor, Tensor]:
        assert self.dtype is not None
        low, counts = self._parameters["start"], self._parameters["nvec"]
        return low.to(self.dtype), (low + counts - 1).to(self.dtype)

    @override
    def _allowed(self, value: Tensor) -> Tensor:
        if self.mask is not None:
            parts = zip(self.parts(), value.unbind(-1), strict=True)
            return torch.stack([part._allowed(column) for part, column in parts], -1)
        return super()._allowed(value)

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw categories ``[*shape, *self.shape]`` uniformly among the allowed ones."""
        assert self.dtype is not None
        if self.mask is not None:
            return torch.stack([part.rand(shape, generator=generator) for part in self.parts()], -1)
        drawn = draw_categories(self._parameters["nvec"], self._full_shape(shape), self.device, generator)
        return (drawn + self._parameters["start"]).to(self.dtype)

    @override
    def _projected(self, value: Tensor) -> Tensor:
        assert self.dtype is not None
        if self.mask is not None:
            parts = zip(self.parts(), value.unbind(-1), strict=True)
            return torch.stack([part._projected(column) for part, column in parts], -1)
        return super()._projected(value)

    @override
    def index(self, index: Tensor, tensor_to_index: Tensor) -> Tensor:
        """Pick from the last dim of ``[..., sum(nvec)]`` by category, part after part: ``[..., k]``."""
        columns = tensor_to_index.split_with_sizes(self._counts(), -1)
        parts = zip(self.parts(), index.unbind(-1), columns, strict=True)
        return torch.stack([part.index(chosen, column) for part, chosen, column in parts], -1)

    @override
    def cardinality(self) -> int:
        return math.prod(self._counts())

    @override
    def enumerate(self, use_mask: bool = False) -> Tensor:
        assert self.dtype is not None
        parts = [
            part.enumerate(use_mask).flatten(1)[:, 0] if part.ndim else part.enumerate(use_mask)
            for part in self.parts()
        ]
        values = grid(parts).to(self.dtype)
        shape = self._full_shape(())
        return values.reshape(-1, *(1,) * (self.ndim - 1), shape[-1]).expand(-1, *shape)

    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Flags ``[..., sum(nvec)]``, bool, of categories ``[..., k]``; ``safe=True`` checks them first."""
        if safe:
            self.assert_is_in(value)
        parts = zip(self.parts(), value.unbind(-1), strict=True)
        return torch.cat([part.to_one_hot(column) for part, column in parts], -1)

    def to_one_hot_spec(self) -> "MultiOneHot":
        """The same categories as flags."""
        return MultiOneHot._of(self, torch.bool)

    @override
    def _check_dtype(self, dtype: torch.dtype | None) -> None:
        assert dtype is not None
        low, counts = self._parameters["start"], self._parameters["nvec"]
        least, most = int(low.min()), int((low + counts - 1).max())
        check_holds(dtype, least, most)

    @override
    def _repr_parts(self) -> list[str]:
        rows = self._rows("nvec")
        same = bool((rows == rows[0]).all())
        parts = [f"nvec={rows[0].tolist() if same else rows.tolist()}"]
        return parts if self.mask is None else [*parts, "masked"]


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
        nvec: Any,
        shape: Shape = None,
        device: Device = None,
        dtype: Any = torch.bool,
        use_register: bool = False,
        mask: Any = None,
    ) -> None:
        if use_register:
            raise ValueError("use_register=True is for one category: take OneHot")
        counts = torch.as_tensor(nvec).long().reshape(-1)
        total = int(counts.sum())
        sizes = as_shape((total,) if shape is None else shape)
        if not sizes or sizes[-1] != total:
            raise ValueError(f"the last dim of the shape must be sum(nvec)={total}, got shape {tuple(sizes)}")
        super().__init__(sizes, None, device, dtype, "discrete")
        self.categories = MultiCategorical(counts, (*sizes[:-1], len(counts)), device, mask=mask)

    @classmethod
    @override
    def _of(cls, categories: MultiCategorical, dtype: torch.dtype) -> Self:
        counts = categories._counts()
        new = cls(counts, (*categories.shape[:-1], sum(counts)), categories.device, dtype)
        new.categories = categories.to(torch.int64).clone()
        return new

    @property
    def nvec(self) -> Tensor:
        """Numbers of categories ``[k]``."""
        return torch.tensor(self.categories._counts())

    @property
    @override
    def space(self) -> list[Categories]:
        """The domain of each part."""
        return self.categories.space

    def _parts(self, value: Tensor) -> list[tuple[Any, Tensor]]:
        """The one-hot spec and the flags of each part."""
        columns = value.split_with_sizes(self.categories._counts(), -1)
        return [
            (part.to_one_hot_spec().to(self.dtype), column)
            for part, column in zip(self.categories.parts(), columns, strict=True)
        ]

    @override
    def _allowed(self, value: Tensor) -> Tensor:
        """One answer for each flag, the same within a part."""
        return torch.cat([spec._allowed(flags).expand(flags.shape) for spec, flags in self._parts(value)], -1)

    @override
    def _domain_text(self, index: tuple[int, ...]) -> str:
        return f"one set flag in each part of {self.categories._counts()}"

    @override
    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        if safe:
            self.assert_is_in(value)
        return torch.stack([spec.to_categorical(flags) for spec, flags in self._parts(value)], -1)

    @override
    def _projected(self, value: Tensor) -> Tensor:
        return torch.cat([spec.project(flags) for spec, flags in self._parts(value)], -1)
