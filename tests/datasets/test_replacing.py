"""A data set that takes the place of another one: killed at any operation, one of the two is there, whole."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.datasets import BaseDatasetExperienceReplay, convert
from flatroll.datasets.folders import place_beside
from flatroll.disk import Folder, files
from flatroll.export import export

OPERATIONS = ("create", "write", "sync", "rename", "replace", "remove", "sync_folder")


def rows(value: int) -> list[TensorDict]:
    return [TensorDict({"x": torch.full((5,), value)}, [5])]


def doubled(batch: Any) -> Any:
    return batch.set("x", batch["x"] * 2)


def anew(path: Path) -> None:
    convert(rows(2), path, overwrite=True, progress=False)


def in_place(path: Path) -> None:
    BaseDatasetExperienceReplay(path).preprocess(doubled, progress=False)


def counted(kill_at: int = 0) -> list[str]:
    """Note the operations on the disk from now on, and kill the process at one of them."""
    noted: list[str] = []

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            noted.append(name)
            if len(noted) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return operation

    for name in OPERATIONS:
        setattr(files, name, noting(name, getattr(files, name)))
    return noted


def killed_at(number: int, call: Callable[[], Any], *, exchanged: bool) -> int:
    """How many operations a process did that makes a call and is killed at this one; not ``exchanged``: of a system
    that does not exchange names."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            if not exchanged:
                system = files._SYSTEM
                files._SYSTEM = SimpleNamespace(madvise=system.madvise, mincore=system.mincore)  # type: ignore[assignment]
            noted = counted(number)
            call()
            os.write(writer, bytes([len(noted)]))
        finally:
            os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    count = number if killed else os.read(reader, 1)[0]
    os.close(reader)
    os.close(writer)
    return count


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("make", [anew, in_place])
def test_a_kill_at_the_last_operations(make: Callable[[Path], None], exchanged: bool, tmp_path: Path) -> None:
    """One of both sets is there, and made anew by the next call; also where two names cannot be exchanged."""
    convert(rows(1), tmp_path / "counted" / "set", progress=False)
    total = killed_at(0, partial(make, tmp_path / "counted" / "set"), exchanged=exchanged)
    assert total > 15
    seen = set()
    for number in (total // 2, *range(total - 8, total + 1)):
        path = tmp_path / str(number) / "set"
        convert(rows(1), path, progress=False)
        assert killed_at(number, partial(make, path), exchanged=exchanged) == number
        data = BaseDatasetExperienceReplay(path)
        seen.add(value := int(data[:]["x"][0]))
        assert data[:]["x"].tolist() == [value] * 5
        make(path)
        assert int(BaseDatasetExperienceReplay(path)[:]["x"][0]) == (2 if make is anew else 2 * value)
        assert [*path.parent.iterdir()] == [path]
    assert seen == {1, 2}


def test_a_set_that_somebody_writes_to_is_not_replaced(tmp_path: Path) -> None:
    convert(rows(1), tmp_path / "set", progress=False)
    with Folder(tmp_path / "set", write=True), pytest.raises(BlockingIOError, match="another writer has"):
        anew(tmp_path / "set")
    assert BaseDatasetExperienceReplay(tmp_path / "set")[:]["x"].tolist() == [1] * 5
    anew(tmp_path / "set")
    assert BaseDatasetExperienceReplay(tmp_path / "set")[:]["x"].tolist() == [2] * 5


def synced_before_the_end(patch: pytest.MonkeyPatch, target: Path) -> list[str]:
    """Note what is synced and renamed from now on: ``"file"``, ``"renamed"``, ``"parent"``."""
    noted: list[str] = []

    def sync(descriptor: int) -> None:
        noted.append("file")

    def rename(source: Path, name: Path) -> None:
        os.rename(source, name)
        noted.extend(["renamed"] * (name == target))

    def sync_folder(path: Path) -> None:
        noted.extend(["parent"] * (path == target.parent))

    for function in (sync, rename, sync_folder):
        patch.setattr(files, function.__name__, function)
    return noted


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.h5", "lerobot", "set"])
def test_what_takes_its_name_is_on_the_disk_before_and_its_name_after(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("h5py")
    source = rows(1)[0].set(("next", "done"), torch.arange(5)[:, None] == 4)
    target = tmp_path / name
    noted = synced_before_the_end(monkeypatch, target)
    if name == "set":
        convert([source], target, progress=False)
    else:
        form = name.rpartition(".")[2]
        export(source, target, form, progress=False)
    assert noted.count("renamed") == 1
    assert noted[-2:] == ["renamed", "parent"]
    assert noted[:-2].count("file") >= (sum(file.is_file() for file in target.rglob("*")) or 1) - (
        name == "set"
    )


def test_what_is_left_of_a_replaced_set_is_not_taken_for_one(tmp_path: Path) -> None:
    """It was there whole when the process died, and then somebody removed the new one."""
    convert(rows(1), tmp_path / "set", progress=False)
    os.rename(tmp_path / "set", place_beside(tmp_path / "set")[1])
    with pytest.raises(FileNotFoundError, match="there is no data set"):
        BaseDatasetExperienceReplay(tmp_path / "set")
    convert(rows(2), tmp_path / "set", progress=False)
    assert [*tmp_path.iterdir()] == [tmp_path / "set"]
