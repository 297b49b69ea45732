"""skrl's agents record every transition of every env once, with its true next observation."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("skrl")

from skrl.agents.torch.base import Agent, AgentCfg
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer

from flatroll.trainers.skrl import FinalObservations, wrap_env
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, decode, expected_rows, make_scripted

MODES = ("NextStep", "SameStep", "Disabled")
SCRIPT = Script(2, lengths=[[3, 1, 4], [2, 5]], ends=[["terminated", "truncated", "both"], ["truncated"]])
QUIET = {"headless": True, "disable_progressbar": True, "close_environment_at_exit": False}


class Records(Agent):
    """Acts at random, and keeps what it is given to record."""

    def __init__(self, env: Any) -> None:
        cfg = AgentCfg()
        cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
        super().__init__(
            cfg=cfg,
            models={},
            observation_space=env.observation_space,
            action_space=env.action_space,
            device="cpu",
        )
        self.rows: list[tuple[Any, ...]] = []

    def act(self, observations: Any, states: Any, *, timestep: int, timesteps: int) -> Any:
        return torch.zeros(len(observations), 1, dtype=torch.int64), {}

    def record_transition(self, **given: Any) -> None:
        super().record_transition(**given)
        columns = zip(
            decode("float32", given["observations"]).tolist(),
            decode("float32", given["next_observations"]).tolist(),
            given["rewards"].view(-1).tolist(),
            given["terminated"].view(-1).tolist(),
            given["truncated"].view(-1).tolist(),
            strict=True,
        )
        self.rows += [(tuple(before), tuple(after), *rest) for before, after, *rest in columns]

    def pre_interaction(self, *, timestep: int, timesteps: int) -> None: ...

    def post_interaction(self, *, timestep: int, timesteps: int) -> None: ...

    def update(self, *, timestep: int, timesteps: int) -> None: ...


class ExactRecords(FinalObservations, Records): ...


class ExactPPO(FinalObservations, PPO): ...


def true_rows(steps: int) -> list[tuple[Any, ...]]:
    rows = expected_rows(SCRIPT, steps)
    return [
        ((e, k, t), (e, k, t + 1), r, bool(term), bool(trunc and not term))
        for e, k, t, r, term, trunc in rows[
            ["env", "episode", "step", "reward", "terminated", "truncated"]
        ].tolist()
    ]


@pytest.mark.parametrize("mode", MODES)
def test_every_recorded_row_is_true(mode: Any) -> None:
    env = wrap_env(make_scripted(SCRIPT, autoreset_mode=mode))
    agent = ExactRecords(env)
    SequentialTrainer(env=env, agents=agent, cfg={"timesteps": 30, **QUIET}).train()
    assert agent.rows == true_rows(30)


def test_without_the_base_the_next_episode_is_recorded() -> None:
    """The reason for the base."""
    env = wrap_env(make_scripted(SCRIPT))
    agent = Records(env)
    SequentialTrainer(env=env, agents=agent, cfg={"timesteps": 30, **QUIET}).train()
    wrong = [row for row, true in zip(agent.rows, true_rows(30), strict=True) if row[1] != true[1]]
    assert len(wrong) == sum(row[3] | row[4] for row in true_rows(30))


class Policy(CategoricalMixin, Model):
    def __init__(self, env: Any) -> None:
        Model.__init__(
            self, observation_space=env.observation_space, action_space=env.action_space, device="cpu"
        )
        CategoricalMixin.__init__(self)
        self.net = torch.nn.Linear(4, 2)

    def compute(self, inputs: Any, role: str) -> Any:
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    def __init__(self, env: Any) -> None:
        Model.__init__(
            self, observation_space=env.observation_space, action_space=env.action_space, device="cpu"
        )
        DeterministicMixin.__init__(self)
        self.net = torch.nn.Linear(4, 1)

    def compute(self, inputs: Any, role: str) -> Any:
        return self.net(inputs["observations"]), {}


def test_ppo_learns() -> None:
    env = wrap_env(gym.make_vec("CartPole-v1", 3, "sync"))
    cfg = PPO_CFG(rollouts=16, learning_epochs=2, mini_batches=2, time_limit_bootstrap=True)
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    models = {"policy": Policy(env), "value": Value(env)}
    agent = ExactPPO(
        cfg=cfg,
        models=models,
        memory=RandomMemory(memory_size=16, num_envs=3, device="cpu"),
        observation_space=env.observation_space,
        action_space=env.action_space,
        device="cpu",
    )
    before = models["policy"].net.weight.clone()
    SequentialTrainer(env=env, agents=agent, cfg={"timesteps": 48, **QUIET}).train()
    assert (models["policy"].net.weight != before).any()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="env must return NumPy arrays, but ScriptedTorchEnv returns torch"):
        wrap_env(ScriptedTorchEnv(SCRIPT))
    agent = ExactRecords(wrap_env(make_scripted(SCRIPT)))
    flags = {
        "terminated": torch.ones(2, 1, dtype=torch.bool),
        "truncated": torch.zeros(2, 1, dtype=torch.bool),
    }
    with pytest.raises(KeyError, match="infos has no 'final_obs'"):
        agent.record_transition(next_observations=torch.zeros(2, 3), infos={}, **flags)
    assert np.size(agent.rows) == 0
