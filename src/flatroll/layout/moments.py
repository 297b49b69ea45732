"""`Moments`: running count, mean and variance, merged batch by batch without cancellation.

The sums of two parts give those of the whole (Chan): with ``share = n_b / (n_a + n_b)`` and ``d = mean_b - mean_a``,

* ``mean = mean_a + share * d``
* ``var = (1 - share) * var_a + share * var_b + share * (1 - share) * d ** 2``

so no difference of large sums is computed, and empty parts change nothing.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from flatroll.layout.checks import check_device
from flatroll.layout.transfers import upload

#: Number of rows converted to float64 at a time: larger batches are merged from parts.
_PART = 2**16


class Moments(nn.Module):
    """Count, mean and population variance of rows, float64, as buffers that are changed in place.

    They are merged by T. Chan, G. Golub, R. LeVeque: Updating formulae and a pairwise algorithm for computing sample
    variances, Stanford 1979 (The American Statistician 37, 1983).

    Args:
        shape: F, of one row.
        device: of the buffers. Default: torch's.

    Attributes:
        count: float64 ``[1]``, rows seen; it is exact up to 2 ** 53.
        mean: float64 ``[*F]``, 0 before the first row; ``[1]`` where a row is one number.
        var: the same of the variance, divided by the count; 1 before the first row.

    >>> moments = Moments(())
    >>> moments.add(("x", torch.tensor([1.0, 3.0]), None))
    >>> moments.add(("x", torch.tensor([5.0, 100.0]), torch.tensor([True, False])))
    >>> moments.count.item(), moments.mean.item(), round(moments.var.item(), 4)
    (3.0, 3.0, 2.6667)
    """

    count: Tensor
    mean: Tensor
    var: Tensor
    #: Remaining reads before a warning that nothing was counted; 0 after an update or a load.
    unlearned = 10_000

    def __init__(self, shape: tuple[int, ...], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.shape = shape
        # Not 0-dim: torch.compile (2.13) takes a 0-dim tensor on the host for a number, and loses writes into it.
        stored = shape or (1,)
        if device is not None:
            device = check_device("device", device)

        self.register_buffer("count", torch.zeros(1, dtype=torch.float64, device=device))
        self.register_buffer("mean", torch.zeros(stored, dtype=torch.float64, device=device))
        self.register_buffer("var", torch.ones(stored, dtype=torch.float64, device=device))

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the buffers, but leave them in float64: ``policy.float()`` or ``.half()`` would cost digits."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own
        for name, buffer in self._buffers.items():
            old = before[name]
            if buffer is not None and old is not None and buffer.dtype is not torch.float64:
                self._buffers[name] = old.to(buffer.device)
        return self

    @override
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.unlearned = 0

    def add(self, *columns: tuple[str, Tensor, Tensor | None]) -> None:
        """Update with rows of one or more columns: (name for errors, rows ``[N, *F]``, mask of rows that count).

        The last is bool ``[N]``; None: all rows.

        Raises:
            ValueError: a row that counts is NaN or infinite; nothing is changed. Only rows on the host are checked;
                on other devices NaN propagates to mean and variance.
        """
        rows = columns[0][1]  # moments are computed on the rows' device; only the results are moved
        fresh = tuple(rows.new_zeros(n, dtype=torch.float64) for n in (1, self.mean.shape, self.mean.shape))

        with torch.no_grad():
            for _, rows, counted in columns:
                for start in range(0, rows.shape[0], _PART):
                    part = slice(start, start + _PART)
                    chosen = None if counted is None else counted[part]
                    fresh = _merge(fresh, _count_moments(rows[part].detach(), chosen))

        if rows.is_cpu and not torch.compiler.is_compiling() and not bool(fresh[2].isfinite().all()):
            raise _not_finite_error(columns)
        self._count(fresh)

    def merge(self, other: "Moments") -> None:
        """Merge the statistics of ``other``."""
        self._count((other.count, other.mean, other.var))

    def _count(self, fresh: tuple[Tensor, ...]) -> None:
        """Merge count, mean and variance into the buffers."""
        self.unlearned = 0
        with torch.no_grad():
            moved = tuple(upload(x, self.count.device) for x in fresh)
            own = (self.count, self.mean, self.var)
            for buffer, value in zip(own, _merge(own, moved), strict=True):
                buffer.copy_(value)

    def _rate(self, epsilon: float) -> Tensor:
        """One over the deviation, ``[*F]``."""
        return (self.var + epsilon).rsqrt().view(self.shape)

    def normalized(self, x: Tensor, epsilon: float, clip: float | None) -> Tensor:
        """``(x - mean) / sqrt(var + epsilon)`` within ``[-clip, clip]``; ``x`` is ``[..., *F]``; its dtype is kept."""
        # In float64 and cast once, which preserves differences of one part in a million.
        out = (x.double() - self.mean.view(self.shape)) * self._rate(epsilon)
        if clip is not None:
            out = out.clamp(-clip, clip)
        return out.to(x.dtype)

    def scaled(self, x: Tensor, epsilon: float, clip: float | None) -> Tensor:
        """``x / sqrt(var + epsilon)`` within ``[-clip, clip]``; the dtype of ``x`` is kept."""
        out = x * self._rate(epsilon)
        if clip is not None:
            out = out.clamp(-clip, clip)
        return out.to(x.dtype)


def _merge(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and variance of two parts together."""
    count, mean, var = one
    more, mean_of_more, var_of_more = other
    total = count + more
    # With no rows on either side the share is 0 and nothing changes.
    share = more / torch.where(total > 0, total, 1.0)
    apart = mean_of_more - mean

    spread = (1 - share) * apart.square()
    return total, mean + share * apart, (1 - share) * var + share * (var_of_more + spread)


def _count_moments(rows: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and variance of rows ``[N, *F]``, or of those that count."""
    wide = rows.double()
    if counted is None:
        count = wide.new_full((), float(len(wide)))
        mean = wide.mean(0)
        return count, mean, (wide - mean).square_().mean(0)

    # where(), not a product: rows that do not count may be NaN
    counted = counted.reshape(-1, *[1] * (rows.ndim - 1))
    count = counted.sum(dtype=torch.float64)
    least = count.clamp(min=1.0)
    mean = torch.where(counted, wide, 0.0).sum(0) / least
    return count, mean, torch.where(counted, wide - mean, 0.0).square_().sum(0) / least


def _not_finite_error(columns: tuple[tuple[str, Tensor, Tensor | None], ...]) -> ValueError:
    """The error for columns whose variance is not finite."""
    for name, rows, counted in columns:
        bad = ~rows.reshape(len(rows), -1).isfinite().all(1)
        if counted is not None:
            bad = bad & counted
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            numbers = rows[row].reshape(-1)
            first = numbers[~numbers.isfinite()][0].item()
            return ValueError(
                f"{name} must be finite, got {first} in row {row} of {len(rows)}: the running statistics are "
                "unchanged. Fix the env, or leave such rows out"
            )

    largest = max(rows.abs().max().item() for _, rows, _ in columns if len(rows))
    return ValueError(
        f"{columns[0][0]} must be small enough for float64 to hold its squares, got up to {largest:.3g}: "
        "scale it in the env"
    )
