"""Samplers at their edges: slices side by side, one schema, what a sample costs, wide counters."""

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from counting import noting, python_calls
from tensordict import TensorDict

from flatroll.buffers import (
    LazyTensorStorage,
    ListStorage,
    NextStateReconstructor,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)

CLASSES = [ReplayBuffer, TensorDictReplayBuffer]
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "pass": SamplerWithoutReplacement,
    "slice": lambda: SliceSampler(slice_len=4),
    "padded": lambda: SliceSampler(slice_len=4, pad_output=True),
    "slice pass": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "priority": lambda: PrioritizedSampler(60, 0.7, 0.5),
    "slice priority": lambda: PrioritizedSliceSampler(60, 0.7, 0.5, slice_len=4),
}


def keys(sample: TensorDict) -> dict[Any, torch.dtype]:
    return {key: value.dtype for key, value in sample.items(True, True)}


def len_of_first(first: Any, *_: Any) -> int:
    return len(first)


def peak(function: Callable[[], Any]) -> int:
    """Bytes that NumPy and Python took on top, at most."""
    function()
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_next_observation_is_that_of_another_slice(world: Any, kind: Any, sampler: str) -> None:
    """Slices of one trajectory side by side keep their own next observations."""
    buffer = kind(
        storage=LazyTensorStorage(60),
        sampler=SAMPLERS[sampler](),
        transform=NextStateReconstructor(),
        batch_size=40,
    )
    buffer.extend(world.to_batch(world.episode(0, 0, 60)).exclude(("next", "observation")))
    for _ in range(10):
        sample = buffer.sample()
        later = sample["next", "observation"][:, 2]
        right = (later == sample["observation"][:, 2] + 1) | later.isnan()
        if sampler == "padded":
            right |= ~sample["collector", "mask"]
        assert right.all()


@pytest.mark.parametrize("sampler", ["slice", "padded", "slice pass", "slice priority", "random", "priority"])
def test_rows_are_read_once_per_sample(world: Any, monkeypatch: pytest.MonkeyPatch, sampler: str) -> None:
    """No entry is gathered a first time to find the ends."""
    storage = LazyTensorStorage(60, compact_obs=True)
    buffer = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=8)
    buffer.extend(world.to_batch(world.episode(0, 0, 60)))
    read: list[int] = []
    monkeypatch.setattr(storage, "read_rows", noting(read, len_of_first, storage.read_rows))
    sample = buffer.sample()
    assert read == [len(sample)]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_have_one_schema(world: Any, kind: Any, sampler: str) -> None:
    """The mask is there whether or not a slice is short, and transforms see what the caller gets."""
    seen: list[dict[Any, torch.dtype]] = []
    buffer = kind(
        storage=LazyTensorStorage(60),
        sampler=SAMPLERS[sampler](),
        transform=noting(seen, keys, lambda td: td),
        batch_size=4,
    )
    for lengths in ([8], [2], [1, 4], [60]):
        buffer.extend(
            world.to_batch(
                [s for i, n in enumerate(lengths) for s in world.episode(n, i, n)], without=["is_init"]
            )
        )
        for _ in range(5):
            assert keys(buffer.sample()) == seen[-1] == seen[0]
    assert "is_init" in seen[0]


@pytest.mark.parametrize("sampler", ["slice", "padded", "slice pass", "slice priority"])
def test_many_short_slices_cost_the_python_of_a_few(world: Any, sampler: str) -> None:
    """No Python loop runs over slices of different lengths."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(60), sampler=SAMPLERS[sampler]())
    buffer.extend(world.to_batch([s for e in range(30) for s in world.episode(0, e, 1 + e % 3)]))
    buffer.sample(4)
    few, many = (python_calls(partial(buffer.sample, size)) for size in (8, 80))
    assert many <= few + 4


def test_one_long_and_many_short_trajectories_take_no_memory() -> None:
    """Trajectories are not padded to the longest one."""
    ids = torch.cat([torch.arange(5000), torch.full((20_000,), 5000)])
    sampler = PrioritizedSliceSampler(25_000, 0.7, 0.5, slice_len=4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(25_000), sampler=sampler, batch_size=32)
    buffer.extend(TensorDict({"x": ids, "collector": {"traj_ids": ids}}, [25_000]))
    assert peak(buffer.sample) < 100_000


def test_samplers_of_slices_take_the_same_arguments() -> None:
    options: Any = {"slice_len": 4, "pad_output": True, "cache_values": True}
    assert SliceSampler(**options).check(8) == SliceSamplerWithoutReplacement(**options).check(8) == 8


@pytest.mark.parametrize("sampler", ["slice", "slice priority", "slice pass"])
def test_slices_of_items_say_what_is_wrong(sampler: str) -> None:
    """A storage of items and an empty buffer have messages of their own."""
    buffer = ReplayBuffer(storage=ListStorage(10), sampler=SAMPLERS[sampler](), batch_size=4)
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer"):
        buffer.sample()
    with pytest.raises(TypeError, match="follows trajectories, which needs tensordict batches, got list"):
        buffer.extend([1, 2])


@pytest.mark.parametrize("capacity", [7, 10])
@pytest.mark.parametrize("start", [2**31 - 5, 2**53, 2**62])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_counters_are_64_bits_wide(world: Any, sampler: str, start: int, capacity: int) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(capacity, compact_obs=True), sampler=SAMPLERS[sampler](), batch_size=8
    )
    buffer.extend(world.to_batch(world.episode(0, 0, 3)))
    buffer.empty()
    first = start // capacity * capacity
    buffer.ring._state["head"] = buffer.ring._state["written"] = first
    for episode in range(1, 6):
        buffer.extend(world.to_batch(world.episode(0, episode, 5)))
        sample, info = buffer.sample(return_info=True)
        assert torch.equal(sample["next", "observation"][:, 2], sample["observation"][:, 2] + 1)
        if "index_generation" in info:
            assert (info["index_generation"] >= first // capacity).all()
            buffer.update_priority(info["index"], torch.rand(len(sample)), info["index_generation"])
    assert buffer.stats()["rows_written"] == first + 25
