"""A save that failed or was interrupted never blocks a later one: the loop of docs/disk.md works from any state."""

import contextlib
import errno
import json
import os
import signal
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import run_script
from tensordict import TensorDict
from torch import nn

from flatroll.buffers import (
    DiskStorage,
    H5StorageCheckpointer,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
)
from flatroll.buffers.checkpointers import saving
from flatroll.disk import Checkpoint, DamagedFileError, Folder, files

Make = Callable[[], ReplayBuffer]
ROWS = 300


@pytest.fixture(autouse=True)
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of five rows, so that a save writes several."""
    monkeypatch.setattr(saving, "LEAST_BYTES", 1)


def in_memory() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(ROWS))


def batch(first: int, count: int) -> TensorDict:
    return TensorDict({"row": torch.arange(first, first + count), "wide": torch.rand(count, 30)}, [count])


def resume(path: Path, buffer: Any, rows: int, **extra: Any) -> None:
    """What docs/disk.md does: load what is there, go on, save; then the rows are there."""
    checkpoint = Checkpoint(path, buffer=buffer)
    step = checkpoint.load()["step"] if checkpoint.versions() else 0
    member = buffer[0] if isinstance(buffer, ReplayBufferEnsemble) else buffer
    member.extend(batch(len(member), rows - len(member)))
    checkpoint.save(step=step + 1, **extra)


def killed_in(path: Path, make: Callable[[], Any], operation: str, number: int) -> bool:
    """Whether a process that resumes and saves was killed at this call of an operation on the disk."""
    child = os.fork()
    if not child:
        try:
            buffer, real, calls = make(), getattr(files, operation), [0]

            def kill(*arguments: Any, **options: Any) -> Any:
                calls[0] += 1
                if calls[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            setattr(files, operation, kill)
            resume(path, buffer, 60)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def ensemble() -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(in_memory(), in_memory())


@pytest.mark.parametrize("make", [in_memory, ensemble])
def test_kills_in_the_very_first_save(make: Callable[[], Any], tmp_path: Path) -> None:
    kills = 0
    for operation in ("create", "write", "rename", "sync_folder"):
        for number in (1, 2, 4, 9, 19):
            path = tmp_path / f"{operation} {number}"
            if not killed_in(path, make, operation, number):
                break
            kills += 1
            buffer = make()
            resume(path, buffer, 20)
            again = make()
            assert Checkpoint(path, buffer=again).load()["step"] in (1, 2)
            assert len(again) == max(20, len(buffer))
    assert kills > 8


@pytest.mark.parametrize("number", range(2, 14, 3))
def test_a_full_disk_in_the_very_first_save(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same object saves again, and one of a new process does."""
    buffer, real, calls = in_memory(), files.write, [0]
    buffer.extend(batch(0, 60))

    def full(descriptor: int, data: Any) -> None:
        calls[0] += 1
        if calls[0] >= number:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, data)

    checkpoint = Checkpoint(tmp_path, buffer=buffer)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(step=1)
    resume(tmp_path, in_memory(), 20)
    other = tmp_path / "other"
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        with pytest.raises(OSError, match="No space left"):
            buffer.dumps(other)
    buffer.dumps(other)
    again = in_memory()
    again.loads(other)
    assert again[:]["row"].tolist() == buffer[:]["row"].tolist()


def test_what_is_no_data_is_refused_before_a_row_is_written(tmp_path: Path) -> None:
    buffer = in_memory()
    buffer.extend(batch(0, 60))
    checkpoint = Checkpoint(tmp_path, buffer=buffer)
    with pytest.raises(TypeError, match=r"\['extra'\]\['what'\] is a object"):
        checkpoint.save(what=object())
    assert not list(tmp_path.glob("*.rows"))
    assert checkpoint.save(step=1) == 1


class Interrupted:
    """Ctrl-C at the main thread's number-th call of an operation on the disk, before or after it is done.

    Python raises it in no other thread: the writing thread of a DiskStorage may run meanwhile.
    """

    def __init__(self, patch: pytest.MonkeyPatch, operation: str, number: int, *, after: bool) -> None:
        real, self.calls = getattr(files, operation), 0

        def call(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return real(*arguments, **options)
            self.calls += 1
            if self.calls == number and not after:
                raise KeyboardInterrupt
            result = real(*arguments, **options)
            if self.calls == number:
                raise KeyboardInterrupt
            return result

        patch.setattr(files, operation, call)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("operation", ["create", "rename", "remove", "sync_folder", "publish", "names"])
def test_interrupts_of_a_later_save(
    operation: str, after: bool, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as it tidies, when its version is there already: the next save of the same buffer goes on."""
    for number in range(1, 30):
        path = tmp_path / str(number)
        storage = DiskStorage(ROWS, tmp_path / f"rows {number}") if on_disk else LazyTensorStorage(ROWS)
        buffer = ReplayBuffer(storage=storage)
        checkpoint = Checkpoint(path, buffer=buffer, policy=nn.Linear(2, 1), keep=1)
        buffer.extend(batch(0, 5))
        checkpoint.save(step=1)
        buffer.extend(batch(5, 5))
        with monkeypatch.context() as patch:
            interrupt = Interrupted(patch, operation, number, after=after)
            with contextlib.suppress(KeyboardInterrupt):
                checkpoint.save(step=2)
        number = 0 if interrupt.calls < number else number
        buffer.extend(batch(10, 5))
        checkpoint.save(step=3)
        if on_disk:
            buffer.storage.close()  # type: ignore[attr-defined]
            storage = DiskStorage(ROWS, tmp_path / f"other {number}")
        else:
            storage = LazyTensorStorage(ROWS)
        again = ReplayBuffer(storage=storage)
        assert Checkpoint(path, buffer=again, policy=nn.Linear(2, 1)).load() == {"step": 3}
        assert again[:]["row"].tolist() == list(range(15))
        if on_disk:
            again.storage.close()  # type: ignore[attr-defined]
        if not number:
            return
    raise AssertionError("the save has no end")


def test_a_file_that_somebody_removed_is_written_anew(tmp_path: Path) -> None:
    buffer = in_memory()
    buffer.extend(batch(0, 20))
    buffer.dumps(tmp_path)
    for file in tmp_path.glob("*.rows"):
        file.unlink()
    with pytest.warns(RuntimeWarning, match="is missing; all rows are rewritten"):
        buffer.dumps(tmp_path)
    again = in_memory()
    again.loads(tmp_path)
    assert again[:]["row"].tolist() == list(range(20))


def sealed(fields: dict[str, Any]) -> bytes:
    """The bytes of a manifest with the right checksum."""
    fields = {"checksum": "00000000", **{name: fields[name] for name in fields if name != "checksum"}}
    text = json.dumps(fields, separators=(",", ":")).encode()
    return text.replace(b"00000000", f"{zlib.crc32(text):08x}".encode(), 1)


OUTSIDE = "/../../outside/x"


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: {"line": OUTSIDE},
        lambda fields: {"line": 3},
        lambda fields: {"line": "0BADCAFE"},
        lambda fields: {"line": "0badcafe\n"},
        lambda fields: {"state": [f"state-000000000001.{OUTSIDE}.state", *fields["state"][1:]]},
        lambda fields: {"state": ["state-000000000001.0badcafe.state", *fields["state"][1:]]},
        lambda fields: {"state": ["state-000000000002." + fields["line"] + ".state", *fields["state"][1:]]},
        lambda fields: {"rows": [[OUTSIDE, *record[1:]] for record in fields["rows"]]},
        lambda fields: {"rows": [["../" + record[0], *record[1:]] for record in fields["rows"]]},
        lambda fields: {"needs": 5},
    ],
)
def test_a_manifest_names_files_of_its_folder_and_line_only(
    change: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    """A next save would write to a path made of the line."""
    path, outside = tmp_path / "inner" / "saved", tmp_path / "outside"
    outside.mkdir()
    buffer = in_memory()
    buffer.extend(batch(0, 20))
    buffer.dumps(path)
    (file,) = path.glob("manifest-*")
    fields = json.loads(file.read_text())
    file.write_bytes(sealed({**fields, **change(fields)}))
    again = in_memory()
    with pytest.raises(DamagedFileError, match="it cannot be understood"):
        again.loads(path)
    with pytest.raises(DamagedFileError, match="it cannot be understood"):
        Folder(path).load()
    again.extend(batch(0, 3))
    again.dumps(path, overwrite=True)
    assert not list(outside.iterdir())


def test_versions_with_an_hdf5_file(tmp_path: Path) -> None:
    pytest.importorskip("h5py")

    def make() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(ROWS), checkpointer=H5StorageCheckpointer())

    path = tmp_path / "saved"
    assert Checkpoint(path, buffer=make()).versions() == []
    for rows in (5, 8):
        buffer = make()
        resume(path, buffer, rows)
        checkpoint = Checkpoint(path, buffer=buffer)
        assert checkpoint.versions() == [1]
        assert len(buffer) == rows
    assert checkpoint.load() == {"step": 2}


def test_every_way_to_save_goes_on_whatever_stopped_it() -> None:
    """``python tests/support/fail_saves.py 2000 SEED`` goes on for longer."""
    for library in ("pyarrow", "h5py"):
        pytest.importorskip(library)
    run_script("fail_saves", 1)
