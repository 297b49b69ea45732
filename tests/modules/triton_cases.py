"""What the Triton kernels are held against, on a GPU or in Triton's interpreter.

The interpreter is a matter of the environment when triton is first imported, so test_triton.py runs this file in a
process of its own: ``TRITON_INTERPRET=1 python triton_cases.py cpu``, or without that variable ``cuda``, prints how far
each case is off in units of what is allowed, as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from flatroll.modules import GRUModule, LSTMModule, set_recurrent_mode
from flatroll.modules.backends import choice as backends
from flatroll.modules.backends.on_triton import scan as triton_scan

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-2}
KINDS = {"GRU": nn.GRU, "LSTM": nn.LSTM}
MODULES = {"GRU": GRUModule, "LSTM": LSTMModule}

#: Lengths of runs, and what differs from float64, 3 -> 5, one layer, with biases.
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one row": ([1], {}),
    "one run": ([6], {}),
    "first, last and adjacent resets": ([1, 3, 1, 1, 4, 1], {}),
    "rows alone": ([1] * 5, {}),
    "more runs than a program takes at once": ([1, 2] * 25 + [7], {"hidden": 3}),
    "three layers": ([2, 1, 3], {"layers": 3, "hidden": 1, "size": 1}),
    "two layers without bias, nothing passed on": ([2, 3], {"layers": 2, "bias": False, "dropout": 1.0}),
    "three blocks of columns": ([3, 1, 2], {"hidden": 70, "size": 2}),
    "float32": ([3, 1, 2], {"hidden": 33, "dtype": torch.float32}),
    "float16": ([3, 1, 2], {"hidden": 16, "dtype": torch.float16}),
    "output alone": ([3, 2], {"used": "output"}),
    "states alone": ([3, 2], {"used": "states"}),
}


def starts_of(lengths: list[int]) -> Tensor:
    starts = torch.zeros(sum(lengths), dtype=torch.bool)
    starts[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    return starts


def run_by_run(
    net: nn.RNNBase, rows: Tensor, stored: tuple[Tensor, ...], lengths: list[int]
) -> tuple[Tensor, ...]:
    """The oracle: the stock network on one run after another; outputs, and states after the last rows."""
    outputs, finals, first = [], [], 0
    for length in lengths:
        states = tuple(state[first].unsqueeze(1) for state in stored)
        out, final = net(rows[first : first + length].unsqueeze(0), states if len(states) > 1 else states[0])
        outputs.append(out.squeeze(0))
        finals.append(final if isinstance(final, tuple) else (final,))
        first += length
    return torch.cat(outputs), *(
        torch.stack([x.squeeze(1) for x in kind]) for kind in zip(*finals, strict=True)
    )


def weighted_sum(values: tuple[Tensor, ...]) -> Tensor:
    """A loss whose gradient differs at every entry."""
    cosines = (torch.arange(x.numel()).view_as(x).cos().to(x.dtype) for x in values)
    return sum(((x * c).sum() for x, c in zip(values, cosines, strict=True)), start=values[0].new_zeros(()))


def off_by(
    mode: str,
    lengths: list[int],
    *,
    hidden: int = 5,
    size: int = 3,
    layers: int = 1,
    dtype: torch.dtype = torch.float64,
    used: str = "both",
    **options: Any,
) -> float:
    """The largest difference in outputs, states and gradients, in units of what is allowed."""
    torch.manual_seed(0)
    net = KINDS[mode](size, hidden, layers, batch_first=True, **options).to(dtype)
    rows = torch.randn(sum(lengths), size).to(dtype).requires_grad_()
    stored = tuple(
        torch.randn(sum(lengths), layers, hidden).to(dtype).requires_grad_()
        for _ in range(1 + (mode == "LSTM"))
    )
    leaves = [rows, *stored, *net.parameters()]
    last = torch.tensor(lengths).cumsum(0) - 1
    out, after = triton_scan.in_runs(net, rows, stored, starts_of(lengths))
    pairs = []
    for values in ((out, *(state[last] for state in after)), run_by_run(net, rows, stored, lengths)):
        chosen = {"both": values, "output": values[:1], "states": values[-1:]}[used]
        grads = torch.autograd.grad(weighted_sum(chosen), leaves, allow_unused=True, retain_graph=True)
        pairs.append(
            [*values, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]
        )
    worst = [((a - b).abs() / (1 + b.abs())).max().item() for a, b in zip(*pairs, strict=True)]
    return max(worst) / TOLERANCE[dtype]


def modules(mode: str, run: Callable[[Any], Any] = lambda module: module, **options: Any) -> float:
    """A module of this backend against one that is packed, over a batch with a reset at random."""
    torch.manual_seed(0)
    found = []
    for backend in ("triton", "auto"):
        module = MODULES[mode](3, 4, 2, in_key="x", out_key="y", recurrent_backend=backend, **options)
        module.load_state_dict(found[0][0].state_dict() if found else module.state_dict())
        torch.manual_seed(1)
        batch = TensorDict({"x": torch.randn(9, 3), "is_init": torch.rand(9, 1) < 0.4}, [9])
        for key in module.state_keys:
            batch[key] = torch.randn(9, 2, 4)
        with set_recurrent_mode("recurrent"):
            out = (run(module) if backend == "triton" else module)(batch)
        keys = ["y", *(("next", key) for key in module.state_keys)]
        found.append((module, [out[key] for key in keys]))
    return max((a - b).abs().max().item() for a, b in zip(found[0][1], found[1][1], strict=True)) / 1e-6


def nan_stays(mode: str) -> float:
    """How many rows of other runs a NaN reaches, forward and backward."""
    torch.manual_seed(0)
    net = KINDS[mode](3, 5, batch_first=True)
    rows = torch.randn(8, 3)
    rows[4] = torch.nan
    rows.requires_grad_()
    stored = (torch.zeros(8, 1, 5),) * (1 + (mode == "LSTM"))
    out, _ = triton_scan.in_runs(net, rows, stored, starts_of([3, 3, 2]))
    (grad,) = torch.autograd.grad(out.sum(), rows)
    reached = out.isnan().any(1), grad.isnan().any(1)
    assert reached[0].tolist() == [False] * 4 + [True] * 2 + [False] * 2
    return float((reached[1] & torch.tensor([True] * 3 + [False] * 3 + [True] * 2)).sum())


def lost_reset(mode: str) -> float:
    """One over what is found when a reset is overlooked: 0 if that goes unnoticed is far above 1."""
    kept = triton_scan.run_list
    triton_scan.run_list = lambda starts: kept(starts & (torch.arange(len(starts)) != 3))
    try:
        found = off_by(mode, [3, 2, 1])
    finally:
        triton_scan.run_list = kept
    return 1e6 / max(found, 1e-9)


def rules(mode: str) -> float:
    """0 if the operator keeps the rules of torch (schema, gradient, shapes without data as with it), else an error."""
    lstm = mode == "LSTM"
    gates, starts = (4 if lstm else 3) * 5, starts_of([1, 3])
    shapes = [(4, 3), *[(4, 5)] * (1 + lstm), (gates, 3), (gates, 5), (gates,), (gates,)]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = triton_scan.OPERATORS[mode]
    torch.library.opcheck(operator, [*given, starts, *triton_scan.run_list(starts)], test_utils=checks)
    return 0.0


def waits(mode: str) -> float:
    """0 if the host waits for the device nowhere in a pass and its gradient; else an error."""
    net = KINDS[mode](3, 5, 2, batch_first=True)
    rows, stored = torch.randn(9, 3, requires_grad=True), (torch.randn(9, 2, 5),) * (1 + (mode == "LSTM"))
    starts = starts_of([3, 4, 2])
    for debug_mode in ("default", "error"):  # the first pass compiles
        torch.cuda.set_sync_debug_mode(debug_mode)
        out, after = triton_scan.in_runs(net, rows, stored, starts)
        (out.sum() + after[0].sum()).backward()
    torch.cuda.set_sync_debug_mode("default")
    return 0.0


def results(device: str) -> Iterator[tuple[str, float]]:
    torch.set_default_device(device)
    torch.backends.cudnn.allow_tf32 = False
    if device == "cpu":  # that of the interpreter's tensors, which the backend itself refuses
        backends.BY_ROW["triton"] = triton_scan.in_runs
    for mode in KINDS:
        for name, (lengths, options) in CASES.items():
            yield f"{mode}, {name}", off_by(mode, lengths, **options)
        yield f"{mode}, module", modules(mode)
        yield f"{mode}, module from zeros", modules(mode, state="zero")
        yield f"{mode}, NaN", nan_stays(mode)
        yield f"{mode}, a reset overlooked is seen", lost_reset(mode)
        yield f"{mode}, rules", rules(mode)
        if device == "cuda":
            yield f"{mode}, waits", waits(mode)
    compiled = torch.compile(fullgraph=True, backend="eager")
    yield "GRU, one graph", modules("GRU", compiled, python_based=True)


if __name__ == "__main__":
    print(json.dumps(dict(results(sys.argv[1]))))
