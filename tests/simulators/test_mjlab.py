"""mjlab's Cartpole on the CPU in both modes, every row against MuJoCo's own state."""

from typing import Any

import pytest
import torch

pytest.importorskip("mjlab")
import mjlab.tasks.cartpole  # noqa: F401
from mjlab.envs import ManagerBasedRlEnv
from mjlab.tasks.registry import load_env_cfg
from traces import Trace, assert_same, compare, run_block

from flatroll.layout import audit, describe
from flatroll.rollouts import rollout
from flatroll.wrappers import as_vector_env
from flatroll.wrappers.testing import check_vector_env

ENVS, STEPS, LIMIT = 8, 50, 20


class Staggered(ManagerBasedRlEnv):  # type: ignore[misc]
    """Time limits that differ by env, so that episodes do not all end in one step."""

    def reset(self, *, seed: Any = None, env_ids: Any = None, options: Any = None) -> Any:
        result = super().reset(seed=seed, env_ids=env_ids, options=options)
        if env_ids is None:
            self.episode_length_buf[:] = torch.arange(self.num_envs) * 2
        return result


def make(auto_reset: bool) -> Any:
    cfg = load_env_cfg("Mjlab-Cartpole-Balance")
    cfg.scene.num_envs, cfg.auto_reset, cfg.episode_length_s = ENVS, auto_reset, LIMIT * 0.05
    return Staggered(cfg, device="cpu")


def mode(auto_reset: bool) -> str | None:
    """auto_reset=False says by itself that the env leaves the resets to others."""
    return "SameStep" if auto_reset else None


def observation(env: Any) -> torch.Tensor:
    """What both observations of the task are, from MuJoCo's state: ``[E, 5]``."""
    (cart, pole), speeds = env.sim.data.qpos[:].unbind(1), env.sim.data.qvel[:]
    return torch.cat([torch.stack([cart, pole.cos(), pole.sin()], 1), speeds], 1)


def traced(env: Any) -> Trace:
    """mjlab resets within its step: the state is read where rewards are computed, when no row has been reset."""
    trace, compute = Trace(), env.reward_manager.compute

    def recorded(dt: float) -> torch.Tensor:
        reward = compute(dt=dt)
        trace.add(observation(env), reward, env.reset_terminated, env.reset_time_outs)
        return reward

    env.reward_manager.compute = recorded
    return trace


def policy(obs: Any) -> torch.Tensor:
    return (3 * obs["actor"][:, 2:3] + 0.3 * obs["actor"][:, 4:5]).sin()


@pytest.mark.parametrize("auto_reset", [True, False])
def test_rows_are_mujoco_s_states(auto_reset: bool, report: Any) -> None:
    stream = report.start(lambda: make(auto_reset), torch.zeros(ENVS, 1), autoreset_mode=mode(auto_reset))
    trace = traced(stream.source.env)
    batch = rollout(stream, policy, num_steps=STEPS, seed=0)
    counts = compare(batch, "actor", trace, ENVS)
    name = "mjlab, Cartpole" + ("" if auto_reset else ", auto_reset=False")
    report.add(name, "mjlab", "SameStep" if auto_reset else "Disabled", counts)
    assert (counts.rows, counts.false) == (ENVS * STEPS, 0)
    assert counts.known + counts.unknown >= 2 * ENVS
    assert (counts.unknown if not auto_reset else counts.known) == 0
    assert audit(batch) == []
    assert ("no last observation" in describe(batch)) == auto_reset
    assert torch.equal(batch["actor"], batch["critic"])
    again = as_vector_env(make(auto_reset), autoreset_mode=mode(auto_reset))
    assert_same(batch, rollout(again, policy, num_steps=STEPS, seed=0))


@pytest.mark.parametrize("auto_reset", [True, False])
def test_the_contract_kit(auto_reset: bool) -> None:
    check_vector_env(as_vector_env(make(auto_reset), autoreset_mode=mode(auto_reset)), steps=30)


def test_the_block_of_the_page() -> None:
    printed, expected = run_block("mjlab")
    assert printed.endswith(expected)  # mjlab prints its managers before
