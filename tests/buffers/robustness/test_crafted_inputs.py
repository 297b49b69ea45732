"""Whatever is handed in: a Python error that changes nothing, or the right answer; never a crash or a hang."""

from typing import Any

import pytest
import torch
from forms import scaled
from scripts import run_script
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, Sampler, SliceSampler, TensorStorage


@pytest.mark.parametrize("unreadable", [0, 1], ids=["forms", "unreadable"])
def test_crafted_tensors_and_indices(unreadable: int) -> None:
    """``unreadable``: meta and sparse tensors, and rows that are views of the storage's own memory."""
    run_script("crafted_inputs", scaled(quick=10, long=200), 0, unreadable)


def rows(first: int, count: int) -> TensorDict:
    numbers = torch.arange(first, first + count + 1)
    later = {"number": numbers[1:].clone(), "done": torch.zeros(count, dtype=torch.bool)}
    ids = {"traj_ids": torch.full((count,), first)}
    return TensorDict(
        {"number": numbers[:-1], "other": -numbers[:-1], "collector": ids, "next": later}, [count]
    )


@pytest.mark.parametrize("first", [0, 5, 7])
@pytest.mark.parametrize("sampler", [None, SliceSampler(slice_len=2)], ids=["rows", "slices"])
@pytest.mark.parametrize("compact", [False, True])
def test_rows_that_are_views_of_the_storage(first: int, sampler: Sampler | None, compact: bool) -> None:
    """What is written over while it is read is copied before: the ring wraps, and the slots overlap."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(20, compact_obs=compact), sampler=sampler)
    buffer.extend(rows(0, 15))
    memory: Any = {key: column.data for key, column in buffer.storage.columns.items()}
    for begin, columns in ((100, ("other",)), (200, ("other", "number"))):
        batch = rows(begin, 13)
        for key, of in zip(columns, reversed(columns), strict=True):  # of the same column, and of another one
            batch[key] = memory[of][first : first + 13]
        batch["next", "number"] = torch.cat([batch["number"][1:], batch["number"][-1:] + 1])
        want = batch.clone()
        slots = buffer.extend(batch)
        assert len(buffer) == 20
        assert bool((buffer[slots] == want).all())


def test_rows_put_over_those_that_they_are_views_of() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(20))
    buffer.extend(rows(0, 20))
    memory: Any = buffer.storage.columns["other"]
    buffer[3:9] = TensorDict({"other": memory.data[1:7]}, [6])
    assert buffer[:]["other"].neg().tolist() == [0, 1, 2, 1, 2, 3, 4, 5, 6, *range(9, 20)]


def test_rows_of_the_callers_tensors() -> None:
    data = rows(0, 20)
    buffer = ReplayBuffer(storage=TensorStorage(data))
    buffer.extend(data[7:20])  # the first write goes to row 0
    assert data["number"].tolist() == [*range(7, 20), *range(13, 20)]
    assert bool((buffer[:] == data).all())
