"""`Collector(splits=...)`: what cannot be split, and failures while a step is under way."""

import os
import signal
import sys
from typing import Any

import gymnasium as gym
import interpreters
import numpy as np
import pytest
import torch
from split_envs import Part, parts

from flatroll.rollouts import Collector
from flatroll.wrappers import StepCounter, TrajId, as_vector_env
from flatroll.wrappers.testing import Script, ScriptedVectorEnv


def by_place(obs: torch.Tensor) -> torch.Tensor:
    return (obs.sum(-1) % 5).long()


def cartpoles(num_envs: int = 4) -> Any:
    return gym.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="async")


def collector(env: Any, policy: Any = by_place, **options: Any) -> Collector:
    return Collector(env, policy, **{"frames_per_batch": 12, "splits": 2, **options})


@pytest.mark.parametrize("splits", [0, -1])
def test_splits_must_be_positive(splits: int) -> None:
    with pytest.raises(ValueError, match=f"splits must be at least 1, got {splits}"):
        collector(parts(0, 2), splits=splits)


@pytest.mark.parametrize("splits", [None, 2.0, "2", True])
def test_splits_must_be_an_integer(splits: Any) -> None:
    with pytest.raises(TypeError, match="splits must be an integer"):
        collector(parts(0, 2), splits=splits)


def remember(obs: torch.Tensor, is_init: torch.Tensor) -> torch.Tensor:
    return by_place(obs)


class Flipped(gym.vector.VectorActionWrapper):
    def actions(self, actions: Any) -> Any:
        return 4 - np.asarray(actions)


@pytest.mark.parametrize(
    ("env", "policy", "kind", "text"),
    [
        (lambda: Part(), by_place, ValueError, "can divide only a gymnasium.vector.AsyncVectorEnv, got Part"),
        (
            lambda: parts(0, 2, 3),
            by_place,
            ValueError,
            "splits=2 needs a list of 2 envs or functions, got a list of 3",
        ),
        (
            lambda: [ScriptedVectorEnv(Script(2)), ScriptedVectorEnv(Script(2))],
            by_place,
            ValueError,
            "splits= needs envs whose steps can be started and awaited separately",
        ),
        (lambda: [Part()] * 2, by_place, ValueError, "must be different envs, got one of them twice"),
        (
            lambda: [Part(0, 2), lambda: Part(2, 5)],
            by_place,
            TypeError,
            "a list of envs or a list of functions",
        ),
        (
            lambda: [Part(0, 2), Part(2, 5, autoreset_mode="Disabled")],
            by_place,
            ValueError,
            "must have the same autoreset mode",
        ),
        (lambda: [StepCounter(Part(0, 2)), Part(2, 5)], by_place, ValueError, "must have the same wrappers"),
        (lambda: parts(0, 2), remember, ValueError, "the policy takes is_init"),
        (
            lambda: [Flipped(as_vector_env(env)) for env in parts(0, 2)],
            by_place,
            ValueError,
            "a wrapper in its stack may change them",
        ),
        (
            lambda: [gym.wrappers.vector.RecordEpisodeStatistics(env) for env in parts(0, 2)],
            by_place,
            ValueError,
            "without gymnasium's wrappers around them",
        ),
    ],
)
def test_what_cannot_be_split(env: Any, policy: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        collector(env(), policy)


def test_more_parts_than_envs_close_what_was_made() -> None:
    made = []

    def make() -> Any:
        made.append(cartpoles(2))
        return made[0]

    with pytest.raises(ValueError, match="splits=3 needs at least 3 envs, got 2"):
        collector(make, splits=3)
    assert made[0].closed


def test_a_list_without_splits_says_how() -> None:
    with pytest.raises(TypeError, match="in turn with splits=2"):
        collector(parts(0, 2), splits=1)


def test_ids_given_before_are_not_repeated() -> None:
    pool = [TrajId(env) for env in parts(0, 2)]
    pool[1].reset()
    with pytest.raises(ValueError, match="has already assigned ids"):
        collector(pool)


@pytest.mark.parametrize("fails_at", range(1, 9))
@pytest.mark.parametrize("early", [False, True])
def test_after_a_policy_that_fails_new_episodes_begin(fails_at: int, early: bool) -> None:
    calls = 0

    def policy(obs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise KeyError("policy")
        return by_place(obs)

    split = collector(parts(0, 2, early=early), policy, frames_per_batch=7)
    batches = []
    while len(batches) < 4:
        try:
            batches.append(next(split))
        except KeyError:
            assert split.frames == 7 * len(batches)
    ids: dict[int, Any] = {}
    for batch in batches:
        for row, (env, episode, step) in enumerate(batch["observation"].int().tolist()):
            number = int(batch["collector", "traj_ids"][row])
            assert ids.setdefault(number, [env, episode, -1])[:2] == [env, episode]
            assert ids[number][2] + 1 == step  # from the first step on, without a gap
            ids[number][2] = step
            after = batch["next", "observation"][row].int().tolist()
            assert after == [env, episode, step + 1]


class Failing(Part):
    """Its 4th awaited step fails."""

    awaited = 0

    def step_wait(self) -> Any:
        self.awaited += 1
        result = super().step_wait()
        if self.awaited == 4:
            raise ValueError("env")
        return result


@pytest.mark.parametrize("which", [0, 1])
def test_after_an_env_that_fails_new_episodes_begin(which: int) -> None:
    pool = parts(0, 2)
    pool[which] = Failing(pool[which].first, pool[which].first + pool[which].num_envs)
    split = collector(pool, frames_per_batch=30)
    with pytest.raises(ValueError, match="env"):
        next(split)
    batch = next(split)
    assert len(batch) == 30 and bool(batch["is_init"][0])


def test_a_stranger_who_steps_the_whole_env() -> None:
    env = cartpoles(2)
    split = Collector(env, frames_per_batch=8, splits=2, seed=0)
    whole = Collector(env, frames_per_batch=8, seed=0)
    first = next(split)
    next(whole)
    with pytest.warns(UserWarning, match="was stepped or reset by another collector"):
        second = next(split)
    shared = set(first["collector", "traj_ids"].tolist()) & set(second["collector", "traj_ids"].tolist())
    assert not shared
    with pytest.warns(UserWarning, match="was stepped or reset by another collector"):
        next(whole)
    env.close()


class Explodes(gym.Env[Any, Any]):
    """Fails in its 5th step."""

    observation_space = gym.spaces.Box(-1, 1, (3,))
    action_space = gym.spaces.Discrete(5)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, **options: Any) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 5:
            raise ZeroDivisionError("in the worker")
        return np.zeros(3, np.float32), 0.0, False, False, {}


class Calm(Explodes):
    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("which", range(3))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_error_in_a_worker_reaches_the_caller(which: int) -> None:
    kinds = [Calm, Calm, Calm]
    kinds[which] = Explodes
    made = []

    def make() -> Any:
        made.append(gym.vector.AsyncVectorEnv(kinds))
        return made[0]

    split = collector(make, frames_per_batch=30)
    with pytest.raises(ZeroDivisionError, match="in the worker"):
        next(split)
    assert made[0].closed and not any(process.is_alive() for process in made[0].processes)


@pytest.mark.parametrize("which", [0, 3])
def test_a_killed_worker_is_named(which: int) -> None:
    made = []

    def make() -> Any:
        made.append(cartpoles())
        return made[0]

    split = collector(make, None, frames_per_batch=40)
    next(split)
    os.kill(made[0].processes[which].pid, signal.SIGKILL)
    made[0].processes[which].join()
    with pytest.raises(RuntimeError, match="of AsyncVectorEnv have died"):
        next(split)
    assert made[0].closed and not any(process.is_alive() for process in made[0].processes)


CLOSES = """
import gymnasium as gym, torch
from flatroll.rollouts import Collector
if __name__ == "__main__":
    def policy(obs):
        if len(calls) == 5:
            raise KeyError("stop")
        calls.append(0)
        return torch.zeros(len(obs), dtype=torch.int64)
    calls = []
    def make():
        return gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="async")
    collector = Collector(make, policy, frames_per_batch=100, splits=2)
    try:
        next(collector)
    except KeyError:
        print("closed with a step under way")
    env = make()
    collector = Collector(env, policy, frames_per_batch=100, splits=2)
    try:
        next(collector)
    except KeyError:
        pass
    collector.shutdown()
    collector.shutdown()
    print(env.closed)
    left_to_the_interpreter = Collector(make(), lambda obs: torch.zeros(len(obs), dtype=torch.int64),
                                        frames_per_batch=100, splits=2)
    next(left_to_the_interpreter)
"""


def test_closing_with_a_step_under_way_ends() -> None:
    run = interpreters.run([sys.executable, "-c", CLOSES])
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:2] == ["closed with a step under way", "True"]
