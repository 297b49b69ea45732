"""Folders of `DiskStorage` and of a data set, in each form, that later versions must read.

``python tests/buffers/storages/disk/test_golden.py`` writes those that are missing.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import DiskStorage, ImmutableDatasetWriter, ReplayBuffer, SliceSampler

GOLDEN = Path(__file__).with_name("golden")
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compact": {"compact_obs": True},
    "frames": {"frame_stack": {"observation": 3}},
    "zstd": {"codec": {"observation": "zstd"}, "compact_obs": True},
}


def rows(first: int, count: int) -> TensorDict:
    row = torch.arange(first, first + count)
    stacks = (row[:, None, None] + torch.arange(4)[:, None]).expand(-1, -1, 2).to(torch.uint8).contiguous()
    after = {
        "observation": stacks[:, 1:].clone(),
        "reward": row[:, None] / 3,
        "done": (row % 9 == 8)[:, None],
    }
    ids = {"traj_ids": row // 9}
    return TensorDict(
        {"observation": stacks[:, :3].clone(), "action": row.bfloat16(), "collector": ids, "next": after},
        [count],
    )


def write(form: str) -> None:
    storage = DiskStorage(320, GOLDEN / f"format-1-{form}", flush_rows=7, **FORMS[form])
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    for first in range(0, 27, 5):
        buffer.extend(rows(first, min(5, 27 - first)))
    storage.close()
    (GOLDEN / f"format-1-{form}" / "lock").unlink()


@pytest.mark.parametrize("form", FORMS)
def test_what_this_version_wrote_is_read(form: str) -> None:
    path = GOLDEN / f"format-1-{form}"
    storage = DiskStorage(path=path, read_only=True)
    buffer = ReplayBuffer(
        storage=storage, writer=ImmutableDatasetWriter(), sampler=SliceSampler(slice_len=3), batch_size=12
    )
    assert bool((buffer.oldest_first() == rows(0, 27)).all())
    sample = buffer.sample()
    inside = ~sample["is_init"][1:, 0]
    step = sample["action"].long()
    assert bool((step[1:] == step[:-1] + 1)[inside].all())
    storage.close()


if __name__ == "__main__":
    for name in FORMS:
        if not (GOLDEN / f"format-1-{name}").exists():
            write(name)
