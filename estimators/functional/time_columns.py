"""Tensors with a time axis, seen as the flat columns that the kernels of ``flatroll.kernels`` read."""

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from flatroll.kernels.scans.scan import is_tracing


class Series:
    """Tensors ``[*B, T, *F]`` as columns ``[B * F * T]``: each series of T rows contiguous, one after the other.

    Args:
        reward: the tensor whose shape the others follow.
        time_dim: the dim of T; a tensor ``[N]`` has but one.
        others: further floating tensors by name, which must have the reward's shape. The columns are in the
            dtype that all of them promote to.

    Raises:
        TypeError: the reward is not floating.
        ValueError: another shape.
    """

    def __init__(self, reward: Tensor, time_dim: int, **others: Tensor) -> None:
        for name, x in {"reward": reward, **others}.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(x).__name__}: torch.as_tensor({name})")
        if not reward.is_floating_point():
            raise TypeError(f"reward must be floating, got {reward.dtype}: cast it, e.g. with .float()")
        self.shape, self.device, self.dtype = reward.shape, reward.device, reward.dtype
        if any(x.shape != self.shape for x in others.values()):
            names, given = [*others, "reward"], [*others.values(), reward]
            raise ValueError(
                f"{_listed(names)} must have one shape, got {_listed([tuple(x.shape) for x in given])}"
            )
        for x in others.values():
            self.dtype = torch.promote_types(self.dtype, x.dtype)
        dims = reward.ndim
        if dims < 1 or not -dims <= (0 if dims == 1 else time_dim) < dims:
            raise ValueError(f"time_dim must name a dim of the reward {tuple(self.shape)}, got {time_dim}")
        self.time = 0 if dims == 1 else time_dim % dims
        self._flat = (
            self.shape[self.time + 1 :].numel() == 1
        )  # nothing to move: time is last but for dims of 1
        self.longest = self.shape[self.time]

    def column(self, x: Tensor) -> Tensor:
        """``x`` of the reward's shape as a column; a view wherever time is the last dim but for dims of 1."""
        flat = x if self._flat else x.movedim(self.time, -1)
        return flat.reshape(-1)

    def number(self, x: Tensor) -> Tensor:
        """``x`` of the reward's shape as a column of the common dtype."""
        return self.column(x).to(self.dtype)

    def back(self, column: Tensor) -> Tensor:
        """A column in the reward's shape."""
        if self._flat:
            return column.view(self.shape)
        moved = (*self.shape[: self.time], *self.shape[self.time + 1 :], self.longest)
        return column.view(moved).movedim(-1, self.time)

    def spread(self, name: str, x: Tensor) -> Tensor:
        """``x`` in the reward's shape: it has it, or 1 for a feature dim, or no feature dims at all (``[*B, T]``)."""
        if x.shape == self.shape:
            return x
        rows = self.time + 1
        fits = x.ndim <= len(self.shape) and x.shape[:rows] == self.shape[:rows]
        if not fits or any(n not in (1, m) for n, m in zip(x.shape[rows:], self.shape[rows:], strict=False)):
            raise ValueError(
                f"{name} must have the reward's shape {tuple(self.shape)}, or 1 for its features, "
                f"got {tuple(x.shape)}"
            )
        return x.reshape(*x.shape, *[1] * (len(self.shape) - x.ndim)).expand(self.shape)

    def factor(self, name: str, x: float | Tensor) -> float | Tensor:
        """A discount or decay: the number itself, or one per row as a column.

        Raises:
            ValueError: outside [0, 1] (tensors on other devices than the CPU, and inside transforms, are not
                read), or a shape that neither is that of the rows ``[*B, T]`` nor broadcasts to the reward.
        """
        if not isinstance(x, Tensor):
            return unit_interval(name, x)
        if x.device.type == "cpu" and not is_tracing() and x.numel():
            low, high = x.detach().aminmax()
            for bound in (low, high):
                unit_interval(name, float(bound))
        if not x.ndim:
            return x.to(self.dtype)
        return self.number(factor_over(name, x, self.shape, self.time + 1))

    def flags(self, done: Tensor, terminated: Tensor | None, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        """Columns: where nothing is bootstrapped, and where runs end."""
        stopped = self._flag("done", done)
        over = stopped if terminated is None else self._flag("terminated", terminated)
        stop = stopped | over if ends is None else stopped | over | self._flag("ends", ends)
        if stop.shape[0] != self.longest:  # the kernels end the one series at its last row by themselves
            stop.view(-1, self.longest)[:, -1:] = True
        return over, stop

    def _flag(self, name: str, flag: Tensor) -> Tensor:
        return self.column(self.spread(name, checked_flag(name, flag)))


def factor_over(name: str, x: Tensor, shape: torch.Size, rows: int) -> Tensor:
    """``x`` in the reward's ``shape``, of which ``rows`` dims are rows: one number per row, or what broadcasts.

    >>> factor_over("gamma", torch.tensor([0.5, 0.9]), torch.Size([2, 3]), 1).tolist()
    [[0.5, 0.5, 0.5], [0.8999999761581421, 0.8999999761581421, 0.8999999761581421]]
    """
    try:
        over = x.reshape(*x.shape, *[1] * (len(shape) - rows)) if x.shape == shape[:rows] else x
        return over.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{name} must be a number, one per row {tuple(shape[:rows])} or broadcast to the reward "
            f"{tuple(shape)}, got shape {tuple(x.shape)}"
        ) from None


def checked_flag(name: str, flag: Tensor) -> Tensor:
    """The flag, which must be bool."""
    if flag.dtype is not torch.bool:
        raise TypeError(f"{name} must be bool, got {flag.dtype}: cast it with .bool()")
    return flag


def unit_interval(name: str, number: float | Tensor) -> float:
    """The number, which must lie in [0, 1]."""
    if not isinstance(number, float | int | Tensor | Real):
        raise TypeError(f"{name} must be a number or a tensor, got {number!r}")
    if not 0.0 <= float(number) <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {number}")
    return float(number)


def _listed(items: Sequence[object]) -> str:
    """``a, b and c``."""
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last
