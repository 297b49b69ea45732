"""What a handle answers is what the buffer itself answers, for every storage, sampler and kind of data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared_rows import far
from tensordict import NonTensorData, TensorDict

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MultiStepTransform,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    Transform,
)

CAPACITY = 61


def same(left: Any, right: Any) -> bool:
    if isinstance(left, TensorDict):
        keys = set(left.keys(True, True))
        return keys == set(right.keys(True, True)) and all(same(left[key], right[key]) for key in keys)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left.nan_to_num(), right.nan_to_num())
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return bool(left == right)


STORAGES: dict[str, Callable[[Path], Storage]] = {
    "tensors": lambda _: LazyTensorStorage(CAPACITY, compact_obs=True),
    "list": lambda _: ListStorage(CAPACITY),
    "memmap": lambda path: LazyMemmapStorage(CAPACITY, scratch_dir=path, compact_obs=True),
    "frames": lambda _: LazyTensorStorage(CAPACITY, frame_stack={"observation": 4}),
    "zstd": lambda _: LazyTensorStorage(CAPACITY, codec={"observation": "zstd"}),
}
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=6),
    "prioritized": lambda: PrioritizedSampler(CAPACITY, alpha=0.7, beta=0.9),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, alpha=0.7, beta=0.9, slice_len=6),
}
CASES = [(storage, "random", 0) for storage in STORAGES if storage != "tensors"]
CASES += [("tensors", sampler, steps) for sampler in SAMPLERS for steps in (0, 3)]


@pytest.mark.parametrize(("storage", "sampler", "steps"), CASES)
def test_a_handle_stores_and_samples_what_the_buffer_does(
    world: Any, storage: str, sampler: str, steps: int, tmp_path: Path
) -> None:
    """Interleaved writers and a ring that wraps; compact and plain, with their ``final``."""

    def made(name: str) -> ReplayBuffer:
        return ReplayBuffer(
            storage=STORAGES[storage](tmp_path / name),
            sampler=SAMPLERS[sampler](),
            transform=MultiStepTransform(steps, 0.9) if steps else None,
            batch_size=24,
            generator=torch.Generator().manual_seed(0),
        )

    local, shared = made("local"), made("shared")
    handle, writers = far(shared), world.writers(3, seed=1)
    for i in range(12):
        windows = world.windows(writers, [(i % 3, i % 7 + 1), ((i + 1) % 3, 5)])
        kind = "stack" if storage in ("frames", "zstd") else "dict"
        batch, final = world.to_batch(windows, kind), None
        if storage in ("tensors", "memmap"):
            batch, final = world.compacted(batch, windows)
        assert same(local.extend(batch, final), handle.extend(batch, final))
        assert len(handle) == len(local)
        drawn, info = local.sample(return_info=True)
        sample, same_info = handle.sample(return_info=True)
        assert same(drawn, sample) and same(info, same_info)
        if "prioritized" in sampler:
            priority = (info["index"] % 5).float()
            for buffer in (local, handle):
                buffer.update_priority(info["index"], priority, info["index_generation"])
                buffer.mark_update(info["index"][:3])
        assert handle.stats() == local.stats() and handle.batch_size == 24
    assert same(local[:], shared[:])
    handle.empty()
    assert len(handle) == len(shared) == 0


BIG = 20_000  # numbers: their bytes do not fit into a message, and go through shared memory

ITEMS: dict[str, Any] = {
    "tensor": torch.arange(BIG).view(4, -1),
    "few": torch.arange(4),
    "tree": ({"a": torch.ones(4, BIG)}, [torch.zeros(4)]),
    "arrays": {"a": np.arange(BIG, dtype=np.float64).reshape(4, -1), "b": np.arange(4)},
    "bfloat16": torch.ones(4, BIG, dtype=torch.bfloat16),
    "nothing": torch.zeros(0, 3),
    "no width": torch.zeros(4, 0),
    "not contiguous": torch.arange(4.0 * BIG).view(-1, 4).t(),
    "expanded": torch.ones(1).expand(4, BIG),
    "gradient": torch.ones(4, BIG, requires_grad=True),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_any_kind_of_data_arrives(kind: str) -> None:
    data = ITEMS[kind]
    local, shared = (ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3) for _ in range(2))
    handle = far(shared)
    assert same(local.extend(data), handle.extend(data))
    assert len(handle) == len(local)
    if len(local):
        assert same(local[:], shared[:])
        local.generator = torch.Generator().manual_seed(0)
        shared.generator = torch.Generator().manual_seed(0)
        assert same(local.sample(), handle.sample())


def test_items_of_a_list_are_kept_apart_from_the_memory_they_came_in() -> None:
    buffer = ReplayBuffer(storage=ListStorage(10), batch_size=2)
    handle = far(buffer)
    first = [TensorDict({"x": torch.full((BIG,), float(i))}) for i in range(3)]
    words = [{"text": "word " * BIG, "x": 1}, NonTensorData("a")]
    handle.extend(first)
    handle.extend([TensorDict({"x": torch.full((BIG,), 7.0)}) for _ in range(3)])
    handle.extend(words)
    assert handle.add(lambda: 5) == 8  # anything that cloudpickle takes
    assert [item["x"].unique().tolist() for item in buffer[:6]] == [[0.0], [1.0], [2.0], [7.0], [7.0], [7.0]]
    assert buffer[6] == words[0] and buffer[8]() == 5


def test_what_an_inverse_transform_keeps_is_its_own() -> None:
    kept = []

    class Keeps(Transform):
        def inv(self, batch: Any) -> Any:
            kept.append(batch)
            return batch

        def forward(self, batch: Any) -> Any:
            return batch

    buffer = ReplayBuffer(storage=LazyTensorStorage(100), transform=Keeps(), batch_size=2)
    handle = far(buffer)
    for value in (1.0, 2.0):
        handle.extend(TensorDict({"x": torch.full((4, BIG), value)}, [4]))
    assert [batch["x"].unique().tolist() for batch in kept] == [[1.0], [2.0]]


def test_a_sample_owns_its_memory() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    handle = far(buffer)
    handle.extend(TensorDict({"x": torch.zeros(4, BIG)}, [4]))
    sample = handle.sample()
    handle.extend(TensorDict({"x": torch.ones(96, BIG)}, [96]))
    buffer.extend(TensorDict({"x": torch.ones(4, BIG)}, [4]))
    assert bool((handle.sample()["x"] == 1).all()) and bool((sample["x"] == 0).all())


def test_priorities_of_a_sample_go_back() -> None:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=0.5, eps=0.0, storage=LazyTensorStorage(10), batch_size=8
    )
    handle = far(buffer)
    handle.extend(TensorDict({"x": torch.arange(10.0)}, [10]), update_priority=False)
    sample = handle.sample(200)
    sample["td_error"] = (sample["x"] == 3).float()
    handle.update_tensordict_priority(sample)
    assert set(handle.sample()["x"].tolist()) == {3.0}
    assert handle.add(TensorDict({"x": torch.tensor(5.0)})) == 0


def test_an_ensemble_is_sampled_by_a_handle_and_extended_by_those_of_its_members() -> None:
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=6)
    handle, one = far(ensemble), far(members[1])
    members[0].extend(TensorDict({"x": torch.zeros(5)}, [5]))
    one.extend(TensorDict({"x": torch.ones(5)}, [5]))
    assert handle.sample()["x"].tolist() == [[0.0] * 3, [1.0] * 3] and len(handle) == 10
    assert handle.stats() == ensemble.stats()
    with pytest.raises(RuntimeError, match=r"an ensemble cannot choose one of its"):
        handle.extend(TensorDict({"x": torch.ones(5)}, [5]))


def test_a_writer_that_chooses_does_so_in_the_owner() -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("x"), batch_size=3
    )
    far(buffer).extend(TensorDict({"x": torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])}, [5]))
    assert sorted(buffer["x"].tolist()) == [3.0, 4.0, 5.0]


def test_rows_that_a_collector_keeps_back_are_told() -> None:
    handle = far(buffer := ReplayBuffer(storage=LazyTensorStorage(3), batch_size=3))
    handle.note_waiting(7)
    with pytest.raises(RuntimeError, match="7 rows wait in the collector"):
        buffer.sample()


@pytest.mark.cuda
def test_a_buffer_on_a_gpu_is_owned_by_one_process() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, device="cuda"), batch_size=4)
    handle = far(buffer)
    handle.extend(TensorDict({"x": torch.ones(4, BIG, device="cuda")}, [4], device="cuda"))
    sample = handle.sample()
    assert sample.device in (None, torch.device("cpu")) and sample["x"].device.type == "cpu"
    assert buffer[:]["x"].is_cuda and bool((sample["x"] == 1).all())
