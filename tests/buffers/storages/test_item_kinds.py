"""What can be stored: the references' examples, trees, numbers, lists, and what is refused."""

from collections import namedtuple
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from flatroll.rollouts import Collector
from flatroll.wrappers import StepCounter

Point = namedtuple("Point", "x y")
STORAGES = [LazyTensorStorage, LazyMemmapStorage]


def alike(left: Any, right: Any) -> bool:
    """Same form, same values."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype is right.dtype and torch.equal(left, right)
    if type(left) is not type(right) or (
        isinstance(left, TensorDict) and left.batch_size != right.batch_size
    ):
        return False
    if isinstance(left, (dict, TensorDict)):
        names = set(left.keys())
        return names == set(right.keys()) and all(alike(left[name], right[name]) for name in names)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(alike(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


# -- the references' examples --------------------------------------------------------------------------------------


def test_a_list_takes_anything() -> None:
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.add("a string!")  # first element will be a string
    rb.extend([30, None])  # element [1] is an int, [2] is None
    assert [rb[0], rb[1], rb[2]] == ["a string!", 30, None] and rb[:] == ["a string!", 30, None]
    assert rb[[2, 0]] == [None, "a string!"] and rb[-1] is None
    assert set(rb.sample(50)) == {"a string!", 30, None}
    assert repr(ReplayBuffer()) == "ReplayBuffer(0 of 1000 rows, ListStorage, RandomSampler)"


def test_a_container_of_the_callers() -> None:
    container = torch.empty(10, 3, 64, 64, dtype=torch.uint8)
    rb = ReplayBuffer(storage=TensorStorage(container))
    img = torch.randint(255, (3, 64, 64), dtype=torch.uint8)
    assert rb.add(img) == 0 and torch.equal(container[0], img)


@pytest.mark.parametrize("storage", STORAGES)
def test_containers_made_from_the_data(storage: Any) -> None:
    rb_td = ReplayBuffer(storage=storage(10), batch_size=1)  # max 10 elements stored
    item = TensorDict(
        {"img": torch.randint(255, (3, 64, 64), dtype=torch.uint8), "labels": torch.randint(100, ())},
        batch_size=[],
    )
    rb_td.add(item)
    rb_pytree = ReplayBuffer(storage=storage(10))  # max 10 elements stored
    # extend with a PyTree where all tensors have the same leading dim (3)
    tree = {"a": {"b": torch.randn(3), "c": [torch.zeros(3, 2), (torch.ones(3, 10),)]}}
    rb_pytree.extend(tree)
    assert len(rb_pytree) == 3  # the replay buffer has 3 elements!
    assert alike(rb_pytree[:], tree)

    first_elt = rb_td[0]
    storage = rb_td[:]  # returns all valid elements from the buffer
    sample = rb_td.sample(128)
    assert alike(first_elt, item) and storage.batch_size == (1,) and sample.batch_size == (128,)
    for i, data in enumerate(rb_td):  # iterate over the buffer using the sampler
        assert data.batch_size == (1,)
        if i == 3:
            break


def test_one_env_and_slices_of_its_trajectories() -> None:
    env = StepCounter(gym.make_vec("CartPole-v1", num_envs=1))
    collector = Collector(env, None, frames_per_batch=10, total_frames=-1)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(
            num_slices=8, traj_key=("collector", "traj_ids"), truncated_key=None, strict_length=False
        ),
        batch_size=64,
    )
    for i, data in enumerate(collector):
        rb.extend(data)
        if i == 10:
            break
    assert len(rb) == 100, len(rb)
    steps = rb[:]["next", "step_count"]
    assert steps.shape == (100, 1)
    sample = rb.sample()
    inside = ~sample["is_init"][1:, 0]
    assert bool((sample["step_count"][1:] == sample["step_count"][:-1] + 1)[inside].all())
    collector.shutdown()


# -- trees, numbers, arrays ----------------------------------------------------------------------------------------

TREES: dict[str, Any] = {
    "tensor": torch.arange(12).view(4, 3),
    "flat tensor": torch.arange(4.0),
    "tuple": (torch.arange(4), torch.zeros(4, 2)),
    "dict": {"a": torch.arange(4), "b": {"c": torch.ones(4, 1)}},
    "named tuple": Point(torch.arange(4), {"z": [torch.zeros(4), (torch.ones(4, 2),)]}),
    "names with dots": {"a.b": torch.zeros(4), "a": {"b": torch.ones(4)}, "a/b": torch.arange(4)},
    "numbers as names": {0: torch.zeros(4), "0": torch.ones(4), (1, 2): torch.arange(4)},
    "one tensor in a tuple": (torch.arange(4),),
    "tensordict": TensorDict({"a": torch.arange(4), "b": {"c": torch.ones(4, 1)}}, [4]),
    "whole trajectories": TensorDict({"a": torch.arange(12).view(4, 3)}, [4, 3]),
}


def rows_of(tree: Any, rows: Any) -> Any:
    if isinstance(tree, TensorDict):
        return tree[rows]
    return torch.utils._pytree.tree_map(lambda leaf: leaf[rows], tree)


@pytest.mark.parametrize("storage", [*STORAGES, lambda rows: None])
@pytest.mark.parametrize("kind", TREES)
def test_what_goes_in_comes_out(kind: str, storage: Any) -> None:
    tree = TREES[kind]
    made = storage(6) or TensorStorage(rows_of(tree, torch.tensor([0, 0, 0, 0, 0, 0])))
    buffer = ReplayBuffer(storage=made, batch_size=5)
    buffer.empty()
    assert buffer.extend(tree).tolist() == [0, 1, 2, 3]
    assert alike(buffer[:], tree)
    assert buffer.add(rows_of(tree, 2)) == 4
    assert alike(buffer[4], rows_of(tree, 2)) and alike(buffer[[1, 4]], rows_of(tree, torch.tensor([1, 2])))
    assert buffer.extend(rows_of(tree, torch.tensor([3, 1]))).tolist() == [5, 0]
    assert alike(buffer[:], rows_of(tree, torch.tensor([1, 1, 2, 3, 2, 3])))
    sample, info = buffer.sample(return_info=True)
    assert alike(sample, buffer[info["index"]])
    buffer[1:3] = rows_of(tree, torch.tensor([0, 3]))
    buffer[-1] = rows_of(tree, 0)
    assert alike(buffer[:], rows_of(tree, torch.tensor([1, 0, 3, 3, 2, 0]))) and len(buffer) == 6
    listed = ReplayBuffer(storage=LazyTensorStorage(6))
    listed.extend([rows_of(tree, i) for i in range(4)])
    assert alike(listed[:], tree)


@pytest.mark.parametrize("storage", STORAGES)
def test_numbers_and_arrays_become_tensors(storage: Any) -> None:
    buffer = ReplayBuffer(storage=storage(10))
    item = {"a": 1.5, "b": np.arange(3), "c": True, "d": 7, "e": np.float64(2)}
    buffer.add(item)
    buffer.extend([item, item])
    rows = buffer[:]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in rows.items()} == {
        "a": (torch.float32, (3,)),
        "b": (torch.int64, (3, 3)),
        "c": (torch.bool, (3,)),
        "d": (torch.int64, (3,)),
        "e": (torch.float64, (3,)),
    }
    arrays = ReplayBuffer(storage=storage(10))
    source = np.arange(4)
    arrays.extend(source)
    arrays.add(np.int64(7))
    arrays.extend(torch.tensor([8, 9]))
    source[:] = 0
    arrays[0] = 5
    assert arrays[:].tolist() == [5, 1, 2, 3, 7, 8, 9]


def test_a_tuple_is_a_tree_and_a_list_a_stack_of_items() -> None:
    parts = [torch.zeros(3), torch.ones(3)]
    tree, items = ReplayBuffer(storage=LazyTensorStorage(10)), ReplayBuffer(storage=LazyTensorStorage(10))
    tree.extend(tuple(parts))
    items.extend(parts)
    assert len(tree) == 3 and alike(tree[0], (torch.tensor(0.0), torch.tensor(1.0)))
    assert len(items) == 2 and alike(items[1], torch.ones(3))
    for buffer in (tree, items, ReplayBuffer(), ReplayBuffer(storage=LazyTensorStorage(3))):
        length = len(buffer)
        assert buffer.extend([]).tolist() == [] and len(buffer) == length


def test_entries_by_name() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(TREES["tensordict"])
    assert buffer["a"].tolist() == [0, 1, 2, 3] and buffer["b", "c"].shape == (4, 1)
    assert alike(buffer["_data", "a"], buffer["a"]) and alike(buffer["b"], TREES["tensordict"]["b"])
    trees = ReplayBuffer(storage=LazyTensorStorage(10))
    trees.extend(TREES["named tuple"])
    assert trees["x"].tolist() == [0, 1, 2, 3] and alike(trees["y", "z"], TREES["named tuple"].y["z"])
    tensors = ReplayBuffer(storage=LazyTensorStorage(10))
    tensors.extend(torch.zeros(3))
    with pytest.raises(TypeError, match="there is no entry 'a': rows are Tensors, not tensordicts"):
        tensors["a"]


# -- lists -----------------------------------------------------------------------------------------------------------


def test_a_list_storage_owns_what_it_takes_apart() -> None:
    for batch in (torch.arange(3), TensorDict({"a": torch.arange(3)}, [3]), {"a": np.arange(3)}):
        buffer = ReplayBuffer(storage=ListStorage(10))
        buffer.extend(batch)
        source = batch if isinstance(batch, Tensor) else batch["a"]
        source[:] = 9
        rows = buffer.sample(30)
        values = rows if isinstance(rows, Tensor) else rows["a"]
        assert set(values.tolist()) == {0, 1, 2}


def test_items_alike_are_stacked_others_listed() -> None:
    buffer = ReplayBuffer(storage=ListStorage(10), batch_size=4)
    buffer.extend([(torch.zeros(2), {"a": torch.ones(1)})] * 3)
    assert buffer.sample()[0].shape == (4, 2) and buffer.sample()[1]["a"].shape == (4, 1)
    buffer.empty()
    buffer.extend([torch.zeros(2), torch.zeros(3)])
    assert isinstance(buffer.sample(20), list)
    buffer.empty()
    buffer.extend([TensorDict({"a": 1}), TensorDict({"b": 1})])
    assert isinstance(buffer.sample(20), list)


def test_a_ring_of_items() -> None:
    buffer = ReplayBuffer(storage=ListStorage(3))
    assert [buffer.add(i) for i in "abcd"] == [0, 1, 2, 0]
    assert buffer[:] == ["d", "b", "c"]
    assert buffer.extend(list("efghi")).tolist() == [1, 2, 0]  # its last three
    assert buffer[:] == ["i", "g", "h"]
    buffer[0] = "x"
    buffer[1:] = ["y", "z"]
    assert buffer[:] == ["x", "y", "z"]
    with pytest.raises(ValueError, match="data must be a list of 2 items, one for each slot, got 'no list'"):
        buffer[1:] = "no list"


def test_a_stack_is_written_over_items_one_by_one() -> None:
    buffer = ReplayBuffer(storage=ListStorage(10))
    buffer.extend([TensorDict({"a": torch.tensor(i)}, []) for i in range(5)])
    buffer[3:4] = TensorDict({"a": torch.tensor([9])}, [1])
    buffer[[0, 1]] = TensorDict({"a": torch.tensor([6, 7])}, [2])
    buffer[2] = TensorDict({"a": torch.tensor(8)}, [])
    assert [item["a"].item() for item in buffer[:]] == [6, 7, 8, 9, 4]
    with pytest.raises(ValueError, match="data must be a list of 1 items, one for each slot, got TensorDict"):
        buffer[3:4] = TensorDict({"a": torch.tensor([9, 9])}, [2])


def test_collate_fn_makes_the_batch() -> None:
    items = ReplayBuffer(
        storage=ListStorage(10), batch_size=3, collate_fn=lambda listed: "".join(sorted(set(listed)))
    )
    items.extend(list("ab"))
    assert set(items.sample()) <= {"a", "b"}
    rows = ReplayBuffer(
        storage=LazyTensorStorage(10),
        batch_size=3,
        collate_fn=lambda td: td["a"] * 10,
        transform=lambda t: t + 1,
    )
    rows.extend(TREES["tensordict"])
    assert set(rows.sample().tolist()) <= {1, 11, 21, 31}
    assert alike(rows.storage.columns["a"].take(torch.arange(4)), torch.arange(4))


# -- transforms on the way in --------------------------------------------------------------------------------------


class Scaled:
    """Keeps tens as ones."""

    def forward(self, data: Any) -> Any:
        return data * 10

    def inv(self, data: Any) -> Any:
        return data // 10


def test_inverses_are_applied_to_all_that_is_written() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=Scaled(), batch_size=3)
    buffer.append_transform(lambda t: t + 1)  # a function has no inverse
    buffer.extend(torch.tensor([10, 20]))
    buffer.add(torch.tensor(30))
    buffer[0] = torch.tensor(70)
    assert buffer.storage.columns["_value"].take(torch.arange(3)).tolist() == [7, 2, 3]
    assert buffer[:].tolist() == [71, 21, 31] and set(buffer.sample(50).tolist()) == {71, 21, 31}
    with pytest.raises(TypeError, match=r"transform must have forward\(td\) or be a function of td, got int"):
        buffer.append_transform(3)  # type: ignore[arg-type]


# -- item assignment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
def test_entries_that_others_rest_on_stay(world: Any, compact: bool) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20, compact_obs=compact), sampler=SliceSampler(slice_len=2), batch_size=4
    )
    batch = world.to_batch(world.episode(0, 0, 12))
    buffer.extend(batch)
    changed = batch[3:5].clone()
    changed["next", "reward"] += 1
    buffer[3:5] = changed  # all entries, of which one changes
    buffer[7] = TensorDict({"next": {"reward": torch.tensor([9.0])}})
    expected = batch["next", "reward"].clone()
    expected[3:5] += 1
    expected[7] = 9
    assert alike(buffer[:]["next", "reward"], expected)
    fixed: list[Any] = ["is_init", "step_count", ("next", "done"), ("collector", "traj_ids")]
    for key in fixed + (["observation", ("next", "observation")] if compact else []):
        wrong = batch[3:5].clone()
        wrong[key] = ~wrong[key] if wrong[key].dtype is torch.bool else wrong[key] + 1
        wrong["next", "reward"] += 5
        with pytest.raises(
            ValueError, match="cannot be changed in place: other rows or the trajectory index depend"
        ):
            buffer[3:5] = wrong
        assert alike(buffer[:]["next", "reward"], expected)  # nothing was written
    if not compact:
        buffer[3] = TensorDict({"observation": torch.full((3,), 7.0)})
        assert buffer[3]["observation"].tolist() == [7, 7, 7]
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (
            slice(3, 5),
            batch[:3],
            ValueError,
            r"must be torch.\w+ \[2, \d\] to be written here, got torch.\w+ \[3, \d\]",
        ),
        (0, TensorDict({"extra": torch.zeros(1)}), ValueError, "no entry 'extra': the storage keeps"),
        (
            0,
            TensorDict({"next": {"reward": torch.zeros(1, dtype=torch.int64)}}),
            ValueError,
            "got torch.int64",
        ),
        (12, batch[0], IndexError, "index 12 is out of range: 12 rows are stored"),
        (0, torch.zeros(1), TypeError, "the storage holds tensordicts, got Tensor"),
    ]
    for index, data, error, text in cases:
        with pytest.raises(error, match=text):
            buffer[index] = data


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ((torch.zeros(3), torch.zeros(2)), ValueError, r"one length .*, got \{'0': 3, '1': 2\}"),
        ({"a": 1.0}, ValueError, r"got \{'a': None\}: use add for a single item, or a list of items"),
        (3.0, ValueError, "a batch needs a leading dimension, got a single number: use add"),
        ("abc", TypeError, "data of type str cannot be kept in tensors: ListStorage takes any object"),
        (None, TypeError, "data of type NoneType cannot be kept in tensors: ListStorage takes"),
        (["a"], TypeError, "data of type str cannot be kept in tensors: ListStorage takes"),
        ([torch.zeros(2), torch.zeros(3)], ValueError, r"item 0 has torch.float32 \[2\] where item 1 has .* \[3\]"),
        ([1, 2.5], ValueError, r"item 0 has torch.int64 \[\] where item 1 has torch.float32 \[\]"),
        ([(1, 2), {"a": 1}], ValueError, r"data must be items of one form: item 0 is"),
        ([TensorDict({"a": 1}), TensorDict({"b": 1})], ValueError, "items must have the same entries, shapes"),
        ([TensorDict({"a": 1}), torch.zeros(1)], ValueError, "items must all be tensordicts .* item 1 has the type"),
        (TensorDict({"a": torch.zeros(())}, []), ValueError, r"batch has batch size \[\]: use add for one row"),
        (TensorDict({}, [3]), ValueError, "the batch has no entries to store"),
        ((), ValueError, "the batch has no entries to store"),
    ],
)  # fmt: skip
def test_what_is_no_batch_is_refused_in_words(data: Any, error: type[Exception], text: str) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(error, match=text):
        buffer.extend(data)
    assert len(buffer) == 0 and not buffer.storage.allocated
    buffer.extend(torch.zeros(3))
    assert len(buffer) == 3


@pytest.mark.parametrize("first", ["tensor", "tuple", "tensordict"])
@pytest.mark.parametrize("second", ["tensor", "tuple", "tensordict", "dict", "flat tensor", "named tuple"])
def test_kinds_are_not_mixed(first: str, second: str) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(TREES[first])
    if first != second:
        with pytest.raises((TypeError, ValueError), match=r"the storage (holds|has kept)"):
            buffer.extend(TREES[second])
    assert alike(buffer[:], TREES[first])


@pytest.mark.parametrize("data", [5, "abc", (torch.zeros(2), torch.zeros(3)), ()])
def test_lists_extend_by_lists_and_batches(data: Any) -> None:
    buffer = ReplayBuffer(storage=ListStorage(10))
    with pytest.raises((TypeError, ValueError), match=r"extend takes a list of items|cannot be kept"):
        buffer.extend(data)
    buffer.add(data)
    assert len(buffer) == 1 and buffer[0] is data


def test_trajectories_are_rows_of_tensordicts() -> None:
    for data in (torch.zeros(3), (torch.zeros(3),)):
        buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2))
        with pytest.raises(
            TypeError, match="SliceSampler follows trajectories, which needs tensordict batches, got"
        ):
            buffer.extend(data)
        compact = ReplayBuffer(storage=LazyTensorStorage(10, compact_obs=True))
        with pytest.raises(TypeError, match="compact_obs=True needs tensordict batches, got"):
            compact.extend(data)


def held(item: Any) -> int:
    """Bytes of the memory that a tensor keeps."""
    return item.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", ["tensor", "tensordict", "tree"])
def test_a_list_storage_keeps_no_memory_of_rows_that_it_left_out(kind: str) -> None:
    rows = torch.arange(1000.0)
    batch = {"tensor": rows, "tensordict": TensorDict({"a": rows}, [1000]), "tree": {"a": rows}}[kind]
    buffer = ReplayBuffer(storage=ListStorage(10))
    with pytest.warns(UserWarning, match="990"):
        buffer.extend(batch)
    items = [item if kind == "tensor" else item["a"] for item in buffer.storage._items]
    assert [item.item() for item in items] == list(range(990, 1000))
    assert {held(item) for item in items} == {4 * 10}  # views of one copy of these rows


def test_the_best_rows_of_many_batches_keep_no_others() -> None:
    buffer = ReplayBuffer(
        storage=ListStorage(4), writer=TensorDictMaxValueWriter(rank_key="value"), batch_size=4
    )
    for first in range(5):
        value = torch.zeros(100)
        value[first] = first
        buffer.extend(TensorDict({"value": value, "x": torch.arange(100)}, [100]))
    items = buffer.storage._items
    assert sorted(item["value"].item() for item in items) == [1, 2, 3, 4]
    assert {held(item["x"]) for item in items} == {8}
