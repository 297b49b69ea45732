"""Converted folders as replay buffers: sampling, preprocessing, handing out to loaders, and what may go wrong."""

from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import DataLoader

from flatroll.buffers import (
    DiskStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from flatroll.datasets import (
    BaseDatasetExperienceReplay,
    D4RLExperienceReplay,
    TrajectoryReplayBuffer,
    convert,
    fetch_url,
)
from flatroll.disk import DamagedFileError
from flatroll.disk.inspect import inspect_folder
from flatroll.export import export
from flatroll.layout import audit

LENGTHS = [3, 1, 5, 2, 4, 6, 2, 3]
ROWS = sum(LENGTHS)


def episode(number: int, *, truncated: bool = False, known: bool = True) -> TensorDict:
    """Observations are (episode, step), pixels a function of both."""
    length = LENGTHS[number]
    steps = torch.arange(length + 1)
    seen = torch.stack([torch.full_like(steps, number), steps], 1).float()
    pixels = (seen.sum(1).view(-1, 1, 1) + torch.arange(16).view(4, 4)).to(torch.uint8)
    over = torch.zeros(length, 1, dtype=torch.bool)
    over[-1] = True
    return TensorDict(
        {
            "observation": seen[:-1],
            "pixels": pixels[:-1],
            "action": steps[:-1],
            "is_init": (steps[:-1] == 0)[:, None],
            "collector": {"traj_ids": torch.full((length,), number)},
            "next": {
                "observation": seen[1:],
                "pixels": pixels[1:],
                "reward": steps[1:, None].float(),
                "terminated": over,
                "truncated": torch.zeros_like(over),
                "done": over,
            },
        },
        [length],
    )


def episodes() -> Iterator[TensorDict]:
    return map(episode, range(len(LENGTHS)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in several segments, whose bounds are not those of episodes."""
    path = tmp_path_factory.mktemp("sets") / "walks"
    whole = torch.cat(list(episodes()))
    assert convert(episodes(), path, segment_bytes=5 * whole[:1].bytes()) == ROWS
    return path


def same(left: TensorDictBase, right: TensorDictBase) -> bool:
    return set(left.keys(True, True)) == set(right.keys(True, True)) and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key])
        for key in left.keys(True, True)
    )


def test_rows_come_back_bit_by_bit_each_observation_stored_once(folder: Path) -> None:
    data = BaseDatasetExperienceReplay(folder)
    assert len(data) == ROWS and data.data_path == folder
    rows, whole = data[:], torch.cat(list(episodes()))
    assert same(rows, whole) and not audit(rows)
    files = list(folder.glob("*.rows"))
    assert len(files) > 3
    assert data.storage.compact_obs


@pytest.mark.parametrize("options", [{}, {"codec": {"pixels": "zstd"}}], ids=["plain", "zstd"])
def test_any_number_of_rows_and_episodes_in_a_segment(
    tmp_path: Path, options: dict[str, dict[str, str]]
) -> None:
    for number, size in enumerate([1, 100, 333, 1 << 20]):
        convert(episodes(), tmp_path / str(number), segment_bytes=size, **options)  # type: ignore[arg-type]
        assert same(BaseDatasetExperienceReplay(tmp_path / str(number))[:], torch.cat(list(episodes())))


def test_n_step_rows_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = torch.cat(list(episodes()))
    rows["next", "observation"] = rows["next", "observation"] + 0.5
    rows["next", "pixels"] = rows["next", "pixels"] + 1
    convert([rows], tmp_path / "set")
    data = BaseDatasetExperienceReplay(tmp_path / "set")
    assert not data.storage.compact_obs and same(data[:], rows)


def test_any_sampler_draws_and_slices_stay_in_their_episode(folder: Path) -> None:
    for sampler in (RandomSampler(), SamplerWithoutReplacement()):
        data = BaseDatasetExperienceReplay(folder, batch_size=8, sampler=sampler)
        batch = data.sample()
        assert batch.batch_size == (8,) and torch.equal(batch["action"], batch["observation"][:, 1].long())
        assert same(data[batch["index"]].exclude("is_init"), batch.exclude("index", "is_init"))
    sampler = SliceSampler(slice_len=2, strict_length=True)
    data = BaseDatasetExperienceReplay(folder, batch_size=64, sampler=sampler)
    pairs = data.sample()["observation"].view(32, 2, 2)
    assert torch.equal(pairs[:, 1], pairs[:, 0] + torch.tensor([0.0, 1.0]))
    passes = list(BaseDatasetExperienceReplay(folder, 4, sampler=SliceSamplerWithoutReplacement(slice_len=2)))
    assert passes


def test_whole_trajectories_padded(folder: Path) -> None:
    data = BaseDatasetExperienceReplay(folder, batch_size=50, split_trajs=True)
    batch = data.sample()
    assert batch.batch_size[0] == 50
    lengths, mask = batch["collector", "mask"].sum(-1), batch["collector", "mask"]
    assert torch.equal(lengths, torch.tensor(LENGTHS)[batch["observation"][:, 0, 0].long()])
    assert bool(batch["is_init"][:, 0].all()) and bool(mask[:, 0].all())
    assert data.sample(3).batch_size[0] == 3
    rows = torch.cat(list(episodes())).exclude("collector")
    convert([rows], folder.parent / "no_ids")
    with pytest.raises(ValueError, match="split_trajs needs"):
        BaseDatasetExperienceReplay(folder.parent / "no_ids", split_trajs=True)


def test_transforms_prefetch_collate_and_ensembles(folder: Path) -> None:
    data = BaseDatasetExperienceReplay(
        folder,
        batch_size=4,
        prefetch=2,
        pin_memory=True,
        generator=torch.Generator().manual_seed(3),
        transform=lambda batch: batch.set("twice", 2 * batch["action"]),
    )
    assert torch.equal((batch := data.sample())["twice"], 2 * batch["action"])
    both = ReplayBufferEnsemble(
        BaseDatasetExperienceReplay(folder), BaseDatasetExperienceReplay(folder), batch_size=8
    )
    assert both.sample().batch_size.numel() == 8


def test_nothing_can_be_written(folder: Path) -> None:
    data = BaseDatasetExperienceReplay(folder)
    for change in (lambda: data.extend(episode(0)), lambda: data.add(episode(0)[0]), data.empty):
        with pytest.raises(RuntimeError, match="immutable"):
            change()
    with pytest.raises(RuntimeError, match="immutable"):
        data[0] = episode(0)[0]


# -- preprocess --------------------------------------------------------------------------------------------------------


def with_norm(rows: TensorDictBase) -> TensorDictBase:
    return rows.set("norm", rows["observation"].norm(dim=-1)).exclude("pixels", ("next", "pixels"))


def test_preprocess_gives_a_new_set(folder: Path, tmp_path: Path) -> None:
    data = BaseDatasetExperienceReplay(folder, batch_size=4)
    expected = with_norm(torch.cat(list(episodes())))
    changed = data.preprocess(with_norm, dest=tmp_path / "new")
    assert same(changed[:], expected) and "norm" in changed.sample() and "norm" not in data.sample()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert len(data.preprocess(with_norm, dest=tmp_path / "less", num_frames=10)) == 10
    pieces = data.preprocess(with_norm, dest=tmp_path / "pieces", num_chunks=3)
    assert same(pieces[:], expected) and len(list((tmp_path / "pieces").glob("*.rows"))) == 3
    with pytest.raises(FileExistsError, match="new exists"):
        data.preprocess(with_norm, dest=tmp_path / "new")


def test_preprocess_keeps_what_is_compressed(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    convert(episodes(), tmp_path / "set", codec={"pixels": "zstd"})
    data = BaseDatasetExperienceReplay(tmp_path / "set")
    changed = data.preprocess(lambda rows: rows.set("x", rows["action"]), dest=tmp_path / "new")
    assert changed.storage.codec == data.storage.codec and same(changed[:].exclude("x"), data[:])  # type: ignore[attr-defined]


def test_preprocess_in_the_set_s_own_place(tmp_path: Path) -> None:
    """Made again, a set is the one that was changed."""
    convert(episodes(), tmp_path / "set")
    data = BaseDatasetExperienceReplay(tmp_path / "set", batch_size=4)
    data.preprocess(with_norm)
    assert "norm" in data.sample()
    assert "norm" in BaseDatasetExperienceReplay(tmp_path / "set", batch_size=4).sample()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_preprocess_in_processes_goes_on_where_it_was_stopped(folder: Path, tmp_path: Path) -> None:
    """A function that fails once, in a piece in the middle; the pieces that are done are not made again."""
    failed = tmp_path / "failed"
    log, data = tmp_path / "log", BaseDatasetExperienceReplay(folder)

    def number(rows: TensorDictBase) -> TensorDictBase:
        row = int(rows["observation"][0, 0] * 100 + rows["observation"][0, 1])
        with open(log, "a") as file:
            file.write(f"{row}\n")
        if len(log.read_text().split()) >= 3 and not failed.exists():  # two processes may append at once
            failed.touch()
            raise OSError("the disk is full, say")
        return rows.set("row", torch.full((len(rows),), row))

    with pytest.raises(OSError, match="full, say"):
        data.preprocess(number, 2, dest=tmp_path / "new", mp_start_method="fork")
    assert not (tmp_path / "new").exists()
    done = len(list((tmp_path / ".new.parts").glob("[0-9]*")))
    before = log.read_text().split()
    assert done >= 1
    changed = data.preprocess(number, 2, dest=tmp_path / "new", mp_start_method="fork")
    files = len(list(folder.glob("*.rows")))
    assert len(log.read_text().split()) - len(before) == files - done
    assert same(changed[:].exclude("row"), data[:].exclude("index"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed", "log", "new"]


def test_pieces_of_another_function_are_not_taken(folder: Path, tmp_path: Path) -> None:
    data = BaseDatasetExperienceReplay(folder)

    def fails(rows: TensorDictBase) -> TensorDictBase:
        if int(rows["collector", "traj_ids"][0]) > 0:
            raise OSError("stop")
        return rows.set("x", rows["action"] + 1)

    with pytest.raises(OSError, match="stop"):
        data.preprocess(fails, dest=tmp_path / "new")
    changed = data.preprocess(lambda rows: rows.set("x", rows["action"] + 2), dest=tmp_path / "new")
    assert torch.equal(changed[:]["x"], changed[:]["action"] + 2)


@pytest.mark.parametrize(
    "function, text",
    [
        (lambda rows: rows[:2], "as many rows as it got"),
        (lambda rows: rows["action"], "as many rows as it got; it returned Tensor"),
        (
            lambda rows: rows.set(f"x{int(rows['collector', 'traj_ids'][0])}", rows["action"]),
            "same entries for all",
        ),
    ],
)
def test_functions_that_preprocess_refuses(folder: Path, tmp_path: Path, function: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BaseDatasetExperienceReplay(folder).preprocess(function, dest=tmp_path / "new")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


# -- loaders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_of_a_loader_share_out_the_rows(folder: Path, shuffle: bool) -> None:
    rows = BaseDatasetExperienceReplay(folder, batch_size=4).as_dataset(shuffle=shuffle)
    loader = DataLoader(
        rows, batch_size=None, collate_fn=rows.collate, num_workers=2, multiprocessing_context="fork"
    )
    passes = [torch.cat(list(loader))["observation"] for _ in range(2)]
    expected = torch.cat(list(episodes()))["observation"]
    for seen in passes:
        assert sorted(seen.tolist()) == sorted(expected.tolist())
    assert torch.equal(*passes) is not shuffle
    if not shuffle:
        assert torch.equal(torch.cat(list(rows))["observation"], expected)
    with pytest.raises(ValueError, match="batch_size must be given"):
        BaseDatasetExperienceReplay(folder).as_dataset()


# -- what may go wrong -------------------------------------------------------------------------------------------------


def test_an_interrupted_conversion_begins_anew(tmp_path: Path) -> None:
    def stops() -> Iterator[TensorDict]:
        yield episode(0)
        yield episode(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(stops(), tmp_path / "set", segment_bytes=1)
    assert not (tmp_path / "set").exists()
    convert(episodes(), tmp_path / "set", segment_bytes=300)
    assert same(BaseDatasetExperienceReplay(tmp_path / "set")[:], torch.cat(list(episodes())))
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    with pytest.raises(FileExistsError, match="overwrite=True"):
        convert(episodes(), tmp_path / "set")
    assert convert([episode(0)], tmp_path / "set", overwrite=True) == 3
    assert len(BaseDatasetExperienceReplay(tmp_path / "set")) == 3


def test_batches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for option, value in (("codec", "zstd"), ("frame_stack", 4)):
        with pytest.raises(ValueError, match=f"{option} names 'sound', .*the batch"):
            convert([episode(0)], tmp_path / "set", **{option: {"sound": value}})  # type: ignore[arg-type]
    wrong = {
        "are not in both": episode(0).exclude("action"),
        "'action' is torch.float32": episode(0).set("action", torch.ones(3)),
        r"must be flat, \[N\]": episode(0).reshape(1, 3),
        "takes tensors only": episode(0).set("text", "hello"),
    }
    for text, batch in wrong.items():
        first = [] if "tensors" in text else [episode(1)]
        with pytest.raises((ValueError, TypeError), match=text):
            convert([*first, batch], tmp_path / "set")
    with pytest.raises(ValueError, match="no rows to convert"):
        convert([], tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_wrong_folders(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no data set in"):
        BaseDatasetExperienceReplay(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="holds other files"):
        BaseDatasetExperienceReplay(tmp_path / "other")
    convert(episodes(), tmp_path / "cut")
    file = next((tmp_path / "cut").glob("*.rows"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises((DamagedFileError, ValueError, FileNotFoundError)):
        BaseDatasetExperienceReplay(tmp_path / "cut")


def test_where_sets_come_from(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pass fetch="):
        D4RLExperienceReplay("maze2d-umaze-v1", root=tmp_path)
    with pytest.raises(FileNotFoundError, match="pass download=True"):
        D4RLExperienceReplay("maze", root=tmp_path, download=False)
    with pytest.raises(ValueError, match="name below root"):
        D4RLExperienceReplay("../maze", root=tmp_path / "a")
    with pytest.raises(ValueError, match="True, False or 'force'"):
        D4RLExperienceReplay("maze", root=tmp_path, download="yes")
    assert not list(tmp_path.iterdir()), "what was fetched in part is removed"


def test_inspect_knows_lanes_and_episodes(tmp_path: Path) -> None:
    """Its rows may have names of their own; the marks beside them say where lanes and episodes end."""
    step = torch.arange(4)[:, None].expand(4, 2)
    dones = torch.zeros(4, 2, dtype=torch.bool)
    dones[1, 0] = dones[3] = True
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path / "t"))
    buffer.add_trajectories([{"rewards": step.float(), "dones": dones}])
    buffer.close()
    report = inspect_folder(tmp_path / "t")
    assert report.trajectories is not None and report.trajectories.returns is not None
    assert report.trajectories.lengths.tolist() == [2, 2, 4]
    assert report.trajectories.returns.tolist() == [1.0, 5.0, 6.0]
    storage = DiskStorage(100, tmp_path / "rows")
    ReplayBuffer(storage=storage).extend(episode(0))
    storage.close()
    assert f"\nafter version 2: rows 0 to {LENGTHS[0] - 1}" in inspect_folder(tmp_path / "rows").text


def test_long_work_shows_a_bar_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episodes = [episode(number) for number in range(len(LENGTHS))]

    def last_bar() -> str:
        return capsys.readouterr().err.rpartition("\r")[2]

    convert(episodes, tmp_path / "quiet")  # no terminal here, so no bar
    convert(episodes, tmp_path / "none", progress=False)
    data = BaseDatasetExperienceReplay(tmp_path / "quiet", batch_size=4)
    assert capsys.readouterr().err == ""
    convert(episodes, tmp_path / "set", progress=True)
    assert f"converting set: {ROWS}.0row" in last_bar()
    data.preprocess(lambda rows: rows, dest=tmp_path / "same", num_chunks=3, progress=True)
    assert f"| {ROWS}.0/{ROWS}.0 [" in last_bar()
    source = tmp_path / "source"
    source.write_bytes(b"rows")
    fetch_url(source.as_uri(), tmp_path / "copy", max_bytes=10, progress=True)
    assert "copy: 100%" in last_bar()
    for form in ("h5", "minari"):
        pytest.importorskip("h5py" if form == "h5" else form)
        spaces = {
            "observation_space": gym.spaces.Dict(
                {
                    "observation": gym.spaces.Box(0, 99, (2,)),
                    "pixels": gym.spaces.Box(0, 255, (4, 4), np.uint8),
                }
            ),
            "action_space": gym.spaces.Discrete(99),
        }
        options = {"dataset_id": "x/x-v0", **spaces} if form == "minari" else {}
        export(data, tmp_path / f"exported-{form}", form, chunk_rows=5, progress=True, **options)
        assert f"| {ROWS}.0/{ROWS}.0 [" in last_bar()


def test_a_batch_or_a_buffer_is_no_list_of_batches(tmp_path: Path) -> None:
    """The iterator of one yields rows, that of the other samples without end."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.extend(episode(0))
    for wrong in (episode(0), buffer):
        with pytest.raises(TypeError, match=r"pass \[batch\], or \[buffer.oldest_first\(\)\]"):
            convert(wrong, tmp_path / "set")
    with pytest.raises(TypeError, match="must be a list of trajectories, got one TensorDict"):
        TrajectoryReplayBuffer().add_trajectories(episode(0))
    assert not (tmp_path / "set").exists()


def test_the_folder_of_a_saved_buffer_is_no_set(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(episode(0))
    buffer.dumps(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"load a saved buffer with buffer\.loads or Checkpoint"):
        BaseDatasetExperienceReplay(tmp_path / "saved")
