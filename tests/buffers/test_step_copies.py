"""A step writer that is copied or loaded with rows waiting."""

import copy
from typing import Any

import pytest
import torch

from flatroll.buffers import LazyTensorStorage, MultiStepTransform, ReplayBuffer, StepWriter


def writer_of(**options: Any) -> StepWriter:
    return ReplayBuffer(storage=LazyTensorStorage(32), **options).writer_for(2, window=4)


def step(t: int, dtype: torch.dtype = torch.float32, size: int = 1) -> dict[Any, torch.Tensor]:
    """Step t of two endless episodes; an observation is 100 * env + t."""
    now = torch.tensor([t, 100 + t], dtype=dtype)[:, None].expand(2, size)
    flags = {("next", "done"): torch.zeros(2, dtype=torch.bool), ("next", "reward"): torch.zeros(2)}
    return {"observation": now, ("next", "observation"): now + 1, **flags}


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1), (torch.float32, 4096)])
def test_a_copy_takes_no_rows_that_do_not_go_with_its_stored_ones(dtype: torch.dtype, size: int) -> None:
    """They were read by the sizes of the stored rows, past the ends of memory."""
    writer = writer_of(transform=MultiStepTransform(2, 0.9))
    writer.write(step(0))
    other = copy.deepcopy(writer)
    with pytest.raises(ValueError, match="the storage has kept"):
        other.write(step(1, dtype, size))
    other.write(step(1))
    assert other.read_columns([0, 1], 0)["observation"].flatten().tolist() == [0.0, 1.0]


def test_a_loaded_state_leaves_the_rows_from_before() -> None:
    writer = writer_of()
    for t in range(7):
        writer.write(step(t))
    writer.load_state_dict({"writer": 0, "episode": 50})
    assert (len(writer), writer.oldest, writer.steps) == (0, 7, 7)
    with pytest.raises(IndexError, match="steps 5 to 5 were requested"):
        writer.read(5, 0)
    for t in range(7, 20):
        writer.write(step(t))
        rows = writer.read(torch.arange(7, t + 1), 1)
        assert rows["observation"].flatten().tolist() == [100.0 + now for now in range(7, t + 1)]
        assert rows["is_init"].flatten().tolist() == [True] + [False] * (t - 7)
