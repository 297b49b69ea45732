"""Files in the forms that published sets really have, row by row: each value says its episode and step."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from set_files import saved, trajectory, write_archive

from flatroll.datasets import (
    GenDGRLExperienceReplay,
    LeRobotExperienceReplay,
    RobosetExperienceReplay,
    VD4RLExperienceReplay,
    convert,
    read_d4rl,
    read_rlds,
    read_roboset,
    read_vd4rl,
)
from flatroll.datasets.formats.episodes import files_in
from flatroll.layout import audit

h5py = pytest.importorskip("h5py")


def check_rows(rows: Any) -> None:
    """What holds of all sets: flags fit each other, and known next observations are those of the row after."""
    assert not [finding for finding in audit(rows) if finding.severity == "error"]
    flags = {name: rows["next", name] for name in ("done", "terminated", "truncated")}
    assert {(flag.dtype, flag.shape) for flag in flags.values()} == {(torch.bool, (len(rows), 1))}
    assert torch.equal(flags["done"], flags["terminated"] | flags["truncated"])
    ids, first = rows["collector", "traj_ids"], rows["is_init"].view(-1)
    assert torch.equal(first[1:], ids[1:] != ids[:-1]) and bool(first[0])


# -- V-D4RL: steps end to end in one HDF5 file, marked by dm_env's step_type -------------------------------------------


def write_steps(path: Path, **marks: bool) -> None:
    """Episodes of 3, 1 and 2 rows: 4, 2 and 3 observations. The first one is terminated."""
    lengths = [4, 2, 3]
    step = np.concatenate([np.arange(length) for length in lengths])
    episode = np.repeat(np.arange(3), lengths)
    last = step == np.repeat(lengths, lengths) - 1
    kinds = np.where(step == 0, 0, np.where(last, 2, 1)).astype(np.int64)
    with h5py.File(path, "w") as file:
        file["observation"] = (10 * episode + step)[:, None, None, None] * np.ones((1, 3, 4, 4), np.uint8)
        file["action"] = np.stack([episode, step], 1).astype(np.float32)
        file["reward"] = step.astype(np.float32)
        file["discount"] = np.where(last & (episode == 0), 0, 1).astype(np.float32)
        if marks.get("step_type", True):
            file["step_type"] = kinds


def test_vd4rl_episodes_are_where_step_type_says(tmp_path: Path) -> None:
    """Without it all steps would be one trajectory, which runs across resets."""
    write_steps(tmp_path / "steps.hdf5")
    data = VD4RLExperienceReplay(
        "walker", root=tmp_path, fetch=lambda *_: tmp_path / "steps.hdf5", totensor=False
    )
    rows = data[:]
    check_rows(rows)
    assert rows["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 2, 2]
    assert rows["pixels"][:, 0, 0, 0].tolist() == [0, 1, 2, 10, 20, 21]
    assert rows["next", "pixels"][:, 0, 0, 0].tolist() == [1, 2, 3, 11, 21, 22]
    assert rows["action"].tolist() == [[0, 1], [0, 2], [0, 3], [1, 1], [2, 1], [2, 2]]
    assert rows["next", "terminated"].view(-1).tolist() == [False, False, True, False, False, False]
    assert rows["next", "truncated"].view(-1).tolist() == [False, False, False, True, False, True]
    assert not {"state", ("collector", "next_known")} & set(rows.keys(True))


def test_vd4rl_steps_without_marks_are_refused(tmp_path: Path) -> None:
    write_steps(tmp_path / "steps.hdf5", step_type=False)
    with pytest.raises(ValueError, match="has none of is_first, is_last, step_type"):
        list(read_vd4rl(tmp_path / "steps.hdf5"))


def test_vd4rl_episodes_that_only_their_ends_tell(tmp_path: Path) -> None:
    ends = {"is_last": np.array([0, 0, 1, 0, 1], bool)}
    images = np.zeros((5, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "0.npz", **ends, image=images, action=np.zeros((5, 2)), reward=np.zeros(5))
    assert [len(episode) for episode in read_vd4rl(tmp_path)] == [2, 1]


def test_vd4rl_episodes_without_a_row_and_odd_images(tmp_path: Path) -> None:
    one = {"image": np.zeros((1, 4, 4, 3), np.uint8), "action": np.zeros((1, 2)), "reward": np.zeros(1)}
    np.savez(tmp_path / "0.npz", **one)
    np.savez(tmp_path / "1.npz", **{name: np.repeat(array, 2, 0) for name, array in one.items()})
    (episode,) = read_vd4rl(tmp_path)
    assert len(episode) == 1 and bool(episode["next", "truncated"])
    np.savez(tmp_path / "1.npz", **(one | {"image": np.zeros((1, 4), np.uint8)}))
    with pytest.raises(ValueError, match=r"must be images"):
        list(read_vd4rl(tmp_path / "1.npz"))


# -- D4RL --------------------------------------------------------------------------------------------------------------


def test_d4rl_columns_of_all_kinds(tmp_path: Path) -> None:
    """Flags of floats, rewards [N, 1], big-endian and float16 numbers, nested groups, episodes of one step."""
    over = np.array([0, 1, 1, 0, 0], np.float32)
    with h5py.File(tmp_path / "steps.hdf5", "w") as file:
        file["observations"] = np.arange(10).reshape(5, 2).astype(">f8")
        file["actions"] = np.arange(5).astype(np.float16)
        file["rewards"] = np.arange(5.0)[:, None]
        file["terminals"], file["timeouts"] = over * [0, 1, 0, 0, 0], (over * [0, 0, 1, 0, 0])[:, None]
        file["infos/qpos/arm"] = np.arange(5).astype(">i2")
        file.create_group("metadata")["algorithm"] = "SAC"
    episodes = list(read_d4rl(tmp_path / "steps.hdf5"))
    assert [len(episode) for episode in episodes] == [2, 1, 2]
    rows: Any = torch.cat(episodes)
    check_rows(rows)
    assert rows["observation"].dtype is torch.float64 and rows["action"].dtype is torch.float16
    assert rows["observation"].tolist() == np.arange(10).reshape(5, 2).tolist()
    assert rows["infos", "qpos", "arm"].tolist() == [0, 1, 2, 3, 4]
    assert rows["next", "reward"].tolist() == [[0.0], [1.0], [2.0], [3.0], [4.0]]
    assert rows["next", "terminated"].view(-1).tolist() == [False, True, False, False, False]
    assert rows["next", "truncated"].view(-1).tolist() == [False, False, True, False, False]
    assert rows["collector", "next_known"].tolist() == [True, False, False, True, False]


# -- RoboSet -----------------------------------------------------------------------------------------------------------


def test_roboset_groups_of_observations_and_an_empty_trial(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "0.h5", "w") as file:
        for number, length in enumerate([2, 0, 1]):
            trial = file.create_group(f"Trial{number}")
            place = np.full(length, 10 * number) + np.arange(length)
            trial["observations/joint/angle"], trial["actions"] = place[:, None], place
            trial["rewards"] = place.astype(np.float64)[:, None]
    data = RobosetExperienceReplay("open", root=tmp_path, fetch=lambda *_: tmp_path / "0.h5")
    rows = data[:]
    check_rows(rows)
    assert rows["observation", "joint", "angle"].view(-1).tolist() == [0, 1, 20]
    assert rows["next", "reward"].tolist() == [[0.0], [1.0], [20.0]]
    assert rows["collector", "traj_ids"].tolist() == [0, 0, 1]
    with h5py.File(tmp_path / "0.h5", "a") as file:
        del file["Trial2/actions"]
        file["Trial2/actions/arm"] = np.ones(1)
    with pytest.raises(KeyError, match="has no 'actions'"):
        list(read_roboset(tmp_path / "0.h5"))


def test_gen_dgrl_ids_go_on_in_the_next_archive(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, number in (("a", 2), ("b", 1)):
        members = {f"{place}.npy": saved(trajectory(1)) for place in range(number)}
        write_archive(tmp_path / f"in/{name}.tar.xz", dict(members))
    data = GenDGRLExperienceReplay("maze-10M", root=tmp_path / "root", fetch=lambda *_: tmp_path / "in")
    check_rows(data[:])
    assert data[:]["collector", "traj_ids"].tolist() == [0, 1, 2]


# -- LeRobot v3, as LeRobot writes it ----------------------------------------------------------------------------------


def write_lerobot(root: Path, *, flags: dict[str, list[bool]], channels_first: bool = False) -> None:
    """Two episodes, of 3 and 2 frames, in a file each; lists of any length, one row group, a text, JPEG cells."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
        (root / folder).mkdir(parents=True)
    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": {"motors": ["x", "y"]}},
        "observation.images.top": {
            "dtype": "image",
            "shape": [4, 6, 3],
            "names": ["height", "width", "channel"],
        },
        "observation.grid": {"dtype": "int64", "shape": [2, 2], "names": None},
        "action": {"dtype": "float32", "shape": [1], "names": None},
        "next.reward": {"dtype": "float64", "shape": [1], "names": None},
        "language": {"dtype": "string", "shape": [1], "names": None},
        **{name: {"dtype": "bool", "shape": [1], "names": None} for name in flags},
        **{
            name: {"dtype": "int64", "shape": [1], "names": None}
            for name in ("index", "episode_index", "task_index")
        },
        **{name: {"dtype": "float32", "shape": [1], "names": None} for name in ("timestamp",)},
    }
    if channels_first:
        features["observation.images.top"] |= {"shape": [3, 4, 6], "names": ["channels", "height", "width"]}
    episodes = []
    for number, (first, length) in enumerate([(0, 3), (3, 2)]):
        frames = []
        for step in range(length):
            picture = io.BytesIO()
            colors = np.full((4, 6, 3), 20 * number + step, np.uint8)
            image.fromarray(colors).save(picture, format="PNG" if number else "JPEG", quality=100)
            frames.append(
                {
                    "observation.state": [float(number), float(step)],
                    "observation.images.top": {"bytes": picture.getvalue(), "path": f"{step}.png"},
                    "observation.grid": [[number, step], [step, number]],
                    "action": float(step),
                    "next.reward": step / 3,
                    "language": "reach",
                    **{name: column[first + step] for name, column in flags.items()},
                    "timestamp": step / 10,
                    "index": first + step,
                    "episode_index": number,
                    "task_index": number,
                }
            )
        parquet.write_table(
            pyarrow.Table.from_pylist(frames), root / f"data/chunk-000/file-{number:03d}.parquet"
        )
        place = {"data/chunk_index": 0, "data/file_index": number, "stats/action/mean": [0.5]}
        bounds = {"dataset_from_index": first, "dataset_to_index": first + length}
        episodes.append({"episode_index": number, "tasks": ["reach"], "length": length, **place, **bounds})
    parquet.write_table(
        pyarrow.Table.from_pylist(episodes), root / "meta/episodes/chunk-000/file-000.parquet"
    )
    info = {"codebase_version": "v3.0", "fps": 10, "total_episodes": 2, "features": features}
    (root / "meta/info.json").write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("flags", "terminated", "truncated"),
    [
        ({}, [], [2, 4]),
        ({"next.done": [False, False, True, False, False]}, [2], [4]),
        (
            {
                "next.done": [False, False, True, False, True],
                "next.truncated": [False, False, True, False, False],
            },
            [4],
            [2],
        ),
        (
            {
                "next.done": [False, False, True, False, True],
                "next.terminated": [False, False, True, False, False],
            },
            [2],
            [4],
        ),
    ],
)
def test_lerobot_flags(tmp_path: Path, flags: dict[str, list[bool]], terminated: Any, truncated: Any) -> None:
    write_lerobot(tmp_path / "set", flags=flags, channels_first=bool(flags))
    data = LeRobotExperienceReplay("reach", root=tmp_path, fetch=lambda *_: tmp_path / "set")
    rows = data[:]
    check_rows(rows)
    assert rows["next", "terminated"].view(-1).nonzero().view(-1).tolist() == terminated
    assert rows["next", "truncated"].view(-1).nonzero().view(-1).tolist() == truncated
    assert rows["observation", "state"].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
    assert rows["next", "observation", "state"].tolist() == [[0, 1], [0, 2], [0, 2], [1, 1], [1, 1]]
    assert rows["collector", "next_known"].tolist() == [True, True, False, True, False]
    assert rows["observation", "grid"].tolist()[2] == [[0, 2], [2, 0]]
    assert rows["observation", "images", "top"].shape == (5, 4, 6, 3)
    assert rows["observation", "images", "top"][3:, 0, 0, 0].tolist() == [20, 21]
    assert rows["action"].tolist() == [[0.0], [1.0], [2.0], [0.0], [1.0]]
    assert rows["next", "reward"].shape == (5, 1) and rows["task_index"].view(-1).tolist() == [0, 0, 0, 1, 1]
    assert rows["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1]
    assert not {"language", "timestamp", "index", "episode_index"} & set(rows.keys())


@pytest.mark.parametrize("wrong", [3, None, torch.zeros(2)])
def test_what_is_no_iterable_is_refused_by_name(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="episodes must be an iterable of episodes"):
        list(read_rlds(wrong))
    with pytest.raises(TypeError, match="episodes must be an iterable of steps, or a mapping with 'steps'"):
        list(read_rlds([wrong]))
    with pytest.raises(TypeError, match="paths must be a path, or an iterable of paths"):
        files_in(wrong, (".h5",))
    with pytest.raises(TypeError, match="batches must be a list or an iterator"):
        convert(wrong, tmp_path / "set")
