"""Files as D4RL has them: where episodes end, and the next observation that is in no file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatroll.datasets.formats.d4rl import read_d4rl
from flatroll.layout import audit

h5py = pytest.importorskip("h5py")


def write(path: Path, **others: Any) -> None:
    steps = {
        "observations": np.arange(14, dtype=np.float32).reshape(7, 2),
        "actions": np.ones((7, 1), np.float32),
        "rewards": np.arange(7.0),
        "terminals": np.array([0, 0, 1, 0, 0, 0, 0], bool),
        "timeouts": np.array([0, 0, 0, 0, 1, 0, 0], bool),
        "infos/qpos": np.zeros((7, 3)),
    }
    with h5py.File(path, "w") as file:
        for name, column in {**steps, **others}.items():
            if column is not None:
                file[name] = column
        file["metadata/algorithm"] = "SAC"


def test_episodes_end_where_the_file_says_and_the_last_one_is_cut(tmp_path: Path) -> None:
    write(tmp_path / "steps.hdf5")
    episodes = list(read_d4rl(tmp_path / "steps.hdf5"))
    assert [len(episode) for episode in episodes] == [3, 2, 2]
    rows = torch.cat(episodes)
    assert not [finding for finding in audit(rows) if finding.severity == "error"]
    assert rows["next", "done"].squeeze(-1).tolist() == [False, False, True, False, True, False, False]
    assert rows["next", "truncated"].squeeze(-1).tolist() == [False] * 4 + [True, False, False]
    assert rows["infos", "qpos"].shape == (7, 3)


def test_the_next_observation_after_an_episode_is_not_that_of_the_next_one(tmp_path: Path) -> None:
    """The peer takes the next episode's first observation for it."""
    write(tmp_path / "steps.hdf5")
    rows = torch.cat(list(read_d4rl(tmp_path / "steps.hdf5")))
    known = rows["collector", "next_known"]
    assert known.tolist() == [True, True, False, True, False, True, False]
    assert torch.equal(rows["next", "observation"][known], rows["observation"].roll(-1, 0)[known])
    assert torch.equal(rows["next", "observation"][~known], rows["observation"][~known])
    dropped = list(read_d4rl(tmp_path / "steps.hdf5", drop_unknown=True))
    assert [len(episode) for episode in dropped] == [3, 1, 1]


def test_next_observations_of_the_file_are_taken(tmp_path: Path) -> None:
    later = np.arange(14, dtype=np.float32).reshape(7, 2) + 100
    write(tmp_path / "steps.hdf5", next_observations=later, timeouts=None)
    episodes = list(read_d4rl(tmp_path / "steps.hdf5", drop_unknown=True))
    assert [len(episode) for episode in episodes] == [3, 4]
    rows = torch.cat(episodes)
    assert np.array_equal(rows["next", "observation"].numpy(), later)
    assert ("collector", "next_known") not in rows.keys(True)


def test_files_that_lack_something_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "steps.hdf5", rewards=None)
    with pytest.raises(KeyError, match="no dataset 'rewards'"):
        list(read_d4rl(tmp_path / "steps.hdf5"))
    write(tmp_path / "steps.hdf5", rewards=np.ones(6))
    with pytest.raises(ValueError, match="got lengths"):
        list(read_d4rl(tmp_path / "steps.hdf5"))
