"""Recurrent modules on flat rows with resets: packed against padding, ours and the peer's; and a single step.

``python -m flatroll bench recurrent``
"""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.benchmarks.timing import Timing, ratio, table, take_turns
from flatroll.modules import GRUModule, LSTMModule, set_recurrent_mode

ROWS, INPUT, HIDDEN = 4096, 64, 128
RATES = (0.0, 0.003, 0.02, 0.1, 0.3)
KEYS: dict[str, Any] = {"in_key": "observation", "out_key": "features"}
KINDS: dict[str, type[GRUModule] | type[LSTMModule]] = {"GRU": GRUModule, "LSTM": LSTMModule}

Run: TypeAlias = Callable[[], object]


def peer_module(name: str) -> tuple[Any, Any]:
    """The peer's module of the same sizes, and its mode switch; (None, None) where it is not installed."""
    if not importlib.util.find_spec("torchrl"):
        return None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl import modules as peers

        return getattr(peers, f"{name}Module")(INPUT, HIDDEN, **KEYS), peers.set_recurrent_mode


def batch_of(name: str, starts: Tensor) -> TensorDict:
    """Random rows, with a state stored at each."""
    rows = starts.numel()
    batch = TensorDict({"observation": torch.randn(rows, INPUT), "is_init": starts.unsqueeze(-1)}, [rows])
    for key in KINDS[name].state_keys:
        batch[key] = torch.randn(rows, 1, HIDDEN)
    return batch


def pass_of(module: Any, mode: Any, batch: TensorDict) -> Run:
    """Forward and backward in recurrent mode."""

    def run() -> None:
        module.zero_grad(set_to_none=True)
        with mode("recurrent"):
            module(batch.copy())["features"].square().mean().backward()

    return run


def passes(name: str, batch: TensorDict, backends: tuple[str, ...]) -> dict[str, Run]:
    """Our backends and the peer's on one batch."""
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


def shown(result: dict[str, Timing], name: str) -> list[str]:
    """Milliseconds of one contender and how many times longer than packed it takes."""
    if name not in result:
        return ["-", "-"]
    return [f"{result[name].median * 1e3:.1f}", f"{ratio(result[name], result['packed']):.1f} x"]


def by_reset_rate() -> str:
    """Forward and backward over 4,096 rows."""
    table_rows = []
    for name in KINDS:
        for rate in RATES:
            starts = torch.rand(ROWS, generator=torch.Generator().manual_seed(0)) < rate
            starts[0] = True
            result = take_turns(passes(name, batch_of(name, starts), ("packed", "pad")), turns=3)
            ms = f"{result['packed'].median * 1e3:.1f}"
            cells = [name, f"{rate:.1%}", str(int(starts.sum())), ms]
            table_rows.append([*cells, *shown(result, "pad"), *shown(result, "peer")])
    header = ["", "resets", "runs", "packed, ms", "our pad, ms", "ratio", "peer's pad, ms", "ratio"]
    return table(header, table_rows)


def one_long_run() -> str:
    """A run of 1,024 rows and 1,024 runs of one row: what padding is worst at."""
    starts = torch.ones(2048, dtype=torch.bool)
    starts[1:1024] = False
    result = take_turns(passes("GRU", batch_of("GRU", starts), ("packed",)), turns=1)
    cells = ["GRU", f"{result['packed'].median * 1e3:.1f}", *shown(result, "peer")]
    return table(["", "packed, ms", "peer's pad, ms", "ratio"], [cells])


def call_of(module: Any, *arguments: Any) -> Run:
    """One call, its arguments ready."""
    return lambda: module(*arguments)


def single_step() -> str:
    """Microseconds per vector step of a rollout."""
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
                result = take_turns(runs, turns=9, calls=50)
            micros = [f"{timing.median * 1e6:.0f}" for timing in result.values()]
            table_rows.append([name, f"{envs:,}", *micros, *["-"] * (3 - len(micros))])
    return table(["", "envs", "stock network alone, µs", "our module, µs", "peer's module, µs"], table_rows)


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)  # on a busy machine a second thread that waits is timed, not the work
    torch.manual_seed(0)
    print(f"Forward and backward, {INPUT} -> {HIDDEN}, {ROWS:,} rows, one thread\n")
    print(by_reset_rate())
    print("\nOne run of 1,024 rows and 1,024 runs of one row, forward and backward\n")
    print(one_long_run())
    print("\nOne step of a rollout\n")
    print(single_step())


if __name__ == "__main__":
    main()
