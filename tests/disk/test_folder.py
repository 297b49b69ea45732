"""Folders of rows and versions: what goes in comes out, who may write, and what is refused."""

import errno
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from disk_recorder import Recorder, check_rows, rows
from tensordict import TensorDict

from flatroll.buffers import (
    DiskStorage,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    ReplayBuffer,
)
from flatroll.disk import ColumnSchema, Folder, Ragged, column_key, column_name
from flatroll.disk.folder import FAN_IN
from flatroll.disk.tensor_file import DTYPES


def save(path: Path, *ends: int, **options: Any) -> None:
    """One version for each end of its rows."""
    with Folder(path, write=True, **options) as folder:
        for end in ends:
            folder.append(rows(folder.end, end))
            folder.publish({"end": end}, {"state": torch.full((2,), end)})


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_every_dtype_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(0, 255, (6, 4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    column = (
        (raw[..., 0] > 99)
        if dtype == torch.bool
        else raw[..., : dtype.itemsize].contiguous().view(dtype)[..., 0]
    )
    with Folder(tmp_path, write=True) as folder:
        folder.append({"x": column})
        folder.publish(None, {"scalar": column[0, 0], "none": column[:0], "x": column})
    reader = Folder(tmp_path)
    loaded = reader.load()
    for got in (reader.read_rows()["x"], reader.segments[0].columns["x"], loaded.tensors["x"]):
        assert isinstance(got, torch.Tensor)
        assert got.dtype == dtype
        assert got.view(torch.uint8).tolist() == column.contiguous().view(torch.uint8).tolist()
    assert loaded.tensors["scalar"].shape == ()
    assert loaded.tensors["none"].shape == (0, 4)


def test_a_dtype_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True) as folder:
        column = torch.zeros(3, dtype=torch.uint8).view(torch.bits8)
        with pytest.raises(
            TypeError, match=re.escape("cannot store torch.bits8; supported dtypes: bool, uint8")
        ):
            folder.append({"x": column})
    assert os.listdir(tmp_path) == ["lock"]


def test_strided_shared_and_lazy_tensors_come_back(tmp_path: Path) -> None:
    base = torch.complex(torch.arange(24.0), torch.ones(24)).view(4, 6)
    columns = {
        "all": base,
        "part": base[:, 2:4],
        "every other": base[:, ::2],
        "turned": base.conj(),
        "same": base,
    }
    columns["broadcast"] = torch.ones(1, 3, requires_grad=True).expand(4, 3)
    columns["negative"] = base.conj().imag
    with Folder(tmp_path, write=True) as folder:
        folder.append(columns)
        got = folder.read_rows()
    for name, column in columns.items():
        read = got[name]
        assert isinstance(read, torch.Tensor)
        assert torch.equal(read, column.detach()), name


def test_other_tools_read_the_files(tmp_path: Path) -> None:
    save(tmp_path, 6)
    file = next(name for name in os.listdir(tmp_path) if name.endswith(".rows"))
    assert file.startswith("000000000000000-000000000000006.")
    read = safetensors.torch.load_file(tmp_path / file)
    assert torch.equal(read["number"], torch.arange(6))
    assert torch.equal(read["words#lengths"], torch.arange(6) % 3)


def test_names_of_nested_keys_come_back() -> None:
    for key in ["x", ("next", "x"), ("a/b", "c%2Fd", "#lengths"), "__metadata__", ("", "x"), "%5F"]:
        assert column_key(column_name(key)) == key
    assert len({column_name(key) for key in [("a", "b"), "a/b", ("a%2Fb",), "a%2Fb"]}) == 3


@pytest.mark.parametrize("key", ["", ("a", ""), ("", "a"), ("", "")])
def test_an_empty_name_is_one_like_others(key: Any, tmp_path: Path) -> None:
    """tensordict takes it, so every form of a save does."""
    pytest.importorskip("h5py")
    batch = TensorDict({key: torch.arange(5), "x": torch.ones(5)}, [5])
    for checkpointer in (None, FlatStorageCheckpointer(), H5StorageCheckpointer()):
        buffer, again = (
            ReplayBuffer(storage=LazyTensorStorage(9), checkpointer=checkpointer) for _ in range(2)
        )
        buffer.extend(batch)
        buffer.dumps(tmp_path / type(checkpointer).__name__)
        again.loads(tmp_path / type(checkpointer).__name__)
        assert again[:][key].tolist() == list(range(5))
    kept = ReplayBuffer(storage=DiskStorage(9, tmp_path / "rows"))
    kept.extend(batch)
    kept.storage.close()  # type: ignore[attr-defined]
    assert ReplayBuffer(storage=DiskStorage(path=tmp_path / "rows", read_only=True))[:][key].tolist() == list(
        range(5)
    )
    assert column_key(column_name(key)) == key
    with (
        pytest.raises(ValueError, match="a column cannot be called ''"),
        Folder(tmp_path / "x", write=True) as folder,
    ):
        folder.append({"": torch.ones(3)})


def test_any_stretch_of_rows_is_read(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True) as folder:
        for first in range(0, 20, 5):
            folder.append(rows(first, first + 5))
        for first in range(0, 21, 3):
            for end in range(first, 21, 4):
                check_rows(folder.read_rows(first, end), first, end)
        with pytest.raises(IndexError, match=re.escape("rows [3, 21) requested, available are [0, 20)")):
            folder.read_rows(3, 21)


def test_mapped_columns_are_the_rows_and_take_no_writes_to_the_file(tmp_path: Path) -> None:
    save(tmp_path, 6)
    reader = Folder(tmp_path)
    reader.load()
    segment = reader.segments[0]
    check_rows(segment.columns, 0, 6)
    number = segment.columns["number"]
    assert isinstance(number, torch.Tensor)
    number.zero_()
    check_rows(Folder.read_rows(reader), 0, 6)
    segment.prefetch(torch.tensor([0, 3, 5]).numpy())


def test_versions_hold_rows_state_and_notes(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True) as folder:
        folder.append(rows(0, 5))
        number = folder.publish([1, {"a": 0.1}], {"t": torch.ones(2)}, extra={"step": 7})
    loaded = Folder(tmp_path).load()
    assert loaded.version == number
    assert (loaded.json, loaded.extra, loaded.head, loaded.end) == ([1, {"a": 0.1}], {"step": 7}, 0, 5)
    assert loaded.columns["words"] == ColumnSchema("int16", (), ragged=True)
    assert loaded.columns["wide"] == ColumnSchema("float64", (5,))


def test_a_version_without_rows_and_one_without_state(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True) as folder:
        folder.publish(None)
        empty = Folder(tmp_path)
        assert (empty.load().end, empty.read_rows(), empty.columns) == (0, {}, {})
        folder.append({"x": torch.zeros(0)})  # no rows: nothing happens
        assert folder.stats() == {"rows": 0, "segments": 0, "bytes": 0}


def test_two_versions_stay(tmp_path: Path) -> None:
    save(tmp_path, 3, 5, 9)
    assert Folder(tmp_path).versions() == [3, 2]
    reader = Folder(tmp_path)
    assert reader.load(2).json == {"end": 5}
    check_rows(reader.read_rows(), 0, 5)
    with pytest.raises(FileNotFoundError, match=r"has no version 1; there are: versions 3, 2"):
        reader.load(1)
    with pytest.raises(ValueError, match="version must be an integer of at least 1, got '2'"):
        reader.load("2")  # type: ignore[arg-type]


def test_a_run_goes_on_from_what_it_loaded_or_published(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with Folder(tmp_path, write=True) as folder:
        loaded = folder.load()
        folder.append(rows(3, 5))
        second = folder.publish("second")
    with Folder(tmp_path, write=True, resume=second) as folder:
        folder.append(rows(5, 6))
        folder.publish("third")
        assert len(folder.segments) == 3  # nothing was written twice
    with (
        Folder(tmp_path, write=True, resume=loaded.version) as folder,
        pytest.raises(
            FileExistsError, match="holds version 3, which this run has neither loaded nor published"
        ),
    ):
        folder.append(rows(3, 5))
    assert Folder(tmp_path).load().json == "third"


@pytest.mark.parametrize("change", ["append", "publish", "drop_before"])
def test_what_a_run_has_not_loaded_it_does_not_replace(change: str, tmp_path: Path) -> None:
    save(tmp_path, 3)
    before = sorted(os.listdir(tmp_path))
    with (
        Folder(tmp_path, write=True) as folder,
        pytest.raises(FileExistsError, match="load it first, write to another"),
    ):
        getattr(folder, change)({"append": rows(0, 2), "publish": None, "drop_before": 1}[change])
    assert sorted(os.listdir(tmp_path)) == before


def test_overwriting_begins_anew_and_the_old_versions_stand_until_new_ones_are_there(tmp_path: Path) -> None:
    save(tmp_path, 3, 5)
    with Folder(tmp_path, write=True, overwrite=True) as folder:
        folder.append({"other": torch.zeros(2)})
        assert Folder(tmp_path).load().json == {"end": 5}
        folder.publish("new")
        assert Folder(tmp_path).versions() == [3, 2]
        assert Folder(tmp_path).load(2).json == {"end": 5}
        folder.publish("newer")
        assert Folder(tmp_path).versions() == [4, 3]
    assert list(Folder(tmp_path).load().columns) == ["other"]
    assert len([name for name in os.listdir(tmp_path) if name.endswith(".rows")]) == 1


def test_two_lines_of_runs_do_not_mix(tmp_path: Path) -> None:
    """A run that goes on from an older version writes other files, though of the same rows."""
    save(tmp_path, 3, 6)
    with Folder(tmp_path, write=True, overwrite=True) as folder:
        folder.load(1)
        folder.append(rows(3, 6, epoch=1))
        folder.publish("fork")
    reader = Folder(tmp_path)
    assert reader.load().json == "fork"
    check_rows(reader.read_rows(), 0, 6, dict.fromkeys(range(3, 6), 1))
    assert reader.recover() == range(6)
    check_rows(reader.read_rows(), 0, 6, dict.fromkeys(range(3, 6), 1))


def test_rows_after_the_loaded_version_go_at_the_first_change(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with Folder(tmp_path, write=True) as folder:
        folder.load()
        folder.append(rows(3, 9, epoch=5))
    with Folder(tmp_path, write=True) as folder:
        assert folder.recover() == range(9)
        folder.load()
        assert folder.end == 3
        folder.append(rows(3, 5))
        assert folder.recover() == range(5)
        check_rows(folder.read_rows(), 0, 5)


def test_a_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    for first in range(0, 12, 4):
        with Folder(tmp_path, write=True) as folder:
            assert folder.recover() == range(first)
            folder.append(rows(first, first + 4))
    assert Folder(tmp_path).recover() == range(12)


def test_reading_a_log_stops_at_the_first_hole(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True) as folder:
        for first in range(0, 12, 4):
            folder.append(rows(first, first + 4))
        os.remove(tmp_path / str(folder.segments[1].name))
    reader = Folder(tmp_path)
    with pytest.warns(
        RuntimeWarning, match="rows 4 to 7 are missing; those after them are removed once rows are appended"
    ):
        assert reader.recover() == range(4)
    with Folder(tmp_path, write=True) as folder:
        with pytest.warns(RuntimeWarning, match="are missing"):
            folder.recover()
        folder.append(rows(4, 6))
    assert Folder(tmp_path).recover() == range(6)


def test_a_file_inside_a_larger_one_does_not_count(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True, segment_rows=8) as folder:
        folder.append(rows(0, 3))
        part = tmp_path / str(folder.segments[0].name)
        kept = part.read_bytes()
        folder.append(rows(3, 8))
        assert [(segment.first, segment.end) for segment in folder.segments] == [(0, 8)]
        part.write_bytes(kept)  # as if the process had died before it removed the part
        folder.append(rows(8, 9))
    reader = Folder(tmp_path)
    assert reader.recover() == range(9)
    assert len(reader.segments) == 2


@pytest.mark.parametrize(("part", "most"), [(1 / 2, 2.0), (1 / 20, 2.0), (1 / 100, 3.0)])
def test_rows_are_written_about_twice_and_files_stay_few(part: float, most: float, tmp_path: Path) -> None:
    """Parts down to 1/32 of a segment are merged once; each 32 times smaller size costs one more time at most."""
    whole, total = 64 << 10, 4
    count = int(whole * part) // 64
    with Folder(tmp_path, write=True, sync=False, segment_bytes=whole) as folder, Recorder() as recorder:
        peak = 0
        for first in range(0, whole * total // 64, count):
            folder.append({"x": torch.zeros(count, 16)}, first)
            peak = max(peak, len(folder.segments))
        data = folder.stats()["bytes"]
    written = sum(len(operation[2]) for operation in recorder.operations if operation[0] == "write")
    assert written <= (most + 0.05) * data + 900 * sum(
        operation[0] == "create" for operation in recorder.operations
    )
    assert peak <= total + 3 * FAN_IN
    assert data <= 1.05 * whole * total * 1.1


def test_the_disk_holds_little_more_than_the_rows(tmp_path: Path) -> None:
    """A full ring, 64 segments, 1 % new in each save."""
    ring, new, size = 6400, 64, 64
    with Folder(tmp_path, write=True, sync=False, segment_rows=ring // 64, segment_bytes=1 << 30) as folder:
        for end in range(ring // 64, ring + 1, ring // 64):
            folder.append({"x": torch.zeros(ring // 64, size, dtype=torch.float64)}, end - ring // 64)
        peak = 0
        for end in range(ring + new, ring + 40 * new, new):
            folder.append({"x": torch.zeros(new, size, dtype=torch.float64)})
            folder.publish(None, {}, head=end - ring)
            held = sum((tmp_path / name).stat().st_size for name in os.listdir(tmp_path))
            peak = max(peak, held)
    assert peak <= 1.15 * ring * size * 8


def test_edited_rows_count_with_the_next_version(tmp_path: Path) -> None:
    save(tmp_path, 4, 8)
    with Folder(tmp_path, write=True) as folder:
        folder.load()
        folder.replace(rows(4, 8, epoch=2), 4)
        with pytest.raises(
            ValueError, match=re.escape("rows [2, 4) are not whole segments, which begin at [0, 4]")
        ):
            folder.replace(rows(2, 4), 2)
        reader = Folder(tmp_path)
        reader.load()
        check_rows(reader.read_rows(), 0, 8)
        folder.publish("edited")
        reader.load()
        check_rows(reader.read_rows(), 0, 8, dict.fromkeys(range(4, 8), 2))


def test_dropped_rows_go(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True) as folder:
        for first in range(0, 20, 5):
            folder.append(rows(first, first + 5))
        folder.drop_before(12)
        assert (folder.head, folder.end, len(folder.segments)) == (12, 20, 2)
        with pytest.raises(IndexError):
            folder.read_rows(10, 20)
        assert len([name for name in os.listdir(tmp_path) if name.endswith(".rows")]) == 2
        folder.drop_before(50)  # past the end, as when a ring was overwritten between two saves
        assert (folder.head, folder.end, folder.segments) == (50, 50, ())
        folder.append(rows(50, 52))
        folder.publish(None)
    loaded = Folder(tmp_path).load()
    assert (loaded.head, loaded.end) == (50, 52)


def test_rows_that_leave_a_hole_or_are_others_are_refused(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True) as folder:
        folder.append({"x": torch.zeros(3), "y": torch.zeros(3, 2)})
        with pytest.raises(ValueError, match="first must be 3, the number of the next row, got 4"):
            folder.append({"x": torch.zeros(3), "y": torch.zeros(3, 2)}, 4)
        wrong = {"x": torch.zeros(3).double(), "z": torch.zeros(3)}
        text = "'y' is missing, 'z' is new, 'x' is float64 [], expected float32 []"
        with pytest.raises(ValueError, match=re.escape(text)):
            folder.append(wrong)
        with pytest.raises(
            ValueError, match=re.escape("columns must have the same number of rows, got {'x': 3, 'y': 2}")
        ):
            folder.append({"x": torch.zeros(3), "y": torch.zeros(2, 2)})
        with pytest.raises(ValueError, match="must add up to its 5 values"):
            folder.append({"x": Ragged(torch.zeros(5), torch.tensor([2, 2]))})
        with pytest.raises(TypeError, match="column 'x' must be a tensor or Ragged, got list"):
            folder.append({"x": [1, 2]})  # type: ignore[dict-item]
        assert folder.end == 3
    with pytest.raises(ValueError, match="is closed"):
        folder.append({})


def test_what_json_cannot_say_is_refused_and_the_old_version_stands(tmp_path: Path) -> None:
    save(tmp_path, 3)
    deep: Any = []
    for _ in range(70):
        deep = [deep]
    with Folder(tmp_path, write=True) as folder:
        folder.load()
        for state, error in [
            ({1j: 0}, TypeError),
            (float("nan"), ValueError),
            (deep, ValueError),
            ({1}, TypeError),
        ]:
            with pytest.raises(error):
                folder.publish(state, {"t": torch.zeros(2)})
    assert Folder(tmp_path).versions() == [1]
    assert len(os.listdir(tmp_path)) == 4


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True) as first:
        with pytest.raises(BlockingIOError, match="another writer has"):
            Folder(tmp_path, write=True)
        first.append(rows(0, 2))
    with Folder(tmp_path, write=True) as second:
        assert second.recover() == range(2)


def test_folders_that_cannot_be_used_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        Folder(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="holds no version"):
        Folder(tmp_path).load()
    (tmp_path / "file").write_text("text")
    with pytest.raises(NotADirectoryError):
        Folder(tmp_path / "file")
    for write in (False, True):
        with pytest.raises(
            ValueError, match=r"path must be a folder of rows and versions.* holds other files: file"
        ):
            Folder(tmp_path, write=write)
    assert os.listdir(tmp_path) == ["file"]
    save(tmp_path / "own", 2)
    (tmp_path / "own" / "notes.txt").write_text("stays")
    save_again = Folder(tmp_path / "own", write=True)
    save_again.load()
    save_again.publish(None)
    assert (tmp_path / "own" / "notes.txt").read_text() == "stays"
    with pytest.raises(ValueError, match="open for reading"):
        Folder(tmp_path / "own").append(rows(0, 2))
    with pytest.raises(TypeError, match="open the path there"):
        pickle.dumps(save_again)
    save_again.close()

    def refuse(path: Path) -> int:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("flatroll.disk.files.lock", refuse)
    with pytest.raises(
        PermissionError, match=r"cannot be written to .Read-only file system.: choose another folder"
    ):
        Folder(tmp_path / "own", write=True)


def test_arguments_are_checked(tmp_path: Path) -> None:
    for name in ("keep", "segment_bytes", "segment_rows"):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
            Folder(tmp_path, **{name: 0})


def test_a_version_with_too_many_bytes_is_not_loaded(tmp_path: Path) -> None:
    save(tmp_path, 50)
    with pytest.raises(ValueError, match="bytes, max_bytes is 1,000"):
        Folder(tmp_path, max_bytes=1000).load()
    with pytest.raises(ValueError, match="bytes, max_bytes is 1,000"):
        Folder(tmp_path, max_bytes=1000).recover()
    Folder(tmp_path, max_bytes=100_000).load()


def test_the_number_of_rows_that_make_a_segment(tmp_path: Path) -> None:
    folder = Folder(tmp_path, segment_bytes=1000, segment_rows=400)
    assert [folder.rows_per_segment(size) for size in (0, 1, 3, 64, 5000)] == [400, 400, 334, 16, 1]


@pytest.mark.parametrize("same_disk", [True, False])
def test_rows_of_another_folder_are_adopted_without_writing_them(
    same_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not same_disk:

        def refuse(source: Path, target: Path) -> None:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr("flatroll.disk.files.link", refuse)
    with Folder(tmp_path / "log", write=True, segment_rows=8) as log:
        for first in range(0, 15, 5):
            log.append(rows(first, first + 5))
            with Folder(tmp_path / "saved", write=True) as saved, Recorder() as recorder:
                if first:
                    saved.load()
                saved.adopt(log.segments)
                saved.publish(first, head=first // 2)
                written = sum(
                    len(operation[2]) for operation in recorder.operations if operation[0] == "write"
                )
            assert (written < 1200) == same_disk
        log.drop_before(15)
    reader = Folder(tmp_path / "saved")
    assert (reader.load().head, reader.load().end, len(reader.segments)) == (5, 15, 2)
    check_rows(reader.read_rows(), 5, 15)


def test_the_golden_folder_is_read() -> None:
    """Written by version 0.1.0 with the lines below; later versions must read it, and never write it anew."""
    # with Folder("golden", write=True) as folder:
    #     for epoch, first in enumerate([0, 6, 12]):
    #         folder.append(rows(first, first + 6))
    #         tensors = {"a": torch.arange(3) * 1j, "b": torch.ones(2, 2).bfloat16()}
    #         folder.publish({"epoch": epoch, "x": [0.1, None, "é"]}, tensors, head=first // 2, extra={"step": first})
    golden = Folder(Path(__file__).with_name("golden"))
    loaded = golden.load(strict=True)
    assert (loaded.head, loaded.end, loaded.version.number, loaded.extra) == (6, 18, 3, {"step": 12})
    assert loaded.json == {"epoch": 2, "x": [0.1, None, "é"]}
    assert torch.equal(loaded.tensors["a"], torch.arange(3) * 1j)
    assert torch.equal(loaded.tensors["b"], torch.ones(2, 2).bfloat16())
    check_rows(golden.read_rows(), 6, 18)
    assert (golden.recover(), golden.versions()) == (range(6, 18), [3, 2])
    check_rows(golden.segments[-1].columns, 12, 18)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_writer_that_goes_on_keeps_the_older_versions_until_there_is_a_new_one(
    keep: int, tmp_path: Path
) -> None:
    for number in range(1, 4):
        with Folder(tmp_path, write=True, keep=3, overwrite=True) as folder:
            folder.append({"x": torch.arange(3) + number}, first=0)
            folder.publish(number)
    with Folder(tmp_path, write=True, keep=keep) as folder:
        folder.load()
        folder.append({"x": torch.arange(2)})
        assert [Folder(tmp_path).load(number).json for number in folder.versions()] == [3, 2][:keep]
