"""ManiSkill's PickCube on the CPU, every row against the robot's joints as SAPIEN has them."""

from typing import Any

import pytest
import torch

pytest.importorskip("mani_skill")
from maniskill_env import LIMIT, bare, make
from traces import assert_same, compare, run_block, trace_of

from flatroll.layout import audit
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import as_vector_env
from flatroll.wrappers.testing import check_vector_env

STEPS = 130
JOINTS = slice(0, 18)  # of the observation: the positions and speeds of nine joints


def policy(obs: torch.Tensor) -> torch.Tensor:
    return (obs[:, :8] * torch.arange(3, 11)).sin()


def test_gym_make_is_sent_to_the_vector_env() -> None:
    env = bare()
    for given in (env, env.unwrapped):
        with pytest.raises(TypeError, match="ManiSkillVectorEnv"):
            as_vector_env(given, autoreset_mode="SameStep")


@pytest.mark.parametrize("auto_reset", [True, False])
def test_rows_are_the_robot_s_states(auto_reset: bool, report: Any) -> None:
    stream = report.start(lambda: make(auto_reset), torch.zeros(1, 8))
    env = stream.source.env
    robot = env.base_env.agent.robot
    trace = trace_of(env._env, lambda: torch.cat([robot.get_qpos(), robot.get_qvel()], 1))
    batch = rollout(stream, policy, num_steps=STEPS, seed=0)
    counts = compare(batch, "observation", trace, 1, JOINTS)
    name = "ManiSkill, PickCube" + ("" if auto_reset else ", auto_reset=False")
    report.add(name, "mani-skill", "SameStep" if auto_reset else "Disabled", counts)
    assert (counts.rows, counts.false, counts.known, counts.unknown) == (STEPS, 0, STEPS // LIMIT, 0)
    assert audit(batch) == []
    assert_same(batch, rollout(as_vector_env(make(auto_reset)), policy, num_steps=STEPS, seed=0))


def test_the_named_key_is_there_in_ending_steps_only() -> None:
    batch = next(Collector(as_vector_env(make(), final_obs="final_observation"), frames_per_batch=60))
    assert int(batch["next", "truncated"].sum()) == 3
    assert audit(batch) == []


def test_the_contract_kit() -> None:
    check_vector_env(make(), steps=50)


def test_the_block_of_the_page() -> None:
    bare().close()  # makes the stand-in where there is no Vulkan
    printed, expected = run_block("mani_skill")
    assert printed == expected
