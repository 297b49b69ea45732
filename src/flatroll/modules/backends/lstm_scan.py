"""One layer of an LSTM over packed rows, and its gradient (:mod:`flatroll.modules.backends.recurrent_scan`)."""

from typing import Any

import torch
from torch import Tensor

from flatroll.modules.backends.scan_steps import (
    differentiable,
    states_before,
    step_widths,
    uninitialised,
)


@torch.library.custom_op("flatroll::lstm_scan", mutates_args=())
def lstm_scan(
    rows: Tensor,
    first: Tensor,
    first_cell: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    sizes: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one LSTM layer over packed rows; arguments as for ``gru_scan.gru_scan``.

    Returns:
        outputs and cells after each row, each ``[N, H]``; gates ``[N, 4 H]``, for the gradient.
    """
    hidden, widths = w_hh.shape[1], step_widths(sizes)
    out, cells = uninitialised(len(rows), hidden, rows), uninitialised(len(rows), hidden, rows)
    # the input's part of all steps at once; the stock order i f g o, rolled by one block, is o i f g
    gates = torch.mm(rows, w_ih.roll(hidden, 0).t(), out=uninitialised(len(rows), 4 * hidden, rows))
    if b_ih is not None and b_hh is not None:
        gates += (b_ih + b_hh).roll(hidden)
    weight = w_hh.roll(hidden, 0).t()
    # views of each gate, step by step
    o, i, f, g = (torch.split(block, widths) for block in torch.split(gates, hidden, 1))
    o_i_f, by_step = torch.split(gates[:, : 3 * hidden], widths), torch.split(gates, widths)
    outs, states = torch.split(out, widths), torch.split(cells, widths)
    state, cell = first, first_cell
    for t, width in enumerate(widths):
        # runs that have ended are the last ones: they are the shortest
        by_step[t].addmm_(state[:width], weight)
        o_i_f[t].sigmoid_()
        g[t].tanh_()
        cell = torch.mul(f[t], cell[:width], out=states[t]).addcmul_(i[t], g[t])
        state = torch.tanh(cell, out=outs[t]).mul_(o[t])
    return out, cells, gates


@lstm_scan.register_fake
def lstm_shapes(
    rows: Tensor, first: Tensor, first_cell: Tensor, w_ih: Tensor, w_hh: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = w_hh.shape[1]
    out = rows.new_empty(rows.shape[0], hidden)
    return out, torch.empty_like(out), rows.new_empty(rows.shape[0], 4 * hidden)


@torch.library.custom_op("flatroll::lstm_scan_backward", mutates_args=())
def lstm_scan_backward(
    grad: Tensor | None,
    grad_cell: Tensor | None,
    rows: Tensor,
    first: Tensor,
    first_cell: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    out: Tensor,
    cells: Tensor,
    gates: Tensor,
    sizes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of rows, first, first_cell, w_ih, w_hh and bias (the same one for both biases).

    The gradient of ``i``, ``f``, ``g`` is their slope times the gradient of the cell after the row, that of ``o``
    its slope times the gradient of the output.
    """
    hidden, widths = w_hh.shape[1], step_widths(sizes)
    o, i, f, g = torch.split(gates, hidden, 1)
    # slopes of the gate sums, for all rows at once: a sigmoid s has the slope s - s * s, a tanh t has 1 - t * t
    slopes = uninitialised(len(gates), 4 * hidden, gates)
    d_o, d_i, d_f, d_g = torch.split(slopes, hidden, 1)
    torch.mul(g, i, out=d_i).addcmul_(d_i, i, value=-1)  # g i (1 - i)
    torch.mul(states_before(first_cell, cells, widths), f, out=d_f).addcmul_(d_f, f, value=-1)
    torch.mul(g, g, out=d_g).neg_().add_(1).mul_(i)
    through = cells.tanh()
    torch.mul(through, o, out=d_o).addcmul_(d_o, o, value=-1)
    through.mul_(through).neg_().add_(1).mul_(o)  # what the cell gives to the output
    d_i_f_g = torch.split(slopes.view(-1, 4, hidden)[:, 1:], widths)
    by_step, d_o_by_step, f_by_step, passed = (torch.split(x, widths) for x in (slopes, d_o, f, through))
    weight = w_hh.roll(hidden, 0)
    grads = None if grad is None else torch.split(grad, widths)
    cell_grads = None if grad_cell is None else torch.split(grad_cell, widths)
    # back in time: the gradients of output and cell after a step become those before it, in place; first states that
    # no run starts from keep their zeros
    state, cell = cells.new_zeros(len(first), hidden), cells.new_zeros(len(first), hidden)
    for t in reversed(range(len(widths))):
        now, now_cell = state[: widths[t]], cell[: widths[t]]
        if grads is not None:
            now += grads[t]
        if cell_grads is not None:
            now_cell += cell_grads[t]
        now_cell.addcmul_(now, passed[t])
        d_o_by_step[t].mul_(now)
        d_i_f_g[t].mul_(now_cell.unsqueeze(1))
        torch.mm(by_step[t], weight, out=now)
        now_cell.mul_(f_by_step[t])
    d_rows, d_ih, d_hh, bias = lstm_gradients(slopes, rows, states_before(first, out, widths), w_ih)
    return d_rows, state, cell, d_ih, d_hh, bias


def lstm_gradients(
    slopes: Tensor, rows: Tensor, before: Tensor, w_ih: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of rows, w_ih, w_hh and bias (one for both), given those of the gates."""
    hidden = before.shape[1]
    return (
        slopes @ w_ih.roll(hidden, 0),
        (slopes.t() @ rows).roll(-hidden, 0),
        (slopes.t() @ before).roll(-hidden, 0),
        slopes.sum(0).roll(-hidden),
    )


@lstm_scan_backward.register_fake
def lstm_gradient_shapes(
    grad: Any,
    grad_cell: Any,
    rows: Tensor,
    first: Tensor,
    first_cell: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_rows, d_first, d_cell, d_ih, d_hh = (
        x.new_empty(x.shape) for x in (rows, first, first_cell, w_ih, w_hh)
    )
    return d_rows, d_first, d_cell, d_ih, d_hh, w_hh.new_empty(w_hh.shape[0])


differentiable(lstm_scan, lstm_scan_backward, 2)
