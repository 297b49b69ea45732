"""Runs in packed order as two operators per network: the steps forward, and their gradient written out.

What need not wait for the step before is done for all rows at once: the product with the input, the slope of
every gate, the gradients of the weights. What is left of a step is one matrix product and a few elementwise
passes in place. The operators' shapes follow from those of their arguments alone, so ``torch.compile`` takes them
into one graph. They are differentiable once.

The gates are column blocks of ``[N, 4 H]``; in the order of the stock networks, rolled by one block:

* GRU: ``n r z u``, where ``u`` is the hidden part of ``n`` before the reset gate; the input is read by ``n r z``, the
  state by ``r z u``;
* LSTM: ``o i f g``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from flatroll.kernels.scan import empty_like
from flatroll.modules.packing import RunIndex, States, dense, run_index


def scanned(net: nn.RNNBase, rows: Tensor, states: States, index: RunIndex) -> tuple[Tensor, States]:
    """The backend ``"scan"``; arguments and results as for :func:`flatroll.modules.packing.packed`."""
    if index.order is None or index.place is None:
        return dense(net, rows, states, index)
    out, after = layers(net, rows.index_select(0, index.order), states, index.batch_sizes)
    last = index.place.index_select(0, index.last)
    finals = tuple(torch.stack([layer.index_select(0, last) for layer in state]) for state in after)
    return out.index_select(0, index.place), finals


def whole(net: nn.RNNBase, rows: Tensor, stored: States, starts: Tensor) -> tuple[Tensor, States]:
    """The same for graphs of fixed shapes: no shape depends on where runs begin.

    Args:
        rows: ``[N, input_size]``.
        stored: states ``[N, num_layers, H]``; those of first rows are used.
        starts: bool ``[N]``.

    Returns:
        outputs ``[N, H]`` and states after each row ``[N, num_layers, H]``.
    """
    order, place, sizes = run_order(starts)
    first = tuple(state.index_select(0, order).transpose(0, 1) for state in stored)
    out, after = layers(net, rows.index_select(0, order), first, sizes)
    in_place = tuple(torch.stack([x.index_select(0, place) for x in state], 1) for state in after)
    return out.index_select(0, place), in_place


def layers(
    net: nn.RNNBase, rows: Tensor, states: States, sizes: Tensor
) -> tuple[Tensor, tuple[list[Tensor], ...]]:
    """All layers over packed rows: the output, and of each state, layer by layer, what it is after each row."""
    after: tuple[list[Tensor], ...] = tuple([] for _ in states)
    for layer, weights in enumerate(net.all_weights):
        if layer and net.dropout:
            rows = nn.functional.dropout(rows, net.dropout, net.training)
        w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
        first = [state[layer] for state in states]
        if net.mode == "LSTM":
            *results, _ = lstm_scan(rows, *first, w_ih, w_hh, b_ih, b_hh, sizes)
        else:
            *results, _ = gru_scan(rows, *first, w_ih, w_hh, b_ih, b_hh, sizes)
        for column, result in zip(after, results, strict=True):
            column.append(result)
        rows = results[0]
    return rows, after


@torch.library.custom_op("flatroll::run_order", mutates_args=())
def run_order(starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``order``, ``place`` and ``batch_sizes`` of :func:`run_index`, the last filled up with zeros to ``[N]``."""
    index = run_index(starts)
    rows = torch.arange(len(starts), device=starts.device)
    order, place = index.order, index.place
    if order is None or place is None:
        order = rows.view(len(index.first), -1).t().flatten()
        place = torch.empty_like(order).scatter_(0, order, rows)
    sizes = torch.zeros(len(starts), dtype=torch.int64)
    sizes[: len(index.batch_sizes)] = index.batch_sizes
    return order, place, sizes


@run_order.register_fake
def _(starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.empty_like(starts, dtype=torch.int64)
    return rows, torch.empty_like(rows), torch.empty_like(rows, device="cpu")


def _empty(rows: int, columns: int, like: Tensor) -> Tensor:
    """An uninitialised array; see :func:`flatroll.kernels.scan.empty_like`, which halves the time of wide batches."""
    shape = like.new_empty(()).expand(rows, columns)
    on_cpu = like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64)
    return empty_like(shape) if on_cpu else torch.empty_like(shape, memory_format=torch.contiguous_format)


def _steps(sizes: Tensor) -> list[int]:
    """Runs at each step."""
    return [size for size in sizes.tolist() if size]


def _before(first: Tensor, states: Tensor, steps: list[int]) -> Tensor:
    """The state that each packed row starts from, ``[N, H]``: the row of the step before that has its rank."""
    rows, width = len(states), steps[0]
    counts = torch.tensor(steps, device=states.device)
    back = counts[:-1].repeat_interleave(counts[1:], output_size=rows - width)
    above = torch.arange(width, rows, device=states.device) - back
    return torch.cat([first[:width], states.index_select(0, above)])


def _grown(state: Tensor, rows: int) -> Tensor:
    """``state`` and zeros below, ``rows`` in all."""
    return (
        torch.cat([state, state.new_zeros(rows - len(state), state.shape[1])]) if rows > len(state) else state
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
    """One layer of a GRU over packed rows.

    Args:
        rows: ``[N, input_size]`` in packed order.
        first: ``[M, H]``; its first ``sizes[0]`` rows are the states that runs start from, in rank order.
        w_ih, w_hh, b_ih, b_hh: weights of ``nn.GRU``; biases both or neither.
        sizes: int64 on the CPU, runs at each step; may be filled up with zeros.

    Returns:
        states after each row ``[N, H]``; gates ``[N, 4 H]``, for the gradient.
    """
    hidden, steps = w_hh.shape[1], _steps(sizes)
    gates, out = _empty(len(rows), 4 * hidden, rows), _empty(len(rows), hidden, rows)
    torch.mm(rows, w_ih.roll(hidden, 0).t(), out=gates[:, : 3 * hidden])
    gates[:, 3 * hidden :] = 0
    if b_ih is not None and b_hh is not None:
        gates[:, : 3 * hidden] += b_ih.roll(hidden)
        gates[:, hidden:] += b_hh
    weight = w_hh.t()
    n, r, z, u = (torch.split(block, steps) for block in torch.split(gates, hidden, 1))
    r_and_z, from_state = (
        torch.split(gates[:, hidden : 3 * hidden], steps),
        torch.split(gates[:, hidden:], steps),
    )
    after, state = torch.split(out, steps), first
    for t, width in enumerate(steps):
        state = state[:width]
        from_state[t].addmm_(state, weight)
        r_and_z[t].sigmoid_()
        n[t].addcmul_(r[t], u[t]).tanh_()
        torch.lerp(n[t], state, z[t], out=after[t])
        state = after[t]
    return out, gates


@gru_scan.register_fake
def _(rows: Tensor, first: Tensor, w_ih: Tensor, w_hh: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
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
    """Gradients of rows, first, w_ih, w_hh, b_ih and b_hh.

    The gradient of a gate is its slope times the gradient of the state after the row.
    """
    hidden, steps = w_hh.shape[1], _steps(sizes)
    before = _before(first, out, steps)
    n, r, z, u = torch.split(gates, hidden, 1)
    slopes = _empty(len(gates), 4 * hidden, gates)
    d_n, d_r, d_z, d_u = torch.split(slopes, hidden, 1)
    torch.mul(n, n, out=d_n).neg_().add_(1).addcmul_(d_n, z, value=-1)
    torch.mul(d_n, r, out=d_u)
    torch.mul(d_u, u, out=d_r).addcmul_(d_r, r, value=-1)
    torch.sub(before, n, out=d_z).mul_(z).addcmul_(d_z, z, value=-1)
    by_step, to_state = torch.split(slopes.view(-1, 4, hidden), steps), torch.split(slopes[:, hidden:], steps)
    kept, grads = torch.split(z, steps), torch.split(grad, steps)
    state = grad.new_zeros(steps[0], hidden)
    for t in reversed(range(len(steps))):
        now = state[: steps[t]]
        now += grads[t]
        by_step[t].mul_(now.unsqueeze(1))
        now.mul_(kept[t]).addmm_(to_state[t], w_hh)
    from_rows, summed = slopes[:, : 3 * hidden], slopes.sum(0)
    return (
        from_rows @ w_ih.roll(hidden, 0),
        _grown(state, len(first)),
        (from_rows.t() @ rows).roll(-hidden, 0),
        slopes[:, hidden:].t() @ before,
        summed[: 3 * hidden].roll(-hidden),
        summed[hidden:].clone(),
    )


@gru_scan_backward.register_fake
def _(
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
    """One layer of an LSTM over packed rows; arguments as for :func:`gru_scan`.

    Returns:
        outputs and cells after each row, each ``[N, H]``; gates ``[N, 4 H]``, for the gradient.
    """
    hidden, steps = w_hh.shape[1], _steps(sizes)
    out, cells = _empty(len(rows), hidden, rows), _empty(len(rows), hidden, rows)
    gates = torch.mm(rows, w_ih.roll(hidden, 0).t(), out=_empty(len(rows), 4 * hidden, rows))
    if b_ih is not None and b_hh is not None:
        gates += (b_ih + b_hh).roll(hidden)
    weight = w_hh.roll(hidden, 0).t()
    o, i, f, g = (torch.split(block, steps) for block in torch.split(gates, hidden, 1))
    o_i_f, by_step = torch.split(gates[:, : 3 * hidden], steps), torch.split(gates, steps)
    outs, states = torch.split(out, steps), torch.split(cells, steps)
    state, cell = first, first_cell
    for t, width in enumerate(steps):
        by_step[t].addmm_(state[:width], weight)
        o_i_f[t].sigmoid_()
        g[t].tanh_()
        cell = torch.mul(f[t], cell[:width], out=states[t]).addcmul_(i[t], g[t])
        state = torch.tanh(cell, out=outs[t]).mul_(o[t])
    return out, cells, gates


@lstm_scan.register_fake
def _(
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
    """Gradients of rows, first, first_cell, w_ih, w_hh and of either bias.

    The gradient of ``i``, ``f``, ``g`` is their slope times the gradient of the cell after the row, that of ``o``
    its slope times the gradient of the output.
    """
    hidden, steps = w_hh.shape[1], _steps(sizes)
    o, i, f, g = torch.split(gates, hidden, 1)
    slopes = _empty(len(gates), 4 * hidden, gates)
    d_o, d_i, d_f, d_g = torch.split(slopes, hidden, 1)
    torch.mul(g, i, out=d_i).addcmul_(d_i, i, value=-1)
    torch.mul(_before(first_cell, cells, steps), f, out=d_f).addcmul_(d_f, f, value=-1)
    torch.mul(g, g, out=d_g).neg_().add_(1).mul_(i)
    through = cells.tanh()
    torch.mul(through, o, out=d_o).addcmul_(d_o, o, value=-1)
    through.mul_(through).neg_().add_(1).mul_(o)  # what the cell gives to the output
    d_i_f_g = torch.split(slopes.view(-1, 4, hidden)[:, 1:], steps)
    by_step, outs, kept, passed = (torch.split(x, steps) for x in (slopes, d_o, f, through))
    weight = w_hh.roll(hidden, 0)
    state, cell = cells.new_zeros(steps[0], hidden), cells.new_zeros(steps[0], hidden)
    grads = None if grad is None else torch.split(grad, steps)
    cell_grads = None if grad_cell is None else torch.split(grad_cell, steps)
    for t in reversed(range(len(steps))):
        now, now_cell = state[: steps[t]], cell[: steps[t]]
        if grads is not None:
            now += grads[t]
        if cell_grads is not None:
            now_cell += cell_grads[t]
        now_cell.addcmul_(now, passed[t])
        outs[t].mul_(now)
        d_i_f_g[t].mul_(now_cell.unsqueeze(1))
        torch.mm(by_step[t], weight, out=now)
        now_cell.mul_(kept[t])
    return (
        slopes @ w_ih.roll(hidden, 0),
        _grown(state, len(first)),
        _grown(cell, len(first)),
        (slopes.t() @ rows).roll(-hidden, 0),
        (slopes.t() @ _before(first, out, steps)).roll(-hidden, 0),
        slopes.sum(0).roll(-hidden),
    )


@lstm_scan_backward.register_fake
def _(
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


def _save_gru(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, first, w_ih, w_hh, b_ih, _, sizes = inputs
    ctx.set_materialize_grads(False)
    ctx.biased = b_ih is not None
    ctx.save_for_backward(rows, first, w_ih, w_hh, *output, sizes)


def _gru_gradient(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    *grads, b_ih, b_hh = gru_scan_backward(grad, *ctx.saved_tensors)
    return (*grads, *((b_ih, b_hh) if ctx.biased else (None, None)), None)


def _save_lstm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, first, first_cell, w_ih, w_hh, b_ih, _, sizes = inputs
    ctx.set_materialize_grads(False)
    ctx.biased = b_ih is not None
    ctx.save_for_backward(rows, first, first_cell, w_ih, w_hh, *output, sizes)


def _lstm_gradient(
    ctx: Any, grad: Tensor | None, grad_cell: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    if grad is None and grad_cell is None:
        return (None,) * 8
    *grads, bias = lstm_scan_backward(grad, grad_cell, *ctx.saved_tensors)
    return (*grads, *((bias, bias.clone()) if ctx.biased else (None, None)), None)


gru_scan.register_autograd(_gru_gradient, setup_context=_save_gru)
lstm_scan.register_autograd(_lstm_gradient, setup_context=_save_lstm)
for _operator in (gru_scan, lstm_scan):
    for _device in ("cpu", "cuda"):
        _operator.register_autocast(_device, torch.float32)
