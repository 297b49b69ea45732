"""Minari sets of flatroll's rows, opened, sampled, filtered and joined by Minari; and the other way round."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from interop_rows import LENGTHS, episodes, same
from tensordict import TensorDict

from flatroll.export import export, import_minari

minari = pytest.importorskip("minari")
for library in ("h5py", "pyarrow"):
    pytest.importorskip(library)
OBSERVATIONS = gym.spaces.Dict(
    observation=gym.spaces.Box(0, 1, (2,)),
    pixels=gym.spaces.Box(0, 255, (6, 5, 3), np.uint8),
    arm=gym.spaces.Dict(
        angle=gym.spaces.Box(0, 1, (1,), np.float64), level=gym.spaces.Box(0, 9, (), np.int16)
    ),
)
each_format = pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Minari looks for sets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


def saved(rows: TensorDict, home: Path, name: str, **options: Any) -> Any:
    place = home / "flatroll" / f"{name}-v0"
    place.parent.mkdir(exist_ok=True)
    place.mkdir()
    options |= {"observation_space": OBSERVATIONS, "action_space": gym.spaces.Discrete(5)}
    export(rows, place / "data", "minari", dataset_id=f"flatroll/{name}-v0", **options)
    return minari.load_dataset(f"flatroll/{name}-v0")


@each_format
def test_episodes(rows: TensorDict, home: Path, data_format: str) -> None:
    data = saved(rows, home, "rows", data_format=data_format)
    assert (data.total_episodes, data.total_steps) == (len(LENGTHS), sum(LENGTHS))
    for wanted, episode in zip(episodes(), data.iterate_episodes(), strict=True):
        for key, read in (
            ("observation", episode.observations["observation"]),
            ("pixels", episode.observations["pixels"]),
            (("arm", "angle"), episode.observations["arm"]["angle"]),
        ):
            same(wanted[key], read[:-1])
            same(wanted["next"][key], read[1:])
        same(wanted["action"], episode.actions)
        same(wanted["next", "reward"][:, 0], np.asarray(episode.rewards, np.float32))
        same(wanted["next", "terminated"][:, 0], episode.terminations)
        same(wanted["next", "truncated"][:, 0], episode.truncations)


@each_format
def test_filters_and_samples(rows: TensorDict, home: Path, data_format: str) -> None:
    data = saved(rows, home, "rows", data_format=data_format)
    ended = data.filter_episodes(lambda episode: episode.terminations[-1])
    assert [len(episode.rewards) for episode in ended.iterate_episodes()] == [4]
    assert len(list(data.sample_episodes(2))) == 2


@each_format
def test_joined_and_split_by_minari(rows: TensorDict, home: Path, data_format: str) -> None:
    first = saved(rows, home, "first", data_format=data_format)
    second = saved(rows, home, "second", data_format=data_format)
    joined = minari.combine_datasets([first, second], "flatroll/both-v0")
    assert joined.total_steps == 2 * sum(LENGTHS)
    parts = minari.split_dataset(joined, [2, 4], seed=0)
    assert [part.total_episodes for part in parts] == [2, 4]


def test_episodes_that_minari_wrote(home: Path) -> None:
    """Its steps are rows, bit by bit."""
    env = gym.make("Pendulum-v1", max_episode_steps=5)
    seen, buffers = [], []
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        episode: dict[str, list[Any]] = {"observations": [observation], "actions": [], "rewards": []}
        episode |= {"terminations": [], "truncations": []}
        for _ in range(5):
            action = env.action_space.sample()
            following, reward, terminated, truncated, _ = env.step(action)
            seen.append((observation, action, reward, following, terminated, truncated))
            for name, value in zip(episode, (following, action, reward, terminated, truncated), strict=True):
                episode[name].append(value)
            observation = following
        arrays = {name: np.array(values) for name, values in episode.items()}
        buffers.append(minari.data_collector.EpisodeBuffer(id=seed, seed=seed, infos={}, **arrays))
    minari.create_dataset_from_buffers("flatroll/own-v0", buffers, env=env.spec)
    rows = import_minari(minari.load_dataset("flatroll/own-v0"))
    observations, actions, rewards, followings, terminated, truncated = map(np.array, zip(*seen, strict=True))
    same(observations, rows["observation"])
    same(followings, rows["next", "observation"])
    same(actions, rows["action"])
    np.testing.assert_allclose(rows["next", "reward"][:, 0].numpy(), rewards, rtol=1e-6)
    same(terminated, rows["next", "terminated"][:, 0])
    same(truncated, rows["next", "truncated"][:, 0])
