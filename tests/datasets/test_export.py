"""Rows that leave in any format come back bit by bit, from a batch and from a buffer; refusals leave nothing."""

import itertools
import os
import pickle
import signal
import sys
import unittest.mock
from pathlib import Path
from time import sleep
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from replay_logs import by_trajectory
from tensordict import TensorDict, TensorDictBase

from flatroll import export as module
from flatroll.buffers import LazyTensorStorage, ListStorage, ReplayBuffer
from flatroll.datasets import read_rlds
from flatroll.datasets.formats.sources import open_source, read_episodes
from flatroll.layout import audit
from flatroll.rollouts import Collector, batch_spec

FORMATS = ["parquet", "arrow", "pandas", "h5", "minari", "lerobot"]
IN_EPISODES = ["minari", "lerobot"]
each_format = pytest.mark.parametrize("format", FORMATS)
pytestmark = pytest.mark.filterwarnings("ignore:.*Box.*precision:UserWarning")


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest) -> None:
    for name in ("pyarrow", "pandas", "h5py", "minari", "PIL"):
        pytest.importorskip(name)


def window(number: int, *, images: bool = True) -> TensorDict:
    """Window ``number`` of 2 envs, 5 steps each; an episode of env e has 3 + e steps, and one has one step."""
    rows = []
    for env in range(2):
        for time in range(number * 5, number * 5 + 5):
            length = 3 + env
            episode, step = divmod(time, length)
            rows.append((env, episode, step, step == length - 1))
    env, episode, step, over = (torch.tensor(column) for column in zip(*rows, strict=True))
    generator = torch.Generator().manual_seed(number)

    def frames(step: torch.Tensor) -> torch.Tensor:  # a picture for each (env, episode, step)
        place = torch.arange(4 * 6 * 5).view(4, 6, 5)
        seed = env * 101 + episode * 31 + step * 7
        return (place * 13 + seed.view(-1, 1, 1, 1)).remainder(256).to(torch.uint8)

    def pose(step: torch.Tensor) -> torch.Tensor:
        return torch.stack([env, episode, step], -1) / 7

    n = len(rows)
    batch = TensorDict(
        {
            "observation": pose(step),
            "arm": {"angle": pose(step).double()[:, :1]},
            "action": torch.randn(n, 2, generator=generator),
            "is_init": (step == 0)[:, None],
            "step_count": step[:, None],
            "logits": torch.randn(n, 2, 3, generator=generator),
            "collector": {"traj_ids": env * 1000 + episode},
            "next": {
                "observation": pose(step + 1),
                "arm": {"angle": pose(step + 1).double()[:, :1]},
                "step_count": step[:, None] + 1,
                "reward": torch.randn(n, 1, generator=generator),
                "terminated": over[:, None] & (env == 0)[:, None],
                "truncated": over[:, None] & (env == 1)[:, None],
                "done": over[:, None],
            },
        },
        [n],
    )
    if images:
        batch["pixels"], batch["next", "pixels"] = frames(step), frames(step + 1)
    assert not audit(batch)
    return batch


def space_of(column: Any) -> gym.Space[Any]:
    if isinstance(column, TensorDictBase):
        return gym.spaces.Dict({name: space_of(part) for name, part in column.items()})
    high = 255 if column.dtype is torch.uint8 else 99
    return gym.spaces.Box(
        high - 255 if high == 255 else -high, high, column.shape[1:], column.numpy().dtype.type
    )


def export(source: Any, path: Path | str, format: str | None = None, **options: Any) -> None:
    """The library's, with the spaces of the env of `window` where Minari's files tell them."""
    if format == "minari":
        entries = source.storage.columns if isinstance(source, ReplayBuffer) else source.keys()
        rows = window(0, images="pixels" in entries)
        seen = rows.select("observation", "arm", "pixels", strict=False)
        spaces = {"observation_space": space_of(seen), "action_space": space_of(rows["action"])}
        options = spaces | options
    module.export(source, path, format, **options)


def read_back(format: str, path: Path) -> TensorDictBase:
    return getattr(module, f"import_{format}")(path)  # type: ignore[no-any-return]


def check_same(batch: TensorDictBase, again: TensorDictBase) -> None:
    assert again.batch_size == batch.batch_size
    assert set(again.keys(True, True)) == set(batch.keys(True, True))
    for key in batch.keys(True, True):
        old, new = batch.get(key), again.get(key)
        assert (new.dtype, new.shape) == (old.dtype, old.shape), key
        assert new.contiguous().numpy().tobytes() == old.contiguous().numpy().tobytes(), key


def expected(format: str, batch: TensorDictBase) -> TensorDictBase:
    return by_trajectory(batch) if format in IN_EPISODES else batch


@each_format
@pytest.mark.parametrize("chunk_rows", [None, 1, 4])
def test_a_batch_comes_back_bit_by_bit(format: str, chunk_rows: int | None, tmp_path: Path) -> None:
    batch = torch.cat([window(0), window(1)])
    export(batch, tmp_path / "rows", format, chunk_rows=chunk_rows)
    check_same(expected(format, batch), read_back(format, tmp_path / "rows"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows"]


@each_format
def test_a_buffer_is_exported_oldest_row_first(format: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(35), batch_size=4)
    for number in range(5):
        buffer.extend(window(number, images=False))
    oldest_first = torch.cat([window(number, images=False) for number in range(5)])[-35:]
    export(buffer, tmp_path / "rows", format, chunk_rows=8)
    check_same(expected(format, oldest_first), read_back(format, tmp_path / "rows"))


@pytest.mark.parametrize("format", ["parquet", "h5", "lerobot"])
def test_few_rows_are_read_at_a_time(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
    for number in range(5):
        buffer.extend(window(number, images=False))
    sizes: list[int] = []
    real = ReplayBuffer.__getitem__

    def noted(self: Any, index: Any) -> Any:
        rows = real(self, index)
        sizes.append(len(rows))
        return rows

    monkeypatch.setattr(ReplayBuffer, "__getitem__", noted)
    export(buffer, tmp_path / "rows", format, chunk_rows=7)
    assert max(sizes) == 7  # an episode has 4 rows at most


def test_a_buffer_with_lanes_is_exported_lane_after_lane(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(16, ndim=2), batch_size=4)
    for number in range(2):
        buffer.extend(window(number).reshape(2, 5))
    export(buffer, tmp_path / "rows", "h5", chunk_rows=3)
    lanes = torch.cat([window(number).reshape(2, 5) for number in range(2)], 1)[:, 2:]
    check_same(lanes.reshape(-1), read_back("h5", tmp_path / "rows"))


@pytest.mark.parametrize("format", IN_EPISODES)
def test_a_compact_buffer_gives_its_next_observations(format: str, tmp_path: Path) -> None:
    batch = window(0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20, compact_obs=True), batch_size=4)
    buffer.extend(batch)
    export(buffer, tmp_path / "rows", format)
    check_same(by_trajectory(batch), read_back(format, tmp_path / "rows"))


@pytest.mark.parametrize("format", IN_EPISODES)
def test_a_compact_batch_is_refused(format: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compact batch"):
        export(window(0).exclude(("next", "observation")), tmp_path / "rows", format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", IN_EPISODES)
def test_slices_of_one_trajectory_are_not_joined(format: str, tmp_path: Path) -> None:
    """They carry its id, but neither goes on where the other stops."""
    whole = window(0)[5:9]  # an episode of 4 rows
    slices = torch.cat([whole[2:], whole[:2], whole[2:]])
    slices["is_init"][:] = False
    export(slices, tmp_path / "rows", format)
    again = read_back(format, tmp_path / "rows")
    order = torch.tensor([0, 1, 2, 3, 4, 5])  # the second goes on in the third, the first stands alone
    check_same(slices[order], again)
    episodes = getattr(module, f"read_{format}")(tmp_path / "rows")
    assert [len(episode) for episode in episodes] == [2, 4]


@pytest.mark.parametrize(
    ("count", "first", "lengths"), [(2, False, [4, 1]), (3, False, [2, 1, 2]), (2, True, [2, 1, 2])]
)
def test_observations_alone_join_no_runs(count: int, first: bool, lengths: list[int]) -> None:
    """All observations are alike: step counts and first rows say what goes on."""
    seen, ids = torch.zeros(5, 1), torch.tensor([0, 0, 7, 0, 0])
    rows = TensorDict(
        {
            "observation": seen,
            "is_init": torch.tensor([True, False, True, first, False])[:, None],
            "step_count": torch.tensor([0, 1, 0, count, count + 1])[:, None],
            "collector": {"traj_ids": ids},
            "next": {"observation": seen, "done": seen > 0},
        },
        [5],
    )
    assert [len(episode) for episode in read_episodes(open_source(rows))] == lengths


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float64]
)
@each_format
def test_dtypes_and_one_row(format: str, dtype: torch.dtype, tmp_path: Path) -> None:
    batch = window(0, images=False)[:1]
    batch["memory"] = torch.tensor([[1, 0, 1]]).to(dtype)
    export(batch, tmp_path / "rows", format)
    check_same(batch, read_back(format, tmp_path / "rows"))


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
def test_the_other_formats_of_minari(data_format: str, tmp_path: Path) -> None:
    batch = window(0).exclude("logits")
    export(batch, tmp_path / "rows", "minari", data_format=data_format, author={"Ada"})
    check_same(by_trajectory(batch), read_back("minari", tmp_path / "rows"))


def test_minari_reads_its_own_files(tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    batch = window(0)
    export(batch, tmp_path / "rows", "minari", dataset_id="arms/two-v1")
    data = minari.MinariDataset(tmp_path / "rows")
    assert (data.total_episodes, data.total_steps, data.spec.dataset_id) == (4, 10, "arms/two-v1")
    episode = data[2]
    assert episode.observations["pixels"].shape == (5, 4, 6, 5)
    assert np.array_equal(episode.observations["pixels"][-1], batch["next", "pixels"][8].numpy())
    assert episode.truncations.tolist() == [False, False, False, True]
    assert data.observation_space.contains(
        {name: _first(value) for name, value in episode.observations.items()}
    )


def _first(values: Any) -> Any:
    return {name: _first(value) for name, value in values.items()} if isinstance(values, dict) else values[0]


def test_a_minari_set_of_other_makers(tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    gym = pytest.importorskip("gymnasium")
    space = gym.spaces.Tuple([gym.spaces.Box(-9, 9, (2,), np.float32), gym.spaces.Box(0, 9, (), np.int64)])
    storage = minari.dataset.minari_storage.MinariStorage.new(
        tmp_path, observation_space=space, action_space=gym.spaces.Discrete(3), jpeg_encoding=False
    )
    storage.update_metadata({"dataset_id": "x/y-v0", "minari_version": minari.__version__})
    seen = (np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(4))
    episode = minari.data_collector.EpisodeBuffer(
        observations=seen,
        actions=np.array([2, 0, 1]),
        rewards=[1.0, 2.0, 3.0],
        terminations=[False, False, True],
        truncations=[False] * 3,
    )
    storage.update_episodes([episode])
    (rows,) = module.read_minari(minari.MinariDataset(tmp_path))
    assert rows["observation", "0"].tolist() == seen[0][:3].tolist()
    assert rows["next", "observation", "1"].tolist() == [1, 2, 3]
    assert rows["next", "done"].tolist() == [[False], [False], [True]]
    assert rows["next", "reward"].shape == (3, 1) and rows["action"].tolist() == [2, 0, 1]
    assert rows["is_init"].tolist() == [[True], [False], [False]]
    assert not audit(rows)


def test_what_lerobot_finds(tmp_path: Path) -> None:
    import json

    pandas = pytest.importorskip("pandas")
    batch = window(0)
    export(batch, tmp_path / "rows", "lerobot", fps=10, task="reach", images={"pixels": "CHW"})
    info = json.loads((tmp_path / "rows/meta/info.json").read_text())
    assert (info["codebase_version"], info["total_episodes"], info["total_frames"]) == ("v3.0", 4, 10)
    assert info["features"]["observation.pixels"] == {
        "dtype": "image",
        "shape": [6, 5, 4],
        "names": ["height", "width", "channels"],
    }
    frames = pandas.read_parquet(tmp_path / "rows/data/chunk-000/file-000.parquet")
    assert frames["index"].tolist() == list(range(10))
    assert frames["episode_index"].tolist() == [0] * 3 + [1] * 2 + [2] * 4 + [3]
    assert frames["timestamp"].tolist()[:3] == pytest.approx([0, 0.1, 0.2])
    assert set(frames.columns) == set(info["features"])
    tasks = pandas.read_parquet(tmp_path / "rows/meta/tasks.parquet")
    assert tasks.index.tolist() == ["reach"] and tasks["task_index"].tolist() == [0]
    episodes = pandas.read_parquet(tmp_path / "rows/meta/episodes/chunk-000/file-000.parquet")
    assert episodes["dataset_from_index"].tolist() == [0, 3, 5, 9]
    stats = json.loads((tmp_path / "rows/meta/stats.json").read_text())
    ordered = by_trajectory(batch)
    assert stats["action"]["mean"] == pytest.approx(ordered["action"].double().mean(0).tolist())
    assert stats["action"]["std"] == pytest.approx(ordered["action"].double().std(0, correction=0).tolist())
    pixels = ordered["pixels"].double() / 255
    assert np.ravel(stats["observation.pixels"]["mean"]) == pytest.approx(pixels.mean((0, 2, 3)).tolist())


def test_a_lerobot_folder_of_other_makers(tmp_path: Path) -> None:
    """Without the files that only this library writes: the last next observation is unknown, and says so."""
    batch = by_trajectory(window(0))
    export(batch, tmp_path / "rows", "lerobot", images={"pixels": "CHW"})
    for name in ("flatroll.json", "flatroll_last.parquet"):
        (tmp_path / "rows/meta" / name).unlink()
    again = read_back("lerobot", tmp_path / "rows")
    known = again["collector", "next_known"]
    assert known.tolist() == [True, True, False, True, False, True, True, True, False, False]
    assert torch.equal(again["observation", "state"], batch["observation"])
    assert torch.equal(again["next", "observation", "state"][known], batch["next", "observation"][known])
    assert torch.equal(again["observation", "pixels"], batch["pixels"].permute(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("written", "read"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.int64, torch.float32)],
)
def test_rewards_of_other_makers_keep_a_floating_dtype(
    written: torch.dtype, read: torch.dtype, tmp_path: Path
) -> None:
    batch = by_trajectory(window(0)).exclude("pixels", ("next", "pixels"))
    rewards = (torch.arange(10.0).double()[:, None] / 3).to(written)
    batch["next", "reward"] = rewards
    export(batch, tmp_path / "rows", "lerobot")
    (tmp_path / "rows/meta/flatroll.json").unlink()
    again = read_back("lerobot", tmp_path / "rows")["next", "reward"]
    assert again.dtype is read and torch.equal(again, rewards.to(read))
    steps: list[dict[str, Any]] = [
        {"observation": np.float32(t), "reward": reward} for t, reward in enumerate(rewards[:, 0].numpy())
    ]
    (rows,) = read_rlds([[*steps, {"observation": np.float32(10)}]])
    assert rows["next", "reward"].dtype is read and torch.equal(rows["next", "reward"], rewards.to(read))


def test_a_lerobot_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    import json

    parquet = pytest.importorskip("pyarrow.parquet")
    export(window(0), tmp_path / "rows", "lerobot", images={"pixels": "CHW"})
    data = tmp_path / "rows/data/chunk-000/file-000.parquet"
    frames = parquet.read_table(data)
    parquet.write_table(frames, data)  # all episodes in one row group, as other makers write them
    check_same(by_trajectory(window(0)), read_back("lerobot", tmp_path / "rows"))
    parquet.write_table(frames.slice(1), data)
    with pytest.raises(ValueError, match="has 2 frames of episode 0, meta/episodes says 3"):
        read_back("lerobot", tmp_path / "rows")
    parquet.write_table(frames.slice(0, 9), data)
    with pytest.raises(ValueError, match="no frames of episode 3, meta/episodes says 1"):
        read_back("lerobot", tmp_path / "rows")
    about = tmp_path / "rows/meta/info.json"
    info = json.loads(about.read_text())
    info["features"]["observation.pixels"]["shape"] = [60000, 60000, 4]
    (tmp_path / "rows/meta/flatroll.json").unlink()
    about.write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"an image is \(5, 6\)"):
        read_back("lerobot", tmp_path / "rows")
    info["features"]["observation.pixels"]["dtype"] = "video"
    about.write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"videos \['observation.pixels'\]"):
        read_back("lerobot", tmp_path / "rows")
    about.write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    with pytest.raises(ValueError, match=r"v2\.1, not v3"):
        read_back("lerobot", tmp_path / "rows")


def test_long_lerobot_folders_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flatroll.datasets.formats import lerobot

    monkeypatch.setattr(lerobot, "_FILE_BYTES", 1)
    monkeypatch.setattr(lerobot, "_FILES_IN_CHUNK", 2)
    monkeypatch.setattr(lerobot, "_FINALS_AT_ONCE", 2)
    batch = torch.cat([window(0), window(1)])
    export(batch, tmp_path / "rows", "lerobot")
    assert len(list((tmp_path / "rows/data").rglob("*.parquet"))) > 2
    assert (tmp_path / "rows/data/chunk-001/file-000.parquet").exists()
    check_same(by_trajectory(batch), read_back("lerobot", tmp_path / "rows"))


def test_pandas_reads_the_frame_of_to_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    batch = window(0, images=False)
    export(batch, tmp_path / "rows.parquet", "pandas", chunk_rows=4)
    frame, made = pandas.read_parquet(tmp_path / "rows.parquet"), module.to_pandas(batch)
    pandas.testing.assert_frame_equal(frame, made)
    assert frame.attrs == made.attrs


@each_format
def test_a_path_from_the_working_directory(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = window(0, images=False)
    export(batch, "rows", format)
    check_same(expected(format, batch), read_back(format, Path("rows")))


def test_the_module_can_be_called(tmp_path: Path) -> None:
    batch = window(0)
    module(batch, tmp_path / "rows.parquet")  # type: ignore[operator]
    check_same(batch, module.import_parquet(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("format", IN_EPISODES)
def test_n_step_data_does_not_fit_into_episodes(format: str, tmp_path: Path) -> None:
    batch = window(0)
    batch["next", "observation"][0] += 1
    with pytest.raises(ValueError, match="n-step"):
        export(batch, tmp_path / "rows", format)
    assert not list(tmp_path.iterdir())


@each_format
def test_an_error_half_way_leaves_nothing(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = window(0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    buffer.extend(batch)
    reads = 0
    real = ReplayBuffer.__getitem__

    def failing(self: Any, index: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads > 3:
            raise OSError("the disk is full")
        return real(self, index)

    monkeypatch.setattr(ReplayBuffer, "__getitem__", failing)
    with pytest.raises(OSError, match="disk is full"):
        export(buffer, tmp_path / "rows", format, chunk_rows=2)
    assert not list(tmp_path.iterdir())


@each_format
def test_a_name_that_is_taken_is_refused_and_kept(format: str, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("mine")
    with pytest.raises(FileExistsError, match="remove it first"):
        export(window(0), tmp_path / "rows", format)
    assert (tmp_path / "rows").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "rows").unlink()
    (tmp_path / "rows").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="remove it first"):
        export(window(0), tmp_path / "rows", format)
    assert (tmp_path / "rows").is_symlink()


@each_format
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_that_is_killed_leaves_nothing_under_the_name(format: str, tmp_path: Path) -> None:
    """It is killed by ``kill -9`` once some rows are written; the next one makes the file."""
    batch, (ready, told) = torch.cat([window(number) for number in range(3)]), os.pipe()
    reads_before = 12 if format in IN_EPISODES else 3  # these look for the episodes first
    child = os.fork()
    if not child:
        try:
            os.close(ready)
            source, real = ReplayBuffer(storage=LazyTensorStorage(30), batch_size=4), ReplayBuffer.__getitem__
            source.extend(batch)
            reads = itertools.count()

            def stops(self: Any, index: Any) -> Any:
                if next(reads) == reads_before:
                    os.write(told, b"x")
                    sleep(1000)
                return real(self, index)

            with unittest.mock.patch.object(ReplayBuffer, "__getitem__", stops):
                export(source, tmp_path / "rows", format, chunk_rows=5)
        finally:
            os._exit(1)
    os.close(told)
    said = os.read(ready, 1)  # nothing if it ended before
    os.close(ready)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    assert said and left.name.startswith(".rows.") and left.name.endswith(".part")
    export(batch, tmp_path / "rows", format)
    check_same(by_trajectory(batch) if format in IN_EPISODES else batch, read_back(format, tmp_path / "rows"))


@pytest.mark.parametrize(
    ("name", "reader"), [("y.h5", "h5"), ("y.hdf5", "h5"), ("y.ARROW", "arrow"), ("y.feather", "arrow")]
)
def test_the_suffix_says_the_format(name: str, reader: str, tmp_path: Path) -> None:
    batch = window(0, images=False)
    export(batch, tmp_path / name)
    check_same(batch, read_back(reader, tmp_path / name))


def test_a_suffix_of_another_format_or_of_none_is_refused(tmp_path: Path) -> None:
    for name, format in [("y.h5", "parquet"), ("y.parquet", "h5"), ("y.arrow", "lerobot")]:
        with pytest.raises(ValueError, match=rf"'{name}' has the suffix of .* but format='{format}'"):
            export(window(0), tmp_path / name, format)
    with pytest.raises(ValueError, match=r"must end with .parquet, .* got 'y.csv'; or pass format="):
        export(window(0), tmp_path / "y.csv")
    assert not list(tmp_path.iterdir())
    export(window(0), tmp_path / "walks.v1", "h5")  # no suffix of a format
    check_same(window(0), read_back("h5", tmp_path / "walks.v1"))


def test_spaces_go_from_the_collector_to_minari(tmp_path: Path) -> None:
    """They travel in the buffer: what a set says of its env is what the env says."""
    minari = pytest.importorskip("minari")
    env = gym.make_vec("CartPole-v1", 2)
    space, actions = env.single_observation_space, env.single_action_space
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    for _ in Collector(env, frames_per_batch=50, total_frames=50, replay_buffer=buffer):
        pass
    assert buffer.spec["action"].n == 2
    # An entry of another shape is read as it is.
    buffer.append_transform(lambda rows: rows.set("action", rows["action"][:, None]))
    assert buffer.spec["action"].shape == (-1, 1)
    with pytest.raises(ValueError, match=r"action_space must be given: .* 'action', int64 \[1\]"):
        module.export(buffer, tmp_path / "rows", "minari")
    buffer.transforms.clear()
    module.export(buffer, tmp_path / "rows", "minari")
    data = minari.MinariDataset(tmp_path / "rows")
    assert (data.observation_space, data.action_space) == (space, actions)
    rows = buffer[:]
    with pytest.raises(ValueError, match=r"observation_space=env.single_observation_space, or first call"):
        module.export(rows, tmp_path / "more", "minari", action_space=actions)
    assert not (tmp_path / "more").exists()
    other = ReplayBuffer(storage=LazyTensorStorage(100))
    other.extend(rows)
    with pytest.raises(TypeError, match=r"spec must be a Composite such as collector\.spec, got Discrete"):
        other.note_spec(actions)
    other.note_spec(batch_spec(gym.make("CartPole-v1")))
    module.export(pickle.loads(pickle.dumps(other)), tmp_path / "more", "minari")
    assert minari.MinariDataset(tmp_path / "more").action_space == actions


def test_bad_arguments(tmp_path: Path) -> None:
    path, batch = tmp_path / "rows", window(0)
    with pytest.raises(
        ValueError, match="'parquet', 'arrow', 'pandas', 'minari', 'lerobot' or 'h5', got 'csv'"
    ):
        export(batch, path, "csv")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        export(batch, tmp_path / "no" / "rows")
    with pytest.raises(ValueError, match=r"a batch of size \[N\], got a batch of size \[2, 5\]"):
        export(batch.reshape(2, 5), path)
    with pytest.raises(ValueError, match="no rows"):
        export(batch[:0], path)
    with pytest.raises(ValueError, match="no rows"):
        export(ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2), path)
    with pytest.raises(TypeError, match="got list"):
        export([batch], path)
    with pytest.raises(ValueError, match="chunk_rows must be an integer"):
        export(batch, path, chunk_rows=0)
    items = ReplayBuffer(storage=ListStorage(4), batch_size=2)
    items.extend([1, 2])
    with pytest.raises(TypeError, match="must be rows of tensors, got list"):
        export(items, path)
    with pytest.raises(ValueError, match=r"'timestamp'.* would have the same names as others"):
        export(batch.copy().set("timestamp", torch.ones(10)), path, "lerobot")
    for format in IN_EPISODES:
        with pytest.raises(KeyError, match="is_init"):
            export(batch.select("observation", "action"), path, format)
    with pytest.raises(ValueError, match="needs actions"):
        export(batch.exclude("action"), path, "minari")
    with pytest.raises(ValueError, match=r"needs next\.reward"):
        export(batch.exclude(("next", "reward")), path, "minari")
    for key in (
        "a/b",
        ("next", "a/b"),
    ):  # a group of Minari's files, which would come back under another name
        with pytest.raises(ValueError, match="has '/' in its name, which"):
            export(batch.copy().set(key, torch.ones(10)), path, "minari")
    with pytest.raises(TypeError, match="bfloat16"):
        export(batch.copy().set("x", torch.ones(10, dtype=torch.bfloat16)), path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("format", "library", "extra"),
    [
        ("parquet", "pyarrow.parquet", "parquet"),
        ("arrow", "pyarrow.ipc", "arrow"),
        ("pandas", "pandas", "pandas"),
        ("minari", "minari", "minari"),
        ("lerobot", "pyarrow", "parquet"),
        ("h5", "h5py", "h5"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    format: str, library: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf'pip install "flatroll\[{extra}\]"'):
        export(window(0), tmp_path / "rows", format)
    assert not list(tmp_path.iterdir())
