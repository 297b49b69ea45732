"""A step writer that is copied, pickled or loaded with rows waiting."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatroll.buffers import LazyTensorStorage, MultiStepTransform, ReplayBuffer, StepWriter


def writer_of(compact: bool = False, **options: Any) -> StepWriter:
    storage = LazyTensorStorage(32, compact_obs=compact)
    return ReplayBuffer(storage=storage, **options).writer_for(2, window=4)


def step(t: int, dtype: torch.dtype = torch.float32, size: int = 1) -> dict[Any, torch.Tensor]:
    """Step t of two endless episodes; an observation is 100 * env + t."""
    now = torch.tensor([t, 100 + t], dtype=dtype)[:, None].expand(2, size)
    flags = {("next", "done"): torch.zeros(2, dtype=torch.bool), ("next", "reward"): torch.zeros(2)}
    return {"observation": now, ("next", "observation"): now + 1, **flags}


def assert_reads(writer: StepWriter, stop: int) -> None:
    first = writer.oldest
    rows = writer.read(torch.arange(first, stop)[:, None], torch.arange(2))
    numbers = torch.arange(first, stop)[:, None] + torch.tensor([0, 100])
    assert len(rows) == len(writer) and writer.steps == stop
    assert torch.equal(rows["observation"], numbers.view(-1, 1).float())
    assert torch.equal(rows["next", "observation"], rows["observation"] + 1)
    assert torch.equal(rows["is_init"].flatten(), numbers.flatten() % 100 == 0)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("written", [2, 7, 8, 22])
def test_a_copy_that_takes_the_buffer_first_has_the_waiting_rows(
    written: int, copied: Callable[[Any], Any], compact: bool
) -> None:
    writer = writer_of(compact)
    for t in range(written):
        writer.write(step(t))
    buffer, other = copied((writer.buffer, writer))
    assert other.buffer is buffer and len(buffer) == len(writer.buffer)
    assert_reads(other, written)
    for t in range(written, written + 11):
        for each in (writer, other):
            each.write(step(t))
            assert_reads(each, t + 1)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1), (torch.float32, 4096)])
def test_a_copy_takes_no_rows_that_do_not_go_with_its_stored_ones(dtype: torch.dtype, size: int) -> None:
    """They were read by the sizes of the stored rows, past the ends of memory."""
    writer = writer_of(transform=MultiStepTransform(2, 0.9))
    writer.write(step(0))
    other = copy.deepcopy(writer)
    with pytest.raises(ValueError, match="the storage keeps"):
        other.write(step(1, dtype, size))
    other.write(step(1))
    assert other.read_columns([0, 1], 0)["observation"].flatten().tolist() == [0.0, 1.0]


def test_a_loaded_state_leaves_the_rows_from_before() -> None:
    writer = writer_of()
    for t in range(7):
        writer.write(step(t))
    writer.load_state_dict({"writer": 0, "episode": 50})
    assert (len(writer), writer.oldest, writer.steps) == (0, 7, 7)
    with pytest.raises(IndexError, match="steps 5 to 5 are asked for"):
        writer.read(5, 0)
    for t in range(7, 20):
        writer.write(step(t))
        rows = writer.read(torch.arange(7, t + 1), 1)
        assert rows["observation"].flatten().tolist() == [100.0 + now for now in range(7, t + 1)]
        assert rows["is_init"].flatten().tolist() == [True] + [False] * (t - 7)
