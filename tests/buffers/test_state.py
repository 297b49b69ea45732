"""What is saved and loaded goes on as if nothing had happened, and joins nothing to what comes after."""

import copy
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interpreters
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from resume_product import same
from tensordict import TensorDict

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorStorage,
)

CAPACITY = 37


def saved(state: Any) -> Any:
    """Through a file and back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def made(storage: Any = None, sampler: Any = None, seed: int = 0, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY) if storage is None else storage,
        sampler=RandomSampler() if sampler is None else sampler,
        batch_size=options.pop("batch_size", 12),
        generator=torch.Generator().manual_seed(seed),
        **options,
    )


def filled(world: Any, buffer: ReplayBuffer, rows: int = 90, seed: int = 3) -> ReplayBuffer:
    """Some windows of three interleaved writers."""
    steps = world.windows(world.writers(3, seed), [(i % 3, 6) for i in range(rows // 6)])
    for i in range(0, len(steps), 18):
        buffer.extend(world.to_batch(steps[i : i + 18]))
    return buffer


def drawn(buffer: ReplayBuffer, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        sample, info = buffer.sample(return_info=True)
        found.append((sample, info))
        if isinstance(buffer.sampler, PrioritizedSampler):
            priority = (info["index"] % 5 + 1).float()
            buffer.update_priority(info["index"], priority, info["index_generation"])
    return found


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "slices": lambda: SliceSampler(slice_len=4),
    "starts": lambda: SliceSampler(slice_len=4, by="start", strict_length=True),
    "once": SamplerWithoutReplacement,
    "slices once": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized": lambda: PrioritizedSampler(CAPACITY, alpha=0.7, beta=0.5),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, alpha=0.7, beta=0.5, slice_len=4),
}
STORAGES: dict[str, Callable[[], Any]] = {
    "memory": lambda: LazyTensorStorage(CAPACITY),
    "compact": lambda: LazyTensorStorage(CAPACITY, compact_obs=True),
    "files": lambda: LazyMemmapStorage(CAPACITY),
    "compact files": lambda: LazyMemmapStorage(CAPACITY, compact_obs=True),
}


@pytest.mark.cover(2)
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_loaded_buffer_draws_what_the_saved_one_draws(
    world: Any, sampler: str, storage: str, prefetch: int | None
) -> None:
    """n + n samples in one go, and n samples, save, load, n samples."""

    def new(seed: int = 0) -> ReplayBuffer:
        return made(STORAGES[storage](), SAMPLERS[sampler](), seed, prefetch=prefetch)

    buffer = filled(world, new())
    drawn(buffer, 3)
    state = saved(buffer.state_dict())
    other, used = new(seed=8), filled(world, new(seed=9), rows=20, seed=7)
    drawn(used, 2)
    expected = drawn(buffer, 4)
    for loaded in (other, used):
        loaded.load_state_dict(state)
        assert same(loaded[:], buffer[:]) and len(loaded) == len(buffer)
        assert same(drawn(loaded, 4), expected)
    other.load_state_dict(state)  # which nobody changed
    assert same(drawn(other, 4), expected)


def test_a_state_loads_in_a_new_process(world: Any, tmp_path: Path) -> None:
    buffer = filled(world, made(LazyTensorStorage(CAPACITY, compact_obs=True), SliceSampler(slice_len=4)))
    drawn(buffer, 2)
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    code = f"""if True:
        import torch
        from flatroll.buffers import LazyMemmapStorage, ReplayBuffer, SliceSampler
        buffer = ReplayBuffer(
            storage=LazyMemmapStorage({CAPACITY}, compact_obs=True), sampler=SliceSampler(slice_len=4), batch_size=12,
            generator=torch.Generator())
        buffer.load_state_dict(torch.load({str(tmp_path / "state.pt")!r}))
        torch.save([buffer.sample(return_info=True) for _ in range(3)], {str(tmp_path / "samples.pt")!r})
    """
    interpreters.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src"})
    assert same(torch.load(tmp_path / "samples.pt", weights_only=False), drawn(buffer, 3))


def test_states_move_between_memory_and_files(world: Any) -> None:
    state = filled(world, made(STORAGES["compact"]())).state_dict()
    files, memory = made(STORAGES["compact files"]()), made(STORAGES["compact"]())
    files.load_state_dict(state)
    memory.load_state_dict(files.state_dict())
    expected = filled(world, made(STORAGES["compact"]()))
    assert same(drawn(files, 3), drawn(expected, 3)) and same(memory[:], expected[:])


@pytest.mark.parametrize("items", [["a", 1, None, "b"], [torch.zeros(2), torch.ones(3)]])
def test_items(items: list[Any]) -> None:
    buffer = made(ListStorage(5), batch_size=2)
    for item in items * 2:
        buffer.add(item)
    buffer.sample()
    state, other = saved(buffer.state_dict()), made(ListStorage(5), batch_size=2)
    other.load_state_dict(state)
    assert same(other[:], buffer[:]) and same(drawn(other, 3), drawn(buffer, 3))
    buffer.extend(["new", "newer"])
    other.add("new")
    third = made(ListStorage(5), batch_size=2)
    third.load_state_dict(state)
    at = len(items) * 2 % 5
    assert other[at] == buffer[at] == "new" and not same(third[:], other[:])
    third.add("new")
    assert same(third[:], other[:])


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(8).view(8, 1),
        (torch.arange(8), {"a": [torch.zeros(8, 2), torch.ones(8)]}),
        TensorDict({"a": torch.arange(8), "b": {"c": torch.zeros(8, 0)}}, [8]),
    ],
    ids=["tensor", "tree", "tensordict"],
)
def test_all_kinds_of_data(data: Any) -> None:
    buffer, other = made(LazyTensorStorage(5)), made(LazyTensorStorage(5))
    buffer.extend(data)
    other.load_state_dict(saved(buffer.state_dict()))
    assert repr(other[:]) == repr(buffer[:]) and repr(other.sample()) == repr(buffer.sample())
    other.extend(data)
    assert len(other) == 5


def test_lanes_and_given_tensors(world: Any) -> None:
    def new() -> ReplayBuffer:
        return made(LazyTensorStorage(20, ndim=2, compact_obs=True), SliceSampler(slice_len=3), batch_size=12)

    lanes = [world.to_batch(world.episode(w, 0, 14)) for w in range(3)]
    batch = torch.stack(lanes)
    buffer, other = new(), new()
    for i in range(0, 14, 2):
        buffer.extend(batch[:, i : i + 2])
    other.load_state_dict(saved(buffer.state_dict()))
    assert other[:].batch_size == (7, 3) and same(drawn(other, 3), drawn(buffer, 3))
    given, taken = (made(TensorStorage(lanes[w].clone())) for w in (0, 1))
    taken.load_state_dict(saved(given.state_dict()))
    assert same(drawn(taken, 3), drawn(given, 3))


def test_the_best_rows_stay_the_best() -> None:
    def new() -> ReplayBuffer:
        return made(LazyTensorStorage(3), writer=TensorDictMaxValueWriter(rank_key="score"))

    def scores(*values: int) -> TensorDict:
        return TensorDict({"score": torch.tensor(values)}, [len(values)])

    buffer, other = new(), new()
    buffer.extend(scores(9, 5, 7))
    other.load_state_dict(saved(buffer.state_dict()))
    for one in (buffer, other):
        one.extend(scores(6, 8))
    assert same(other[:], buffer[:]) and sorted(other[:]["score"].tolist()) == [7, 8, 9]
    with pytest.raises(ValueError, match="keeps the best rows, this one keeps the latest"):
        made(LazyTensorStorage(3)).load_state_dict(buffer.state_dict())


# -- what comes after ----------------------------------------------------------------------------------------------


@examples(25, derandomize=True)
@given(
    windows=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=14),
    later=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=8),
    seed=st.integers(0, 50),
    compact=st.booleans(),
    anew=st.booleans(),
)
def test_no_slice_joins_rows_before_and_after_a_load(
    world: Any, windows: Any, later: Any, seed: int, compact: bool, anew: bool
) -> None:
    """The writers go on, or start again with the same trajectory ids: both are other trajectories to the buffer."""
    writers = world.writers(3, seed)
    before = world.windows(writers, windows)
    after = world.windows(world.writers(3, seed) if anew else writers, later)

    def new() -> ReplayBuffer:
        return made(
            LazyTensorStorage(CAPACITY, compact_obs=compact), SliceSampler(slice_len=5), batch_size=100
        )

    buffer, other = new(), new()
    buffer.extend(world.to_batch(before))
    other.load_state_dict(saved(buffer.state_dict()))
    index = other.index
    assert index is not None and index.open_trajectories == 0
    loaded = index.written
    if after:
        other.extend(world.to_batch(after))
    for _ in range(3):
        sample, info = other.sample(return_info=True)
        late = index.numbers(info["index"], index.head) >= loaded
        step = sample["step_count"][:, 0]
        inside = ~sample["is_init"][1:, 0]
        assert bool((late[1:] == late[:-1])[inside].all())
        assert bool((step[1:] == step[:-1] + 1)[inside].all())
        traj = sample["collector", "traj_ids"]
        assert bool((traj[1:] == traj[:-1])[inside].all())
        assert torch.equal(
            sample["next", "observation"], sample["observation"] + torch.tensor([0.0, 0.0, 1.0])
        )
    total = index.starts(1)
    assert total == len(other) == min(len(before) + len(after), CAPACITY)


def test_the_seam_of_a_full_ring_is_there_after_a_load(world: Any) -> None:
    """torchrl 0.14 loses the place of the write head: slices of a restored full ring run across it."""
    batch = world.to_batch(world.episode(0, 0, 100)).exclude(
        "is_init", "step_count", ("collector", "traj_ids")
    )
    buffer, other = (
        made(LazyTensorStorage(40), SliceSampler(slice_len=10), batch_size=200) for _ in range(2)
    )
    for i in range(0, 91, 13):
        buffer.extend(batch[i : i + 13])
    other.load_state_dict(saved(buffer.state_dict()))
    for _ in range(20):
        sample = other.sample()
        step, inside = sample["observation"][:, 2], ~sample["is_init"][1:, 0]
        assert bool((step[1:] == step[:-1] + 1)[inside].all())


@pytest.mark.parametrize("storage", STORAGES)
def test_a_state_owns_its_memory(world: Any, storage: str) -> None:
    sampler = (
        PrioritizedSampler(CAPACITY, alpha=0.7, beta=0.5)
        if "compact" not in storage
        else SliceSampler(slice_len=3)
    )
    buffer = filled(world, made(STORAGES[storage](), sampler, batch_size=6, prefetch=1))
    drawn(buffer, 2)
    state = buffer.state_dict()
    before = copy.deepcopy(state)
    other = made(STORAGES[storage](), copy.deepcopy(sampler), batch_size=6, prefetch=1)
    other.load_state_dict(state)
    for one in (buffer, other):
        filled(world, one, seed=9)
        for sample, _ in drawn(one, 3):
            sample.apply_(lambda leaf: leaf.zero_())
        one.empty()
    third, fourth = (
        made(STORAGES[storage](), copy.deepcopy(sampler), batch_size=6, prefetch=1) for _ in range(2)
    )
    third.load_state_dict(state)
    fourth.load_state_dict(before)
    assert same(third[:], fourth[:]) and same(drawn(third, 4), drawn(fourth, 4))


def test_after_empty(world: Any) -> None:
    buffer = filled(world, made(sampler=SliceSampler(slice_len=3), batch_size=6))
    buffer.empty()
    nothing, other = buffer.state_dict(), made(sampler=SliceSampler(slice_len=3), batch_size=6)
    assert all(len(column["values"]) == 0 for column in nothing["storage"]["columns"].values())
    other.load_state_dict(saved(nothing))
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer"):
        other.sample()
    for one in (buffer, other):
        assert one.extend(world.to_batch(world.episode(0, 0, 5))).tolist() == [0, 1, 2, 3, 4]
        assert one[-1]["step_count"].item() == 4 and one[:].batch_size == (5,)
    full = made(sampler=SliceSampler(slice_len=3), batch_size=6)
    full.load_state_dict(buffer.state_dict())
    assert same(drawn(full, 2), drawn(buffer, 2))


def test_the_state_of_a_new_buffer_empties(world: Any) -> None:
    buffer = filled(world, made())
    buffer.load_state_dict(saved(made().state_dict()))
    assert len(buffer) == 0
    filled(world, buffer)
    assert len(buffer) == CAPACITY


# -- what does not fit -----------------------------------------------------------------------------------------------


def states(world: Any) -> dict[str, Any]:
    def of(storage: Any, **options: Any) -> Any:
        return filled(world, made(storage, **options)).state_dict()

    steps = world.windows(world.writers(3, 3), [(i % 3, 6) for i in range(9)])
    uint8 = made()
    uint8.extend(world.to_batch(steps, "uint8"))
    less = made()
    less.extend(world.to_batch(steps, without=["step_count"]))
    items = made(ListStorage(CAPACITY))
    items.extend(list(range(9)))
    lanes = made(LazyTensorStorage(CAPACITY - 1, ndim=2))
    lanes.extend(world.to_batch(steps).reshape(3, -1))
    seedless = filled(world, made())
    seedless.generator = None
    return {
        "capacity": of(LazyTensorStorage(CAPACITY + 1)),
        "compact": of(LazyTensorStorage(CAPACITY, compact_obs=True)),
        "dtype": uint8.state_dict(),
        "entries": less.state_dict(),
        "items": items.state_dict(),
        "lanes": lanes.state_dict(),
        "generator": seedless.state_dict(),
    }


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("capacity", r"the state has room for 38 rows, this storage for 37: make it with max_size=38"),
        ("compact", r"the state is of a storage with compact_obs=True, this one has compact_obs=False"),
        (
            "dtype",
            r"has torch.uint8 \(3,\) per row as batch\['observation'\], this storage keeps torch.float32 \(3,\)",
        ),
        (
            "entries",
            r"the state has nothing as batch\['step_count'\], this storage keeps torch.int64 \(1,\) per row",
        ),
        ("items", "the state is of a ListStorage, this is a LazyTensorStorage"),
        ("lanes", r"with lanes \[3\] after the time dim, this one has ndim=1"),
        ("generator", "was saved with a generator and this buffer has none, or the other way round"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(world: Any, kind: str, text: str) -> None:
    state = states(world)[kind]
    buffer, twin = filled(world, made(prefetch=1)), filled(world, made(prefetch=1))
    drawn(buffer, 2), drawn(twin, 2)
    with pytest.raises(ValueError, match=text):
        buffer.load_state_dict(state)
    assert same(buffer[:], twin[:]) and same(drawn(buffer, 3), drawn(twin, 3))
    if kind in ("capacity", "compact", "items", "lanes", "generator"):
        new = made()
        with pytest.raises(ValueError, match=text.split(" and ")[0]):
            new.load_state_dict(state)
        assert len(new) == 0 and not new.storage.allocated
        filled(world, new)
        assert len(new) == CAPACITY


def test_items_do_not_take_tensors(world: Any) -> None:
    items = made(ListStorage(CAPACITY))
    with pytest.raises(ValueError, match="the state is of a storage of tensors, this is a ListStorage"):
        items.load_state_dict(filled(world, made()).state_dict())
    other = made(ListStorage(3))
    other.extend([1, 2])
    with pytest.raises(ValueError, match="has room for 3 rows, this storage for 37: make it with max_size=3"):
        items.load_state_dict(other.state_dict())


def test_slices_need_an_index_in_the_state(world: Any) -> None:
    state = filled(world, made()).state_dict()
    buffer = filled(world, made(sampler=SliceSampler(slice_len=3)), rows=20)
    with pytest.raises(
        ValueError, match="saved without a trajectory index, which SliceSampler needs: load it"
    ):
        buffer.load_state_dict(state)
    assert len(buffer) == 18
    plain = made()  # the other way round, the index is kept up to date for nothing
    plain.load_state_dict(filled(world, made(sampler=SliceSampler(slice_len=3))).state_dict())
    filled(world, plain)
    assert len(plain) == CAPACITY and plain.index is not None


def test_a_sampler_that_refuses_its_state_leaves_all_as_it_was(world: Any) -> None:
    def new(alpha: float = 0.7, **options: Any) -> ReplayBuffer:
        return filled(world, made(sampler=PrioritizedSampler(CAPACITY, alpha, 0.5, **options)))

    state = new(dtype=torch.float64).state_dict()
    buffer, twin = new(), new()
    drawn(buffer, 2), drawn(twin, 2)
    with pytest.raises(ValueError, match=r"priorities of torch.float64"):
        buffer.load_state_dict(state)
    assert same(drawn(buffer, 3), drawn(twin, 3))


def test_a_load_that_is_interrupted_leaves_an_empty_buffer(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = filled(world, made(sampler=SliceSampler(slice_len=3), batch_size=6))
    state = filled(world, made(sampler=SliceSampler(slice_len=3)), seed=5).state_dict()
    column = buffer.storage.columns["step_count"]

    def interrupt(state: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(column, "load_state_dict", interrupt)
        buffer.load_state_dict(state)
    assert len(buffer) == 0
    buffer.load_state_dict(state)
    assert len(buffer) == CAPACITY and len(buffer.sample()) <= 6


def test_a_storage_that_cannot_be_held_in_memory_has_no_state(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = filled(world, made(LazyMemmapStorage(CAPACITY)))
    monkeypatch.setattr("flatroll.buffers.storages.free_space.free_memory", lambda device: 100)
    with pytest.raises(MemoryError, match="37 rows of 56 bytes"):
        buffer.state_dict()


def test_processes_that_share_rows_see_a_load() -> None:
    import multiprocessing

    buffer = ReplayBuffer(storage=LazyMemmapStorage(8))
    buffer.extend(torch.arange(3))
    state = buffer.state_dict()
    buffer.extend(torch.arange(10, 14))
    process = multiprocessing.get_context("fork").Process(target=buffer.load_state_dict, args=(state,))
    process.start()
    process.join()
    assert process.exitcode == 0 and buffer[:].tolist() == [0, 1, 2]
    buffer.extend(torch.tensor([7]))
    assert buffer[:].tolist() == [0, 1, 2, 7]
