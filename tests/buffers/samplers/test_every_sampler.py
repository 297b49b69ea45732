"""Every sampler on every storage draws what it draws from a full one in memory, bit by bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    MultiStepTransform,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Storage,
)

CAPACITY = 61

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=6),
    "by start": lambda: SliceSampler(slice_len=6, by="start"),
    "span": lambda: SliceSampler(slice_len=6, span=3),
    "filled": lambda: SliceSampler(slice_len=6, fill=True),
    "padded": lambda: SliceSampler(slice_len=6, pad_output=True),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=6, by="start"),
    "filled without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=6, fill=True),
    "prioritized": lambda: PrioritizedSampler(CAPACITY, alpha=0.7, beta=0.9),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, alpha=0.7, beta=0.9, slice_len=6),
}
STORAGES: dict[str, Callable[[Path], Storage]] = {
    "compact": lambda _: LazyTensorStorage(CAPACITY, compact_obs=True),
    "memmap": lambda path: LazyMemmapStorage(CAPACITY, scratch_dir=path),
    "frames": lambda _: LazyTensorStorage(CAPACITY, compact_obs=True, frame_stack={"observation": 4}),
    "frames twice": lambda _: LazyTensorStorage(CAPACITY, frame_stack={"observation": 4}),
    "zstd": lambda _: LazyTensorStorage(CAPACITY, compact_obs=True, codec={"observation": "zstd"}),
    "zstd frames": lambda _: LazyTensorStorage(
        CAPACITY, compact_obs=True, frame_stack={"observation": 4}, codec={"observation": "zstd"}
    ),
    "compact memmap": lambda path: LazyMemmapStorage(CAPACITY, scratch_dir=path, compact_obs=True),
}


def buffer_of(storage: Storage, sampler: str, steps: int) -> ReplayBuffer:
    return ReplayBuffer(
        storage=storage,
        sampler=SAMPLERS[sampler](),
        transform=MultiStepTransform(steps, 0.9) if steps else None,
        batch_size=24,
        generator=torch.Generator().manual_seed(0),
    )


def assert_bit_equal(left: Any, right: Any) -> None:
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key, value in left.items(True, True):
        other = right[key]
        assert value.dtype == other.dtype and value.shape == other.shape, key
        assert torch.equal(value.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)), key


@pytest.mark.cover(2)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("storage", "kind"),
    [(storage, "stack" if "frames" in storage or "zstd" in storage else "dict") for storage in STORAGES],
)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_equal_those_of_a_full_storage(
    world: Any, sampler: str, storage: str, kind: str, steps: int, tmp_path: Path
) -> None:
    full = buffer_of(LazyTensorStorage(CAPACITY), sampler, steps)
    other = buffer_of(STORAGES[storage](tmp_path / "rows"), sampler, steps)
    final = buffer_of(LazyTensorStorage(CAPACITY, compact_obs=True), sampler, steps)
    writers = world.writers(3, seed=1)
    schema = None
    for i in range(14):
        made = world.windows(writers, [(i % 3, i % 7 + 1), ((i + 1) % 3, 5)])
        batch = world.to_batch(made, kind)
        full.extend(batch)
        other.extend(batch)
        final.extend(*world.compacted(batch, made))
        drawn, info = full.sample(return_info=True)
        sample, same = other.sample(return_info=True)
        assert_bit_equal(drawn, sample)
        assert set(info) == set(same) and all(torch.equal(info[key], same[key]) for key in info)
        assert_bit_equal(
            drawn.exclude(("next", "step_count")), final.sample().exclude(("next", "step_count"))
        )
        forms = {key: (value.dtype, value.shape[1:]) for key, value in drawn.items(True, True)}
        assert schema in (None, forms)
        schema = forms
        if sampler.startswith("prioritized"):
            priority = (info["index"] % 5).float()
            for buffer in (full, other, final):
                buffer.update_priority(info["index"], priority, info["index_generation"])
