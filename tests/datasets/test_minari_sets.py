"""Sets that Minari's own library has written, in all its formats, as replay buffers."""

import dataclasses
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from flatroll.buffers import SliceSampler
from flatroll.datasets import MinariExperienceReplay
from flatroll.export import import_minari
from flatroll.layout import RESERVED, audit

for library in ("h5py", "pyarrow", "PIL"):
    pytest.importorskip(library)
minari = pytest.importorskip("minari")
EpisodeBuffer: Any = pytest.importorskip("minari.data_collector").EpisodeBuffer

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:minari")
SPACE = gym.spaces.Dict(
    {
        "pose": gym.spaces.Box(-9, 9, (2,), np.float32),
        "arm": gym.spaces.Dict({"angle": gym.spaces.Box(-9, 9, (1,), np.float64)}),
        "pair": gym.spaces.Tuple((gym.spaces.Discrete(9), gym.spaces.Box(-9, 9, (3,), np.float32))),
        "pixels": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8),
    }
)
ACTIONS = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,), np.float32)))


def episode(number: int, length: int) -> Any:
    rng = np.random.default_rng(number)
    steps = np.arange(length + 1)
    return EpisodeBuffer(
        id=number,
        observations={
            "pose": rng.normal(size=(length + 1, 2)).astype(np.float32),
            "arm": {"angle": steps[:, None] / 3.0},
            "pair": (steps % 9, rng.normal(size=(length + 1, 3)).astype(np.float32)),
            "pixels": rng.integers(0, 255, (length + 1, 8, 8, 3)).astype(np.uint8),
        },
        actions=(steps[:-1] % 3, rng.uniform(-1, 1, (length, 2)).astype(np.float32)),
        rewards=rng.normal(size=length),
        terminations=np.arange(length) == (length - 1 if number % 2 else -1),
        truncations=np.arange(length) == (length - 1 if not number % 2 else -1),
        infos={},
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Minari keeps its sets: one of each format, and one of a single episode."""
    folder = tmp_path_factory.mktemp("minari")
    patch = pytest.MonkeyPatch()
    patch.setenv("MINARI_DATASETS_PATH", str(folder))
    for name, data_format in [("a", "hdf5"), ("b", "arrow"), ("c", "parquet"), ("one", "hdf5")]:
        minari.create_dataset_from_buffers(
            f"test/{name}-v0",
            [episode(number, length) for number, length in enumerate([4] if name == "one" else [4, 1, 3])],
            observation_space=SPACE,
            action_space=ACTIONS,
            data_format=data_format,
            jpeg_encoding=False,
        )
    patch.undo()
    return folder


def check(rows: Any, number: int, length: int) -> None:
    source = episode(number, length)
    seen: Any = source.observations
    assert np.array_equal(rows["pose"], seen["pose"][:-1]) and np.array_equal(
        rows["next", "pose"], seen["pose"][1:]
    )
    assert np.array_equal(rows["arm", "angle"], seen["arm"]["angle"][:-1])
    assert np.array_equal(rows["pair", "0"], seen["pair"][0][:-1])
    assert np.array_equal(rows["next", "pair", "1"], seen["pair"][1][1:])
    assert np.array_equal(rows["pixels"], seen["pixels"][:-1])
    assert np.array_equal(rows["next", "pixels"], seen["pixels"][1:])
    actions: Any = source.actions
    assert np.array_equal(rows["action", "0"], actions[0]) and np.array_equal(rows["action", "1"], actions[1])
    assert np.array_equal(rows["next", "reward"][:, 0], source.rewards)  # float64, as they are
    assert np.array_equal(rows["next", "terminated"][:, 0], source.terminations)
    assert np.array_equal(rows["next", "truncated"][:, 0], source.truncations)


@pytest.mark.parametrize("name", ["a", "b", "c", "one"])
def test_every_format_images_tuples_and_a_single_episode(
    name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer reads hdf5 alone, no images, and no set of one episode."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(home))
    data = MinariExperienceReplay(f"test/{name}-v0", 4, root=tmp_path, load_from_local_minari=True)
    rows = data[:]
    first = 0
    for number, length in enumerate([4] if name == "one" else [4, 1, 3]):
        check(rows[first : first + length], number, length)
        first += length
    assert len(data) == first and data.sample().batch_size == (4,)
    assert not [finding for finding in audit(rows) if finding.severity == "error"]
    assert data.storage.compact_obs  # each observation once on disk, as Minari has them
    slices = MinariExperienceReplay(
        f"test/{name}-v0", 8, root=tmp_path, sampler=SliceSampler(slice_len=2, fill=True)
    )
    assert slices.sample().batch_size == (8,)


@pytest.mark.parametrize("name", sorted(RESERVED | {"info"}))
def test_an_observation_named_as_one_of_our_columns(name: str, tmp_path: Path) -> None:
    """It would overwrite that column, or be overwritten; ``rename`` gives it another name."""
    space = gym.spaces.Dict({name: gym.spaces.Box(-9, 9, (2,)), "pose": gym.spaces.Box(-9, 9, (1,))})
    storage = minari.dataset.minari_storage.MinariStorage.new(
        tmp_path, observation_space=space, action_space=gym.spaces.Discrete(3), jpeg_encoding=False
    )
    storage.update_metadata({"dataset_id": "x/y-v0", "minari_version": minari.__version__})
    seen = np.arange(8, dtype=np.float32).reshape(4, 2)
    episode = EpisodeBuffer(
        observations={name: seen, "pose": seen[:, :1]},
        actions=np.array([2, 0, 1]),
        rewards=np.array([1.0, 2.0, 3.0]),
        terminations=[False, False, True],
        truncations=[False] * 3,
    )
    storage.update_episodes([episode])
    hint = rf"entry '{name}' cannot become the column '{name}'.*rename={{'{name}': 'observed_{name}'}}"
    with pytest.raises(ValueError, match=hint):
        import_minari(tmp_path)
    with pytest.raises(ValueError, match=hint):
        MinariExperienceReplay("clash", root=tmp_path / "sets", fetch=lambda *_: tmp_path)
    for rename, text in [
        ({name: "pose"}, "cannot become the column 'pose'"),
        ({"pose": "next.pose"}, "entry 'pose' cannot become the column 'next.pose'"),
        ({"poses": "pose"}, rf"rename names 'poses', which is not one of the observations \[.*'{name}'"),
    ]:
        with pytest.raises(ValueError, match=text):
            import_minari(tmp_path, rename={name: "seen"} | rename)
    rename = {name: "seen"}
    rows = import_minari(tmp_path, rename=rename)
    assert rows["seen"].tolist() == seen[:3].tolist() and rows["next", "seen"].tolist() == seen[1:].tolist()
    assert rows["action"].tolist() == [2, 0, 1] and rows["next", "reward"].dtype is torch.float64
    data = MinariExperienceReplay("clash", root=tmp_path / "sets", rename=rename, fetch=lambda *_: tmp_path)
    assert data[:]["seen"].tolist() == seen[:3].tolist()
    with pytest.raises(ValueError, match=r"was converted with options \{'rename': \{.*pass download='force'"):
        MinariExperienceReplay("clash", root=tmp_path / "sets")


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_infos_of_numbers_are_columns(data_format: str, tmp_path: Path) -> None:
    """The peer fills zeros in where the reset told nothing."""

    def with_infos(number: int, length: int) -> Any:
        steps = np.arange(length + 1.0)[:, None] + 10 * number
        infos: dict[str, Any] = {"qpos": np.hstack([steps, -steps])}
        if data_format == "hdf5":  # Minari cannot write these to its arrow files
            infos |= {
                "arm": {"hits": steps.astype(np.int64)},
                "late": steps[1:],
                "words": np.array([b"a"] * (length + 1)),
            }
        return dataclasses.replace(episode(number, length), infos=infos)

    folder = tmp_path / "data"
    folder.mkdir()
    storage = minari.dataset.minari_storage.MinariStorage.new(
        folder, observation_space=SPACE, action_space=ACTIONS, data_format=data_format, jpeg_encoding=False
    )
    storage.update_metadata(
        {"dataset_id": "x/infos-v0", "minari_version": minari.__version__, "author": {"Ada"}}
    )
    storage.update_episodes(with_infos(number, 3) for number in range(2))
    data = MinariExperienceReplay("infos", root=tmp_path, fetch=lambda *_: folder)
    rows = data[:]
    check(rows[:3], 0, 3)
    assert rows["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert rows["info", "qpos"][:, 0].tolist() == [0, 1, 2, 10, 11, 12]
    assert rows["next", "info", "qpos"][:, 1].tolist() == [-1, -2, -3, -11, -12, -13]
    if data_format == "hdf5":
        assert rows["info", "arm", "hits"].dtype is torch.int64
        assert rows["next", "info", "arm", "hits"].view(-1).tolist() == [1, 2, 3, 11, 12, 13]
        assert rows["next", "info", "late"].view(-1).tolist() == [1, 2, 3, 11, 12, 13]
        assert set(rows["info"].keys()) == {"qpos", "arm"}
    assert not [finding for finding in audit(rows) if finding.severity == "error"]
    without = MinariExperienceReplay("none", root=tmp_path, fetch=lambda *_: folder, infos=False)
    assert not {"info", ("next", "info")} & set(without[:].keys(True))
    if data_format == "hdf5":  # Minari cannot read arrow files of episodes that differ
        less = dataclasses.replace(episode(2, 2), infos={"qpos": np.ones((3, 2), np.float32)})
        storage.update_episodes([less])
        with pytest.raises(
            ValueError, match=r"infos of episode 2 differ .*'info.qpos'.*; pass infos=\[\.\.\.\]"
        ):
            MinariExperienceReplay("unlike", root=tmp_path, fetch=lambda *_: folder)
        assert len(import_minari(folder, infos=False)) == 8
    # What Minari says of the set stays with it.
    again = MinariExperienceReplay("infos", root=tmp_path, download=False)
    assert data.metadata is not None and data.metadata["dataset_id"] == "x/infos-v0"
    assert again.metadata == data.metadata


def test_infos_are_chosen_by_name(tmp_path: Path) -> None:
    """One info that episodes do not share, or that is no number, does not cost the others."""
    folder = tmp_path / "data"
    folder.mkdir()
    storage = minari.dataset.minari_storage.MinariStorage.new(
        folder, observation_space=SPACE, action_space=ACTIONS, data_format="hdf5", jpeg_encoding=False
    )
    storage.update_metadata({"dataset_id": "x/chosen-v0", "minari_version": minari.__version__})
    steps = np.arange(4.0)[:, None]
    infos: list[dict[str, Any]] = [
        {"qpos": steps, "arm": {"hits": steps + 1, "at": steps + 2}, "odd": steps},
        {"qpos": steps + 10, "arm": {"hits": steps + 11, "at": steps + 12}},
    ]
    storage.update_episodes(
        dataclasses.replace(episode(number, 3), infos=infos[number]) for number in range(2)
    )
    with pytest.raises(ValueError, match=r"infos of episode 1 differ .*\['info.odd', 'next.info.odd'\]"):
        import_minari(folder)
    rows = import_minari(folder, infos=["qpos", "arm.hits"])
    assert set(rows["info"].keys(True, True)) == {"qpos", ("arm", "hits")}
    assert rows["info", "qpos"].view(-1).tolist() == [0, 1, 2, 10, 11, 12]
    assert rows["next", "info", "arm", "hits"].view(-1).tolist() == [2, 3, 4, 12, 13, 14]
    assert set(import_minari(folder, infos=["arm"])["info", "arm"].keys()) == {"hits", "at"}
    with pytest.raises(
        ValueError, match=r"infos names 'odd', which episode 1 lacks: it has \['arm.at', 'arm.hits', 'qpos'\]"
    ):
        import_minari(folder, infos=["odd"])
    for wrong in ("qpos", 3):
        with pytest.raises((TypeError, ValueError), match="infos must be"):
            import_minari(folder, infos=wrong)  # type: ignore[arg-type]
    kept = MinariExperienceReplay("chosen", root=tmp_path, fetch=lambda *_: folder, infos=["qpos"])
    assert set(kept[:]["info"].keys()) == {"qpos"}
    with pytest.raises(ValueError, match="options"):
        MinariExperienceReplay("chosen", root=tmp_path, download=False, infos=["arm"])


def test_ids_that_minari_does_not_have(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(home))
    with pytest.raises(FileNotFoundError, match=r"no local set 'test/z-v0' .*test/a-v0"):
        MinariExperienceReplay("test/z-v0", 4, root=tmp_path, load_from_local_minari=True)

    def unknown(*_: Any, **options: Any) -> None:
        raise KeyError("no such set")

    monkeypatch.setattr(minari, "load_dataset", unknown)
    with pytest.raises(ValueError, match="has no set 'test/z-v0'"):
        MinariExperienceReplay("test/z-v0", 4, root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_minari_given_by_fetch(home: Path, tmp_path: Path) -> None:
    data = MinariExperienceReplay("mine", root=tmp_path, fetch=lambda *_: home / "test/a-v0/data")
    assert len(data) == 8


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "minari", None)
    with pytest.raises(ImportError, match=r"flatroll\[minari\]"):
        MinariExperienceReplay("test/a-v0", root=tmp_path)


def test_rows_of_a_batch_are_those_of_one_moment(home: Path, tmp_path: Path) -> None:
    data = MinariExperienceReplay("mine", 64, root=tmp_path, fetch=lambda *_: home / "test/a-v0/data")
    batch = data.sample()
    assert torch.equal(batch["next", "arm", "angle"], batch["arm", "angle"] + 1 / 3) or torch.allclose(
        batch["next", "arm", "angle"], batch["arm", "angle"] + 1 / 3
    )
