"""Where episodes end in files of other forms is what the files say; what no file says is unknown, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from set_files import saved, trajectory, write_archive

from flatroll.datasets import read_gen_dgrl, read_rlds, read_roboset, read_vd4rl


def write_trial(path: Path, **others: Any) -> None:
    h5py = pytest.importorskip("h5py")
    steps = {
        "observations": np.arange(5.0)[:, None],
        "actions": np.zeros((5, 1)),
        "rewards": np.arange(5.0),
        "done": np.array([False, False, True, False, False]),
    }
    with h5py.File(path, "w") as file:
        for name, column in {**steps, **others}.items():
            if column is not None:
                file[f"Trial0/{name}"] = column


def test_a_trial_that_goes_on_after_a_done_step_is_two_episodes(tmp_path: Path) -> None:
    """What comes after that step may be the reset's observation."""
    write_trial(tmp_path / "0.h5")
    rows = torch.cat(list(read_roboset(tmp_path / "0.h5")))
    assert rows["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1]
    assert rows["is_init"].view(-1).tolist() == [True, False, False, True, False]
    assert rows["collector", "next_known"].tolist() == [True, True, False, True, False]
    assert rows["next", "observation"].view(-1).tolist() == [1, 2, 2, 4, 4]
    assert rows["next", "terminated"].view(-1).tolist() == [False, False, True, False, False]
    assert rows["next", "truncated"].view(-1).tolist() == [False, False, False, False, True]


def test_a_trial_without_rewards(tmp_path: Path) -> None:
    write_trial(tmp_path / "0.h5", rewards=None)
    rows = torch.cat(list(read_roboset(tmp_path / "0.h5")))
    assert len(rows) == 5 and ("next", "reward") not in rows.keys(True)


def test_an_archive_without_rewards(tmp_path: Path) -> None:
    steps = {name: values for name, values in trajectory(3).items() if name != "rewards"}
    archive = write_archive(tmp_path / "set.tar.xz", {"0.npy": saved(steps)})
    (rows,) = read_gen_dgrl(archive)
    assert len(rows) == 3 and ("next", "reward") not in rows.keys(True)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"dones": np.array([False, True, False])}, "is done at step 1 of 3"),
        (
            {"observations": np.full((4, 3, 8, 8), 256)},
            r"observations of int64 that are not bytes 0 \.\.\. 255",
        ),
        ({"observations": np.full((4, 3, 8, 8), 0.5)}, r"observations of float64 that are not bytes"),
    ],
)
def test_an_archive_that_is_not_what_the_form_says(
    changed: dict[str, Any], text: str, tmp_path: Path
) -> None:
    archive = write_archive(tmp_path / "set.tar.xz", {"0.npy": saved({**trajectory(3), **changed})})
    with pytest.raises(ValueError, match=text):
        list(read_gen_dgrl(archive))


@pytest.mark.parametrize("mark", ["is_terminal", "discount"])
def test_a_terminal_step_of_pixels_is_the_last_one_of_its_episode(mark: str, tmp_path: Path) -> None:
    terminal = np.array([False, False, True, False, True])
    values = terminal if mark == "is_terminal" else np.where(terminal, 0.0, 1.0)
    pixels = np.arange(5, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "0.npz", image=pixels, action=np.arange(5.0), reward=np.arange(5.0), **{mark: values})
    episodes = list(read_vd4rl(tmp_path / "0.npz"))
    assert [len(episode) for episode in episodes] == [2, 1]
    rows = torch.cat(episodes)
    assert rows["pixels"][:, 0, 0, 0].tolist() == [0, 1, 3]
    assert rows["next", "pixels"][:, 0, 0, 0].tolist() == [1, 2, 4]
    assert rows["action"].tolist() == [1, 2, 4]
    assert rows["next", "terminated"].view(-1).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("mark", "step", "text"),
    [
        ("is_last", 1, "episode 0 continues after step 1, its last one"),
        ("is_terminal", 1, "episode 0 continues after step 1, which is terminal"),
        ("is_first", 2, "episode 0 begins again at step 2: split it there"),
    ],
)
def test_steps_of_rlds_that_are_several_episodes(mark: str, step: int, text: str) -> None:
    steps = [{"observation": float(number), "action": 0.0, "is_first": number == 0} for number in range(4)]
    assert len(next(read_rlds([steps]))) == 3
    steps[step] |= {mark: True}
    with pytest.raises(ValueError, match=text):
        list(read_rlds([steps]))
