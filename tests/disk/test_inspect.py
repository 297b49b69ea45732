"""``python -m flatroll inspect PATH`` of folders of rows and versions."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from flatroll.__main__ import main
from flatroll.disk import Checkpoint, Folder, Ragged
from flatroll.disk.inspect import inspect_folder

LENGTHS = [3, 5, 3, 1, 8, 3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Six episodes in segments that cut them anywhere, in two versions, and a row more."""
    done = torch.cat([torch.arange(n) == n - 1 for n in LENGTHS])[:, None]
    reward = torch.linspace(-1, 1, len(done))[:, None]
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
    with Folder(tmp_path, write=True) as folder:
        for first, end in [(0, 4), (4, 13), (13, 23)]:
            part = slice(first, end)
            words = Ragged(
                torch.zeros(end - first, dtype=torch.uint8), torch.ones(end - first, dtype=torch.int64)
            )
            columns = {"next/done": done[part], "next/reward": reward[part], "collector/traj_ids": ids[part]}
            folder.append({**columns, "text": words, "observation": torch.zeros(end - first, 4)})
            if first:
                folder.publish(None, {"s": torch.zeros(3)}, extra={"step": first})
    return tmp_path


def test_a_folder_is_described(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path)]) == 0
    printed = capsys.readouterr().out
    for line in (
        f"{path}: rows 0 to 22 (23 rows), 3 files of ",
        "version 2: rows 0 to 22 (23 rows), state of ",
        "version 1: rows 0 to 12 (13 rows), state of ",
        f", by flatroll {version('flatroll')}, step: 4\n",
        "observation         float32       [4]\n",
        "text                ragged uint8  []\n",
        "6 trajectories\n6 ended, 0 open\n",
        "length: 1 to 8, mean 3.83333\n",
        "3  3  ████████████████████████████████████████\n",
        "5  1  █████████████\n",
        "return: -",
        "0 damaged; --verify also checks the rows\n",
    ):
        assert line in printed, line


def test_extra_values_of_a_run_are_shown(tmp_path: Path) -> None:
    module = torch.nn.Linear(1, 1)
    Checkpoint(tmp_path, policy=module).save(
        step=3, best=0.5, log=[1, 2, 3], mean=torch.zeros(2), name="x" * 99
    )
    text = inspect_folder(tmp_path).text
    assert (
        "\n  extra values: step = 3, best = 0.5, log = list of 3, mean = Tensor [2], name = str of 99\n"
        in text + "\n"
    )


def test_lengths_and_returns_are_those_of_the_episodes(path: Path) -> None:
    report = inspect_folder(path)
    assert report.trajectories is not None
    assert report.trajectories.lengths.tolist() == LENGTHS
    assert report.trajectories.returns is not None
    expected = [float(part.sum()) for part in torch.linspace(-1, 1, 23).split(LENGTHS)]
    assert report.trajectories.returns.tolist() == pytest.approx(expected, abs=1e-6)


def test_runs_of_one_episode_are_one_trajectory(tmp_path: Path) -> None:
    """Rows as two envs write them, two steps each in turn: ids come back until an episode is done or begins anew."""
    ids = torch.tensor([7, 7, 2, 2, 7, 7, 2, 2, 9, 9, 2, 2])
    done = torch.tensor([0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0], dtype=torch.bool)
    init = torch.tensor(
        [1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0], dtype=torch.bool
    )  # the last id 2 is another trajectory
    reward = torch.arange(12.0)
    reward[8] = float("nan")  # of one trajectory, whose return is none; the others keep theirs
    columns = {"collector/traj_ids": ids, "next/done": done, "is_init": init, "next/reward": reward}
    with Folder(tmp_path, write=True) as folder:
        folder.append({name: column[:7] for name, column in columns.items()})
        folder.append({name: column[7:] for name, column in columns.items()})
    found = inspect_folder(tmp_path).trajectories
    assert found is not None and found.returns is not None and found.ended is not None
    assert found.lengths.tolist() == [4, 4, 2, 2]
    assert found.returns[[0, 1, 3]].tolist() == [0.0 + 1 + 4 + 5, 2.0 + 3 + 6 + 7, 10.0 + 11]
    assert bool(found.returns[2].isnan())
    assert found.ended.tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("rows.parquet", "parquet"),
        ("rows.h5", "h5"),
        ("meta/info.json", "lerobot"),
        ("metadata.json", "minari"),
    ],
)
def test_exported_files_name_their_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reader: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    path = file if "." in name and file.suffix != ".json" else tmp_path
    assert main(["inspect", str(path)]) == 2
    assert f"flatroll.export.import_{reader}({str(path)!r}) reads it" in capsys.readouterr().err


def test_damage_is_found(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = next(path / name for name in sorted(os.listdir(path)) if name.endswith(".rows"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["inspect", str(path)]) == 0
    assert main(["inspect", str(path), "--verify"]) == 1
    assert f"damaged: version 2: {file.name}: the checksum of" in capsys.readouterr().out
    (path / "manifest-000000000002.json").write_bytes(b"{}")
    assert main(["inspect", str(path)]) == 1
    assert "damaged: version 2: manifest-000000000002.json: its checksum is wrong" in capsys.readouterr().out
    file.unlink()
    assert main(["inspect", str(path)]) == 1
    assert f"{file.name} is missing" in capsys.readouterr().out


def test_the_picture_is_saved(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    assert main(["inspect", str(path), "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"histograms saved to {picture}" in capsys.readouterr().out
    file = next(path / name for name in sorted(os.listdir(path)) if name.endswith(".rows"))
    file.write_bytes(file.read_bytes()[:-1] + b"~")  # drawn in red
    svg = tmp_path / "picture.svg"
    assert main(["inspect", str(path), "--verify", "--picture", str(svg)]) == 1
    drawn = svg.read_text()
    for text in (
        f"{path.name}: rows 0 to 22 (23 rows)",
        "3 files",
        "version 2",
        "version 1",
        "row (2 damaged)",
    ):
        assert f"<!-- {text} -->" in drawn, text
    assert "<!-- length of a trajectory (mean 3.8333) -->" in drawn
    assert main(["inspect", str(path), "--picture", str(tmp_path / "picture.nonsense")]) == 2
    assert "Format 'nonsense' is not supported" in capsys.readouterr().err


def test_a_picture_names_the_extra_and_needs_trajectories(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Folder(tmp_path / "plain", write=True) as folder:
        folder.append({"x": torch.tensor([1.0, float("nan")])})
    assert main(["inspect", str(tmp_path / "plain")]) == 0
    assert "no column says where trajectories begin or end" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert main(["inspect", str(tmp_path / "plain"), "--picture", "x.png"]) == 2
    assert "there are no trajectories to draw" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["inspect", str(path), "--picture", "x.png"]) == 1
    assert 'pip install "flatroll[plot]"' in capsys.readouterr().err


def test_rewards_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True) as folder:
        folder.append(
            {"is_init": torch.ones(3, dtype=torch.bool), "next/reward": torch.full((3,), float("nan"))}
        )
    assert "return: none that is finite" in inspect_folder(tmp_path).text


def test_a_folder_of_states_alone_and_one_whose_rows_were_dropped(tmp_path: Path) -> None:
    with Folder(tmp_path, write=True) as folder:
        folder.publish({"x": 1})
        text = inspect_folder(tmp_path).text
        assert f"{tmp_path}: no rows, 0 files of 0 bytes\nversion 1: no rows, line " in text
        folder.append({"is_init": torch.ones(3, dtype=torch.bool)})
        folder.publish(None, head=2)
    report = inspect_folder(tmp_path)
    assert report.trajectories is not None
    assert report.trajectories.lengths.tolist() == [1]
    assert "rows 2 to 2 (1 row)" in report.text
