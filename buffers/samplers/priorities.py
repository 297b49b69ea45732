"""The priorities of the slots of a buffer, and the sum tree to draw by."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.index.ring import Array

_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
REDUCTIONS = ("max", "min", "median", "mean")
_BLOCK = 256  # slots whose highest priority is kept together


class Priorities:
    """One priority per slot, and the weights ``(priority + eps) ** alpha`` of the slots that may be drawn.

    All that is kept follows from the priorities and from which slots may be drawn; :meth:`weigh_all` brings it
    back in step after an interrupted change.

    Args:
        capacity: number of slots.
        alpha: exponent of the weights.
        eps: added to every priority.
        dtype: ``torch.float32`` or ``torch.float64``, in which priorities are kept. Weights are float64.
        within_buffer: `top` is the highest priority of the rows stored, not the highest there ever was.

    Attributes:
        values: the priorities, 0 where no row is stored.
        drawable: bool, the slots with a weight.
        alpha: may be set; :meth:`weigh_all` makes it hold.
        ever: the highest priority there ever was, at least 1.
    """

    def __init__(
        self, capacity: int, alpha: float, eps: float, dtype: torch.dtype, within_buffer: bool
    ) -> None:
        from flatroll.kernels.trees.sum_tree import SumTree  # numba: 0.3 s, only where priorities are kept

        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
        self.alpha = alpha
        self.eps = eps
        self.within_buffer = within_buffer
        self.tree = SumTree(capacity)
        self._blocks: Array = np.zeros((-(-capacity // _BLOCK), _BLOCK), _DTYPES[dtype])
        self._highest: Array = np.zeros(len(self._blocks), _DTYPES[dtype])
        self.values: Array = self._blocks.reshape(-1)[:capacity]
        self.drawable: Array = np.zeros(capacity, np.bool_)
        self._used = alpha  # the exponent of the weights in the tree
        self.ever = 1.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "values"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.values = self._blocks.reshape(-1)[: len(self.drawable)]

    @property
    def kernels(self) -> ModuleType:
        """The compiled kernels of the tree."""
        from flatroll.kernels.trees import sum_tree

        return sum_tree

    @property
    def nbytes(self) -> int:
        """Bytes of the priorities and of the tree."""
        return self.tree.nbytes + self._blocks.nbytes + self._highest.nbytes + self.drawable.nbytes

    @property
    def in_step(self) -> bool:
        """Whether the weights are those of the present `alpha`."""
        return self.alpha == self._used

    def top(self, stored: int) -> float:
        """Priority of a new row, where ``stored`` rows are stored: the highest one, 1 if there was none."""
        if self.within_buffer:
            return float(self._highest.max()) if stored else 1.0
        return self.ever

    def most(self, alpha: float) -> float:
        """The largest priority whose weight, with exponent ``alpha``, leaves sums finite."""
        digits = self.kernels.LARGEST / alpha if alpha else math.inf
        return float(10**digits) if digits < 308 else float(np.finfo(np.float64).max)

    def fill(self, slots: slice, priority: float, drawable: bool) -> None:
        """Rows of one priority stand in ``slots``; 0 and not ``drawable`` where none stand any more."""
        self.values[slots] = priority
        self.drawable[slots] = drawable
        weight = 0.0
        if drawable:
            kept = float(self.values.dtype.type(priority))
            weight = self.kernels.weight(kept, self.eps, self._used)
        self.tree.fill(slots.start, slots.stop - slots.start, weight)
        if self.within_buffer:
            blocks = slice(slots.start // _BLOCK, -(-slots.stop // _BLOCK))
            self._highest[blocks] = self._blocks[blocks].max(1)

    def allow(self, slots: Array) -> None:
        """The rows in ``slots`` (int64) may be drawn."""
        self.drawable[slots] = True
        self._weigh(slots)

    def put(self, slots: Array, priorities: Array) -> None:
        """Set the priorities of the rows in ``slots`` (int64); where a slot comes twice, the last one stays."""
        if not len(slots):
            return
        self.values[slots] = priorities
        self.ever = max(self.ever, float(priorities.max()))
        if self.within_buffer:
            blocks = np.unique(slots // _BLOCK)
            self._highest[blocks] = self._blocks[blocks].max(1)
        self._weigh(slots)

    def _weigh(self, slots: Array) -> None:
        tree = self.tree
        self.kernels.weigh(tree.nodes, tree.levels, slots, self.values, self.drawable, self.eps, self._used)

    def keep(self, stretches: list[slice]) -> None:
        """Set all other priorities to 0. No slot is drawable; :meth:`weigh_all` makes that hold."""
        gone = np.ones(len(self.values), np.bool_)
        for slots in stretches:
            gone[slots] = False
        self.values[gone] = 0
        self.drawable[:] = False
        self._highest[:] = self._blocks.max(1)

    def weigh_all(self) -> None:
        """Compute everything anew from `values`, `drawable` and `alpha`."""
        self._used, tree = self.alpha, self.tree
        self._highest[:] = self._blocks.max(1)
        self.kernels.weigh_all(tree.nodes, tree.levels, self.values, self.drawable, self.eps, self._used)


def one_each(priority: Tensor, count: int, reduction: str) -> Tensor:
    """One priority for each of ``count`` slots, float64, in host memory; ``reduction`` makes one of several."""
    values = priority.detach().to("cpu", torch.float64)
    if values.numel() == 1:
        return values.reshape(1).expand(count)
    if values.numel() == count:
        return values.reshape(-1)
    if values.ndim < 2 or len(values) != count:
        raise ValueError(
            f"priority must be a number or have one entry per index, got {list(priority.shape)} for {count}"
        )
    values = values.flatten(1)
    reduced = getattr(values, reduction)(1)
    return reduced if isinstance(reduced, Tensor) else reduced.values


def integers(name: str, values: Tensor) -> Array:
    """A flat copy in host memory, int64."""
    if values.numel() and (values.is_floating_point() or values.is_complex() or values.dtype is torch.bool):
        raise TypeError(f"{name} must be integers, got {values.dtype}")
    integers: Array = values.detach().reshape(-1).to("cpu", torch.int64).numpy()
    return integers
