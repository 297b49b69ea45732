"""Rows of the tests in tests/interop, which files carry to other libraries."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

LENGTHS = (4, 1, 3)  # of the episodes; the last one is cut


def episodes() -> Iterator[TensorDict]:
    """Episodes of several kinds of entries, whose values tell the episode and the step."""
    for number, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(number)
        step = torch.arange(length + 1)
        place = torch.stack([step * 0 + number, step], -1) / 7
        pixels = torch.randint(256, (length + 1, 6, 5, 3), dtype=torch.uint8, generator=generator)
        over = (step[:-1] == length - 1)[:, None]
        yield TensorDict(
            {
                "observation": place[:-1],
                "pixels": pixels[:-1],
                "arm": {"angle": place[:-1, :1].double(), "level": step[:-1].to(torch.int16)},
                "action": torch.randint(5, (length,), generator=generator),
                "logits": torch.randn(length, 2, 3, generator=generator),
                "is_init": (step[:-1] == 0)[:, None],
                "step_count": step[:-1, None],
                "collector": {"traj_ids": torch.full((length,), 10 + number)},
                "next": {
                    "observation": place[1:],
                    "pixels": pixels[1:],
                    "arm": {"angle": place[1:, :1].double(), "level": step[1:].to(torch.int16)},
                    "step_count": step[1:, None],
                    "reward": torch.randn(length, 1, generator=generator),
                    "terminated": over & (number == 0),
                    "truncated": over & (number == 1),
                    "done": over & (number < 2),
                },
            },
            [length],
        )


def same(old: Any, new: Any) -> None:
    """Check that two arrays have the same dtype, shape and values."""
    old, new = np.asarray(old), np.asarray(new)
    assert (new.dtype, new.shape) == (old.dtype, old.shape)
    np.testing.assert_array_equal(new, old)
