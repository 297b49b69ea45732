"""Runs that another process, of this or an earlier version, has saved go on for good.

``python tests/disk/test_golden.py NAME`` writes one more.
"""

import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.disk import Checkpoint

GOLDEN = Path(__file__).with_name("golden_runs")


def run(path: Path) -> tuple[Checkpoint, ReplayBuffer, nn.Linear]:
    """A checkpoint whose buffer has every kind of column that needs no extra."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20, compact_obs=True, frame_stack={"observation": 3}, sparse=["state"]),
        sampler=SliceSampler(slice_len=4),
        batch_size=8,
        generator=torch.Generator().manual_seed(0),
    )
    policy = nn.Linear(2, 1)
    return Checkpoint(path, buffer=buffer, policy=policy, rng=False), buffer, policy


def rows(first: int, count: int) -> TensorDict:
    row = torch.arange(first, first + count)
    stacks = (row[:, None, None] + torch.arange(4)[:, None]).expand(-1, -1, 2).to(torch.uint8).contiguous()
    state = torch.where((row % 4 == 0)[:, None], row[:, None] / 3, 0.0)
    return TensorDict(
        {
            "observation": stacks[:, :3].clone(),
            "state": state,
            "action": row.to(torch.bfloat16),
            "next": {"observation": stacks[:, 1:].clone(), "done": (row % 9 == 8)[:, None]},
        },
        [count],
    )


def filled(path: Path) -> tuple[Checkpoint, ReplayBuffer, nn.Linear]:
    """The run as it was saved: 33 rows in a ring of 20, in two files of rows."""
    checkpoint, buffer, policy = run(path)
    with torch.no_grad():
        policy.weight.copy_(torch.tensor([[0.5, -2.0]]))
    for first, count in ((0, 15), (15, 18)):
        buffer.extend(rows(first, count))
        buffer.sample()
        checkpoint.save(first=first, best=float("-inf"), nested=[1, (2.5, None)])
    return checkpoint, buffer, policy


@pytest.mark.parametrize(
    "name", sorted(folder.name for folder in GOLDEN.iterdir()) if GOLDEN.exists() else []
)
def test_what_earlier_versions_wrote_is_read(name: str, tmp_path: Path) -> None:
    checkpoint, buffer, policy = run(GOLDEN / name)
    extra = checkpoint.load(strict=True)
    _, expected, weights = filled(tmp_path)
    assert extra == {"first": 15, "best": float("-inf"), "nested": [1, (2.5, None)]}
    assert bool((buffer[:] == expected[:]).all()) and torch.equal(policy.weight, weights.weight)
    for _ in range(3):
        assert bool((buffer.sample() == expected.sample()).all())
    older, _, _ = run(GOLDEN / name)
    assert older.load(version=1)["first"] == 0


if __name__ == "__main__":
    filled(GOLDEN / sys.argv[1])
    (GOLDEN / sys.argv[1] / "lock").unlink()
