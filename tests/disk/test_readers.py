"""Readers beside a writer, and what readers hold."""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from disk_recorder import check_rows, rows

from flatroll.disk import DamagedFileError, Folder
from flatroll.disk.segments import Column, Ragged


def test_a_reader_keeps_what_it_has_mapped(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True, segment_rows=8) as folder:
        folder.append(rows(0, 5))
        folder.publish("first")
        reader = Folder(tmp_path)
        reader.load()
        columns = reader.segments[0].columns
        for first in range(5, 40, 5):
            folder.append(rows(first, first + 5))
            folder.publish("later", head=first)
        assert "000000000000000-000000000000005" not in "".join(os.listdir(tmp_path))
    check_rows(columns, 0, 5)
    check_rows(reader.read_rows(), 0, 5)  # the file is gone: from the map, with checksums
    check_rows(reader.read_rows(1, 3), 1, 3)
    columns["number"].zero_()  # type: ignore[union-attr]
    with pytest.raises(DamagedFileError, match="number"):
        reader.read_rows()
    assert reader.load().json == "later"


def test_a_reader_of_a_log_beside_a_writer_sees_whole_appends(tmp_path: Path) -> None:
    """Parts are merged and dropped meanwhile; the newest row never goes back."""
    errors: list[BaseException] = []
    counts = [0]
    done = threading.Event()

    def read() -> None:
        newest = 0
        try:
            while not done.is_set():
                reader = Folder(tmp_path)
                found = reader.recover()
                assert found.stop >= newest
                assert found.stop % 3 == 0
                newest = found.stop
                if found:
                    check_rows(reader.read_rows(), found.start, found.stop)
                counts[0] += 1
        except BaseException as error:
            errors.append(error)

    with Folder(tmp_path, write=True, sync=False, segment_rows=12) as folder:
        folder.append(rows(0, 3))
        thread = threading.Thread(target=read)
        thread.start()
        first = 3
        while (counts[0] < 25 or first < 300) and thread.is_alive():
            if first > 9000:
                time.sleep(0.001)  # a reader that is late gets its turn
            folder.append(rows(first, first + 3))
            first += 3
            if first % 5 == 0:
                folder.drop_before(max(0, first - 60))
        done.set()
        thread.join()
    assert not errors, errors
    assert counts[0] >= 25


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_many_segments_leak_neither_descriptors_nor_maps(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True, sync=False, segment_rows=1) as folder:
        for row in range(300):
            folder.append({"x": torch.full((1, 2), float(row))})
    gc.collect()  # what earlier tests left
    descriptors, maps = len(os.listdir("/proc/self/fd")), maps_of(tmp_path)
    for _ in range(3):
        reader = Folder(tmp_path)
        assert reader.recover() == range(300)
        assert maps_of(tmp_path) == maps + 300
        assert len(os.listdir("/proc/self/fd")) == descriptors
        first = reader.segments[0].columns["x"]
        total = sum(float(segment.columns["x"][0, 0]) for segment in reader.segments)  # type: ignore[call-overload]
        assert total == sum(range(300))
        del reader
        gc.collect()
        assert maps_of(tmp_path) == maps + 1  # the one of the tensor that is still held
        assert isinstance(first, torch.Tensor)
        assert first.tolist() == [[0.0, 0.0]]
        del first
        gc.collect()
        assert maps_of(tmp_path) == maps


def maps_of(path: Path) -> int:
    """How many maps of files in a folder this process has."""
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_forked_process_does_not_keep_the_lock_nor_give_it_back(tmp_path: Path) -> None:
    ready, told = os.pipe()
    wait, go_on = os.pipe()
    folder = Folder(tmp_path, write=True, sync=False)
    child = os.fork()
    if not child:
        try:
            os.read(wait, 1)
            folder.close()  # its own copy
            os.write(told, b"x")
            os.read(wait, 1)
        finally:
            os._exit(0)
    try:
        folder.close()
        with Folder(tmp_path, write=True, sync=False):  # although the child has a copy of the first one
            os.write(go_on, b"x")
            os.read(ready, 1)
            with pytest.raises(BlockingIOError, match="another writer has"):
                Folder(tmp_path, write=True)
    finally:
        os.write(go_on, b"x")
        os.waitpid(child, 0)
    folder = Folder(tmp_path, write=True, sync=False)
    child = os.fork()
    if not child:
        try:
            folder.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(BlockingIOError, match="another writer has"):
        Folder(tmp_path, write=True)
    folder.close()


def test_some_columns_are_read_without_the_others(tmp_path: Path) -> None:
    """A damaged column is found by those who read it, and only by them."""
    columns: dict[str, Column] = {
        "x": torch.arange(4.0),
        "text": Ragged(torch.arange(6), torch.tensor([1, 0, 3, 2])),
        "wide": torch.full((4, 64), 7, dtype=torch.uint8),
    }
    with Folder(tmp_path, write=True) as folder:
        folder.append(columns)
        folder.publish("now")

    (file,) = tmp_path.glob("*.rows")
    damaged = file.read_bytes().replace(bytes([7] * 64), bytes([7] * 63 + [8]))
    file.write_bytes(damaged)
    reader = Folder(tmp_path)
    reader.load()
    for first, end in [(0, 4), (1, 3)]:
        found = reader.read_rows(first, end, ["text", "x"])
        assert list(found) == ["text", "x"]
        assert torch.equal(found["x"], torch.arange(4.0)[first:end])  # type: ignore[arg-type]
        assert found["text"].lengths.tolist() == [1, 0, 3, 2][first:end]  # type: ignore[union-attr]
    with pytest.raises(DamagedFileError, match="wide"):
        reader.read_rows()
    with pytest.raises(KeyError, match="other"):
        reader.read_rows(0, 4, ["other"])
