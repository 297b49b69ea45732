"""Rows of every space in Minari's files, written here and read by Minari; and Minari's own sets, some with gaps."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from flatroll.buffers import LazyTensorStorage, ListStorage, ReplayBuffer
from flatroll.datasets import BaseDatasetExperienceReplay, MinariExperienceReplay, convert
from flatroll.export import (
    export,
    from_numpy,
    import_arrow,
    import_h5,
    import_lerobot,
    import_minari,
    import_pandas,
    import_parquet,
    read_minari,
    to_numpy,
)
from flatroll.layout.keys import as_tuple
from flatroll.modules import actor
from flatroll.rollouts import Collector, rollout

for library in ("h5py", "pyarrow", "PIL"):
    pytest.importorskip(library)
minari = pytest.importorskip("minari")
EpisodeBuffer: Any = pytest.importorskip("minari.data_collector").EpisodeBuffer

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:minari", "ignore:.*Box.*:UserWarning")

BOX = spaces.Box(-1, 1, (2,), np.float32)
COUNT = spaces.Discrete(3)
SPACES: dict[str, spaces.Space[Any]] = {
    "box": BOX,
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "number": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (40, 40, 3), np.uint8),
    "discrete": COUNT,
    "discrete from 5": spaces.Discrete(3, start=5),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(3),
    "tuple": spaces.Tuple((BOX, COUNT)),
    "tuple of one": spaces.Tuple((BOX,)),
    "tuple in a tuple": spaces.Tuple((spaces.Tuple((COUNT, BOX)), COUNT)),
    "eleven parts": spaces.Tuple((COUNT,) * 11),
    "dict": spaces.Dict(leg=BOX, arm=spaces.Dict(left=BOX, right=COUNT)),
    "tuple in a dict": spaces.Dict(pair=spaces.Tuple((BOX, COUNT)), leg=BOX),
    "dict in a tuple": spaces.Tuple((spaces.Dict(leg=BOX, arm=COUNT), COUNT)),
    "dots": spaces.Dict({"robot0.pos": BOX, "robot0.arm": spaces.Dict({"a.b": COUNT})}),
}


class Diary(gym.Env[Any, Any]):
    """Random observations; the diary has, episode by episode, what the env gave and got."""

    def __init__(self, observation: str = "box", action: str = "box") -> None:
        self.observation_space = SPACES[observation]
        self.action_space = SPACES[action]
        self.observation_space.seed(3)
        self.episodes: list[dict[str, list[Any]]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episodes.append({"seen": [self.observation_space.sample()], "acted": [], "paid": []})
        return self.episodes[-1]["seen"][0], {}

    def step(self, action: Any) -> Any:
        episode = self.episodes[-1]
        episode["seen"].append(self.observation_space.sample())
        episode["acted"].append(action)
        episode["paid"].append(float(len(self.episodes) * 10 + len(episode["acted"])))
        over = len(episode["acted"]) == 1 + len(self.episodes) % 3
        return episode["seen"][-1], episode["paid"][-1], over, False, {}


def same(column: Any, values: list[Any]) -> bool:
    """Whether a tree of columns, as Minari gives it, has these values, one after the other."""
    if isinstance(values[0], dict):
        return set(column) == set(values[0]) and all(
            same(column[name], [value[name] for value in values]) for name in values[0]
        )
    if isinstance(values[0], tuple):
        return (
            isinstance(column, tuple)
            and len(column) == len(values[0])
            and all(same(part, [value[place] for value in values]) for place, part in enumerate(column))
        )
    return np.array_equal(column, np.stack([np.asarray(value) for value in values]))


def played(env: Diary) -> TensorDictBase:
    return rollout(env, actor(env), num_steps=12, seed=0)


def check_equal(rows: TensorDictBase, again: TensorDictBase) -> None:
    assert set(rows.keys(True, True)) == set(again.keys(True, True))
    for key in rows.keys(True, True):
        assert rows[key].dtype == again[key].dtype, key
        assert torch.equal(rows[key], again[key]), key


@pytest.mark.cover(2)
@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("of", ["observation", "action"])
def test_every_space_is_written_here_and_read_by_minari(
    of: str, name: str, data_format: str, tmp_path: Path
) -> None:
    if of == "action" and name in ("image", "discrete from 5"):
        env = Diary(action=name)
        rows = rollout(env, num_steps=12, seed=0)
    else:
        env = Diary(**{of: name})
        rows = played(env)
    export(
        rows,
        tmp_path / "set",
        "minari",
        data_format=data_format,
        observation_space=env.observation_space,
        action_space=env.action_space,
    )
    data = minari.MinariDataset(tmp_path / "set")
    assert (data.observation_space, data.action_space) == (env.observation_space, env.action_space)
    count = 0
    for episode, wrote in zip(data.iterate_episodes(), env.episodes, strict=False):
        steps = len(episode)
        assert same(episode.observations, wrote["seen"][: steps + 1])
        assert same(episode.actions, wrote["acted"][:steps])
        assert episode.rewards.tolist() == wrote["paid"][:steps]
        assert steps == len(wrote["acted"]) or count + steps == 12
        count += steps
    assert count == 12
    check_equal(rows, import_minari(tmp_path / "set"))


def test_what_an_action_space_does_not_have_is_an_info(tmp_path: Path) -> None:
    env = Diary(action="dict")
    rows = played(env)
    export(rows, tmp_path / "set", "minari", observation_space=BOX, action_space=env.action_space)
    episode = next(iter(minari.MinariDataset(tmp_path / "set").iterate_episodes()))
    assert set(episode.actions) == {"leg", "arm"} and set(episode.actions["arm"]) == {"left", "right"}
    logs = episode.infos["action.arm.left_log_prob"]
    assert logs[:-1, 0].tolist() == rows["action", "arm", "left_log_prob"][: len(episode)].tolist()


@pytest.mark.parametrize("name", ["box", "dict", "discrete"])
def test_spaces_of_a_collector_are_known(name: str, tmp_path: Path) -> None:
    """The log-probabilities that an actor writes beside the parts of an action are no parts of the space."""
    env = Diary(name, name)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20))
    for _ in Collector(env, actor(env), frames_per_batch=12, total_frames=12, replay_buffer=buffer):
        pass
    export(buffer, tmp_path / "set", "minari")
    data = minari.MinariDataset(tmp_path / "set")
    assert (data.observation_space, data.action_space) == (env.observation_space, env.action_space)
    check_equal(buffer[:], import_minari(tmp_path / "set"))


@pytest.mark.parametrize("argument", ["observation_space", "action_space"])
@pytest.mark.parametrize("name", ["tuple", "tuple in a dict"])
def test_columns_do_not_show_whether_parts_by_number_are_a_tuple(
    argument: str, name: str, tmp_path: Path
) -> None:
    env = Diary(**{argument.removesuffix("_space"): name})
    buffer = ReplayBuffer(storage=LazyTensorStorage(20))
    for _ in Collector(env, frames_per_batch=12, total_frames=12, replay_buffer=buffer):
        pass
    with pytest.raises(ValueError, match=rf"{argument} must be given.*\['0', '1'\], which may be of a Tuple"):
        export(buffer, tmp_path / "set", "minari")
    assert not list(tmp_path.iterdir())
    export(buffer, tmp_path / "set", "minari", **{argument: getattr(env, argument)})
    check_equal(buffer[:], import_minari(tmp_path / "set"))


def test_spaces_that_are_not_those_of_the_rows(tmp_path: Path) -> None:
    env = Diary()
    rows = rollout(env, num_steps=4)
    right = {"observation_space": BOX, "action_space": BOX}
    for changed, text in [
        ({"observation_space": spaces.Dict(pose=BOX)}, "has the entry 'pose', which the batch lacks"),
        ({"action_space": spaces.Box(-1, 1, (3,))}, r"'action' has the shape \[2\] in the batch"),
        ({"observation_space": spaces.Text(3)}, "which Minari's files cannot hold"),
        ({"observation_space": spaces.Sequence(COUNT)}, "which Minari's files cannot hold"),
    ]:
        with pytest.raises(ValueError, match=text):
            export(rows, tmp_path / "set", "minari", **{**right, **changed})
    wide = rows.clone()
    wide["observation"] = wide["observation"].double()
    wide["next", "observation"] = wide["next", "observation"].double()
    with pytest.raises(ValueError, match=r"'observation' is float64 in the batch.*data_format=\"hdf5\""):
        export(wide, tmp_path / "set", "minari", data_format="arrow", **right)
    export(wide, tmp_path / "wide", "minari", **right)
    assert import_minari(tmp_path / "wide")["observation"].dtype is torch.float64
    rows["nothing"] = torch.zeros(4, 0)
    with pytest.raises(ValueError, match="'nothing' has rows without numbers"):
        export(rows, tmp_path / "set", "minari", **right)
    rows["a.b"] = rows["a", "b"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"would both be the info 'a\.b'"):
        export(rows.exclude("nothing"), tmp_path / "set", "minari", **right)
    assert [place.name for place in tmp_path.iterdir()] == ["wide"]


# -- sets of Minari's own making ---------------------------------------------------------------------------------------


def new_set(path: Path, observation: Any, episodes: list[Any], data_format: str = "hdf5") -> Path:
    path.mkdir()
    storage = minari.dataset.minari_storage.MinariStorage.new(
        path, observation_space=observation, action_space=COUNT, data_format=data_format, jpeg_encoding=False
    )
    storage.update_metadata({"dataset_id": "x/y-v0", "minari_version": minari.__version__})
    storage.update_episodes(episodes)
    return path


def episode(observations: Any, steps: int, first: int = 0) -> Any:
    return EpisodeBuffer(
        observations=observations,
        actions=np.arange(steps) % 3,
        rewards=np.arange(first, first + steps) + 0.5,
        terminations=np.arange(steps) == steps - 1,
        truncations=np.zeros(steps, bool),
    )


def test_an_actor_reads_collected_rows_and_minaris_of_one_tuple_env(tmp_path: Path) -> None:
    env = Diary("tuple", "discrete")
    policy = actor(env)
    collected = rollout(env, policy, num_steps=12, seed=0)
    seen = tuple(
        np.concatenate([collected["observation", part], collected["next", "observation", part][-1:]])
        for part in ("0", "1")
    )
    there = import_minari(new_set(tmp_path / "set", env.observation_space, [episode(seen, 12)]))
    for key in collected.select("observation", ("next", "observation")).keys(True, True):
        if key[0] == "observation":
            assert torch.equal(there[key], collected[key])
    assert policy(there.clone())["action"].shape == (12,)


def test_names_with_dots_are_those_of_collected_rows(tmp_path: Path) -> None:
    seen = {"robot0.pos": np.arange(8, dtype=np.float32).reshape(4, 2), "robot0.arm": {"a.b": np.arange(4)}}
    space = SPACES["dots"]
    path = new_set(tmp_path / "set", space, [episode(seen, 3)])
    rows = import_minari(path)
    collected = rollout(Diary("dots"), num_steps=3)
    assert set(collected.keys(True, True)) <= set(rows.keys(True, True))
    assert rows["next", "robot0.arm", "a.b"].tolist() == [1, 2, 3]
    converted = MinariExperienceReplay("dots", root=tmp_path / "home", fetch=lambda *_: path)
    check_equal(rows, converted[:])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_episode_without_its_last_observation(which: int, tmp_path: Path) -> None:
    """Its last next observation is unknown, the rest is read."""
    made = []
    for number in range(3):
        count = 3 + (number != which)
        seen = np.arange(count)[:, None] + 10.0 * number + np.zeros((1, 2))
        made.append(episode(seen.astype(np.float32), 3, 10 * number))
    path = new_set(tmp_path / "set", spaces.Box(-99, 99, (2,)), made)
    rows = import_minari(path)
    known = torch.ones(9, dtype=torch.bool)
    known[3 * which + 2] = False
    assert torch.equal(rows["collector", "next_known"], known)
    assert rows["observation"][:, 0].tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    following = torch.tensor([1.0, 2, 3, 11, 12, 13, 21, 22, 23])
    following[3 * which + 2] -= 1  # the row's own
    assert torch.equal(rows["next", "observation"][:, 0], following)
    assert rows["next", "reward"][:, 0].tolist() == [0.5, 1.5, 2.5, 10.5, 11.5, 12.5, 20.5, 21.5, 22.5]
    assert rows["next", "terminated"][:, 0].tolist() == [False, False, True] * 3
    data = MinariExperienceReplay("cut", root=tmp_path / "home", fetch=lambda *_: path)
    check_equal(rows, data[:])


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
def test_minaris_own_reader_loses_a_step_of_other_files(data_format: str, tmp_path: Path) -> None:
    seen = np.zeros((3, 2), np.float32)
    path = new_set(tmp_path / "set", BOX, [episode(seen, 3)], data_format)
    assert len(next(iter(minari.MinariDataset(path).iterate_episodes()))) == 2
    with pytest.raises(ValueError, match="episode 0 has 3 steps, but Minari's library reads 2 of its"):
        import_minari(path)


def test_episodes_of_other_lengths_are_named(tmp_path: Path) -> None:
    seen = np.zeros((6, 2), np.float32)
    path = new_set(tmp_path / "set", BOX, [episode(seen[:4], 3), episode(seen, 3)])
    with pytest.raises(
        ValueError, match=r"episode 1 has 6 observations 'observation' for 3 steps, expected 4"
    ):
        import_minari(path)
    broken = episode(seen[:4], 3)
    broken.actions.resize(2, refcheck=False)
    path = new_set(tmp_path / "other", BOX, [broken])
    with pytest.raises(ValueError, match="episode 0 has 2 values of action for 3 steps"):
        import_minari(path)


MISSION = spaces.Dict(image=BOX, direction=spaces.Discrete(4), mission=spaces.Text(30))


@pytest.fixture(params=["hdf5", "arrow", "parquet"])
def missions(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two episodes as those of MiniGrid and BabyAI are."""
    made = []
    for number, goal in enumerate(["go to the red ball", "öffne die Tür"]):
        seen = {
            "image": np.full((4, 2), number / 2, np.float32),
            "direction": np.arange(4),
            "mission": [goal] * 4,
        }
        made.append(episode(seen, 3))
    return new_set(tmp_path / "set", MISSION, made, request.param)


def test_texts_are_left_out_with_one_warning(missions: Path, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"\['mission'\] are texts.*leave_out=\['mission'\].*texts=True"
    ) as seen:
        rows = import_minari(missions)
    assert len(seen) == 1
    assert rows["direction"].tolist() == [0, 1, 2] * 2 and "mission" not in rows
    check_equal(rows, import_minari(missions, leave_out=["mission"]))  # without a warning
    data = MinariExperienceReplay(
        "set", root=tmp_path / "home", leave_out=["mission"], fetch=lambda *_: missions
    )
    check_equal(rows, data[:])
    with pytest.raises(ValueError, match=r"was converted with options .*'leave_out': \['mission'\]"):
        MinariExperienceReplay("set", root=tmp_path / "home")
    less = import_minari(missions, leave_out=["mission", "image"])
    assert "image" not in less and "direction" in less
    with pytest.raises(ValueError, match=r"leave_out names 'goal', which is not one of the observations"):
        import_minari(missions, leave_out=["goal"])
    with pytest.raises(
        TypeError, match=r"leave_out must be a list of names, got 'mission': pass \['mission'\]"
    ):
        import_minari(missions, leave_out="mission")


def test_texts_are_kept_where_they_are_asked_for(missions: Path) -> None:
    rows = import_minari(missions, texts=True)
    assert list(rows["mission"]) == ["go to the red ball"] * 3 + ["öffne die Tür"] * 3
    assert list(rows["next", "mission"]) == list(rows["mission"])
    buffer = ReplayBuffer(storage=ListStorage(10), batch_size=2, collate_fn=lambda items: items)
    for part in read_minari(missions, texts=True):
        buffer.extend(list(part))
    assert buffer[4]["mission"] == "öffne die Tür" and buffer[4]["direction"] == 1


# -- the names of an actor's entries -----------------------------------------------------------------------------------


READERS = {
    "parquet": import_parquet,
    "arrow": import_arrow,
    "pandas": import_pandas,
    "h5": import_h5,
    "lerobot": import_lerobot,
}


@pytest.mark.parametrize("format", READERS)
@pytest.mark.parametrize("name", ["dict", "tuple in a tuple", "tuple in a dict"])
def test_rows_of_an_actor_of_nested_actions_go_to_every_format(
    name: str, format: str, tmp_path: Path
) -> None:
    rows = played(Diary(action=name))
    assert not [key for key in rows.keys(True, True) if "." in "".join(as_tuple(key))]
    assert from_numpy(to_numpy(rows)).batch_size == (12,)
    export(rows, tmp_path / "rows", format)
    assert rows["collector", "traj_ids"].diff().min() >= 0  # in order of episodes, as they come back
    check_equal(rows, READERS[format](tmp_path / "rows"))
    convert([rows], tmp_path / "folder")
    check_equal(rows, BaseDatasetExperienceReplay(tmp_path / "folder")[:])


@pytest.mark.parametrize("format", READERS)
def test_names_with_dots_go_to_every_format(format: str, tmp_path: Path) -> None:
    rows = played(Diary("dots", "dots"))
    kept: dict[str, Any] = {}
    if format in ("parquet", "arrow", "pandas"):
        with pytest.raises(ValueError, match=r"has '\.' in its name: pass another separator="):
            export(rows, tmp_path / "rows", format)
        kept = {"separator": "|"}
    export(rows, tmp_path / "rows", format, **kept)
    check_equal(rows, READERS[format](tmp_path / "rows", **kept))


def test_a_slash_would_be_a_group_of_hdf5(tmp_path: Path) -> None:
    rows = played(Diary())
    rows["a/b"] = torch.zeros(12)
    with pytest.raises(ValueError, match=r"'a/b' has '/' in its name, which separates groups in HDF5"):
        export(rows, tmp_path / "rows.h5")
