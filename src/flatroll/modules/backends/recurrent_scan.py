"""The backend ``"scan"``: own operators for GRU and LSTM over packed rows, with hand-written gradients.

What need not wait for the step before is done for all rows at once: the product with the input, the slope of
every gate, the gradients of the weights. What is left of a step is one matrix product and a few elementwise
passes in place. The operators' shapes follow from those of their arguments alone, so ``torch.compile`` takes them
into one graph. They are differentiable once.

The gates are column blocks of ``[N, 4 H]``; in the order of the stock networks, rolled by one block:

* GRU: ``n r z u``, where ``u`` is the hidden part of ``n`` before the reset gate; the input is read by ``n r z``, the
  state by ``r z u``;
* LSTM: ``o i f g``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatroll.modules.backends.gru_scan import gru_scan
from flatroll.modules.backends.lstm_scan import lstm_scan
from flatroll.modules.backends.packing import RunIndex, States, dense, run_index
from flatroll.modules.backends.scan_steps import run_layers

#: One layer, by the mode of the network.
OPERATORS: Mapping[str, Callable[..., Any]] = {"GRU": gru_scan, "LSTM": lstm_scan}


def scanned(net: nn.RNNBase, rows: Tensor, states: States, index: RunIndex) -> tuple[Tensor, States]:
    """Compute with the backend ``"scan"``; arguments and results as for ``packing.packed``."""
    if index.order is None or index.place is None:
        return dense(net, rows, states, index)
    out, after = run_layers(OPERATORS, net, rows.index_select(0, index.order), states, index.batch_sizes)
    # packed positions of the runs' last rows, whose states are the final ones
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
    order, place = index.order, index.place
    if order is None or place is None:
        # runs of one length stand as [runs, steps]; packed order is [steps, runs]
        order = rows.view(len(index.first), -1).t().flatten()
        place = torch.empty_like(order).scatter_(0, order, rows)
    sizes = torch.zeros(len(starts), dtype=torch.int64)
    sizes[: len(index.batch_sizes)] = index.batch_sizes
    return order, place, sizes


@run_order.register_fake
def run_order_shapes(starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.empty_like(starts, dtype=torch.int64)
    return rows, torch.empty_like(rows), torch.empty_like(rows, device="cpu")
