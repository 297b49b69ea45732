"""VMAS by a stand-in written from its source: lists of one tensor per agent, done per game, ``reset_at``."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatroll.layout import agents_of, audit
from flatroll.rollouts import Collector
from flatroll.wrappers import VmasSource, as_vector_env
from flatroll.wrappers.testing import check_vector_env

LENGTHS, LIMIT = (3, 5, 9), 6


class Environment:
    """What VMAS' ``Environment`` is to its users: the observation is (game, agent, life, step)."""

    __module__ = "vmas.simulator.environment.environment"

    def __init__(self, *, discrete: bool = False, dict_spaces: bool = False, **kwargs: Any) -> None:
        self.scenario = self
        self.num_envs, self.device = len(LENGTHS), torch.device("cpu")
        self.agents = [SimpleNamespace(name=f"agent_{i}") for i in range(2)]
        self.max_steps, self.terminated_truncated = kwargs.get("max_steps", LIMIT), kwargs.get("flags", True)
        self.discrete, self.dict_spaces = discrete, dict_spaces
        low = np.full(4, -np.inf, np.float32)
        seen = SimpleNamespace(low=low, high=-low, dtype=low.dtype)
        size = np.full(2, kwargs.get("reach", 1), np.float32)
        move = SimpleNamespace(low=-size, high=size, dtype=np.dtype(np.float32))
        act: Any = SimpleNamespace(n=5) if discrete else move
        names = [agent.name for agent in self.agents]
        self.observation_space = dict.fromkeys(names, seen) if dict_spaces else (seen, seen)
        self.action_space = dict.fromkeys(names, act) if dict_spaces else (act, kwargs.get("other", act))
        self.life, self.step_of = torch.full((3,), -1.0), torch.zeros(3)
        self.given: list[Tensor] = []

    def _by_agent(self, values: list[Any]) -> Any:
        return (
            {agent.name: v for agent, v in zip(self.agents, values, strict=True)}
            if self.dict_spaces
            else values
        )

    def get_from_scenario(self, **wanted: bool) -> list[Any]:
        assert wanted.pop("get_observations") and not any(wanted.values())
        games = torch.arange(3.0)
        shown = [torch.stack([games, games * 0 + i, self.life, self.step_of], 1) for i in range(2)]
        return [self._by_agent(shown)]

    def reset(self, seed: int | None = None) -> Any:
        self.life = self.life * 0 if seed is not None else self.life + 1
        self.step_of = torch.zeros(3)
        return self.get_from_scenario(get_observations=True)[0]

    def reset_at(self, index: int, return_observations: bool = True) -> None:
        assert not return_observations
        self.life[index] += 1
        self.step_of[index] = 0

    def step(self, actions: list[Tensor]) -> list[Any]:
        assert [tuple(move.shape) for move in actions] == [(3, 1 if self.discrete else 2)] * 2
        self.given.append(torch.stack(actions, 1))
        self.step_of = self.step_of + 1
        (shown,) = self.get_from_scenario(get_observations=True)
        paid = [move.float().sum(-1) + 10 * i for i, move in enumerate(actions)]
        terminated = self.step_of >= torch.tensor(LENGTHS)
        truncated = self.step_of >= (self.max_steps or 99)
        done = [terminated, truncated] if self.terminated_truncated else [terminated | truncated]
        infos = [{"speed": self.step_of[:, None] + i, "own": "text"} for i in range(2)]
        return [shown, self._by_agent(paid), *done, self._by_agent(infos)]


@pytest.mark.parametrize("kind", [{}, {"discrete": True}, {"dict_spaces": True}])
def test_every_row_is_right(kind: Any) -> None:
    env = Environment(**kind)
    collector = Collector(env, frames_per_batch=50, seed=0, info_keys=["speed"])
    batches: list[Any] = [collector.rollout() for _ in range(3)]
    batch: Any = torch.cat(batches)
    game, agent, life, step = batch["observation"].unbind(1)
    assert torch.equal(batch["next", "observation"], torch.stack([game, agent, life, step + 1], 1))
    assert torch.equal(batch["collector", "game"], game.long())
    assert torch.equal(batch["collector", "agent"], agent.long())
    assert (batch["collector", "num_agents"] == 2).all()
    assert torch.equal(batch["is_init"][:, 0], step == 0)
    length = torch.tensor(LENGTHS)[game.long()]
    assert torch.equal(batch["next", "terminated"][:, 0], step + 1 >= length)
    assert torch.equal(batch["next", "truncated"][:, 0], step + 1 >= LIMIT)
    given = batch["action"].float() if "discrete" in kind else batch["action"].sum(-1)
    torch.testing.assert_close(batch["next", "reward"][:, 0], given + 10 * agent)
    assert torch.equal(batch["next", "speed"][:, 0], step + 1 + agent)
    lives = torch.unique(torch.stack([game, agent, life], 1), dim=0)
    assert len(batch["collector", "traj_ids"].unique()) == len(lives)
    for rows in agents_of(batch):
        assert (batch["observation"][rows, 0] == batch["observation"][rows[0], 0]).all()
        assert (batch["observation"][rows, 2:] == batch["observation"][rows[0], 2:]).all()
    assert audit(Collector(Environment(**kind), frames_per_batch=60).rollout()) == []
    check_vector_env(Environment(**kind), steps=30)


def test_without_a_limit_done_is_terminated() -> None:
    env = Environment(max_steps=None, flags=False)
    batch: Any = Collector(env, frames_per_batch=60, seed=0).rollout()
    assert not batch["next", "truncated"].any() and batch["next", "terminated"].any()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="make the env with terminated_truncated=True"):
        as_vector_env(Environment(flags=False))
    other = SimpleNamespace(
        low=-np.ones(1, np.float32), high=np.ones(1, np.float32), dtype=np.dtype(np.float32)
    )
    with pytest.raises(
        ValueError, match=r"same action_space.*for 'agent_1': pad the smaller ones in the scenario"
    ):
        as_vector_env(Environment(other=other))
    env = as_vector_env(VmasSource(Environment()))
    with pytest.raises(ValueError, match="seed must be one number"):
        env.reset(seed=[0] * 6)  # type: ignore[arg-type]
    env.reset()
    with pytest.raises(ValueError, match="a game is reset as a whole"):
        env.reset(options={"reset_mask": torch.arange(6) == 0})
