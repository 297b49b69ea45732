"""Benchmarks recurrent modules on flat rows: the backends, padding, TorchRL's modules, and a single step.

``python -m flatroll bench recurrent``
"""

import importlib.util
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.measure.resident import resident_peak
from benchmarks.measure.timing import Timing, ratio, table, take_turns, waited
from flatroll.modules import (
    DeltaNetModule,
    FFMModule,
    GRUModule,
    LinearRecurrentModule,
    LRUModule,
    LSTMModule,
    MinGRUModule,
    S6Module,
    set_recurrent_mode,
)
from flatroll.modules.backends.choice import fastest_backend
from flatroll.modules.backends.packing import run_index

ROWS, INPUT, HIDDEN = 4096, 64, 128
RATES = (0.0, 0.003, 0.02, 0.1, 0.3)
KEYS: dict[str, Any] = {"in_key": "observation", "out_key": "features"}
KINDS: dict[str, type[GRUModule] | type[LSTMModule]] = {"GRU": GRUModule, "LSTM": LSTMModule}

#: Memories with one state, the GRU first, and mean lengths of runs.
MEMORIES: dict[str, Any] = {
    "GRU": GRUModule,
    "MinGRU": MinGRUModule,
    "linear unit": LinearRecurrentModule,
    "LRU": LRUModule,
    "S6": S6Module,
    "FFM": FFMModule,
    "DeltaNet": DeltaNetModule,
}
MEANS = (16, 256, 4096)

#: Sequences, steps and hidden size of the batches for a GPU.
ON_GPU = ((128, 128, 256), (4096, 64, 512))

Run: TypeAlias = Callable[[], object]


def peer_module(name: str) -> tuple[Any, Any]:
    """Return TorchRL's module of equal sizes and its mode switch; (None, None) if it is not installed."""
    if not importlib.util.find_spec("torchrl"):
        return None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl import modules as peers

        return getattr(peers, f"{name}Module")(INPUT, HIDDEN, **KEYS), peers.set_recurrent_mode


def batch_of(name: str, starts: Tensor, size: int = INPUT, hidden: int = HIDDEN) -> TensorDict:
    """Create a batch of random rows with stored recurrent states."""
    rows = starts.numel()
    batch = TensorDict({"observation": torch.randn(rows, size), "is_init": starts.unsqueeze(-1)}, [rows])
    for key in KINDS[name].state_keys:
        batch[key] = torch.randn(rows, 1, hidden)
    return batch


def pass_of(module: Any, mode: Any, batch: TensorDict) -> Run:
    """Return a function that runs one forward and backward pass in recurrent mode."""

    def run() -> None:
        module.zero_grad(set_to_none=True)
        with mode("recurrent"):
            module(batch.copy())["features"].square().mean().backward()

    return run


def passes(name: str, batch: TensorDict, backends: tuple[str, ...]) -> dict[str, Run]:
    """Return the passes of flatroll's backends and of TorchRL on one batch."""
    runs = {
        backend: pass_of(
            KINDS[name](INPUT, HIDDEN, recurrent_backend=backend, **KEYS),
            set_recurrent_mode,
            batch,
        )
        for backend in backends
    }
    peer, mode = peer_module(name)
    return runs if peer is None else {**runs, "peer": pass_of(peer, mode, batch)}


def cells_of(result: dict[str, Timing], names: tuple[str, ...]) -> list[str]:
    """Format each contender's least time in ms; other programs on the machine can only add time."""
    return [f"{min(result[name].turns) * 1e3:.1f}" if name in result else "-" for name in names]


def megabytes_of(runs: dict[str, Run], names: tuple[str, ...]) -> list[str]:
    """Measure the peak memory that each contender adds in a warm call, in MB."""
    return [f"{resident_peak(runs[name]):.0f}" if name in runs else "-" for name in names]


def times_auto(result: dict[str, Timing], name: str) -> str:
    """Format a contender's time relative to the backend "auto"."""
    return f"{ratio(result[name], result['auto']):.1f} x" if name in result else "-"


def ragged(rows: int, mean: int) -> Tensor:
    """Return the start flags of runs with random lengths between 1 and ``2 * mean``."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2 * mean + 1, (rows,), generator=generator)
    starts = torch.zeros(rows + 1, dtype=torch.bool)
    starts[lengths.cumsum(0).clamp(max=rows)] = True
    starts[0] = True
    return starts[:rows]


def by_reset_rate() -> str:
    """Time forward and backward over 4,096 rows for several reset rates."""
    names = ("auto", "packed", "scan", "pad", "peer")
    table_rows = []
    for name in KINDS:
        for rate in RATES:
            starts = torch.rand(ROWS, generator=torch.Generator().manual_seed(0)) < rate
            starts[0] = True
            runs = passes(name, batch_of(name, starts), names[:4])
            result = take_turns(runs, turns=3, clock=time.thread_time)
            cells = [name, f"{rate:.1%}", str(int(starts.sum())), *cells_of(result, names)]
            times = [times_auto(result, "pad"), times_auto(result, "peer")]
            table_rows.append([*cells, *times, *megabytes_of(runs, ("auto", "pad", "peer"))])
    header = [
        "",
        "resets",
        "runs",
        "auto, ms",
        "packed",
        "scan",
        "our pad",
        "peer's pad",
        "pad / auto",
        "peer / auto",
        "auto, MB",
        "our pad",
        "peer's pad",
    ]
    return table(header, table_rows)


def by_length() -> str:
    """Time the backends over rows, run lengths and sizes: the measurements behind ``"auto"``."""
    table_rows = []
    for name in KINDS:
        for hidden in (32, 128):
            for rows in (512, 2048, 8192):
                for mean in (2, 16, 64, 256):
                    if 2 * mean >= rows:
                        continue
                    starts = ragged(rows, mean)
                    batch = batch_of(name, starts, hidden, hidden)
                    runs = {
                        backend: pass_of(
                            KINDS[name](hidden, hidden, recurrent_backend=backend, **KEYS),
                            set_recurrent_mode,
                            batch,
                        )
                        for backend in ("packed", "scan")
                    }
                    result = take_turns(runs, turns=5, clock=time.thread_time)
                    index = run_index(starts)
                    width = rows / len(index.batch_sizes)
                    dense = len(index.batch_sizes) / len(index.first)
                    share = ratio(result["packed"], result["scan"])
                    chosen = fastest_backend(
                        KINDS[name](hidden, hidden, **KEYS).net, batch["observation"], index
                    )
                    cells = [name, str(hidden), f"{rows:,}", str(mean), f"{width:.0f}", f"{dense:.1f}"]
                    table_rows.append([*cells, *cells_of(result, ("packed", "scan")), f"{share:.2f}", chosen])
    header = ["", "hidden", "rows", "mean length", "rows / steps", "steps / runs", "packed, ms", "scan, ms"]
    return table([*header, "packed / scan", "auto"], table_rows)


def on_gpu(
    tf32: bool,
    names: tuple[str, ...],
    sizes: tuple[tuple[int, int, int], ...],
    device: str,
    turns: int,
) -> str:
    """Time the Triton kernels beside cuDNN on packed and on padded runs; with TF32, and without."""
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    table_rows = []
    for name, (sequences, steps, hidden) in itertools.product(KINDS, sizes):
        for rate in RATES[1:]:
            starts = torch.rand(sequences, steps, generator=torch.Generator().manual_seed(0)) < rate
            starts[:, 0] = True
            batch = batch_of(name, starts.flatten(), hidden=hidden).to(device)
            runs = {}
            for backend in names:
                module = KINDS[name](INPUT, hidden, recurrent_backend=backend, **KEYS).to(device)
                runs[backend] = waited(pass_of(module, set_recurrent_mode, batch))
            result = take_turns(runs, turns)
            share = [f"{ratio(result[other], result[names[0]]):.2f} x" for other in names[1:]]
            shape = [name, f"{sequences:,} x {steps}", str(hidden), f"{rate:.1%}", str(int(starts.sum()))]
            table_rows.append([*shape, *cells_of(result, names), *share])
    torch.set_float32_matmul_precision(kept[0])
    torch.backends.cudnn.allow_tf32 = kept[1]
    header = ["", "rows", "hidden", "resets", "runs", *(f"{name}, ms" for name in names)]
    return table([*header, *(f"{other} / {names[0]}" for other in names[1:])], table_rows)


def linear(rows: int = ROWS, device: str = "cpu") -> str:
    """Time the linear recurrences beside a GRU; on the CPU by the thread's own time."""
    results = {mean: _time_memories(rows, min(mean, rows), device) for mean in MEANS}
    table_rows = []
    for name, kind in MEMORIES.items():
        [state] = kind(INPUT, HIDDEN, **KEYS).make_tensordict_primer().defaults.values()
        times = [f"{min(result[name].turns) * 1e3:.1f}" for result in results.values()]
        ratios = [f"{ratio(result['GRU'], result[name]):.1f} x" for result in results.values()]
        table_rows.append([name, f"{state.numel() * 4:,}", *times, *ratios])
    header = ["", "state, bytes per row", *(f"runs of {mean:,}, ms" for mean in MEANS)]
    return table([*header, *(f"GRU / it, {mean:,}" for mean in MEANS)], table_rows)


def _time_memories(rows: int, mean: int, device: str) -> dict[str, Timing]:
    """Time a pass of each memory, forward and backward, over runs of this mean length."""
    starts = ragged(rows, mean)
    runs = {}
    for name, kind in MEMORIES.items():
        module = kind(INPUT, HIDDEN, **KEYS)
        batch = TensorDict({"observation": torch.randn(rows, INPUT), "is_init": starts.unsqueeze(-1)}, [rows])
        batch.update(module.make_tensordict_primer().expand(rows))
        runs[name] = waited(pass_of(module.to(device), set_recurrent_mode, batch.to(device)))
    clock = time.thread_time if device == "cpu" else time.perf_counter
    return take_turns(runs, turns=5, clock=clock)


def one_long_run() -> str:
    """Time the worst case of padding: one run of half the rows, and many runs of one row."""
    table_rows = []
    for name in KINDS:
        for rows in (1024, 2048, 4096):
            starts = torch.ones(rows, dtype=torch.bool)
            starts[1 : rows // 2] = False
            # padding takes over a minute and 5 GB for the last one
            runs = passes(name, batch_of(name, starts), ("auto",))
            if rows > 2048:
                runs.pop("peer", None)
            result = take_turns(runs, turns=1, clock=time.thread_time)
            cells = [name, f"{rows:,}", *cells_of(result, ("auto", "peer")), times_auto(result, "peer")]
            table_rows.append([*cells, *megabytes_of(runs, ("auto", "peer"))])
    header = ["", "rows", "auto, ms", "peer's pad, ms", "ratio", "auto, MB", "peer's pad, MB"]
    return table(header, table_rows)


def call_of(module: Any, *arguments: Any) -> Run:
    """Return a function that calls ``module`` with these arguments."""
    return lambda: module(*arguments)


def single_step() -> str:
    """Time one vector step of a rollout, in µs."""
    table_rows = []
    for name, kind in KINDS.items():
        ours = kind(INPUT, HIDDEN, **KEYS)
        peer, _ = peer_module(name)
        for envs in (16, 64, 1024):
            batch = batch_of(name, torch.rand(envs) < 0.02)
            step = batch["observation"].unsqueeze(1)
            states = [batch[key].transpose(0, 1).contiguous() for key in kind.state_keys]
            stock = call_of(ours.net, step, states[0] if len(states) == 1 else tuple(states))
            runs = {"stock": stock, "ours": call_of(ours, batch)}
            if peer is not None:
                runs["peer"] = call_of(peer, batch.clone())
            with torch.no_grad():
                result = take_turns(runs, turns=9, calls=50, clock=time.thread_time)
            micros = [f"{min(timing.turns) * 1e6:.0f}" for timing in result.values()]
            table_rows.append([name, f"{envs:,}", *micros, *["-"] * (3 - len(micros))])
    return table(["", "envs", "stock network alone, µs", "our module, µs", "peer's module, µs"], table_rows)


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)  # on a busy machine a second thread that waits is timed, not the work
    torch.manual_seed(0)
    print(f"Forward and backward, {INPUT} -> {HIDDEN}, {ROWS:,} rows, thread time of one thread\n")
    print(by_reset_rate())
    print("\nRuns with lengths between 1 and twice the mean, forward and backward\n")
    print(by_length())
    print(f"\nLinear recurrences, {INPUT} -> {HIDDEN}, {ROWS:,} rows, forward and backward\n")
    print(linear())
    print("\nOne run with half of the rows, the others in runs of one row, forward and backward\n")
    print(one_long_run())
    print("\nOne step of a rollout\n")
    print(single_step())


if __name__ == "__main__":
    main()
