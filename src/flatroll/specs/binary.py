"""`Binary`: flags."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.specs.discrete import Categories, as_count
from flatroll.specs.draws import draw_categories
from flatroll.specs.leaf import Device, Ranged
from flatroll.specs.ranges import check_holds
from flatroll.specs.shapes import Shape, as_shape, grid


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
        self, n: int | None = None, shape: Shape = None, device: Device = None, dtype: Any = torch.int8
    ) -> None:
        if n is None and shape is None:
            raise TypeError("n or shape must be given")
        sizes = as_shape((n,) if shape is None else shape)
        last = sizes[-1] if sizes else 1
        self.n = as_count("n", last if n is None else n)
        if last != self.n:
            raise ValueError(f"the last dim of the shape must be n={n}, got shape {tuple(sizes)}")
        self._own_dims = min(1, len(sizes))
        self.by_shape = False  # whether the Gymnasium space names its shape, not n
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
