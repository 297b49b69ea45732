"""skrl's agents record every transition of every env once, with its true next observation."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("skrl")

from skrl.agents.torch.a2c import A2C, A2C_RNN
from skrl.agents.torch.base import Agent, AgentCfg
from skrl.agents.torch.dqn import DQN
from skrl.agents.torch.ppo import PPO, PPO_CFG, PPO_RNN
from skrl.agents.torch.rpo import RPO, RPO_RNN
from skrl.agents.torch.trpo import TRPO, TRPO_RNN
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
        self.net = torch.nn.Linear(env.observation_space.shape[0], int(env.action_space.n))

    def compute(self, inputs: Any, role: str) -> Any:
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    def __init__(self, env: Any) -> None:
        Model.__init__(
            self, observation_space=env.observation_space, action_space=env.action_space, device="cpu"
        )
        DeterministicMixin.__init__(self)
        self.net = torch.nn.Linear(env.observation_space.shape[0], 1)

    def compute(self, inputs: Any, role: str) -> Any:
        return self.net(inputs["observations"]), {}


def agent_of(kind: Any, env: Any, cfg: Any) -> Any:
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    return kind(
        cfg=cfg,
        models={"policy": Policy(env), "value": Value(env)},
        memory=RandomMemory(memory_size=cfg.rollouts, num_envs=env.num_envs, device="cpu"),
        observation_space=env.observation_space,
        action_space=env.action_space,
        device="cpu",
    )


def test_ppo_learns() -> None:
    env = wrap_env(gym.make_vec("CartPole-v1", 3, "sync"))
    cfg = PPO_CFG(rollouts=16, learning_epochs=2, mini_batches=2, time_limit_bootstrap=True)
    agent = agent_of(ExactPPO, env, cfg)
    before = agent.policy.net.weight.clone()
    SequentialTrainer(env=env, agents=agent, cfg={"timesteps": 48, **QUIET}).train()
    assert (agent.policy.net.weight != before).any()


def returns_of(kind: Any, time_limit_bootstrap: bool) -> tuple[list[float], list[float]]:
    """Play one rollout of 12 steps: the returns that the agent learns from, and the right ones."""
    env = wrap_env(make_scripted(SCRIPT))
    cfg = PPO_CFG(
        rollouts=12,
        discount_factor=0.9,
        gae_lambda=0.8,
        learning_rate=0.0,
        time_limit_bootstrap=time_limit_bootstrap,
    )
    agent = agent_of(kind, env, cfg)
    SequentialTrainer(env=env, agents=agent, cfg={"timesteps": 12, **QUIET}).train()
    learned = agent.memory.get_tensor_by_name("returns")  # [steps, envs, 1]

    def value(where: Any) -> float:
        return float(agent.value.net(torch.tensor(where, dtype=torch.float32)).detach())

    rows = true_rows(12)
    right = []
    for i in range(len(rows)):  # the return of row i: follow its episode, one row of this env after another
        total = 0.0
        weight = 1.0
        for before, after, reward, terminated, truncated in rows[i :: env.num_envs]:
            worth = 0.0 if terminated else 0.9 * value(after)
            total += weight * (reward + worth - value(before))
            weight *= 0.9 * 0.8
            if terminated or truncated:
                break
        right.append(total + value(rows[i][0]))
    return learned.flatten().tolist(), right


def test_returns_are_exact_at_ends_and_time_limits() -> None:
    learned, right = returns_of(ExactPPO, time_limit_bootstrap=True)
    np.testing.assert_allclose(learned, right, rtol=1e-4)


@pytest.mark.parametrize("time_limit_bootstrap", [False, True])
def test_returns_of_skrl_s_ppo_mix_episodes(time_limit_bootstrap: bool) -> None:
    """The reason for the base, and for the setting that it insists on."""
    learned, right = returns_of(PPO, time_limit_bootstrap)
    assert not np.allclose(learned, right, rtol=1e-2)


@pytest.mark.parametrize("cfg", [{}, PPO_CFG(), {"time_limit_bootstrap": False}], ids=str)
def test_a_setting_that_continues_returns_past_a_time_limit_is_refused(cfg: Any) -> None:
    with pytest.raises(ValueError, match=r"ExactPPO needs cfg\.time_limit_bootstrap=True, got False"):
        ExactPPO(models={}, cfg=cfg, device="cpu")


@pytest.mark.parametrize("kind", [PPO_RNN, A2C_RNN, RPO_RNN, TRPO_RNN])
def test_recurrent_agents_that_never_value_last_observations_are_refused(kind: Any) -> None:
    exact = type("ExactRecurrent", (FinalObservations, kind), {})
    with pytest.raises(TypeError, match="FinalObservations is not for ExactRecurrent: skrl's recurrent"):
        exact(models={}, cfg={"time_limit_bootstrap": True}, device="cpu")


@pytest.mark.parametrize("kind", [A2C, RPO, TRPO])
def test_the_other_agents_of_rollouts_need_it_too(kind: Any) -> None:
    exact = type("Exact", (FinalObservations, kind), {})
    with pytest.raises(ValueError, match=r"Exact needs cfg\.time_limit_bootstrap=True"):
        exact(models={}, device="cpu")
    exact(models={}, cfg={"time_limit_bootstrap": True}, device="cpu")


def test_off_policy_agents_need_no_setting() -> None:
    exact: Any = type("ExactDQN", (FinalObservations, DQN), {})
    exact(models={}, device="cpu")


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
