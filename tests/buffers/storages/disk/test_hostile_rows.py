"""Folders of a `DiskStorage` whose checksums are right and whose contents lie: an error, and no byte outside read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.__main__ import main
from flatroll.buffers import DiskStorage, RandomSampler, ReplayBuffer
from flatroll.datasets import BaseDatasetExperienceReplay, convert
from flatroll.disk import DamagedFileError, Folder, Ragged

zstandard = pytest.importorskip("zstandard")
ROWS = 20
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zstd": {"codec": {"x": "zstd"}},
    "frames": {"frame_stack": {"x": 2}},
    "compact": {"compact_obs": True},
}


@pytest.fixture
def lie(tmp_path: Path) -> Callable[..., ReplayBuffer]:
    """Writes a folder, changes what it notes or has, and opens it."""

    def make(form: str, change: Callable[[Any], Any], *, noted: bool) -> ReplayBuffer:
        x = torch.arange(2.0 * ROWS).view(ROWS, 2)
        done = torch.zeros(ROWS, dtype=torch.bool)
        storage = DiskStorage(10_000, tmp_path, sync=False, **FORMS[form])
        buffer = ReplayBuffer(storage=storage, sampler=RandomSampler())
        buffer.extend(TensorDict({"x": x, "next": {"x": x + 2, "done": done}}, [ROWS]))
        storage.close()
        with Folder(tmp_path, write=True, sync=False) as folder:
            folder.recover()
            notes, rows = Folder(tmp_path).load().json, folder.read_rows()
            change(notes if noted else rows)
            folder.replace(rows, 0)
            folder.publish(notes)
        return ReplayBuffer(storage=DiskStorage(path=tmp_path, read_only=True), sampler=RandomSampler())

    return make


@pytest.mark.parametrize(
    ("form", "shape", "text"),
    [
        ("plain", [3], "values that are not"),
        ("plain", [-2], "invalid shape"),
        ("zstd", [3], "does not have 8 rows"),
        ("zstd", [2**40], "does not have 8 rows"),  # nothing of that size is allocated
        ("zstd", [-1, -2], "invalid shape"),
        ("zstd", [2**62, 4], "invalid shape"),
        ("frames", [], "of stacks"),
        ("frames", [0], "of stacks"),
        ("frames", [-2], "invalid shape"),
        ("frames", [3], "no complete stack"),
        ("frames", [2, 3], "frames that are not"),
    ],
)
def test_shapes(lie: Any, form: str, shape: list[int], text: str) -> None:
    def change(notes: Any) -> None:
        entry = next(entry for entry in notes["entries"] if entry[0] == "x")
        entry[2] = shape

    with pytest.raises(ValueError, match=text):
        lie(form, change, noted=True)[:]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[
            ("entries", value)
            for value in ([], [["x", "bool", [2], "plain"]], [["x", "float32", [2], "gzip"]])
        ],
        *[("pairs", value) for value in (None, [3], ["y"], ["x"])],
        *[("seams", value) for value in (None, ["a"], [1.5], [[1]])],
        ("kind", "buffer"),
    ],
)
def test_notes(lie: Any, key: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"not the folder of a DiskStorage|it has the columns|no next observations"
    ):
        lie("plain", lambda notes: notes.update({key: value}), noted=True)


def test_the_error_about_a_column_is_cut(lie: Any) -> None:
    with pytest.raises(ValueError, match=r"it has the columns .*, but describes .*aaa") as caught:
        lie(
            "plain", lambda notes: notes["entries"].append(["a" * 10**6, "float32", [2], "plain"]), noted=True
        )
    assert len(str(caught.value)) < 1500


def test_seams_in_any_order(lie: Any) -> None:
    buffer = lie("plain", lambda notes: notes.update(seams=[9, 4, 4, 10**30, -3]), noted=True)
    assert buffer[:]["x"][:, 0].tolist() == list(range(0, 2 * ROWS, 2))


def block(rows: int, values: bytes, stop: int | None = None) -> Callable[[Any], None]:
    """A change to one compressed block of so many rows, cut short at ``stop``, and others of one row each."""

    def change(columns: Any) -> None:
        compress = zstandard.ZstdCompressor().compress
        blocks = [compress(values)[:stop], *[compress(bytes(8))] * (ROWS - rows)]
        lengths = torch.zeros(ROWS, dtype=torch.int64)
        lengths[[0, *range(rows, ROWS)]] = torch.tensor([len(one) for one in blocks])
        data = torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8)
        columns["x"] = Ragged(data, lengths)

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (block(ROWS, bytes(8 * ROWS)), "blocks of up to 8"),
        (block(8, bytes(1 << 26)), "does not have 8 rows"),
        (block(8, bytes(63)), "does not have 8 rows"),
        (block(8, bytes(range(64)), -9), "cut short"),
        (lambda columns: columns["x"].lengths.copy_(columns["x"].lengths.roll(1)), "blocks of up to 8"),
        (lambda columns: columns["x"].values.zero_(), "cannot be read"),
        (lambda columns: columns["x"].values[12:].zero_(), r"cannot be read|cut short"),
    ],
)
def test_compressed_blocks(lie: Any, change: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lie("zstd", change, noted=False)[:]


def test_blocks_of_any_number_of_rows_up_to_that(lie: Any) -> None:
    assert not lie("zstd", block(7, bytes(56)), noted=False)[:]["x"].any()


def test_blocks_whose_rows_are_asked_for_by_turns(lie: Any) -> None:
    index = torch.arange(16).view(2, 8).T.flatten()
    rows = lie("zstd", lambda columns: None, noted=False)[index]
    assert torch.equal(rows["x"][:, 0], 2.0 * index)


@pytest.mark.parametrize("lengths", [{0: 1, ROWS - 1: 1}, {0: 1}, {}, {ROWS - 1: 2}])
def test_next_observations(lie: Any, lengths: dict[int, int]) -> None:
    """Those of rows that end nothing, none at the end, and several of one row."""

    def change(columns: Any) -> None:
        counts = torch.zeros(ROWS, dtype=torch.int64)
        for row, count in lengths.items():
            counts[row] = count
        columns["next/x"] = Ragged(torch.zeros(int(counts.sum()), 2), counts)

    if lengths == {0: 1, ROWS - 1: 1}:  # a cut is no lie: the row after it is read as what it is
        assert lie("compact", change, noted=False)[:]["next", "x"][0].tolist() == [0, 0]
        return
    with pytest.raises(ValueError, match=r"without its next observation|no next observations"):
        lie("compact", change, noted=False)


def test_next_observations_of_another_dtype(tmp_path: Path) -> None:
    x = torch.arange(6.0).view(3, 2)
    storage = DiskStorage(100, tmp_path, sync=False, compact_obs=True)
    buffer = ReplayBuffer(storage=storage, sampler=RandomSampler())
    buffer.extend(TensorDict({"x": x, "next": {"x": x + 2, "done": torch.zeros(3, dtype=torch.bool)}}, [3]))
    storage.close()
    notes = Folder(tmp_path).load().json
    with Folder(tmp_path, write=True, sync=False, overwrite=True) as folder:
        rows = {"x": x, "next/done": torch.zeros(3, dtype=torch.bool)}
        wide = Ragged(torch.zeros(1, 2, dtype=torch.float64), torch.tensor([0, 0, 1]))
        folder.append({**rows, "next/x": wide}, first=0)
        folder.publish(notes)
    with pytest.raises(ValueError, match="no next observations"):
        ReplayBuffer(storage=DiskStorage(path=tmp_path, read_only=True), sampler=RandomSampler())


def test_damage_is_found_when_it_is_asked_for(tmp_path: Path) -> None:
    """A byte of the rows of one of several files: headers say nothing of it, ``verify`` reads them all."""
    batch = TensorDict({"x": torch.arange(20), "next": {"done": torch.arange(20)[:, None] == 19}}, [20])
    buffer = ReplayBuffer(storage=DiskStorage(100, tmp_path / "rows", flush_rows=5))
    for first in range(0, 20, 5):
        buffer.extend(batch[first : first + 5])
        buffer.storage.flush()  # type: ignore[attr-defined]
    buffer.storage.close()  # type: ignore[attr-defined]
    convert([batch], tmp_path / "set", progress=False)
    for path, options in ((tmp_path / "rows", {"max_size": 100}), (tmp_path / "set", {"read_only": True})):
        DiskStorage(path=path, verify=True, **options).close()  # type: ignore[arg-type]
        file = sorted(path.glob("*.rows"))[-1]
        data = bytearray(file.read_bytes())
        data[-1] ^= 64
        file.write_bytes(data)
        with pytest.raises(DamagedFileError, match=rf"{file.name}: the checksum of '.*' is wrong"):
            DiskStorage(path=path, verify=True, **options)  # type: ignore[arg-type]
        storage = DiskStorage(path=path, **options)  # type: ignore[arg-type]  # and its lock was given back
        assert len(ReplayBuffer(storage=storage)) == 20
        storage.close()
        assert main(["inspect", str(path)]) == 0
        assert main(["inspect", str(path), "--verify"]) == 1
    with pytest.raises(DamagedFileError, match="the checksum of"):
        BaseDatasetExperienceReplay(tmp_path / "set", verify=True)
    assert len(BaseDatasetExperienceReplay(tmp_path / "set")) == 20
