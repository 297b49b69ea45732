"""as_vector_env(autoreset="same_step"): whatever the env does, ended rows restart at once and show how they ended."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics

from flatroll.rollouts import Collector
from flatroll.wrappers import InitTracker, RewardSum, StepCounter, TrajId, as_vector_env, find_stream
from flatroll.wrappers.testing import (
    Script,
    ScriptedEnv,
    ScriptedTorchEnv,
    decode,
    expected_rows,
    make_scripted,
)

SCRIPT = Script(2, lengths=[[3, 1, 4], [2, 5]], ends=[["terminated", "truncated", "both"], ["truncated"]])
STEPS = 30
FIELDS = ["env", "episode", "step", "reward", "terminated", "truncated"]
ENVS: dict[str, Any] = {
    **{
        f"sync {mode}": (lambda mode=mode: make_scripted(SCRIPT, autoreset_mode=mode))
        for mode in AutoresetMode
    },
    "async NextStep": lambda: make_scripted(SCRIPT, backend="async"),
    "native SameStep": lambda: make_scripted(SCRIPT, backend="native", autoreset_mode="SameStep"),
    "native Disabled": lambda: make_scripted(SCRIPT, backend="native", autoreset_mode="Disabled"),
    "buffers reused": lambda: make_scripted(SCRIPT, reuse_buffer=True, copy=False),
    "torch": lambda: ScriptedTorchEnv(SCRIPT),
    "torch Disabled": lambda: ScriptedTorchEnv(SCRIPT, autoreset=False, reuse_obs=True),
    "markers around": lambda: TrajId(StepCounter(InitTracker(RewardSum(make_scripted(SCRIPT))))),
}


def rows_of(env: Any, steps: int = STEPS) -> list[tuple[Any, ...]]:
    """(env, episode, step, reward, terminated, truncated) of each step, if next and final observations are true."""
    before = decode("float32", env.reset(seed=0)[0])
    rows = []
    for _ in range(steps):
        obs, reward, terminated, truncated, info = env.step(np.zeros(env.num_envs, np.int64))
        after, final = decode("float32", obs), decode("float32", info.get("final_obs", obs))
        for i in range(env.num_envs):
            e, episode, step = before[i].tolist()
            ended = bool(terminated[i] | truncated[i])
            assert (final if ended else after)[i].tolist() == [e, episode, step + 1]
            assert after[i].tolist() == ([e, episode + 1, 0] if ended else [e, episode, step + 1])
            rows.append((e, episode, step, float(reward[i]), bool(terminated[i]), bool(truncated[i])))
        before = after
    return rows


@pytest.mark.parametrize("name", ENVS)
def test_every_step_of_every_env_is_a_true_transition(name: str) -> None:
    env = as_vector_env(ENVS[name](), autoreset="same_step")
    try:
        assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        assert rows_of(env) == expected_rows(SCRIPT, STEPS)[FIELDS].tolist()
    finally:
        find_stream(env).source.close()


def test_one_env() -> None:
    one = Script(1, lengths=[3, 1])
    env = as_vector_env(ScriptedEnv(one, 0), autoreset="same_step")
    assert rows_of(env, 12) == expected_rows(one, 12)[FIELDS].tolist()


def test_envpool_restarts_in_the_same_step() -> None:
    """The physics of CartPole tells a true next observation from a wrong one."""
    envpool = pytest.importorskip("envpool")
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=3, max_episode_steps=12, seed=1)
    env, physics = as_vector_env(pool, autoreset="same_step"), gym.make("CartPole-v1").unwrapped
    before, rng, ends = env.reset()[0], np.random.default_rng(0), 0
    for _ in range(200):
        actions = rng.integers(2, size=3)
        obs, _, terminated, truncated, info = env.step(actions)
        ended = terminated | truncated
        for i in range(3):
            physics.reset()
            physics.state = before[i]
            true = physics.step(int(actions[i]))[0]
            np.testing.assert_allclose((info["final_obs"] if ended[i] else obs)[i], true, atol=1e-5)
        assert (np.abs(obs[ended]) <= 0.05).all()  # as CartPole begins
        ends, before = ends + int(ended.sum()), obs
    assert ends > 40


def test_a_collector_takes_it_as_any_other() -> None:
    env = as_vector_env(make_scripted(SCRIPT), autoreset="same_step")
    batch = next(iter(Collector(env, frames_per_batch=60, total_frames=60, seed=0)))
    true = expected_rows(SCRIPT, 30)
    table = np.sort(true, order=["env", "vector_step"])
    assert batch["observation"].tolist() == [list(row) for row in table[FIELDS[:3]].tolist()]


def test_a_step_limit_beside_it() -> None:
    env = StepCounter(as_vector_env(make_scripted(SCRIPT), autoreset="same_step"), max_steps=3)
    assert rows_of(env) == expected_rows(SCRIPT, STEPS, max_steps=3)[FIELDS].tolist()


def test_an_env_that_hides_its_last_observations_is_refused_where_it_does() -> None:
    env = as_vector_env(ScriptedTorchEnv(SCRIPT, final_obs="absent"), autoreset="same_step")
    with pytest.raises(ValueError, match=r"info\['final_obs'\] does not show their last observations"):
        rows_of(env)
    with pytest.raises(
        ValueError, match=r"autoreset='same_step' needs the last observations.*final_obs=None"
    ):
        as_vector_env(ScriptedTorchEnv(SCRIPT), final_obs=None, autoreset="same_step")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gym.make_vec("CartPole-v1", 2, "vector_entry_point"),
            "autoreset='same_step' needs an env that can",
        ),
        (
            lambda: NormalizeObservation(as_vector_env(make_scripted(SCRIPT))),
            "with NormalizeObservation around",
        ),
        (
            lambda: RecordEpisodeStatistics(make_scripted(SCRIPT)),
            "which autoreset='same_step' needs: use flatroll",
        ),
    ],
    ids=["no chosen resets", "observation wrapper", "statistics"],
)
def test_envs_that_cannot(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_vector_env(make(), autoreset="same_step")


def test_after_the_first_reset_it_is_too_late() -> None:
    env = as_vector_env(make_scripted(SCRIPT))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="autoreset='same_step' must be set before the env's first reset"):
        as_vector_env(env, autoreset="same_step")
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP


def test_only_one_kind_can_be_asked_for() -> None:
    with pytest.raises(
        ValueError, match=r"autoreset must be 'same_step' or None, got 'NextStep'.*autoreset_mode="
    ):
        as_vector_env(make_scripted(SCRIPT), autoreset="NextStep")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*You are calling render method without specifying:UserWarning")
def test_rendering_and_attributes_of_the_env_are_reached() -> None:
    env = as_vector_env(gym.make_vec("CartPole-v1", 2, "sync"))
    find_stream(env).set_attr("gravity", [1.0, 2.0])
    assert find_stream(env).get_attr("gravity") == (1.0, 2.0)
    assert find_stream(env).call("get_wrapper_attr", "gravity") == (1.0, 2.0)
    env.reset(seed=0)
    assert find_stream(env).render() == (None, None)
    torch_env = as_vector_env(ScriptedTorchEnv(SCRIPT))
    torch_env.set_attr("colour", "red")
    assert torch_env.get_attr("colour") == ("red", "red")
    assert torch_env.call("close") == (None, None)
    with pytest.raises(AttributeError):
        torch_env.get_attr("nothing")


def test_a_torch_env_keeps_its_tensors() -> None:
    env = as_vector_env(ScriptedTorchEnv(SCRIPT, autoreset=False), autoreset="same_step")
    env.reset(seed=0)
    assert isinstance(env.step(torch.zeros(2, dtype=torch.int64))[4]["final_obs"], torch.Tensor)
