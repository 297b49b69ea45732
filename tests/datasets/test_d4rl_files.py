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
    later = np.arange(14, dtype=np.float32).reshape(7, 2) + 2
    write(tmp_path / "steps.hdf5", next_observations=later, timeouts=None)
    episodes = list(read_d4rl(tmp_path / "steps.hdf5", drop_unknown=True))
    assert [len(episode) for episode in episodes] == [3, 4]
    rows = torch.cat(episodes)
    assert np.array_equal(rows["next", "observation"].numpy(), later)
    assert ("collector", "next_known") not in rows.keys(True)


def test_files_that_lack_something_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "steps.hdf5", actions=None)
    with pytest.raises(KeyError, match="no dataset 'actions'"):
        list(read_d4rl(tmp_path / "steps.hdf5"))
    write(tmp_path / "steps.hdf5", rewards=np.ones(6))
    with pytest.raises(ValueError, match="got lengths"):
        list(read_d4rl(tmp_path / "steps.hdf5"))


def test_a_set_without_rewards(tmp_path: Path) -> None:
    write(tmp_path / "steps.hdf5", rewards=None)
    rows = torch.cat(list(read_d4rl(tmp_path / "steps.hdf5")))
    assert len(rows) == 7 and ("next", "reward") not in rows.keys(True)
    assert rows["next", "terminated"].view(-1).nonzero().tolist() == [[2]]
    assert rows["action"].tolist() == [[1]] * 7


# (env, episode, step) of seven rows: episodes of 3, 2 and 2 steps.
SEEN = np.array([[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1]], np.float32)
LATER = SEEN + np.array([0, 0, 1], np.float32)


@pytest.mark.parametrize(
    ("terminals", "done"), [(None, []), ([0, 0, 1, 0, 0, 0, 0], [2]), ([0, 0, 0, 0, 0, 0, 0], [])]
)
@pytest.mark.parametrize("precise", [np.float32, np.float64])
def test_next_observations_show_where_episodes_end(
    terminals: list[int] | None, done: list[int], precise: type, tmp_path: Path
) -> None:
    """Without timeouts; what an episode ended with is unknown, so no flag is set."""
    later = LATER.astype(precise)
    later[1] = np.nan  # an observation may be that
    seen = SEEN.copy()
    seen[2] = np.nan
    flags = None if terminals is None else np.array(terminals, bool)
    write(
        tmp_path / "steps.hdf5",
        observations=seen,
        next_observations=later,
        terminals=flags,
        timeouts=None,
    )
    episodes = list(read_d4rl(tmp_path / "steps.hdf5"))
    assert [len(episode) for episode in episodes] == [3, 2, 2]
    rows = torch.cat(episodes)
    assert rows["is_init"].view(-1).tolist() == [True, False, False, True, False, True, False]
    assert rows["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert np.array_equal(rows["next", "observation"].numpy(), later, equal_nan=True)
    assert rows["next", "done"].view(-1).nonzero().view(-1).tolist() == done
    assert not rows["next", "truncated"].any()


def test_timeouts_decide_where_they_are_there(tmp_path: Path) -> None:
    write(tmp_path / "steps.hdf5", observations=SEEN, next_observations=LATER + 9)
    assert [len(episode) for episode in read_d4rl(tmp_path / "steps.hdf5")] == [3, 2, 2]


def test_many_rows_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatroll.datasets.formats.d4rl._ROWS_AT_ONCE", 2)
    arrays = {"observations": SEEN, "next_observations": LATER, "actions": np.zeros(7)}
    assert [len(episode) for episode in read_d4rl(arrays)] == [3, 2, 2]
    assert [len(episode) for episode in read_d4rl({name: values[:1] for name, values in arrays.items()})] == [
        1
    ]
    with pytest.raises(ValueError, match=r"must have the shape of observations, \[7, 3\], got \[7, 2\]"):
        list(read_d4rl({**arrays, "next_observations": LATER[:, :2]}))


def test_nothing_says_where_episodes_end(tmp_path: Path) -> None:
    write(tmp_path / "steps.hdf5", terminals=None, timeouts=None)
    with pytest.warns(
        UserWarning, match="nothing says where its episodes end: its 7 rows are read as one"
    ) as seen:
        (rows,) = read_d4rl(tmp_path / "steps.hdf5")
    assert len(seen) == 1
    assert not rows["next", "done"].any() and rows["is_init"].sum() == 1
    assert rows["collector", "next_known"].tolist() == [True] * 6 + [False]
