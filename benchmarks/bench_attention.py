"""Benchmarks TransformerModule on flat rows beside padding and a masked window; how its cost grows; a single step.

``python -m flatroll bench attention``
"""

import itertools
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from benchmarks.measure.resident import resident_peak
from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.layout.boundaries import steps_into_run
from flatroll.modules import GRUModule, TransformerModule, set_recurrent_mode

ROWS, WIDTH, HEADS, LAYERS = 4096, 128, 4, 2
SIZE = WIDTH // HEADS
KEYS: dict[str, Any] = {"in_key": "observation", "out_key": "features"}
#: Share of rows that begin an episode, and steps of a window.
SETTINGS = ((0.1, 64), (0.02, 64), (0.02, 256), (0.003, 256), (0.003, 1024))

CONTEXTS: dict[str, int | None] = {
    "context=None": None,
    "context=256": 256,
    "context=64": 64,
    "context=16": 16,
}
SHOWN = ("context=None", "context=64")

Run: TypeAlias = Callable[[], object]


def by_hand(
    network: Any, rows: Tensor, positions: Tensor, shape: tuple[int, int], mask: Tensor | None
) -> Tensor:
    """Compute a network's outputs as one writes it for ``[B, T]`` rows, flat in memory: causal, or with a mask."""
    angles = positions[:, None, None] * 10_000.0 ** -(torch.arange(SIZE // 2) / (SIZE // 2))
    turns = torch.polar(torch.ones(()), angles)  # [N, 1, size / 2]

    hidden = network.embed(rows)
    for block in network.blocks:
        projected = block.projection(block.attention_norm(hidden))
        query, key, value = projected.view(len(rows), 3, HEADS, SIZE).unbind(1)
        query, key = (
            torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)
            for x in (query, key)
        )
        query, key, value = (x.unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        hidden = hidden + block.attention_out(out.transpose(1, 2).flatten(2).flatten(0, 1))
        hidden = hidden + block.mlp(block.mlp_norm(hidden))
    outputs: Tensor = network.norm(hidden)
    return outputs


def starts_of(rate: float, steps: int, rows: int = ROWS) -> Tensor:
    """Return the first rows of runs: resets at random, and windows of ``steps`` rows."""
    starts = torch.rand(rows, generator=torch.Generator().manual_seed(0)) < rate
    starts[::steps] = True
    return starts


def module_of(**options: Any) -> TransformerModule:
    """Create the module of all tables."""
    torch.manual_seed(0)
    return TransformerModule(WIDTH, WIDTH, LAYERS, HEADS, **KEYS, **options)


def flat(module: Any, rows: Tensor, starts: Tensor) -> Run:
    """Return a forward and backward pass over flat rows."""
    batch = TensorDict({"observation": rows, "is_init": starts.unsqueeze(-1)}, [len(rows)])

    def run() -> Tensor:
        module.zero_grad(set_to_none=True)
        with set_recurrent_mode("recurrent"):
            out: Tensor = module(batch.copy())["features"]
        return learned(out)

    return run


def learned(out: Tensor) -> Tensor:
    """Make the backward pass; return the outputs."""
    loss: Any = out.square().mean()
    loss.backward()
    return out


def windowed(module: TransformerModule, rows: Tensor, starts: Tensor, steps: int) -> Run:
    """Return the same pass over windows ``[B, T]``, with a mask of the rows of one run."""

    def run() -> Tensor:
        module.zero_grad(set_to_none=True)
        run_of = starts.cumsum(0).view(-1, steps)
        mask = (run_of[:, :, None] == run_of[:, None]).tril_().unsqueeze(1)
        shape = (len(run_of), steps)
        return learned(by_hand(module.network, rows, steps_into_run(starts), shape, mask))

    return run


def padded(module: TransformerModule, rows: Tensor, starts: Tensor) -> Run:
    """Return the same pass over runs padded to the longest one."""

    def run() -> Tensor:
        module.zero_grad(set_to_none=True)
        position = steps_into_run(starts)
        lengths = starts.nonzero().squeeze(1).diff(append=torch.tensor([len(rows)]))
        wide = pad_sequence([*torch.split(rows, lengths.tolist())], batch_first=True)
        shape = (wide.shape[0], wide.shape[1])
        places = torch.arange(shape[1]).repeat(shape[0])
        padded = by_hand(module.network, wide.flatten(0, 1), places, shape, None)
        return learned(padded.index_select(0, (starts.cumsum(0) - 1) * shape[1] + position))

    return run


def by_setting() -> str:
    """Time and peak memory of the three forms, which give the same outputs."""
    table_rows = []
    module = module_of()
    rows = torch.randn(ROWS, WIDTH)
    for rate, steps in SETTINGS:
        starts = starts_of(rate, steps)
        runs: dict[str, Run] = {
            "flat": flat(module, rows, starts),
            "window": windowed(module, rows, starts, steps),
            "padded": padded(module, rows, starts),
        }
        expected: Any = runs["flat"]()
        for name in ("window", "padded"):
            other: Any = runs[name]()
            torch.testing.assert_close(other, expected, atol=1e-4, rtol=0)

        result = take_turns(runs, turns=5, clock=time.thread_time)
        longest = int(steps_into_run(starts).max()) + 1
        milliseconds = [f"{min(result[name].turns) * 1e3:.0f}" for name in runs]
        shares = [f"{ratio(result['flat'], result[name]):.2f} x" for name in ("window", "padded")]
        peaks = [f"{resident_peak(run):.0f}" for run in runs.values()]
        shape = [f"{rate:.1%}", f"{steps:,}", f"{int(starts.sum())}", f"{longest:,}"]
        table_rows.append([*shape, *milliseconds, *shares, *peaks])

    header = ["resets", "T", "runs", "longest", "flat, ms", "window, ms", "padded, ms"]
    return table(
        [*header, "flat / window", "flat / padded", "flat, MB", "window, MB", "padded, MB"], table_rows
    )


def by_rows() -> str:
    """Time a pass over more and more rows, in runs of 1,024 rows at most."""
    table_rows = []
    for count in (4096, 8192, 16384, 32768, 65536):
        rows = torch.randn(count, WIDTH)
        starts = starts_of(0.003, 1024, count)
        runs = {name: flat(module_of(context=CONTEXTS[name]), rows, starts) for name in SHOWN}
        result = take_turns(runs, turns=2, clock=time.thread_time)
        micros = [f"{min(timing.turns) / count * 1e6:.1f}" for timing in result.values()]
        table_rows.append([f"{count:,}", *micros])
    return table(["rows", *(f"{name}, µs a row" for name in SHOWN)], table_rows)


def by_length() -> str:
    """Time a pass over 16,384 rows in runs of one length: what a limited context saves."""
    table_rows = []
    rows = torch.randn(16_384, WIDTH)
    for length in (64, 1024, 4096, 16_384):
        starts = torch.arange(len(rows)) % length == 0
        runs = {name: flat(module_of(context=context), rows, starts) for name, context in CONTEXTS.items()}
        result = take_turns(runs, turns=2, clock=time.thread_time)
        table_rows.append([f"{length:,}", *(f"{min(timing.turns) * 1e3:.0f}" for timing in result.values())])
    return table(["length", *(f"{name}, ms" for name in CONTEXTS)], table_rows)


def step_of(module: Any, envs: int) -> Run:
    """Return a function that makes the next step of a rollout whose episodes end at 2 % of the steps."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(envs, WIDTH)
    resets = torch.rand(256, envs, 1, generator=generator) < 0.02
    carried = dict(module.make_tensordict_primer().expand(envs).clone())
    at = itertools.count()

    def run() -> None:
        columns = {"observation": rows, "is_init": resets[next(at) % len(resets)], **carried}
        module.on_columns(columns)
        carried.update({key: columns["next", key] for key in carried})

    with torch.no_grad():
        for _ in range(128):  # until the caches are as full as they get
            run()
    return run


def single_step() -> str:
    """Time one vector step of a rollout beside a GRU's, in µs."""
    table_rows = []
    for envs in (16, 64, 1024):
        modules: dict[str, Any] = {"GRU": GRUModule(WIDTH, WIDTH, **KEYS)}
        for layers in (1, 2):
            modules[f"{layers} layers"] = TransformerModule(WIDTH, WIDTH, layers, HEADS, context=64, **KEYS)
        runs = {name: step_of(module, envs) for name, module in modules.items()}
        with torch.no_grad():
            result = take_turns(runs, turns=9, calls=30, clock=time.thread_time)
        micros = [f"{min(timing.turns) * 1e6:.0f}" for timing in result.values()]
        table_rows.append([f"{envs:,}", *micros])
    return table(["envs", "GRU, µs", "1 layer, context=64, µs", "2 layers, context=64, µs"], table_rows)


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)  # on a busy machine a second thread that waits is timed, not the work
    print(
        f"{LAYERS} layers of width {WIDTH}, {HEADS} heads, {ROWS:,} rows, forward and backward, thread time\n"
    )
    print(by_setting())
    print("\nRuns of 1,024 rows at most (0.3 % resets), forward and backward\n")
    print(by_rows())
    print("\n16,384 rows in runs of one length, forward and backward\n")
    print(by_length())
    print("\nOne step of a rollout\n")
    print(single_step())


if __name__ == "__main__":
    main()
