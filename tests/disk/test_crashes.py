"""What a crash, a full disk or a failing one leaves is the old version or the new one, whole."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import interpreters
import pytest
import torch
from disk_recorder import (
    Disk,
    Recorder,
    check_all,
    check_rows,
    check_version,
    go_on,
    links,
    rows,
    saves,
    states,
)

from flatroll.disk import DamagedFileError, Folder, files

SUPPORT = Path(__file__).parents[1] / "support"


def test_every_crash_leaves_the_old_version_or_the_new_one() -> None:
    """Some of the states; ``python tests/support/disk_recorder.py`` goes through all."""
    counts = check_all(23, count=9, most=3)
    assert counts["versions"] > 20
    assert counts["versions, no log"] > 20
    assert counts["links"] > 20
    assert counts["log"] > 20
    assert counts["unsynced"] > 100


def test_an_interrupt_as_merged_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are counted by then: those that come next have the numbers after them."""
    with Folder(tmp_path, write=True, sync=False) as folder:
        folder.append(rows(0, 1))
        folder.publish("it names a file that is merged later")
        remove = folder._remove_unused

        def interrupted() -> None:
            remove()
            raise KeyboardInterrupt

        monkeypatch.setattr(folder, "_remove_unused", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for row in range(1, 100):
                folder.append(rows(row, row + 1))
        monkeypatch.undo()
        end = folder.end
        assert [(segment.first, segment.end) for segment in folder.segments] == [(0, end)]
        folder.append(rows(end, end + 2))
        check_rows(folder.read_rows(), 0, end + 2)
    assert Folder(tmp_path).recover() == range(end + 2)


@pytest.mark.parametrize("kind", ["log", "no log", "links"])
@pytest.mark.parametrize("left_out", ["sync", "sync_folder"])
def test_the_states_show_a_sync_that_is_left_out(left_out: str, kind: str, tmp_path: Path) -> None:
    """The harness itself: without the syncs of a save, some power loss loses an acknowledged version."""
    with Recorder(only=tmp_path / "recorded") as recorder:
        if kind == "links":
            links(recorder, tmp_path / "recorded", count=3)
        else:
            saves(recorder, tmp_path / "recorded", sync=True, count=3, log=kind == "log")
    operations = [operation for operation in recorder.operations if operation[0] != left_out]
    lost = 0
    for i, (_, marks, contents) in enumerate(states(operations, 4)):
        if not any(mark[1] == "done" for mark in marks) or i % 5:
            continue
        state = tmp_path / str(i)
        state.mkdir()
        for name, data in contents.items():
            (state / name).write_bytes(data)
        try:
            check_version(state, marks, exact=True)
        except (AssertionError, DamagedFileError):
            lost += 1
        if lost:
            break
    assert lost


@pytest.mark.parametrize("log", [True, False])
def test_what_a_manifest_names_is_on_the_disk_before_it(log: bool, tmp_path: Path) -> None:
    with Recorder() as recorder:
        saves(recorder, tmp_path, sync=True, count=5, log=log)
    disk, named = Disk(), 0
    for operation in recorder.operations:
        if operation[0] == "rename" and operation[2].startswith("manifest"):
            manifest = json.loads(disk.written[disk.names[operation[1]]])
            for name, *_ in [*manifest["rows"], manifest["state"], (operation[1],)]:
                number = disk.names[name]
                assert name == operation[1] or disk.durable.get(name) == number, name
                assert disk.synced[number] == disk.written[number], name
                named += 1
        disk.apply(operation)
    assert named > 15


def test_a_killed_process_leaves_the_acknowledged_version_or_the_next(tmp_path: Path) -> None:
    """With a reader beside it; ``python tests/support/kill_savers.py 200`` kills more."""
    done = interpreters.run(
        [sys.executable, SUPPORT / "kill_savers.py", "6"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(SUPPORT)]), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "'kills': 6" in done.stdout


def test_rows_of_a_log_outlive_a_merge_by_a_writer_of_versions(tmp_path: Path) -> None:
    """Its new rows are safe with the next version only, those that it puts in a larger file are safe already."""
    with Folder(tmp_path / "log", write=True, segment_bytes=2500) as folder:
        for first in range(0, 30, 10):
            folder.append(rows(first, first + 10))
    contents = {path.name: path.read_bytes() for path in (tmp_path / "log").iterdir()}
    with (
        Folder(tmp_path / "log", write=True, segment_bytes=2500, log=False) as folder,
        Recorder() as recorder,
    ):
        folder.recover()
        folder.append(rows(30, 45))
    assert any(operation[0] == "remove" for operation in recorder.operations)
    before: list[Any] = []
    for name, data in contents.items():
        before += [("create", name), ("write", name, data), ("sync", name)]
    operations = [*before, ("sync_folder", ""), ("mark", "begin"), *recorder.operations]
    count = 0
    for _, marks, state in states(operations):
        if marks:
            path = tmp_path / str(count)
            path.mkdir()
            for name, data in state.items():
                (path / name).write_bytes(data)
            assert Folder(path).recover() in (range(30), range(45)), sorted(state)
            count += 1
    assert count > 5


def test_after_names_could_not_be_synced_another_writer_writes_the_rows_anew(tmp_path: Path) -> None:
    folder_with_two_versions(tmp_path)

    def fail(operation: Any) -> None:
        if operation[0] == "sync_folder":
            raise OSError(errno.EIO, "broken")

    with Folder(tmp_path, write=True, log=False) as folder:
        folder.load()
        folder.append(rows(35, 45))
        with Recorder(fail), pytest.raises(OSError, match="broken"):
            folder.publish("new", {"state": torch.full((3,), 2.0)})
        with pytest.raises(ValueError, match="closed"):
            folder.publish("new", {"state": torch.full((3,), 2.0)})
    check(tmp_path, "old")
    with Folder(tmp_path, write=True, log=False) as folder, Recorder() as recorder:
        folder.load()
        save(folder)
    created = [operation[1] for operation in recorder.operations if operation[0] == "create"]
    assert [name for name in created if ".rows" in name]
    check(tmp_path, "new")


def folder_with_two_versions(path: Path) -> int:
    with Folder(path, write=True, segment_bytes=900) as folder:
        for first in range(0, 30, 5):
            folder.append(rows(first, first + 5))
        folder.publish("old", {"state": torch.zeros(3)})
        folder.append(rows(30, 35))
        folder.publish("old", {"state": torch.ones(3)})
        return folder.end


def save(folder: Folder) -> None:
    """With a merge and a drop."""
    if folder.end == 35:
        folder.append(rows(35, 45))
    folder.publish("new", {"state": torch.full((3,), 2.0)}, head=12)


def operations_of_a_save(path: Path) -> list[Any]:
    folder_with_two_versions(path)
    with Folder(path, write=True, segment_bytes=900) as folder, Recorder() as recorder:
        folder.load()
        save(folder)
    return recorder.operations


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_operation_costs_nothing(code: int, tmp_path: Path) -> None:
    count = len(operations_of_a_save(tmp_path / "counted"))
    assert count > 20
    failed = 0
    for position in range(count):
        path = tmp_path / str(position)
        folder_with_two_versions(path)

        def fail(operation: Any, position: int = position) -> None:
            if len(recorder.operations) == position + 1:
                raise OSError(code, os.strerror(code))

        with Folder(path, write=True, segment_bytes=900) as folder:
            folder.load()
            with Recorder(fail) as recorder:
                try:
                    save(folder)
                    expected = "new"
                except OSError as error:
                    assert error.errno == code
                    expected, failed = "old", failed + 1
            check(path, expected)
            with Recorder() as again:
                save(folder)
            created = {operation[1] for operation in again.operations if operation[0] == "create"}
            synced = {operation[1] for operation in again.operations if operation[0] == "sync"}
            assert synced <= created  # what an fsync failed on is written anew
        check(path, "new")
    assert failed > 10


def check(path: Path, expected: str) -> None:
    reader = Folder(path)
    loaded = reader.load(strict=True)
    assert loaded.json == expected
    assert float(loaded.tensors["state"][0]) == (2.0 if expected == "new" else 1.0)
    assert (loaded.head, loaded.end) == ((12, 45) if expected == "new" else (0, 35))
    check_rows(reader.read_rows(), loaded.head, loaded.end)
    assert not [name for name in os.listdir(path) if name.endswith(files.TEMPORARY)]


def test_temporaries_that_could_not_be_removed_go_with_the_next_save(tmp_path: Path) -> None:
    folder_with_two_versions(tmp_path)

    def fail(operation: Any) -> None:
        if operation[0] in ("sync", "remove"):
            raise OSError(errno.EIO, "broken")

    with Folder(tmp_path, write=True, segment_bytes=900) as folder:
        folder.load()
        with Recorder(fail), pytest.raises(OSError, match="broken"):
            save(folder)
        assert [name for name in os.listdir(tmp_path) if name.endswith(files.TEMPORARY)]
        save(folder)
    check(tmp_path, "new")


def test_stale_temporaries_go(tmp_path: Path) -> None:
    end = folder_with_two_versions(tmp_path)
    for name in os.listdir(tmp_path):
        (tmp_path / f"{name}{files.TEMPORARY}").write_bytes(b"half")
    go_on(tmp_path)
    assert Folder(tmp_path).load().end == end + 4


def test_an_interrupted_append_can_be_repeated(tmp_path: Path) -> None:
    class Interrupted(BaseException):
        pass

    with Folder(tmp_path, write=True) as folder:
        folder.append(rows(0, 5))
        count = 0
        for position in range(20):

            def fail(operation: Any, position: int = position) -> None:
                if len(recorder.operations) == position + 1:
                    raise Interrupted

            first = folder.end
            with Recorder(fail) as recorder:
                try:
                    folder.append(rows(first, first + 3), first)
                except Interrupted:
                    count += 1
                    folder.append(rows(first, first + 5), first)
        assert count > 5
        assert Folder(tmp_path).recover() == range(folder.end)
    check_rows(folder.read_rows(), 0, folder.end)
