"""MuJoCo playground on the CPU, as itself and in its RSLRLBraxWrapper: every row against MJX's own state."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from jax_trace import check_simulator, count_false

pytest.importorskip("mujoco_playground")
from mujoco_playground import registry
from mujoco_playground._src.wrapper_torch import RSLRLBraxWrapper
from traces import Trace, assert_same, compare

from flatroll.layout import audit, describe
from flatroll.rollouts import rollout
from flatroll.wrappers import as_functional, as_vector_env
from flatroll.wrappers.testing import check_vector_env

ENVS, STEPS, LIMIT = 4, 70, 20


def load() -> Any:
    return registry.load("CartpoleBalance", config_overrides={"impl": "jax"})


@pytest.fixture(scope="module")
def env() -> Any:
    """Made and compiled once."""
    return RSLRLBraxWrapper(load(), ENVS, 0, LIMIT, 1)


def traced(env: Any) -> Trace:
    """The wrapper resets within its step and keeps no state of an ended episode: it shows what comes after."""
    trace, step = Trace(), env.step

    def recorded(action: torch.Tensor) -> Any:
        result = step(action)
        data = env.env_state.data
        # The angle's cosine and sine in the observation are of the step before: MJX integrates last.
        state = np.concatenate([np.asarray(data.qpos)[:, :1], np.asarray(data.qvel)], 1)
        done, truncated = result[2].bool(), result[3]["time_outs"].bool()
        trace.add(torch.from_numpy(state), result[1], done & ~truncated, truncated)
        return result

    env.step = recorded
    return trace


def policy(obs: Any) -> torch.Tensor:
    return (3 * obs["state"][:, 2:3] + 0.3 * obs["state"][:, 4:5]).sin()


def test_rows_are_mjx_s_states(env: Any, report: Any) -> None:
    as_vector_env(env, autoreset_mode="SameStep")
    assert env.env_state is None  # wrapping has not reset it
    # The second step compiles again.
    stream = report.start(lambda: env, torch.zeros(ENVS, 1), steps=2, autoreset_mode="SameStep")
    trace = traced(env)
    batch = rollout(stream, policy, num_steps=STEPS)
    counts = compare(batch, "state", trace, ENVS, [0, 3, 4])
    del env.step
    report.add("MuJoCo playground, CartpoleBalance by RSLRLBraxWrapper", "playground", "SameStep", counts)
    assert (counts.rows, counts.false, counts.known) == (ENVS * STEPS, 0, 0)
    assert counts.unknown == ENVS * (STEPS // LIMIT)
    assert audit(batch) == []
    assert "no last observation" in describe(batch)
    assert_same(batch, rollout(stream, policy, num_steps=STEPS))  # it resets to the same states every time


def test_the_contract_kit(env: Any) -> None:
    stream = as_vector_env(env, autoreset_mode="SameStep")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_vector_env(stream, steps=30)


def test_the_env_itself(report: Any) -> None:
    bare = load()

    def own(state: Any, action: Any) -> tuple[Any, ...]:
        after = bare.step(state, action)
        return after.obs, after.reward, None, None

    def false(batch: Any, states: Any) -> int:
        return count_false(batch, states, own, ENVS, 1e-4)

    stream = report.start(lambda: as_functional(bare, max_episode_steps=LIMIT), num_envs=ENVS)
    name, ends = "MuJoCo playground, CartpoleBalance", ENVS * (STEPS // LIMIT)
    batch = check_simulator(stream, report, name, "playground", false, steps=STEPS, ends=ends)
    assert int(batch["next", "truncated"].sum()) == ends and not batch["next", "terminated"].any()
