"""`Binary`: flags."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.specs.bounded import grid
from flatroll.specs.discrete import Categories
from flatroll.specs.draws import draw_categories
from flatroll.specs.leaf import Device, TensorSpec, is_whole
from flatroll.specs.shapes import Shape, as_shape


class Binary(TensorSpec):
    """n flags ``[..., n]``, each 0 or 1, such as a `gymnasium.spaces.MultiBinary`.

    Args:
        n: number of flags; default the last dim of the shape.
        shape: shape of the tensors; its last dim is n. Default ``(n,)``.
        device: default the CPU.
        dtype: default int8.

    >>> spec = Binary(2)
    >>> spec.cardinality(), spec.enumerate().tolist()
    (4, [[0, 0], [0, 1], [1, 0], [1, 1]])
    """

    def __init__(
        self, n: int | None = None, shape: Shape = None, device: Device = None, dtype: Any = torch.int8
    ) -> None:
        if n is None and shape is None:
            raise TypeError("n or shape must be given")
        sizes = as_shape((n,) if shape is None else shape)
        if n is not None and (sizes[-1] if sizes else 0) != n:
            raise ValueError(f"the last dim of the shape must be n={n}, got shape {tuple(sizes)}")
        self._own_dims = min(1, len(sizes))
        self.n = sizes[-1] if sizes else 1
        self._by_shape = False  # whether the Gymnasium space names its shape, not n
        super().__init__(sizes, Categories(2), device, dtype, "discrete")

    @override
    def is_in(self, value: Any) -> bool:
        if self._misfit(value) is not None:
            return False
        return value.dtype is torch.bool or torch.equal(
            value.clamp(0, 1), value if is_whole(value.dtype) else value.round()
        )

    @override
    def _allowed(self, value: Tensor) -> Tensor:
        return (value == 0) | (value == 1)

    @override
    def _domain_text(self, index: tuple[int, ...]) -> str:
        return "0 or 1"

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw flags ``[*shape, *self.shape]``, each 0 or 1 with the same probability."""
        assert self.dtype is not None
        return draw_categories(2, self._full_shape(shape), self.device, generator).to(self.dtype)

    @override
    def zero(self, shape: Shape = ()) -> Tensor:
        return torch.zeros(self._full_shape(shape), dtype=self.dtype, device=self.device)

    @override
    def one(self, shape: Shape = ()) -> Tensor:
        return torch.ones(self._full_shape(shape), dtype=self.dtype, device=self.device)

    @override
    def _projected(self, value: Tensor) -> Tensor:
        assert self.dtype is not None
        if value.is_floating_point():
            value = value.nan_to_num(0.0).round()
        return (
            value.clamp(0, 1).to(device=self.device, dtype=self.dtype)
            if value.dtype is not torch.bool
            else value.to(self.dtype)
        )

    @override
    def cardinality(self) -> int:
        return 1 << self.n

    @override
    def enumerate(self, use_mask: bool = False) -> Tensor:
        assert self.dtype is not None
        values = grid([torch.arange(2, device=self.device)] * self.n).to(self.dtype)
        shape = self._full_shape(())
        return values.reshape(-1, *(1,) * (self.ndim - 1), *shape[-1:]).expand(-1, *shape)

    @override
    def _repr_parts(self) -> list[str]:
        return [f"n={self.n}"]
