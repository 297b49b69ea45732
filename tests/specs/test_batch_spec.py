"""What a batch holds, as a spec, and envs that do not keep theirs."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.layout import TRAJ_IDS
from flatroll.rollouts import Collector, batch_spec, check_env_specs, rollout
from flatroll.specs import OutsideSpecError
from flatroll.wrappers import CompactObs, InitTracker, NextObservationDelta, RewardSum, StepCounter, TrajId
from flatroll.wrappers.testing import ContractError, Script, ScriptedTorchEnv, ScriptedVectorEnv


class Faulty(gym.Env[Any, Any]):
    """Walks through its Box, one number a step; does one thing wrong at a step."""

    observation_space = spaces.Box(0, 10, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, fault: str = "", at: int = 4, length: int = 6) -> None:
        self.fault, self.at, self.length, self.step_number = fault, at, length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.step_number = 0
        return np.zeros(2, np.float32), {"place": np.zeros(2)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        wrong, ended = self.step_number == self.at, self.step_number == self.length
        obs = np.full(2, self.step_number, np.float32)
        if (self.fault == "outside" and wrong) or (self.fault == "final" and ended):
            obs[:] = 11
        if self.fault == "nan" and wrong:
            obs[1] = np.nan
        place = np.zeros(3 if self.fault == "info" and wrong else 2)
        return obs, 1.0, ended, False, {"place": place}


def vector(fault: str, mode: AutoresetMode) -> Any:
    return SyncVectorEnv([lambda: Faulty(fault)], autoreset_mode=mode)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_an_env_that_keeps_its_spaces(mode: AutoresetMode) -> None:
    check_env_specs(vector("", mode))


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("fault", ["outside", "final", "nan"])
def test_an_env_that_leaves_its_space(fault: str, mode: AutoresetMode) -> None:
    with pytest.raises(ContractError, match="obs has NaN" if fault == "nan" else "outside its space"):
        check_env_specs(vector(fault, mode))


def test_an_info_that_changes_its_shape() -> None:
    with pytest.raises(ContractError, match=r"info\['place'\] has shape \(1, 2\) .* in step 3"):
        check_env_specs(vector("info", AutoresetMode.SAME_STEP), num_steps=5)


@pytest.mark.parametrize(
    "env",
    [
        ScriptedVectorEnv(Script(3)),
        ScriptedTorchEnv(Script(3)),
        NextObservationDelta(ScriptedVectorEnv(Script(3))),
    ],
    ids=["numpy", "torch", "differences"],
)
def test_scripted_envs_pass(env: Any) -> None:
    check_env_specs(env)


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Blackjack-v1"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_envs_of_categories_pass(name: str, mode: str) -> None:
    """Their info has entries that are whole numbers in some steps and floats in others."""
    check_env_specs(gym.make_vec(name, num_envs=2, vector_kwargs={"autoreset_mode": mode}), 60)


ENVS: dict[str, Any] = {
    "cartpole": lambda: gym.make_vec("CartPole-v1", num_envs=3),
    "pendulum": lambda: gym.make("Pendulum-v1"),
    "float64": lambda: gym.wrappers.vector.DtypeObservation(
        gym.make_vec("CartPole-v1", num_envs=2), np.float64
    ),
    "discrete": lambda: gym.make_vec("FrozenLake-v1", num_envs=2),
    "scripted": lambda: ScriptedVectorEnv(Script(3)),
}


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS.keys())
@pytest.mark.parametrize(
    "wrap", [lambda e: e, lambda e: RewardSum(StepCounter(InitTracker(TrajId(e))))], ids=["", "marked"]
)
def test_a_batch_is_in_the_spec_of_its_env(make: Any, wrap: Any) -> None:
    env = wrap(make())
    batch = rollout(env, num_steps=40, seed=0)
    spec = batch_spec(env)
    spec.assert_is_in(batch)
    assert spec.is_in(spec.rand((7,)).squeeze(-1)) and batch_spec(env)[0].rand((5,)).batch_size == (5,)


@pytest.mark.parametrize("wrap", [lambda e: e, CompactObs, lambda e: NextObservationDelta(StepCounter(e))])
def test_a_collector_and_a_buffer_say_what_they_hold(wrap: Any) -> None:
    env = wrap(gym.make_vec("Pendulum-v1", num_envs=3))
    collector = Collector(env, frames_per_batch=30, total_frames=60, seed=0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    with pytest.raises(RuntimeError, match="empty buffer"):
        _ = buffer.spec
    for batch in collector:
        collector.spec.assert_is_in(batch)
        buffer.extend(batch, final=collector.final)
    buffer.spec.assert_is_in(buffer[:])
    assert buffer.spec[TRAJ_IDS].dtype == torch.int64 and buffer.spec.shape == (-1,)
    batch = buffer[:]
    batch["observation"][17] = 99
    with pytest.raises(OutsideSpecError, match=r"'observation': at index \(17, 0\)"):
        collector.spec.assert_is_in(batch)
