"""Where sets are kept: options of the conversion, folders of others, two processes; and loaders over all of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from set_files import write_atari, write_d4rl, write_trials
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import DataLoader

from flatroll import export as module
from flatroll.buffers import DiskStorage, ReplayBuffer, SamplerWithoutReplacement
from flatroll.datasets import (
    AtariDQNExperienceReplay,
    BaseDatasetExperienceReplay,
    D4RLExperienceReplay,
    OpenMLExperienceReplay,
    RobosetExperienceReplay,
    convert,
)
from flatroll.disk import Folder

ROWS = 40


def steps(rows: int = ROWS) -> TensorDict:
    step = torch.arange(rows)
    return TensorDict(
        {
            "x": step,
            "is_init": (step % 5 == 0)[:, None],
            "collector": {"traj_ids": step // 5},
            "next": {"done": (step % 5 == 4)[:, None]},
        },
        [rows],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of ten rows."""
    path = tmp_path_factory.mktemp("places") / "set"
    convert([steps()], path, segment_bytes=10 * steps(1).bytes())
    return path


def d4rl(_: str, place: Path) -> None:
    write_d4rl(place / "0.hdf5")


def test_a_set_that_was_made_with_other_options_is_not_taken(tmp_path: Path) -> None:
    """Its rows are others: they would be wrong without a word."""
    pytest.importorskip("h5py")
    D4RLExperienceReplay("maze", root=tmp_path, fetch=d4rl)
    for options in ({"terminate_on_end": True}, {"use_truncated_as_done": False}):
        with pytest.raises(ValueError, match=r"was converted with options .*download='force'"):
            D4RLExperienceReplay("maze", root=tmp_path, **options)  # type: ignore[arg-type]
    assert len(D4RLExperienceReplay("maze", root=tmp_path, terminate_on_end=False)) == 7
    D4RLExperienceReplay("maze", root=tmp_path, fetch=d4rl, terminate_on_end=True, download="force")
    with pytest.raises(ValueError, match="was converted with options"):
        D4RLExperienceReplay("maze", root=tmp_path)
    games = AtariDQNExperienceReplay("Pong/1", root=tmp_path, fetch=lambda _, place: write_atari(place))
    assert len(games) == 24
    with pytest.raises(ValueError, match="frame_stack"):
        AtariDQNExperienceReplay("Pong/1", root=tmp_path, frame_stack={"observation": 4})


def test_a_set_of_another_kind_is_not_taken(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    D4RLExperienceReplay("maze", root=tmp_path, fetch=d4rl)
    with pytest.raises(
        ValueError, match="was converted with kind data set d4rl, but this call asks for data set roboset"
    ):
        RobosetExperienceReplay("maze", root=tmp_path)
    made = RobosetExperienceReplay("open", root=tmp_path, fetch=lambda _, place: write_trials(place / "0.h5"))
    changed = made.preprocess(lambda rows: rows.set("y", rows["seed"]))
    assert "y" in changed[:] and "y" in RobosetExperienceReplay("open", root=tmp_path)[:]


def test_only_folders_of_rows_are_replaced(folder: Path, tmp_path: Path) -> None:
    """`overwrite` removes what was there: it must not remove what somebody else keeps there."""
    (tmp_path / "home/work").mkdir(parents=True)
    (tmp_path / "home/work/thesis").write_text("years")
    (tmp_path / "file").write_text("mine")
    for name in ("home", "file"):
        with pytest.raises(FileExistsError, match="not a folder of rows, so it is not replaced"):
            convert([steps()], tmp_path / name, overwrite=True)
    assert (tmp_path / "home/work/thesis").read_text() == "years" and (
        tmp_path / "file"
    ).read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert convert([steps()], tmp_path / "empty") == ROWS
    (tmp_path / ".empty.old/rest").mkdir(parents=True)  # of a call that was killed while it replaced a folder
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert convert([steps(5)], tmp_path / "link", overwrite=True) == 5
    assert len(BaseDatasetExperienceReplay(tmp_path / "empty")) == 5 and (tmp_path / "link").is_symlink()
    file = next((tmp_path / "empty").glob("*.rows"))
    file.write_bytes(file.read_bytes()[:50])
    assert convert([steps(3)], tmp_path / "empty", overwrite=True) == 3  # a damaged one, too
    with pytest.raises(ValueError, match="for published sets"):
        BaseDatasetExperienceReplay(folder, download="force")


def test_folders_without_rows_are_no_sets(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="there is no data set"):
        BaseDatasetExperienceReplay(tmp_path / "empty")
    DiskStorage(10, tmp_path / "new").close()
    with pytest.raises((ValueError, FileNotFoundError), match=r"no rows|no data set"):
        BaseDatasetExperienceReplay(tmp_path / "new")
    pytest.importorskip("h5py")
    (tmp_path / "root/maze").mkdir(parents=True)  # as somebody made it by hand
    assert len(D4RLExperienceReplay("maze", root=tmp_path / "root", fetch=d4rl)) == 7


def test_a_root_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("h5py")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert D4RLExperienceReplay("maze", root="~/sets", fetch=d4rl).data_path == tmp_path / "sets/maze"
    assert D4RLExperienceReplay("maze", fetch=d4rl).data_path == tmp_path / ".cache/flatroll/d4rl/maze"


# -- two processes at once ---------------------------------------------------------------------------------------------


def test_a_set_that_another_process_makes_right_now(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    text = r"another process makes .*maze right now: open it when"
    with Folder(tmp_path / ".maze.part", write=True), pytest.raises(BlockingIOError, match=text):
        D4RLExperienceReplay("maze", root=tmp_path, fetch=d4rl)
    assert len(D4RLExperienceReplay("maze", root=tmp_path, fetch=d4rl)) == 7


def test_a_set_that_another_process_has_made_meanwhile(tmp_path: Path) -> None:
    """It is taken as it is: readers may have it open."""
    pytest.importorskip("h5py")

    times: list[int] = []
    first = True

    def outer(name: str, place: Path) -> None:
        nonlocal first
        d4rl(name, place)
        if first:
            first = False
            D4RLExperienceReplay("maze", root=tmp_path, fetch=outer)
            times.append((tmp_path / "maze").stat().st_ino)

    assert len(D4RLExperienceReplay("maze", root=tmp_path, fetch=outer)) == 7
    assert [(tmp_path / "maze").stat().st_ino] == times

    def meanwhile() -> Iterator[Any]:
        yield dict(steps().items(True, True))
        convert([steps(5)], tmp_path / "other")
        (tmp_path / "other").rename(tmp_path / "set")

    with pytest.raises(FileExistsError, match="set exists"):
        convert(meanwhile(), tmp_path / "set")
    assert len(BaseDatasetExperienceReplay(tmp_path / "set")) == 5


# -- loaders -----------------------------------------------------------------------------------------------------------


def test_each_pass_of_workers_that_persist_is_another_shuffle(folder: Path) -> None:
    rows = BaseDatasetExperienceReplay(folder, batch_size=4).as_dataset(shuffle=True)
    loader = DataLoader(
        rows,
        batch_size=None,
        collate_fn=rows.collate,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    passes = [torch.cat([batch["x"] for batch in loader]).tolist() for _ in range(2)]
    assert all(sorted(seen) == list(range(ROWS)) for seen in passes) and passes[0] != passes[1]


def test_files_are_shuffled_differently_and_alike_for_any_workers(folder: Path) -> None:
    rows = BaseDatasetExperienceReplay(folder, batch_size=10).as_dataset(shuffle=True)
    torch.manual_seed(0)
    files = [batch["x"].tolist() for batch in rows]
    assert len({tuple(x % 10 for x in file) for file in files}) == 4
    torch.manual_seed(0)
    assert [batch["x"].tolist() for batch in rows] != files  # the second pass
    again = BaseDatasetExperienceReplay(folder, batch_size=10).as_dataset(shuffle=True)
    torch.manual_seed(0)
    assert [batch["x"].tolist() for batch in again] == files
    assert [len(batch) for batch in BaseDatasetExperienceReplay(folder).as_dataset(batch_size=4)] == [
        4,
        4,
        2,
    ] * 4


def test_the_folder_of_a_ring_that_has_dropped_rows(tmp_path: Path) -> None:
    """Rows have numbers from 15 on in its files, and from 0 on in a buffer over it."""
    storage = DiskStorage(25, tmp_path / "ring", segment_bytes=5 * steps(1).bytes())
    ring = ReplayBuffer(storage=storage)
    for first in range(0, ROWS, 5):
        ring.extend(steps()[first : first + 5])
    storage.close()
    data = BaseDatasetExperienceReplay(tmp_path / "ring", batch_size=4)
    assert data[:]["x"].tolist() == list(range(15, ROWS))
    assert torch.cat([batch["x"] for batch in data.as_dataset()]).tolist() == list(range(15, ROWS))
    for chunks in (None, 3):
        changed = data.preprocess(with_y, dest=tmp_path / f"changed{chunks}", num_chunks=chunks)
        assert changed[:]["x"].tolist() == changed[:]["y"].tolist() == list(range(15, ROWS))
    few = data.preprocess(with_y, dest=tmp_path / "few", num_frames=7)
    assert few[:]["x"].tolist() == list(range(15, 22))


def test_a_folder_that_begins_within_a_file(tmp_path: Path) -> None:
    convert([steps()], tmp_path / "set")
    with Folder(tmp_path / "set", write=True) as folder:
        loaded = folder.load()
        folder.publish(loaded.json, extra=loaded.extra, head=3)
        assert (folder.head, folder.segments[0].first) == (3, 0)
    data = BaseDatasetExperienceReplay(tmp_path / "set", batch_size=10)
    assert torch.cat([batch["x"] for batch in data.as_dataset()]).tolist() == list(range(3, ROWS))
    assert data.preprocess(with_y, dest=tmp_path / "y")[:]["y"].tolist() == list(range(3, ROWS))


def with_y(rows: TensorDictBase) -> TensorDictBase:
    return rows.set("y", rows["x"])


def test_samplers_begin_anew_with_the_rows_that_preprocess_left(tmp_path: Path) -> None:
    convert([steps()], tmp_path / "set", segment_bytes=10 * steps(1).bytes())
    data = BaseDatasetExperienceReplay(
        tmp_path / "set", batch_size=4, sampler=SamplerWithoutReplacement(), prefetch=2
    )
    data.sample()
    data.preprocess(with_y, num_frames=10)
    seen = torch.cat([data.sample()["y"] for _ in range(3)])
    assert len(data) == 10 and sorted(seen.tolist()) == list(range(10))


# -- export ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["parquet", "arrow", "pandas", "h5"])
def test_not_a_number_keeps_its_bits(format: str, tmp_path: Path) -> None:
    """There are many, and pandas' files have gaps in their place unless told not to."""
    for library in ("pyarrow", "pandas", "h5py"):
        pytest.importorskip(library)
    bits = torch.tensor([0x7FC00001, -0x400000, 0x7F800001, 0x7F800000, -0x80000000], dtype=torch.int64)
    values = bits.to(torch.int32).view(torch.float32)
    batch = TensorDict({"one": values, "few": values.repeat(5, 2), "many": values.repeat(5, 10)}, [5])
    module.export(batch, tmp_path / "rows", format)
    again = getattr(module, f"import_{format}")(tmp_path / "rows")
    for key in ("one", "few", "many"):
        assert torch.equal(again[key].view(torch.int32), batch[key].view(torch.int32)), key


def test_names_and_numbers_that_a_file_does_not_have(tmp_path: Path) -> None:
    for library in ("pyarrow", "pandas", "h5py"):
        pytest.importorskip(library)
    with pytest.raises(ValueError, match="'_first_rows' has the name that the file uses"):
        module.export(steps().set("_first_rows", torch.arange(ROWS)), tmp_path / "rows", "h5")
    with pytest.raises(TypeError, match="'wave' is complex"):
        module.export(
            steps().set("wave", torch.ones(ROWS, dtype=torch.complex64)), tmp_path / "rows", "pandas"
        )
    assert not list(tmp_path.iterdir())


def test_arguments_that_would_be_found_wrong_too_late(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="takes no argument fech;"):
        D4RLExperienceReplay("maze", root=tmp_path, fech=d4rl)  # type: ignore[call-arg]
    pytest.importorskip("pyarrow")
    rows = steps().set("observation", steps()["x"].float()).set(("next", "observation"), steps()["x"] + 1.0)
    for fps in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"fps must lie in \(0, inf\)"):
            module.export(rows, tmp_path / "rows", "lerobot", fps=fps)
    rows["wild"] = torch.tensor([torch.inf, 1e38, torch.nan, -torch.inf]).double().pow(5).repeat(ROWS // 4)
    module.export(rows, tmp_path / "rows", "lerobot")  # warns of nothing
    again = module.import_lerobot(tmp_path / "rows")["wild"]
    assert torch.equal(again.view(torch.int64), rows["wild"].view(torch.int64))


def test_the_largest_label_is_that_of_the_table(tmp_path: Path) -> None:
    for library in ("sklearn", "pandas"):
        pytest.importorskip(library)
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"age": [1.0, 2.0]}), pandas.Series(["no", "yes"])
    without_label = OpenMLExperienceReplay(
        "magic", 2, root=tmp_path, fetch=lambda *_: table, transform=lambda batch: batch.exclude("y")
    )
    assert without_label.max_outcome_val == 1


@pytest.mark.parametrize(
    "note", ["[", "[[1]]", '"x"', "[-1]", "[" * 100_000, '{"flatroll": {"x": ["O", [1]]}}']
)
def test_notes_of_shapes_that_are_none(tmp_path: Path, note: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pandas")
    parquet = pytest.importorskip("pyarrow.parquet")
    field = pyarrow.field("x", pyarrow.int64(), metadata={"flatroll": note})
    schema = pyarrow.schema([field], metadata={"PANDAS_ATTRS": note})
    parquet.write_table(pyarrow.table([pyarrow.array([1, 2])], schema=schema), tmp_path / "rows")
    for read, text in (
        (module.import_parquet, "does not record the shape"),
        (module.import_pandas, "does not record the dtypes"),
    ):
        with pytest.raises(ValueError, match=text) as caught:
            read(tmp_path / "rows")
        assert str(tmp_path / "rows") in caught.value.__notes__[0]
