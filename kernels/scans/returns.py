"""The recursions of returns and advantages: the segmented scan, its summand computed on the way.

On the CPU, float32 and float64 columns of one dtype take one fused Numba pass. Everything else, gradients and
``torch.compile`` take plain torch around :func:`~flatroll.kernels.segmented_scan`, without a host sync.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatroll.kernels.scans.scan import empty_like, runs_compiled, segmented_scan, zero_strided


def residual_scan(
    gamma: Tensor | float,
    decay: Tensor | float,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ends: Tensor,
    *,
    longest: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan temporal-difference residuals: ``b[i] = reward[i] + gamma * next_value[i] - value[i]``.

    ``next_value`` counts as 0 where ``terminated``. The same as :func:`segmented_scan` over ``b`` with the factor
    ``decay``; one pass takes 0.6 of the time of four.

    Args:
        gamma, decay: a number or a tensor ``[N]``.
        reward, value, next_value: floating tensors ``[N]``.
        terminated, ends: bool tensors ``[N]``. The last row always ends a run.
        longest: as in :func:`segmented_scan`.

    Returns:
        the scan, and the scan plus ``value``, both ``[N]``.

    Example:
        >>> import torch
        >>> one, no = torch.ones(3), torch.zeros(3, dtype=torch.bool)
        >>> residual_scan(1.0, 0.5, one, one, one, no, no)
        (tensor([1.7500, 1.5000, 1.0000]), tensor([2.7500, 2.5000, 2.0000]))
    """
    columns = (reward, value, next_value)
    if _fuses((gamma, decay), columns, (terminated, ends)):
        from flatroll.kernels.scans import returns_numba

        out = empty_like(reward), empty_like(reward)
        returns_numba.residual_scan(*_arrays((gamma, decay), columns, (terminated, ends), out))
        return out
    residual = reward + gamma * torch.where(terminated, 0.0, next_value) - value
    scanned = segmented_scan(decay, residual, ends, longest=longest)
    return scanned, scanned + value


def return_scan(
    gamma: Tensor | float,
    lmbda: Tensor | float,
    reward: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ends: Tensor,
    *,
    longest: int | None = None,
) -> Tensor:
    """The lambda-return ``y[i] = reward[i] + gamma * ((1 - lmbda) * next_value[i] + lmbda * y[i + 1])``.

    At the end of a run ``lmbda`` counts as 0. ``next_value`` counts as 0 where ``terminated``, and is not read
    where its factor is 0.

    Args:
        gamma, lmbda: a number or a tensor ``[N]``.
        reward, next_value: floating tensors ``[N]``.
        terminated, ends: bool tensors ``[N]``. The last row always ends a run.
        longest: as in :func:`segmented_scan`.

    Returns:
        tensor ``[N]``.

    Example:
        >>> import torch
        >>> one, no = torch.ones(3), torch.zeros(3, dtype=torch.bool)
        >>> return_scan(0.5, 1.0, one, 4 * one, no, no)
        tensor([2.2500, 2.5000, 3.0000])
    """
    if _fuses((gamma, lmbda), (reward, next_value), (terminated, ends)):
        from flatroll.kernels.scans import returns_numba

        returns = empty_like(reward)
        returns_numba.return_scan(
            *_arrays((gamma, lmbda), (reward, next_value), (terminated, ends), (returns,))
        )
        return returns
    share = torch.where(_closed(ends), 1.0, 1.0 - torch.as_tensor(lmbda, dtype=reward.dtype))
    bootstrap = torch.where(terminated | (share == 0.0), 0.0, next_value) * share
    return segmented_scan(gamma * lmbda, reward + gamma * bootstrap, ends, longest=longest)


def vtrace_scan(
    gamma: Tensor | float,
    rho: Tensor,
    c: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ends: Tensor,
    *,
    longest: int | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and advantages.

    ``target[i] = value[i] + rho[i] * (reward[i] + gamma * next_value[i] - value[i])
    + gamma * c[i] * (target[i + 1] - value[i + 1])``, the last summand inside a run only, and
    ``advantage[i] = rho[i] * (reward[i] + gamma * target[i + 1] - value[i])``, with ``next_value[i]`` for
    ``target[i + 1]`` at the end of a run. ``next_value`` counts as 0 where ``terminated``.

    Args:
        gamma: a number or a tensor ``[N]``.
        rho, c: clipped importance weights ``[N]``.
        reward, value, next_value: floating tensors ``[N]``.
        terminated, ends: bool tensors ``[N]``. The last row always ends a run.
        longest: as in :func:`segmented_scan`.

    Returns:
        advantage and target, both ``[N]``.

    Example:
        >>> import torch
        >>> one, no = torch.ones(3), torch.zeros(3, dtype=torch.bool)
        >>> vtrace_scan(1.0, one, one, one, one, one, no, no)
        (tensor([3., 2., 1.]), tensor([4., 3., 2.]))
    """
    columns = (reward, value, next_value)
    if _fuses((gamma, rho, c), columns, (terminated, ends)):
        from flatroll.kernels.scans import returns_numba

        out = empty_like(reward), empty_like(reward)
        returns_numba.vtrace_scan(*_arrays((gamma, rho, c), columns, (terminated, ends), out))
        return out
    bootstrap = torch.where(terminated, 0.0, next_value)
    residual = rho * (reward + gamma * bootstrap - value)
    target = value + segmented_scan(gamma * c, residual, ends, longest=longest)
    following = torch.where(_closed(ends), bootstrap, torch.cat([target[1:], target[-1:]]))
    return rho * (reward + gamma * following - value), target


def zeroed(column: Tensor, flag: Tensor) -> Tensor:
    """``column [*B, *F]`` with 0 in the rows where ``flag [*B]`` is True, whatever stands there; a new tensor.

    >>> import torch
    >>> zeroed(torch.tensor([[1.0], [float("nan")]]), torch.tensor([False, True])).tolist()
    [[1.0], [0.0]]
    """
    if column.numel() and runs_compiled(column, flag):
        from flatroll.kernels.scans import returns_numba

        rows, out = (flag.numel(), -1), empty_like(column)
        arrays = (column.detach().reshape(rows).contiguous(), flag.reshape(-1).contiguous(), out.view(rows))
        returns_numba.zeroed(*(x.numpy() for x in arrays))
        return out
    return torch.where(flag.reshape(*flag.shape, *[1] * (column.ndim - flag.ndim)), 0.0, column)


def _fuses(factors: Sequence[Tensor | float], columns: Sequence[Tensor], flags: Sequence[Tensor]) -> bool:
    """Whether one Numba pass may read these arrays now."""
    tensors = [x for x in factors if isinstance(x, Tensor)]
    return runs_compiled(*columns, *flags, *tensors) and len({x.dtype for x in columns}) == 1


def _arrays(
    factors: Sequence[Tensor | float],
    columns: Sequence[Tensor],
    flags: Sequence[Tensor],
    out: Sequence[Tensor],
) -> list[Any]:
    """Everything as NumPy arrays, in the order given; no copies of contiguous tensors."""
    read = [x.detach().contiguous().numpy() for x in (*columns, *flags)]
    return [*(zero_strided(x, columns[0]) for x in factors), *read, *(x.numpy() for x in out)]


def _closed(ends: Tensor) -> Tensor:
    """``ends`` with the last row True."""
    return torch.cat([ends[:-1], torch.ones_like(ends[-1:])])
