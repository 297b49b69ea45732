"""Broken files of sets, and such as were made to do harm: refused, nothing run, memory bounded."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from set_files import saved, trajectory, write_archive, write_atari

from flatroll.datasets import read_atari_dqn, read_gen_dgrl, read_roboset, read_vd4rl
from flatroll.datasets.formats.gen_dgrl import load_arrays
from flatroll.datasets.formats.npy import ArrayStream


def header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


OBJECT = header((), "|O")
RECONSTRUCT: Any = np.ones(1).__reduce__()[0]


class Run:
    """Its pickle makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_an_archive_is_not_run(tmp_path: Path) -> None:
    planted = tmp_path / "ran"
    for value in (Run(planted), {"observations": Run(planted)}, {"dones": np.array([Run(planted)], object)}):
        file = write_archive(tmp_path / "set.tar.xz", {"0.npy": saved(value)})
        with pytest.raises(
            pickle.UnpicklingError, match=r"mkdir does not belong to NumPy arrays: it was not executed"
        ):
            list(read_gen_dgrl(file))
        assert not planted.exists()


def test_arrays_of_any_numbers_are_read() -> None:
    arrays = {kind: np.array([1, 0, 1]).astype(kind) for kind in ("?", "i1", "u2", ">i4", "f2", "<f8", "c16")}
    for protocol in range(2, 5):
        data = OBJECT + pickle.dumps(np.array(arrays, dtype=object), protocol=protocol)
        found = load_arrays(data, "set", 1000)
        assert all(np.array_equal(found[kind], array) for kind, array in arrays.items())
        assert all(found[kind].dtype == array.dtype.newbyteorder("=") for kind, array in arrays.items())


def test_pickles_that_claim_more_than_they_have() -> None:
    whole = pickle.dumps({"a": np.ones(1000)}, protocol=4)
    with pytest.raises(pickle.UnpicklingError, match="more than max_bytes"):
        load_arrays(OBJECT + whole, "set", 7999)
    # One piece of bytes, many arrays of it.
    data = np.zeros(10_000, np.uint8).tobytes()
    state = (1, (10_000,), np.dtype("u1"), False, data)
    parts = [(RECONSTRUCT, (np.ndarray, (0,), b"b"), state) for _ in range(50)]

    class Array:
        def __init__(self, part: Any) -> None:
            self.part = part

        def __reduce__(self) -> Any:
            return self.part

    bomb = pickle.dumps({str(i): Array(part) for i, part in enumerate(parts)}, protocol=4)
    assert len(bomb) < 20_000
    with pytest.raises(pickle.UnpicklingError, match="more than max_bytes"):
        load_arrays(OBJECT + bomb, "set", 100_000)
    for wrong in (
        (1, (5,), np.dtype("u1"), False, b"1234"),
        (1, (2,), np.dtype([("a", "i4")]), False, b"12345678"),
        (1, (2,), "u1", False, b"12"),
    ):
        text = pickle.dumps({"a": Array((RECONSTRUCT, (np.ndarray, (9,), b"d"), wrong))})
        with pytest.raises((pickle.UnpicklingError, ValueError)):
            load_arrays(OBJECT + text, "set", 1000)


def test_a_pickle_that_is_cut_is_an_error() -> None:
    data = saved(trajectory(2))
    assert set(load_arrays(data, "set", 10_000)) == set(trajectory(2))
    for end in (len(OBJECT), len(OBJECT) + 40, len(data) // 2, len(data) - 1):
        with pytest.raises((ValueError, pickle.UnpicklingError), match="set"):
            load_arrays(data[:end], "set", 10_000)


def test_archives_with_links_and_large_members(tmp_path: Path) -> None:
    link = tarfile.TarInfo("0.npy")
    link.type, link.linkname = tarfile.SYMTYPE, "../../secret"
    with pytest.raises(ValueError, match="is a link"):
        list(read_gen_dgrl(write_archive(tmp_path / "a.tar.xz", {"0.npy": link})))
    file = write_archive(tmp_path / "b.tar.xz", {"0.npy": saved(trajectory(2)) + b"\0" * 100_000})
    assert file.stat().st_size < 1500
    with pytest.raises(ValueError, match="more than max_bytes=50000"):
        list(read_gen_dgrl(file, max_bytes=50_000))
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match="is damaged"):
        list(read_gen_dgrl(file))
    wrong = trajectory(3) | {"rewards": np.ones(2)}
    with pytest.raises(ValueError, match=r"T \+ 1 observations"):
        list(read_gen_dgrl(write_archive(tmp_path / "c.tar.xz", {"0.npy": saved(wrong)})))


def write_gzip(folder: Path, kind: str, content: bytes) -> None:
    with gzip.open(folder / f"$store$_{kind}_ckpt.0.gz", "wb") as file:
        file.write(content)


@pytest.mark.parametrize(
    "content, text",
    [
        (header((1 << 40, 84, 84)), "claims .* bytes, the maximum is"),
        (header((12, 6, 5)) + b"\1" * 100, "ends after row"),
        (header((3,), "|O") + pickle.dumps([1, 2, 3]), "must hold numbers"),
        (header((11, 6, 5)) + b"\1" * 330, "one row for each step"),
        (b"hello, world", "magic string|version"),
    ],
)
def test_atari_files_that_are_not_what_they_claim(tmp_path: Path, content: bytes, text: str) -> None:
    write_atari(tmp_path)
    write_gzip(tmp_path, "observation", content)
    with pytest.raises((ValueError, TypeError), match=text):
        list(read_atari_dqn(tmp_path))


def test_a_gzip_bomb_is_read_as_far_as_its_header_says(tmp_path: Path) -> None:
    """32 MiB of zeros behind an array of 12 rows take no memory."""
    write_atari(tmp_path)
    with gzip.open(tmp_path / "$store$_observation_ckpt.0.gz", "wb", compresslevel=1) as file:
        file.write(header((12, 6, 5)) + bytes(360))
        file.write(bytes(1 << 25))
    assert len(next(iter(read_atari_dqn(tmp_path)))) == 12


def test_atari_files_that_are_cut_or_missing(tmp_path: Path) -> None:
    write_atari(tmp_path)
    file = tmp_path / "$store$_reward_ckpt.7.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="damaged"):
        list(read_atari_dqn(tmp_path))
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"reward_ckpt.7.gz"):
        list(read_atari_dqn(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no"):
        list(read_atari_dqn(tmp_path / "empty"))


def test_npz_files_made_to_do_harm(tmp_path: Path) -> None:
    path = tmp_path / "0.npz"

    def write(**members: bytes) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(f"{name}.npy", content)

    cases: list[tuple[dict[str, bytes], str]] = [
        ({"image": header((1 << 40,))}, "claims"),
        ({"image": header((), "|O") + pickle.dumps(Run(tmp_path / "ran"))}, "must hold numbers"),
        ({"image": header((1 << 20,)) + bytes(1 << 20)}, "claims 1048576 bytes, the maximum is 100000"),
        ({"reward": header((2,)) + b"12", "action": header((2,)) + b"12"}, "has no 'image'"),
        ({"image": header((3,)) + b"123", "action": header((2,)) + b"12"}, "one row for each step"),
    ]
    for members, text in cases:
        write(**members)
        with pytest.raises((ValueError, TypeError, KeyError), match=text):
            list(read_vd4rl(path, max_bytes=100_000))
    assert not (tmp_path / "ran").exists()
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="is damaged"):
        list(read_vd4rl(path))


def test_links_out_of_a_folder(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.h5").symlink_to(tmp_path / "out.h5")
    with pytest.raises(ValueError, match="may lead out of the folder"):
        list(read_roboset(tmp_path / "in"))
    with h5py.File(tmp_path / "linked.h5", "w") as file:
        file.create_group("Trial0")["observations"] = h5py.ExternalLink("other.h5", "/x")
    with pytest.raises(ValueError, match="is a link"):
        list(read_roboset(tmp_path / "linked.h5"))
    with h5py.File(tmp_path / "short.h5", "w") as file:
        trial = file.create_group("Trial0")
        trial["observations"], trial["actions"], trial["rewards"] = np.ones(2), np.ones(3), np.ones(3)
    with pytest.raises(ValueError, match="3 actions, but other columns"):
        list(read_roboset(tmp_path / "short.h5"))


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ({"descr": "|O"}, "must hold numbers or bools, got object"),
        ({"descr": "<U3"}, "must hold numbers or bools, got <U3"),
        ({"descr": "<M8[s]"}, "must hold numbers or bools"),
        ({"descr": [("a", "<i4")]}, "must hold numbers or bools"),
        ({"fortran_order": True}, r"C order.*shape \(2, 3\), fortran=True"),
        ({"shape": ()}, r"C order.*shape \(\)"),
        ({"shape": (20, 3)}, "ends after row 0, its header says 20 rows"),
        ({"shape": (500, 3)}, "claims 1500 bytes, the maximum is 1000"),
    ],
)
def test_arrays_that_are_no_rows_of_numbers(about: dict[str, Any], text: str) -> None:
    file = io.BytesIO()
    fields = {"descr": "|u1", "fortran_order": False, "shape": (2, 3)}
    np.lib.format.write_array_header_1_0(file, {**fields, **about})
    with pytest.raises((ValueError, TypeError), match=text):
        ArrayStream(io.BytesIO(file.getvalue() + b"123456"), "a", 1000).read(20)


def test_other_versions_of_the_array_format() -> None:
    file = io.BytesIO()
    fields = {"descr": "|u1", "fortran_order": False, "shape": (2, 3)}
    np.lib.format.write_array_header_2_0(file, fields)
    rows = ArrayStream(io.BytesIO(file.getvalue() + b"123456"), "a", 1000).read(9)
    assert rows.tobytes() == b"123456" and rows.shape == (2, 3)
    with pytest.raises(ValueError, match="version"):
        ArrayStream(io.BytesIO(b"\x93NUMPY\x09\x00" + struct.pack("<H", 4) + b"{}  "), "a", 1000)
