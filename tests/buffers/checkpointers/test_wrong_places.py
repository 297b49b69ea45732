"""Folders that are none, are full or read-only, or hold something else: one clear error, and nothing is lost."""

import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import (
    DiskStorage,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorStorageCheckpointer,
)
from flatroll.disk import Checkpoint, Folder, files
from flatroll.disk.inspect import inspect_folder

pytest.importorskip("h5py")


def batch(first: int, count: int) -> TensorDict:
    row = torch.arange(first, first + count)
    after = {"observation": row + 1, "reward": row.float(), "done": row % 5 == 4}
    return TensorDict({"observation": row, "next": after}, [count])


def made(checkpointer: Callable[[], Any] = TensorStorageCheckpointer, size: int = 2000) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(size), batch_size=4, checkpointer=checkpointer())


def ensemble(members: int = 2) -> ReplayBufferEnsemble:
    both = ReplayBufferEnsemble(*(made() for _ in range(members)), batch_size=4)
    for member in range(members):
        both[member].extend(batch(0, 9))
    return both


each_form = pytest.mark.parametrize("kind", [TensorStorageCheckpointer, H5StorageCheckpointer])


@contextmanager
def full_disk(free: int) -> Iterator[None]:
    """No file may become longer than ``free`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("kind", "free"),
    [(TensorStorageCheckpointer, 0), (TensorStorageCheckpointer, 20_000)]
    + [(H5StorageCheckpointer, free) for free in (0, 3000, 20_000, 35_000)],
)
def test_a_full_disk_costs_nothing(kind: Any, free: int, tmp_path: Path) -> None:
    """HDF5 once kept what it could not write, and ended the process at the next look at any file."""
    buffer, other = made(kind), made(kind)
    buffer.extend(batch(0, 1000))
    buffer.dumps(tmp_path)
    before = sorted(os.listdir(tmp_path))
    buffer.extend(batch(1000, 1000))
    with full_disk(free), pytest.raises(OSError, match="too large"):
        buffer.dumps(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    other.loads(tmp_path)
    assert len(other) == 1000
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert bool((other[:] == buffer[:]).all())


def test_hdf5_files_of_processes_that_died_go(tmp_path: Path) -> None:
    buffer = made(H5StorageCheckpointer)
    buffer.extend(batch(0, 9))
    stale, busy = (tmp_path / f"checkpoint.h5.{name}{files.TEMPORARY}" for name in ("stale", "busy"))
    stale.touch()
    with files.SteadyFile(busy):  # as of another writer
        buffer.dumps(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"checkpoint.h5", busy.name}


def test_a_steady_file_reads_back_what_it_could_not_write(tmp_path: Path) -> None:
    with files.SteadyFile(tmp_path / "file") as file:
        file.write(b"0123456789")
        with full_disk(12):
            file.seek(8)
            file.write(b"abcdefgh")  # the first four bytes may or may not be in the file
            file.seek(-2, os.SEEK_END)
            file.write(b"XYZ")
        with pytest.raises(OSError, match="too large"):
            file.check()
        file.seek(0)
        assert file.read() == b"01234567abcdefXYZ" and file.tell() == 17
        file.seek(9)
        assert file.read(6) == b"bcdefX"
        file.truncate(10)
        file.seek(5)
        assert file.read() == b"567ab" and file.read() == b""
    assert file.closed


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing may be written in ``folder``; root, who may, is somebody else meanwhile."""
    root = os.geteuid() == 0
    os.chmod(folder, 0o555)
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
        os.chmod(folder, 0o755)


@each_form
def test_a_read_only_folder_is_read_and_not_written(kind: Any) -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path is for its owner alone
        os.chmod(name, 0o755)
        path, buffer, other = Path(name) / "saved", made(kind), made(kind)
        buffer.extend(batch(0, 10))
        buffer.dumps(path)
        before = sorted(os.listdir(path))
        buffer.extend(batch(10, 10))
        with read_only(path):
            with pytest.raises(PermissionError, match=str(path)):
                buffer.dumps(path)
            with pytest.raises(PermissionError, match=str(path)):
                buffer.dumps(path / "new")
            buffer.dumps(path, wait=False)
            with pytest.raises(PermissionError, match=str(path)):
                buffer.dumps(path)
            with pytest.raises(PermissionError, match=str(path)):
                Checkpoint(path, buffer=buffer).save()
            if kind is TensorStorageCheckpointer:
                with pytest.raises(PermissionError, match=r"cannot be written to .*: choose another folder"):
                    DiskStorage(10, path)
            other.loads(path)
        assert len(other) == 10 and sorted(os.listdir(path)) == before
        buffer.dumps(path)
        other.loads(path)
        assert len(other) == 20


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    file, buffer, items = tmp_path / "file", made(), made(H5StorageCheckpointer)
    file.write_text("mine")
    for one in (buffer, items):
        one.extend(batch(0, 9))
    saves: list[Callable[[Path], Any]] = [
        buffer.dumps,
        items.dumps,
        ensemble().dumps,
        lambda path: Checkpoint(path, buffer=buffer).save(),
        lambda path: Folder(path, write=True),
        lambda path: DiskStorage(10, path),
    ]
    for save in saves:
        for path in (file, file / "below"):
            with pytest.raises(
                NotADirectoryError, match="a file already has the name of this folder: choose another name"
            ):
                save(path)
    for one in (buffer, items, ensemble()):
        with pytest.raises(FileNotFoundError, match="file"):
            one.loads(file)
    assert file.read_text() == "mine"
    buffer.dumps(tmp_path / "folder")
    made().loads(tmp_path / "folder")


def test_versions_that_are_not_there_are_told_from_damage(tmp_path: Path) -> None:
    buffer, both = made(), ensemble()
    buffer.extend(batch(0, 9))
    checkpoint = Checkpoint(tmp_path / "run", buffer=buffer)
    for _ in range(3):
        buffer.dumps(tmp_path / "buffer")
        both.dumps(tmp_path / "ensemble")
        checkpoint.save()
    text = "has no version 1; there are: versions 3, 2"
    with pytest.raises(FileNotFoundError, match=text):
        buffer.loads(tmp_path / "buffer", version=1)
    with pytest.raises(FileNotFoundError, match=text):
        both.loads(tmp_path / "ensemble", version=1)
    with pytest.raises(FileNotFoundError, match=text):
        checkpoint.load(version=1)
    with pytest.raises(ValueError, match="version must be an integer of at least 1, got 0"):
        buffer.loads(tmp_path / "buffer", version=0)
    # Of an ensemble whose newest version lacks a file of a member, the one before is whole.
    (tmp_path / "ensemble" / "member-1" / "manifest-000000000003.json").unlink()
    other = ensemble()
    with pytest.warns(RuntimeWarning, match=r"a member is missing: .*member-1 has no version 3"):
        other.loads(tmp_path / "ensemble")
    assert len(other[1]) == 9


def test_damage_of_a_member_is_found_where_the_ensemble_is_looked_at(tmp_path: Path) -> None:
    ensemble().dumps(tmp_path)
    report = inspect_folder(tmp_path, verify=True)
    assert report.damage == [] and report.text.count("rows 0 to 8 (9 rows), 1 file") == 2
    file = next((tmp_path / "member-1").glob("*.rows"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    damage = inspect_folder(tmp_path, verify=True).damage
    assert damage and all(text.startswith("member-1/") and file.name in text for text in damage)
    for file in (tmp_path / "member-1").iterdir():
        file.unlink()
    assert "member-1: it holds neither rows nor versions" in inspect_folder(tmp_path).damage


def test_folders_of_something_else_say_what_they_are(tmp_path: Path) -> None:
    buffer, both, disk = made(), ensemble(), DiskStorage(10, tmp_path / "disk")
    buffer.extend(batch(0, 9))
    buffer.dumps(tmp_path / "buffer")
    both.dumps(tmp_path / "ensemble")
    Checkpoint(tmp_path / "run").save()
    ReplayBuffer(storage=disk, batch_size=4).extend(batch(0, 9))
    disk.close()
    for name, text in [
        ("ensemble", "an ensemble was saved: load it into a ReplayBufferEnsemble"),
        ("run", "a run without a buffer was saved: load it with a Checkpoint without buffer="),
        ("disk", r"no run or buffer, but a flatroll.DiskStorage: open it as such"),
    ]:
        with pytest.raises(ValueError, match=text):
            buffer.loads(tmp_path / name)
    for name, text in [("buffer", "a single buffer was saved"), ("run", "a run without a buffer was saved")]:
        with pytest.raises(ValueError, match=text):
            both.loads(tmp_path / name)
    for kind in (FlatStorageCheckpointer, NestedStorageCheckpointer):
        written = made(kind)
        written.extend(batch(0, 9))
        written.dumps(tmp_path / kind.__name__)
        with pytest.raises(ValueError, match=r"written by a \w+Checkpointer: set it as the storage's"):
            made().loads(tmp_path / kind.__name__)
        written.storage.checkpointer = TensorStorageCheckpointer()
        written.extend(batch(9, 1))
        with pytest.raises(
            ValueError, match=r"must be those of the folder: .*; write them to another folder"
        ):
            written.dumps(tmp_path / kind.__name__)
        made(kind).loads(tmp_path / kind.__name__)  # as the texts say
        written.dumps(tmp_path / f"{kind.__name__} again")


@pytest.mark.parametrize("size", [1000, 3000])
def test_another_capacity_by_the_letter_of_the_error(size: int, tmp_path: Path) -> None:
    saved, other = made(size=2000), made(size=size)
    for first in range(0, 2500, 500):
        saved.extend(batch(first, 500))
    saved.dumps(tmp_path)
    with pytest.raises(
        ValueError, match=r"max_size=2000; to continue .* extend this one with other.oldest_first\(\)"
    ):
        other.loads(tmp_path)
    assert len(other) == 0
    like = made(size=2000)
    like.loads(tmp_path)
    other.extend(like.oldest_first())
    assert other[:]["observation"].tolist() == list(range(2500 - min(size, 2000), 2500))
    other.dumps(tmp_path / "new")


def test_rows_with_lanes_and_items_oldest_first() -> None:
    lanes = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=4)
    for first in range(0, 9, 3):
        lanes.extend(torch.stack([batch(first + 100 * lane, 3) for lane in range(2)]))
    rows = lanes.oldest_first()
    assert rows["observation"].T.tolist() == [list(range(3, 9)), list(range(103, 109))]
    items = ReplayBuffer(storage=ListStorage(3), batch_size=1)
    for item in "abcd":
        items.add(item)
    assert items.oldest_first() == ["b", "c", "d"]


def test_another_schema_by_the_letter_of_the_error(tmp_path: Path) -> None:
    saved, fewer, typed = made(), made(), made()
    saved.extend(batch(0, 20))
    saved.dumps(tmp_path)
    fewer.extend(batch(90, 5).exclude(("next", "reward")))
    rows = batch(90, 5)
    rows["observation"] = rows["observation"].int()
    typed.extend(rows)
    for other, text in [
        (fewer, r"\('next', 'reward'\)"),
        (typed, "torch.int64 .* as .*this storage keeps torch.int32"),
    ]:
        with pytest.raises(
            ValueError, match=f"{text}.*: load it into a storage created like the saved one, and extend"
        ):
            other.loads(tmp_path)
        assert len(other) == 5
    like = made()
    like.loads(tmp_path)
    rows = like.oldest_first()
    fewer.extend(rows.exclude(("next", "reward")))  # changed as needed
    typed.extend(rows.set("observation", rows["observation"].int()))
    assert len(fewer) == len(typed) == 25
