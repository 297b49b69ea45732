"""The scripted envs against tables written by hand, and the contract kit against planted faults."""

import pickle
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorWrapper

from flatroll.wrappers import as_vector_env
from flatroll.wrappers.testing import (
    ContractError,
    Script,
    ScriptedEnv,
    ScriptedRslEnv,
    ScriptedTorchEnv,
    ScriptedVectorEnv,
    check_vector_env,
    decode,
    encode,
    expected_rows,
    make_scripted,
    vector_env_problems,
)

T, F = True, False
SCRIPT = Script(2, lengths=[[2, 1], [3]], ends=[["terminated", "truncated"], ["both"]])
KINDS = ("float32", "float64", "uint8", "int64", "discrete", "dict", "tuple")

# (episode, step) shown, reward, terminated, truncated after each of five steps, envs 0 and 1.
SAME_STEP = [
    ([(0, 1), (0, 1)], [1, 1], [F, F], [F, F]),
    ([(1, 0), (0, 2)], [2, 2], [T, F], [F, F]),
    ([(2, 0), (1, 0)], [101, 3], [F, T], [T, T]),
    ([(2, 1), (1, 1)], [201, 101], [F, F], [F, F]),
    ([(3, 0), (1, 2)], [202, 102], [T, F], [F, F]),
]
NEXT_STEP = [
    ([(0, 1), (0, 1)], [1, 1], [F, F], [F, F]),
    ([(0, 2), (0, 2)], [2, 2], [T, F], [F, F]),
    ([(1, 0), (0, 3)], [0, 3], [F, T], [F, T]),
    ([(1, 1), (1, 0)], [101, 0], [F, F], [T, F]),
    ([(2, 0), (1, 1)], [0, 101], [F, F], [F, F]),
]


def shown(obs: Any) -> list[tuple[int, int]]:
    return [(int(episode), int(step)) for _, episode, step in np.asarray(obs)]


@pytest.mark.parametrize("backend", ["sync", "native"])
@pytest.mark.parametrize(("mode", "table"), [("SameStep", SAME_STEP), ("NextStep", NEXT_STEP)])
def test_scripted_envs_do_what_the_table_says(backend: Any, mode: Any, table: Any) -> None:
    env = make_scripted(SCRIPT, backend=backend, autoreset_mode=mode)
    assert shown(env.reset()[0]) == [(0, 0), (0, 0)]
    for line in table:
        obs, reward, terminated, truncated, _ = env.step(np.array([0, 0]))
        assert (shown(obs), reward.tolist(), terminated.tolist(), truncated.tolist()) == line


def test_the_torch_env_does_what_the_table_says() -> None:
    env = ScriptedTorchEnv(SCRIPT)
    env.reset()
    for line in SAME_STEP:
        obs, reward, terminated, truncated, _ = env.step(torch.zeros(2, dtype=torch.int64))
        assert (shown(obs), reward.tolist(), terminated.tolist(), truncated.tolist()) == line


def test_expected_rows_by_hand() -> None:
    columns = ["vector_step", "env", "episode", "step", "reward", "terminated", "truncated", "is_init"]
    assert expected_rows(SCRIPT, 3, autoreset_mode="NextStep")[columns].tolist() == [
        (0, 0, 0, 0, 1.0, F, F, T),
        (0, 1, 0, 0, 1.0, F, F, T),
        (1, 0, 0, 1, 2.0, T, F, F),
        (1, 1, 0, 1, 2.0, F, F, F),
        (2, 1, 0, 2, 3.0, T, T, F),
    ]
    assert len(expected_rows(SCRIPT, 3)) == 6
    assert expected_rows(Script(1, lengths=5), 4, max_steps=2)["truncated"].tolist() == [F, T, F, T]


@pytest.mark.parametrize("kind", KINDS)
def test_observations_lie_in_their_space_and_can_be_read_back(kind: Any) -> None:
    script = Script(3, obs=kind)
    native, single = ScriptedVectorEnv(script), ScriptedEnv(script, 2)
    batched, _ = native.reset()
    obs, _ = single.reset()
    assert native.observation_space.contains(batched)
    assert single.observation_space.contains(obs)
    assert decode(kind, batched).tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    tensors = encode(kind, *(torch.tensor([n]) for n in (2, 3, 4)))
    assert decode(kind, tensors).tolist() == [[2, 3, 4]]


def test_a_reused_buffer_changes_what_was_returned_before() -> None:
    for env in (ScriptedEnv(SCRIPT, reuse_buffer=True), ScriptedVectorEnv(SCRIPT, reuse_buffer=True)):
        first, _ = env.reset()
        before = first.copy()
        second = env.step(np.array([0, 0]))[0]
        assert second is first
        assert not np.array_equal(first, before)


def test_recorded_actions_and_pickling() -> None:
    env = make_scripted(SCRIPT, record_actions=True)
    env.reset()
    env.step(np.array([3, 4]))
    assert env.get_attr("actions") == ([3], [4])  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(ScriptedEnv(SCRIPT, 1))).script == SCRIPT


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"lengths": [3, 0]}, "lengths must be an integer of at least 1, got 0"),
        ({"ends": "lost"}, "ends must be among"),
        ({"lengths": [[1], [2], [3]]}, "lengths must have one list for each of the 2 envs, got 3"),
    ],
)
def test_bad_scripts_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Script(2, **wrong)


# --- envs that keep the contract ----------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "single": lambda: ScriptedEnv(SCRIPT),
    "native next": lambda: ScriptedVectorEnv(SCRIPT),
    "native dense": lambda: ScriptedVectorEnv(SCRIPT, autoreset_mode="SameStep", final_obs="dense"),
    "native absent": lambda: ScriptedVectorEnv(SCRIPT, autoreset_mode="SameStep", final_obs="absent"),
    "native reusing": lambda: ScriptedVectorEnv(SCRIPT, autoreset_mode="Disabled", reuse_buffer=True),
    "sync reusing": lambda: make_scripted(SCRIPT, autoreset_mode="Disabled", reuse_buffer=True),
    "sync no copy": lambda: make_scripted(SCRIPT, copy=False),
    "torch reusing": lambda: ScriptedTorchEnv(SCRIPT, reuse_obs=True),
    "torch without autoreset": lambda: ScriptedTorchEnv(SCRIPT, autoreset=False),
    "torch ids": lambda: ScriptedTorchEnv(SCRIPT, final_obs="ids"),
    "torch absent": lambda: ScriptedTorchEnv(SCRIPT, final_obs="absent"),
    "cartpole": lambda: gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync"),
    "native cartpole": lambda: gym.make_vec("CartPole-v1", num_envs=3),
}


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")
@pytest.mark.parametrize("name", ["CartPole-v1", "FrozenLake-v1"])
def test_envpool_passes(name: str) -> None:
    envpool = pytest.importorskip("envpool")
    check_vector_env(envpool.make_gymnasium(name, num_envs=3, seed=1), steps=100)


@pytest.mark.parametrize("name", GOOD)
def test_good_envs_pass(name: str) -> None:
    check_vector_env(GOOD[name](), steps=60)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_all_kinds_of_observation_pass(kind: Any, mode: Any) -> None:
    check_vector_env(make_scripted(Script(2, obs=kind), autoreset_mode=mode), steps=40)


@pytest.mark.parametrize("action", ["box", "dict"])
def test_all_kinds_of_action_pass(action: Any) -> None:
    check_vector_env(ScriptedVectorEnv(Script(3, action=action)), steps=20)
    check_vector_env(ScriptedTorchEnv(Script(3, action=action)), steps=20)


def test_rsl_envs_pass() -> None:
    for style in ("tensordict", "tensor"):
        env = ScriptedRslEnv(Script(3, action="box"), style=style)  # type: ignore[arg-type]
        check_vector_env(as_vector_env(env, autoreset_mode="SameStep"), steps=20)


def test_own_actions_are_played() -> None:
    env = ScriptedVectorEnv(SCRIPT, record_actions=True)
    check_vector_env(env, steps=5, actions=lambda k: np.array([k, k]))
    assert [a.tolist() for a in env.actions[:5]] == [[k, k] for k in range(5)]


# --- planted faults -----------------------------------------------------------------------------------------


class Faulty(VectorWrapper):
    """A scripted env whose step results are spoilt by ``self.spoil``."""

    def __init__(self, spoil: Any, **arguments: Any) -> None:
        super().__init__(ScriptedVectorEnv(Script(2, lengths=[[3, 4], [5]]), **arguments))
        self.spoil, self.steps = spoil, 0

    def step(self, actions: Any) -> Any:
        self.steps += 1
        return self.spoil(self, *self.env.step(actions))


def paid_reset(env: Faulty, obs: Any, reward: Any, *rest: Any) -> Any:
    return obs, np.maximum(reward, 1.0), *rest


def lying_final(env: Faulty, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
    return obs, reward, terminated, truncated, {**info, "final_obs": obs.copy()}


def wrong_shape(env: Faulty, obs: Any, *rest: Any) -> Any:
    return obs[:, :2], *rest


def wrong_dtype(env: Faulty, obs: Any, *rest: Any) -> Any:
    return obs.astype(np.float64), *rest


def not_a_number(env: Faulty, obs: Any, *rest: Any) -> Any:
    return np.where(obs > 2, np.nan, obs).astype(np.float32), *rest


def infinite(env: Faulty, obs: Any, *rest: Any) -> Any:
    return np.where(obs > 2, np.inf, obs).astype(np.float32), *rest


def drifting(env: Faulty, obs: Any, reward: Any, *rest: Any) -> Any:
    return obs, reward + env.steps, *rest


def failing(env: Faulty, obs: Any, *rest: Any) -> Any:
    raise KeyError("velocity")


def end_without_reason(env: Faulty, *result: Any) -> Any:
    terminated, truncated, info = result[2:]
    info["done"] = terminated | truncated
    return *result[:2], terminated & False, truncated & False, info


FAULTS = [
    (paid_reset, {}, "pays a reward in row 0, whose episode had ended in step 2"),
    (lying_final, {"autoreset_mode": "SameStep"}, "final_obs'] equals the returned observation in all"),
    (
        wrong_shape,
        {},
        "obs must be float32 (2, 3) as its space says, it is float32 (2, 2) (first seen after step 0)",
    ),
    (wrong_dtype, {}, "obs must be float32 (2, 3) as its space says, it is float64 (2, 3)"),
    (not_a_number, {}, "obs has NaN: end the episode in the step in which the simulation fails"),
    (infinite, {}, "suspicion: an observation has infinite values"),
    (drifting, {}, "two runs from one seed with the same actions differ in reward (first at 0)"),
    (failing, {}, "reset or step raised KeyError: 'velocity'"),
    (end_without_reason, {}, "suspicion: info['done'] is set in a row of step 2"),
]


@pytest.mark.parametrize(("spoil", "arguments", "text"), FAULTS, ids=lambda x: getattr(x, "__name__", None))
def test_planted_faults_are_named(spoil: Any, arguments: dict[str, Any], text: str) -> None:
    problems = vector_env_problems(Faulty(spoil, **arguments), steps=30)
    assert any(text in problem for problem in problems), problems


class IgnoresTheMask(VectorWrapper):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.env.reset(seed=seed)


def test_a_masked_reset_that_resets_everything_is_found() -> None:
    env = IgnoresTheMask(ScriptedVectorEnv(Script(2, lengths=[[3, 4], [5]]), autoreset_mode="Disabled"))
    assert vector_env_problems(env, steps=30)


class SilentReset(ScriptedVectorEnv):
    """Forgets to report the end of every second episode."""

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(actions)
        odd = obs[:, 1] % 2 == 0
        return obs, reward, terminated & odd, truncated & odd, info


def test_d16_suspicious_envs_are_warned_of() -> None:
    silent = SilentReset(Script(2, lengths=[[7, 8], [9]]), autoreset_mode="SameStep", final_obs="absent")
    assert any("jumps back to a first one" in text for text in vector_env_problems(silent))
    limit = ScriptedVectorEnv(Script(2, lengths=10, ends="terminated"))
    with pytest.warns(UserWarning, match="episodes terminated after 10 steps, none was truncated"):
        check_vector_env(limit)
    endless = ScriptedVectorEnv(Script(2, lengths=10_000))
    with pytest.warns(UserWarning, match="no episode ended in 20 steps"):
        check_vector_env(endless, steps=20)


def test_one_length_is_no_suspicion_when_it_is_reported_as_truncation() -> None:
    check_vector_env(ScriptedVectorEnv(Script(2, lengths=10, ends="truncated")))


def test_the_error_lists_every_problem() -> None:
    with pytest.raises(ContractError) as caught:
        check_vector_env(
            Faulty(lambda env, obs, reward, *rest: (obs[:, :2], reward + env.steps, *rest)), steps=9
        )
    assert issubclass(ContractError, AssertionError)
    assert str(caught.value).startswith("the env breaks the contract:\n- obs must be")


def test_an_env_without_a_mode_is_one_problem() -> None:
    (text,) = vector_env_problems(ScriptedTorchEnv(SCRIPT, declare=False))
    assert text.startswith("as_vector_env refuses the env: ")
    assert "autoreset_mode" in text


def test_the_kit_never_warns_on_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert vector_env_problems(ScriptedVectorEnv(Script(2, lengths=[[3, 4], [5]])), steps=20) == []
