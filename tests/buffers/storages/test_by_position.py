"""A storage by itself: ``storage[i]``, ``set``, ``get``, iteration; and the same beside a buffer."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from flatroll.buffers import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    MultiStepTransform,
    NextObservationDelta,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorStorage,
)
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.storages.positions import slots_at
from flatroll.buffers.storages.storage import Storage

KINDS = [LazyTensorStorage, LazyMemmapStorage]


def rows(count: int, first: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(first, first + count)}, [count])


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_alone_is_written_and_read_by_position(kind: Any) -> None:
    storage = kind(5)
    assert len(storage) == 0 and list(storage) == []
    storage.set(range(3), rows(3))
    storage.set(3, rows(1, 3)[0])
    storage[0] = TensorDict({"x": torch.tensor(9)})
    assert len(storage) == 4 and [int(row["x"]) for row in storage] == [9, 1, 2, 3]
    assert storage[1:3]["x"].tolist() == [1, 2] and storage.get([3, 0])["x"].tolist() == [3, 9]
    assert storage.get(torch.tensor([True, False, True, False]))["x"].tolist() == [9, 2]
    for index in (5, range(4, 6), -1):
        with pytest.raises((IndexError, ValueError)):
            storage.set(index, rows(1)[0] if isinstance(index, int) else rows(2))
    with pytest.raises(IndexError, match="4 rows are stored"):
        storage[4]
    assert len(storage) == 4


def test_items_of_a_list_alone() -> None:
    storage = ListStorage(3)
    storage[0] = "a"
    storage.set([1, 2], ["b", None])
    assert list(storage) == ["a", "b", None] and storage[1:] == ["b", None]


class Told:
    def __init__(self) -> None:
        self.indices: list[Any] = []

    def mark_update(self, index: Any) -> None:
        self.indices.append(index)


class Twice:
    """A transform that changes what is stored and what is read."""

    def forward(self, td: Any) -> Any:
        return td.apply(lambda x: 2 * x)

    def inv(self, td: Any) -> Any:
        return td.apply(lambda x: x + 100)


@pytest.mark.parametrize("kind", KINDS)
def test_the_storage_of_a_buffer_gives_its_rows_without_transforms(kind: Any) -> None:
    buffer, told = ReplayBuffer(kind(5), transform=Twice()), Told()
    buffer.storage.attach(told)
    buffer.extend(rows(7))
    assert len(buffer.storage) == 5 and buffer.storage[:]["x"].tolist() == [102, 103, 104, 105, 106]
    buffer.storage[0] = TensorDict({"x": torch.tensor(1)})
    assert told.indices == [0] and int(buffer.storage[0]["x"]) == 1 and int(buffer[0]["x"]) == 2
    with pytest.raises(IndexError):
        buffer.storage[5] = TensorDict({"x": torch.tensor(1)})
    del told
    gc.collect()
    buffer.storage.set([0, 1], rows(2))
    assert buffer.storage[:2]["x"].tolist() == [0, 1]


def test_the_storage_of_a_copy_is_that_of_the_copy() -> None:
    buffer = ReplayBuffer(LazyTensorStorage(5))
    buffer.extend(rows(3))
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        other.extend(rows(2))
        assert len(other.storage) == 5 and len(buffer.storage) == 3


def test_what_a_compact_storage_reads_twice_cannot_be_set() -> None:
    at = torch.arange(4.0)[:, None]
    done = torch.zeros(3, 1, dtype=torch.bool)
    batch = TensorDict({"observation": at[:3], "next": {"observation": at[1:], "done": done}}, [3])
    buffer = ReplayBuffer(LazyTensorStorage(5, compact_obs=True))
    buffer.extend(batch)
    assert torch.equal(buffer.storage[:]["next", "observation"], at[1:])
    with pytest.raises(ValueError, match="cannot be changed in place"):
        buffer.storage[1] = TensorDict({"observation": torch.tensor([9.0])})
    with pytest.raises(RuntimeError, match="written only by a ReplayBuffer"):
        LazyTensorStorage(5, compact_obs=True).set(range(3), batch)


def test_transforms_that_read_ahead_do_not_change_the_storages_rows() -> None:
    reward, done = torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.bool)
    batch = TensorDict(
        {"x": torch.arange(4), "next": {"x": torch.arange(1, 5), "reward": reward, "done": done}}, [4]
    )
    buffer = ReplayBuffer(LazyTensorStorage(5), transform=MultiStepTransform(n_steps=2, gamma=0.5))
    buffer.extend(batch)
    assert buffer.storage[:]["next", "reward"].tolist() == reward.tolist()


def test_lazy_stacks_keep_shapes_apart() -> None:
    seeded = torch.Generator().manual_seed(0)  # else one sample in 128 has one item only
    buffer = ReplayBuffer(LazyStackStorage(10), batch_size=8, generator=seeded)
    buffer.extend([TensorDict({"x": torch.zeros(n)}) for n in (2, 3)])
    sample = buffer.sample()
    assert isinstance(sample, LazyStackedTensorDict) and {len(item["x"]) for item in sample} == {2, 3}


# --- arguments of other libraries' scripts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: ReplayBuffer(LazyTensorStorage(10, compilable=True), compilable=True),
        lambda: ReplayBuffer(ListStorage(compilable=True), writer=RoundRobinWriter(compilable=True)),
        lambda: ReplayBuffer(LazyMemmapStorage(10, compilable=True), shared=True),
        lambda: ReplayBuffer(LazyStackStorage(10), writer=TensorDictMaxValueWriter("x", compilable=True)),
        lambda: TensorDictPrioritizedReplayBuffer(
            LazyTensorStorage(10), alpha=0.7, beta=0.9, compilable=False
        ),
        lambda: ReplayBuffer(TensorStorage(torch.zeros(3)), writer=ImmutableDatasetWriter(compilable=True)),
    ],
)
def test_arguments_that_change_nothing_are_taken(make: Any) -> None:
    assert isinstance(make().storage, Storage)


def test_shared_needs_files() -> None:
    with pytest.raises(ValueError, match="LazyMemmapStorage"):
        ReplayBuffer(LazyTensorStorage(10), shared=True)


def test_priorities_of_a_batch_may_be_left_alone() -> None:
    batch = rows(4).set("td_error", torch.tensor([0.0, 0.0, 0.0, 1e6]))
    for update, most in ((False, 400), (None, 999)):
        generator = torch.Generator().manual_seed(0)
        buffer = TensorDictPrioritizedReplayBuffer(
            LazyTensorStorage(10), alpha=1.0, beta=1.0, batch_size=1000, generator=generator
        )
        buffer.extend(batch, update_priority=update)
        drawn = int((buffer.sample()["x"] == 3).sum())
        assert drawn < most if update is False else drawn >= most


def test_the_delta_transform_takes_the_arguments_of_both_sides() -> None:
    transform = NextObservationDelta(in_keys=["x"], delta_dtype=torch.bfloat16, restore_dtype="root")
    delta = torch.ones(2, dtype=torch.bfloat16)
    sample = transform(TensorDict({"x": torch.arange(2.0), "next": {"delta": {"x": delta}}}, [2]))
    assert sample["next", "x"].tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="delta_dtype"):
        NextObservationDelta(delta_dtype=torch.int8)


def test_a_batch_larger_than_the_storage_leaves_its_last_rows() -> None:
    buffer = ReplayBuffer(LazyTensorStorage(10))
    assert len(buffer.extend(rows(20))) == 10 and sorted(buffer[:]["x"].tolist()) == list(range(10, 20))


def test_a_sampler_that_forgets_the_next_observations_of_a_compact_storage_is_told() -> None:
    class Forgetful(SliceSampler):
        def draw(self, ring: Any, batch_size: int, generator: Any, follow: bool) -> Any:
            return super().draw(ring, batch_size, generator, False)

    at = torch.arange(4.0)[:, None]
    done = torch.zeros(3, 1, dtype=torch.bool)
    buffer = ReplayBuffer(LazyTensorStorage(5, compact_obs=True), sampler=Forgetful(slice_len=2))
    buffer.extend(TensorDict({"observation": at[:3], "next": {"observation": at[1:], "done": done}}, [3]))
    with pytest.raises(RuntimeError, match="follow"):
        buffer.sample(2)


def test_slots_are_those_of_torch_and_take_no_time_in_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    for used, lanes in ((0, ()), (7, ()), (8, (2,)), (12, (2, 3))):
        ring, shape = Ring(20), torch.Size(lanes)
        ring.publish(used)
        slots = torch.arange(used).view(-1, *lanes)
        whole = [slice(None), slice(1, 3), slice(5, 1), slice(-2, None), slice(0, 99, 2), []]
        few = [0, -1, [1, -2], torch.tensor([[0, 1]]), torch.tensor(1, dtype=torch.int32)]
        for index in whole + (few if used else []):
            assert torch.equal(slots_at(index, ring, shape), slots[index]), (used, lanes, index)
        assert torch.equal(slots_at(slice(None, None, -1), ring, shape), slots.flip(0))
        for index in (99, -99, [99], torch.tensor([-99])):
            with pytest.raises(IndexError, match="out of range"):
                slots_at(index, ring, shape)
    ring = Ring(10**6)
    ring.publish(10**6)
    arange = torch.arange

    def short(*arguments: Any) -> torch.Tensor:
        assert max(arguments) < 100
        return arange(*arguments)

    monkeypatch.setattr(torch, "arange", short)
    for index in (3, -1, [5, 6], slice(7, 9), torch.tensor([10, 11])):
        assert slots_at(index, ring, torch.Size([])).numel() <= 2


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_two_buffers_cannot_write_to_one_storage(kind: Any) -> None:
    """The second would write over the first one's rows, which then gives them as its own."""
    storage = kind(10)
    first, second = ReplayBuffer(storage), ReplayBuffer(storage)
    items = [rows(5), rows(5, 100)] if kind is not ListStorage else [range(5), range(100, 105)]
    first.extend(items[0])
    with pytest.raises(ValueError, match="already belongs to another buffer"):
        second.extend(items[1])
    stored = first[:]["x"].tolist() if kind is not ListStorage else first[:]
    given = storage[:]["x"].tolist() if kind is not ListStorage else storage[:]
    assert stored == given == list(range(5)) and len(first) == len(storage) == 5 and len(second) == 0


def test_rows_set_without_a_buffer_are_not_written_over() -> None:
    storage = LazyTensorStorage(10)
    storage.set(range(3), rows(3))
    with pytest.raises(ValueError, match=r"or storage\.set wrote to it"):
        ReplayBuffer(storage).extend(rows(5, 100))


def test_a_storage_whose_buffer_is_gone_says_so() -> None:
    storage = LazyTensorStorage(10)
    ReplayBuffer(storage).extend(rows(3))
    gc.collect()
    with pytest.raises(
        RuntimeError, match="the storage's buffer, which knew the order of its rows, was deleted"
    ):
        storage[0]


def test_items_may_be_a_range() -> None:
    storage = ListStorage(10)
    storage.set(range(10), range(10))
    assert storage[:] == list(range(10))
    assert ReplayBuffer(ListStorage(4)).extend(range(3)).tolist() == [0, 1, 2]


def test_tensors_that_are_there_are_read_and_written_without_a_buffer() -> None:
    numbers = torch.arange(5)
    storage = TensorStorage(numbers)
    assert len(storage) == 5 and storage[3] == 3 and [int(item) for item in storage] == [0, 1, 2, 3, 4]
    storage[1] = torch.tensor(9)
    storage[[3, 4]] = torch.tensor([7, 8])
    assert numbers.tolist() == storage[:].tolist() == [0, 9, 2, 7, 8]
    storage[:1].fill_(4)  # of a copy
    assert storage[0] == 0
    with pytest.raises(IndexError):
        storage[5]
    buffer = ReplayBuffer(storage)
    buffer.extend(torch.tensor([6]))
    assert storage[:].tolist() == numbers.tolist() == [6, 9, 2, 7, 8]
    grid = TensorStorage(TensorDict({"x": torch.arange(6).view(3, 2)}, [3, 2]), ndim=2)
    grid[1] = TensorDict({"x": torch.tensor([8, 9])}, [2])
    assert len(grid) == 6 and grid[:]["x"].tolist() == [[0, 1], [8, 9], [4, 5]]
    pair = TensorStorage((torch.arange(3), torch.zeros(3)))
    pair[2] = (4, 2.0)
    assert pair[2] == (4, 2.0) and pair[:][1].tolist() == [0.0, 0.0, 2.0]


def test_expanded_memory_is_copied_before_rows_are_written() -> None:
    """Its rows share memory: one that is written would change the others."""
    same_row = torch.zeros(1, 3).expand(4, 3)
    storage = TensorStorage(same_row)
    storage[1] = torch.ones(3)
    assert storage[:].sum(1).tolist() == [0, 3, 0, 0] and not same_row.any()
    windows = torch.arange(6).unfold(0, 3, 1)
    buffer = ReplayBuffer(TensorStorage((torch.zeros(1).expand(4), windows)))
    buffer.extend((torch.ones(1), torch.ones(1, 3, dtype=torch.int64)))
    assert buffer[:][0].tolist() == [1, 0, 0, 0]
    assert buffer[:][1].tolist() == [[1, 1, 1], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    own, shared = torch.arange(4), torch.zeros(1).expand(4)
    rows = ReplayBuffer(TensorStorage(TensorDict({"own": own, "nested": {"shared": shared}}, [4])))
    rows.extend(TensorDict({"own": torch.tensor([9]), "nested": {"shared": torch.ones(1)}}, [1]))
    assert own.tolist() == [9, 1, 2, 3] and rows[:]["nested", "shared"].tolist() == [1, 0, 0, 0]
