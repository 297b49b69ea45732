"""The backend ``"triton"``: one CUDA kernel per layer, on runs in batch order.

Rows are not moved or padded. Runs are sorted longest first, so that a program's runs have similar lengths and the
longest start first; this happens on the device without a host sync. As in :mod:`flatroll.modules.backends.scan`,
torch computes the product with the input and the gradients of rows and weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatroll.modules.backends.packing import States
from flatroll.modules.backends.scan import (
    gru_gradients,
    gru_layer,
    lstm_gradients,
    lstm_layer,
    run_layers,
)

#: Runs per program: the minimum number of rows of a Triton matrix product.
RUNS = 16
#: Programs per multiprocessor, to hide memory latency.
PROGRAMS = 4
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def on_device(net: nn.RNNBase, rows: Tensor, stored: States, starts: Tensor) -> tuple[Tensor, States]:
    """Compute :func:`in_runs`; ValueError for tensors that are not on CUDA."""
    if rows.device.type != "cuda":
        raise ValueError(
            f"recurrent_backend='triton' needs CUDA tensors, got rows on {rows.device}: move module and batch to a "
            "GPU, or build the module with recurrent_backend='auto'"
        )
    return in_runs(net, rows, stored, starts)


def in_runs(net: nn.RNNBase, rows: Tensor, stored: States, starts: Tensor) -> tuple[Tensor, States]:
    """Run all layers of a GRU or LSTM over the runs of a flat batch.

    Products are made in float32, or in TF32 where torch's own may be
    (``torch.set_float32_matmul_precision("high")``). Differentiable once.

    Args:
        net: ``nn.GRU`` or ``nn.LSTM``, or one of :mod:`flatroll.modules.networks`.
        rows: ``[N, input_size]`` of float32, float64, float16 or bfloat16.
        stored: states ``[N, num_layers, H]``; those of first rows are used.
        starts: bool ``[N]``, True on the first row of every run, row 0 among them.

    Returns:
        outputs ``[N, H]`` and states after each row ``[N, num_layers, H]``.

    Raises:
        ValueError: there is no row.
        TypeError: another dtype.
    """
    if not len(rows):
        raise ValueError("batch must have at least one row, got batch size [0]")
    if rows.dtype not in DTYPES:
        raise TypeError(f"rows must be one of {', '.join(map(str, DTYPES))}, got {rows.dtype}")

    by_layer = tuple(state.transpose(0, 1) for state in stored)
    out, after = run_layers(OPERATORS, net, rows, by_layer, starts, *run_list(starts))
    return out, tuple(torch.stack(state, 1) for state in after)


def run_list(starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """List the runs of a flat batch, longest first, in tensors of static shape ``[N]``.

    Returns:
        their number, int64 ``[]``; first row of each, int64 ``[N]``; length, int32 ``[N]``, 0 behind the last run.

    >>> count, firsts, lengths = run_list(torch.tensor([True, False, True, False, False]))
    >>> count.item(), firsts[:2].tolist(), lengths.tolist()
    (2, [2, 0], [3, 2, 0, 0, 0])
    """
    rows = torch.arange(len(starts), device=starts.device)
    end = rows.new_full((1,), len(starts))

    # for each row the next start after it: the minimum over all later rows
    later = torch.cat([torch.where(starts, rows, end)[1:], end])
    next_start = later.flip(0).cummin(0).values.flip(0)

    # rows that start no run have length 0, so that sorting moves them behind all runs
    lengths = torch.where(starts, next_start - rows, 0).int()
    lengths, firsts = lengths.sort(descending=True, stable=True)
    return starts.sum(), firsts, lengths


def _states_before(first: Tensor, states: Tensor, starts: Tensor) -> Tensor:
    """The state that each row starts from, ``[N, H]``."""
    before = torch.empty_like(states)
    before[0] = first[0]
    torch.where(starts[1:, None], first[1:], states[:-1], out=before[1:])
    return before


def precision() -> str:
    """Return the precision of float32 products, "tf32" or "ieee", as set in torch."""
    matmul: Any = torch.backends.cuda.matmul
    try:
        tf32 = matmul.fp32_precision == "tf32"
    except AttributeError:  # torch before 2.9
        tf32 = matmul.allow_tf32

    if tf32:
        return "tf32"
    return "ieee"


def kernel_options(hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the kernels' compile-time constants for this hidden size and dtype.

    A tile of ``w_hh`` has at most 64 x 32 entries (of float64 32 x 32). Two of each gate are on their way while a third
    is used, 72 KB for an LSTM, in the shared memory of every device since compute capability 8.0.
    """
    import triton.language as tl

    real = tl.float32
    inner = 64
    if dtype is torch.float64:
        real = tl.float64
        inner = 32
    tile = max(16, 1 << (hidden - 1).bit_length())
    return {
        "REAL": real,
        "PRECISION": precision(),
        "RUNS": RUNS,
        "UNITS": min(tile, 32),
        "INNER": min(tile, inner),
        "num_warps": 4,
        "num_stages": 3,
        "enable_fp_fusion": True,
    }


def _launch(name: str, like: Tensor, hidden: int, programs: int, *arguments: Any, **used: bool) -> None:
    from flatroll.kernels.recurrent import gru_triton, lstm_triton

    module = lstm_triton if name.startswith("lstm") else gru_triton
    kernel = getattr(module, name)

    with torch.cuda.device_of(like):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        kernel[(programs,)](*arguments, hidden, **used, **kernel_options(hidden, like.dtype))


def _programs(rows: Tensor) -> int:
    """Enough to fill the device, no more than there can be blocks of runs. In Triton's interpreter, two."""
    if not rows.is_cuda:
        return 2
    multiprocessors = torch.cuda.get_device_properties(rows.device).multi_processor_count
    return min(-(-len(rows) // RUNS), PROGRAMS * multiprocessors)


def _carry(programs: int, hidden: int, like: Tensor) -> Tensor:
    """Allocate the gradients of the states after a row, one per run that a program processes."""
    dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    return torch.empty(programs * RUNS, hidden, dtype=dtype, device=like.device)


def _dense_rows(states: Tensor) -> Tensor:
    """Return states with contiguous rows; the rows may be strided or all the same one."""
    if states.stride(0) == 0:
        return states[:1].contiguous().expand_as(states)
    if states.stride(1) == 1:
        return states
    return states.contiguous()


@torch.library.custom_op("flatroll::gru_triton", mutates_args=())
def gru_triton(
    rows: Tensor,
    first: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    starts: Tensor,
    count: Tensor,
    firsts: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute one GRU layer over the runs of a flat batch.

    Args:
        rows: ``[N, input_size]``.
        first: ``[N, H]``, read at first rows.
        w_ih, w_hh, b_ih, b_hh: weights of ``nn.GRU``; biases both or neither.
        starts: bool ``[N]``.
        count, firsts, lengths: of :func:`run_list`.

    Returns:
        states after each row ``[N, H]``; gates ``[N, 4 H]``, for the gradient.
    """
    hidden = w_hh.shape[1]
    first = _dense_rows(first)
    out = rows.new_empty(len(rows), hidden)
    gates = rows.new_empty(len(rows), 4 * hidden)
    from_rows = gates[:, : 3 * hidden]
    bias = w_hh.new_zeros(hidden)

    torch.mm(rows, w_ih.roll(hidden, 0).t(), out=from_rows)
    if b_ih is not None and b_hh is not None:
        # only u keeps its own bias, because the reset gate multiplies the state's part of n including the bias
        bias = b_hh[2 * hidden :].clone()
        from_rows += b_ih.roll(hidden) + torch.cat([torch.zeros_like(bias), b_hh[: 2 * hidden]])

    runs = (count, firsts, lengths)
    weight = w_hh.contiguous()
    arguments = (*runs, first, first.stride(0), weight, bias, gates, out)
    _launch("gru_forward", rows, hidden, _programs(rows), *arguments)
    return out, gates


@torch.library.custom_op("flatroll::gru_triton_backward", mutates_args=())
def gru_triton_backward(
    grad: Tensor,
    rows: Tensor,
    first: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    out: Tensor,
    gates: Tensor,
    starts: Tensor,
    count: Tensor,
    firsts: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of rows, initial states ``first``, w_ih, w_hh, b_ih and b_hh."""
    hidden = w_hh.shape[1]
    programs = _programs(rows)
    before = _states_before(first, out, starts)

    slopes = torch.empty_like(gates)
    d_first = torch.zeros_like(out)
    carry = _carry(programs, hidden, out)
    arguments = (grad.contiguous(), before, w_hh.contiguous(), gates, slopes, d_first, carry)
    _launch("gru_backward", rows, hidden, programs, count, firsts, lengths, *arguments)

    return gru_gradients(slopes, rows, before, w_ih, d_first)


@torch.library.custom_op("flatroll::lstm_triton", mutates_args=())
def lstm_triton(
    rows: Tensor,
    first: Tensor,
    first_cell: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    starts: Tensor,
    count: Tensor,
    firsts: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of an LSTM over the runs of a flat batch; arguments as for :func:`gru_triton`.

    Returns:
        outputs and cells after each row, each ``[N, H]``; gates ``[N, 4 H]``, for the gradient.
    """
    hidden = w_hh.shape[1]
    first = _dense_rows(first)
    first_cell = _dense_rows(first_cell)
    out = rows.new_empty(len(rows), hidden)
    cells = rows.new_empty(len(rows), hidden)

    weight = w_ih.roll(hidden, 0).t()
    if b_ih is not None and b_hh is not None:
        gates = torch.addmm((b_ih + b_hh).roll(hidden), rows, weight)
    else:
        gates = rows @ weight

    states = (first, first.stride(0), first_cell, first_cell.stride(0))
    arguments = (count, firsts, lengths, *states, w_hh.roll(hidden, 0), gates, out, cells)
    _launch("lstm_forward", rows, hidden, _programs(rows), *arguments)
    return out, cells, gates


@torch.library.custom_op("flatroll::lstm_triton_backward", mutates_args=())
def lstm_triton_backward(
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
    starts: Tensor,
    count: Tensor,
    firsts: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of rows, first, first_cell, w_ih, w_hh and bias (the same one for both biases)."""
    hidden = w_hh.shape[1]
    programs = _programs(rows)
    first_cell = _dense_rows(first_cell)

    slopes = torch.empty_like(gates)
    d_first = torch.zeros_like(out)
    d_cell = torch.zeros_like(out)

    # Without a gradient the kernel does not read the tensor that stands for it.
    grads = [out if x is None else x.contiguous() for x in (grad, grad_cell)]
    arguments = (*grads, first_cell, first_cell.stride(0), w_hh.roll(hidden, 0), cells, gates)
    results = (slopes, d_first, d_cell, _carry(programs, hidden, out), _carry(programs, hidden, out))
    used = {"GRAD": grad is not None, "GRAD_CELL": grad_cell is not None}
    _launch("lstm_backward", rows, hidden, programs, count, firsts, lengths, *arguments, *results, **used)

    return lstm_gradients(slopes, rows, _states_before(first, out, starts), w_ih, d_first, d_cell)


#: The function for one layer, by the mode of the network.
OPERATORS: Mapping[str, Callable[..., Any]] = {
    "GRU": gru_layer(gru_triton, gru_triton_backward),
    "LSTM": lstm_layer(lstm_triton, lstm_triton_backward),
}
