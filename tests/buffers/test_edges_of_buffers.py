"""Buffers and storages at their edges: what is kept, copied and refused, and who waits for whom."""

import copy
import pickle
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import noting, python_calls
from tensordict import LazyStackedTensorDict, TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from flatroll.buffers import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NextObservationDelta,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from flatroll.layout import encode_delta

CLASSES = [ReplayBuffer, TensorDictReplayBuffer]


def keys(sample: TensorDict) -> dict[Any, torch.dtype]:
    return {key: value.dtype for key, value in sample.items(True, True)}


def len_of_first(first: Any, *_: Any) -> int:
    return len(first)


def test_a_state_with_a_key_only_under_next(world: Any) -> None:
    """Rows of deltas have an entry under "next" without a partner at the root."""
    batch = world.to_batch(world.episode(0, 0, 9))
    delta = encode_delta(batch["observation"], batch["next", "observation"])
    batch = batch.exclude(("next", "observation")).set(("next", "delta", "observation"), delta)
    made = [
        ReplayBuffer(storage=LazyTensorStorage(9), transform=NextObservationDelta(), batch_size=9)
        for _ in range(2)
    ]
    made[0].extend(batch)
    made[1].load_state_dict(made[0].state_dict())
    assert torch.equal(made[1][:]["next", "observation"][:, 2], torch.arange(1.0, 10.0))


def test_a_recurrent_state_is_kept_once(world: Any) -> None:
    """A compact storage keeps a recurrent state, often larger than the observation, once a row."""
    batch = world.to_batch(world.episode(0, 0, 6) + world.episode(0, 1, 6))
    state = torch.rand(14, 1, 8)
    batch["state"] = torch.cat([state[:6], state[7:13]])
    batch["next", "state"] = torch.cat([state[1:7], state[8:]])
    full, compact = (ReplayBuffer(storage=LazyTensorStorage(12, compact_obs=once)) for once in (False, True))
    for buffer in (full, compact):
        buffer.extend(batch)
    assert (
        full.storage.bytes_per_row - compact.storage.bytes_per_row == 8 * 4 + 3 * 4 + 8
    )  # and obs, step_count
    assert (full[:] == compact[:]).all()


def test_a_writer_does_not_wait_for_a_reader(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling gathers without the lock of the writers."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(60), sampler=SliceSampler(slice_len=4), batch_size=8)
    batch = world.to_batch(world.episode(0, 0, 20))
    buffer.extend(batch)
    gather, written = buffer._gather, list[torch.Tensor]()

    def slow(*args: Any) -> Any:
        values = gather(*args)
        if not written:
            writer = threading.Thread(target=lambda: written.append(buffer.extend(batch)))
            writer.start()
            writer.join(600)
            assert not writer.is_alive()
        return values

    monkeypatch.setattr(buffer, "_gather", slow)
    assert len(buffer.sample()) == 8
    assert len(buffer) == 40


def test_positions_are_not_stored(world: Any) -> None:
    """Samples compute positions; no row keeps an index."""
    sizes = []
    for kind in CLASSES:
        buffer = kind(storage=LazyTensorStorage(60), batch_size=4)
        buffer.extend(world.to_batch(world.episode(0, 0, 20)))
        sizes.append(buffer.storage.bytes_per_row)
    assert sizes[0] == sizes[1]


def test_lanes_round_the_capacity_up_to_whole_steps() -> None:
    """With 3 lanes, a capacity of 100 is 102; a refused batch rounds nothing for the next one."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    with pytest.raises(ValueError, match=r"max_size=100 is too small for one step of \[101\] lanes"):
        buffer.extend(TensorDict({"x": torch.zeros(101, 2)}, [101, 2]))
    with pytest.raises(TypeError, match="meta tensor"):
        buffer.extend(TensorDict({"x": torch.zeros(7, 7, device="meta")}, [7, 7]))
    with pytest.warns(UserWarning, match="the batch has 150 rows, the storage holds 102"):
        buffer.extend(TensorDict({"x": torch.arange(150).view(3, 50)}, [3, 50]))
    assert len(buffer) == buffer.stats()["capacity"] == buffer._storage.max_size == 102
    assert buffer.oldest_first()["x"].tolist() == [[i, 50 + i, 100 + i] for i in range(16, 50)]
    for other in (ReplayBuffer(storage=LazyTensorStorage(size, ndim=2)) for size in (100, 102)):
        other.load_state_dict(buffer.state_dict())
        assert bool((other[:] == buffer[:]).all()) and other.storage.max_size == 102
    state = buffer.state_dict()
    with pytest.raises(
        ValueError, match="room for 102 rows, this storage for 108: make it with max_size=102"
    ):
        ReplayBuffer(storage=LazyTensorStorage(107, ndim=2)).load_state_dict(state)


def test_priorities_follow_the_rounded_capacity() -> None:
    rows = TensorDict({"x": torch.arange(150).view(3, 50)}, [3, 50])
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(100, ndim=2), batch_size=8
    )
    buffer.extend(rows)
    assert len(buffer) == 102 and buffer.sample().batch_size == (8,)
    own = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), sampler=PrioritizedSampler(100, 0.7, 0.5))
    with pytest.raises(ValueError, match="give PrioritizedSampler at least max_capacity=102"):
        own.extend(rows)


@pytest.mark.parametrize("ring", [3, ("dict", 3), (["dict", []], {"0.raw": 1}), ("text", {})])
def test_a_state_whose_ring_is_made_up(ring: object) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(torch.arange(3))
    with pytest.raises(ValueError, match="the state is damaged"):
        buffer.load_state_dict({**buffer.state_dict(), "ring": ring})
    assert buffer[:].tolist() == [0, 1, 2]


def test_numbers_by_the_names_of_others() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(torch.arange(6))
    buffer.extend(torch.arange(1))
    stats = buffer.stats()
    assert (stats["size"], stats["write_count"], stats["utilization"]) == (4, 5, 1.0)
    members = ReplayBufferEnsemble(buffer, ReplayBuffer(storage=LazyTensorStorage(4)))
    stats = members.stats()
    assert (stats["size"], stats["write_count"], stats["utilization"]) == (4, 5, 0.5)


def test_a_lazy_stack_is_made_dense_once(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not written row by row."""
    batch = world.to_batch(world.episode(0, 0, 50))
    buffer = ReplayBuffer(storage=LazyTensorStorage(50, compact_obs=True), sampler=SliceSampler(slice_len=4))
    stacks: list[int] = []
    lazy = LazyStackedTensorDict(*batch.unbind(0))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", noting(stacks, len_of_first, torch.stack))
        buffer.extend(lazy)
    assert len(stacks) <= len(keys(batch))
    assert (buffer[:] == batch).all()


@pytest.mark.parametrize(
    "other",
    [{"x": torch.zeros(2), "y": torch.zeros(1)}, {"x": torch.zeros(2).double()}, {"x": torch.zeros(3)}],
    ids=["entry", "dtype", "shape"],
)
def test_nothing_is_dropped_silently(other: dict[str, torch.Tensor]) -> None:
    """An entry that the storage, or one item of a lazy stack, does not have is an error."""
    items = [TensorDict({"x": torch.zeros(2)}, []), TensorDict(other, [])]
    for batch in (items, LazyStackedTensorDict(*items)):
        buffer = ReplayBuffer(storage=LazyTensorStorage(4))
        with pytest.raises(ValueError, match="items must have the same entries, shapes and dtypes"):
            buffer.extend(batch)
        buffer.extend(items[:1])
        with pytest.raises(ValueError, match=r"'[xy]'"):
            buffer.extend(items[1:])
        assert len(buffer) == 1


def test_entries_that_are_no_tensors_are_not_dropped_silently() -> None:
    """`ListStorage` keeps them; a storage of tensors refuses them."""
    items = [TensorDict({"x": torch.zeros(2), "name": name}, []) for name in "ab"]
    for batch in (items, LazyStackedTensorDict(*items), TensorDict.stack(items)):
        with pytest.raises(
            TypeError, match=r"batch\['name'\] is a NonTensor.*: this storage takes tensors only"
        ):
            ReplayBuffer(storage=LazyTensorStorage(4)).extend(batch)
        buffer = ReplayBuffer(storage=ListStorage(4))
        buffer.extend(batch)
        assert [item["name"] for item in buffer[:]] == ["a", "b"]


def test_a_tree_goes_to_another_process(tmp_path: Path) -> None:
    """A copy of a mapped storage sees rows that the original writes."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "rows"))
    buffer.extend((torch.arange(3), {"a": torch.ones(3)}))
    other = pickle.loads(pickle.dumps(buffer))
    buffer.extend((torch.arange(2), {"a": torch.zeros(2)}))
    assert len(other) == 5
    assert other[3:][1]["a"].tolist() == [0, 0]


def test_signals_stay_with_the_user(world: Any, tmp_path: Path) -> None:
    """The handlers of SIGINT and SIGTERM stay."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "rows"))
    buffer.extend(world.to_batch(world.episode(0, 0, 3)))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_ranking_many_rows_costs_the_python_of_a_few(world: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), writer=TensorDictMaxValueWriter())
    batch = world.to_batch(world.episode(0, 0, 500))
    buffer.extend(batch)
    few, many = (python_calls(partial(buffer.extend, batch[:n])) for n in (5, 500))
    assert many <= few + 4


def test_a_state_is_not_torn(world: Any) -> None:
    """No row is written while the state is read."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(64))
    buffer.extend(TensorDict({"a": torch.zeros(64), "b": torch.zeros(64)}, [64]))
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            same = torch.full((32,), float(number))
            buffer.extend(TensorDict({"a": same, "b": same}, [32]))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(40):
            other = ReplayBuffer(storage=LazyTensorStorage(64))
            other.load_state_dict(buffer.state_dict())
            rows = other[:].view(2, 32)
            assert (rows["a"] == rows["b"]).all()
            assert (rows["a"] == rows["a"][:, :1]).all()
    finally:
        done.set()
        writer.join()


@pytest.mark.parametrize("files", [False, True])
def test_names_with_dots_and_slashes_are_kept_apart(tmp_path: Path, files: bool) -> None:
    """ "a.b" and ("a", "b") are two entries, in memory and in files."""
    names: list[Any] = [
        "a.b",
        ("a", "b"),
        "a/b",
        "..",
        "a%2Fb",
        "A.B",
        " ",
        "é",
        ("x" * 90, "y" * 90, "z" * 90),
    ]
    batch = TensorDict({}, [3])
    for number, name in enumerate(names):
        batch[name] = torch.full((3,), number)
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "rows") if files else LazyTensorStorage(4)
    buffer, other = ReplayBuffer(storage=storage), ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(batch)
    other.load_state_dict(buffer.state_dict())
    assert all((rows[:][name] == i).all() for rows in (buffer, other) for i, name in enumerate(names))
    assert not files or {path.parent for path in tmp_path.rglob("*.memmap")} == {tmp_path / "rows"}


def test_pixels_are_never_floats() -> None:
    """uint8 from end to end: storage, sample and state."""
    frames = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8)
    batch = TensorDict(
        {"pixels": frames[:-1], "next": {"pixels": frames[1:], "done": torch.zeros(19, 1, dtype=torch.bool)}},
        [19],
    )
    for compact in (False, True):
        buffer = ReplayBuffer(storage=LazyTensorStorage(19, compact_obs=compact), batch_size=8)
        buffer.extend(batch)
        for rows in (buffer.sample(), buffer[:], copy.deepcopy(buffer)[:]):
            assert rows["pixels"].dtype is rows["next", "pixels"].dtype is torch.uint8


def test_a_batch_is_copied_once(world: Any) -> None:
    """``extend`` copies each entry to its place and takes no other memory for it."""
    rows = 2000
    batch = TensorDict(
        {"observation": torch.rand(rows, 100), "next": {"done": torch.zeros(rows, 1).bool()}}, [rows]
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows), sampler=SliceSampler(slice_len=4), batch_size=8)
    buffer.extend(batch)
    made: list[int] = []

    class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in inputs:
                made.append(out.nbytes)
            return out

    with Made():  # type: ignore[no-untyped-call]
        buffer.extend(batch)
    assert sum(made) <= rows * 16  # positions, not observations
    held = [buffer.sample() for _ in range(3)]
    before = [sample.clone() for sample in held]
    buffer.extend(batch.apply(torch.ones_like))
    assert all((a == b).all() for a, b in zip(held, before, strict=True))


def test_a_dataset_is_sampled_where_it_is() -> None:
    """A given tensor is not copied."""
    data = torch.rand(50, 3)
    buffer = ReplayBuffer(storage=TensorStorage(data), writer=ImmutableDatasetWriter(), batch_size=4)
    data[:] = 1.0
    assert (buffer.sample() == 1).all()


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_rows_that_do_not_fit_are_told_once(storage: Any) -> None:
    buffer = ReplayBuffer(storage=storage(10))
    with pytest.warns(
        UserWarning, match="the batch has 25 rows, the storage holds 10: the first 15 are not"
    ) as told:
        buffer.extend(torch.arange(25))
        buffer.extend(torch.arange(30))
    assert len(told) == 1 and told[0].filename == __file__
    assert sorted(map(int, buffer[:])) == list(range(20, 30))


def test_a_writer_that_chooses_among_all_rows_leaves_none_out_unseen() -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter(rank_key="x")
    )
    buffer.extend(TensorDict({"x": torch.arange(9.0)}, [9]))  # a warning would be an error
    assert sorted(buffer[:]["x"].tolist()) == [5, 6, 7, 8]
