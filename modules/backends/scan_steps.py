"""What the scans of GRU and LSTM share: steps, the states before them, how operators become differentiable."""

from typing import Any

import torch
from torch import Tensor

from flatroll.kernels.scans.scan import empty_like


def uninitialised(rows: int, columns: int, like: Tensor) -> Tensor:
    """Uninitialised array, which halves the time of wide batches (:func:`flatroll.kernels.scans.scan.empty_like`)."""
    shape = like.new_empty(()).expand(rows, columns)
    on_cpu = like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64)
    return empty_like(shape) if on_cpu else torch.empty_like(shape, memory_format=torch.contiguous_format)


def steps_of(sizes: Tensor) -> list[int]:
    """Runs at each step."""
    return [size for size in sizes.tolist() if size]


def states_before(first: Tensor, states: Tensor, steps: list[int]) -> Tensor:
    """The state that each packed row starts from, ``[N, H]``: the row of the step before that has its rank."""
    rows, width = len(states), steps[0]
    counts = torch.tensor(steps, device=states.device)
    back = counts[:-1].repeat_interleave(counts[1:], output_size=rows - width)
    above = torch.arange(width, rows, device=states.device) - back
    return torch.cat([first[:width], states.index_select(0, above)])


def grown(state: Tensor, rows: int) -> Tensor:
    """``state`` and zeros below, ``rows`` in all."""
    return (
        torch.cat([state, state.new_zeros(rows - len(state), state.shape[1])]) if rows > len(state) else state
    )


def differentiable(operator: Any, backward: Any, states: int) -> None:
    """Give an operator its gradient, and float32 under autocast.

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
        found: tuple[Tensor, ...] = backward(*grads[:states], *ctx.saved_tensors)
        biases = (found[-1], found[-1].clone()) if len(found) == weights + 1 else found[weights:]
        where = (None,) * (ctx.count - weights - 2)
        return (*found[:weights], *(biases if ctx.biased else (None, None)), *where)

    operator.register_autograd(gradient, setup_context=save)
    for device in ("cpu", "cuda"):
        operator.register_autocast(device, torch.float32)
