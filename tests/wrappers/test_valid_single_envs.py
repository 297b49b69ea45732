"""Valid envs that look like others: an attribute num_envs, no metadata, options None, entries that never change."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from flatroll.rollouts import rollout
from flatroll.wrappers import as_vector_env
from flatroll.wrappers.testing import Script, ScriptedEnv, ScriptedTorchEnv

SCRIPT = Script(1, lengths=[[3, 1, 2]])


def rows_of(env: Any) -> Any:
    return rollout(env, num_steps=12, seed=0)


class Named(ScriptedEnv):
    num_envs = 1


class Forwards(gym.Env[Any, Any]):
    """Passes on the attributes of a vector env inside, num_envs and the spaces of one row included."""

    def __init__(self) -> None:
        self.inner = ScriptedEnv(SCRIPT, 0)
        self.vector = SyncVectorEnv([lambda: ScriptedEnv(SCRIPT, 0)])
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["vector"], name)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.inner.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return self.inner.step(action)


class Bare(ScriptedEnv):
    metadata = None  # type: ignore[assignment]


class NeedsOptions(ScriptedEnv):
    """Reads what must be in its options, if it is given any."""

    given: list[Any]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.given = [*getattr(self, "given", []), options]
        if options is not None:
            assert options["start"] == 0
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("make", [lambda kind: kind, lambda kind: gym.wrappers.TimeLimit(kind, 100)])
@pytest.mark.parametrize("kind", [Named, Bare, NeedsOptions, Forwards])
def test_valid_single_envs(kind: Any, make: Any) -> None:
    env = kind() if kind is Forwards else kind(SCRIPT, 0)
    assert (rows_of(make(env)) == rows_of(ScriptedEnv(SCRIPT, 0))).all()
    if kind is Bare:
        assert env.metadata is None


def test_options_of_the_user_reach_a_single_env_and_no_others_do() -> None:
    env = NeedsOptions(SCRIPT, 0)
    adapted = as_vector_env(env)
    adapted.reset(seed=0, options={"start": 0})
    for _ in range(4):  # two ends
        adapted.step(np.zeros(1, np.int64))
    adapted.reset(options={"reset_mask": np.array([True]), "start": 0})
    assert env.given == [{"start": 0}, None, None, {"start": 0}]


class Goal(gym.Env[Any, Any]):
    """Episodes of two steps; the goal is always one array, the place too if told so."""

    observation_space = spaces.Dict(place=spaces.Box(-9, 99, (1,)), goal=spaces.Box(-9, 9, (2,)))
    action_space = spaces.Discrete(2)

    def __init__(self, reuses: bool = False, length: int = 2, moves: bool = True) -> None:
        self.goal = np.ones(2, np.float32)
        self.place = np.zeros(1, np.float32)
        self.reuses, self.length, self.moves = reuses, length, moves
        self.at = 0

    def observe(self) -> Any:
        if not self.reuses:
            self.place = self.place.copy()
        self.place[:] = self.at if self.moves else 0
        return {"place": self.place, "goal": self.goal}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.at = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return self.observe(), 1.0, self.at == self.length, False, {}


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_an_entry_that_is_always_the_same_array_is_valid(kind: Any, length: int) -> None:
    env = kind([lambda: Goal(length=length)] * 2, autoreset_mode="SameStep")
    batch = rollout(env, num_steps=6)
    env.close()
    assert batch["next", "place"].flatten().tolist() == [*range(1, length + 1)] * (12 // length)
    assert (batch["next", "goal"] == 1).all()


@pytest.mark.parametrize("length", [1, 2])
def test_a_place_that_the_reset_overwrites_is_refused_at_the_first_end(length: int) -> None:
    env = as_vector_env(
        SyncVectorEnv([lambda: Goal(reuses=True, length=length)] * 2, autoreset_mode="SameStep")
    )
    env.reset()
    with pytest.raises(ValueError, match="into the same array"):
        for _ in range(length):
            env.step(np.zeros(2, np.int64))


def test_the_sub_envs_are_not_watched_for_longer_than_needed() -> None:
    envs = SyncVectorEnv([lambda: ScriptedEnv(SCRIPT, 0)] * 2, autoreset_mode="SameStep")
    env = as_vector_env(envs)
    env.reset()
    assert all("step" in vars(one) for one in envs.envs)
    for _ in range(3):
        env.step(np.zeros(2, np.int64))
    assert not any("step" in vars(one) for one in envs.envs)


def test_two_adapters_watch_one_env() -> None:
    envs = SyncVectorEnv([Goal] * 2, autoreset_mode="SameStep")
    first, second = as_vector_env(envs), as_vector_env(envs)
    for env in (first, second, first):
        env.reset()
        for step in range(1, 7):
            info = env.step(np.zeros(2, np.int64))[4]
            if step % 2 == 0:
                assert info["final_obs"]["place"].tolist() == [[2.0], [2.0]]


def test_observations_that_never_change_in_workers() -> None:
    env = AsyncVectorEnv([lambda: Goal(moves=False)] * 2, autoreset_mode="SameStep")
    with pytest.warns(UserWarning, match="final observations of two episodes equal the first ones"):
        batch = rollout(env, num_steps=20, seed=0)
    env.close()
    assert (batch["next", "place"] == 0).all() and len(batch) == 40


class TorchGoal(ScriptedTorchEnv):
    """Its goal is always one tensor, which final observations do not copy."""

    def __init__(self, moves: bool = False) -> None:
        super().__init__(Script(2, lengths=[[3, 1], [2]], obs="dict"), final_obs="dense")
        self.single_observation_space = spaces.Dict(
            {**self.single_observation_space.spaces, "goal": spaces.Box(-9, 99, (1,))}
        )
        self.goal = torch.ones(2, 1)
        self.moves = moves

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        obs, info = super().reset(*args, **kwargs)
        return {**obs, "goal": self.goal}, info

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(actions)
        self.goal += self.moves
        if "final_obs" in info:
            info["final_obs"] = {**info["final_obs"], "goal": self.goal}
        return {**obs, "goal": self.goal}, reward, terminated, truncated, info


def test_a_goal_in_one_tensor_is_valid_and_one_that_changes_is_not() -> None:
    right = rollout(
        ScriptedTorchEnv(Script(2, lengths=[[3, 1], [2]], obs="dict"), final_obs="dense"),
        num_steps=20,
        seed=0,
    )
    batch = rollout(TorchGoal(), num_steps=20, seed=0)
    assert (batch["goal"] == 1).all() and (batch["next", "goal"] == 1).all()
    assert (batch.exclude("goal", ("next", "goal")) == right).all()
    with pytest.raises(ValueError, match="in the same memory as those that step returns"):
        rollout(TorchGoal(moves=True), num_steps=20, seed=0)
