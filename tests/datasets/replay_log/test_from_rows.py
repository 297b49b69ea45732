"""Logs of rows that were collected without one."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from replay_logs import MODES, Ignored, Walk, assert_equal, cat, many, vector
from tensordict import TensorDict

from flatroll.datasets import ReplayLog, ReplayMismatchError
from flatroll.modules import actor
from flatroll.rollouts import Collector
from flatroll.wrappers import StepCounter
from flatroll.wrappers.testing import Script, ScriptedTorchEnv


def batches_of(env: Any, rows: int = 50, batches: int = 6, **arguments: Any) -> list[TensorDict]:
    arguments.setdefault("seed", 7)
    with Collector(env, frames_per_batch=rows, total_frames=rows * batches, **arguments) as collector:
        return list(collector)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 7, 50])
def test_rows_are_logged_afterwards(mode: str, rows: int, tmp_path: Path) -> None:
    make = many(Walk, mode)
    batches = batches_of(make, rows, writer=5)
    with ReplayLog.from_rows(tmp_path / "run", batches, make, seed=7) as log:
        assert log.kept == 0
        assert_equal(log.rows(), cat(batches))


def test_the_log_is_that_of_a_collector(tmp_path: Path) -> None:
    collected = vector()
    batches = batches_of(collected, log=tmp_path / "first")
    collected.close()

    env = vector()  # of the registry: no function is needed to read it
    ReplayLog.from_rows(tmp_path / "second", batches, env, seed=7).close()
    env.close()
    with ReplayLog(tmp_path / "first") as first, ReplayLog(tmp_path / "second") as second:
        assert first.stats() == second.stats()
        assert_equal(second.rows(90, 170), cat(batches)[90:170])


def test_compact_rows_have_their_next_observations_again(tmp_path: Path) -> None:
    make = many(Walk)
    full = cat(batches_of(make))
    batches = batches_of(make, compact_obs=True)
    with ReplayLog.from_rows(tmp_path / "run", batches, make, seed=7) as log:
        assert_equal(log.rows(), full)


@pytest.mark.parametrize("envs", [1, 3])
def test_the_last_batch_may_be_shorter(envs: int, tmp_path: Path) -> None:
    def make() -> Any:
        return vector(envs=envs)

    stop = threading.Event()
    with Collector(make, frames_per_batch=40, seed=7, interruptor=stop) as collector:
        batches = [collector.rollout() for _ in range(3)]
        stop.set()
        batches.append(collector.rollout())
    assert 0 < len(batches[-1]) < 40  # type: ignore[arg-type]
    with ReplayLog.from_rows(tmp_path / "run", batches, make, seed=7) as log:  # type: ignore[arg-type]
        assert_equal(log.rows(), cat(batches))


def test_rows_of_a_single_env_may_be_one_batch(tmp_path: Path) -> None:
    rows = cat(batches_of(gym.make("CartPole-v1")))
    with ReplayLog.from_rows(tmp_path / "run", rows, gym.make("CartPole-v1"), seed=7) as log:
        assert_equal(log.rows(), rows)


def test_what_the_policy_wrote_is_in_the_log(tmp_path: Path) -> None:
    def make() -> Any:
        return StepCounter(vector())

    torch.manual_seed(0)
    policy = actor(make(), recurrent="gru", hidden=(8,))
    batches = batches_of(make, policy=policy, track_envs=True, track_policy_version=True)
    assert ("next", "recurrent_state") in batches[0].keys(True, True)
    with ReplayLog.from_rows(tmp_path / "run", batches, make, seed=7) as log:
        assert_equal(log.rows(), cat(batches))


def test_a_torch_env_and_options(tmp_path: Path) -> None:
    def make() -> Any:
        return ScriptedTorchEnv(Script(3, lengths=[3, 5, 9]))

    options: dict[str, Any] = {"max_frames_per_traj": 4}
    batches = batches_of(make, seed=None, **options)
    with ReplayLog.from_rows(tmp_path / "run", batches, make, **options) as log:
        assert_equal(log.rows(), cat(batches))


def test_info_entries(tmp_path: Path) -> None:
    make = many(Walk)
    batches = batches_of(make, info_keys=["t"])
    with ReplayLog.from_rows(tmp_path / "run", batches, make, seed=7, info_keys=["t"]) as log:
        assert_equal(log.rows(), cat(batches))


def other_seed(batches: list[TensorDict]) -> tuple[Any, ...]:
    return batches, many(Walk), 8


def other_env(batches: list[TensorDict]) -> tuple[Any, ...]:
    return batches, many(Ignored), 7


def later_rows(batches: list[TensorDict]) -> tuple[Any, ...]:
    return batches[1:], many(Walk), 7


def other_order(batches: list[TensorDict]) -> tuple[Any, ...]:
    return cat(batches), many(Walk), 7


def changed_bit(batches: list[TensorDict]) -> tuple[Any, ...]:
    batches[2]["next", "reward"][3] += 1e-5
    return batches, many(Walk), 7


@pytest.mark.filterwarnings("ignore:.*is not deterministic:RuntimeWarning")
@pytest.mark.parametrize("change", [other_seed, other_env, later_rows, other_order, changed_bit])
def test_other_rows_are_refused_and_leave_nothing(change: Callable[..., Any], tmp_path: Path) -> None:
    rows, make, seed = change(batches_of(many(Walk)))
    with pytest.raises(
        ReplayMismatchError, match=r"row \d+, of env \d, has another .* than the env makes"
    ) as found:
        ReplayLog.from_rows(tmp_path / "run", rows, make, seed=seed)
    if change is changed_bit:
        assert found.value.row == 103
    assert not list(tmp_path.iterdir())


def test_what_rows_must_have(tmp_path: Path) -> None:
    make = many(Walk)
    batches = batches_of(make)
    with pytest.raises(KeyError, match="rows must have 'action' and"):
        ReplayLog.from_rows(tmp_path / "run", [batch.exclude("action") for batch in batches], make, seed=7)
    with pytest.raises(KeyError, match="rows must have"):
        ReplayLog.from_rows(tmp_path / "run", [batch.exclude("collector") for batch in batches], make, seed=7)
    with pytest.raises(ValueError, match="at least one batch"):
        ReplayLog.from_rows(tmp_path / "run", [], make, seed=7)
    with pytest.raises(ValueError, match="batch 1 must have the same entries"):
        batches[1].set("more", torch.zeros(50))
        ReplayLog.from_rows(tmp_path / "run", batches, make, seed=7)

    (tmp_path / "run").mkdir()
    with pytest.raises(FileExistsError, match="exists"):
        ReplayLog.from_rows(tmp_path / "run", batches[:1], make, seed=7)
