"""A log in the formats of other tools: what is read back is what was collected, and each row is made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from replay_logs import MODES, Ignored, Walk, assert_equal, by_trajectory, cat, collect, many, vector
from tensordict import TensorDict

from flatroll import export as module
from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.datasets import ReplayLog, ReplayMismatchError
from flatroll.export import export
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum, StepCounter

FORMATS = ["parquet", "arrow", "pandas", "h5", "minari", "lerobot"]
IN_EPISODES = ["minari", "lerobot"]
pytestmark = pytest.mark.filterwarnings("ignore:.*Box.*precision:UserWarning")


@pytest.fixture(autouse=True)
def libraries() -> None:
    for name in ("pyarrow", "pandas", "h5py", "minari", "PIL"):
        pytest.importorskip(name)


class Pictures(Walk):
    """An image whose pixels follow from the walk, and numbers."""

    observation_space = gym.spaces.Dict(
        eye=gym.spaces.Box(0, 255, (6, 5, 3), np.uint8), place=gym.spaces.Box(-1e9, 1e9, (3,), np.float64)
    )

    def shown(self, value: float) -> Any:
        place = super().shown(value)
        seed = int(abs(place).sum() * 1000)
        return {"eye": np.arange(seed, seed + 90).reshape(6, 5, 3).astype(np.uint8), "place": place}


def pictures() -> Any:
    return RewardSum(StepCounter(SyncVectorEnv([Pictures] * 3, autoreset_mode=AutoresetMode.SAME_STEP)))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("chunk_rows", [None, 70])
def test_what_is_read_back_is_what_was_collected(tmp_path: Path, format: str, chunk_rows: int | None) -> None:
    rows = collect(tmp_path / "log", pictures)
    with ReplayLog(tmp_path / "log", create_env_fn=pictures) as log:
        export(log, tmp_path / "set", format, chunk_rows=chunk_rows)
    expected = by_trajectory(rows) if format in IN_EPISODES else rows
    assert_equal(getattr(module, f"import_{format}")(tmp_path / "set"), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_each_row_is_made_once(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And few of them are in memory at a time, whatever the format needs."""
    rows = collect(tmp_path / "log", many(Walk), batches=30, rows=60)
    steps = [0]
    most = [0]
    step = Walk.step
    read = ReplayLog.rows

    def counted_step(self: Walk, action: Any) -> Any:
        steps[0] += 1
        return step(self, action)

    def counted_read(self: ReplayLog, *arguments: Any) -> TensorDict:
        found = read(self, *arguments)
        most[0] = max(most[0], len(found))
        return found

    monkeypatch.setattr(Walk, "step", counted_step)
    monkeypatch.setattr(ReplayLog, "rows", counted_read)
    with ReplayLog(tmp_path / "log", create_env_fn=many(Walk)) as log:
        export(log, tmp_path / "set", format, chunk_rows=120)
    assert most[0] <= 120 + 60
    # The first row may be looked at beforehand.
    assert len(rows) <= steps[0] <= len(rows) + 200


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows_at_once", [1, 100, 65_536])
def test_trajectories(tmp_path: Path, mode: str, rows_at_once: int) -> None:
    rows = collect(tmp_path / "log", many(Walk, mode), batches=7, rows=40)
    with ReplayLog(tmp_path / "log", create_env_fn=many(Walk, mode)) as log:
        found = list(log.trajectories(rows_at_once=rows_at_once))
    assert_equal(cat(found), by_trajectory(rows))
    for trajectory in found:
        assert len(trajectory["collector", "traj_ids"].unique()) == 1
        assert trajectory["is_init"].sum() == trajectory["is_init"][0].sum() == 1
        assert not trajectory["next", "done"][:-1].any()
    assert sum(int(trajectory["next", "done"].sum()) for trajectory in found) >= len(found) - 3


@pytest.mark.parametrize(
    "make",
    [lambda: gym.make("CartPole-v1"), lambda: gym.make_vec("CartPole-v1", num_envs=5), vector],
    ids=["single", "vector", "sync"],
)
@pytest.mark.parametrize("rows_per_batch", [1, 17])
def test_trajectories_of_small_batches(tmp_path: Path, make: Callable[[], Any], rows_per_batch: int) -> None:
    rows = collect(tmp_path / "log", make(), batches=60, rows=rows_per_batch)
    with ReplayLog(tmp_path / "log") as log:
        assert_equal(cat(list(log.trajectories())), by_trajectory(rows))
        assert_equal(cat(list(log.trajectories(rows_at_once=1))), by_trajectory(rows))


def test_lost_rows_and_other_runs_are_not_joined(tmp_path: Path) -> None:
    """A reset by hand, and a collector that goes on with the log; its trajectory ids may begin anew."""
    parts: list[TensorDict] = []
    begins = 0
    for _ in range(2):
        with Collector(vector(), frames_per_batch=31, seed=3, log=tmp_path / "log") as collector:
            for number in range(4):
                parts.append(next(collector))
                if number == 1:
                    collector.reset()
    begins = sum(int(part["is_init"].sum()) for part in parts)
    with ReplayLog(tmp_path / "log") as log:
        found = list(log.trajectories(rows_at_once=40))
    assert len(found) == begins
    for trajectory in found:
        assert trajectory["is_init"][0]
        following = trajectory["next", "observation"][:-1]
        assert torch.equal(trajectory["observation"][1:], following)


def test_trajectories_wait_for_the_first_unfinished_one_only(tmp_path: Path) -> None:
    """What is in memory does not grow with the log."""

    rows = collect(tmp_path / "log", many(Walk), batches=40, rows=30)
    taken = [0]
    with ReplayLog(tmp_path / "log", create_env_fn=many(Walk)) as log:
        read = log.rows

        def counted(first: int | None = None, end: int | None = None) -> TensorDict:
            found = read(first, end)
            taken[0] += len(found)
            return found

        log.rows = counted  # type: ignore[method-assign]
        given = 0
        for trajectory in log.trajectories(rows_at_once=30):
            # The longest has 8 rows.
            assert taken[0] - given <= 2 * 30 + 3 * 8
            given += len(trajectory)
    assert given == len(rows)


def test_minari_gets_the_spaces_from_the_env(tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    env = vector()
    collector = Collector(env, frames_per_batch=50, total_frames=150, seed=0, log=tmp_path / "log")
    rows = cat(list(collector))
    with ReplayLog(tmp_path / "log") as log:
        assert log.spec == collector.spec
        export(log, tmp_path / "set", "minari", dataset_id="cartpole/random-v0")

        buffer = ReplayBuffer(storage=LazyTensorStorage(150))
        buffer.extend(log.rows())
        buffer.note_spec(log.spec)
        export(buffer, tmp_path / "other", "minari")
    assert_equal(
        module.import_minari(tmp_path / "set"),
        module.import_minari(tmp_path / "other"),  # type: ignore[arg-type]
    )

    data = minari.MinariDataset(tmp_path / "set")
    assert data.observation_space == env.single_observation_space
    assert data.action_space == env.single_action_space
    assert data.total_steps == len(rows)
    assert data.total_episodes == int(rows["is_init"].sum())


def test_rows_that_are_kept_need_no_env(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="not deterministic"):
        rows = collect(tmp_path / "log", many(Ignored))
    with ReplayLog(tmp_path / "log") as log:
        export(log, tmp_path / "rows.parquet")
        assert_equal(module.import_parquet(tmp_path / "rows.parquet"), rows)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="observation_space must be given"):
            export(log, tmp_path / "set", "minari")
        spaces: dict[str, Any] = {
            "observation_space": Walk.observation_space,
            "action_space": Walk.action_space,
        }
        export(log, tmp_path / "set", "minari", **spaces)
    assert_equal(module.import_minari(tmp_path / "set"), by_trajectory(rows))  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_differ_leave_nothing(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    collect(tmp_path / "log", many(Walk), batches=8)
    draw = Walk.draw

    def drifted(self: Walk) -> float:
        drawn = draw(self)
        return drawn + 1 if drawn > 0.98 else drawn

    monkeypatch.setattr(Walk, "draw", drifted)
    with (
        ReplayLog(tmp_path / "log", create_env_fn=many(Walk)) as log,
        pytest.raises(ReplayMismatchError, match=r"row \d+"),
    ):
        export(log, tmp_path / "set", format, chunk_rows=50)
    assert [entry.name for entry in tmp_path.iterdir()] == ["log"]


def test_a_log_without_rows_and_wrong_arguments(tmp_path: Path) -> None:
    collect(tmp_path / "log", vector(), batches=1)
    with ReplayLog(tmp_path / "log") as log:
        with pytest.raises(ValueError, match="rows_at_once must be an integer"):
            log.trajectories(rows_at_once=0)
        with pytest.raises(ValueError, match="chunk_rows must be an integer"):
            export(log, tmp_path / "x.h5", chunk_rows=0)
        log._windows.ends.clear()
        with pytest.raises(ValueError, match="no rows"):
            export(log, tmp_path / "x.h5")
        assert list(log.trajectories()) == []
