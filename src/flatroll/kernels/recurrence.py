"""The linear recurrence of memories, forward in time within the runs of a column, from a state of each run's own.

As in :mod:`flatroll.kernels.scan` there are two forms. The loops at the end make one pass over the rows on the CPU, and
one backward in time for all gradients. Everything else (devices, other dtypes, ``torch.compile``, second derivatives)
is the segmented scan on flipped rows.
"""

from collections.abc import Callable, Sequence
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


def selective_recurrence(
    step: Tensor,
    written: Tensor,
    write: Tensor,
    read: Tensor,
    rates: Tensor,
    first: Tensor,
    starts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute ``h[i] = exp(-step[i] rates) h[i - 1] + write[i] written[i]`` and what is read, ``sum of read[i] h[i]``.

    It is :func:`linear_recurrence` with factors and summands that are made on the way, and have no gradients of their
    own size: half of its time. Differentiable, also twice.

    Args:
        step, written: ``[N, H]``.
        write, read: ``[N, n]``.
        rates: ``[n, H]``.
        first: ``[N, n, H]``, read at first rows only.
        starts: bool ``[N]``, True at the first row of each run, row 0 among them.

    Returns:
        what is read ``[N, H]``, and ``h`` ``[N, n, H]``.
    """
    columns = (step, written, write, read, rates, first)
    plain = all(type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu for x in (*columns, starts))
    one_dtype = all(x.dtype is step.dtype for x in columns)
    if plain and one_dtype and step.dtype in (torch.float32, torch.float64) and not is_tracing():
        rows = starts.nonzero().squeeze(1)
        runs = first.index_select(0, rows)
        result: tuple[Tensor, Tensor] = _Selective.apply(step, written, write, read, rates, runs, starts)  # type: ignore[no-untyped-call]
        return result

    return _in_parts(*columns, starts)


def _in_parts(
    step: Tensor, written: Tensor, write: Tensor, read: Tensor, rates: Tensor, first: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """The selective recurrence by operators of torch and the other recurrence."""
    factor = (step.unsqueeze(1) * -rates).exp()
    h = linear_recurrence(factor, written.unsqueeze(1) * write.unsqueeze(2), first, starts)
    return torch.bmm(read.unsqueeze(1).to(h.dtype), h).squeeze(1), h


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
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        a, b, first, starts, h = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            return *_by_operators(_by_scan, (a, b, first), starts, (grad,)), None

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


class _Selective(torch.autograd.Function):
    """The selective recurrence by one loop, and all its gradients by another."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Tensor,
        written: Tensor,
        write: Tensor,
        read: Tensor,
        rates: Tensor,
        first: Tensor,
        starts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        shape = (len(step), *rates.shape)
        factor = _uninitialised(step, shape)
        torch.mul(step.unsqueeze(1), -rates, out=factor).exp_()
        h = _uninitialised(step, shape)
        seen = _uninitialised(step)
        inputs = [_rows_of(x) for x in (written, write, read)]
        runs = first.detach().contiguous().numpy()
        machine_code(_selective_loop)(factor.numpy(), *inputs, runs, starts.numpy(), h.numpy(), seen.numpy())

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(step, written, write, read, rates, first, starts, factor, h)
        return seen, h

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        of_seen, of_h = grad_outputs
        *inputs, starts, factor, h = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            return *_by_operators(_in_parts, inputs, starts, (of_seen, of_h)), None

        step, written, write, read, rates, first = inputs
        if of_seen is None:
            of_seen = torch.zeros_like(step)
        from_states = np.empty((0, 0, 0), h.numpy().dtype)
        if of_h is not None:
            from_states = of_h.contiguous().numpy()

        results = [_uninitialised(x, x.shape) for x in (step, written, write, read)]
        of_rates = torch.zeros(rates.shape, dtype=torch.float64)
        of_first = _uninitialised(first)
        columns = (*(_rows_of(x) for x in (step, written, write, read)), rates.detach().contiguous().numpy())
        machine_code(_selective_gradient_loop, sums_in_any_order=True)(
            columns,
            (factor.numpy(), h.numpy(), first.detach().contiguous().numpy()),
            starts.numpy(),
            (_rows_of(of_seen), from_states),
            tuple(x.numpy() for x in results),
            of_rates.numpy(),
            of_first.numpy(),
        )
        return *results, of_rates.to(rates.dtype), of_first, None


def _by_operators(
    compute: Callable[..., Any], inputs: Sequence[Tensor], starts: Tensor, grads: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The gradients of ``compute(*inputs, starts)`` by operators that have gradients of their own.

    The last input are the first states of runs, ``[R, *F]``; ``compute`` takes one for each row.
    """
    *others, first = (x if x.requires_grad else x.detach().requires_grad_() for x in inputs)
    run = starts.cumsum(0) - 1
    outputs = compute(*others, first.index_select(0, run), starts)
    if isinstance(outputs, Tensor):
        outputs = (outputs,)

    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    return torch.autograd.grad(
        [out for out, _ in pairs],
        [*others, first],
        [grad for _, grad in pairs],
        create_graph=True,
        materialize_grads=True,
    )


def _uninitialised(like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """A contiguous tensor of this dtype and shape (default: that of ``like``), in NumPy's memory of huge pages."""
    if shape is None:
        shape = like.shape
    number = torch.empty(0, dtype=like.dtype).numpy().dtype
    return torch.from_numpy(np.empty(shape, number))


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


def _selective_loop(
    factor: Array,
    written: Array,
    write: Array,
    read: Array,
    first: Array,
    starts: Array,
    h: Array,
    seen: Array,
) -> None:
    """Fill ``h [N, n, H]`` and what is read of it, ``seen [N, H]``; ``first [R, n, H]`` are the states of runs."""
    rows, parts, features = h.shape
    run = 0
    for i in range(rows):
        total = seen[i]
        total[:] = 0
        new = written[i]
        before = h[i - 1]
        if starts[i]:
            before = first[run]
            run += 1

        for k in range(parts):
            put = write[i, k]
            taken = read[i, k]
            now = h[i, k]
            kept = before[k]
            fade = factor[i, k]
            for f in range(features):
                state = fade[f] * kept[f] + put * new[f]
                now[f] = state
                total[f] += taken * state


def _selective_gradient_loop(
    columns: Any,
    states: Any,
    starts: Array,
    grads: Any,
    results: Any,
    of_rates: Array,
    of_first: Array,
) -> None:
    """Fill the gradients, from the last row to the first. An empty gradient of the states is none."""
    step, written, write, read, rates = columns
    factor, h, first = states
    from_seen, from_states = grads
    of_step, of_written, of_write, of_read = results

    rows, parts, features = h.shape
    zero = h.dtype.type(0)
    run = first.shape[0] - 1
    through = np.zeros((parts, features), h.dtype)  # what the row ahead of it hands to a row
    for i in range(rows - 1, -1, -1):
        incoming = from_seen[i]
        new = written[i]
        size = step[i]
        of_size = of_step[i]
        of_new = of_written[i]
        of_size[:] = 0
        of_new[:] = 0
        before = h[i - 1]
        if starts[i]:
            before = first[run]

        for k in range(parts):
            ahead = through[k]
            if from_states.shape[0] > 0:
                ahead += from_states[i, k]
            now = h[i, k]
            kept = before[k]
            fade = factor[i, k]
            rate = rates[k]
            of_rate = of_rates[k]
            put = write[i, k]
            taken = read[i, k]
            of_put = zero
            of_taken = zero
            for f in range(features):
                total = ahead[f] + taken * incoming[f]
                of_taken += incoming[f] * now[f]
                of_put += total * new[f]
                of_new[f] += total * put
                carried = total * fade[f]
                faded = carried * kept[f]
                of_size[f] -= faded * rate[f]
                of_rate[f] -= faded * size[f]
                ahead[f] = carried
            of_write[i, k] = of_put
            of_read[i, k] = of_taken

        if starts[i]:
            of_first[run] = through
            through[:] = 0
            run -= 1
