"""Benchmarks checks, draws and shape operations of specs, against Gymnasium's spaces and torchrl.

``python -m flatroll bench specs``
"""

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.specs import as_spec

ROWS, TURNS, CALLS = 64, 15, 40
#: Eight leaves as environments have them.
SPACE = spaces.Dict(
    position=spaces.Box(-1, 1, (3,)),
    velocity=spaces.Box(-10, 10, (3,)),
    joints=spaces.Box(-3, 3, (17,)),
    image=spaces.Box(0, 255, (8, 8), np.uint8),
    target=spaces.Discrete(5),
    modes=spaces.MultiDiscrete([3, 4, 2]),
    flags=spaces.MultiBinary(4),
    goal=spaces.Box(np.float32(-1), np.float32(1), (2,)),
)


def peers_spec() -> Any:
    """torchrl's spec of the same leaves, or None where it is not installed."""
    if importlib.util.find_spec("torchrl") is None:
        return None
    data: Any = importlib.import_module("torchrl.data")
    leaves = {
        "position": data.Bounded(-1, 1, (ROWS, 3)),
        "velocity": data.Bounded(-10, 10, (ROWS, 3)),
        "joints": data.Bounded(-3, 3, (ROWS, 17)),
        "image": data.Bounded(0, 255, (ROWS, 8, 8), dtype=torch.uint8),
        "target": data.Categorical(5, (ROWS,)),
        "modes": data.MultiCategorical([3, 4, 2], (ROWS, 3)),
        "flags": data.Binary(4, (ROWS, 4)),
        "goal": data.Bounded(-1, 1, (ROWS, 2)),
    }
    return data.Composite(leaves, shape=(ROWS,))


def jobs(spec: Any) -> dict[str, Callable[[], object]]:
    """What is timed of a spec of 64 rows."""
    value, same = spec.rand(), spec.clone()
    return {
        "is_in": lambda: spec.is_in(value),
        "rand": spec.rand,
        "expand": lambda: spec.expand(10, ROWS),
        "[0]": lambda: spec[0],
        "==": lambda: spec == same,
    }


def main(_: list[str] | None = None) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    spec, peer = as_spec(SPACE, ROWS), peers_spec()
    batched: Any = batch_space(SPACE, ROWS)
    sample = batched.sample()
    assert spec.is_in({key: torch.as_tensor(value) for key, value in sample.items()})
    ours, theirs = jobs(spec), {} if peer is None else jobs(peer)
    known: dict[str, Callable[[], object]] = {
        "is_in": lambda: batched.contains(sample),
        "rand": batched.sample,
    }
    rows = []
    for name, job in ours.items():
        contenders = {"flatroll": job}
        contenders |= {"Gymnasium": known[name]} if name in known else {}
        contenders |= {"torchrl": theirs[name]} if theirs else {}
        times = take_turns(contenders, TURNS, CALLS, time.thread_time)
        row = [name, f"{times['flatroll'].median * 1e6:.0f}"]
        for other in ("Gymnasium", "torchrl"):
            there = other in times
            row += (
                [f"{times[other].median * 1e6:.0f}", f"{ratio(times[other], times['flatroll']):.1f}"]
                if there
                else ["", ""]
            )
        rows.append(row)
    print(
        f"A Composite of eight leaves, {ROWS} rows; microseconds, and how many times as long the others take.\n"
    )
    print(table(["", "flatroll, µs", "Gymnasium, µs", "ratio", "torchrl, µs", "ratio"], rows))


if __name__ == "__main__":
    main()
