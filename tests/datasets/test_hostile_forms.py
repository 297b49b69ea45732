"""Files that were made to do harm by what they claim or name: no code is run, no memory is taken."""

import io
import json
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from set_files import rlds, saved, trajectory, write_archive, write_trials
from tensordict import TensorDict

from flatroll.datasets import read_gen_dgrl, read_rlds, read_roboset, read_vd4rl
from flatroll.datasets.formats.gen_dgrl import load_arrays
from flatroll.datasets.formats.npy import ArrayStream
from flatroll.export import export, import_arrow, import_lerobot, import_pandas, import_parquet, read_lerobot

# -- pickles, written step by step -------------------------------------------------------------------------------------

DICT, NAME = b"\x80\x04}", b"\x8c\x01a"  # an empty dict, and the text "a"
NDARRAY, ENCODE, DTYPE = b"cnumpy\nndarray\n", b"c_codecs\nencode\n", b"cnumpy\ndtype\n"
PICKLES = {
    # The class itself would make an array of any bytes: of objects, they would be addresses.
    "an array of bytes": ENCODE + b"(" + NAME + NDARRAY + b"((K\x08t\x8c\x02u1C\x08AAAAAAAAtRtR.",
    "memory as it was": DICT + NAME + NDARRAY + b"((K\x09tt" + b"Rs.",
    "a new object of the class": DICT + NAME + NDARRAY + b"K\x09\x85\x81s.",
    "a far place of the memo": b"\x80\x04Nr\x88\x13\x00\x00.",  # 5000, of at most 4096
    "other defaults of a function": b"\x80\x04" + ENCODE + b"N}\x8c\x0c__defaults__)s\x86b.",
    "attributes of a function": b"\x80\x04" + ENCODE + b"}" + NAME + b"K\x01sb.",
    "attributes of a class": b"\x80\x04" + DTYPE + b"}" + NAME + b"K\x01sb.",
    "a tuple 5000 deep": DICT + b")" + b"\x85" * 5000 + b"K\x01s.",  # of at most 4096 steps
    "an extension's code": b"\x80\x04\x82\x01.",
    "an instance": b"(inumpy\nndarray\n.",
    "an object": b"(" + NDARRAY + b"o.",
    "a buffer from outside": b"\x80\x05\x97.",
    "bytes that can be changed": b"\x80\x05\x96\x01\0\0\0\0\0\0\0x.",
    "an id": b"Pother\n.",
    "NumPy's own loader": b"\x80\x04cnumpy\nload\n\x8c\x01x\x85R.",
    "a builtin": b"\x80\x04cbuiltins\neval\n\x8c\x011\x85R.",
    "names by parts": b"\x80\x04\x8c\x05numpy\x8c\x0cndarray.dump\x93.",
}


def objects(content: bytes) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": ()})
    return file.getvalue() + content


@pytest.mark.parametrize("what", PICKLES)
def test_pickles_that_reach_for_more_than_arrays(what: str) -> None:
    with pytest.raises(pickle.UnpicklingError):
        load_arrays(objects(PICKLES[what]), "set", 10_000)


def test_a_pickle_of_many_steps_is_not_run() -> None:
    with pytest.raises(pickle.UnpicklingError, match="at step 4096"):
        load_arrays(saved({"rewards": [1.5] * 5000}), "set", 1 << 20)
    header = saved({})[: saved({}).index(b"\n") + 1]
    with pytest.raises(pickle.UnpicklingError, match="LONG_BINPUT at step 2"):  # memory for 65,535 places
        load_arrays(header + b"\x80\x02}r\xff\xff\x00\x00.", "set", 1 << 20)


def test_a_pickle_changes_nothing_for_the_next_one() -> None:
    for content in PICKLES.values():
        with pytest.raises(pickle.UnpicklingError):
            load_arrays(objects(content), "set", 10_000)
    value = np.array(trajectory(3), dtype=object)
    for protocol in (0, 2, 3, 4):
        found = load_arrays(objects(pickle.dumps(value, protocol)), "set", 10_000)
        assert found["actions"].tolist() == [0, 1, 2]


def test_one_array_under_many_names_counts_each_time() -> None:
    array = np.zeros(1000, np.uint8)
    many = {f"name{number}": array for number in range(20)}
    assert len(saved(many)) < 5000
    assert len(load_arrays(saved(many), "set", 20_000)) == 20
    with pytest.raises(pickle.UnpicklingError, match="more than max_bytes=19999"):
        load_arrays(saved(many), "set", 19_999)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_names_of_members_that_claim_gigabytes(tmp_path: Path, kind: bytes) -> None:
    """tarfile reads such a name whole, however long it says that it is."""
    member = tarfile.TarInfo("0.npy")
    member.type, member.size = kind, 8 << 30
    (tmp_path / "set.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    with pytest.raises(ValueError, match="a name of 8589934592 bytes"):
        list(read_gen_dgrl(tmp_path / "set.tar"))
    long = write_archive(tmp_path / "long.tar.xz", {"a" * 300 + ".npy": saved(trajectory(2))})
    assert [len(episode) for episode in read_gen_dgrl(long)] == [2]


# -- rows of nothing, of which a file of a few bytes can claim any number ----------------------------------------------


def test_rows_without_bytes_are_counted(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "|u1", "fortran_order": False, "shape": (1 << 60, 0)}
    )
    file.seek(0)
    with pytest.raises(ValueError, match="claims 1152921504606846976 bytes"):
        ArrayStream(file, "steps", 1 << 30)


def test_hdf5_rows_without_bytes(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    write_trials(tmp_path / "0.h5")
    with h5py.File(tmp_path / "0.h5", "a") as file:
        for name in ("observations", "actions", "rewards"):
            del file[f"Trial1/{name}"]
            file.create_dataset(f"Trial1/{name}", (1 << 40, 0), "f4")
        del file["Trial1/done"], file["Trial1/env_infos"]
    with pytest.raises(ValueError, match="'rewards' must be one number per row"):
        list(read_roboset(tmp_path / "0.h5"))
    with h5py.File(tmp_path / "1.h5", "w") as file:
        for name in ("image", "action", "is_first"):
            file.create_dataset(name, (1 << 40, 0, 1, 1), "u1")
    with pytest.raises(ValueError, match=r"must be images \[N, H, W, C\]"):
        list(read_vd4rl(tmp_path / "1.h5"))


def test_damaged_hdf5_files_are_named(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "0.h5", "w") as file:
        file["x"] = np.ones(4)
        file.create_group(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not a valid name"):
        list(read_roboset(tmp_path / "0.h5"))


# -- LeRobot folders ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this library; without ``meta/flatroll*`` it is one of LeRobot."""
    for library in ("pyarrow", "PIL"):
        pytest.importorskip(library)
    source = torch.cat(list(read_rlds(rlds())))
    pictures = torch.arange(6 * 48).view(6, 4, 4, 3).to(torch.uint8)
    source["pixels"], source["next", "pixels"] = pictures[:5], pictures[1:]
    source["next", "pixels"][2] = 7  # the first episode's last one
    folder = tmp_path_factory.mktemp("lerobot") / "set"
    export(source, folder, "lerobot")
    return folder


@pytest.fixture
def foreign(lerobot: Path, tmp_path: Path) -> Path:
    shutil.copytree(lerobot, tmp_path / "foreign")
    for name in ("flatroll.json", "flatroll_last.parquet"):
        (tmp_path / "foreign/meta" / name).unlink()
    return tmp_path / "foreign"


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_text())
    path.write_text(json.dumps(change(value) or value))


FEATURES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no features": (lambda info: info.pop("features") and info, "does not list its columns"),
    "no dict": (lambda info: ["v3.0"], "is LeRobot None, not v3"),
    "no shape": (lambda info: info["features"]["action"].pop("shape") and info, "needs a dtype and a shape"),
    "negative shape": (lambda info: info["features"]["action"].update(shape=[-1]), "needs a dtype and a"),
    "other shape": (lambda info: info["features"]["action"].update(shape=[3]), r"action must have \[3\]"),
    "large shape": (lambda info: info["features"]["action"].update(shape=[1 << 30]), "claims .* max_bytes"),
    "five channels": (
        lambda info: info["features"]["observation.pixels"].update(shape=[4, 4, 5]),
        "1, 3 or 4 channels",
    ),
}


@pytest.mark.parametrize("what", FEATURES)
def test_lerobot_columns_that_are_not_what_the_folder_says(foreign: Path, what: str) -> None:
    change, text = FEATURES[what]
    edit(foreign / "meta/info.json", change)
    with pytest.raises(ValueError, match=text):
        import_lerobot(foreign)


def test_lerobot_text_that_nests_or_is_none(foreign: Path) -> None:
    for text in ("[" * 2000, "{", "\udcff"):
        (foreign / "meta/info.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=r"info\.json cannot be read"):
            import_lerobot(foreign)
    with open(foreign / "meta/info.json", "wb") as file:
        file.truncate(1 << 40)  # a file of holes, which takes no disk
    with pytest.raises(ValueError, match="more than 67108864"):
        import_lerobot(foreign)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"length": -1}, "an episode needs"),
        ({"length": None}, "an episode needs"),
        ({"data/file_index": "../../../etc/passwd"}, "an episode needs"),
        ({"length": 1 << 50}, "claims .* bytes, more than max_bytes"),
    ],
)
def test_lerobot_episodes_that_are_none(foreign: Path, changed: dict[str, Any], text: str) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    file = foreign / "meta/episodes/chunk-000/file-000.parquet"
    episodes = [{**episode, **changed} for episode in parquet.read_table(file).to_pylist()]
    parquet.write_table(pyarrow.Table.from_pylist(episodes), file)
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        import_lerobot(foreign)


def test_lerobot_files_that_would_take_more_than_asked(lerobot: Path, foreign: Path) -> None:
    assert len(list(read_lerobot(lerobot, max_bytes=1 << 20))) == 2
    with pytest.raises(ValueError, match=r"row group 0 takes .* more than max_bytes=200"):
        list(read_lerobot(foreign, max_bytes=200))
    (foreign / "data/chunk-000/file-000.parquet").write_text("no Parquet file")
    with pytest.raises(ValueError, match=r"file-000\.parquet cannot be read"):
        import_lerobot(foreign)
    shutil.rmtree(foreign / "meta/episodes")
    with pytest.raises(FileNotFoundError, match="meta/episodes"):
        import_lerobot(foreign)


@pytest.mark.parametrize("read", [import_parquet, import_pandas])
def test_tables_that_stand_for_more_than_their_bytes(read: Callable[..., Any], tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    table = pyarrow.table({"x": np.zeros(200_000, np.int64)})
    parquet.write_table(table, tmp_path / "rows", row_group_size=100_000)
    assert (tmp_path / "rows").stat().st_size < 3000
    with pytest.raises(ValueError, match="row group 0 takes 800000 bytes, more than max_bytes=799999"):
        read(tmp_path / "rows", max_bytes=799_999)
    with pytest.raises(ValueError, match="the rows take more than max_bytes=1599999"):
        read(tmp_path / "rows", max_bytes=1_599_999)
    assert len(read(tmp_path / "rows", max_bytes=1_600_000)) == len(read(tmp_path / "rows")) == 200_000
    (tmp_path / "rows").write_text("no Parquet file")
    with pytest.raises(ValueError, match="rows cannot be read"):
        read(tmp_path / "rows")


def test_record_batches_that_are_more_than_asked(tmp_path: Path) -> None:
    export(TensorDict({"x": torch.arange(1000.0)}, [1000]), tmp_path / "rows", "arrow", chunk_rows=500)
    with pytest.raises(ValueError, match="the rows take more than max_bytes=3999"):
        import_arrow(tmp_path / "rows", max_bytes=3999)
    again = import_arrow(tmp_path / "rows", max_bytes=4000)
    size = (tmp_path / "rows").stat().st_size
    with (tmp_path / "rows").open("r+b") as file:  # the same file, of the same length
        file.write(bytes(size))
    assert again["x"].tolist() == list(range(1000))  # a copy, no view of the file


def test_lerobot_images_that_are_none(foreign: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    file = foreign / "data/chunk-000/file-000.parquet"
    frames = parquet.read_table(file)
    place = frames.column_names.index("observation.pixels")
    kind = frames.schema.field(place).type
    for cell, text in [
        ({"bytes": None, "path": "/etc/passwd"}, "outside the file"),
        ({"bytes": b"no image", "path": None}, "an image that cannot be read"),
    ]:
        cells = pyarrow.array([cell] * len(frames), kind)
        parquet.write_table(frames.set_column(place, "observation.pixels", cells), file)
        with pytest.raises(ValueError, match=text):
            import_lerobot(foreign)


RECORDS: dict[str, Callable[[Any], Any]] = {
    "an object's dtype": lambda fields: fields[0].update(dtype="O"),
    "a wide text": lambda fields: fields[0].update(dtype="S1000000000"),
    "no key": lambda fields: fields[0].pop("key") and fields,
    "no image": lambda fields: fields[0].pop("image", 0) or fields,
    "no list": lambda fields: {"a": 1},
    "a next entry alone": lambda fields: [field for field in fields if field["key"] != ["pixels"]],
    "another column": lambda fields: fields[0].update(column="other"),
    "another shape": lambda fields: fields[0].update(shape=[7]),
    "another last one": lambda fields: (
        [field | ({"shape": [1], "column": "action"} if field["key"] == ["x"] else {}) for field in fields]
        + [dict(fields[0], key="z"), dict(fields[0], key="next.z", next=True)]
    ),
}


@pytest.mark.parametrize("what", RECORDS)
def test_notes_that_export_did_not_write(lerobot: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(lerobot, tmp_path / "set")
    edit(tmp_path / "set/meta/flatroll.json", RECORDS[what])
    with pytest.raises(
        ValueError, match=r"not written by export|have no column|must have \[7\]|lacks the last z"
    ):
        import_lerobot(tmp_path / "set")
