"""Files that a disk damaged or that somebody wrote: one error, or the same content; no crash, no memory, no code."""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_recorder import check_rows, rows

from flatroll.disk import DamagedFileError, Folder, LoadedVersion, Segment, tensor_file
from flatroll.disk.files import open_to_read

STATE = {"a": torch.arange(5.0), "b": torch.tensor([[True, False]])}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one version."""
    path: Path = tmp_path_factory.mktemp("sound")
    with Folder(path, write=True) as folder:
        folder.append(rows(0, 6))
        folder.publish({"x": [1, 2]}, STATE, extra="note")
    return path


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "folder")
    return tmp_path / "folder"


def file_of(path: Path, ending: str) -> Path:
    return next(path / name for name in os.listdir(path) if name.endswith(ending))


def load_all(path: Path) -> None:
    """Everything in the folder is what was saved."""
    folder = Folder(path)
    loaded, got = folder.load_with(lambda loaded: (loaded, folder.read_rows()))
    assert (loaded.json, loaded.extra, loaded.head, loaded.end) == ({"x": [1, 2]}, "note", 0, 6)
    assert all(torch.equal(loaded.tensors[name], value) for name, value in STATE.items())
    check_rows(got, 0, 6)


@pytest.mark.parametrize("ending", [".json", ".state", ".rows"])
def test_a_flipped_bit_is_an_error(ending: str, path: Path) -> None:
    file = file_of(path, ending)
    data = file.read_bytes()
    found = 0
    for position in range(0, len(data), 2 if len(data) < 900 else 5):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        try:
            load_all(path)
        except DamagedFileError as error:
            assert file.name in str(error)
            found += 1
    file.write_bytes(data)
    load_all(path)
    assert found > 100


@pytest.mark.parametrize("ending", [".json", ".state", ".rows"])
def test_a_file_that_is_cut_longer_or_gone_is_an_error(ending: str, path: Path) -> None:
    file = file_of(path, ending)
    data = file.read_bytes()
    for wrong in (b"", data[:4], data[:-1], data + b"\0", data[: len(data) // 2], bytes(len(data))):
        file.write_bytes(wrong)
        with pytest.raises(DamagedFileError, match=file.name):
            load_all(path)
    file.unlink()
    with pytest.raises(DamagedFileError if ending != ".json" else FileNotFoundError):
        load_all(path)


def test_links_pipes_and_folders_are_not_followed(path: Path, tmp_path: Path) -> None:
    for ending in (".json", ".state", ".rows"):
        file = file_of(path, ending)
        kept = tmp_path / "kept"
        file.rename(kept)
        for make in (lambda file, kept: file.symlink_to(kept), lambda file, kept: os.mkfifo(file)):
            make(file, kept)
            with pytest.raises(DamagedFileError, match=f"{file.name}: "):
                load_all(path)
            file.unlink()
        kept.rename(file)
    load_all(path)


def sealed(fields: dict[str, Any]) -> bytes:
    """A manifest with a checksum that is right."""
    text = b'{"checksum":"00000000",' + json.dumps(fields).encode()[1:]
    return text[:13] + f"{zlib.crc32(text):08x}".encode() + text[21:]


def fields_of(path: Path) -> dict[str, Any]:
    fields = dict(json.loads(file_of(path, ".json").read_bytes()))
    del fields["checksum"]
    return fields


WRONG_FIELDS: dict[str, dict[str, Any]] = {
    "path to elsewhere": {"rows": [["../outside.rows", 10, 0]]},
    "absolute path": {"state": ["/etc/passwd", 10, 0]},
    "other file": {"state": ["lock", 10, 0]},
    "hole": {"rows": [["000000000000000-000000000000002.0badcafe-1.rows", 9, 0]] * 2},
    "rows that end before they begin": {"rows": [["000000000000009-000000000000002.0badcafe-1.rows", 9, 0]]},
    "head after end": {"head": 9},
    "negative head": {"head": -1},
    "other end": {"end": 7},
    "end that is no number": {"end": "6"},
    "end that is true": {"end": True},
    "huge size": {"rows": [["000000000000000-000000000000006.0badcafe-1.rows", 2**63, 0]]},
    "other version": {"version": 2},
    "unknown dtype": {"columns": {"x": ["float5", [], False]}},
    "negative shape": {"columns": {"x": ["float32", [-1], False]}},
    "many dimensions": {"columns": {"x": ["float32", [1] * 40, False]}},
    "columns of another kind": {"columns": [1, 2]},
    "other columns": {"columns": {"x": ["float32", [], False]}},
    "no rows": {"rows": None},
    "rows of one value": {"rows": [[1]]},
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_a_manifest_that_makes_no_sense_is_an_error(case: str, path: Path) -> None:
    file_of(path, ".json").write_bytes(sealed({**fields_of(path), **WRONG_FIELDS[case]}))
    with pytest.raises(DamagedFileError, match=r"manifest-000000000001.json|\.rows: "):
        load_all(path)


def test_manifests_that_would_take_the_reader_down_are_errors(path: Path) -> None:
    file = file_of(path, ".json")
    for text in (
        b'{"checksum":"00000000","a":' + b"[" * 100_000,
        b'{"checksum":"00000000","a":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"checksum":"00000000","a":' + b"9" * 100_000 + b"}",
        b'{"checksum":"00000000","a":NaN}',
        b'{"checksum":"00000000"',
        b'{"checksum":"00000000","a":"\xff"}',
    ):
        file.write_bytes(text[:13] + f"{zlib.crc32(text):08x}".encode() + text[21:])
        with pytest.raises(DamagedFileError, match="manifest"):
            load_all(path)
    with file.open("wb") as stream:
        stream.truncate((64 << 20) + 1)
    with pytest.raises(DamagedFileError, match="67,108,865 bytes, more than the 67,108,864 allowed"):
        load_all(path)


def test_an_error_about_what_a_version_holds_is_cut_and_names_it(path: Path) -> None:
    def use(loaded: LoadedVersion) -> None:
        raise ValueError("it has the column " + "a" * 10**6)

    with pytest.raises(ValueError, match=r"it has the column a+ \.\.\.") as caught:
        Folder(path).load_with(use)
    assert len(str(caught.value)) < 1100 and caught.value.__notes__ == [f"while version 1 of {path} was read"]


def test_later_formats_and_unknown_needs_name_the_version_to_install(path: Path) -> None:
    file, fields = file_of(path, ".json"), fields_of(path)
    file.write_bytes(sealed({**fields, "format": 2, "written_by": "9.1"}))
    with pytest.raises(
        ValueError, match=r"has format 2, this version reads 1: install flatroll 9\.1 or later \(this is "
    ):
        load_all(path)
    file.write_bytes(sealed({**fields, "needs": ["ragged", "magic"], "written_by": "9.1"}))
    with pytest.raises(ValueError, match=r"needs magic, unknown here: install flatroll 9\.1 or later"):
        load_all(path)
    with pytest.raises(ValueError, match="needs magic"):
        Folder(path, write=True)
    file.write_bytes(sealed({**fields, "needs": ["a" * 10**6]}))
    for call in (load_all, lambda path: Folder(path, write=True)):
        with pytest.raises(ValueError, match="needs aaa") as caught:
            call(path)
        assert len(str(caught.value)) < 1000
    file.write_bytes(sealed({**fields, "something else": 3}))
    load_all(path)


def header_of(text: bytes, size: int) -> tensor_file.Header:
    """Read a header with these bytes in a file of so many bytes of data."""
    return tensor_file.parse_header(text, 8 + len(text) + size)


def sealed_header(table: Any, crc32: Any = None, dtypes: Any = None) -> bytes:
    checksums = {"x": "00000000", "y": "00000000"} if crc32 is None else crc32
    own = {"checksum": "00000000", "crc32": json.dumps(checksums), "dtypes": json.dumps(dtypes or {})}
    text = json.dumps({"__metadata__": own, **table}, separators=(",", ":")).encode()
    at = len(tensor_file._BEFORE_CHECKSUM)
    return text[:at] + f"{zlib.crc32(text):08x}".encode() + text[at + 8 :]


def line(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


WRONG_TABLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beyond the file": ({"x": line(shape=[3], offsets=[0, 12])}, {}),
    "before the file": ({"x": line(offsets=[-8, 0])}, {}),
    "hole": ({"x": line(shape=[1], offsets=[4, 8])}, {}),
    "overlap": ({"x": line(), "y": line(shape=[1], offsets=[4, 8])}, {}),
    "bytes left over": ({"x": line(shape=[1], offsets=[0, 4])}, {}),
    "backwards": ({"x": line(offsets=[8, 0])}, {}),
    "shape that is not its bytes": ({"x": line(shape=[3])}, {}),
    "overflowing shape": ({"x": line(shape=[2**62, 4, 2], offsets=[0, 8])}, {}),
    "empty, but huge": ({"x": line(shape=[0, 2**62], offsets=[0, 0]), "y": line()}, {}),
    "negative shape": ({"x": line(shape=[-2])}, {}),
    "shape of a fraction": ({"x": line(shape=[2.0])}, {}),
    "shape of a bool": ({"x": line(shape=[True, 2])}, {}),
    "many dimensions": ({"x": line(shape=[1] * 40 + [2])}, {}),
    "unknown dtype": ({"x": line(dtype="F5")}, {}),
    "dtype that is no string": ({"x": line(dtype=[1])}, {}),
    "no offsets": ({"x": {"dtype": "F32", "shape": [2]}}, {}),
    "three offsets": ({"x": line(offsets=[0, 8, 8])}, {}),
    "no table": ({"x": 3}, {}),
    "no checksum": ({"x": line()}, {"crc32": {}}),
    "checksum that is no number": ({"x": line()}, {"crc32": {"x": "zz"}}),
    "checksums of another kind": ({"x": line()}, {"crc32": [1]}),
    "declared as unknown": ({"x": line()}, {"dtypes": {"x": "float5"}}),
    "declared as another": ({"x": line()}, {"dtypes": {"x": "complex128"}}),
    "pairs without pairs": ({"x": line(shape=[2, 1])}, {"dtypes": {"x": "complex64"}}),
}


@pytest.mark.parametrize("case", WRONG_TABLES)
def test_a_header_that_makes_no_sense_is_an_error(case: str) -> None:
    table, options = WRONG_TABLES[case]
    with pytest.raises(DamagedFileError):
        header_of(sealed_header(table, **options), 8)


def test_a_header_that_is_sound_is_read() -> None:
    assert header_of(sealed_header({"x": line()}), 8).entries["x"].shape == (2,)
    assert (
        header_of(sealed_header({"x": line(shape=[0], offsets=[0, 0]), "y": line()}), 8).entries["x"].size
        == 0
    )
    for text in (b"", b"{}", b"[" * 1000, b'{"__metadata__":{"checksum":"'):
        with pytest.raises(DamagedFileError):
            header_of(text, 8)


def test_a_header_that_claims_to_be_huge_allocates_nothing(tmp_path: Path) -> None:
    file = tmp_path / "000000000000000-000000000000006.0badcafe-1.rows"
    for length in (2**62, 2**63, 2**64 - 1, 100, 17 << 20):
        file.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(DamagedFileError):
            tensor_file.read_header(*open_once(file))
    with file.open("r+b") as stream:  # long enough for the header, on a disk where holes cost nothing
        stream.truncate(64 << 20)
    with pytest.raises(DamagedFileError, match="a header of 17825792 bytes"):
        tensor_file.read_header(*open_once(file))


OPEN: list[int] = []


def open_once(file: Path) -> tuple[int, int]:
    opened = open_to_read(file)
    OPEN.append(opened[0])
    return opened


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    yield
    while OPEN:
        os.close(OPEN.pop())


def test_lengths_of_ragged_columns_are_checked(path: Path) -> None:
    """With right checksums, as somebody would write them who wants another's memory."""
    folder = Folder(path)
    folder.load()
    segment = folder.segments[0]
    columns = segment.read()
    for lengths in ([9, 0, 0, 0, 0, 0], [-1, 1, 2, 0, 1, 3], [2**62, 2**62, 2**62, 2**62, 0, 6], [0] * 6):
        pieces = {name: [column] for name, column in columns.items() if isinstance(column, torch.Tensor)}
        pieces["words"] = [columns["words"].values]  # type: ignore[union-attr]
        pieces["words#lengths"] = [torch.tensor(lengths)]
        header, chunks = tensor_file.encode(pieces, segment.header.metadata)
        file = path / str(segment.name)
        file.unlink()
        file.write_bytes(b"".join(bytes(chunk) for chunk in chunks))
        forged = Segment.open(path, segment.name, mapped=True)
        with pytest.raises(DamagedFileError, match="do not add up"):
            forged.read()
        with pytest.raises(DamagedFileError, match="do not add up"):
            _ = forged.columns
        assert header == forged.header
    pieces["words#lengths"] = [torch.arange(6, dtype=torch.int32) % 3]
    file.unlink()
    file.write_bytes(b"".join(map(bytes, tensor_file.encode(pieces, segment.header.metadata)[1])))
    with pytest.raises(DamagedFileError, match="not int64 per row"):
        Segment.open(path, segment.name, mapped=True)


def test_bytes_of_bools_are_checked(path: Path) -> None:
    header, chunks = tensor_file.encode({"x": [torch.tensor([0, 1, 2, 255], dtype=torch.uint8)]}, {})
    data = b"".join(bytes(chunk) for chunk in chunks)
    at = len(tensor_file._BEFORE_CHECKSUM)
    text = data[8 : header.entries["x"].begin].replace(b'"U8"', b'"BOOL"')[:-2]
    text = text[:at] + b"00000000" + text[at + 8 :]
    text = text[:at] + f"{zlib.crc32(text):08x}".encode() + text[at + 8 :]
    file = path / "forged"
    file.write_bytes(data[:8] + text + data[header.entries["x"].begin :])
    descriptor, size = open_once(file)
    entry = tensor_file.read_header(descriptor, size).entries["x"]
    assert entry.dtype == torch.bool
    with pytest.raises(DamagedFileError, match="neither 0 nor 1"):
        tensor_file.read_tensor(descriptor, "x", entry)


def test_foreign_names_are_left_alone(path: Path) -> None:
    strange = ["manifest-1.json", "x.rows", "000000000000006-000000000000003.0badcafe-1.rows", "état", "a\nb"]
    for name in strange:
        (path / name).write_bytes(b"{}")
    (path / "000000000000006-000000000000009.0badcafe-1.rows").mkdir()
    load_all(path)
    assert Folder(path).recover() == range(6)
    with Folder(path, write=True) as folder:
        folder.load()
        folder.publish(None)
    assert set(strange) <= set(os.listdir(path))


@pytest.mark.parametrize("damaged", [".state", ".rows", ".json"])
def test_the_older_version_is_loaded_and_what_is_lost_is_said(damaged: str, path: Path) -> None:
    with Folder(path, write=True) as folder:
        folder.load()
        folder.append(rows(6, 9))
        folder.publish("new", {"state": torch.ones(3)})
    others = {".json": "2.json", ".state": "02.", ".rows": "009."}[damaged]
    file = next(path / name for name in os.listdir(path) if damaged in name and others in name)
    data = bytearray(file.read_bytes())
    data[-2] ^= 1  # in the rows: nothing but reading them finds it
    file.write_bytes(data)
    with pytest.warns(
        RuntimeWarning, match=rf"version 1 \(rows 0 to 5\) was loaded.* lost: version 2: {file.name}"
    ):
        load_all(path)
    folder = Folder(path, write=True)
    with pytest.raises(DamagedFileError, match=f"version 2: {file.name}"):
        folder.load_with(lambda loaded: folder.read_rows(), strict=True)
    with contextlib.closing(folder), pytest.warns(RuntimeWarning, match="was loaded"):
        folder.load_with(lambda loaded: folder.read_rows())
    with pytest.raises(ValueError, match="is closed"):
        folder.publish(None)
    with Folder(path, write=True) as again, pytest.warns(RuntimeWarning, match="was loaded"):
        again.load_with(lambda loaded: again.read_rows())
        again.append(rows(6, 8))  # goes on from the older one: the newer one is known to be lost
        again.publish("third", {})
    assert Folder(path).load(strict=True).json == "third"


def test_a_damaged_part_is_not_merged(path: Path) -> None:
    with Folder(path, write=True, segment_rows=8) as folder:
        folder.load()
        file = path / str(folder.segments[0].name)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.warns(RuntimeWarning, match="the checksum of .* is wrong; it is left as it is"):
            folder.append(rows(6, 9))
        check_rows(folder.read_rows(6, 9), 6, 9)
        with pytest.raises(DamagedFileError, match=file.name):
            folder.read_rows()


def test_no_pickle_is_read_or_written() -> None:
    room = Path(__file__).parents[2] / "src" / "flatroll" / "disk"
    for file in room.rglob("*.py"):
        text = file.read_text()
        assert not any(
            word in text for word in ("import pickle", "torch.load", "torch.save", "eval(", "allow_pickle")
        )
