"""Benchmarks bytes per stored transition: as the storage reports, and as the process grows.

``python -m flatroll bench memory``
"""

import multiprocessing
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from tensordict import TensorDict

from benchmarks.bench_slices import rows_of
from benchmarks.measure.timing import table
from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler

ENVS, STEPS, EPISODE = 64, 16, 1000
STATES, IMAGES = 1_000_000, 20_000


def states(rows: int) -> Iterator[TensorDict]:
    """Yield batches in HalfCheetah's shapes (17 + 6 float32): 16 steps of 64 envs, episodes of 1,000."""
    env, step = torch.arange(ENVS)[:, None], torch.arange(STEPS)
    for first in range(0, rows // (ENVS * STEPS) + 1):
        t = first * STEPS + step + env * 37
        yield rows_of((t % EPISODE).flatten(), ((t // EPISODE) * ENVS + env).flatten())


def images(rows: int) -> Iterator[TensorDict]:
    """Yield batches in Atari's shapes: stacks of 4 frames 84 x 84; an episode's first frame is repeated."""
    for episode in range(rows // EPISODE + 1):
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


def measure(kind: str, options: dict[str, Any]) -> tuple[float, float]:
    """Fill a buffer; measure the bytes per row of buffer and index, and of the process."""
    rows = STATES if kind == "states" else IMAGES
    process = psutil.Process()
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(rows, **options),
        sampler=SliceSampler(slice_len=16),
        batch_size=256,
    )
    small = ReplayBuffer(
        storage=LazyTensorStorage(500, **options), sampler=SliceSampler(slice_len=16), batch_size=256
    )
    for batch in (states if kind == "states" else images)(
        5000
    ):  # code that is loaded once, kernels, workspaces
        small.extend(batch)
        small.sample()
    before = process.memory_info().rss
    for batch in (states if kind == "states" else images)(rows):
        buffer.extend(batch)
    taken = process.memory_info().rss - before
    return buffer.stats()["bytes"] / rows, taken / rows


CASES: list[tuple[str, str, dict[str, Any], float | None]] = [
    ("17 + 6 floats", "states", {}, None),
    ("17 + 6 floats, compact", "states", {"compact_obs": True}, 68 + 24 + 40),
    ("4 x 84 x 84", "images", {}, None),
    ("4 x 84 x 84, compact", "images", {"compact_obs": True}, None),
    (
        "4 x 84 x 84, compact, frame_stack",
        "images",
        {"compact_obs": True, "frame_stack": {"observation": 4}},
        1.05 * 7056 + 40,
    ),
]


def main() -> None:
    """Print the table."""
    rows = []
    for name, kind, options, budget in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            stated, taken = pool.apply(measure, (kind, options))
        rows.append([name, f"{stated:,.1f}", f"{taken:,.1f}", "" if budget is None else f"{budget:,.1f}"])
    print(table(["rows", "bytes per row, stated", "of the process", "budget"], rows))


if __name__ == "__main__":
    main()
