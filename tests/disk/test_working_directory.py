"""A relative path names the folder that it named when it was given, whatever `os.chdir` does later."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from set_files import write_atari
from tensordict import TensorDict

from flatroll.buffers import (
    DiskStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
)
from flatroll.datasets import (
    BaseDatasetExperienceReplay,
    OpenXExperienceReplay,
    TrajectoryReplayBuffer,
    convert,
    read_atari_dqn,
)
from flatroll.disk import Checkpoint, Folder
from flatroll.export import export, read_lerobot


def batch(first: int, count: int = 5) -> TensorDict:
    return TensorDict({"row": torch.arange(first, first + count)}, [count])


def steps(done: torch.Tensor) -> TensorDict:
    row = torch.arange(len(done)).float()
    return TensorDict(
        {"observation": row, "next": {"observation": row + 1, "done": done[:, None]}}, [len(done)]
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(path: str) -> list[int]:
    rows: list[int] = ReplayBuffer(storage=DiskStorage(path=path, read_only=True))[:]["row"].tolist()
    return rows


def disk_storage() -> Iterator[Any]:
    buffer = ReplayBuffer(storage=DiskStorage(100, "rows"))
    buffer.extend(batch(0))
    buffer.storage.flush()  # type: ignore[attr-defined]
    yield
    other = ReplayBuffer(storage=DiskStorage(100, "rows"))  # of another run, in a folder of the same name
    other.extend(batch(70))
    other.storage.close()  # type: ignore[attr-defined]
    buffer.extend(batch(5))
    buffer.storage.close()  # type: ignore[attr-defined]
    assert rows_of("../rows") == list(range(10))
    assert rows_of("rows") == list(range(70, 75))
    shutil.rmtree("rows")
    yield True


def folder() -> Iterator[Any]:
    with Folder("rows", write=True) as one:
        one.append({"row": torch.arange(5)})
        one.publish(1)
        yield
        one.append({"row": torch.arange(5, 10)})
        one.publish(2)
    reader = Folder("../rows")
    assert reader.load().json == 2
    yield reader.read_rows()["row"].tolist() == list(range(10))


def reader() -> Iterator[Any]:
    with Folder("rows", write=True) as one:
        one.append({"row": torch.arange(5)})
        one.publish(1)
    found = Folder("rows")
    yield
    yield found.load().json == 1 and len(found.read_rows()["row"]) == 5


def checkpoint() -> Iterator[Any]:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    saved = Checkpoint("saved", buffer=buffer)
    buffer.extend(batch(0))
    saved.save(step=1)
    yield
    buffer.extend(batch(5))
    saved.save(step=2)
    assert saved.load() == {"step": 2}
    yield saved.versions() == [2, 1]


def save_on_a_thread(make: Callable[[], Any]) -> Iterator[Any]:
    buffer, again = make(), make()
    (buffer if isinstance(buffer, ReplayBuffer) else buffer[0]).extend(batch(0))
    begin, held = buffer.saves.dumps, list[Any]()
    buffer.saves.dumps = lambda save, wait: held.append(save)  # as if the thread began after the change
    buffer.dumps("saved", wait=False)
    yield
    begin(held[0], True)
    again.loads("../saved")
    yield len(again) == 5


def in_memory() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(100))


def memmap() -> Iterator[Any]:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir="scratch"))
    yield
    buffer.extend(batch(0))
    yield buffer[:]["row"].tolist() == list(range(5))


def trajectories() -> Iterator[Any]:
    kept = TrajectoryReplayBuffer(auto_save=True, auto_save_path="kept")
    kept.add_trajectories([{"rewards": torch.arange(6.0).view(3, 2)}])
    yield
    kept.add_trajectories([{"rewards": torch.arange(6.0).view(3, 2)}])
    kept.close()
    again = TrajectoryReplayBuffer(auto_save=True, auto_save_path="../kept")
    count = len(again)
    again.close()
    yield count == 2


def data_set() -> Iterator[Any]:
    convert([steps(torch.tensor([False, False, True]))], "set")
    data = BaseDatasetExperienceReplay("set", batch_size=2)
    rows = data.as_dataset()
    yield
    data.preprocess(lambda batch: batch.set("double", batch["observation"] * 2), progress=False)
    assert len(list(rows)) == 2
    assert "double" in data.sample()
    data.delete()
    yield not Path("../set").exists()


def parts_of_a_set() -> Iterator[Any]:
    Path("atari").mkdir()
    write_atari(Path("atari"))
    batches = read_atari_dqn("atari")
    next(batches)
    yield
    yield len(list(batches)) == 1


def episodes_of_a_folder() -> Iterator[Any]:
    pytest.importorskip("pyarrow")
    source = torch.cat(
        [
            steps(torch.tensor([False, True])).set(("collector", "traj_ids"), torch.full((2,), i))
            for i in range(2)
        ]
    )
    export(source, "lerobot", "lerobot")
    episodes = read_lerobot("lerobot")
    next(episodes)
    stream = OpenXExperienceReplay("x", streaming=True, fetch=lambda *_: "lerobot", shuffle=False)
    assert len(list(stream)) == 2
    yield
    assert len(list(stream)) == 2
    yield len(list(episodes)) == 1


@pytest.mark.parametrize(
    "use",
    [
        disk_storage,
        folder,
        reader,
        checkpoint,
        lambda: save_on_a_thread(in_memory),
        lambda: save_on_a_thread(lambda: ReplayBufferEnsemble(in_memory(), in_memory())),
        memmap,
        trajectories,
        data_set,
        parts_of_a_set,
        episodes_of_a_folder,
    ],
)
def test_a_change_of_the_working_directory(use: Callable[[], Iterator[Any]], here: Path) -> None:
    steps = use()
    next(steps)
    os.chdir("elsewhere")
    assert next(steps)
    assert not list((here / "elsewhere").iterdir())
