"""One layer of a GRU over packed rows, and its gradient (:mod:`flatroll.modules.backends.recurrent_scan`)."""

from typing import Any

import torch
from torch import Tensor

from flatroll.modules.backends.scan_steps import (
    differentiable,
    states_before,
    step_widths,
    uninitialised,
)


@torch.library.custom_op("flatroll::gru_scan", mutates_args=())
def gru_scan(
    rows: Tensor,
    first: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    sizes: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute one GRU layer over packed rows.

    Args:
        rows: ``[N, input_size]`` in packed order.
        first: ``[M, H]``; its first ``sizes[0]`` rows are the states that runs start from, in rank order.
        w_ih, w_hh, b_ih, b_hh: weights of ``nn.GRU``; biases both or neither.
        sizes: int64 on the CPU, runs at each step; may be filled up with zeros.

    Returns:
        states after each row ``[N, H]``; gates ``[N, 4 H]``, for the gradient.
    """
    hidden, widths = w_hh.shape[1], step_widths(sizes)
    gates, out = uninitialised(len(rows), 4 * hidden, rows), uninitialised(len(rows), hidden, rows)
    # the input's part of all steps at once; the stock order r z n, rolled by one block, is n r z
    torch.mm(rows, w_ih.roll(hidden, 0).t(), out=gates[:, : 3 * hidden])
    gates[:, 3 * hidden :] = 0
    if b_ih is not None and b_hh is not None:
        gates[:, : 3 * hidden] += b_ih.roll(hidden)
        gates[:, hidden:] += b_hh
    weight = w_hh.t()
    # views of each gate, step by step
    n, r, z, u = (torch.split(block, widths) for block in torch.split(gates, hidden, 1))
    r_and_z = torch.split(gates[:, hidden : 3 * hidden], widths)
    from_state = torch.split(gates[:, hidden:], widths)
    after, state = torch.split(out, widths), first
    for t, width in enumerate(widths):
        state = state[:width]  # runs that have ended are the last ones: they are the shortest
        from_state[t].addmm_(state, weight)
        r_and_z[t].sigmoid_()
        n[t].addcmul_(r[t], u[t]).tanh_()
        torch.lerp(n[t], state, z[t], out=after[t])  # n + z * (state - n)
        state = after[t]
    return out, gates


@gru_scan.register_fake
def gru_shapes(rows: Tensor, first: Tensor, w_ih: Tensor, w_hh: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    hidden = w_hh.shape[1]
    return rows.new_empty(rows.shape[0], hidden), rows.new_empty(rows.shape[0], 4 * hidden)


@torch.library.custom_op("flatroll::gru_scan_backward", mutates_args=())
def gru_scan_backward(
    grad: Tensor,
    rows: Tensor,
    first: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    out: Tensor,
    gates: Tensor,
    sizes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of rows, initial states ``first``, w_ih, w_hh, b_ih and b_hh.

    The gradient of a gate is its slope times the gradient of the state after the row.
    """
    hidden, widths = w_hh.shape[1], step_widths(sizes)
    before = states_before(first, out, widths)
    n, r, z, u = torch.split(gates, hidden, 1)
    # d state / d gate sum, for all rows at once: a sigmoid s has the slope s - s * s, a tanh t has 1 - t * t
    slopes = uninitialised(len(gates), 4 * hidden, gates)
    d_n, d_r, d_z, d_u = torch.split(slopes, hidden, 1)
    torch.mul(n, n, out=d_n).neg_().add_(1).addcmul_(d_n, z, value=-1)  # (1 - n n)(1 - z)
    torch.mul(d_n, r, out=d_u)
    torch.mul(d_u, u, out=d_r).addcmul_(d_r, r, value=-1)  # d_n u r (1 - r)
    torch.sub(before, n, out=d_z).mul_(z).addcmul_(d_z, z, value=-1)  # (before - n) z (1 - z)
    by_step = torch.split(slopes.view(-1, 4, hidden), widths)
    to_state = torch.split(slopes[:, hidden:], widths)
    z_by_step, grads = torch.split(z, widths), torch.split(grad, widths)
    # back in time: the gradient of the state after a step, which the step's slopes turn into that before it; a first
    # state that no run starts from keeps its zeros
    state = grad.new_zeros(len(first), hidden)
    for t in reversed(range(len(widths))):
        now = state[: widths[t]]
        now += grads[t]
        by_step[t].mul_(now.unsqueeze(1))
        now.mul_(z_by_step[t]).addmm_(to_state[t], w_hh)
    d_rows, d_ih, d_hh, b_ih, b_hh = gru_gradients(slopes, rows, before, w_ih)
    return d_rows, state, d_ih, d_hh, b_ih, b_hh


def gru_gradients(
    slopes: Tensor, rows: Tensor, before: Tensor, w_ih: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of rows, weights and biases from those of the gates (``slopes``)."""
    hidden = before.shape[1]
    # the input is read by n r z, the state by r z u; rolling back gives the stock order of the weights
    from_rows, summed = slopes[:, : 3 * hidden], slopes.sum(0)
    return (
        from_rows @ w_ih.roll(hidden, 0),
        (from_rows.t() @ rows).roll(-hidden, 0),
        slopes[:, hidden:].t() @ before,
        summed[: 3 * hidden].roll(-hidden),
        summed[hidden:].clone(),
    )


@gru_scan_backward.register_fake
def gru_gradient_shapes(
    grad: Tensor, rows: Tensor, first: Tensor, w_ih: Tensor, w_hh: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    bias = w_hh.new_empty(w_hh.shape[0])
    d_rows, d_first, d_ih, d_hh = (x.new_empty(x.shape) for x in (rows, first, w_ih, w_hh))
    return d_rows, d_first, d_ih, d_hh, bias, torch.empty_like(bias)


differentiable(gru_scan, gru_scan_backward, 1)
