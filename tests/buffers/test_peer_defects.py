"""Defects and weaknesses measured in TorchRL 0.14.1 that the replay buffers must be free of.

Each docstring names the item: its section, and the experiment that showed it. Weaknesses of speed are held by
counting calls, not by clocks. Items that another file of this folder tests are not repeated here.
"""

import copy
import pickle
import signal
import sys
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from flatroll.buffers import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NextObservationDelta,
    NextStateReconstructor,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from flatroll.layout import encode_delta

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


def noting(notes: list[Any], note: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which also notes something about its arguments."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        notes.append(note(*args))
        return function(*args, **kwargs)

    return noted


def python_calls(function: Callable[[], Any]) -> int:
    """How many Python functions a call runs through."""
    calls = [0]
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.__setitem__(0, calls[0] + (event == "call")))
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls[0]


def peak(function: Callable[[], Any]) -> int:
    """Bytes that NumPy and Python took on top, at most."""
    function()
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- 1.4, 1.5, 1.6 next observations ------------------------------------------------------------------------


def test_a_state_with_a_key_only_under_next(world: Any) -> None:
    """1.4 [BUG] E23: checkpoints of deltas crashed, their key being under next alone."""
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
    """1.5 [BUG/DOC] E28e: the recurrent state, larger than the observation, stayed doubled."""
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


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_next_observation_is_that_of_another_slice(world: Any, kind: Any, sampler: str) -> None:
    """1.6 [BUG, critical] E1: of slices of one trajectory side by side, in both classes."""
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


# --- 2 samplers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["slice", "padded", "slice pass", "slice priority", "random", "priority"])
def test_rows_are_read_once_per_sample(world: Any, monkeypatch: pytest.MonkeyPatch, sampler: str) -> None:
    """2.1 [W] E2: every entry, pixels too, was gathered a first time to read three flags."""
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
    """2.1 [BUG] E9: the mask was there only if a slice was short. Transforms see what the caller gets (E1)."""
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
    """2.1 [W], 2.5 [W] E6: a Python loop over the slices where their lengths differ."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(60), sampler=SAMPLERS[sampler]())
    buffer.extend(world.to_batch([s for e in range(30) for s in world.episode(0, e, 1 + e % 3)]))
    buffer.sample(4)
    few, many = (python_calls(partial(buffer.sample, size)) for size in (8, 80))
    assert many <= few + 4


def test_one_long_and_many_short_trajectories_take_no_memory() -> None:
    """2.5 [W] E6: all trajectories were padded to the longest, 1e8 elements for 25,000 rows."""
    ids = torch.cat([torch.arange(5000), torch.full((20_000,), 5000)])
    sampler = PrioritizedSliceSampler(25_000, 0.7, 0.5, slice_len=4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(25_000), sampler=sampler, batch_size=32)
    buffer.extend(TensorDict({"x": ids, "collector": {"traj_ids": ids}}, [25_000]))
    assert peak(buffer.sample) < 100_000


def test_samplers_of_slices_take_the_same_arguments() -> None:
    """2.2 [DOC] E8: TypeError for what the class with replacement takes."""
    options: Any = {"slice_len": 4, "pad_output": True, "cache_values": True}
    assert SliceSampler(**options).check(8) == SliceSamplerWithoutReplacement(**options).check(8) == 8


@pytest.mark.parametrize("sampler", ["slice", "slice priority", "slice pass"])
def test_slices_of_items_say_what_is_wrong(sampler: str) -> None:
    """2.1 [BUG] E44: the same misleading message for a list storage and an empty buffer."""
    buffer = ReplayBuffer(storage=ListStorage(10), sampler=SAMPLERS[sampler](), batch_size=4)
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer"):
        buffer.sample()
    with pytest.raises(TypeError, match="follows trajectories, which needs tensordict batches, got list"):
        buffer.extend([1, 2])


# --- 3 buffers, storages, writers ---------------------------------------------------------------------------


def test_a_writer_does_not_wait_for_a_reader(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.1 [W]: sampling held the lock of the writers while it gathered."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(60), sampler=SliceSampler(slice_len=4), batch_size=8)
    batch = world.to_batch(world.episode(0, 0, 20))
    buffer.extend(batch)
    gather, written = buffer._gather, list[torch.Tensor]()

    def slow(*args: Any) -> Any:
        values = gather(*args)
        if not written:
            writer = threading.Thread(target=lambda: written.append(buffer.extend(batch)))
            writer.start()
            writer.join(20)
            assert not writer.is_alive()
        return values

    monkeypatch.setattr(buffer, "_gather", slow)
    assert len(buffer.sample()) == 8
    assert len(buffer) == 40


def test_positions_are_not_stored(world: Any) -> None:
    """3.1 [W]: 8 bytes per row for an index that samples compute anyway."""
    sizes = []
    for kind in CLASSES:
        buffer = kind(storage=LazyTensorStorage(60), batch_size=4)
        buffer.extend(world.to_batch(world.episode(0, 0, 20)))
        sizes.append(buffer.storage.bytes_per_row)
    assert sizes[0] == sizes[1]


def test_there_are_never_more_rows_than_asked_for(world: Any) -> None:
    """3.1 [BUG] E42: with 3 lanes, max_size=100 silently became 102."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    buffer.extend(TensorDict({"x": torch.zeros(3, 50)}, [3, 50]))
    assert len(buffer) == buffer.stats()["capacity"] == 99


def test_a_lazy_stack_is_made_dense_once(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.2 [W] E13: written row by row, in 427 times the time of a dense batch."""
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
    """3.2: entries that the storage, or one item of a lazy stack, does not have were dropped in silence."""
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
    """3.2: so were they; ListStorage keeps them."""
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
    """3.2 [BUG] E17: TypeError for trees; here the copy sees the rows written by the other one."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "rows"))
    buffer.extend((torch.arange(3), {"a": torch.ones(3)}))
    other = pickle.loads(pickle.dumps(buffer))
    buffer.extend((torch.arange(2), {"a": torch.zeros(2)}))
    assert len(other) == 5
    assert other[3:][1]["a"].tolist() == [0, 0]


@pytest.mark.parametrize("capacity", [7, 10])
@pytest.mark.parametrize("start", [2**31 - 5, 2**53, 2**62])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_counters_are_64_bits_wide(world: Any, sampler: str, start: int, capacity: int) -> None:
    """3.2 [BUG] E19: after 2**31 rows the count of writes was -2147483648."""
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


def test_signals_stay_with_the_user(world: Any, tmp_path: Path) -> None:
    """3.2 [BUG] E16: the handlers of SIGINT and SIGTERM were replaced in the whole process."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "rows"))
    buffer.extend(world.to_batch(world.episode(0, 0, 3)))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_ranking_many_rows_costs_the_python_of_a_few(world: Any) -> None:
    """3.3 [W]: a Python heap, row by row."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), writer=TensorDictMaxValueWriter())
    batch = world.to_batch(world.episode(0, 0, 500))
    buffer.extend(batch)
    few, many = (python_calls(partial(buffer.extend, batch[:n])) for n in (5, 500))
    assert many <= few + 4


def test_a_state_is_not_torn(world: Any) -> None:
    """3.5 [W/BUG]: rows could be written while they were saved."""
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
    """3.5 [BUG] e17: "a.b" and ("a", "b") together could not be saved, and "a.b" came back elsewhere."""
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


# --- demands ------------------------------------------------------------------------------------------------


def test_pixels_are_never_floats() -> None:
    """D18: uint8 end to end, in storage, sample and state."""
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
    """D25: extend copies each entry to its place, and takes no other memory for it."""
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
    """D25: a given tensor is not copied."""
    data = torch.rand(50, 3)
    buffer = ReplayBuffer(storage=TensorStorage(data), writer=ImmutableDatasetWriter(), batch_size=4)
    data[:] = 1.0
    assert (buffer.sample() == 1).all()
