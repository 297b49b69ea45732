"""Triton kernels of an LSTM over the runs of a flat batch.

:mod:`flatroll.kernels.recurrent.gru_triton` says how it works.
"""

import triton
import triton.language as tl

from flatroll.kernels.recurrent.gru_triton import (
    add_product,
    load_gates,
    runs_of_block,
    sigmoid,
    store_gates,
    tanh,
)


@triton.jit
def lstm_forward(
    count: tl.tensor,
    firsts: tl.tensor,
    lengths: tl.tensor,
    initial: tl.tensor,
    initial_stride: tl.tensor,
    initial_cell: tl.tensor,
    cell_stride: tl.tensor,
    weight: tl.tensor,
    gates: tl.tensor,
    out: tl.tensor,
    cells: tl.tensor,
    hidden: tl.tensor,
    REAL: tl.constexpr,
    PRECISION: tl.constexpr,
    RUNS: tl.constexpr,
    UNITS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Compute outputs and cells after each row; gates overwrite their input parts, as in ``gru_forward``."""
    runs = tl.load(count)
    for block in range(tl.program_id(0), tl.cdiv(runs, RUNS), tl.num_programs(0)):
        first, length = runs_of_block(firsts, lengths, block, runs, RUNS)
        for step in range(tl.max(length, 0)):
            row = first + step
            alive = (length > step)[:, None]

            # the state before the row: the initial one at the first row, else that of the row above
            if step == 0:
                before = initial + row * initial_stride
                before_cell = initial_cell + row * cell_stride
            else:
                before = out + (row - 1) * hidden
                before_cell = cells + (row - 1) * hidden

            for start in range(0, hidden, UNITS):
                unit = start + tl.arange(0, UNITS)
                active = alive & (unit < hidden)[None, :]
                of_gates = (row * 4 * hidden)[:, None] + unit[None, :]
                o, i, f, g = load_gates(gates + of_gates, hidden, active, REAL)

                # add the product of the state [RUNS, H] with these units' weights, INNER entries of the state at a time
                for inner in range(0, hidden, INNER):
                    k = inner + tl.arange(0, INNER)
                    x = tl.load(before[:, None] + k[None, :], mask=alive & (k < hidden)[None, :], other=0)
                    w = weight + (unit * hidden)[None, :] + k[:, None]
                    in_weight = (unit < hidden)[None, :] & (k < hidden)[:, None]

                    w_o = tl.load(w, mask=in_weight, other=0)
                    w_i = tl.load(w + hidden * hidden, mask=in_weight, other=0)
                    w_f = tl.load(w + 2 * hidden * hidden, mask=in_weight, other=0)
                    w_g = tl.load(w + 3 * hidden * hidden, mask=in_weight, other=0)

                    o = tl.dot(x, w_o, o, input_precision=PRECISION, out_dtype=REAL)
                    i = tl.dot(x, w_i, i, input_precision=PRECISION, out_dtype=REAL)
                    f = tl.dot(x, w_f, f, input_precision=PRECISION, out_dtype=REAL)
                    g = tl.dot(x, w_g, g, input_precision=PRECISION, out_dtype=REAL)

                o = sigmoid(o)
                i = sigmoid(i)
                f = sigmoid(f)
                g = tanh(g)

                cell = tl.load(before_cell[:, None] + unit[None, :], mask=active, other=0).to(REAL)
                cell = f * cell + i * g

                tl.debug_barrier()
                store_gates(gates + of_gates, hidden, active, o, i, f, g)

                flat = (row * hidden)[:, None] + unit[None, :]
                tl.store(cells + flat, cell, mask=active)
                tl.store(out + flat, o * tanh(cell), mask=active)

            tl.debug_barrier()


@triton.jit
def lstm_backward(
    count: tl.tensor,
    firsts: tl.tensor,
    lengths: tl.tensor,
    grad: tl.tensor,
    grad_cell: tl.tensor,
    initial_cell: tl.tensor,
    cell_stride: tl.tensor,
    weight: tl.tensor,
    cells: tl.tensor,
    gates: tl.tensor,
    slopes: tl.tensor,
    d_first: tl.tensor,
    d_cell: tl.tensor,
    carry: tl.tensor,
    carry_cell: tl.tensor,
    hidden: tl.tensor,
    GRAD: tl.constexpr,
    GRAD_CELL: tl.constexpr,
    REAL: tl.constexpr,
    PRECISION: tl.constexpr,
    RUNS: tl.constexpr,
    UNITS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Do what ``gru_backward`` does; reads ``grad`` only if ``GRAD``, ``grad_cell`` only if ``GRAD_CELL``."""
    runs = tl.load(count)
    slot = (tl.program_id(0) * RUNS + tl.arange(0, RUNS)).to(tl.int64) * hidden
    for block in range(tl.program_id(0), tl.cdiv(runs, RUNS), tl.num_programs(0)):
        first, length = runs_of_block(firsts, lengths, block, runs, RUNS)
        steps = tl.max(length, 0)
        for back in range(steps):
            step = steps - 1 - back
            row = first + step
            alive = (length > step)[:, None]
            later = (length > step + 1)[:, None]  # at a run's last row there is no carried gradient

            if step == 0:
                before_cell = initial_cell + row * cell_stride
            else:
                before_cell = cells + (row - 1) * hidden

            for start in range(0, hidden, UNITS):
                unit = start + tl.arange(0, UNITS)
                active = alive & (unit < hidden)[None, :]
                of_gates = (row * 4 * hidden)[:, None] + unit[None, :]
                o, i, f, g = load_gates(gates + of_gates, hidden, active, REAL)
                flat = (row * hidden)[:, None] + unit[None, :]

                # the cells after the row and before it
                through = tanh(tl.load(cells + flat, mask=active, other=0).to(REAL))
                cell = tl.load(before_cell[:, None] + unit[None, :], mask=active, other=0).to(REAL)

                # the gradients of output and cell: those carried from the row after, and the row's own
                at_carry = slot[:, None] + unit[None, :]
                now = tl.load(carry + at_carry, mask=active & later, other=0)
                now_cell = tl.load(carry_cell + at_carry, mask=active & later, other=0)
                if GRAD:
                    now += tl.load(grad + flat, mask=active, other=0).to(REAL)
                if GRAD_CELL:
                    now_cell += tl.load(grad_cell + flat, mask=active, other=0).to(REAL)

                now_cell += now * o * (1 - through * through)
                tl.debug_barrier()

                d_o = now * through * o * (1 - o)
                d_i = now_cell * g * i * (1 - i)
                d_f = now_cell * cell * f * (1 - f)
                d_g = now_cell * i * (1 - g * g)

                store_gates(slopes + of_gates, hidden, active, d_o, d_i, d_f, d_g)
                tl.store(carry_cell + at_carry, now_cell * f, mask=active)
                tl.store(d_cell + flat, now_cell * f, mask=active & (row == first)[:, None])
            tl.debug_barrier()

            # the gradient of the state before the row: slopes [RUNS, gates H] times the weights, in blocks of units
            to_state = slopes + row * 4 * hidden
            for start in range(0, hidden, UNITS):
                unit = start + tl.arange(0, UNITS)
                active = alive & (unit < hidden)[None, :]
                now = tl.zeros((RUNS, UNITS), REAL)
                now = add_product(now, to_state, weight, 4, alive, unit, hidden, REAL, PRECISION, INNER)

                tl.store(carry + slot[:, None] + unit[None, :], now, mask=active)
                at = d_first + (row * hidden)[:, None] + unit[None, :]
                tl.store(at, now, mask=active & (row == first)[:, None])
            tl.debug_barrier()
