"""What a real simulator did, taken at its own `step` before anyone else saw it, and rows held against that."""

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.layout.keys import NEXT_KNOWN, next_key

PAGE = Path(__file__).parents[2] / "docs" / "simulators.md"


def run_block(package: str) -> tuple[str, str]:
    """Run the block of the page of simulators that imports a package; return what it prints, and should print."""
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.S)
    ((block, expected),) = [found for found in blocks if f"import {package}" in found[0]]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, str(PAGE), "exec"), {})
    return printed.getvalue(), expected


@dataclass
class Trace:
    """The physics after each step, before any reset (``[T, E, D]``), and the other results of the steps."""

    physics: list[Tensor] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)
    terminated: list[Tensor] = field(default_factory=list)
    truncated: list[Tensor] = field(default_factory=list)

    def add(self, physics: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor) -> None:
        """Keep copies of what one step made."""
        self.physics.append(physics.clone())
        self.rewards.append(reward.clone())
        self.terminated.append(terminated.bool().clone())
        self.truncated.append(truncated.bool().clone())


@dataclass
class Counts:
    """Rows of a batch that were compared, those that differ, and the ends with and without a last observation."""

    rows: int
    false: int
    known: int
    unknown: int = 0


def assert_same(batch: TensorDictBase, again: TensorDictBase) -> None:
    """Two runs from one seed are equal, in every column; NaN equals NaN."""
    assert set(batch.keys(True, True)) == set(again.keys(True, True))
    for key, column in batch.items(True, True):
        torch.testing.assert_close(again[key], column, rtol=0, atol=0, equal_nan=True, msg=str(key))


def trace_of(env: Any, read: Callable[[], Tensor]) -> Trace:
    """Record an env that returns 5-tuples and whose state after `step` is still that of the ended episodes."""
    trace, step = Trace(), env.step

    def recorded(action: Tensor) -> Any:
        result = step(action)
        trace.add(read(), *result[1:4])
        return result

    env.step = recorded
    return trace


def compare(
    batch: TensorDictBase, key: str, trace: Trace, num_envs: int, physics: slice | list[int] = slice(None)
) -> Counts:
    """Hold the rows of `rollout` against a trace: ``physics`` are the columns of the observation that it has.

    Each row's next observation, reward and flags must be those of the trace, and its observation must be the next one
    of the row before in its env, unless that one ended an episode.
    """
    steps = len(batch) // num_envs
    made = [
        torch.stack(column[:steps])
        for column in (trace.physics, trace.rewards, trace.terminated, trace.truncated)
    ]
    # [E, T, ...] as the batch has its rows: one env after the other.
    true_next, reward, terminated, truncated = (column.transpose(0, 1) for column in made)
    rows = batch.reshape(num_envs, steps)
    obs, after = rows[key][..., physics], rows[next_key(key)][..., physics]
    known_column = rows.get(NEXT_KNOWN, None)
    known = torch.ones_like(terminated) if known_column is None else known_column.reshape(num_envs, steps)
    ended = terminated | truncated
    wrong = (rows["next", "reward"].squeeze(-1) != reward.float()) & ~reward.isnan()
    wrong |= rows["next", "terminated"].squeeze(-1) != terminated
    wrong |= rows["next", "truncated"].squeeze(-1) != truncated
    wrong |= known & ((after - true_next).abs() > 1e-6).any(-1)
    wrong |= ~known & ~ended
    wrong[:, 1:] |= ~ended[:, :-1] & ((obs[:, 1:] - true_next[:, :-1]).abs() > 1e-6).any(-1)
    return Counts(wrong.numel(), int(wrong.sum()), int((ended & known).sum()), int((ended & ~known).sum()))
