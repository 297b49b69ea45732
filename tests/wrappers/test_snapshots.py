"""Envs and their wrappers go on from a snapshot as if nothing had happened."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import (
    DelayObservation,
    FrameStackObservation,
    MaxAndSkipObservation,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    StickyAction,
    TimeAwareObservation,
    TransformReward,
)

from flatroll.disk.state_tree import pack, unpack
from flatroll.wrappers import (
    NextObservationDelta,
    RewardSum,
    SnapshotFamily,
    StepCounter,
    as_vector_env,
    get_snapshot,
    register_snapshots,
    set_snapshot,
    snapshot_problem,
)
from flatroll.wrappers import NormalizeObservation as Normalized
from flatroll.wrappers.snapshots import families
from flatroll.wrappers.testing import (
    Script,
    ScriptedTorchEnv,
    ScriptedVectorEnv,
    check_snapshots,
    make_scripted,
)

CARTPOLE = "CartPole-v1"


def cartpole(*wrappers: Callable[[Any], Any]) -> Any:
    env = gym.make(CARTPOLE, max_episode_steps=9)
    for wrapper in wrappers:
        env = wrapper(env)
    return env


WRAPPERS: dict[str, Callable[[], Any]] = {
    "none": cartpole,
    "stack": lambda: cartpole(lambda env: FrameStackObservation(env, 3)),
    "padded with resets": lambda: cartpole(lambda env: FrameStackObservation(env, 3, padding_type="zero")),
    "delay": lambda: cartpole(lambda env: DelayObservation(env, 2)),
    "max and skip": lambda: cartpole(lambda env: MaxAndSkipObservation(env, 2)),
    "time": lambda: cartpole(TimeAwareObservation),
    "sticky": lambda: cartpole(lambda env: StickyAction(env, 0.5)),
    "statistics": lambda: cartpole(RecordEpisodeStatistics),
    "normalised": lambda: cartpole(NormalizeObservation, NormalizeReward),
    "constant": lambda: cartpole(lambda env: TransformReward(env, lambda reward: 2 * float(reward))),
    **{
        name: lambda name=name: gym.make(name, max_episode_steps=7)
        for name in ("MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "Acrobot-v1")
    },
    "scripted": lambda: make_scripted(Script(1, lengths=[[3, 4]])).envs[0],  # type: ignore[attr-defined]
}

SCRIPT = Script(3, lengths=[[3, 4], [5], [7, 2]])
VECTOR: dict[str, Callable[[], Any]] = {
    "cartpole's own": lambda: gym.make_vec(CARTPOLE, num_envs=2),
    **{
        f"sync, {mode}": lambda mode=mode: SyncVectorEnv([cartpole] * 2, autoreset_mode=mode)
        for mode in ("NextStep", "SameStep", "Disabled")
    },
    "scripted": lambda: ScriptedVectorEnv(SCRIPT),
    "scripted, same step": lambda: ScriptedVectorEnv(SCRIPT, autoreset_mode="SameStep"),
    "torch": lambda: ScriptedTorchEnv(SCRIPT),
    "as tensors": lambda: as_vector_env(make_scripted(SCRIPT), framework="torch"),
    "limit": lambda: StepCounter(
        RewardSum(gym.make_vec(CARTPOLE, num_envs=2, vectorization_mode="sync")), max_steps=5
    ),
    "differences": lambda: NextObservationDelta(make_scripted(SCRIPT)),
    "statistics": lambda: Normalized(make_scripted(SCRIPT, autoreset_mode="SameStep")),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_single_envs(name: str) -> None:
    make = WRAPPERS[name]
    assert snapshot_problem(make()) is None
    check_snapshots(make, steps=25)


@pytest.mark.parametrize("name", VECTOR)
def test_vector_envs(name: str) -> None:
    check_snapshots(VECTOR[name], steps=25)


def test_a_snapshot_is_plain_and_a_copy() -> None:
    env = as_vector_env(make_scripted(SCRIPT))
    env.reset(seed=0)
    env.step([0, 0, 0])
    snapshot = get_snapshot(env)
    text, tensors = pack(snapshot)
    env.step([0, 0, 0])
    assert pack(snapshot)[0] == text
    assert all(torch.equal(tensors[name], value) for name, value in pack(snapshot)[1].items())

    other = as_vector_env(make_scripted(SCRIPT))
    other.reset(seed=1)
    set_snapshot(other, unpack(text, tensors))
    assert other.step([0, 0, 0])[0].tolist() == [[0, 0, 2], [1, 0, 2], [2, 0, 2]]


class Opaque(gym.Wrapper):  # type: ignore[type-arg]
    """May hold anything."""


class MyLimit(gym.wrappers.TimeLimit):  # type: ignore[type-arg]
    """Derives from a wrapper that is known."""


class Counted(gym.Wrapper):  # type: ignore[type-arg]
    """Says what it holds."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.count = 0

    def step(self, action: Any) -> Any:
        self.count += 1
        obs, _, *others = self.env.step(action)
        return obs, float(self.count), *others

    def get_snapshot(self) -> int:
        return self.count

    def set_snapshot(self, snapshot: int) -> None:
        self.count = snapshot


class Passing(Opaque):
    """Passes the names of the env inside on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


def closure() -> Any:
    total = 0.0

    def add(reward: Any) -> Any:
        nonlocal total
        total += float(reward)
        return total

    return cartpole(lambda env: TransformReward(env, add))


class Longer(StepCounter):
    """Derives from a marker that is known."""


GENERATOR = np.random.default_rng(0)
SCALE = 0.5
calls = 0


def noisy(reward: Any) -> Any:
    return reward + GENERATOR.random()


def passed_on(reward: Any) -> Any:
    return noisy(reward)


def counted(reward: Any) -> Any:
    global calls
    calls += 1
    return calls


def remembers(reward: Any, seen: list[float] = []) -> Any:  # noqa: B006  # what is tested
    seen.append(float(reward))
    return sum(seen)


def halved(reward: Any, *, least: float = -1.0) -> Any:
    return np.clip(SCALE * reward, least, None)


def doubly_halved(reward: Any) -> Any:
    return halved(halved(reward))


@pytest.mark.parametrize("function", [noisy, passed_on, counted, remembers, lambda r: r + GENERATOR.random()])
def test_functions_that_may_keep_something_are_refused(function: Any) -> None:
    problem = snapshot_problem(TransformReward(gym.make(CARTPOLE), function))
    assert problem == "TransformReward calls a function that may keep a state of its own"


@pytest.mark.parametrize("function", [halved, doubly_halved, lambda reward: SCALE * reward])
def test_functions_that_keep_nothing_are_saved(function: Any) -> None:
    assert snapshot_problem(TransformReward(gym.make(CARTPOLE), function)) is None


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Longer(gym.make_vec(CARTPOLE, num_envs=2)), "Longer has no get_snapshot and set_snapshot"),
        (lambda: Opaque(gym.make(CARTPOLE)), "Opaque has no get_snapshot and set_snapshot"),
        (lambda: Passing(Counted(gym.make(CARTPOLE))), "Passing has no get_snapshot and set_snapshot"),
        (lambda: MyLimit(gym.make(CARTPOLE), 5), "MyLimit has no get_snapshot and set_snapshot"),
        (lambda: SyncVectorEnv([lambda: Opaque(gym.make(CARTPOLE))]), "Opaque has no"),
        (lambda: gym.make("FrozenLake-v1"), "FrozenLakeEnv has no get_snapshot and set_snapshot"),
        (closure, "TransformReward calls a function that may keep a state of its own"),
        (lambda: make_scripted(Script(1), backend="async"), "are in other processes"),
    ],
)
def test_what_cannot_be_saved_is_named(make: Callable[[], Any], problem: str) -> None:
    env = make()
    adapted = as_vector_env(env)
    try:
        for each in (env, adapted):
            assert problem in str(snapshot_problem(each))
        adapted.reset(seed=0)
        with pytest.raises(ValueError, match="the state of the env cannot be saved: "):
            get_snapshot(adapted)
    finally:
        env.close()


def test_a_wrapper_of_one_s_own() -> None:
    check_snapshots(lambda: Counted(gym.make(CARTPOLE)), steps=25)


def test_another_stack_is_refused() -> None:
    one, other = gym.make(CARTPOLE), Counted(gym.make(CARTPOLE))
    one.reset()
    other.reset()
    with pytest.raises(
        ValueError, match=r"the snapshot is one of TimeLimit .*, and the env is Counted > TimeLimit"
    ):
        set_snapshot(other, get_snapshot(one))


def test_a_family_for_envs_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_registered", [*families._registered])

    def put(env: Any, state: Any) -> None:
        env.s, env.np_random.bit_generator.state = state

    register_snapshots(
        SnapshotFamily(
            name="taxis",
            recognises=lambda layer: type(layer).__name__ == "FrozenLakeEnv",
            get=lambda env: (env.s, env.np_random.bit_generator.state),
            set=put,
        )
    )
    check_snapshots(lambda: gym.make("FrozenLake-v1"), steps=25)


class Forgetful(gym.Env):  # type: ignore[type-arg]
    """Its snapshot lacks its random numbers."""

    observation_space = gym.spaces.Box(-9, 9, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = self.np_random.random(1, np.float32)
        return self.at, {}

    def step(self, action: Any) -> Any:
        self.at = self.at + self.np_random.random(1, np.float32)
        return self.at, 1.0, bool(self.at[0] > 3), False, {}

    def get_snapshot(self) -> Any:
        return self.at

    def set_snapshot(self, snapshot: Any) -> None:
        self.at = snapshot


def test_the_kit_finds_a_snapshot_that_lacks_something() -> None:
    with pytest.raises(
        AssertionError, match=r"step \d+ after the snapshot at step 0 returns another observation"
    ):
        check_snapshots(Forgetful)
    with pytest.raises(AssertionError, match="the env cannot be saved: FrozenLakeEnv has no get_snapshot"):
        check_snapshots(lambda: gym.make("FrozenLake-v1"))
