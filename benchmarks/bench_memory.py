"""Benchmarks bytes per stored transition: as the storage reports, and as the process grows.

Each buffer is filled in a process of its own. Compressed buffers get frames of games played by a random policy, if
envpool is installed.

``python -m flatroll bench memory``
"""

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.bench_slices import rows_of
from benchmarks.bench_steps import ACTION, OBSERVATION, Steps
from benchmarks.measure.resident import alone, resident_growth
from benchmarks.measure.timing import table
from benchmarks.trainers.bench_sb3 import bytes_per_row
from flatroll.buffers import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, Sampler, SliceSampler
from flatroll.rollouts import Collector

ENVS, STEPS, EPISODE = 64, 16, 1000
STATES, IMAGES = 1_000_000, 20_000
GAME_ENVS, GAME_STEPS, GAME_ROWS = 16, 16, 100_000
WARM_UP = 5000
STEP_ENVS = 8


def states(steps: int = STEPS) -> Iterator[TensorDict]:
    """Yield batches in HalfCheetah's shapes (17 + 6 float32): 16 or ``steps`` steps of 64 envs, episodes of 1,000."""
    env, step = torch.arange(ENVS)[:, None], torch.arange(steps)
    for first in itertools.count(0, steps):
        t = first + step + env * 37
        yield rows_of((t % EPISODE).flatten(), ((t // EPISODE) * ENVS + env).flatten())


def images() -> Iterator[TensorDict]:
    """Yield batches in Atari's shapes: stacks of 4 frames 84 x 84; an episode's first frame is repeated."""
    for episode in itertools.count():
        frames = torch.randint(256, (EPISODE + 1, 84, 84), dtype=torch.uint8)
        frames = torch.cat([frames[:1].expand(3, -1, -1), frames])
        stacks = frames.unfold(0, 4, 1).permute(0, 3, 1, 2)
        for first in range(0, EPISODE, 250):
            at = torch.arange(first, first + 250)
            done = (at == EPISODE - 1)[:, None]
            flags = {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}
            after = {
                "observation": stacks[at + 1],
                "step_count": at[:, None] + 1,
                "reward": torch.rand(250, 1),
            }
            root = {
                "observation": stacks[at],
                "action": at % 6,
                "is_init": (at == 0)[:, None],
                "step_count": at[:, None],
                "next": {**after, **flags},
                "collector": {"traj_ids": torch.full((250,), episode)},
            }
            yield TensorDict(root, [250])


def game(name: str) -> Iterator[TensorDict]:
    """Yield the collected batches of an Atari game played by a random policy: 16 steps of 16 envs."""
    import envpool

    env = envpool.make_gymnasium(name, num_envs=GAME_ENVS, seed=1)
    generator = torch.Generator().manual_seed(0)

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return torch.randint(env.action_space.n, (len(observation),), generator=generator)

    yield from Collector(env, policy, frames_per_batch=GAME_ENVS * GAME_STEPS)


def measure(
    source: Callable[..., Iterator[TensorDict]], args: Any, rows: int, options: Any, priorities: bool
) -> list[float]:
    """Fill a buffer; return the bytes per row as stated, of the process, and of the process once trimmed."""
    batches = source(*args)

    def fill(size: int) -> ReplayBuffer:
        sampler: Sampler = SliceSampler(slice_len=16)
        if priorities:
            sampler = PrioritizedSampler(size, alpha=0.6, beta=0.4)
        buffer = ReplayBuffer(storage=LazyTensorStorage(size, **options), sampler=sampler, batch_size=256)
        while buffer.stats()["rows_written"] < size:
            buffer.extend(next(batches))
        return buffer

    # Code that is loaded once, kernels, workspaces and the arrays that a collector reuses.
    fill(WARM_UP).sample()

    buffer, growth = resident_growth(lambda: fill(rows))

    return [size / rows for size in (buffer.stats()["bytes"], *growth)]


def measure_steps(make: str, options: dict[str, Any]) -> list[float]:
    """Fill a buffer of stable-baselines3, or our class for it, step by step; return the same of it."""
    module, name = make.rsplit(".", 1)
    kind: Any = getattr(importlib.import_module(module), name)
    spaces = [gym.spaces.Box(-1.0, 1.0, (size,), np.float32) for size in (OBSERVATION, ACTION)]
    steps = Steps(STEP_ENVS)
    infos: list[dict[str, Any]] = [{}] * STEP_ENVS

    def fill(size: int) -> Any:
        buffer = kind(size, *spaces, "cpu", STEP_ENVS, **options)
        for _ in range(size // STEP_ENVS):
            step = steps.next()
            now, later = step["observation"], step["next", "observation"]
            done = step["next", "terminated"]
            buffer.add(now, later, step["action"], step["next", "reward"], done, infos)
        return buffer

    fill(WARM_UP * STEP_ENVS).sample(256)
    buffer, growth = resident_growth(lambda: fill(STATES))
    return [size / STATES for size in (bytes_per_row(buffer, STATES) * STATES, *growth)]


class Case(NamedTuple):
    """A buffer and its rows; ``budget`` is our goal in bytes per row."""

    name: str
    source: Callable[..., Iterator[TensorDict]]
    args: tuple[Any, ...]
    rows: int
    options: dict[str, Any]
    budget: float | None = None
    priorities: bool = False


COMPACT: dict[str, Any] = {"compact_obs": True}
FRAMES: dict[str, Any] = {**COMPACT, "frame_stack": {"observation": 4}}
ZSTD: dict[str, Any] = {"codec": {"observation": "zstd"}}

CASES = [
    Case("17 + 6 floats", states, (), STATES, {}),
    Case("17 + 6 floats, compact", states, (), STATES, COMPACT, 68 + 24 + 40),
    Case("17 + 6 floats, one step of 64 envs at a time", states, (1,), STATES, {}),
    Case("17 + 6 floats, compact, one step of 64 envs at a time", states, (1,), STATES, COMPACT),
    Case("17 + 6 floats, by priority", states, (), STATES, {}, priorities=True),
    Case("4 x 84 x 84", images, (), IMAGES, {}),
    Case("4 x 84 x 84, compact", images, (), IMAGES, COMPACT),
    Case("4 x 84 x 84, compact, frame_stack", images, (), IMAGES, FRAMES, 1.05 * 7056 + 40),
]
FLAT = "flatroll.trainers.sb3_buffer.FlatReplayBuffer"
WRITERS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "17 + 6 floats, stable-baselines3's own buffer",
        "stable_baselines3.common.buffers.ReplayBuffer",
        {},
    ),
    ("17 + 6 floats, `FlatReplayBuffer(compact=False)`", FLAT, {"compact": False}),
    ("17 + 6 floats, `FlatReplayBuffer`", FLAT, {}),
]
GAMES = [
    Case("Pong, compact, frame_stack", game, ("Pong-v5",), GAME_ROWS, FRAMES, 1.05 * 7056 + 40),
    Case("Pong, compact, zstd", game, ("Pong-v5",), GAME_ROWS, COMPACT | ZSTD),
    *(
        Case(f"{name}, compact, frame_stack, zstd", game, (f"{name}-v5",), GAME_ROWS, FRAMES | ZSTD)
        for name in ("Pong", "Breakout", "MsPacman", "Seaquest")
    ),
]


def main() -> None:
    """Print the table."""
    cases = list(CASES)
    if importlib.util.find_spec("envpool") and importlib.util.find_spec("zstandard"):
        cases += GAMES
    else:
        print("(envpool or zstandard is not installed: no compressed frames)")
    rows = []
    for case in cases:
        measured = alone(measure, case.source, case.args, case.rows, case.options, case.priorities)
        budget = "" if case.budget is None else f"{case.budget:,.1f}"
        rows.append([case.name, f"{case.rows:,}", *(f"{size:,.1f}" for size in measured), budget])
    if importlib.util.find_spec("stable_baselines3"):
        for name, make, options in WRITERS:
            measured = alone(measure_steps, make, options)
            rows.append([name, f"{STATES:,}", *(f"{size:,.1f}" for size in measured), ""])
    header = ["rows", "number", "bytes per row, stated", "of the process", "trimmed", "budget"]
    print(table(header, rows))


if __name__ == "__main__":
    main()
