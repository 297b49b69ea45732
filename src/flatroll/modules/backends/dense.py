"""A faster CPU backward pass for a GRU over a few runs of equal length; outputs equal ``nn.GRU``'s.

The stock forward pass is fast; its backward pass traverses a graph of about fifteen nodes per step. Once the state
after each row is known, the gates of all steps can be recomputed by two matrix products, and
:func:`flatroll.modules.backends.scan.gru_scan_backward` does the rest. Only the outputs are saved for it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from flatroll.modules.backends.packing import RunIndex, States
from flatroll.modules.backends.scan import gru_scan_backward

#: From this many runs on, the stock network's backward pass is as fast as this one.
RUNS = 16


def few_long_runs(net: nn.RNNBase, rows: Tensor, states: States, index: RunIndex) -> bool:
    """Return whether `dense_gru` is faster here than ``packing.dense``, with the same results."""
    return (
        index.order is None
        and isinstance(net, nn.GRU)
        and rows.device.type == "cpu"
        and len(index.first) < RUNS
        and torch.is_grad_enabled()
        and any(x.requires_grad for x in (rows, *states, *net.parameters()))
    )


def dense_gru(net: nn.RNNBase, rows: Tensor, states: States, index: RunIndex) -> tuple[Tensor, States]:
    """Run ``nn.GRU`` on runs of equal length, as ``packing.dense`` does, with a hand-written gradient."""
    by_step = rows.view(len(index.first), -1, rows.shape[-1]).transpose(0, 1)
    # states by layer, in the stock call's memory layout, which affects its results bitwise
    first = torch.split(states[0].contiguous(), 1)
    finals: list[Tensor] = []

    for layer, weights in enumerate(net.all_weights):
        if layer and net.dropout:
            by_step = nn.functional.dropout(by_step, net.dropout, net.training)
        arguments = (by_step, first[layer], *(*weights, None, None)[:4])
        by_step = _Layer.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves it so
        finals.append(by_step[-1])

    # a copy: an in-place activation on the output must not change tensors saved for backward
    out = by_step.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return out.view(len(rows), -1), (torch.stack(finals),)


class _Layer(torch.autograd.Function):
    """Rows ``[T, R, in]`` and states ``[1, R, H]`` to the states after each row ``[T, R, H]``."""

    @staticmethod
    def forward(
        rows: Tensor, first: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
    ) -> Tensor:
        weights = [w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None]
        # input, state, weights, has_biases, layers, dropout, training, bidirectional, batch_first
        out, _ = torch.gru(rows, first, weights, b_ih is not None, 1, 0.0, False, False, False)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        rows, first, w_ih, w_hh, b_ih, b_hh, out = ctx.saved_tensors
        steps, runs, _ = out.shape
        shape = rows.shape
        first = first.squeeze(0)
        rows, out, grad = (x.reshape(steps * runs, -1) for x in (rows, out, grads[0]))

        # the state before row [t, r] is output row [t - 1, r], and at the first step the initial state
        gates = _gates(rows, torch.cat([first, out[:-runs]]), w_ih, w_hh, b_ih, b_hh)
        sizes = torch.full((steps,), runs)
        d_rows, d_first, d_ih, d_hh, *biases = gru_scan_backward(
            grad, rows, first, w_ih, w_hh, out, gates, sizes
        )

        both = biases if b_ih is not None else (None, None)
        return d_rows.view(shape), d_first.unsqueeze(0), d_ih, d_hh, *both


@torch.no_grad()
def _gates(
    rows: Tensor, before: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> Tensor:
    """The gates of :func:`flatroll.modules.backends.scan.gru_scan`, of rows whose states before are known."""
    hidden = w_hh.shape[1]
    gates = rows.new_empty(len(rows), 4 * hidden)  # column blocks n r z u
    n = gates[:, :hidden]
    u = gates[:, 3 * hidden :]
    torch.mm(rows, w_ih.roll(hidden, 0).t(), out=gates[:, : 3 * hidden])
    from_state = before @ w_hh.t()
    if b_ih is not None and b_hh is not None:
        gates[:, : 3 * hidden] += b_ih.roll(hidden)
        from_state += b_hh

    r_and_z = gates[:, hidden : 3 * hidden].add_(from_state[:, : 2 * hidden]).sigmoid_()
    u.copy_(from_state[:, 2 * hidden :])
    n.addcmul_(r_and_z[:, :hidden], u).tanh_()
    return gates
