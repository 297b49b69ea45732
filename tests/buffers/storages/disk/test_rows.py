"""Rows of a `DiskStorage` are those of a storage in memory, before and after they were written and read again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import (
    DiskStorage,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    MultiStepTransform,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from flatroll.disk import Folder

LENGTH = 7  # steps of an episode
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=3),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=3),
    "prioritized": lambda: PrioritizedSampler(200, 0.7, 0.5),
    "prioritized slices": lambda: PrioritizedSliceSampler(200, 0.7, 0.5, slice_len=3),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compact": {"compact_obs": True},
    "frames": {"frame_stack": {"observation": 3}},
    "frames, compact": {"frame_stack": {"observation": 3}, "compact_obs": True},
    "zstd": {"codec": {"observation": "zstd"}},
    "zstd, compact": {"codec": {"observation": "zstd"}, "compact_obs": True},
}


def observations(env: torch.Tensor, episode: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """The last three frames, oldest first, of each step."""
    frames = env[:, None, None, None].repeat(1, 3, 4, 4).to(torch.uint8)
    frames[:, :, 0, 0] = (step[:, None] + torch.arange(-2, 1)).clamp(min=0).to(torch.uint8)
    frames[:, :, 0, 1] = episode[:, None].to(torch.uint8)
    return frames


def make_batch(first: int, steps: int, envs: int = 2) -> TensorDict:
    """Steps ``first ... first + steps - 1`` of each env, one env after the other."""
    env = torch.arange(envs).repeat_interleave(steps)
    at = torch.arange(first, first + steps).repeat(envs)
    episode, step = at // LENGTH, at % LENGTH
    return TensorDict(
        {
            "observation": observations(env, episode, step),
            "is_init": (step == 0)[:, None],
            "collector": {"traj_ids": env * 1000 + episode},
            "next": {
                "observation": observations(env, episode, step + 1),
                "reward": (env * 10_000 + episode * LENGTH + step)[:, None].float(),
                "done": (step == LENGTH - 1)[:, None],
            },
        },
        [envs * steps],
    )


def equal(left: Any, right: Any) -> bool:
    keys = set(left.keys(True, True))
    return keys == set(right.keys(True, True)) and all(torch.equal(left.get(k), right.get(k)) for k in keys)


def in_order(buffer: ReplayBuffer) -> Any:
    """All rows of a buffer, oldest first."""
    ring = buffer.ring
    return buffer[ring.slots_by_age(torch.arange(len(ring)))]


def buffer_of(storage: Any, sampler: Any = None, **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    sampler = SliceSampler(slice_len=3) if sampler is None else sampler
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=12, generator=generator, **options)


def open_disk(folder: Path, max_size: int | None = 100, **options: Any) -> DiskStorage:
    return DiskStorage(max_size, folder, **{"sync": False, "segment_bytes": 1000, **options})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flush_rows", [None, 17])
def test_rows_and_samples_are_those_of_memory(folder: Path, form: str, flush_rows: int | None) -> None:
    options = FORMS[form]
    memory = buffer_of(LazyTensorStorage(100, **options))
    disk = buffer_of(open_disk(folder, flush_rows=flush_rows, **options))
    for first in range(0, 120, 5):
        for buffer in (disk, memory):
            buffer.extend(make_batch(first, 5))
        assert equal(disk.sample(), memory.sample())
    assert equal(disk[:], memory[:])
    assert disk.stats()["rows_unflushed"] <= (flush_rows or 50)
    disk.storage.close()  # type: ignore[attr-defined]

    # Reopened, with the options that the folder notes: the same rows, and it goes on, with the open trajectories cut.
    again, anew = buffer_of(open_disk(folder)), buffer_of(LazyTensorStorage(100, **options))
    assert equal(in_order(again), in_order(memory))
    assert again.index is not None and again.index.open_trajectories == 0
    anew.extend(in_order(memory))
    for first in range(120, 200, 5):
        for buffer in (again, anew):
            buffer.extend(make_batch(first, 5))
        sample = again.sample()
        goes_on = sample["next", "reward"].diff(dim=0) == 1
        assert (goes_on | sample["is_init"][1:]).all(), "a slice joins rows that do not follow"
    assert equal(in_order(again), in_order(anew))


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler(folder: Path, name: str) -> None:
    buffers = [
        buffer_of(storage, SAMPLERS[name]()) for storage in (open_disk(folder, 200), LazyTensorStorage(200))
    ]
    for first in range(0, 140, 20):
        drawn = []
        for buffer in buffers:
            buffer.extend(make_batch(first, 20))
            sample, info = buffer.sample(return_info=True)
            drawn.append(sample)
            if "prioritized" in name:
                buffer.update_priority(info["index"], info["index"] + 1.0)
        assert equal(*drawn)


def test_transforms_that_read_other_rows(folder: Path) -> None:
    made = []
    for storage in (open_disk(folder, compact_obs=True), LazyTensorStorage(100)):
        buffer = buffer_of(storage, RandomSampler(), transform=MultiStepTransform(3, 0.9))
        for first in range(0, 90, 9):
            buffer.extend(make_batch(first, 9))
        made.append(buffer.sample())
    assert equal(*made)


def test_a_batch_larger_than_the_storage_and_batches_across_blocks(folder: Path) -> None:
    disk, memory = buffer_of(open_disk(folder, compact_obs=True)), buffer_of(LazyTensorStorage(100))
    for steps in (1, 130, 3, 70):
        for buffer in (disk, memory):
            buffer.extend(make_batch(0, steps))
    assert equal(in_order(disk), in_order(memory))


@pytest.mark.parametrize("form", ["plain", "compact", "frames", "zstd"])
def test_seams_of_earlier_runs_stay_cut(folder: Path, form: str) -> None:
    """Three runs whose collectors begin with the same ids in the middle of an episode, and no marker tells."""

    def part(first: int) -> TensorDict:
        return make_batch(first, 3, envs=1).exclude("is_init")

    for first in (0, 3, 10):  # rows 0-2, 3-5 of episode 0, and 10-12 of episode 1 (done at 13)
        buffer = buffer_of(open_disk(folder, **FORMS[form]))
        buffer.extend(part(first))
        buffer.storage.close()  # type: ignore[attr-defined]
    buffer = buffer_of(open_disk(folder, read_only=True))
    assert buffer.index is not None and buffer.index.trajectories == 3
    assert buffer.index.longest == 3


def test_old_files_go_and_the_rows_in_memory_do_not(folder: Path) -> None:
    disk = buffer_of(open_disk(folder, 64, segment_bytes=10_000_000))
    for first in range(0, 600, 6):
        disk.extend(make_batch(first, 6))
    disk.storage.flush()  # type: ignore[attr-defined]
    reader = Folder(folder)
    rows = reader.recover()
    assert len(rows) < 64 + 2 * 12
    assert rows.stop == 1200
    disk.storage.close()  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match=f"holds {len(rows)} rows, more than max_size=30"):
        fewer = buffer_of(open_disk(folder, 30))  # a smaller storage has the newest rows
    assert equal(in_order(fewer), in_order(disk)[-30:])
    fewer.storage.close()  # type: ignore[attr-defined]
    assert len(Folder(folder).recover()) == len(rows)  # and drops the others only when it writes
    with pytest.warns(UserWarning, match="the first write removes the others"):
        fewer = buffer_of(open_disk(folder, 30))
    fewer.extend(make_batch(1200, 6))
    fewer.storage.close()  # type: ignore[attr-defined]
    assert len(Folder(folder).recover()) < len(rows)


def test_empty(folder: Path) -> None:
    disk = buffer_of(open_disk(folder, flush_rows=10))
    for first in range(0, 60, 6):
        disk.extend(make_batch(first, 6))
    disk.empty()
    assert len(disk) == 0
    disk.storage.close()  # type: ignore[attr-defined]
    assert len(buffer_of(open_disk(folder))) == 0


def test_rows_after_empty_are_there_again(folder: Path) -> None:
    disk = buffer_of(open_disk(folder, flush_rows=10))
    disk.extend(make_batch(0, 30))
    disk.empty()
    disk.extend(make_batch(100, 4))
    assert equal(disk[:], make_batch(100, 4))
    disk.storage.close()  # type: ignore[attr-defined]
    assert equal(in_order(buffer_of(open_disk(folder))), make_batch(100, 4))


def test_a_dataset_that_others_read(folder: Path) -> None:
    writer = buffer_of(open_disk(folder, 10_000, compact_obs=True, segment_bytes=10_000_000))
    writer.extend(make_batch(0, 20))
    writer.storage.flush()  # type: ignore[attr-defined]
    writer.extend(make_batch(20, 10))  # not in a file yet
    data = buffer_of(DiskStorage(path=folder, read_only=True), writer=ImmutableDatasetWriter())
    assert equal(data[:], make_batch(0, 20))
    assert equal(data.storage[3:5], make_batch(0, 20)[3:5])
    with pytest.raises(RuntimeError, match="immutable"):
        data.extend(make_batch(0, 1))
    with pytest.raises(RuntimeError, match="open for reading only"):
        buffer_of(DiskStorage(path=folder, read_only=True)).extend(make_batch(0, 1))
    for first in range(30, 60, 10):
        writer.extend(make_batch(first, 10))
    writer.storage.flush()  # type: ignore[attr-defined]
    assert equal(data[:], make_batch(0, 20))


def test_edits_and_writers_that_choose_are_refused(folder: Path) -> None:
    disk = buffer_of(open_disk(folder))
    disk.extend(make_batch(0, 5))
    before = disk[:]
    with pytest.raises(RuntimeError, match="cannot be changed: its files are written once"):
        disk[0] = make_batch(7, 1)[0]
    with pytest.raises(RuntimeError, match="cannot be changed"):
        disk.storage.set(0, make_batch(7, 1)[0])
    assert equal(disk[:], before)
    best = ReplayBuffer(storage=open_disk(folder.with_name("b")), writer=TensorDictMaxValueWriter())
    with pytest.raises(TypeError, match="in the order in which they came"):
        best.extend(make_batch(0, 5))
