"""Sentences of the page "A replay log" that no other test shows."""

import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from replay_logs import Ignored, Walk, assert_equal, cat, check_slices, collect, many, vector
from tensordict import TensorDict

from flatroll.__main__ import main
from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.datasets import ReplayLog, ReplayMismatchError
from flatroll.datasets.replay_log import recorder
from flatroll.datasets.replay_log.replay import Replayer
from flatroll.rollouts import Collector
from flatroll.rollouts.runner import Runner
from flatroll.wrappers import NextObservationDelta, PettingZooSource, RewardSum, StepCounter, as_vector_env
from flatroll.wrappers.testing import ScriptedGame


@pytest.mark.parametrize(
    "arguments",
    [
        {"set_truncated": True},
        {"split_trajs": True},
        {"postproc": lambda batch: batch.select("action")},
        {"storing_device": "cpu"},
        {"compact_obs": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
@pytest.mark.filterwarnings("ignore:.*split_trajs.*")
def test_rows_are_those_before_they_are_yielded(tmp_path: Path, arguments: dict[str, Any]) -> None:
    plain = {"frames_per_batch": 50, "total_frames": 200, "seed": 7}
    with Collector(vector(), **plain, **arguments, log=tmp_path / "log") as collector:  # type: ignore[arg-type]
        list(collector)
    with Collector(vector(), **plain) as collector:  # type: ignore[arg-type]
        expected = cat(list(collector))
    with ReplayLog(tmp_path / "log") as log:
        assert_equal(log.rows(), expected)


class Full(ReplayBuffer):
    """A buffer that takes nothing."""

    def extend(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError("planted")


def fails(batch: TensorDict) -> TensorDict:
    raise RuntimeError("planted")


@pytest.mark.parametrize("name", ["post_collect_hook", "postproc", "replay_buffer"])
def test_a_batch_whose_reader_fails_is_in_the_log(tmp_path: Path, name: str) -> None:
    reader = Full(storage=LazyTensorStorage(100)) if name == "replay_buffer" else fails
    arguments: dict[str, Any] = {name: reader}
    with (
        Collector(vector(), frames_per_batch=50, seed=7, log=tmp_path / "log", **arguments) as collector,
        pytest.raises(RuntimeError, match="planted"),
    ):
        next(collector)
    with Collector(vector(), frames_per_batch=50, seed=7) as collector, ReplayLog(tmp_path / "log") as log:
        assert_equal(log.rows(), next(collector))


def test_without_a_seed_the_log_chooses_one(tmp_path: Path) -> None:
    """Another one each time, and one that is in the log."""
    runs = [collect(tmp_path / name, vector(), seed=None) for name in ("one", "other")]
    assert not torch.equal(runs[0]["observation"], runs[1]["observation"])
    for name, rows in zip(("one", "other"), runs, strict=True):
        with ReplayLog(tmp_path / name) as log:
            assert log._windows.events[0].seed >= 0
            assert_equal(log.rows(), rows)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (lambda: vector("Acrobot-v1"), {}),
        (lambda: vector(mode="SameStep"), {}),
        (lambda: vector(kind="async"), {}),
        (lambda: vector(sutton_barto_reward=True), {}),
        (lambda: RewardSum(vector()), {}),
        (lambda: vector(), {"max_frames_per_traj": 9}),
        (lambda: vector(), {"obs_dtype": torch.float64}),
        (lambda: vector(), {"info_keys": ["t"]}),
    ],
    ids=["env", "mode", "kind", "arguments", "markers", "max_frames", "dtype", "info"],
)
def test_a_log_is_continued_by_the_same_env_only(
    tmp_path: Path, make: Callable[[], Any], arguments: dict[str, Any]
) -> None:
    rows = collect(tmp_path / "log", vector(), batches=2)
    env = make()
    with pytest.raises(ValueError, match=r"other settings.*: choose another path"):
        Collector(env, frames_per_batch=50, log=tmp_path / "log", **arguments)
    env.close()
    with ReplayLog(tmp_path / "log") as log:
        assert_equal(log.rows(), rows)


def test_a_log_is_continued_by_the_same_versions_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(tmp_path / "log", vector(), batches=2)
    here = recorder.versions_here
    monkeypatch.setattr(recorder, "versions_here", lambda facts: here(facts) | {"numpy": "9.9"})
    with pytest.raises(
        ValueError, match=r"other versions \(numpy [\d.]+ then, 9\.9 now\): choose another path"
    ):
        Collector(vector(), frames_per_batch=50, log=tmp_path / "log")


@pytest.mark.parametrize("make", [many(Walk), lambda: NextObservationDelta(many(Walk)())])
def test_a_call_that_goes_on_makes_no_row_twice(
    tmp_path: Path, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = collect(tmp_path / "log", make, batches=10)
    steps = 0
    step = Runner.step

    def counted(self: Runner, random: bool = False) -> None:
        nonlocal steps
        steps += self.num_envs
        step(self, random)

    monkeypatch.setattr(Runner, "step", counted)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        log.rows()
        at_once = steps
    steps = 0
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        parts = [log.rows(first, first + 50) for first in range(0, 500, 50)]
    assert_equal(cat(parts), rows)
    assert steps <= at_once + 3  # the last step of the last call


class Later(Walk):
    """Is not deterministic from its 40th step on."""

    steps = 0

    def draw(self) -> float:
        self.steps += 1
        if self.steps < 40:
            return super().draw()
        return Ignored.draw(self)  # type: ignore[arg-type]


def test_rows_before_the_first_check_that_fails(tmp_path: Path) -> None:
    """They are not kept: those that the env does not make again are errors."""
    with pytest.warns(RuntimeWarning, match="Later is not deterministic"):
        rows = collect(tmp_path / "log", many(Later), batches=20, rows=60)
    with ReplayLog(tmp_path / "log", create_env_fn=many(Later)) as log:
        made = len(log) - log.kept
        assert made == 4 * 60
        assert_equal(log.rows(made), rows[made:])
        assert_equal(log.rows(0, 60), rows[:60])
        with pytest.raises(ReplayMismatchError) as found:
            log.rows()
        assert 60 <= found.value.row < made


def test_the_first_batch_is_made_from_four_envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones, some of them, from one env each, in turn."""
    tried: dict[int, list[int]] = {}
    env_in = Replayer.env_in

    def noted(self: Replayer, number: int, env: int) -> Any:
        tried.setdefault(number, []).append(env)
        return env_in(self, number, env)

    monkeypatch.setattr(Replayer, "env_in", noted)
    collect(tmp_path / "log", vector(envs=9), batches=20, rows=90)
    assert sorted(tried) == [0, 1, 4, 16]
    assert len(tried[0]) == 4
    assert all(len(tried[number]) == 1 for number in (1, 4, 16))
    assert len({tried[number][0] for number in (1, 4, 16)}) > 1


def test_a_log_is_mailed(tmp_path: Path) -> None:
    rows = collect(tmp_path / "run.replay", vector())
    with tarfile.open(tmp_path / "run.tar", "w") as archive:
        archive.add(tmp_path / "run.replay", "run.replay")
    with tarfile.open(tmp_path / "run.tar") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    with ReplayLog(tmp_path / "there" / "run.replay") as log:
        check_slices(log, rows, 3)


def test_inspect_lists_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collect(tmp_path / "log", StepCounter(vector()))
    assert main(["inspect", str(tmp_path / "log")]) == 0
    shown = capsys.readouterr().out
    with ReplayLog(tmp_path / "log") as log:
        assert f"{log.stats()['bytes']:,} bytes" in shown
        for name, version in log.versions.items():
            assert f"{name} {version}" in shown
    for text in (
        "replay log of CartPole-v1, 3 envs",
        "300 rows in 6 windows",
        "observation",
        "float32 [4]",
        "step_count",
    ):
        assert text in shown
    assert "not deterministic" not in shown


@pytest.mark.parametrize("kind", ["async", "envpool"])
def test_envs_without_saved_states(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_FAR", 10)
    monkeypatch.setattr(recorder, "_FAR_TOGETHER", 10)
    monkeypatch.setattr(recorder, "_BYTES_PER_ROW", 99)

    def make() -> Any:
        if kind == "async":
            return vector(kind="async")
        envpool = pytest.importorskip("envpool")
        return envpool.make_gymnasium("CartPole-v1", num_envs=3, num_threads=1, seed=3)

    collect(tmp_path / "log", make, seed=None)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        assert log.stats()["states"] == 0


def test_envpool_in_async_mode_is_refused(tmp_path: Path) -> None:
    envpool = pytest.importorskip("envpool")

    def make() -> Any:
        return envpool.make_gymnasium("CartPole-v1", num_envs=4, batch_size=2, num_threads=1, seed=3)

    with pytest.raises(ValueError, match="log= cannot be combined with an envpool in async mode"):
        Collector(make, frames_per_batch=20, log=tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_another_make_is_not_asked_for_where_rows_are_kept(tmp_path: Path) -> None:
    """`gymnasium.make` knows this id in this process only: a log of kept rows needs no env."""
    gym.register("Ignored-v0", lambda **arguments: Ignored())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            rows = collect(tmp_path / "log", gym.make("Ignored-v0"))
    finally:
        del gym.registry["Ignored-v0"]
    with ReplayLog(tmp_path / "log") as log:
        assert log.kept == len(log)
        assert_equal(log.rows(), rows)


def test_games_are_refused(tmp_path: Path) -> None:
    plans: Any = [{"a": [(0, 3, "truncated")], "b": [(0, 2, "terminated")]}]

    def make() -> Any:
        return as_vector_env(PettingZooSource([ScriptedGame(0, plans)]))

    with pytest.raises(ValueError, match="log= cannot record games of several agents yet"):
        Collector(make, frames_per_batch=20, log=tmp_path / "log")
    assert not (tmp_path / "log").exists()
