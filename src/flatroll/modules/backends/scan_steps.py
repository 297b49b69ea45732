"""Shared parts of the GRU and LSTM scan operators: time steps, layers, autograd.

Packed rows stand step by step: the first row of every run, longest run first, then the second row of every run that
has one, and so on (:mod:`flatroll.modules.backends.packing`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def uninitialised(rows: int, columns: int, like: Tensor) -> Tensor:
    """An uninitialised tensor ``[rows, columns]`` of the dtype and device of ``like``.

    On the CPU the memory is NumPy's, which asks the system for huge pages: half the time of wide batches.
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
    rows, runs = len(states), widths[0]
    counts = torch.tensor(widths, device=states.device)
    # the row before stands as many rows back as the step before is wide
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
        where: tensors that say to the operator where the runs are.
    """
    after: tuple[list[Tensor], ...] = tuple([] for _ in states)
    for layer, weights in enumerate(net.all_weights):
        if layer and net.dropout:
            rows = nn.functional.dropout(rows, net.dropout, net.training)
        first = [state[layer] for state in states]
        # weights without biases get None in their place; the last result is the gates, for the gradient only
        *results, _ = operators[net.mode](rows, *first, *(*weights, None, None)[:4], *where)
        for column, result in zip(after, results, strict=True):
            column.append(result)
        rows = results[0]
    return rows, after


def differentiable(operator: Any, backward: Any, states: int) -> None:
    """Register an operator's backward function, and let it run in float32 under autocast.

    Args:
        operator: from rows, first states, ``w_ih, w_hh, b_ih, b_hh`` and tensors that say where runs are, to states
            after each row and gates; gates and those tensors have no gradient.
        backward: from the gradients of the states after each row (None for one that is not used), the operator's
            arguments without the biases, its results among them before the tensors that say where; to
            the gradients of rows, first states, weights and both biases, or the one gradient of either bias.
        states: how many there are.
    """
    weights = 3 + states  # so many arguments, rows and first states among them, stand before the biases

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.biased, ctx.count = inputs[weights] is not None, len(inputs)
        ctx.save_for_backward(*inputs[:weights], *output, *inputs[weights + 2 :])

    def gradient(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads[:states]):
            none: tuple[Tensor | None, ...] = (None,) * ctx.count
            return none
        slopes: tuple[Tensor, ...] = backward(*grads[:states], *ctx.saved_tensors)
        # one gradient for both biases is copied: autograd may add to either in place
        biases = (slopes[-1], slopes[-1].clone()) if len(slopes) == weights + 1 else slopes[weights:]
        where = (None,) * (ctx.count - weights - 2)
        return (*slopes[:weights], *(biases if ctx.biased else (None, None)), *where)

    operator.register_autograd(gradient, setup_context=save)
    for device in ("cpu", "cuda"):
        operator.register_autocast(device, torch.float32)
