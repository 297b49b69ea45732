"""A log makes the rows again, bit by bit, however they were collected; or it says which row differs."""

import os
import signal
import subprocess
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from forms import is_long
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from replay_logs import MODES, Ignored, Walk, as_bytes, assert_equal, cat, check_slices, collect, many, vector
from tensordict import TensorDict
from torch import Tensor

from flatroll.__main__ import main
from flatroll.datasets import ReplayLog, ReplayMismatchError
from flatroll.datasets.replay_log import recipe as recipes
from flatroll.datasets.replay_log.actions import ActionCode, codes_of, expand, squeeze
from flatroll.datasets.replay_log.recipe import CannotRemakeError
from flatroll.datasets.replay_log.recorder import read_description
from flatroll.datasets.replay_log.replay import Replayer
from flatroll.datasets.replay_log.windows import Event, Restart, Save
from flatroll.disk import DamagedFileError, Folder
from flatroll.disk.state_tree import pack
from flatroll.modules import actor
from flatroll.rollouts import Collector, MultiCollector
from flatroll.wrappers import NextObservationDelta, RewardSum, StepCounter, as_vector_env


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how rows are made: envs alone from a restart, a saved state or a seed, or all together."""
    found: Counter[str] = Counter()
    env_rows = Replayer.env_rows
    window = Replayer.window

    def counted_rows(self: Replayer, *arguments: Any) -> list[TensorDict]:
        names = {Event: "seed", Restart: "restart", Save: "save"}
        found[names[type(arguments[-1][1])]] += 1
        return env_rows(self, *arguments)

    def counted_window(self: Replayer, number: int) -> TensorDict:
        found["together"] += 1
        return window(self, number)

    monkeypatch.setattr(Replayer, "env_rows", counted_rows)
    monkeypatch.setattr(Replayer, "window", counted_window)
    return found


class Drifting(Walk):
    """Depends on what was before the episode: how many resets this object has seen."""

    resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets = 0 if seed is not None else self.resets + 1
        result = super().reset(seed=seed)
        self.start += self.resets
        return self.shown(0.0), result[1]


class Blocks(gym.Env[Any, Any]):
    """Dict and Tuple spaces, images."""

    observation_space = gym.spaces.Dict(
        eye=gym.spaces.Box(0, 255, (24, 24, 3), np.uint8), arm=gym.spaces.Tuple((gym.spaces.Discrete(9),))
    )
    action_space = gym.spaces.Dict(
        move=gym.spaces.MultiDiscrete([3, 5]),
        grip=gym.spaces.Tuple((gym.spaces.Box(-1, 1, (2,)), gym.spaces.MultiBinary(3))),
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.shown(), {}

    def shown(self) -> Any:
        return {
            "eye": self.np_random.integers(0, 256, (24, 24, 3), np.uint8),
            "arm": (self.np_random.integers(0, 9),),
        }

    def step(self, action: Any) -> Any:
        reward = float(action["move"].sum() + action["grip"][0].sum() + action["grip"][1].sum())
        return self.shown(), reward, self.np_random.random() < 0.2, False, {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_rows_are_made_again(tmp_path: Path, mode: str, kind: str) -> None:
    env = vector(mode=mode, kind=kind)
    rows = collect(tmp_path / "log", env)
    env.close()
    with ReplayLog(tmp_path / "log") as log:
        check_slices(log, rows, 8 if is_long() else 3)
        assert log.kept == 0


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_is_begun_from_the_state_of_its_generator(
    tmp_path: Path, mode: str, routes: Counter[str]
) -> None:
    """Also where steps draw, and never by stepping from the seed."""
    rows = collect(tmp_path / "log", many(Walk, mode), batches=40, rows=90, info_keys=["t", "start"])
    with ReplayLog(tmp_path / "log", create_env_fn=many(Walk, mode)) as log:
        assert all(log._windows.restarts)
        routes.clear()
        for first in range(3000, 3600, 100):
            assert_equal(log.rows(first, first + 5), rows[first : first + 5])
        assert routes["restart"] > 0
        assert routes["seed"] == routes["together"] == 0

        start, _ = log._replayer._start(0, int(log._windows.env_ends[-1][0]) - 1)  # type: ignore[union-attr]
        assert start > 1200 - 2 * 256 - 8  # the rows between two states, and what is left of an episode


def test_envs_in_processes_are_asked_for_their_generators(tmp_path: Path, routes: Counter[str]) -> None:
    """Steps that draw make what they say useless: rows are made from the seed."""
    make = many(Walk, vectorizer=AsyncVectorEnv)
    rows = collect(tmp_path / "log", make, batches=20, rows=90)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        assert all(log._windows.restarts)
        assert_equal(log.rows(1700, 1705), rows[1700:1705])
        assert routes["seed"] > 0

    rows = collect(tmp_path / "cart", lambda: vector(kind="async"), batches=20, rows=90)
    routes.clear()
    with ReplayLog(tmp_path / "cart") as log:
        assert_equal(log.rows(1700, 1705), rows[1700:1705])
    assert routes["restart"] > 0
    assert routes["seed"] == 0


def test_an_env_whose_resets_depend_on_more_than_its_generator(tmp_path: Path, routes: Counter[str]) -> None:
    rows = collect(tmp_path / "log", many(Drifting), batches=20, rows=90)
    with ReplayLog(tmp_path / "log", create_env_fn=many(Drifting)) as log:
        assert log.kept == 0
        check_slices(log, rows, 4)
    assert routes["seed"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_nested_spaces_and_images(tmp_path: Path, mode: str) -> None:
    rows = collect(tmp_path / "log", many(Blocks, mode))
    with ReplayLog(tmp_path / "log", create_env_fn=many(Blocks, mode)) as log:
        check_slices(log, rows, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"reset_at_each_iter": True},
        {"max_frames_per_traj": 9},
        {"obs_dtype": torch.float64},
        {"seed": None},
        {"init_random_frames": 60, "writer": 3},
        {"trajs_per_batch": 4},
    ],
    ids=str,
)
def test_options_of_the_collector(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with Collector(
        vector(), frames_per_batch=50, total_frames=300, log=tmp_path / "log", **{"seed": 1, **arguments}
    ) as collector:
        runs: list[TensorDict] = []
        lay_out = collector._runner.lay_out

        def noted(mask: Any, compact: bool) -> Any:
            laid_out = lay_out(mask, compact)
            runs.append(laid_out[0].clone())
            return laid_out

        collector._runner.lay_out = noted  # type: ignore[method-assign]
        list(collector)
    with ReplayLog(tmp_path / "log") as log:
        check_slices(log, cat(runs), 4)


def test_compact_rows_come_whole(tmp_path: Path) -> None:
    expected = collect(tmp_path / "whole", StepCounter(RewardSum(vector())))
    rows = collect(tmp_path / "log", StepCounter(RewardSum(vector())), compact_obs=True)
    with ReplayLog(tmp_path / "log") as log:
        check_slices(log, rows, 3, more=True)
        assert_equal(log.rows(), expected)


def test_what_the_policy_writes_is_stored(tmp_path: Path) -> None:
    env = as_vector_env(vector(), framework="torch")
    rows = collect(tmp_path / "log", env, policy=actor(env, recurrent="gru"), track_policy_version=True)
    with ReplayLog(tmp_path / "log") as log:
        check_slices(log, rows, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gym.make("Pendulum-v1"),
        lambda: TimeLimit(FrameStackObservation(gym.make("CartPole-v1"), 3), 12),
        lambda: gym.make_vec("CartPole-v1", num_envs=3),
        lambda: vector("MountainCarContinuous-v0"),
        lambda: SyncVectorEnv(
            [lambda: gym.make("CartPole-v1", sutton_barto_reward=True), lambda: gym.make("CartPole-v1")]
        ),
    ],
    ids=["single", "wrapped", "vector", "box", "different"],
)
def test_envs_of_the_registry_need_no_function(tmp_path: Path, make: Callable[[], Any]) -> None:
    rows = collect(tmp_path / "log", make())
    with ReplayLog(tmp_path / "log") as log:
        check_slices(log, rows, 3)
        assert log.kept == 0


def test_a_stack_with_other_wrappers_is_made_by_its_function(tmp_path: Path) -> None:
    def make() -> Any:
        return NextObservationDelta(vector())

    rows = collect(tmp_path / "log", make)
    with pytest.raises(ValueError, match=r"was made by a function .* create_env_fn=make_env"):
        ReplayLog(tmp_path / "log").rows()
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        check_slices(log, rows, 3)


def test_rows_with_and_without_a_log_are_equal(tmp_path: Path) -> None:
    logged = collect(tmp_path / "log", vector())
    with Collector(vector(), frames_per_batch=50, total_frames=300, seed=7) as collector:
        assert_equal(cat(list(collector)), logged)


def test_an_env_that_ignores_its_seed_is_found_out_and_its_rows_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(
        RuntimeWarning, match=r"Ignored is not deterministic \(row \d+, of env 0, .* kept themselves"
    ):
        rows = collect(tmp_path / "log", many(Ignored), info_keys=["t"])
    with ReplayLog(tmp_path / "log") as log:  # no env is made
        assert log.kept == len(log)
        check_slices(log, rows, 3)
    with pytest.warns(RuntimeWarning, match="not deterministic"):
        rows = collect(
            tmp_path / "compact", lambda: StepCounter(many(Ignored)()), info_keys=["t"], compact_obs=True
        )
    with ReplayLog(tmp_path / "compact") as log:
        check_slices(log, rows, 3, more=True)

    assert main(["inspect", str(tmp_path / "log")]) == 0
    shown = capsys.readouterr().out
    assert "replay log of Ignored, 3 envs" in shown
    assert "not deterministic: 300 rows, from row 0 on, are kept themselves" in shown


def test_lost_rows_do_no_harm(tmp_path: Path) -> None:
    """After an error, a reset by hand and steps of other code, the next reset is seeded."""
    env = vector()
    fails = [False]

    def policy(obs: Tensor) -> Any:
        if fails[0]:
            fails[0] = False
            raise RuntimeError("planted")
        return torch.ones(3, dtype=torch.int64)

    batches: list[TensorDict] = []
    for seed in (5, None):
        path = tmp_path / f"log{seed}"
        batches.clear()
        with Collector(env, policy, frames_per_batch=41, log=path, seed=seed) as collector:
            batches.append(next(collector))
            fails[0] = True
            with pytest.raises(RuntimeError, match="planted"):
                next(collector)
            batches += [next(collector), next(collector)]
            collector.reset()
            batches.append(next(collector))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                Collector(env, frames_per_batch=9).rollout()
                batches += [next(collector), next(collector)]
            collector.restart()
            batches.append(next(collector))
            collector._closed = True  # the env is used again
            collector._log.close()  # type: ignore[union-attr]
        with ReplayLog(path) as log:
            check_slices(log, cat(batches), 6)


def test_a_log_does_not_begin_inside_an_episode(tmp_path: Path) -> None:
    saved = Collector(gym.make("CartPole-v1"), frames_per_batch=5)
    next(saved)
    with Collector(gym.make("CartPole-v1"), frames_per_batch=5, log=tmp_path / "log") as logged:
        assert logged.snapshot_problem == "its log makes rows again from resets"
        with pytest.raises(ValueError, match="log= cannot go on in the middle of saved episodes"):
            logged.load_state_dict(saved.state_dict(episodes=True))
        assert logged.frames == 0  # nothing of the state is loaded


def test_a_log_is_continued(tmp_path: Path) -> None:
    batches = []
    state = None
    for _ in range(3):
        with Collector(vector(), frames_per_batch=60, log=tmp_path / "log", seed=5) as collector:
            if state is not None:
                collector.load_state_dict(state)
            batches += [next(collector), next(collector)]
            state = collector.state_dict()
    with ReplayLog(tmp_path / "log") as log:
        check_slices(log, cat(batches), 6)
    with pytest.raises(ValueError, match=r"is the log of CartPole-v1 with 3 envs and other settings \("):
        Collector(vector(envs=2), frames_per_batch=60, log=tmp_path / "log")


def test_two_writers(tmp_path: Path) -> None:
    with (
        Collector(vector(), frames_per_batch=60, log=tmp_path / "log"),
        pytest.raises(BlockingIOError, match="another writer has"),
    ):
        Collector(vector(), frames_per_batch=60, log=tmp_path / "log")


KILLED = """
import sys
import gymnasium as gym
from flatroll.rollouts import Collector
env = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
for number, _ in enumerate(Collector(env, frames_per_batch=30, log=sys.argv[1], seed=5)):
    print(number + 1, flush=True)
"""


def test_a_killed_process_leaves_all_whole_windows(tmp_path: Path) -> None:
    for kill in range(5 if is_long() else 1):
        path = tmp_path / str(kill)
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            told = [process.stdout.readline() for _ in range(8)]
            time.sleep(0.01 * kill)
            os.kill(process.pid, signal.SIGKILL)
            told += process.stdout.readlines()

        acknowledged = max(int(line) for line in told if line.endswith("\n"))
        with ReplayLog(path) as log:
            assert len(log) % 30 == 0
            assert 30 * acknowledged <= len(log) <= 30 * (acknowledged + 1)
            expected = collect(tmp_path / f"again{kill}", vector(), batches=len(log) // 30, rows=30, seed=5)
            assert_equal(log.rows(), expected)


def test_a_difference_names_the_row_the_versions_and_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Old(Walk):
        def draw(self) -> float:
            return super().draw() + 1e-9 * (self.start > 0.9)

    rows = collect(tmp_path / "log", many(Walk), batches=4)
    # The observation after the step differs, which is the next one of the episode's first row.
    first = int((rows["observation"][:, 0] > 0.9).nonzero()[0])
    installed = recipes.versions_here

    with ReplayLog(tmp_path / "log", create_env_fn=many(Old)) as log:
        with pytest.raises(
            ReplayMismatchError, match="versions are the same: the env depends on something"
        ) as found:
            log.rows()
        assert found.value.row in range(first, first + 2)

        monkeypatch.setattr(
            "flatroll.datasets.replay_log.log.versions_here",
            lambda facts: installed(facts) | {"gymnasium": "0.1"},
        )
        with pytest.raises(
            ReplayMismatchError,
            match=r"row [\d,]+, of env \d, .* gymnasium [\d.]+ then, 0\.1 now\. .* pip install gymnasium==[\d.]+$",
        ):
            log.check(100)

    collect(tmp_path / "cart", vector())
    assert main(["inspect", str(tmp_path / "cart"), "--verify"]) == 0
    assert "all rows were made again, and are equal" in capsys.readouterr().out
    monkeypatch.setattr("gymnasium.envs.classic_control.cartpole.CartPoleEnv.__init__", heavier(9.9))
    assert main(["inspect", str(tmp_path / "cart"), "--verify"]) == 1
    assert "differs: " in capsys.readouterr().out


def heavier(gravity: float) -> Any:
    original = CartPoleEnv.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.gravity = gravity

    return init


def test_an_env_changed_after_it_was_made_is_found_out(tmp_path: Path) -> None:
    env = vector()
    for one in env.envs:
        one.unwrapped.gravity = 9.9
    with pytest.warns(RuntimeWarning, match="CartPole-v1 is not deterministic"):
        rows = collect(tmp_path / "log", env)
    with ReplayLog(tmp_path / "log") as log:
        check_slices(log, rows, 3)


def test_what_cannot_be_logged(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with pytest.raises(CannotRemakeError, match=r"Walk has no spec .*: pass a function that makes it"):
        Collector(many(Walk)(), frames_per_batch=9, log=path)
    env = NextObservationDelta(vector())
    with pytest.raises(CannotRemakeError, match="returned the same env twice"):
        next(Collector(lambda: env, frames_per_batch=9, log=path))
    with pytest.raises(ValueError, match="log= cannot be combined with track_traj_ids=False"):
        Collector(vector(), frames_per_batch=9, track_traj_ids=False, log=path)
    with pytest.raises(ValueError, match="log= cannot be combined with splits=2"):
        Collector(lambda: vector(kind="async"), frames_per_batch=9, splits=2, log=path)
    with pytest.raises(TypeError, match="unknown arguments log"):
        MultiCollector([vector], frames_per_batch=9, log=path)  # type: ignore[call-arg]


def test_wrong_reads(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ReplayLog(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no replay log"):
        ReplayLog(tmp_path / "empty")

    rows = collect(tmp_path / "log", vector())
    with ReplayLog(tmp_path / "log") as log:
        with pytest.raises(IndexError, match=r"rows \[290, 301\) requested, available are \[0, 300\)"):
            log.rows(290, 301)
        with pytest.raises(ValueError, match="step 1"):
            log[::2]
        assert_equal(log[-1].unsqueeze(0), rows[-1:])
        assert len(log[9:9]) == 0
        assert set(log[9:9].keys(True, True)) == set(rows.keys(True, True))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"wrappers": [("x", "os:system", {"command": "true"})]}, "is not one that a log may name"),
        (
            {"wrappers": [("x", "gymnasium.wrappers.rendering:RecordVideo", {})]},
            "is not one that a log may name",
        ),
        ({"wrappers": [("x", "gymnasium.wrappers.utils:os", {})]}, "is no wrapper of Gymnasium"),
        ({"id": "antigravity:CartPole-v1"}, "is not one that a log may name"),
        ({"id": "GymV26Environment-v0"}, "is not one that a log may name"),
        ({"id": "Nowhere-v0"}, "is not in Gymnasium's registry: import the package that registers it"),
    ],
    ids=str,
)
def test_a_log_does_not_choose_what_code_runs(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    collect(tmp_path / "log", vector())
    log = ReplayLog(tmp_path / "log")
    log._recipe.envs[0] |= change
    with pytest.raises(CannotRemakeError, match=text):
        log.rows()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "any"},
        {"num_envs": 2.5},
        {"mode": "Never"},
        {"markers": [("eval", {})]},
        {"envs": [3]},
        {"alone": 1},
    ],
    ids=str,
)
def test_a_description_that_no_writer_makes_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    collect(tmp_path / "log", vector())
    loaded = Folder(tmp_path / "log").load()
    tree = read_description(loaded.json, loaded.tensors)
    tree["recipe"] |= change
    with Folder(tmp_path / "log", write=True) as folder:
        folder.load()
        folder.recover()
        folder.publish(*pack(tree))
    with pytest.raises(DamagedFileError, match="its description of the env cannot be read"):
        ReplayLog(tmp_path / "log")


def test_another_folder_is_no_log(tmp_path: Path) -> None:
    with Folder(tmp_path / "other", write=True) as folder:
        folder.append({"x": torch.zeros(3)})
        folder.publish(*pack({"kind": "buffer"}))
    with pytest.raises(ValueError, match="holds no replay log"):
        ReplayLog(tmp_path / "other")


def test_damaged_windows_are_found(tmp_path: Path) -> None:
    """Whatever byte is flipped: an error, or all rows as they were."""
    rows = collect(tmp_path / "log", vector(), batches=3)
    draw = np.random.default_rng(1)
    for file in sorted((tmp_path / "log").glob("*.rows")):
        whole = file.read_bytes()
        for place in draw.integers(0, len(whole), 6).tolist():
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
            with warnings.catch_warnings(), suppress(DamagedFileError):
                warnings.simplefilter("ignore")
                with ReplayLog(tmp_path / "log") as log:
                    assert_equal(log.rows(), rows[: len(log)])
        file.write_bytes(whole)


@pytest.mark.parametrize(
    ("kind", "values"),
    [(torch.int64, [0, 6, 3, 6]), (torch.int64, []), (torch.float32, [0.5, -0.0, float("nan")])],
)
def test_actions_take_few_bits(kind: torch.dtype, values: list[float]) -> None:
    column = torch.tensor(values, dtype=kind)
    space = gym.spaces.Discrete(7) if kind is torch.int64 else gym.spaces.Box(-1, 1, ())
    (code,) = codes_of(space, {"action": column})
    packed = code.encode(column)
    assert as_bytes(code.decode(packed, len(values))) == as_bytes(column)
    if kind is torch.int64:
        assert len(packed) == 1 + -(-3 * len(values) // 8)
    with pytest.raises(DamagedFileError):
        code.decode(packed, len(values) + 9)
    assert ActionCode.from_json(code.to_json()) == code


def test_no_more_is_expanded_than_allowed() -> None:
    packed = squeeze(bytes(1 << 20))
    assert len(packed) < 2000
    with pytest.raises(DamagedFileError, match="claims"):
        expand(packed, 1 << 19)
    with pytest.raises(DamagedFileError, match="more than"):
        expand(b"\x01" + zlib.compress(bytes(1 << 20)), 1 << 19)


class OnTorch:
    """A simulator in torch, whose envs share one generator."""

    num_envs = 3
    device = torch.device("cpu")
    single_observation_space = gym.spaces.Box(-1e9, 1e9, (2,))
    single_action_space = gym.spaces.Discrete(2)
    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.generator = torch.Generator().manual_seed(seed)
        self.t = torch.zeros(3)
        return self.shown(), {}

    def shown(self) -> Tensor:
        return torch.stack([self.t, torch.rand(3, generator=self.generator)], 1)

    def step(self, action: Tensor) -> Any:
        self.t = self.t + action
        ended = self.t > 4
        last = self.shown()
        self.t = torch.where(ended, 0, self.t)
        shown = torch.where(ended[:, None], self.shown(), last)
        return shown, action.float(), ended, torch.zeros_like(ended), {"final_obs": last}


def test_a_simulator_in_torch(tmp_path: Path) -> None:
    rows = collect(tmp_path / "log", OnTorch)
    with ReplayLog(tmp_path / "log", create_env_fn=OnTorch) as log:
        check_slices(log, rows, 3)
        assert log.kept == 0
