"""docs/howto/film_and_log.md: films, logs and files hold what the env played, read by other libraries or by hand."""

import csv
import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import page_blocks
import pytest
import torch
from plain_loop import assert_as_played, assert_equal_but, ends_of, per_env
from tensordict import TensorDict

from flatroll.rollouts import Collector

PAGE = "docs/howto/film_and_log.md"


def cartpoles() -> gym.vector.VectorEnv:
    return gym.make_vec("CartPole-v1", num_envs=4)


def logged_batches() -> list[TensorDict]:
    """The four batches of 500 rows that the page logs, each compared with the bare env's."""
    batches = list(Collector(cartpoles(), frames_per_batch=500, total_frames=2000, seed=0))
    assert_as_played(torch.cat(batches), cartpoles(), seed=0)
    return batches


def plain_log() -> list[dict[str, float]]:
    """Frames, mean return and mean length after each batch: a step of CartPole pays 1."""
    batches = logged_batches()
    rows = torch.cat(batches)
    length = torch.zeros(len(rows))
    for stream, at in zip(per_env(rows, 4), per_env_positions(rows), strict=True):
        steps = 0
        for row, place in zip(stream.unbind(0), at, strict=True):
            steps = 1 if row["is_init"] else steps + 1
            length[place] = steps
    log, begin = [], 0
    for batch in batches:
        ended = batch["next", "done"].flatten()
        mean = length[begin : begin + 500][ended].mean().item()
        begin += 500
        log.append({"frames": begin, "return": mean, "length": mean})
    return log


def per_env_positions(rows: TensorDict) -> list[list[int]]:
    numbered = rows.clone(recurse=False)
    numbered["place"] = torch.arange(len(rows))
    return [stream["place"].tolist() for stream in per_env(numbered, 4)]


def test_a_film_has_a_frame_for_each_observation(until) -> None:
    """The film of sub-env 0's first episode: its observations, the last one included."""
    pytest.importorskip("moviepy")
    space = until(PAGE, "record_first_only=True")
    batch = space["batch"]
    bare = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
    assert_as_played(batch, bare, seed=0)
    first = per_env(batch, 4)[0]
    steps = 1 + int(first["next", "done"].flatten().nonzero()[0])
    moviepy = pytest.importorskip("moviepy")
    with moviepy.VideoFileClip("videos/rl-video-episode-0.mp4") as clip:
        frames = list(clip.iter_frames())
    assert len(frames) == steps + 1

    # Each frame is nearest to the picture of its own observation; neighbours differ by a pixel or two.
    picture = gym.make("CartPole-v1", render_mode="rgb_array")
    picture.reset(seed=0)
    for at in (0, steps // 2, steps):
        seen = first["observation"][at] if at < steps else first["next", "observation"][steps - 1]
        picture.unwrapped.state = tuple(seen.double().tolist())
        assert np.abs(picture.render().astype(float) - frames[at]).mean() < 2


def test_the_log(until) -> None:
    space = until(PAGE, "def numbers(batch):")
    for found, plain in zip(space["log"], plain_log(), strict=True):
        assert found["frames"] == plain["frames"]
        np.testing.assert_allclose(found["return"], plain["return"], rtol=1e-6)
        np.testing.assert_allclose(found["length"], plain["length"], rtol=1e-6)
        assert found["buffer/rows"] == found["buffer/rows_written"] == found["frames"]
        # float32 observations of 4, twice; action and id 8; step counts 8 each; reward and sum 4; four flags.
        assert found["buffer/bytes_per_row"] == 2 * 16 + 8 + 8 + 2 * 8 + 2 * 4 + 4
        assert found["buffer/bytes"] == 10_000 * found["buffer/bytes_per_row"]
    rows = torch.cat(logged_batches())
    assert_equal_but(space["buffer"][:], rows)


def test_the_csv_file(until) -> None:
    space = until(PAGE, "writer = csv.DictWriter(")
    with Path("log.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    for row, plain, logged in zip(read, plain_log(), space["log"], strict=True):
        for name in ("frames", "return", "length"):
            np.testing.assert_allclose(float(row[name]), plain[name], rtol=1e-6)
        assert {name: float(value) for name, value in row.items()} == logged


def test_the_csv_file_of_a_run_whose_last_batch_ended_no_episode(until) -> None:
    space = until(PAGE, "def numbers(batch):")
    del space["log"][-1]["return"], space["log"][-1]["length"]
    block = page_blocks.blocks_of((page_blocks.ROOT / PAGE).read_text())
    (text,) = (each for each in block if "csv.DictWriter(" in each.text)
    page_blocks.run_block(text, space, page_blocks.ROOT / PAGE)
    with Path("log.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["return"] == "" for row in read] == [False, False, False, True]
    assert float(read[0]["return"]) == plain_log()[0]["return"]


def test_tensorboard(until) -> None:
    until(PAGE, "board.add_scalar(name, number, row")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator("runs/cartpole")
    events.Reload()
    for name in ("return", "length"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        plain = [(row["frames"], row[name]) for row in plain_log()]
        np.testing.assert_allclose(found, plain, rtol=1e-6)


def test_numpy(until) -> None:
    space = until(PAGE, "arrays = to_numpy(batch)")
    batch = logged_batches()[-1]
    arrays = space["arrays"]
    for key in batch.keys(True, True):
        name = key if isinstance(key, str) else ".".join(key)
        np.testing.assert_array_equal(arrays[name], batch[key].numpy())


def rollout_rows(rows: TensorDict) -> list[float]:
    """The rows of the page's rollouts are the bare env's; the sum of rewards of each trajectory, by id."""
    assert_as_played(rows, cartpoles(), seed=0)
    sums: dict[int, float] = {}
    for number, reward in zip(
        rows["collector", "traj_ids"].tolist(), rows["next", "reward"].flatten().tolist(), strict=True
    ):
        sums[number] = sums.get(number, 0.0) + reward
    return [sums[number] for number in sorted(sums)]


def test_pandas(until) -> None:
    space = until(PAGE, "frame = to_pandas(rows)")
    rows, frame = space["rows"], space["frame"]
    sums = rollout_rows(rows)
    assert space["returns"].tolist() == sums
    for place in range(4):
        assert frame[f"observation[{place}]"].tolist() == rows["observation"][:, place].tolist()
        assert frame[f"next.observation[{place}]"].tolist() == rows["next", "observation"][:, place].tolist()
    assert_equal_but(space["same"], rows)


def test_parquet(until) -> None:
    space = until(PAGE, 'pyarrow.parquet.write_table(to_arrow(rows), "rows.parquet")')
    rows = space["rows"]
    rollout_rows(rows)
    import pyarrow.parquet

    table = pyarrow.parquet.read_table("rows.parquet")
    plain = table["observation"].combine_chunks()
    flat = plain.flatten().to_numpy() if hasattr(plain, "flatten") else np.array(plain.to_pylist())
    assert flat.reshape(400, 4).tolist() == rows["observation"].tolist()
    assert table["action"].to_pylist() == rows["action"].tolist()
    assert (
        np.array(table["next.done"].to_pylist()).ravel().tolist() == rows["next", "done"].flatten().tolist()
    )
    assert_equal_but(space["again"], rows)


def test_whole_buffers(until) -> None:
    """By h5py and by json and h5py alone: the file's columns, and the episodes' observations, actions, rewards."""
    space = until(PAGE, 'export(buffer, "cartpole.h5", compression="gzip")')
    h5py = pytest.importorskip("h5py")
    rows = torch.cat(list(Collector(cartpoles(), frames_per_batch=200, total_frames=800, seed=0)))
    assert_as_played(rows, cartpoles(), seed=0)
    assert_equal_but(space["buffer"][:], rows)

    with h5py.File("cartpole.h5") as file:
        found = {}
        file.visititems(
            lambda name, item: found.update({name: item[...]}) if hasattr(item, "shape") else None
        )
    np.testing.assert_array_equal(found["observation"], rows["observation"].numpy())
    np.testing.assert_array_equal(found["next/reward"], rows["next", "reward"].numpy())
    starts = [0, *(i + 1 for i, end in enumerate(ends_of(rows)[:-1]) if end)]
    assert found["_first_rows"].tolist() == starts

    trajectories: dict[int, list[TensorDict]] = {}
    for row in rows.unbind(0):
        trajectories.setdefault(int(row["collector", "traj_ids"]), []).append(row)
    (folder,) = (path.parent for path in Path("cartpole").rglob("main_data.hdf5"))
    assert json.loads((folder / "metadata.json").read_text())["total_steps"] == 800
    with h5py.File(folder / "main_data.hdf5") as file:
        assert len(file) == len(trajectories)
        for episode in file.values():
            actions = episode["actions"][...].tolist()
            seen = episode["observations"][...]
            (number,) = [
                key
                for key, own in trajectories.items()
                if np.array_equal(seen[0], own[0]["observation"].numpy()) and len(own) == len(actions)
            ]
            own = trajectories[number]
            assert actions == [int(row["action"]) for row in own]
            assert seen[:-1].tolist() == [row["observation"].tolist() for row in own]
            assert seen[1:].tolist() == [row["next", "observation"].tolist() for row in own]
            assert episode["rewards"][...].tolist() == [1.0] * len(own)
            assert episode["terminations"][...].tolist() == [bool(row["next", "terminated"]) for row in own]
    assert_equal_but(
        space["trajectories"], torch.cat([torch.stack(trajectories[key]) for key in trajectories_in(space)])
    )


def trajectories_in(space) -> list[int]:
    """The ids in the order in which the set holds them."""
    return list(dict.fromkeys(space["trajectories"]["collector", "traj_ids"].tolist()))


def test_cuts_are_marked(until) -> None:
    space = until(PAGE, "from flatroll.layout import mark_cuts")
    batch = logged_batches()[-1]
    marked = space["mark_cuts"](space["batch"])
    ends = torch.tensor(ends_of(batch))[:, None]
    assert torch.equal(marked["next", "done"], ends)
    assert torch.equal(marked["next", "truncated"], ends & ~batch["next", "terminated"])
