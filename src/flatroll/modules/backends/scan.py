"""The backend ``"scan"``: custom operators for GRU and LSTM over packed rows, with hand-written gradients.

Everything independent of the previous step is computed for all rows at once: the product with the input, the slopes
of the gates, the gradients of the weights. Each step is one matrix product and a few in-place elementwise passes. The
operators' shapes depend only on those of their arguments, so ``torch.compile`` traces them into one graph. They are
differentiable once.

The gates are column blocks of ``[N, 4 H]``; in the order of the stock networks, rolled by one block:

* GRU: ``n r z u``, where ``u`` is the hidden part of ``n`` before the reset gate; the input is read by ``n r z``, the
  state by ``r z u``;
* LSTM: ``o i f g``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatroll.layout.transfers import upload
from flatroll.modules.backends.packing import RunIndex, States, dense, run_index


def uninitialised(rows: int, columns: int, like: Tensor) -> Tensor:
    """An uninitialised tensor ``[rows, columns]`` of the dtype and device of ``like``.

    On the CPU the memory is NumPy's, which uses huge pages: twice as fast for wide batches.
    """
    known = {torch.float32: np.float32, torch.float64: np.float64}.get(like.dtype)
    if known is None or like.device.type != "cpu":
        return like.new_empty(rows, columns)
    return torch.from_numpy(np.empty((rows, columns), known))


def step_widths(sizes: Tensor) -> list[int]:
    """Return the number of runs still going at each time step, without the zeros that pad ``sizes``."""
    return [size for size in sizes.tolist() if size]


def states_before(first: Tensor, states: Tensor, widths: list[int]) -> Tensor:
    """Return the state before each packed row, ``[N, H]``: its run's state one step earlier."""
    rows = len(states)
    runs = widths[0]
    counts = upload(torch.tensor(widths), states.device)

    # the previous row of a run is as many rows back as the previous step is wide
    back = counts[:-1].repeat_interleave(counts[1:], output_size=rows - runs)
    rows_before = torch.arange(runs, rows, device=states.device) - back
    return torch.cat([first[:runs], states.index_select(0, rows_before)])


def run_layers(
    operators: Mapping[str, Callable[..., Any]],
    net: nn.RNNBase,
    rows: Tensor,
    states: tuple[Tensor, ...],
    *where: Tensor,
) -> tuple[Tensor, tuple[list[Tensor], ...]]:
    """Run all layers; return the output ``[N, H]`` and every layer's states after each row.

    Args:
        operators: one layer, by the mode of the network (``"GRU"``, ``"LSTM"``).
        net: ``nn.GRU`` or ``nn.LSTM``, or one of :mod:`flatroll.modules.networks`.
        rows: ``[N, input_size]``, in the order that the operators take.
        states: first states, each ``[num_layers, M, H]``.
        where: tensors that tell the operator where runs begin.
    """
    after: tuple[list[Tensor], ...] = tuple([] for _ in states)
    for layer, weights in enumerate(net.all_weights):
        if layer and net.dropout:
            rows = nn.functional.dropout(rows, net.dropout, net.training)
        first = [state[layer] for state in states]
        # weights without biases are padded with None; the last result is the gates, which only the backward
        # pass needs
        *results, _ = operators[net.mode](rows, *first, *(*weights, None, None)[:4], *where)
        for column, result in zip(after, results, strict=True):
            column.append(result)
        rows = results[0]
    return rows, after


def differentiable(operator: Any, backward: Any, states: int) -> None:
    """Register an operator's backward function, and let it run in float32 under autocast.

    Args:
        operator: maps rows, first states, ``w_ih, w_hh, b_ih, b_hh`` and tensors that locate the runs to the states
            after each row and the gates; gates and those tensors have no gradient.
        backward: maps the gradients of the states after each row (None if unused) and the operator's arguments without
            the biases, with its results inserted before the tensors that locate the runs, to the gradients of rows,
            first states, weights and both biases, or a single gradient for both biases.
        states: number of states.
    """
    weights = 3 + states  # number of arguments before the biases, including rows and first states

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.biased = inputs[weights] is not None
        ctx.count = len(inputs)
        ctx.save_for_backward(*inputs[:weights], *output, *inputs[weights + 2 :])

    def gradient(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads[:states]):
            none: tuple[Tensor | None, ...] = (None,) * ctx.count
            return none

        slopes: tuple[Tensor, ...] = backward(*grads[:states], *ctx.saved_tensors)
        biases: tuple[Tensor | None, ...] = slopes[weights:]
        if not ctx.biased:
            biases = (None, None)
        elif len(slopes) == weights + 1:
            # clone if both biases share a gradient: autograd may add to either in place
            biases = (slopes[-1], slopes[-1].clone())
        where = (None,) * (ctx.count - weights - 2)
        return *slopes[:weights], *biases, *where

    operator.register_autograd(gradient, setup_context=save)
    for device in ("cpu", "cuda"):
        operator.register_autocast(device, torch.float32)


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
    hidden = w_hh.shape[1]
    widths = step_widths(sizes)
    gates = uninitialised(len(rows), 4 * hidden, rows)
    out = uninitialised(len(rows), hidden, rows)

    # the input's part of all steps at once; rolling the stock order r z n by one block gives n r z
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
    after = torch.split(out, widths)

    state = first
    for t, width in enumerate(widths):
        state = state[:width]  # runs that have ended come last, because they are the shortest
        from_state[t].addmm_(state, weight)
        r_and_z[t].sigmoid_()
        n[t].addcmul_(r[t], u[t]).tanh_()
        torch.lerp(n[t], state, z[t], out=after[t])  # n + z * (state - n)
        state = after[t]
    return out, gates


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
    hidden = w_hh.shape[1]
    widths = step_widths(sizes)
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
    z_by_step = torch.split(z, widths)
    grads = torch.split(grad, widths)

    # back in time: the gradient of the state after a step becomes that of the state before it; an initial
    # state that starts no run keeps its zeros
    state = grad.new_zeros(len(first), hidden)
    for t in reversed(range(len(widths))):
        now = state[: widths[t]]
        now += grads[t]
        by_step[t].mul_(now.unsqueeze(1))
        now.mul_(z_by_step[t]).addmm_(to_state[t], w_hh)

    return gru_gradients(slopes, rows, before, w_ih, state)


def gru_gradients(
    slopes: Tensor, rows: Tensor, before: Tensor, w_ih: Tensor, d_first: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of a layer's arguments from those of the gates (``slopes``) and of the first states.

    They are those of rows, initial states, w_ih, w_hh, b_ih and b_hh; ``before`` is the state before each row.
    """
    hidden = before.shape[1]
    # the input contributes to n r z, the state to r z u; rolling back restores the stock order of the weights
    from_rows = slopes[:, : 3 * hidden]
    summed = slopes.sum(0)
    return (
        from_rows @ w_ih.roll(hidden, 0),
        d_first,
        (from_rows.t() @ rows).roll(-hidden, 0),
        slopes[:, hidden:].t() @ before,
        summed[: 3 * hidden].roll(-hidden),
        summed[hidden:].clone(),
    )


def gru_gradient_shapes(
    grad: Tensor, rows: Tensor, first: Tensor, w_ih: Tensor, w_hh: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    bias = w_hh.new_empty(w_hh.shape[0])
    d_rows, d_first, d_ih, d_hh = (x.new_empty(x.shape) for x in (rows, first, w_ih, w_hh))
    return d_rows, d_first, d_ih, d_hh, bias, torch.empty_like(bias)


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
    """Compute one LSTM layer over packed rows; arguments as for :func:`gru_scan`.

    Returns:
        outputs and cells after each row, each ``[N, H]``; gates ``[N, 4 H]``, for the gradient.
    """
    hidden = w_hh.shape[1]
    widths = step_widths(sizes)
    out = uninitialised(len(rows), hidden, rows)
    cells = uninitialised(len(rows), hidden, rows)

    # the input's part of all steps at once; rolling the stock order i f g o by one block gives o i f g
    gates = torch.mm(rows, w_ih.roll(hidden, 0).t(), out=uninitialised(len(rows), 4 * hidden, rows))
    if b_ih is not None and b_hh is not None:
        gates += (b_ih + b_hh).roll(hidden)

    weight = w_hh.roll(hidden, 0).t()
    # views of each gate, step by step
    o, i, f, g = (torch.split(block, widths) for block in torch.split(gates, hidden, 1))
    o_i_f = torch.split(gates[:, : 3 * hidden], widths)
    by_step = torch.split(gates, widths)
    outs = torch.split(out, widths)
    states = torch.split(cells, widths)

    state = first
    cell = first_cell
    for t, width in enumerate(widths):
        # runs that have ended come last, because they are the shortest
        by_step[t].addmm_(state[:width], weight)
        o_i_f[t].sigmoid_()
        g[t].tanh_()
        cell = torch.mul(f[t], cell[:width], out=states[t]).addcmul_(i[t], g[t])
        state = torch.tanh(cell, out=outs[t]).mul_(o[t])
    return out, cells, gates


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
    hidden = w_hh.shape[1]
    widths = step_widths(sizes)
    o, i, f, g = torch.split(gates, hidden, 1)

    # slopes of the gate sums, for all rows at once: a sigmoid s has the slope s - s * s, a tanh t has 1 - t * t
    slopes = uninitialised(len(gates), 4 * hidden, gates)
    d_o, d_i, d_f, d_g = torch.split(slopes, hidden, 1)
    torch.mul(g, i, out=d_i).addcmul_(d_i, i, value=-1)  # g i (1 - i)
    torch.mul(states_before(first_cell, cells, widths), f, out=d_f).addcmul_(d_f, f, value=-1)
    torch.mul(g, g, out=d_g).neg_().add_(1).mul_(i)
    through = cells.tanh()
    torch.mul(through, o, out=d_o).addcmul_(d_o, o, value=-1)
    through.mul_(through).neg_().add_(1).mul_(o)  # d output / d cell

    d_i_f_g = torch.split(slopes.view(-1, 4, hidden)[:, 1:], widths)
    by_step, d_o_by_step, f_by_step, passed = (torch.split(x, widths) for x in (slopes, d_o, f, through))
    weight = w_hh.roll(hidden, 0)
    grads = None if grad is None else torch.split(grad, widths)
    cell_grads = None if grad_cell is None else torch.split(grad_cell, widths)

    # back in time: the gradients of output and cell after a step become those before it, in place; initial
    # states that start no run keep their zeros
    state = cells.new_zeros(len(first), hidden)
    cell = cells.new_zeros(len(first), hidden)
    for t in reversed(range(len(widths))):
        now = state[: widths[t]]
        now_cell = cell[: widths[t]]
        if grads is not None:
            now += grads[t]
        if cell_grads is not None:
            now_cell += cell_grads[t]
        now_cell.addcmul_(now, passed[t])
        d_o_by_step[t].mul_(now)
        d_i_f_g[t].mul_(now_cell.unsqueeze(1))
        torch.mm(by_step[t], weight, out=now)
        now_cell.mul_(f_by_step[t])

    return lstm_gradients(slopes, rows, states_before(first, out, widths), w_ih, state, cell)


def lstm_gradients(
    slopes: Tensor, rows: Tensor, before: Tensor, w_ih: Tensor, d_first: Tensor, d_cell: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what `gru_gradients` does, for an LSTM: rows, first, first_cell, w_ih, w_hh and bias (one for both)."""
    hidden = before.shape[1]
    return (
        slopes @ w_ih.roll(hidden, 0),
        d_first,
        d_cell,
        (slopes.t() @ rows).roll(-hidden, 0),
        (slopes.t() @ before).roll(-hidden, 0),
        slopes.sum(0).roll(-hidden),
    )


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


def gru_layer(operator: Any, backward: Any) -> Any:
    """Register the shapes and the gradient of an operator that computes a GRU layer; return the operator."""
    operator.register_fake(gru_shapes)
    backward.register_fake(gru_gradient_shapes)
    differentiable(operator, backward, states=1)
    return operator


def lstm_layer(operator: Any, backward: Any) -> Any:
    """Do what `gru_layer` does for an LSTM."""
    operator.register_fake(lstm_shapes)
    backward.register_fake(lstm_gradient_shapes)
    differentiable(operator, backward, states=2)
    return operator


#: The function for one layer, by the mode of the network.
OPERATORS: Mapping[str, Callable[..., Any]] = {
    "GRU": gru_layer(gru_scan, gru_scan_backward),
    "LSTM": lstm_layer(lstm_scan, lstm_scan_backward),
}


def scanned(net: nn.RNNBase, rows: Tensor, states: States, index: RunIndex) -> tuple[Tensor, States]:
    """Compute with the backend ``"scan"``; arguments and results as for ``packing.packed``."""
    if index.order is None or index.place is None:
        return dense(net, rows, states, index)
    out, after = run_layers(OPERATORS, net, rows.index_select(0, index.order), states, index.batch_sizes)

    # packed positions of the last rows of runs, whose states are the final ones
    last = index.place.index_select(0, index.last)
    finals = tuple(torch.stack([layer.index_select(0, last) for layer in state]) for state in after)
    return out.index_select(0, index.place), finals


def scanned_by_row(net: nn.RNNBase, rows: Tensor, stored: States, starts: Tensor) -> tuple[Tensor, States]:
    """Compute with ``"scan"`` inside ``torch.compile``: all shapes are independent of where runs begin.

    Args:
        rows: ``[N, input_size]``.
        stored: states ``[N, num_layers, H]``; those of first rows are used.
        starts: bool ``[N]``.

    Returns:
        outputs ``[N, H]`` and states after each row ``[N, num_layers, H]``.
    """
    order, place, sizes = run_order(starts)
    first = tuple(state.index_select(0, order).transpose(0, 1) for state in stored)
    out, after = run_layers(OPERATORS, net, rows.index_select(0, order), first, sizes)
    in_place = tuple(torch.stack([x.index_select(0, place) for x in state], 1) for state in after)
    return out.index_select(0, place), in_place


@torch.library.custom_op("flatroll::run_order", mutates_args=())
def run_order(starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``order``, ``place`` and ``batch_sizes`` (padded with 0 to ``[N]``) of :func:`run_index`."""
    index = run_index(starts)

    rows = torch.arange(len(starts), device=starts.device)
    order = index.order
    place = index.place
    if order is None or place is None:
        # runs of one length are [runs, steps]; packed order is [steps, runs]
        order = rows.view(len(index.first), -1).t().flatten()
        place = torch.empty_like(order).scatter_(0, order, rows)

    sizes = torch.zeros(len(starts), dtype=torch.int64)
    sizes[: len(index.batch_sizes)] = index.batch_sizes
    return order, place, sizes


@run_order.register_fake
def run_order_shapes(starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.empty_like(starts, dtype=torch.int64)
    return rows, torch.empty_like(rows), torch.empty_like(rows, device="cpu")
