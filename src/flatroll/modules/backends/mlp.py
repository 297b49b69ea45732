"""The MLP of a transformer's layer on the CPU, by pieces of rows whose wide activations stay in the cache.

Nothing as wide as the MLP is kept for the backward pass, which computes it once more: with four times the width of a
row it would be more than half of all that a layer keeps. That saves 40 % of a pass's memory for 2 % of its time, since
memory that was never touched costs about as much as the product.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flatroll.kernels.scan import is_tracing

#: Numbers of a piece's wide activations: one megabyte in float32, and the backward pass has three of these.
_PIECE = 2**18


def normed_mlp(rows: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
    """Compute the MLP of the norms of rows ``[N, size]``.

    Args:
        rows: ``[N, size]``.
        weights: scale and shift of the norm, weight and bias of the first layer, weight and bias of the second one.
        eps: of the norm.
    """
    if torch.is_grad_enabled() and _fits_pieces(rows):
        out: Tensor = _InPieces.apply(eps, rows, *weights)  # type: ignore[no-untyped-call]  # torch leaves it so
        return out
    return _whole(eps, rows, *weights)


def _fits_pieces(rows: Tensor) -> bool:
    """Whether sums of gradients over pieces are as exact as those of one product."""
    if not rows.is_cpu or rows.dtype not in (torch.float32, torch.float64):
        return False
    return not is_tracing() and not torch.is_autocast_enabled("cpu")


def _whole(
    eps: float, rows: Tensor, scale: Tensor, shift: Tensor, up: Tensor, up_bias: Tensor, *down: Tensor
) -> Tensor:
    normed = F.layer_norm(rows, scale.shape, scale, shift, eps)
    return F.linear(F.gelu(F.linear(normed, up, up_bias)), *down)


class _InPieces(torch.autograd.Function):
    """The same, piece by piece, in buffers of a piece's size: each new one would be memory that was never touched."""

    @staticmethod
    def forward(ctx: Any, eps: float, rows: Tensor, *weights: Tensor) -> Tensor:
        """Compute the outputs; keep the rows alone."""
        ctx.eps = eps
        ctx.save_for_backward(rows, *weights)
        scale, shift, up, up_bias, down, down_bias = weights
        normed = F.layer_norm(rows, scale.shape, scale, shift, eps)
        out = torch.empty_like(rows)
        (buffer,) = _buffers(up, 1)
        for piece, into in _pieces(up, normed, out):
            wide = torch.addmm(up_bias, piece, up.t(), out=buffer[: len(piece)])
            torch.ops.aten.gelu_(wide)
            torch.addmm(down_bias, wide, down.t(), out=into)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Compute each piece once more, and its gradients."""
        rows, *weights = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():  # create_graph=True: these gradients get gradients, too
            needed = ctx.needs_input_grad[1:]
            wanted = [x for x, need in zip(ctx.saved_tensors, needed, strict=True) if need]
            out = _whole(ctx.eps, rows, *weights)
            found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            return None, *(next(found) if need else None for need in needed)

        scale, shift, up, up_bias, down, _ = weights
        normed, mean, rstd = torch.native_layer_norm(rows, scale.shape, scale, shift, ctx.eps)
        of_normed = torch.empty_like(rows)
        of_up, of_up_bias, of_down = (torch.zeros_like(x) for x in (up, up_bias, down))
        buffers = _buffers(up, 3)
        for piece, of_out, into in _pieces(up, normed, grad, of_normed):
            wide, active, of_wide = (buffer[: len(piece)] for buffer in buffers)
            torch.addmm(up_bias, piece, up.t(), out=wide)
            torch.ops.aten.gelu.out(wide, out=active)
            of_down.addmm_(of_out.t(), active)

            of_active = torch.mm(of_out, down, out=active)
            torch.ops.aten.gelu_backward.grad_input(of_active, wide, grad_input=of_wide)
            of_up.addmm_(of_wide.t(), piece)
            of_up_bias += of_wide.sum(0)
            torch.mm(of_wide, up, out=into)

        of_rows, of_scale, of_shift = torch.ops.aten.native_layer_norm_backward(
            of_normed, rows, scale.shape, mean, rstd, scale, shift, [True, True, True]
        )
        return None, of_rows, of_scale, of_shift, of_up, of_up_bias, of_down, grad.sum(0)


def _pieces(up: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut columns ``[N, size]`` into the same pieces."""
    return zip(*(torch.split(column, _piece_rows(up)) for column in columns), strict=True)


def _buffers(up: Tensor, count: int) -> list[Tensor]:
    """Return buffers ``[rows of a piece, hidden]``."""
    return [up.new_empty(_piece_rows(up), len(up)) for _ in range(count)]


def _piece_rows(up: Tensor) -> int:
    """Return the rows of a piece, given the weight of the first layer, ``[hidden, size]``."""
    return max(64, _PIECE // len(up))
