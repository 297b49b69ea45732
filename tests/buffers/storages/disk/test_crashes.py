"""What of a `DiskStorage` is there after a crash, a full disk, two writers and damaged files."""

import errno
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import interpreters
import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import DiskStorage, LazyTensorStorage, RandomSampler, ReplayBuffer, SliceSampler
from flatroll.disk import DamagedFileError, Folder, files

WRITER = """
import sys, torch
from tensordict import TensorDict
from flatroll.buffers import DiskStorage, ReplayBuffer, SliceSampler
storage = DiskStorage(500, sys.argv[1], flush_rows=20, sync=False, segment_bytes=2000, compact_obs=True)
buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=4), batch_size=8)
first = int(buffer[:]["row"].max()) + 1 if len(buffer) else 0
for first in range(first, 100_000, 10):
    row = torch.arange(first, first + 10)
    buffer.extend(TensorDict({"row": row, "next": {"row": row + 1, "done": row % 7 == 6}}, [10]))
    buffer.sample()
    print(first + 10, storage.counts()["rows_unflushed"], flush=True)
"""


def rows_of(first: int, count: int) -> TensorDict:
    row = torch.arange(first, first + count)
    return TensorDict({"row": row, "next": {"row": row + 1, "done": row % 7 == 6}}, [count])


def make(folder: Path, sampler: Any = None, **options: Any) -> ReplayBuffer:
    storage = DiskStorage(
        options.pop("max_size", 500), folder, **{"sync": False, "segment_bytes": 2000, **options}
    )
    return ReplayBuffer(storage=storage, sampler=sampler or SliceSampler(slice_len=4), batch_size=8)


def test_a_killed_writer(tmp_path: Path) -> None:
    """All rows that it said were flushed are there, and whole."""
    process = interpreters.Interpreter(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    written = waiting = 0
    for _ in range(12):
        written, waiting = map(int, process.stdout.readline().split())
    process.send_signal(signal.SIGKILL)
    for line in process.stdout:
        if line.endswith("\n"):
            written, waiting = map(int, line.split())
    process.wait(timeout=600)
    process.stdout.close()

    buffer = ReplayBuffer(
        storage=DiskStorage(path=tmp_path, read_only=True), sampler=SliceSampler(slice_len=4)
    )
    rows = buffer[:]
    assert int(rows["row"][-1]) + 1 >= written - waiting
    assert (rows["row"].diff() == 1).all()
    assert torch.equal(rows["next", "row"], rows["row"] + 1)
    sample = buffer.sample(64)
    assert torch.equal(sample["next", "row"], sample["row"] + 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    buffer = make(tmp_path, flush_rows=20)
    buffer.extend(rows_of(0, 30))
    buffer.storage.flush()  # type: ignore[attr-defined]
    whole = files.write

    def failing(descriptor: int, data: Any) -> None:
        whole(descriptor, memoryview(data).cast("B")[:3])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "write", failing)
    with pytest.raises(OSError, match=os.strerror(code)):
        for first in range(30, 60_000, 10):  # the thread's error comes with one of the next calls
            buffer.extend(rows_of(first, 10))
            time.sleep(0.001)
    with pytest.raises(OSError, match=os.strerror(code)):
        buffer.storage.flush()  # type: ignore[attr-defined]
    written, rows = buffer.stats()["rows_written"], buffer[:]
    assert buffer.stats()["rows_unflushed"] > 0
    monkeypatch.undo()
    buffer.extend(rows_of(written, 1))  # nothing is lost, and the next call writes all
    buffer.storage.close()  # type: ignore[attr-defined]
    again = make(tmp_path, read_only=True)[:]
    assert again["row"].tolist() == [*sorted(rows["row"].tolist()), written][-len(again) :]


def test_an_extend_that_fails_stores_nothing(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    with pytest.raises(TypeError, match=r"tensordicts \[N\], got Tensor"):
        make(tmp_path / "b", RandomSampler()).extend(torch.arange(3))
    buffer.extend(rows_of(0, 3))
    with pytest.raises(ValueError, match="lacks the entry"):
        buffer.extend(rows_of(3, 3).exclude(("next", "row")))
    assert len(buffer) == 3


def test_two_writers_and_closed_ones(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    with pytest.raises(BlockingIOError, match="another writer"):
        make(tmp_path)
    buffer.extend(rows_of(0, 3))
    buffer.storage.close()  # type: ignore[attr-defined]
    assert buffer[:]["row"].tolist() == [0, 1, 2]  # what was open can still be read
    with pytest.raises(ValueError, match="is closed"):
        buffer.extend(rows_of(3, 1))
    other = make(tmp_path)
    assert other[:]["row"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="read_only=True"):
        pickle.dumps(other)
    with pytest.raises(RuntimeError, match="stay in its folder"):
        other.state_dict()


class Counter:
    """Counts the writes."""

    def __init__(self) -> None:
        self.calls, self._write = 0, files.write

    def __call__(self, descriptor: int, data: Any) -> None:
        self.calls += 1
        self._write(descriptor, data)


def test_a_saved_folder_has_the_rows_of_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is written, and what happens to the storage afterwards changes nothing."""
    buffer = make(tmp_path / "rows", max_size=60, compact_obs=True)
    buffer.extend(rows_of(0, 70))
    for number in range(2):
        buffer.storage.flush()  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            written = Counter()
            patch.setattr(files, "write", written)
            buffer.storage.save(tmp_path / "saved", {"number": number})  # type: ignore[attr-defined]
        assert written.calls == 1  # the manifest
        then = buffer[:]["row"]
        buffer.extend(rows_of(70 + 50 * number, 50))
        saved = make(tmp_path / "saved", None, max_size=None, read_only=True)
        assert saved[:]["row"].tolist() == sorted(then.tolist())
        assert Folder(tmp_path / "saved").load().json["number"] == number
    with pytest.raises(FileExistsError):
        make(tmp_path / "other", max_size=60).storage.save(tmp_path / "saved")  # type: ignore[attr-defined]


def test_a_storage_that_goes_flushes(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    buffer.extend(rows_of(0, 3))
    del buffer
    assert make(tmp_path)[:]["row"].tolist() == [0, 1, 2]


def test_flush_seconds(tmp_path: Path) -> None:
    buffer = make(tmp_path, flush_seconds=0.01)
    buffer.extend(rows_of(0, 3))
    for _ in range(30_000):  # bounded
        if not buffer.stats()["rows_unflushed"]:
            break
        time.sleep(0.01)
    assert buffer.stats()["rows_unflushed"] == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"codec": {"row": "zstd"}}, "codec must match the rows in the folder"),
        ({"frame_stack": {"row": 2}}, "frame_stack must match the rows in the folder"),
        ({"compact_obs": True}, "the rows in the folder are not compact"),
        ({"flush_rows": 0}, "flush_rows must be an integer of at least 1"),
        ({"flush_seconds": 0.0}, "flush_seconds must lie in"),
        (
            {"flush_seconds": math.inf},
            "flush_seconds must lie in .* got inf: None for no limit",
        ),
        ({"codec": {"row": "zstd"}, "frame_stack": {"row": 2}}, "both name 'row'"),
        ({"max_size": 0}, "max_size must be an integer of at least 1"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    buffer = make(tmp_path)
    buffer.extend(rows_of(0, 3))
    buffer.storage.close()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=text):
        make(tmp_path, **options)
    assert len(make(tmp_path)) == 3


@pytest.mark.parametrize("damaged", [False, True])
def test_the_error_names_a_manifest_that_cannot_be_read(
    damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = make(tmp_path)
    buffer.extend(rows_of(0, 3))
    buffer.storage.close()  # type: ignore[attr-defined]
    manifests = list(tmp_path.rglob("manifest-*.json"))
    real = files.open_to_read

    def open_to_read(path: Path) -> tuple[int, int]:
        if path in manifests:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    if damaged:
        for path in manifests:
            path.write_bytes(path.read_bytes()[:-1])
    else:
        monkeypatch.setattr(files, "open_to_read", open_to_read)
    with pytest.raises(
        DamagedFileError, match=r"no complete version: version \d: manifest-\d+\.json: (I|its)"
    ):
        make(tmp_path)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DiskStorage(path=tmp_path / "none", read_only=True)
    with pytest.raises(ValueError, match="max_size must be given"):
        DiskStorage(path=tmp_path / "new")
    with pytest.raises(ValueError, match="path must name the folder"):
        DiskStorage(10)
    with Folder(tmp_path / "other", write=True) as other:
        other.append({"x": torch.zeros(3)})
        with pytest.raises(BlockingIOError):
            DiskStorage(10, tmp_path / "other")
    with pytest.raises(ValueError, match="not the folder of a DiskStorage"):
        DiskStorage(10, tmp_path / "other")
    with Folder(tmp_path / "other", write=True) as other:
        other.recover()
        other.publish({"kind": "buffer"})
    with pytest.raises(ValueError, match="not the folder of a DiskStorage"):
        DiskStorage(10, tmp_path / "other")


@pytest.mark.parametrize("form", [{"codec": {"x": "zstd"}}, {"frame_stack": {"x": 2}}])
def test_files_that_lie_are_refused(tmp_path: Path, form: dict[str, Any]) -> None:
    """Rows whose checksums are right, and whose frames or compressed bytes are none: no byte beyond them is read."""
    x = torch.arange(12.0).view(6, 2)
    buffer = make(tmp_path, RandomSampler(), **form)
    buffer.extend(TensorDict({"x": x}, [6]))
    buffer.storage.close()  # type: ignore[attr-defined]
    with Folder(tmp_path, write=True) as folder:
        folder.recover()
        ragged: Any = folder.read_rows()["x"]
        if "codec" in form:
            broken = ragged._replace(values=torch.zeros_like(ragged.values))
        else:
            broken = ragged._replace(values=ragged.values[:1], lengths=torch.tensor([1, 0, 0, 0, 0, 0]))
        folder.replace({"x": broken}, 0)
        folder.publish(Folder(tmp_path).load().json)
    with pytest.raises(ValueError, match=r"compressed|complete stack"):
        make(tmp_path, RandomSampler())[:]


def test_a_damaged_file(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    buffer.extend(rows_of(0, 3))
    buffer.storage.close()  # type: ignore[attr-defined]
    (name,) = tmp_path.glob("*.rows")
    name.write_bytes(name.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="rows from 0 on are lost"):
        assert len(make(tmp_path)) == 0


@pytest.mark.parametrize("what", ["filling", "wrapped", "emptied"])
def test_a_damaged_manifest_costs_no_rows(tmp_path: Path, what: str) -> None:
    """There are two versions at any time; files that were emptied are named by none."""
    buffer = make(tmp_path, max_size=64, segment_bytes=200)
    for first in range(0, 40 if what == "filling" else 200, 10):
        buffer.extend(rows_of(first, 10))
    buffer.storage.flush()  # type: ignore[attr-defined]
    if what == "emptied":
        buffer.empty()
        assert not list(tmp_path.glob("*.rows"))
        buffer.extend(rows_of(300, 5))
    expected = buffer[buffer.ring.stored()]["row"].tolist()
    buffer.storage.close()  # type: ignore[attr-defined]
    newest = max(tmp_path.glob("manifest-*"))
    newest.write_bytes(newest.read_bytes()[:-9])
    with pytest.warns(RuntimeWarning, match="damaged"):
        again = make(tmp_path, max_size=64, segment_bytes=200)
    assert again[:]["row"].tolist() == expected
    again.extend(rows_of(500, 3))
    again.storage.close()  # type: ignore[attr-defined]
    assert make(tmp_path, max_size=64)[:]["row"].tolist() == [*expected, 500, 501, 502][-64:]


def test_memory_and_disk_draw_the_same_after_a_restart(tmp_path: Path) -> None:
    for _ in range(3):
        buffer = make(tmp_path, compact_obs=True)
        start = buffer.stats()["rows_written"]
        buffer.extend(rows_of(start, 21))
        memory = ReplayBuffer(storage=LazyTensorStorage(500), sampler=SliceSampler(slice_len=4), batch_size=8)
        memory.extend(buffer[:])
        torch.manual_seed(0)
        first = buffer.sample()
        torch.manual_seed(0)
        assert torch.equal(first["row"], memory.sample()["row"])
        buffer.storage.close()  # type: ignore[attr-defined]
