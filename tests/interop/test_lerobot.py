"""LeRobot folders of flatroll's rows, read by LeRobot; and LeRobot's own, read by flatroll."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interop_rows import LENGTHS, same
from tensordict import TensorDict

from flatroll.datasets import LeRobotExperienceReplay
from flatroll.export import export, import_lerobot

pytest.importorskip("lerobot")


@pytest.fixture(scope="session")
def lerobot() -> Any:
    """LeRobot's class of data sets."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # operator torchvision::nms does not exist
        # A torchvision for GPUs beside a torch for CPUs: its compiled operators are missing. No data set calls them.
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor"
            )
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset


def test_rows(rows: TensorDict, tmp_path: Path, lerobot: Any) -> None:
    export(rows, tmp_path / "rows", "lerobot", fps=10, task="walk", robot_type="arm")
    data = lerobot("flatroll/rows", root=tmp_path / "rows")
    assert (data.num_episodes, data.num_frames, data.fps) == (len(LENGTHS), sum(LENGTHS), 10)
    assert len(data) == len(rows)
    for number, row in enumerate(rows):
        item = data[number]
        same(row["observation"], item["observation.state"])
        same(
            row["arm", "angle"].float(), item["observation.arm.angle"].reshape(1)
        )  # LeRobot's numbers are float32
        same(row["logits"], item["logits"])
        same(row["action"], item["action"])
        same(row["next", "reward"], item["next.reward"].reshape(1))
        assert bool(item["next.done"]) == bool(row["next", "done"])
        pixels = (item["observation.pixels"] * 255).round().to(torch.uint8)
        same(row["pixels"].permute(2, 0, 1), pixels)
        assert item["task"] == "walk"
    same(np.concatenate([np.arange(length) for length in LENGTHS]), np.stack(data.hf_dataset["frame_index"]))


def test_windows_of_time(rows: TensorDict, tmp_path: Path, lerobot: Any) -> None:
    """LeRobot's own windows of an episode are slices of ours, repeated at the ends."""
    export(rows, tmp_path / "rows", "lerobot", fps=10)
    data = lerobot(
        "flatroll/rows", root=tmp_path / "rows", delta_timestamps={"observation.state": [-0.1, 0.0, 0.1]}
    )
    item = data[1]
    same(rows["observation"][:3], item["observation.state"])
    item = data[3]  # the last row of the first episode
    same(rows["observation"][[2, 3, 3]], item["observation.state"])
    assert item["observation.state_is_pad"].tolist() == [False, False, True]
    one = lerobot("flatroll/rows", root=tmp_path / "rows", episodes=[2])
    assert len(one) == LENGTHS[2]


def test_statistics(rows: TensorDict, tmp_path: Path, lerobot: Any) -> None:
    export(rows, tmp_path / "rows", "lerobot")
    stats = lerobot("flatroll/rows", root=tmp_path / "rows").meta.stats
    np.testing.assert_allclose(
        stats["observation.state"]["mean"], rows["observation"].numpy().mean(0), rtol=1e-6
    )
    np.testing.assert_allclose(
        stats["observation.state"]["std"], rows["observation"].numpy().std(0), rtol=1e-6
    )
    pixels = rows["pixels"].double().numpy() / 255
    np.testing.assert_allclose(
        stats["observation.pixels"]["mean"].reshape(-1), pixels.mean((0, 1, 2)), rtol=1e-6
    )


def test_a_folder_that_lerobot_wrote(rows: TensorDict, tmp_path: Path, lerobot: Any) -> None:
    features = {
        "observation.state": {"dtype": "float32", "shape": (2,), "names": None},
        "observation.image": {"dtype": "image", "shape": (6, 5, 3), "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    data = lerobot.create("own/rows", fps=10, features=features, root=tmp_path / "own", use_videos=False)
    start = 0
    for length in LENGTHS:
        for row in rows[start : start + length]:
            data.add_frame(
                {
                    "observation.state": row["observation"].numpy(),
                    "observation.image": row["pixels"].numpy(),
                    "action": row["observation"].numpy() * 2,
                    "next.reward": row["next", "reward"].numpy(),
                    "next.done": row["next", "done"].numpy(),
                    "task": "walk",
                }
            )
        data.save_episode()
        start += length
    data.finalize()
    read = import_lerobot(tmp_path / "own")
    same(rows["observation"], read["observation", "state"])
    same(rows["pixels"], read["observation", "image"])
    same(rows["observation"] * 2, read["action"])
    same(rows["next", "reward"], read["next", "reward"])
    same(
        rows["next", "done"] & (torch.arange(len(rows)) != len(rows) - 1)[:, None], read["next", "terminated"]
    )
    assert read["next", "truncated"].nonzero()[:, 0].tolist() == [len(rows) - 1]
    buffer = LeRobotExperienceReplay(
        "own", batch_size=4, root=tmp_path / "root", fetch=lambda *_: tmp_path / "own"
    )
    assert len(buffer) == len(rows)


def test_joined_and_split_by_lerobot(rows: TensorDict, tmp_path: Path, lerobot: Any) -> None:
    tools = pytest.importorskip("lerobot.datasets.dataset_tools")
    for name in ("first", "second"):
        flat = rows.exclude("logits")  # LeRobot joins no entries of two dimensions, its own either
        export(flat, tmp_path / name, "lerobot", fps=10, task=name)
    parts = [lerobot(f"flatroll/{name}", root=tmp_path / name) for name in ("first", "second")]
    joined = tools.merge_datasets(parts, "flatroll/both", tmp_path / "both")
    assert (joined.num_episodes, joined.num_frames) == (2 * len(LENGTHS), 2 * len(rows))
    same(
        rows["observation"],
        torch.stack([joined[len(rows) + place]["observation.state"] for place in range(len(rows))]),
    )
    kept = tools.delete_episodes(joined, [1, 3], tmp_path / "kept", "flatroll/kept")
    assert kept.num_frames == 2 * len(rows) - LENGTHS[0] - LENGTHS[1]
    read = import_lerobot(tmp_path / "kept")
    same(
        torch.cat([rows["observation"][:4], rows["observation"][5:], rows["observation"][4:]]),
        read["observation", "state"],
    )
