"""A buffer that was saved and loaded goes on as if it had never stopped; a save writes what is new, and no pickle."""

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resume_product import same
from tensordict import TensorDict

from flatroll.buffers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StorageEnsembleCheckpointer,
    TensorColumn,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    TensorStorageCheckpointer,
)
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.disk import files
from flatroll.layout import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested

CAPACITY = 48
FRAMES = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (300, 6), dtype=np.uint8))


def batch(first: int, count: int) -> TensorDict:
    """Rows ``first ...`` of one stream: episodes of 11 steps, stacks of 4 frames, a state in every fourth row."""
    row = torch.arange(first, first + count)
    stacks = torch.stack([FRAMES[row + i] for i in range(5)], 1)
    state = torch.zeros(count, 3)
    state[row % 4 == 0] = 1.0 + row[row % 4 == 0, None].float()
    return TensorDict(
        {
            "observation": stacks[:, :4].clone(),
            "state": state,
            "row": row,
            "is_init": (row % 11 == 0)[:, None],
            "next": {
                "observation": stacks[:, 1:].clone(),
                "reward": row[:, None].float(),
                "done": (row % 11 == 10)[:, None],
            },
        },
        [count],
    )


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "slices": lambda: SliceSampler(slice_len=4),
    "starts": lambda: SliceSampler(slice_len=4, by="start", strict_length=True),
    "once": SamplerWithoutReplacement,
    "slices once": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized": lambda: PrioritizedSampler(CAPACITY, alpha=0.7, beta=0.5),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, alpha=0.7, beta=0.5, slice_len=4),
}
STACK: Any = {"observation": 4}
ZSTD: Any = {"observation": "zstd"}
STORAGES: dict[str, Callable[[], Any]] = {
    "memory": lambda: LazyTensorStorage(CAPACITY),
    "compact": lambda: LazyTensorStorage(CAPACITY, compact_obs=True),
    "files": lambda: LazyMemmapStorage(CAPACITY, compact_obs=True),
    "frames": lambda: LazyTensorStorage(CAPACITY, frame_stack=STACK),
    "compact frames": lambda: LazyTensorStorage(CAPACITY, frame_stack=STACK, compact_obs=True),
    "frames in files": lambda: LazyMemmapStorage(CAPACITY, frame_stack=STACK),
    "zstd": lambda: LazyTensorStorage(CAPACITY, codec=ZSTD),
    "compact zstd frames": lambda: LazyTensorStorage(
        CAPACITY, codec=ZSTD, frame_stack=STACK, compact_obs=True
    ),
    "sparse": lambda: LazyTensorStorage(CAPACITY, sparse=["state"]),
}
CHECKPOINTERS: dict[str, Callable[[], Any]] = {
    "tensors": TensorStorageCheckpointer,
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
}


def made(storage: Any = None, sampler: Any = None, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY) if storage is None else storage,
        sampler=RandomSampler() if sampler is None else sampler,
        batch_size=options.pop("batch_size", 12),
        generator=torch.Generator().manual_seed(options.pop("seed", 0)),
        **options,
    )


def drawn(buffer: Any, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        sample, info = buffer.sample(return_info=True)
        found.append((sample, info))
        if isinstance(buffer.sampler, PrioritizedSampler):
            priority = (info["index"] % 5 + 1).float()
            buffer.update_priority(info["index"], priority, info["index_generation"])
    return found


def check_goes_on(buffer: ReplayBuffer, other: ReplayBuffer, first: int) -> None:
    """Both hold the same rows, draw the same ones, and store and draw the same afterwards."""
    assert same(other[:], buffer[:]) and len(other) == len(buffer)
    assert same(drawn(other, 2), drawn(buffer, 2))
    # A trajectory that is open at a save is cut: from a row that begins one, both know the same.
    first = -(-first // 11) * 11
    for one in (buffer, other):
        one.extend(batch(first, 9))
    assert same(other[:], buffer[:]) and same(drawn(other, 2), drawn(buffer, 2))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_resuming_is_never_having_stopped(tmp_path: Path, sampler: str, storage: str) -> None:
    """Saved over and over while the ring fills, is full to its end, and wraps; loaded into new and used buffers."""

    def new(seed: int = 0) -> ReplayBuffer:
        return made(STORAGES[storage](), SAMPLERS[sampler](), seed=seed)

    buffer, first = new(), 0
    for count in (1, 21, 22, 4, 33):  # 1, 22, 44, 48 (full to its end) and 81 rows
        buffer.extend(batch(first, count))
        first += count
        if len(buffer) > 11:
            drawn(buffer, 1)
        buffer.dumps(tmp_path)
    other, used = new(seed=8), new(seed=9)
    used.extend(batch(5, 30))
    drawn(used, 2)
    used.loads(tmp_path)
    other.loads(tmp_path)
    assert same(used[:], other[:]) and same(drawn(used, 2), drawn(other, 2))
    other.loads(tmp_path)
    check_goes_on(buffer, other, first)
    other.dumps(tmp_path)  # what was loaded is gone on from, not written again
    third = new()
    third.loads(tmp_path)
    assert same(third[:], other[:]) and same(drawn(third, 2), drawn(other, 2))


@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
@pytest.mark.parametrize("storage", ["memory", "compact zstd frames", "sparse"])
def test_every_checkpointer(tmp_path: Path, storage: str, checkpointer: str) -> None:
    def new() -> ReplayBuffer:
        chosen = CHECKPOINTERS[checkpointer]()
        return made(STORAGES[storage](), SliceSampler(slice_len=4), checkpointer=chosen)

    buffer = new()
    for first in range(0, 120, 20):
        buffer.extend(batch(first, 20))
        buffer.dumps(tmp_path)
    buffer[3] = TensorDict({"row": torch.tensor(7)}, [])
    buffer.dump(tmp_path)
    other = new()
    other.load(tmp_path)
    assert int(other[3]["row"]) == 7
    check_goes_on(buffer, other, 120)


@pytest.mark.parametrize("storage", ["memory", "compact zstd frames", "frames", "sparse"])
def test_edited_rows_are_written_again(tmp_path: Path, storage: str) -> None:
    buffer, other = made(STORAGES[storage]()), made(STORAGES[storage]())
    buffer.extend(batch(0, 30))
    buffer.dumps(tmp_path)
    for at in (3, 17):
        buffer[at] = TensorDict({"row": torch.tensor(-1), "state": torch.ones(3)}, [])
    buffer.storage.set(5, TensorDict({"row": torch.tensor(-2)}, [])) if storage == "memory" else None
    buffer.extend(batch(30, 5))
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert same(other[:], buffer[:]) and other[:]["row"][3] == -1
    buffer[4] = TensorDict({"row": torch.tensor(-3)}, [])
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert same(other[:], buffer[:])


def test_two_batch_dimensions_and_trees_and_tensors(tmp_path: Path) -> None:
    def lanes() -> ReplayBuffer:
        return made(LazyTensorStorage(40, ndim=2, compact_obs=True), SliceSampler(slice_len=3))

    buffer, other = lanes(), lanes()
    for first in range(0, 55, 5):
        buffer.extend(torch.stack([batch(first + 110 * lane, 5) for lane in range(2)]))
        buffer.dumps(tmp_path / "lanes")
    other.loads(tmp_path / "lanes")
    assert other[:].batch_size == (20, 2) and same(other[:], buffer[:])
    assert same(drawn(other, 3), drawn(buffer, 3))
    trees: list[Any] = [torch.arange(8), (torch.arange(8), {"a": [torch.zeros(8, 2), torch.ones(8)]})]
    for name, data in enumerate(trees):
        buffer, other = made(LazyTensorStorage(5)), made(LazyTensorStorage(5))
        buffer.extend(data)
        buffer.dumps(tmp_path / str(name))
        other.loads(tmp_path / str(name))
        assert repr(other[:]) == repr(buffer[:]) and repr(other.sample()) == repr(buffer.sample())


def test_items(tmp_path: Path) -> None:
    items: list[Any] = [
        "a",
        1,
        None,
        {"x": torch.arange(3), ("b", 2): 0.5},
        TensorDict({"y": torch.ones(2)}, [2]),
    ]
    buffer, other = made(ListStorage(7), batch_size=2), made(ListStorage(7), batch_size=2)
    for item in items * 2:
        buffer.add(item)
        buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert same(other[:], buffer[:]) and same(drawn(other, 3), drawn(buffer, 3))
    buffer.add(print)
    with pytest.raises(TypeError, match=r"item .* is a builtin_function_or_method, which cannot be saved"):
        buffer.dumps(tmp_path)
    other.loads(tmp_path)  # what was there stays
    assert len(other) == 7


def test_the_best_rows_stay_the_best(tmp_path: Path) -> None:
    def new() -> ReplayBuffer:
        return made(LazyTensorStorage(5), writer=TensorDictMaxValueWriter(rank_key=("next", "reward")))

    buffer, other = new(), new()
    for first in (20, 0, 40, 30):
        buffer.extend(batch(first, 3))
        buffer.dumps(tmp_path)
    other.loads(tmp_path)
    for one in (buffer, other):
        one.extend(batch(41, 2))
    assert same(other[:], buffer[:]) and same(drawn(other, 2), drawn(buffer, 2))


def test_datasets_and_tensordict_buffers(tmp_path: Path) -> None:
    data = batch(0, 30)
    buffer, other = (
        TensorDictReplayBuffer(
            storage=TensorStorage(rows), writer=ImmutableDatasetWriter(), batch_size=4, prefetch=2
        )
        for rows in (data.clone(), data.clone().zero_())
    )
    torch.manual_seed(0)
    buffer.sample()
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert same(other[:], buffer[:])
    assert same(other.sample(), buffer.sample()), "samples made ahead are saved, too"


def test_ensembles_are_saved_as_one_version(tmp_path: Path) -> None:
    def new(seed: int = 0, **options: Any) -> ReplayBufferEnsemble:
        return ReplayBufferEnsemble(
            made(STORAGES["compact"](), SliceSampler(slice_len=4), seed=seed),
            made(STORAGES["memory"](), SAMPLERS["slices once"](), seed=seed, **options),
            batch_size=8,
            generator=torch.Generator().manual_seed(seed),
        )

    ensemble, other = new(), new(seed=5)
    ensemble.storage.checkpointer = StorageEnsembleCheckpointer()
    for first in range(0, 100, 20):
        ensemble[0].extend(batch(first, 20))
        ensemble[1].extend(batch(first + 110, 13))
        ensemble.dumps(tmp_path)
    expected = [ensemble[i][:] for i in range(2)]
    other.loads(tmp_path)
    assert same([other[i][:] for i in range(2)], expected)
    assert same([other.sample() for _ in range(3)], [ensemble.sample() for _ in range(3)])
    # A save that was cut between the members and the ensemble's version counts for nothing.
    ensemble[0].extend(batch(220, 7))
    ensemble[0].dumps(tmp_path / "member-0")
    third = new(seed=6)
    third.loads(tmp_path)
    assert same([third[i][:] for i in range(2)], expected)
    third.dumps(tmp_path)
    third.dumps(tmp_path)
    third.loads(tmp_path, version=6)
    small = ReplayBufferEnsemble(made(), batch_size=2)
    with pytest.raises(ValueError, match="has 2 members, not 1"):
        small.loads(tmp_path)
    with pytest.raises(FileExistsError, match="neither loaded nor saved"):
        new().dumps(tmp_path)
    with pytest.raises(TypeError, match="has a StorageEnsembleCheckpointer"):
        ensemble.storage.checkpointer = TensorStorageCheckpointer()
        ensemble.dumps(tmp_path)
    with pytest.raises(TypeError, match="sync must be True or False"):
        other.dumps(tmp_path, sync="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path must be a path"):
        other.loads(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a single buffer was saved, not an ensemble"):
        buffer = made()
        buffer.dumps(tmp_path / "one")
        third.loads(tmp_path / "one")
    with pytest.raises(ValueError, match="an ensemble was saved: load it into a ReplayBufferEnsemble"):
        made().loads(tmp_path)


def test_a_load_checks_once_unless_the_buffer_has_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = made(LazyTensorStorage(CAPACITY, codec=ZSTD), SliceSampler(slice_len=4))
    saved.extend(batch(0, 30))
    saved.dumps(tmp_path)
    restored: list[TrajectoryIndex] = []
    load = TrajectoryIndex.load_state_dict

    def count(ring: TrajectoryIndex, state: dict[str, Any]) -> None:
        restored.append(ring)
        load(ring, state)

    monkeypatch.setattr(TrajectoryIndex, "load_state_dict", count)
    buffer = made(LazyTensorStorage(CAPACITY, codec=ZSTD), SliceSampler(slice_len=4))
    buffer.loads(tmp_path)
    assert same(buffer[:], saved[:]) and restored == [buffer.ring]
    _, apply = buffer.load_version(tmp_path, None, False)
    apply()
    assert same(buffer[:], saved[:]) and len(restored) == 2

    other = made(LazyTensorStorage(CAPACITY, codec=ZSTD), SliceSampler(slice_len=4))
    _, apply = other.load_version(tmp_path, None, False)
    other.extend(batch(0, 5).exclude("state"))  # by another thread: the first rows have no such entry
    with pytest.raises(ValueError, match=r"as batch\['state'\], this storage keeps nothing"):
        apply()
    assert len(other) == 5


class HalfColumn(TensorColumn):
    """Keeps float32 values in two bytes each."""

    def __init__(self, rows: int, shape: torch.Size) -> None:
        super().__init__(torch.zeros(rows, *shape, dtype=torch.float16))
        self.dtype = torch.float32

    def put(self, slots: torch.Tensor, values: torch.Tensor, after: Any = None) -> None:
        super().put(slots, values.half())

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        return super().take(slots).float()

    def pool(self) -> "HalfColumn":
        return HalfColumn(0, self.shape)


class OwnState(HalfColumn):
    """Has a state of its own, which nothing on disk knows."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data = state["half"]


def test_columns_of_your_own(tmp_path: Path) -> None:
    def new(kind: type[HalfColumn]) -> ReplayBuffer:
        class Storage(LazyTensorStorage):
            def make_column(self, key: Any, dtype: torch.dtype, shape: torch.Size) -> Any:
                return kind(self.capacity, shape) if key == "state" else None

        return made(Storage(CAPACITY))

    buffer, other = new(HalfColumn), new(HalfColumn)
    buffer.extend(batch(0, 60))
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    check_goes_on(buffer, other, 60)
    plain = made()
    plain.loads(tmp_path)  # saved decoded, so any column takes it
    assert plain[:]["state"].dtype is torch.float32
    own = new(OwnState)
    own.extend(batch(0, 9))
    with pytest.raises(TypeError, match="OwnState, which keeps 'state', has a load_state_dict of its own"):
        own.dumps(tmp_path / "own")


def test_many_edits_are_remembered_as_one(tmp_path: Path) -> None:
    buffer, other = made(), made()
    buffer.extend(batch(0, 40))
    buffer.dumps(tmp_path)
    for i in range(1010):
        buffer[i % 30] = TensorDict({"row": torch.tensor(i)}, [])
    assert len(buffer.saves.of(tmp_path).edits) < 20
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert same(other[:], buffer[:])


# -- what is written -----------------------------------------------------------------------------------------------


def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of all writes from now on."""
    sizes: list[int] = []
    write = files.write

    def counted(descriptor: int, data: Any) -> None:
        sizes.append(memoryview(data).nbytes)
        write(descriptor, data)

    monkeypatch.setattr(files, "write", counted)
    return sizes


def test_a_second_save_writes_the_new_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = TensorDict({"x": torch.rand(20_000, 50)}, [20_000])
    buffer = made(LazyTensorStorage(20_000))
    buffer.extend(rows)
    buffer.dumps(tmp_path)
    sizes = written(monkeypatch)
    buffer.extend(rows[:200])
    buffer.dumps(tmp_path)
    assert 200 * 200 < sum(sizes) < 200 * 200 + 20_000  # 200 rows of 200 bytes, and the tables
    other = made(LazyTensorStorage(20_000))
    other.loads(tmp_path)
    sizes.clear()
    other.extend(rows[:200])
    other.dumps(tmp_path)
    assert sum(sizes) < 200 * 200 + 20_000
    total = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert total < 1.6 * 20_000 * 200  # of two versions, in a few segments: the least one has 4 MiB


def test_nothing_new_an_empty_buffer_and_one_that_was_emptied(tmp_path: Path) -> None:
    buffer, other = made(sampler=SliceSampler(slice_len=4)), made(sampler=SliceSampler(slice_len=4))
    buffer.dumps(tmp_path)
    other.extend(batch(0, 9))
    other.loads(tmp_path)
    assert len(other) == 0
    for rows in (1, 30, 30):
        buffer.extend(batch(0, rows))
        for _ in range(2):
            buffer.dumps(tmp_path)
        other.loads(tmp_path)
        assert same(other[:], buffer[:])
        buffer.empty()
        buffer.dumps(tmp_path)
        other.loads(tmp_path)
        assert len(other) == 0
    for one in (buffer, other):
        one.extend(batch(0, 12))
    assert same(other[:], buffer[:]) and same(drawn(other, 2), drawn(buffer, 2))


def test_hooks_change_what_is_written(tmp_path: Path) -> None:
    paths = []

    def halve(rows: Any, path: Path) -> Any:
        paths.append(path)
        return rows.apply(lambda leaf: leaf.half() if leaf.is_floating_point() else leaf)

    def double(rows: Any) -> Any:
        return rows.apply(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf)

    buffer, other = made(), made()
    buffer.register_save_hook(halve)
    other.register_load_hook(double)
    buffer.extend(batch(0, 60))
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert same(other[:], buffer[:]) and set(paths) == {tmp_path}
    items, others = made(ListStorage(5), batch_size=2), made(ListStorage(5), batch_size=2)
    items.register_save_hook(lambda rows, path: [str(row) for row in rows])
    others.register_load_hook(lambda rows: [int(row) for row in rows])
    items.extend([1, 2, 3])
    items.dumps(tmp_path / "items")
    others.loads(tmp_path / "items")
    assert others[:] == [1, 2, 3]
    buffer.storage.checkpointer = TensorStorageCheckpointer()
    buffer.register_save_hook(lambda rows, path: rows[:1])
    with pytest.raises(ValueError, match="must return the same number"):
        buffer.dumps(tmp_path / "fewer")
    ring, full = made(LazyTensorStorage(48)), made(LazyTensorStorage(48))
    ring.register_save_hook(halve)
    full.register_load_hook(double)
    for first in (0, 40):  # the ring wraps: the oldest rows of a file are no longer stored
        ring.extend(batch(first, 40))
        ring.dumps(tmp_path / "ring")
    full.loads(tmp_path / "ring")
    assert same(full[:], ring[:])
    frames = made(STORAGES["frames"]())
    frames.extend(batch(0, 9))
    frames.register_save_hook(halve)
    with pytest.raises(TypeError, match="leave it out of frame_stack"):
        frames.dumps(tmp_path / "frames")


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("form", ["flat", "nested", "split"])
def test_conversions_to_the_flat_form_are_hooks(form: str, compact: bool, tmp_path: Path) -> None:
    """Rows go to the form of the references and back bit by bit, in saves that write what is new, too."""
    undo = {"flat": [Flat2TED()], "nested": [Nested2TED()], "split": [H5Combine(), Nested2TED()]}[form]
    save = {"flat": [TED2Flat()], "nested": [TED2Nested()], "split": [TED2Nested(), H5Split()]}[form]
    buffer, other = (made(LazyTensorStorage(CAPACITY, compact_obs=compact)) for _ in range(2))
    for hook in save:
        buffer.register_save_hook(hook)
    for hook in undo:
        other.register_load_hook(hook)
    for first in range(0, 120, 20):
        buffer.extend(batch(first, 20))
        buffer.dumps(tmp_path)
        full = first + 20 >= CAPACITY
        assert (save[0].shift, save[0].is_full) == ((0, True) if full else (20, False))
        other.loads(tmp_path)
        assert same(other[:], buffer[:])
    buffer[5] = TensorDict({"state": torch.ones(3)}, [])  # a file that is there is written anew
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert same(other[:], buffer[:])
    with pytest.raises(
        ValueError, match=r"changed the form of the rows: .* buffer.register_load_hook, .* Flat2TED\(\)"
    ):
        made(LazyTensorStorage(CAPACITY, compact_obs=compact)).loads(tmp_path)


def test_a_hook_may_return_a_tensordict_without_rows(tmp_path: Path) -> None:
    buffer, other = made(), made()
    buffer.register_save_hook(lambda rows, path: TensorDict({"first": rows[0], "rest": rows[1:]}, []))
    other.register_load_hook(lambda given: torch.cat([given["first"][None], given["rest"]]))
    buffer.extend(batch(0, 60))
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert same(other[:], buffer[:])


# -- while others write --------------------------------------------------------------------------------------------


def test_a_save_on_a_thread_does_not_stop_the_writer(tmp_path: Path) -> None:
    """Rows are written, edited and drawn during the save; what was saved is the rows of one moment."""
    buffer = made(LazyTensorStorage(3000), SliceSampler(slice_len=4))
    buffer.extend(batch(0, 200))
    stop = threading.Event()

    def write() -> None:
        for first in itertools.count(200, 20):
            if stop.is_set():
                return
            buffer.extend(batch(first % 253 // 11 * 11, 20).apply(lambda leaf: leaf))
            buffer.sample()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(4):
            buffer.dumps(tmp_path, wait=False, sync=False)
            other = made(LazyTensorStorage(3000), SliceSampler(slice_len=4))
            buffer.saves.join()
            other.loads(tmp_path)
            rows = other[:]
            assert same(rows["next", "reward"][:, 0], rows["row"].float())
            assert same(rows["observation"][:, 0], FRAMES[rows["row"]])
            other.sample()
    finally:
        stop.set()
        thread.join()


def test_the_error_of_a_thread_comes_with_the_next_call(tmp_path: Path) -> None:
    buffer = made()
    buffer.extend(batch(0, 20))
    (tmp_path / "file").touch()
    buffer.dumps(tmp_path / "file" / "folder", wait=False)
    with pytest.raises(OSError):
        buffer.dumps(tmp_path / "good")
    buffer.dumps(tmp_path / "good", wait=False)
    buffer.loads(tmp_path / "good")


# -- what does not fit ---------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_and_says_how(tmp_path: Path) -> None:
    buffer = made()
    buffer.extend(batch(0, 30))
    buffer.dumps(tmp_path)
    compact, items = made(STORAGES["compact"]()), made(ListStorage(CAPACITY))
    frames, less = made(STORAGES["frames"]()), made()
    less.extend(batch(0, 5).exclude("state"))
    for other, text in [
        (
            made(LazyTensorStorage(CAPACITY + 1)),
            r"make it with max_size=48; .* extend this one with other.oldest_first",
        ),
        (made(LazyTensorStorage(CAPACITY - 1)), r"make it with max_size=48"),
        (compact, "saved without a trajectory index"),
        (items, "of a storage of tensors, this is a ListStorage"),
        (frames, r"in a FrameColumn: load it into a storage created like the saved one"),
        (less, r"as batch\['state'\], this storage keeps nothing: load it into"),
        (
            made(sampler=SliceSampler(slice_len=3)),
            "saved without a trajectory index, which SliceSampler needs",
        ),
    ]:
        before = len(other)
        with pytest.raises(ValueError, match=text):
            other.loads(tmp_path)
        assert len(other) == before
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        made().loads(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"has no version 9; there are: versions 1"):
        made().loads(tmp_path, version=9)
    with pytest.raises(FileNotFoundError, match="reads only its own files"):
        made(checkpointer=H5StorageCheckpointer()).loads(tmp_path)
    with pytest.raises(TypeError, match="use ListStorageCheckpointer"):
        made(ListStorage(3), checkpointer=TensorStorageCheckpointer()).dumps(tmp_path / "a")
    with pytest.raises(TypeError, match="writes items, this is a LazyTensorStorage"):
        made(checkpointer=ListStorageCheckpointer()).dumps(tmp_path / "a")
    with pytest.raises(TypeError, match="must be a StorageCheckpointerBase"):
        made(checkpointer="h5").dumps(tmp_path / "a")
    with pytest.raises(KeyError, match=r"reward_keys names .*gain"):
        buffer.storage.checkpointer = FlatStorageCheckpointer(reward_keys=["gain"])
        buffer.dumps(tmp_path / "a")
    with pytest.raises(ValueError, match="without a folder"):
        H5StorageCheckpointer(checkpoint_file="../a.h5")


def test_a_folder_with_a_version_that_was_not_loaded(tmp_path: Path) -> None:
    """A second run that forgets to load does not write over the first one."""
    first, second = made(), made()
    first.extend(batch(0, 30))
    second.extend(batch(60, 20))
    first.dumps(tmp_path)
    with pytest.raises(FileExistsError, match=r"load it first|neither loaded nor"):
        second.dumps(tmp_path)
    check = made()
    check.loads(tmp_path)
    assert same(check[:], first[:])
    second.dumps(tmp_path, overwrite=True)
    check.loads(tmp_path)
    assert same(check[:], second[:])
    with pytest.raises(FileExistsError):  # now the first one's is the older one
        first.dumps(tmp_path)


def test_damage_falls_back_to_the_version_before(tmp_path: Path) -> None:
    buffer, other = made(), made()
    buffer.extend(batch(0, 30))
    buffer.dumps(tmp_path)
    expected = buffer[:]
    buffer.extend(batch(30, 10))
    before = set(os.listdir(tmp_path))
    buffer.dumps(tmp_path)
    new = [tmp_path / name for name in set(os.listdir(tmp_path)) - before]
    rows = next(file for file in new if file.suffix == ".rows")
    content = bytearray(rows.read_bytes())
    content[-1] ^= 1
    rows.write_bytes(content)
    with pytest.raises(ValueError, match=rows.name):
        other.loads(tmp_path, strict=True)
    with pytest.warns(RuntimeWarning, match=rows.name):
        other.loads(tmp_path)
    assert same(other[:], expected)
