"""What the envs inside a Sync env return: each error names the env and the entry; rewards of one number are taken."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from flatroll.rollouts import rollout
from flatroll.wrappers import as_vector_env

SPACE = spaces.Dict(place=spaces.Box(-9, 9, (2,)), goal=spaces.Box(-9, 9, (3,)))


def observation(goal: int = 3) -> dict[str, Any]:
    return {"place": np.zeros(2, np.float32), "goal": np.zeros(goal, np.float32)}


class Task(gym.Env[Any, Any]):
    """Episodes of three steps; returns what it is told to in a step."""

    observation_space, action_space = SPACE, spaces.Discrete(2)

    def __init__(
        self, change: Callable[[int, tuple[Any, ...]], Any] | None = None, first: Any = None
    ) -> None:
        self.change = change
        self.first = first
        self.at = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.at = 0
        return (observation(), {}) if self.first is None else self.first

    def step(self, action: Any) -> Any:
        self.at += 1
        result = (observation(), float(self.at), False, self.at == 3, {})
        return result if self.change is None else self.change(self.at, result)


def one(**arguments: Any) -> Any:
    return Task(**arguments)


def sync(**arguments: Any) -> Any:
    return SyncVectorEnv([Task, lambda: Task(**arguments)])


def in_workers(**arguments: Any) -> Any:
    return AsyncVectorEnv([lambda: Task(**arguments)] * 2)


def reward_as(kind: Callable[[float], Any]) -> Callable[[int, tuple[Any, ...]], Any]:
    return lambda at, result: (result[0], kind(result[1]), *result[2:])


ONE_NUMBER: list[Callable[[float], Any]] = [
    lambda value: np.array([value]),
    lambda value: np.array([[value]], np.float32),
    np.array,
    lambda value: [value],
    lambda value: torch.tensor([value]),
]


@pytest.mark.parametrize("kind", ONE_NUMBER, ids=["[1]", "[1, 1]", "[]", "list", "tensor"])
@pytest.mark.parametrize("make", [one, lambda **given: SyncVectorEnv([lambda: Task(**given)] * 2)])
def test_rewards_of_one_number_are_taken(make: Any, kind: Callable[[float], Any]) -> None:
    batch = rollout(make(change=reward_as(kind)), num_steps=6)
    assert batch["next", "reward"].flatten().tolist() == [1, 2, 3] * (len(batch) // 3)
    assert batch["next", "reward"].dtype is torch.float32


def test_an_async_env_takes_rewards_of_one_number_too() -> None:
    env = AsyncVectorEnv([lambda: Task(reward_as(lambda value: np.array([value])))] * 2)
    assert rollout(env, num_steps=3)["next", "reward"].flatten().tolist() == [1, 2, 3] * 2
    env.close()


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "four values": (
        lambda at, result: (*result[:3], result[4]),
        ValueError,
        r"step of Task \(env NUMBER\) returned 4 values: Gymnasium's API has 5, .*: split done into",
    ),
    "no tuple": (
        lambda at, result: result[0],
        TypeError,
        r"step of Task \(env NUMBER\) must return \(obs",
    ),
    "two rewards": (
        reward_as(lambda value: np.ones(2)),
        ValueError,
        r"reward must be one number .*, got shape \(2,\) from step of Task \(env NUMBER\): .*TransformReward",
    ),
    "a dict of rewards": (
        reward_as(lambda value: {"a": 1.0}),
        ValueError,
        r"reward must be one number .*, got \{'a': 1.0\} from step of Task \(env NUMBER\)",
    ),
    "no info": (
        lambda at, result: (*result[:4], None),
        TypeError,
        r"info must be a dict, got None from step of Task \(env NUMBER\): return \{\}",
    ),
    "a shape": (
        lambda at, result: (observation(goal=4), *result[1:]),
        ValueError,
        r"the observation of Task \(env NUMBER\) has shape \(4,\) at 'goal', and its space has \(3,\)",
    ),
    "a shape, later": (
        lambda at, result: (observation(goal=4 if at == 3 else 3), *result[1:]),
        ValueError,
        r"the observation of Task \(env NUMBER\) has shape \(4,\) at 'goal', and its space has \(3,\)",
    ),
    "a missing entry": (
        lambda at, result: ({"place": result[0]["place"]}, *result[1:]),
        ValueError,
        r"the observation of Task \(env NUMBER\) lacks the entry 'goal' of its space",
    ),
    "no dict": (
        lambda at, result: (np.zeros(2), *result[1:]),
        ValueError,
        r"the observation of Task \(env NUMBER\) must be a dict, as its space is, got a float64 ndarray",
    ),
}


@pytest.mark.parametrize(("change", "kind", "text"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(("make", "number"), [(one, 0), (sync, 1)])
def test_a_wrong_step_names_env_and_entry(make: Any, number: int, change: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text.replace("NUMBER", str(number))):
        rollout(make(change=change), num_steps=4)


@pytest.mark.parametrize(("make", "number"), [(one, 0), (sync, 1)])
def test_a_wrong_reset_names_env_and_entry(make: Any, number: int) -> None:
    with pytest.raises(
        TypeError, match=rf"info must be a dict, got None from reset of Task \(env {number}\)"
    ):
        rollout(make(first=(observation(), None)), num_steps=4)
    with pytest.raises(
        TypeError, match=rf"reset of Task \(env {number}\) must return \(observation, info\), got"
    ):
        rollout(make(first=observation()), num_steps=4)
    with pytest.raises(ValueError, match=rf"reset of Task \(env {number}\) must return .*, got 3 values"):
        rollout(make(first=(observation(), {}, 1)), num_steps=4)
    with pytest.raises(ValueError, match=rf"Task \(env {number}\) has shape \(2,\) at 'goal'"):
        rollout(make(first=(observation(goal=2), {})), num_steps=4)


def of_the_env(at: int, result: Any) -> Any:
    rows = np.zeros(2)
    rows[0] = [1, 2]  # "setting an array element with a sequence"
    return result


@pytest.mark.filterwarnings("ignore:.*ERROR")  # Gymnasium's log of what its workers raised
@pytest.mark.parametrize("make", [one, sync, in_workers])
def test_the_env_s_own_error_stays_as_it_is(make: Any) -> None:
    env = make(change=of_the_env)
    with pytest.raises(ValueError, match="setting an array element with a sequence") as told:
        rollout(env, num_steps=2)
    notes = getattr(told.value, "__notes__", [])
    assert [note.startswith("raised in a worker process") for note in notes] == [True] * (make is in_workers)
    env.close()


def test_the_methods_of_the_sub_envs_are_their_own_again() -> None:
    env = SyncVectorEnv([Task] * 2)
    own: Any = env.envs[0]
    own.step = kept = own.step
    adapted = as_vector_env(env)
    adapted.reset()
    adapted.step(np.zeros(2, np.int64))
    assert own.step is kept
    assert not {"reset", "step"} & {*vars(env.envs[1]), *(set(vars(own)) - {"step"})}


class Lists(VectorEnv[Any, Any, Any]):
    """A vector env whose infos are a list with one dict for each env."""

    def __init__(self, first: Any, later: Any, shape: tuple[int, ...] = (2, 1)) -> None:
        self.num_envs = 2
        self.single_observation_space, self.single_action_space = spaces.Box(-9, 9, (1,)), spaces.Discrete(2)
        self.metadata = {"autoreset_mode": "NextStep"}
        self.first, self.later, self.shape = first, later, shape

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(self.shape, np.float32), self.first

    def step(self, actions: Any) -> Any:
        no = np.zeros(2, bool)
        return np.zeros(self.shape, np.float32), np.ones(2), no, no, self.later


@pytest.mark.parametrize("infos", [[{}, {}], [{"a": 1, "b": 2}] * 2, None])
def test_infos_of_a_vector_env_that_are_no_dict(infos: Any) -> None:
    came = "None" if infos is None else "a list"
    for env in (Lists(infos, {}), Lists({}, infos)):
        with pytest.raises(TypeError, match=f"info must be a dict of columns, .* got {came} from Lists"):
            rollout(env, num_steps=2)


def test_a_batch_of_another_shape_than_its_space() -> None:
    with pytest.raises(
        ValueError, match=r"observation of Lists has shape \(2, 3\), and its space has \(2, 1\)"
    ):
        rollout(Lists({}, {}, (2, 3)), num_steps=2)
