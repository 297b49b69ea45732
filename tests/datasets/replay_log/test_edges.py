"""Rows that were once wrong or lost, and what a log must leave alone."""

import copy
import gc
import pickle
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, RecordEpisodeStatistics
from hypothesis import given
from hypothesis import strategies as st
from replay_logs import MODES, Ignored, Walk, assert_equal, cat, check_slices, collect, many, vector
from tensordict.nn import TensorDictModule

from flatroll.datasets import ReplayLog
from flatroll.datasets.replay_log.columns import pack_kept
from flatroll.datasets.replay_log.feed import Feed
from flatroll.datasets.replay_log.recipe import CannotRemakeError
from flatroll.datasets.replay_log.recorder import Recorder, read_description
from flatroll.datasets.replay_log.varints import decode_varints, encode_varints
from flatroll.datasets.replay_log.windows import Index, Windows
from flatroll.disk import DamagedFileError, Folder
from flatroll.disk.state_tree import pack
from flatroll.rollouts import Collector


class Counting(Walk):
    """Its steps draw from NumPy's global generator."""

    def draw(self) -> float:
        return float(np.random.random())


class Masked(Walk):
    """Allows the first and the last action, but is silent in every third step."""

    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0], self.mask()

    def step(self, action: Any) -> Any:
        return *super().step(action + 4)[:4], self.mask()

    def mask(self) -> dict[str, Any]:
        if self.t % 3 == 2:
            return {}
        return {"action_mask": np.array([True, self.t % 2 == 1, True])}


def normalized() -> Any:
    """Observations depend on all that the env has ever shown."""
    return gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync", wrappers=[NormalizeObservation])


@pytest.mark.parametrize("kind", ["sync", "vector_entry_point"])
@pytest.mark.parametrize("rows_per_batch", [1, 5, 17])
def test_batches_of_fewer_rows_than_envs(tmp_path: Path, kind: str, rows_per_batch: int) -> None:
    """The rows of one step are in several batches."""
    env = gym.make_vec("CartPole-v1", num_envs=16, vectorization_mode=kind)
    rows = collect(tmp_path / "log", env, batches=200 // rows_per_batch, rows=rows_per_batch)
    with ReplayLog(tmp_path / "log") as log:
        check_slices(log, rows, 3)
        assert log.kept == 0


@pytest.mark.parametrize("make", [lambda: gym.make_vec("CartPole-v1", num_envs=3), many(Ignored)])
def test_rows_belong_to_the_reader(tmp_path: Path, make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        rows = collect(tmp_path / "log", make)
    with ReplayLog(tmp_path / "log") as log:
        mine = log[3:9]
        for key in mine.keys(True, True):
            mine[key].zero_()
        assert_equal(log[3:9], rows[3:9])


def test_a_log_of_kept_rows_goes_on_keeping_them(tmp_path: Path) -> None:
    parts = []
    for seed in (1, 2):
        with pytest.warns(RuntimeWarning, match="not deterministic"):
            parts.append(collect(tmp_path / "log", many(Ignored), seed=seed))
    with ReplayLog(tmp_path / "log") as log:
        assert log.kept == len(log) == 600
        check_slices(log, cat(parts), 3)


def test_an_env_that_remembers_is_read_in_any_order(tmp_path: Path) -> None:
    rows = collect(tmp_path / "log", normalized(), batches=20)
    with ReplayLog(tmp_path / "log") as log:
        for first, end in [(500, 1000), (0, 500), (900, 903), (10, 12), (0, 1000)]:
            assert_equal(log[first:end], rows[first:end])
        assert log.kept == 0


def test_an_env_that_remembers_lost_rows_is_found_out(tmp_path: Path) -> None:
    with Collector(normalized(), frames_per_batch=50, seed=3, log=tmp_path / "log") as collector:
        batches = [next(collector), next(collector)]
        collector.restart()
        with pytest.warns(RuntimeWarning, match="not deterministic"):
            batches.append(next(collector))
        collector.reset()
        batches.append(next(collector))
    with ReplayLog(tmp_path / "log") as log:
        check_slices(log, cat(batches), 3)
        assert log.kept == 100


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info_keys", [[], ["action_mask"]])
def test_masks_of_info_that_a_policy_reads(tmp_path: Path, mode: str, info_keys: list[str]) -> None:
    """The runner opens them where info is silent, so they are stored."""

    def choose(obs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return mask.float().argmax(-1)

    policy = TensorDictModule(choose, in_keys=["observation", "action_mask"], out_keys=["action"])
    rows = collect(tmp_path / "log", many(Masked, mode), policy=policy, info_keys=info_keys)
    with ReplayLog(tmp_path / "log", create_env_fn=many(Masked, mode)) as log:
        check_slices(log, rows, 3)
        assert log.kept == 0


def test_global_generators_are_left_alone(tmp_path: Path) -> None:
    def draws() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    def seed_all() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    seed_all()
    with pytest.warns(RuntimeWarning, match="not deterministic"):
        logged = collect(tmp_path / "log", many(Counting))
    after = draws()
    seed_all()
    with Collector(many(Counting), frames_per_batch=50, total_frames=300, seed=7) as collector:
        assert_equal(cat(list(collector)), logged)
    assert draws() == after

    collect(tmp_path / "cart", many(Walk))
    seed_all()
    with ReplayLog(tmp_path / "cart", create_env_fn=many(Walk)) as log:
        log.rows()
    found = draws()
    seed_all()
    assert found == draws()


def test_the_envs_of_the_user_are_left_alone(tmp_path: Path) -> None:
    env = vector()

    def own_reset(**arguments: Any) -> Any:
        return type(env.envs[2]).reset(env.envs[2], **arguments)

    env.envs[2].reset = own_reset
    collector = Collector(env, frames_per_batch=20, seed=3, log=tmp_path / "log")
    next(collector)

    # A copy of an env does not reset the one that it was copied from.
    state = np.array(env.envs[0].unwrapped.state)
    copied = copy.deepcopy(env.envs[0])
    copied.reset(seed=5)
    assert copied.unwrapped is not env.envs[0].unwrapped
    pickle.loads(pickle.dumps(env.envs[0])).reset(seed=5)
    assert np.array_equal(env.envs[0].unwrapped.state, state)

    collector.shutdown()
    assert "reset" not in vars(env.envs[0])
    assert env.envs[2].reset is own_reset


def test_a_collector_that_nobody_closed_lets_go(tmp_path: Path) -> None:
    env = vector()
    collector = Collector(env, frames_per_batch=20, seed=3, log=tmp_path / "log")
    batches = [next(collector)]
    del collector
    gc.collect()
    with Collector(env, frames_per_batch=20, seed=3, log=tmp_path / "log") as collector:
        batches.append(next(collector))
    assert all("reset" not in vars(one) for one in env.envs)
    with ReplayLog(tmp_path / "log") as log:
        assert_equal(log.rows(), cat(batches))


def _itself(env: Any) -> Any:
    return env


def test_a_function_must_not_return_the_same_single_envs(tmp_path: Path) -> None:
    envs = [Walk() for _ in range(3)]

    def make() -> Any:
        return SyncVectorEnv([partial(_itself, env) for env in envs])

    with pytest.raises(CannotRemakeError, match="returned the same env twice"):
        next(Collector(make, frames_per_batch=9, log=tmp_path / "log"))


def test_a_long_run_keeps_no_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    load_windows = Recorder._load_windows

    def counted(self: Recorder) -> Windows:
        loads.append(self._written)
        return load_windows(self)

    monkeypatch.setattr(Recorder, "_load_windows", counted)
    with Collector(vector(), frames_per_batch=6, log=tmp_path / "log", seed=1) as collector:
        for _ in range(70):
            next(collector)
        recorder: Any = collector._log
        assert loads == [0, 1, 4, 16, 64]
        held = gc.get_referents(recorder.__dict__)
        assert not any(isinstance(one, Windows) for one in held)
        assert len(recorder._events) + len(recorder._taken) <= 1 + 3


def test_opening_a_log_reads_its_index_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = collect(tmp_path / "log", vector(), batches=100, rows=30)
    asked: list[Any] = []
    read_rows = Folder.read_rows

    def noted(self: Folder, first: Any = None, end: Any = None, names: Any = None) -> Any:
        asked.append((first, end, names))
        return read_rows(self, first, end, names)

    monkeypatch.setattr(Folder, "read_rows", noted)
    with ReplayLog(tmp_path / "log") as log:
        assert {names for _, _, names in asked} == {("index",)}
        asked.clear()
        assert_equal(log.rows(), rows)
        files = len(log._folder.segments)
        assert len(asked) <= files + 4 < 60  # not one for each of the 100 windows


def test_what_stays_in_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(RuntimeWarning, match="not deterministic"):
        rows = collect(tmp_path / "log", many(Ignored), batches=30, rows=30)
    monkeypatch.setattr("flatroll.datasets.replay_log.windows._CACHED_BYTES", 9_000)
    with ReplayLog(tmp_path / "log") as log:
        check_slices(log, rows, 4)
        windows = log._windows
        assert windows._recent_bytes == sum(window.bytes for window in windows._recent.values()) <= 9_000


def test_envs_that_cannot_be_stepped_alone_are_tried_later_too(tmp_path: Path) -> None:
    """The first batch has no second episode."""

    class Unseeded(gym.vector.VectorEnv[Any, Any, Any]):
        metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}  # noqa: RUF012
        num_envs = 2
        single_observation_space = gym.spaces.Box(-1, 1, (1,), np.float64)
        single_action_space = gym.spaces.Discrete(2)
        observation_space = gym.spaces.Box(-1, 1, (2, 1), np.float64)
        action_space = gym.spaces.MultiDiscrete([2, 2])

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.t = 0
            self.start = np.zeros((2, 1))
            return self.start, {}

        def step(self, actions: Any) -> Any:
            self.t += 1
            shown = self.start + self.t / 1000
            ended = np.full(2, self.t == 10)
            info = {}
            if ended.any():
                info = {"final_obs": shown, "_final_obs": ended}
                self.start = shown = np.random.default_rng().random((2, 1))
            return shown, np.zeros(2), ended, np.zeros(2, bool), info

    with pytest.warns(RuntimeWarning, match=r"Unseeded is not deterministic \(row 24"):
        rows = collect(tmp_path / "log", Unseeded, batches=10, rows=6)
    with ReplayLog(tmp_path / "log", create_env_fn=Unseeded) as log:
        assert log.kept == 36
        assert_equal(log.rows(24), rows[24:])


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "load"},
        {"dtype": "int64"},
        {"max_frames": -1},
        {"mode": None},
        {"envs": []},
        {"kind": "single"},
        {"kind": "vector"},
        {"kwargs": {1: 2}},
        {"max_episode_steps": 0},
        {"max_episode_steps": "9"},
        {"order_enforce": "yes"},
        {"wrappers": [("x", 3, {})]},
        {"wrappers": [("x", "gymnasium.wrappers.common:TimeLimit", [])]},
        {"wrappers": 3},
    ],
    ids=str,
)
def test_every_field_of_a_description_is_checked(tmp_path: Path, change: dict[str, Any]) -> None:
    collect(tmp_path / "log", vector(), batches=1)
    tree = described(tmp_path / "log")
    target = tree["recipe"] if set(change) <= set(tree["recipe"]) else tree["recipe"]["envs"][0]
    target |= change
    describe_anew(tmp_path / "log", tree)
    with pytest.raises(DamagedFileError, match="its description of the env cannot be read"):
        ReplayLog(tmp_path / "log")


def test_a_vector_env_gets_no_arguments_of_make_vec(tmp_path: Path) -> None:
    collect(tmp_path / "log", gym.make_vec("CartPole-v1", num_envs=3), batches=1)
    tree = described(tmp_path / "log")
    tree["recipe"]["envs"][0]["kwargs"]["num_envs"] = 2**20
    describe_anew(tmp_path / "log", tree)
    with pytest.raises(DamagedFileError, match=r"arguments of a vector env have \['num_envs'\]"):
        ReplayLog(tmp_path / "log")


def described(path: Path) -> dict[str, Any]:
    loaded = Folder(path).load()
    return read_description(loaded.json, loaded.tensors)


def describe_anew(path: Path, tree: dict[str, Any]) -> None:
    with Folder(path, write=True) as folder:
        folder.load()
        folder.recover()
        folder.publish(*pack(tree))


def test_kept_rows_are_compared_with_their_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def other(layout: Any, batch: Any, final: Any) -> bytes:
        changed = batch.clone()
        changed["next", "reward"][4] += 1
        return pack_kept(layout, changed, final)

    monkeypatch.setattr("flatroll.datasets.replay_log.recorder.pack_kept", other)
    with pytest.warns(RuntimeWarning, match="not deterministic"):
        collect(tmp_path / "log", many(Ignored))
    with (
        ReplayLog(tmp_path / "log") as log,
        pytest.raises(DamagedFileError, match=r"kept row 4 is not what was collected"),
    ):
        log[10:12]


@pytest.mark.parametrize(
    "change",
    [
        {"digested": []},
        {"obs": ["reward"]},
        {"init": "nothing"},
        {"counts": [("next", "reward")]},
        {"actions": [[["observation"], "int64", [], 0, 1]]},
    ],
    ids=str,
)
def test_the_columns_of_a_log_are_those_of_its_digests(tmp_path: Path, change: dict[str, Any]) -> None:
    """Else a column would come without a proof."""
    collect(tmp_path / "log", vector(), batches=1)
    tree = described(tmp_path / "log")
    tree["layout"] |= change
    describe_anew(tmp_path / "log", tree)
    with pytest.raises(DamagedFileError, match="its columns cannot be read"):
        ReplayLog(tmp_path / "log")


def test_parts_and_shapes_that_the_env_does_not_have(tmp_path: Path) -> None:
    collect(tmp_path / "log", vector(), batches=2)
    tree = described(tmp_path / "log")
    actions = tree["layout"]["actions"]
    made = tree["layout"]["made"]

    for others, text in [
        ([], "in the log \\[\\]"),
        ([[["other"], *actions[0][1:]]], "in the log \\['other'\\]"),
    ]:
        tree["layout"]["actions"] = others
        describe_anew(tmp_path / "log", tree)
        with ReplayLog(tmp_path / "log") as log, pytest.raises(CannotRemakeError, match=text):
            log.rows()

    others = [(key, dtype, [9] if "reward" in key else shape) for key, dtype, shape in made]
    tree["layout"] |= {"actions": actions, "made": others}
    describe_anew(tmp_path / "log", tree)
    with ReplayLog(tmp_path / "log") as log, pytest.raises(DamagedFileError, match="has the shape"):
        log.rows()


@pytest.mark.parametrize("change", [{"info_keys": "x"}, {"info_keys": [3]}], ids=str)
def test_keys_of_info_are_keys(tmp_path: Path, change: dict[str, Any]) -> None:
    collect(tmp_path / "log", vector(), batches=1)
    tree = described(tmp_path / "log")
    tree["recipe"] |= change
    describe_anew(tmp_path / "log", tree)
    with pytest.raises(DamagedFileError, match="its description of the env cannot be read"):
        ReplayLog(tmp_path / "log")


def test_more_rows_are_claimed_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before memory is taken for them."""
    collect(tmp_path / "log", vector(), batches=2)
    decode = Index.decode

    def claiming(data: Any, envs: int) -> Index:
        index = decode(data, envs)
        return index._replace(counts=np.full_like(index.counts, 2**31 - 1))

    monkeypatch.setattr(Index, "decode", claiming)
    with ReplayLog(tmp_path / "log") as log, pytest.raises(DamagedFileError, match="another number of rows"):
        log[10:12]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"counts": np.array([3, -1, 3])}, "rows"),
        ({"counts": np.array([2**40, 1, 3])}, "rows"),
        ({"events": np.array([[-99, 0, 0, 0, 0, 1, 2]])}, "a negative seed"),
        ({"events": np.array([[0, 9, 9, 9, 0, 1, 2]])}, "events outside"),
        ({"restarts": np.array([[3, 0, 0, 1, 1, 1, 1, 0]])}, "restarts of envs"),
        ({"restarts": np.array([[0, 5, 0, 1, 1, 1, 1, 0]])}, "restarts outside"),
        ({"saves": np.array([[-2, 0, 9, 0]])}, "saved states of envs"),
        ({"saves": np.array([[0, 0, 2**40, 0]])}, "saved states of envs"),
        ({"saves": np.array([[0, 6, 9, 0]])}, "saved states outside"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_an_index_that_no_writer_makes_is_damaged(change: dict[str, Any], problem: str) -> None:
    good = Index(
        np.array([5, 4, 3]),
        np.zeros((0, 7), np.int64),
        np.zeros((0, 8), np.int64),
        np.zeros((0, 4), np.int64),
        is_kept=False,
    )

    def decoded(index: Index) -> Index:
        return Index.decode(np.frombuffer(index.encode(), np.uint8), 3)

    assert decoded(good).counts.tolist() == [5, 4, 3]
    with pytest.raises(DamagedFileError, match=problem):
        decoded(good._replace(**change))


@given(st.binary(max_size=60))
def test_noise_is_no_index(noise: bytes) -> None:
    try:
        index = Index.decode(np.frombuffer(noise, np.uint8), 2)
    except DamagedFileError:
        return
    assert index.problem() is None


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.binary(max_size=9))
def test_varints_are_read_as_they_were_written(numbers: list[int], rest: bytes) -> None:
    packed = encode_varints(numbers)
    found, used = decode_varints(np.frombuffer(packed + rest, np.uint8), len(numbers))
    assert (found.tolist(), used) == (numbers, len(packed))

    assert decode_varints(np.frombuffer(packed, np.uint8))[0].tolist() == numbers
    with pytest.raises(DamagedFileError, match="fewer"):
        decode_varints(np.frombuffer(packed, np.uint8), len(numbers) + 1)


@pytest.mark.parametrize(("data", "problem"), [(b"\x05\x80", "is cut"), (b"\x80" * 10 + b"\1", "64 bits")])
def test_varints_that_no_writer_makes_are_damaged(data: bytes, problem: str) -> None:
    with pytest.raises(DamagedFileError, match=problem):
        decode_varints(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("first", [0, 700])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_rows_can_be_read_after_an_error_in_the_env(
    tmp_path: Path, kind: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An env that was left in the middle of a step is not used again."""
    rows = collect(tmp_path / "log", lambda: vector(kind=kind), batches=10, rows=90)
    step = Feed.__call__
    calls = 0

    def failing(self: Feed, obs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise OSError("planted")
        return step(self, obs)

    with ReplayLog(tmp_path / "log") as log:
        monkeypatch.setattr(Feed, "__call__", failing)
        with pytest.raises(OSError, match="planted"):
            log.rows(first, first + 200)
        replayer = log._replayer
        assert replayer is not None
        assert replayer._whole is None
        assert not replayer._alone
        assert_equal(log.rows(first, first + 200), rows[first : first + 200])


def test_an_entry_of_info_that_few_envs_have(tmp_path: Path) -> None:
    """Rows of the other envs are made without it."""

    def make() -> Any:
        def one(steps: int) -> Any:
            return lambda: RecordEpisodeStatistics(gym.make("CartPole-v1", max_episode_steps=steps))

        return SyncVectorEnv([one(500), one(500), one(5)])

    rows = collect(tmp_path / "log", make, rows=21, info_keys=[("episode", "l")])
    ends = rows.get(("next", "episode", "l"))
    assert set(ends[:14].tolist()) == {0}
    assert ends[14:21].max() == 5
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        check_slices(log, rows)
