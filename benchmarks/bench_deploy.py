"""Benchmarks exported policies at batch 1 against the policies themselves, and what exporting with 1,000 rows takes.

``python -m flatroll bench deploy``; needs the extra ``onnx``; processor time of one process.

Each contender makes the same steps: it reads an observation and carries its own state. onnxruntime has one thread.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import set_interaction_type
from torch import Tensor

from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.deploy import ExportedPolicy, export_policy, read_record
from flatroll.layout.checks import optional_package
from flatroll.modules import actor

ROWS, EPISODE = 1_000, 100
CALLS, TURNS = 200, 7
KINDS = (None, "gru", "lstm", "mingru", "transformer")


def make_rows() -> TensorDict:
    """Episodes of 100 rows laid end to end."""
    is_init = (torch.arange(ROWS) % EPISODE == 0).unsqueeze(1)
    return TensorDict({"observation": torch.randn(ROWS, 8), "is_init": is_init}, [ROWS])


def eager_step(policy: Any, observation: Tensor, states: dict[str, Tensor]) -> Callable[[], object]:
    """Return a function that makes a step of the policy."""
    carried = dict(states)
    never = torch.zeros(1, 1, dtype=torch.bool)

    def step() -> None:
        batch = TensorDict({"observation": observation, "is_init": never, **carried}, [1])
        with torch.no_grad(), set_interaction_type("deterministic"):
            policy(batch)
        for name in carried:
            carried[name] = batch.get(("next", name))

    return step


def onnx_step(
    exported: ExportedPolicy, observation: Tensor, states: dict[str, Tensor]
) -> Callable[[], object]:
    """Return a function that makes a step of the file in onnxruntime."""
    runtime = optional_package("onnxruntime", "onnx", "this benchmark")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(exported.path), options, providers=["CPUExecutionProvider"])
    following = [f"next.{name}" for name in states]
    entries = {"observation": observation.numpy(), "is_init": np.zeros((1, 1), bool)}
    entries |= {name: value.numpy() for name, value in states.items()}
    feed = {name: entries[name] for name in exported.inputs}

    def step() -> None:
        _, *after = session.run(["action", *following], feed)
        feed.update(zip(states, after, strict=True))

    return step


def measure(kind: Any, folder: Path) -> list[str]:
    """Return the row of one kind of memory."""
    env = SimpleNamespace(
        single_observation_space=spaces.Box(-np.inf, np.inf, (8,)),
        single_action_space=spaces.Box(-1.0, 1.0, (2,)),
    )
    policy = actor(env, recurrent=kind)
    begun = time.process_time()
    exported = export_policy(policy, folder / f"{kind}.onnx", batch=make_rows())
    seconds = time.process_time() - begun

    record = read_record(exported.path)
    states = {
        entry.name: torch.zeros(1, *entry.shape, dtype=getattr(torch, entry.dtype))
        for entry in record.inputs
        if entry.name in record.states
    }
    observation = torch.randn(1, 8)
    times = take_turns(
        {
            "eager": eager_step(policy, observation, states),
            "onnxruntime": onnx_step(exported, observation, states),
        },
        TURNS,
        CALLS,
        time.process_time,
    )
    eager = times["eager"]
    fast = times["onnxruntime"]
    return [
        kind or "none",
        f"{1e6 * eager.median:.0f}",
        f"{1e6 * fast.median:.0f}",
        f"{ratio(fast, eager):.2f}",
        f"{seconds:.1f}",
        f"{exported.largest_difference:.1g}",
    ]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(kind, Path(folder)) for kind in KINDS]
    print("A step at batch 1, processor time, and writing the file with the proof of 1,000 rows\n")
    header = ["memory", "eager policy, µs", "onnxruntime, µs", "ratio", "export, s", "largest difference"]
    print(table(header, rows))


if __name__ == "__main__":
    main()
