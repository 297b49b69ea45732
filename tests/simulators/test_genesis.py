"""Genesis on the CPU under an env as its examples write them: every row against Genesis' own state."""

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("genesis")
import genesis as gs
from traces import Trace, assert_same, compare

from flatroll.layout import audit, describe
from flatroll.rollouts import rollout
from flatroll.wrappers import as_vector_env
from flatroll.wrappers.testing import check_vector_env

ENVS, STEPS, LIMIT = 4, 60, 25


class Thrown:
    """Boxes that are pushed about in the air; an episode ends on the ground, or by time."""

    def __init__(self) -> None:
        gs.init(backend=gs.cpu, logging_level="error", seed=0)
        self.scene = gs.Scene(show_viewer=False, sim_options=gs.options.SimOptions(dt=0.02))
        self.scene.add_entity(gs.morphs.Plane())
        self.box = self.scene.add_entity(gs.morphs.Box(size=(0.2, 0.2, 0.2), pos=(0.0, 0.0, 1.0)))
        self.scene.build(n_envs=ENVS)
        self.num_envs, self.num_actions, self.num_obs, self.num_privileged_obs = ENVS, 3, 6, None
        self.device, self.max_episode_length, self.final_obs = gs.device, LIMIT, False
        self.extras: dict[str, Any] = {}
        self.episode_length_buf = torch.zeros(ENVS, dtype=gs.tc_int)
        self.rew_buf = torch.zeros(ENVS)
        self.trace = Trace()
        self.generator = torch.Generator()

    def state(self) -> torch.Tensor:
        return torch.cat([self.box.get_pos(), self.box.get_vel()], 1)

    def reset_idx(self, envs_idx: torch.Tensor) -> None:
        if not len(envs_idx):
            return
        heights = 0.5 + torch.rand(len(envs_idx), 1, generator=self.generator)
        pos = torch.cat([torch.zeros(len(envs_idx), 2), heights], 1)
        self.box.set_pos(pos, envs_idx=envs_idx, zero_velocity=True)
        self.episode_length_buf[envs_idx] = 0

    def reset(self) -> tuple[torch.Tensor, None]:
        self.generator.manual_seed(0)
        self.scene.reset()
        self.reset_idx(torch.arange(ENVS))
        return self.state(), None

    def get_observations(self) -> torch.Tensor:
        return self.state()

    def get_privileged_observations(self) -> None:
        return None

    def step(self, actions: torch.Tensor) -> Any:
        self.box.set_dofs_velocity(self.box.get_vel() + 0.5 * actions, dofs_idx_local=[0, 1, 2])
        self.scene.step()
        self.episode_length_buf += 1
        state = self.state()
        timed_out = self.episode_length_buf >= LIMIT
        reset_buf = (state[:, 2] < 0.15) | timed_out
        self.extras["time_outs"] = timed_out.float()
        self.rew_buf[:] = state[:, 2]
        # The trace: what the simulator says before anything is reset.
        self.trace.add(state, self.rew_buf, reset_buf & ~timed_out, timed_out)
        if self.final_obs:
            self.extras["final_obs"] = state
        self.reset_idx(reset_buf.nonzero().flatten())
        return self.state(), self.rew_buf, reset_buf.to(gs.tc_int), self.extras


def policy(obs: torch.Tensor) -> torch.Tensor:
    return (7 * obs[:, :3] + torch.arange(3)).sin()


@cache
def build() -> Thrown:
    """Built once: Genesis is initialised once a process."""
    return Thrown()


@pytest.mark.parametrize("final_obs", [False, True])
def test_rows_are_genesis_states(final_obs: bool, report: Any) -> None:
    stream = report.start(build, torch.zeros(ENVS, 3), autoreset_mode="SameStep")
    env = stream.source.env
    env.final_obs, env.trace = final_obs, Trace()
    env.extras.clear()
    batch = rollout(stream, policy, num_steps=STEPS)
    counts = compare(batch, "observation", env.trace, ENVS)
    name = "Genesis, boxes" + (", extras['final_obs']" if final_obs else "")
    report.add(name, "genesis-world", "SameStep", counts)
    assert (counts.rows, counts.false) == (ENVS * STEPS, 0)
    assert counts.known + counts.unknown >= ENVS
    assert (counts.unknown if final_obs else counts.known) == 0
    assert audit(batch) == []
    assert ("no last observation" in describe(batch)) != final_obs
    assert_same(batch, rollout(stream, policy, num_steps=STEPS))


def test_the_contract_kit() -> None:
    env = build()
    env.extras.clear()
    check_vector_env(as_vector_env(env, autoreset_mode="SameStep"), steps=60)
