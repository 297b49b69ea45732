"""Batches whose observation says where it comes from: (env, episode, step)."""

from collections.abc import Callable, Iterable

import pytest
import torch
from tensordict import TensorDict

Run = tuple[int, int, int, int, str]  # env, episode, first step, length, how it ends
Make = Callable[[Iterable[Run]], TensorDict]


def make_batch(runs: Iterable[Run]) -> TensorDict:
    """The batch a collector would give for these runs, with every marker of the contract."""
    rows = []
    for env, episode, first, length, end in runs:
        for step in range(first, first + length):
            over = step == first + length - 1
            terminated, truncated = (
                over and end in ("terminated", "both"),
                over and end in ("truncated", "both"),
            )
            rows.append((env, episode, step, terminated, truncated))
    env, episode, step, terminated, truncated = (torch.tensor(c) for c in zip(*rows, strict=True))
    now, later = (
        torch.stack([env, episode, step], -1).float(),
        torch.stack([env, episode, step + 1], -1).float(),
    )
    column = {"terminated": terminated[:, None], "truncated": truncated[:, None]}
    return TensorDict(
        {
            "observation": now,
            "action": (env * 7 + episode * 3 + step) % 5,
            "is_init": (step == 0)[:, None],
            "step_count": step[:, None],
            "collector": {"traj_ids": env * 100 + episode},
            "next": {
                "observation": later,
                "reward": (step[:, None] * 0.5).float(),
                "step_count": step[:, None] + 1,
                "done": column["terminated"] | column["truncated"],
                **column,
            },
        },
        batch_size=[len(rows)],
    )


@pytest.fixture(scope="session")
def make() -> Make:
    return make_batch


@pytest.fixture
def batch() -> TensorDict:
    """Two envs' windows, rows 0..6 and 7..13; the second begins in mid-episode.

    Runs: 0..3 terminated, 4..6 cut, 7..9 truncated, 10..13 cut.
    """
    runs = [(0, 0, 0, 4, "terminated"), (0, 1, 0, 3, "cut"), (1, 0, 5, 3, "truncated"), (1, 1, 0, 4, "cut")]
    return make_batch(runs)


@pytest.fixture
def slices() -> TensorDict:
    """Four slices of three rows as a sampler marks them; the first and third are rows of one trajectory.

    The second slice continues the first, and the third repeats the first.
    """
    part = [
        (0, 0, 2, 3, "truncated"),
        (0, 0, 5, 3, "truncated"),
        (0, 0, 2, 3, "truncated"),
        (3, 1, 0, 3, "both"),
    ]
    batch = make_batch(part)
    batch["is_init"][[0, 3, 6]] = True
    return batch
