"""XXH64, the checksum of large tensors, of pieces and in files."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from disk_recorder import check_rows, rows

from flatroll.disk import DamagedFileError, Folder, manifest, tensor_file


def xxh64(data: bytes, cuts: list[int]) -> int:
    """The checksum of data that come in pieces, at odd addresses."""
    memory = memoryview(b"-" + data)[1:]
    pieces = [memory[first:end] for first, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return tensor_file.compute_checksum("xxh64", pieces).value


@pytest.mark.parametrize(
    ("size", "expected"),  # as the xxHash of other programs says
    [
        (0, 0xEF46DB3751D8E999),
        (1, 0xE934A84ADB052768),
        (3, 0x9FF70A635A6209AB),
        (4, 0xAE5ACDC00A55AC41),
        (7, 0xD734A6B26F3DA63E),
        (8, 0x87116B3365B924EB),
        (15, 0x02C53AB1E360882F),
        (31, 0x0F187C62B1E722B7),
        (32, 0x91B0CB0931A8C629),
        (33, 0x931B043CF8D65B94),
        (63, 0x219110BF13E2FA26),
        (64, 0xBF3052E3445775D0),
        (101, 0x42312F4D55D9BD17),
    ],
)
def test_it_is_that_of_other_programs_wherever_the_bytes_are_cut(size: int, expected: int) -> None:
    data = bytes(i * 7 % 256 for i in range(size))
    assert xxh64(data, []) == expected
    for cut in range(size + 1):
        assert xxh64(data, [cut]) == expected
    rng = np.random.default_rng(size)
    for _ in range(20):
        assert xxh64(data, sorted(rng.integers(size + 1, size=4).tolist())) == expected


def save(path: Path) -> None:
    """Rows in a file that was merged of two of odd lengths, and a state."""
    with Folder(path, write=True, segment_rows=6) as folder:
        folder.append(rows(0, 3))
        folder.append(rows(3, 6))
        folder.publish(None, {"state": torch.arange(7.0)})


def load(path: Path) -> None:
    folder = Folder(path)
    loaded, got = folder.load_with(lambda loaded: (loaded, folder.read_rows()))
    assert torch.equal(loaded.tensors["state"], torch.arange(7.0))
    check_rows(got, 0, 6)


@pytest.mark.parametrize("ending", ["rows", "state"])
def test_a_flipped_bit_is_an_error(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "LARGE", 1)
    save(tmp_path)
    load(tmp_path)
    (file,) = tmp_path.glob(f"*.{ending}")
    data = file.read_bytes()
    assert b"xxh64" in data
    for position in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(DamagedFileError, match=file.name):
            load(tmp_path)


def test_large_tensors_have_it_and_are_checked_piece_by_piece(tmp_path: Path) -> None:
    column = torch.arange(400_000)  # read in four pieces, the last one short
    with Folder(tmp_path, write=True) as folder:
        folder.append({"large": column, "small": column[:1].expand(400_000) == 0})
        folder.append({"large": column[:3], "small": column[:3] == 0})
        folder.publish(None)
        kinds = [{n: e.checksum.kind for n, e in s.header.entries.items()} for s in folder.segments]
    assert kinds == [{"large": "xxh64", "small": "xxh64"}, {"large": "crc32", "small": "crc32"}]
    (file,) = tmp_path.glob("*-000000000400000.*")
    entry = folder.segments[0].header.entries["large"]
    read = Folder(tmp_path).load_with(lambda loaded: loaded.segments[0].read())["large"]
    assert isinstance(read, torch.Tensor) and torch.equal(read, column)
    for position in (0, 1 << 20, (3 << 20) - 1, entry.size - 1):
        data = bytearray(file.read_bytes())
        data[entry.begin + position] ^= 64
        file.write_bytes(data)
        with pytest.raises(DamagedFileError, match="the checksum of 'large' is wrong"):
            folder.segments[0].read()
        data[entry.begin + position] ^= 64
        file.write_bytes(data)
    assert set(folder.segments[0].read()) == {"large", "small"}  # as it was


def test_a_byte_that_is_no_bool_is_found_in_any_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = torch.zeros(200, dtype=torch.uint8)
    column[3] = 2
    with Folder(tmp_path, write=True) as folder:
        folder.append({"flag": column.view(torch.bool)})
        monkeypatch.setattr(tensor_file, "_AT_ONCE", 64)
        with pytest.raises(DamagedFileError, match="neither 0 nor 1"):
            folder.read_rows()


@pytest.mark.parametrize("of_state", [True, False])
def test_a_reader_that_does_not_know_it_names_the_version_to_install(
    of_state: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "small")  # of ragged columns, too
    fields = json.loads((tmp_path / "small" / "manifest-000000000001.json").read_text())
    assert fields["needs"] == ["ragged"]
    with Folder(tmp_path, write=True) as folder:
        small, large = torch.zeros(3), torch.zeros(tensor_file.LARGE)
        folder.append({"x": small if of_state else large})
        folder.publish(None, {"y": large if of_state else small})
    fields = json.loads((tmp_path / "manifest-000000000001.json").read_text())
    assert fields["needs"] == ["xxh64"]
    monkeypatch.setattr(manifest, "KNOWN_NEEDS", frozenset({"ragged"}))
    with pytest.raises(ValueError, match="needs xxh64, unknown here: install"):
        Folder(tmp_path).load()


def test_folders_of_before_are_read_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    assert b"xxh64" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    monkeypatch.setattr(tensor_file, "LARGE", 1)
    load(tmp_path)
    with contextlib.closing(Folder(tmp_path, write=True)) as folder:
        folder.load()
        folder.append(rows(6, 8))
        folder.publish(None)
    reader = Folder(tmp_path)
    reader.load()
    check_rows(reader.read_rows(), 0, 8)
