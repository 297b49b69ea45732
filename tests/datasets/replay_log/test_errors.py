"""What a log says to a reader who asks for other rows, or gives another env."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from replay_logs import Walk, collect, vector

from flatroll.__main__ import main
from flatroll.datasets import ReplayLog
from flatroll.datasets.replay_log.recipe import CannotRemakeError
from flatroll.modules import actor
from flatroll.rollouts import Collector


def pendulums(num_envs: int = 3, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> SyncVectorEnv:
    return SyncVectorEnv([partial(gym.make, "Pendulum-v1")] * num_envs, autoreset_mode=mode)


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        (40, IndexError, r"row 40 requested, available are \[0, 40\)"),
        (-41, IndexError, r"row -41 requested, available are \[0, 40\)"),
        ("action", TypeError, "number of a row or a slice of rows, got 'action': columns are in the batch"),
        (1.5, TypeError, r"number of a row or a slice of rows, got 1\.5"),
        (slice(0, 9, 2), ValueError, "a slice of a log must have step 1, got 2"),
    ],
)
def test_rows_that_a_log_does_not_have(tmp_path: Path, key: Any, error: type[Exception], text: str) -> None:
    list(Collector(pendulums(2), frames_per_batch=20, total_frames=40, seed=0, log=tmp_path / "log"))
    with ReplayLog(tmp_path / "log") as log:
        assert (log[-40] == log[0]).all()
        with pytest.raises(error, match=text):
            log[key]


@pytest.mark.parametrize("read", [lambda log: log.rows(30, 31), lambda log: log.check()])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            partial(pendulums, 4),
            "must make the env that was collected, Pendulum-v1, with num_envs=3, got num_envs=4",
        ),
        (partial(gym.make, "Pendulum-v1"), "with num_envs=3, got num_envs=1"),
        (
            partial(pendulums, mode=AutoresetMode.SAME_STEP),
            "with autoreset mode NextStep, got SameStep",
        ),
        (
            lambda: SyncVectorEnv([partial(gym.make, "CartPole-v1")] * 3),
            r"log: create_env_fn makes another env than Pendulum-v1 was: its observation 'observation' has "
            r"shape \[4\], in the log \[3\]; its 'action' is of Discrete\(2\), in the log float32 \[1\]",
        ),
    ],
)
def test_another_env_than_the_logs(
    tmp_path: Path, make: Callable[[], Any], text: str, read: Callable[[ReplayLog], Any]
) -> None:
    def bare() -> SyncVectorEnv:
        return SyncVectorEnv([lambda: TimeLimit(gym.make("Pendulum-v1").unwrapped, 200)] * 3)

    list(Collector(bare, frames_per_batch=30, total_frames=60, seed=0, log=tmp_path / "log"))
    with (
        ReplayLog(tmp_path / "log", create_env_fn=make) as log,
        pytest.raises(CannotRemakeError, match=text),
    ):
        read(log)


def test_a_registered_env_that_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect(tmp_path / "log", vector())
    spec = gym.spec("CartPole-v1")
    monkeypatch.setattr(spec, "entry_point", gym.spec("MountainCar-v0").entry_point)
    monkeypatch.setattr(spec, "vector_entry_point", None)
    monkeypatch.setattr(spec, "kwargs", {})
    with (
        ReplayLog(tmp_path / "log") as log,
        pytest.raises(CannotRemakeError, match="its id makes another env than CartPole-v1 was"),
    ):
        log.rows(0, 5)


def test_the_error_names_the_env_that_has_no_recipe(tmp_path: Path) -> None:
    env = TimeLimit(Walk(), 4)
    with pytest.raises(CannotRemakeError, match=r"and Walk has no spec of Gymnasium's registry: pass a"):
        Collector(env, frames_per_batch=20, total_frames=40, log=tmp_path / "log")


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    collect(tmp_path / "log", vector())
    text = r"other settings \(info_keys was \[\] and is \['t'\]\): choose another path"
    with pytest.raises(ValueError, match=text):
        collect(tmp_path / "log", vector(), info_keys=["t"])


def test_inspect_shows_all_columns_and_how_to_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = pendulums(2)
    list(Collector(env, actor(env), frames_per_batch=20, total_frames=40, seed=0, log=tmp_path / "log"))
    with ReplayLog(tmp_path / "log") as log:
        keys = [str(key) for key in log.rows(0, 1).keys(True, True)]
    assert main(["inspect", str(tmp_path / "log")]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{key} " in shown for key in keys)
    assert "--verify makes all rows again" in shown

    list(Collector(pendulums, frames_per_batch=20, total_frames=40, seed=0, log=tmp_path / "other"))
    assert main(["inspect", str(tmp_path / "other")]) == 0
