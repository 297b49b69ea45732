"""The segmented scan: the one recursion behind every return and advantage."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

_COMPILED_DTYPES = (torch.float32, torch.float64)


def segmented_scan(a: Tensor | float, b: Tensor, ends: Tensor, *, longest: int | None = None) -> Tensor:
    """Sum each run backward in time: ``y[i] = b[i] + a[i] * y[i + 1]``, ``y[i] = b[i]`` where it ends.

    Nothing crosses the end of a run, NaN and inf included. Differentiable in ``a`` and ``b`` (twice, too):
    the gradient is the same scan run forward in time, so it keeps two arrays and no intermediate passes.

    On the CPU, float32 and float64 run one Numba loop over the rows; everything else, and ``torch.compile``,
    runs log2(longest run) passes of plain torch without a host sync.

    Args:
        a: decay; a number, a tensor ``[N]`` (one per row) or one that broadcasts to ``b``.
        b: floating tensor ``[N, *F]``.
        ends: bool tensor ``[N]``, True on the last row of each run. The very last row always ends one.
        longest: an upper bound on the rows of a run, if known: it saves passes of the torch form and changes
            no result. A run longer than it is summed wrongly. Default: ``N``.

    Returns:
        tensor of the shape, dtype and device of ``b``.

    Raises:
        TypeError: ``b`` is not floating, or ``ends`` not bool.
        ValueError: shapes that do not fit.

    Example:
        >>> import torch
        >>> ends = torch.tensor([False, False, True, False, True])
        >>> segmented_scan(0.5, torch.ones(5), ends)
        tensor([1.7500, 1.5000, 1.0000, 1.5000, 1.0000])

    References:
        G. E. Blelloch, Prefix sums and their applications, 1990.
    """
    a = _checked(a, b, ends)
    if b.numel() == 0:
        return b.clone()
    rows = b.shape[0] if longest is None else min(longest, b.shape[0])
    if numberless():
        return _doubling(a, b, ends, rows)
    if torch.is_grad_enabled() and (b.requires_grad or (isinstance(a, Tensor) and a.requires_grad)):
        y: Tensor = _Scan.apply(a, b, ends, rows)  # type: ignore[no-untyped-call]  # torch's own
        return y
    return _evaluate(a, b, ends, rows)


def _checked(a: Tensor | float, b: Tensor, ends: Tensor) -> Tensor | float:
    """``a`` in a shape that broadcasts to ``b`` from the left; raises what :func:`segmented_scan` names."""
    if not b.is_floating_point():
        raise TypeError(f"b must be a floating tensor, got {b.dtype}: cast it, e.g. with .float()")
    if ends.dtype is not torch.bool:
        raise TypeError(f"ends must be bool, got {ends.dtype}: cast it with .bool()")
    if b.ndim < 1 or ends.shape != b.shape[:1]:
        raise ValueError(
            f"ends must have shape [N] for b of shape [N, *F], got {tuple(ends.shape)} for {tuple(b.shape)}"
        )
    if not isinstance(a, Tensor):
        return float(a)
    if a.ndim == 1 and a.shape == b.shape[:1]:
        a = a.reshape(-1, *[1] * (b.ndim - 1))
    if a.ndim > b.ndim or any(n not in (1, m) for n, m in zip(a.shape[::-1], b.shape[::-1], strict=False)):
        raise ValueError(
            "a must be a number, a tensor [N] or one that broadcasts to b, "
            f"got {tuple(a.shape)} for b of shape {tuple(b.shape)}"
        )
    return a.to(b.dtype)


def numberless() -> bool:
    """Whether tensors stand for others: inside ``torch.compile``, or a transform of ``torch.func``."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def runs_compiled(*tensors: Tensor) -> bool:
    """Whether these tensors are plain CPU arrays that Numba may read now."""
    if numberless():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    plain = all(type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" for x in tensors)
    return plain and tensors[0].dtype in _COMPILED_DTYPES


def zero_strided(a: Tensor | float, b: Tensor) -> Any:
    """``a`` as an array of the shape of ``b`` that repeats its numbers by zero strides, never by a copy."""
    if isinstance(a, Tensor):
        return a.detach().to(b.dtype).expand(b.shape).numpy()
    number = np.array([a], np.float32 if b.dtype is torch.float32 else np.float64)
    return np.ndarray(b.shape, number.dtype, number, strides=(0,) * b.ndim)


def empty_like(b: Tensor) -> Tensor:
    """An uninitialised CPU tensor of the shape and dtype of ``b``.

    NumPy asks the system for huge pages, torch does not: at tens of megabytes the first touch of an array from
    ``torch.empty`` costs twice what a scan does.
    """
    return torch.from_numpy(np.empty(b.shape, np.float32 if b.dtype is torch.float32 else np.float64))


def _evaluate(a: Tensor | float, b: Tensor, ends: Tensor, longest: int) -> Tensor:
    """The scan with no gradient, in the form that suits the device."""
    if not runs_compiled(b, ends, *([a] if isinstance(a, Tensor) else [])):
        return _doubling(a, b, ends, longest)
    from flatroll.kernels.scans import scan_numba

    y = empty_like(b)
    flat = (b.shape[0], math.prod(b.shape[1:]))
    summands, closed = b.detach().reshape(flat).contiguous(), ends.contiguous()
    scan_numba.scan(zero_strided(a, b).reshape(flat), summands.numpy(), closed.numpy(), y.view(flat).numpy())
    return y


def _doubling(a: Tensor | float, b: Tensor, ends: Tensor, longest: int) -> Tensor:
    """The scan in plain torch: after the pass of stride ``k``, a row holds the sum over ``2 k`` rows."""
    shape = (-1, *[1] * (b.ndim - 1))
    open_ = torch.cat([~ends[:-1], torch.zeros_like(ends[-1:])]).view(shape)  # its run goes on k rows further
    row_wise = isinstance(a, Tensor) and a.ndim == b.ndim and a.shape[0] > 1
    k = 1
    while k < longest:
        head = a[:-k] if row_wise else a  # type: ignore[index]  # a tensor where row_wise
        carried = torch.where(open_[:-k], head * b[k:], 0.0)
        b = torch.cat([b[:-k] + carried, b[-k:]])
        a = torch.cat([head * a[k:], a[-k:]]) if row_wise else a * a  # type: ignore[index]
        open_ = torch.cat([open_[:-k] & open_[k:], open_[-k:]])
        k *= 2
    return b


class _Scan(torch.autograd.Function):
    """The scan and its gradient: ``db[i] = dy[i] + a[i - 1] * db[i - 1]``, ``da[i] = db[i] * y[i + 1]``."""

    @staticmethod
    def forward(ctx: Any, a: Tensor | float, b: Tensor, ends: Tensor, longest: int) -> Tensor:
        y = _evaluate(a, b, ends, longest)
        ctx.longest, ctx.number = longest, None if isinstance(a, Tensor) else a
        ctx.save_for_backward(y, ends, *([a] if isinstance(a, Tensor) else []))
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (grad,) = grad_outputs
        y, ends, *rest = ctx.saved_tensors
        a = rest[0] if rest else ctx.number
        row_wise = bool(rest) and a.ndim == y.ndim and a.shape[0] > 1
        before = torch.cat([a[:1], a[:-1]]).flip(0) if row_wise else a
        first = torch.cat([torch.ones_like(ends[:1]), ends[:-1]]).flip(0)
        db = segmented_scan(before, grad.flip(0), first, longest=ctx.longest).flip(0)
        if not ctx.needs_input_grad[0]:
            return None, db, None, None
        inside = ~ends[:-1].view(-1, *[1] * (y.ndim - 1))
        da = torch.cat([torch.where(inside, db[:-1] * y[1:], 0.0), torch.zeros_like(y[-1:])])
        return da.sum_to_size(a.shape), db, None, None
