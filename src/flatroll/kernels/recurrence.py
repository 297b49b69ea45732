"""The linear recurrence of memories, forward in time within the runs of a column, from a state of each run's own.

As in :mod:`flatroll.kernels.scan` there are two forms. The loops at the end make one pass over the rows on the CPU, and
one backward in time for all gradients. Everything else (devices, other dtypes, ``torch.compile``, second derivatives)
is the segmented scan on flipped rows.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatroll.kernels.scan import Array, is_tracing, machine_code, segmented_scan

_COMPILED_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
#: Sums over all rows are kept in these.
_DOUBLE = {
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}


def linear_recurrence(a: Tensor, b: Tensor, first: Tensor, starts: Tensor) -> Tensor:
    """Compute ``h[i] = a[i] * h[i - 1] + b[i]`` in each run, with ``first[i]`` for ``h[i - 1]`` at its first row.

    Differentiable in ``a``, ``b`` and ``first``, also twice. Nothing crosses from one run to the next, and ``first`` is
    read at first rows only.

    Args:
        a: factors, ``[N, *F]`` or, the same for all rows, ``[1, *F]``.
        b: summands ``[N, *F]``, floating or complex.
        first: ``[N, *F]``.
        starts: bool ``[N]``, True at the first row of each run, row 0 among them.

    Returns:
        ``h``, of the shape and dtype of ``b``.

    >>> starts = torch.tensor([True, False, True])
    >>> linear_recurrence(torch.full((1, 1), 0.5), torch.ones(3, 1), torch.full((3, 1), 4.0), starts).flatten()
    tensor([3.0000, 2.5000, 3.0000])
    """
    columns = (a, b, first)
    plain = all(type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu for x in (*columns, starts))
    if plain and b.dtype in _COMPILED_DTYPES and not is_tracing():
        rows = starts.nonzero().squeeze(1)
        h: Tensor = _Recurrence.apply(a.to(b.dtype), b, first.index_select(0, rows).to(b.dtype), starts)  # type: ignore[no-untyped-call]
        return h

    return _by_scan(a, b, first, starts)


def _by_scan(a: Tensor, b: Tensor, first: Tensor, starts: Tensor) -> Tensor:
    """The recurrence by the segmented scan, which runs backward in time: on flipped rows a first row is an end."""
    before = torch.where(starts.view(-1, *[1] * (b.ndim - 1)), first, 0)
    summand = b + a * before
    factor = a
    if len(a) > 1:
        factor = a.flip(0)
    return segmented_scan(factor, summand.flip(0), starts.flip(0)).flip(0)


class _Recurrence(torch.autograd.Function):
    """The recurrence by one loop, and all its gradients by another."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, first: Tensor, starts: Tensor) -> Tensor:
        h = _uninitialised(b)
        arrays = [_rows_of(x) for x in (a, b, first)]
        machine_code(_forward_loop)(*arrays, starts.numpy(), _rows_of(h))
        ctx.save_for_backward(a, b, first, starts, h)
        return h

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (grad,) = grad_outputs
        a, b, first, starts, h = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            of_a, of_b, of_first = _differentiable_gradients(a, b, first, starts, grad)
            return of_a, of_b, of_first, None

        of_b = _uninitialised(b)
        of_first = torch.empty_like(first, memory_format=torch.contiguous_format)
        if len(a) == len(b):
            of_a = _uninitialised(b)
        else:
            of_a = torch.zeros(a.shape, dtype=_DOUBLE[a.dtype])

        arrays = [_rows_of(x) for x in (a, h, first)]
        results = [_rows_of(x) for x in (grad, of_b, of_a, of_first)]
        machine_code(_gradient_loop)(*arrays, starts.numpy(), *results)
        return of_a.to(a.dtype), of_b, of_first, None


def _differentiable_gradients(
    a: Tensor, b: Tensor, first: Tensor, starts: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of factors, summands and first states ``[R, *F]``, by operators with gradients of their own."""
    run = starts.cumsum(0) - 1
    before = first.index_select(0, run)
    inputs = (a, b, before)
    if not all(x.requires_grad for x in inputs):
        inputs = tuple(x if x.requires_grad else x.detach().requires_grad_() for x in inputs)

    h = _by_scan(*inputs, starts)
    of_a, of_b, of_before = torch.autograd.grad(h, inputs, grad, create_graph=True)
    return of_a, of_b, torch.zeros_like(first).index_add(0, run, of_before)


def _uninitialised(like: Tensor) -> Tensor:
    """A contiguous tensor of this shape and dtype, in NumPy's memory, which uses huge pages."""
    number = torch.empty(0, dtype=like.dtype).numpy().dtype
    return torch.from_numpy(np.empty(like.shape, number))


def _rows_of(column: Tensor) -> Array:
    """A column ``[N, *F]`` as a contiguous array ``[N, F]``, which shares its memory if it can."""
    array: Array = column.detach().resolve_conj().resolve_neg().contiguous().flatten(1).numpy()
    return array


# All arrays are contiguous. Those of factors may have one row for all; `moves` is 0 then.


def _forward_loop(a: Array, b: Array, first: Array, starts: Array, h: Array) -> None:
    """Fill ``h [N, F]`` from factors, summands ``b [N, F]`` and the states ``first [R, F]`` that runs begin with."""
    rows, features = b.shape
    moves = 1 if a.shape[0] == rows else 0
    run = 0
    for i in range(rows):
        factor = a[i * moves]
        summand = b[i]
        after = h[i]
        if starts[i]:
            before = first[run]
            run += 1
        else:
            before = h[i - 1]
        for f in range(features):
            after[f] = summand[f] + factor[f] * before[f]


def _gradient_loop(
    a: Array, h: Array, first: Array, starts: Array, grad: Array, of_b: Array, of_a: Array, of_first: Array
) -> None:
    """Fill the gradients, from the last row to the first; ``grad [N, F]`` is that of ``h``.

    ``of_b[i] = grad[i] + conj(a[i + 1]) * of_b[i + 1]``, and ``of_a[i] = of_b[i] * conj(h[i - 1])``.
    """
    rows, features = h.shape
    moves = 1 if a.shape[0] == rows else 0
    run = first.shape[0] - 1
    through = np.zeros(features, h.dtype)  # what the row ahead of it hands to a row
    for i in range(rows - 1, -1, -1):
        factor = a[i * moves]
        incoming = grad[i]
        of_summand = of_b[i]
        of_factor = of_a[i * moves]
        if starts[i]:
            before = first[run]
        else:
            before = h[i - 1]

        if moves == 1:
            for f in range(features):
                total = incoming[f] + through[f]
                of_summand[f] = total
                of_factor[f] = total * np.conj(before[f])
                through[f] = total * np.conj(factor[f])
        else:
            for f in range(features):
                total = incoming[f] + through[f]
                of_summand[f] = total
                of_factor[f] += total * np.conj(before[f])
                through[f] = total * np.conj(factor[f])

        if starts[i]:
            of_first[run] = through
            through[:] = 0
            run -= 1
