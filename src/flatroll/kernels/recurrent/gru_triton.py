"""Triton kernels of a GRU over the runs of a flat batch, forward and backward; the LSTM's work the same way.

One launch goes through all steps. A program takes ``RUNS`` runs at a time, makes their steps one after another, goes
on to the next runs, and begins each run from its own first state. Nothing is moved: a run is its first row and its
length. What is a product of all rows at once (with the input, and for the gradients of the weights) is left to
torch; a step here is the product of the state with ``w_hh``, in blocks of ``UNITS`` columns, and the gates.

A state goes from one block of columns to the others through global memory. All threads of a program wait for
one another between writing it and reading it, and also between reading an entry and overwriting it, since two
threads may hold the same one.

Gates stand in ``[N, 4 H]`` as in :mod:`flatroll.modules.backends.scan`, ``n r z u`` and ``o i f g``; the
rows of ``weight`` are in the order of those that read the state, ``r z u`` and ``o i f g``. Row numbers are int64.
``REAL`` is what is computed in: float32, or float64 for float64; 16 bit types are rounded when they are stored.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Compute tanh from exp, which all devices and the interpreter have; it does not overflow."""
    small = tl.exp(-2 * tl.abs(x))
    size = (1 - small) / (1 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Compute the sigmoid from exp alone; where exp overflows to inf the result is 0."""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def runs_of_block(
    firsts: tl.tensor, lengths: tl.tensor, block: tl.tensor, runs: tl.tensor, RUNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return first row and length of each run of a block; runs after the last one have length 0."""
    run = block * RUNS + tl.arange(0, RUNS)
    first = tl.load(firsts + run, mask=run < runs, other=0)
    return first, tl.load(lengths + run, mask=run < runs, other=0)


@triton.jit
def load_gates(
    at: tl.tensor, hidden: tl.tensor, active: tl.tensor, REAL: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the entries of the four gates: ``at`` points to the first gate; each further gate is H columns later."""
    a = tl.load(at, mask=active, other=0).to(REAL)
    b = tl.load(at + hidden, mask=active, other=0).to(REAL)
    c = tl.load(at + 2 * hidden, mask=active, other=0).to(REAL)
    d = tl.load(at + 3 * hidden, mask=active, other=0).to(REAL)
    return a, b, c, d


@triton.jit
def store_gates(
    at: tl.tensor,
    hidden: tl.tensor,
    active: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
) -> None:
    """Store what :func:`load_gates` loads."""
    tl.store(at, a, mask=active)
    tl.store(at + hidden, b, mask=active)
    tl.store(at + 2 * hidden, c, mask=active)
    tl.store(at + 3 * hidden, d, mask=active)


@triton.jit
def add_product(
    total: tl.tensor,
    slopes: tl.tensor,
    weight: tl.tensor,
    GATES: tl.constexpr,
    alive: tl.tensor,
    unit: tl.tensor,
    hidden: tl.tensor,
    REAL: tl.constexpr,
    PRECISION: tl.constexpr,
    INNER: tl.constexpr,
) -> tl.tensor:
    """``total [RUNS, UNITS]`` plus the slopes ``[RUNS, GATES H]`` of these runs times the weights of these units."""
    # INNER slopes of each run at a time, and the matching rows of the weights
    for inner in range(0, GATES * hidden, INNER):  # pyright: ignore[reportArgumentType]  # compiled, an int
        k = inner + tl.arange(0, INNER)
        inside = k < GATES * hidden

        x = tl.load(slopes[:, None] + k[None, :], mask=alive & inside[None, :], other=0)
        in_weight = inside[:, None] & (unit < hidden)[None, :]
        w = tl.load(weight + (k * hidden)[:, None] + unit[None, :], mask=in_weight, other=0)

        total = tl.dot(x, w, total, input_precision=PRECISION, out_dtype=REAL)  # pyright: ignore[reportArgumentType]
    return total


@triton.jit
def gru_forward(
    count: tl.tensor,
    firsts: tl.tensor,
    lengths: tl.tensor,
    initial: tl.tensor,
    initial_stride: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    gates: tl.tensor,
    out: tl.tensor,
    hidden: tl.tensor,
    REAL: tl.constexpr,
    PRECISION: tl.constexpr,
    RUNS: tl.constexpr,
    UNITS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Compute the states after each row; the gates overwrite their input parts (``u`` has none).

    Args:
        count: int64, the number of runs.
        firsts, lengths: int64 and int32 of each run, longest run first.
        initial: states that are read at first rows, rows of ``hidden`` that are ``initial_stride`` apart.
        weight, bias: ``[3 H, H]``; ``[H]``, that of ``u``.
        gates, out: ``[N, 4 H]`` and ``[N, H]``.
    """
    runs = tl.load(count)
    for block in range(tl.program_id(0), tl.cdiv(runs, RUNS), tl.num_programs(0)):
        first, length = runs_of_block(firsts, lengths, block, runs, RUNS)
        for step in range(tl.max(length, 0)):
            row = first + step
            alive = (length > step)[:, None]

            # the state before the row: the initial one at the first row, else that of the row above
            if step == 0:
                before = initial + row * initial_stride
            else:
                before = out + (row - 1) * hidden

            for start in range(0, hidden, UNITS):
                unit = start + tl.arange(0, UNITS)
                active = alive & (unit < hidden)[None, :]

                # the first gate's entries of these rows and units; each further gate is another H columns on
                at = gates + (row * 4 * hidden)[:, None] + unit[None, :]
                n = tl.load(at, mask=active, other=0).to(REAL)
                r = tl.load(at + hidden, mask=active, other=0).to(REAL)
                z = tl.load(at + 2 * hidden, mask=active, other=0).to(REAL)
                u = tl.load(bias + unit, mask=unit < hidden, other=0).to(REAL)[None, :] + tl.zeros_like(n)

                # add the product of the state [RUNS, H] with these units' weights, INNER entries of the state at a time
                for inner in range(0, hidden, INNER):
                    k = inner + tl.arange(0, INNER)
                    x = tl.load(before[:, None] + k[None, :], mask=alive & (k < hidden)[None, :], other=0)
                    w = weight + (unit * hidden)[None, :] + k[:, None]
                    in_weight = (unit < hidden)[None, :] & (k < hidden)[:, None]

                    w_r = tl.load(w, mask=in_weight, other=0)
                    w_z = tl.load(w + hidden * hidden, mask=in_weight, other=0)
                    w_u = tl.load(w + 2 * hidden * hidden, mask=in_weight, other=0)

                    r = tl.dot(x, w_r, r, input_precision=PRECISION, out_dtype=REAL)
                    z = tl.dot(x, w_z, z, input_precision=PRECISION, out_dtype=REAL)
                    u = tl.dot(x, w_u, u, input_precision=PRECISION, out_dtype=REAL)

                r = sigmoid(r)
                z = sigmoid(z)
                n = tanh(n + r * u)

                state = tl.load(before[:, None] + unit[None, :], mask=active, other=0).to(REAL)
                tl.debug_barrier()

                store_gates(at, hidden, active, n, r, z, u)
                tl.store(out + (row * hidden)[:, None] + unit[None, :], n + z * (state - n), mask=active)

            tl.debug_barrier()


@triton.jit
def gru_backward(
    count: tl.tensor,
    firsts: tl.tensor,
    lengths: tl.tensor,
    grad: tl.tensor,
    before: tl.tensor,
    weight: tl.tensor,
    gates: tl.tensor,
    slopes: tl.tensor,
    d_first: tl.tensor,
    carry: tl.tensor,
    hidden: tl.tensor,
    REAL: tl.constexpr,
    PRECISION: tl.constexpr,
    RUNS: tl.constexpr,
    UNITS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Compute the gradients of the gates' pre-activations and of the initial states.

    Args:
        grad, before: ``[N, H]``, of the state after each row; the state before it.
        slopes: ``[N, 4 H]``, the result.
        d_first: ``[N, H]``, written at first rows.
        carry: ``[programs * RUNS, H]``, room for the gradient of the state after the row.
    """
    runs = tl.load(count)
    carried = carry + (tl.program_id(0) * RUNS + tl.arange(0, RUNS)).to(tl.int64) * hidden
    for block in range(tl.program_id(0), tl.cdiv(runs, RUNS), tl.num_programs(0)):
        first, length = runs_of_block(firsts, lengths, block, runs, RUNS)
        steps = tl.max(length, 0)
        for back in range(steps):
            step = steps - 1 - back
            row = first + step
            alive = (length > step)[:, None]

            for start in range(0, hidden, UNITS):  # pyright: ignore[reportArgumentType]  # compiled, an int
                unit = start + tl.arange(0, UNITS)
                active = alive & (unit < hidden)[None, :]
                of_gates = (row * 4 * hidden)[:, None] + unit[None, :]
                n, r, z, u = load_gates(gates + of_gates, hidden, active, REAL)

                flat = (row * hidden)[:, None] + unit[None, :]
                state = tl.load(before + flat, mask=active, other=0).to(REAL)

                at_carry = carried[:, None] + unit[None, :]
                # at a run's last row there is no carried gradient
                now = tl.load(at_carry, mask=active & (length > step + 1)[:, None], other=0)
                now += tl.load(grad + flat, mask=active, other=0).to(REAL)

                d_n = now * (1 - z) * (1 - n * n)
                d_u = d_n * r
                tl.debug_barrier()

                d_r = d_u * u * (1 - r)
                d_z = now * (state - n) * z * (1 - z)

                store_gates(slopes + of_gates, hidden, active, d_n, d_r, d_z, d_u)
                tl.store(at_carry, now * z, mask=active)
            tl.debug_barrier()

            # the gradient of the state before the row: slopes [RUNS, gates H] times the weights, in blocks of units
            to_state = slopes + row * 4 * hidden + hidden
            for start in range(0, hidden, UNITS):
                unit = start + tl.arange(0, UNITS)
                active = alive & (unit < hidden)[None, :]
                at_carry = carried[:, None] + unit[None, :]
                now = tl.load(at_carry, mask=active, other=0)
                now = add_product(now, to_state, weight, 3, alive, unit, hidden, REAL, PRECISION, INNER)

                tl.debug_barrier()
                tl.store(at_carry, now, mask=active)

                at = d_first + (row * hidden)[:, None] + unit[None, :]
                tl.store(at, now, mask=active & (row == first)[:, None])
            tl.debug_barrier()
