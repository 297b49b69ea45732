"""rl_games' row: its PPO agent over a scripted ``IVecEnv``, whose envs reset in the step that ends them."""

import contextlib
import importlib
import io
import tempfile
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import (
    GAMMA,
    LAMBDA,
    PLAN,
    STEPS,
    VALUE_BIAS,
    VALUE_WEIGHTS,
    Row,
    advantages,
    columns,
    counts_are_right,
    key_of,
    one_hot_number,
    one_hot_size,
)

PACKAGE = "rl-games"
NAME = "boundaries"


def part(module: str, name: str) -> Any:
    """Import an object of the library by name."""
    return getattr(importlib.import_module(f"rl_games.{module}"), name)


def vec_env(one_hot: bool) -> Any:
    """Return the plan as an ``IVecEnv``; ``time_outs`` are ends by truncation that are no termination."""
    base: Any = part("common.ivecenv", "IVecEnv")

    class Scripted(base):
        def __init__(self) -> None:
            self.rows = PLAN.rows(STEPS + 1)
            self.now = 0

        def observe(self) -> torch.Tensor:
            if one_hot:
                numbers = [one_hot_number(PLAN, row.key) for row in self.rows[self.now]]
                return torch.eye(one_hot_size(PLAN))[numbers]
            return torch.from_numpy(columns([self.rows[self.now]])["observation"][0])

        def reset(self) -> torch.Tensor:
            return self.observe()

        def step(self, actions: Any) -> Any:
            found = columns([self.rows[self.now]])
            self.now += 1
            rewards = torch.from_numpy(found["reward"][0])
            dones = torch.from_numpy(found["done"][0].astype(np.uint8))
            time_outs = torch.from_numpy(found["truncated"][0] & ~found["terminated"][0])
            return self.observe(), rewards, dones, {"time_outs": time_outs}

        def get_env_info(self) -> Any:
            size = one_hot_size(PLAN) if one_hot else 3
            space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
            return {"observation_space": space, "action_space": gym.spaces.Discrete(2)}

    return Scripted()


def agent_of(folder: str, one_hot: bool = False, **settings: Any) -> Any:
    """Return a PPO agent whose value function is the fixtures', about to play `STEPS` steps."""
    register = part("common.vecenv", "register")
    configurations = part("common.env_configurations", "configurations")
    register(NAME, lambda config_name, num_actors, **options: vec_env(one_hot))
    configurations[NAME] = {"vecenv_type": NAME, "env_creator": lambda **options: None}
    layers = {
        "units": [1],
        "activation": "relu",
        "initializer": {"name": "default"},
        "regularizer": {"name": "None"},
    }
    config = {
        "name": NAME,
        "env_name": NAME,
        "train_dir": folder,
        "device": "cpu",
        "num_actors": PLAN.num_envs,
        "horizon_length": STEPS,
        "minibatch_size": PLAN.num_envs * STEPS,
        "mini_epochs": 1,
        "gamma": GAMMA,
        "tau": LAMBDA,
        "learning_rate": 0.0,
        "lr_schedule": None,
        "reward_shaper": {"scale_value": 1.0},
        "normalize_advantage": False,
        "normalize_input": False,
        "e_clip": 0.2,
        "clip_value": False,
        "entropy_coef": 0.0,
        "critic_coef": 1.0,
        "grad_norm": 1.0,
        "print_stats": False,
        "max_epochs": 1,
    }
    params = {
        "seed": 1,
        "algo": {"name": "a2c_discrete"},
        "model": {"name": "discrete_a2c"},
        "network": {"name": "actor_critic", "separate": True, "space": {"discrete": None}, "mlp": layers},
        "config": {**config, **settings},
    }
    with contextlib.redirect_stdout(io.StringIO()):
        runner = part("torch_runner", "Runner")()
        runner.load({"params": params})
        agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
        agent.init_tensors()
        agent.obs = agent.env_reset()
    if not one_hot:
        set_value_function(agent.model.a2c_network)
    return agent


def set_value_function(network: Any) -> None:
    """Set a critic of one hidden unit to the fixtures' value function, which is positive."""
    with torch.no_grad():
        network.critic_mlp[0].weight.copy_(torch.tensor([VALUE_WEIGHTS]))
        network.critic_mlp[0].bias.fill_(VALUE_BIAS)
        network.value.weight.fill_(1.0)
        network.value.bias.zero_()


def compare_advantages(lmbda: float, wanted: Callable[[Row], bool]) -> Tally:
    """Count the advantages (returns minus values) of the wanted rows."""
    with tempfile.TemporaryDirectory() as folder:
        agent = agent_of(folder, tau=lmbda)
        with torch.no_grad():
            agent.set_eval()
            batch = agent.play_steps()

    gains = {
        key_of(frame): float(gain)
        for frame, gain in zip(batch["obses"], batch["returns"] - batch["values"], strict=True)
    }
    tally = Tally()
    rows = PLAN.rows(STEPS)
    right = advantages(rows, lmbda=lmbda)
    for step, both_rows in enumerate(rows):
        for row in both_rows:
            if wanted(row):
                tally.compare(row.key, gains[row.key], right[step, row.env])
    return tally


def truncated_end() -> Cell:
    """Returns with tau 0, which are one-step targets."""
    return compare_advantages(0.0, lambda row: row.truncated and not row.terminated).cell(
        "adds V of the observation before the step",
        note="value_bootstrap is on by default; an IVecEnv has no place for the last observation",
        script="rl_games_time_outs.sh",
    )


def both_ends() -> Cell:
    return compare_advantages(0.0, lambda row: row.truncated and row.terminated).cell(
        "adds a bootstrap value", note="time_outs is False there"
    )


def gae() -> Cell:
    return compare_advantages(LAMBDA, lambda row: True).cell(
        "truncated rows add V of their own observation",
        note="no advantage crosses an end; the rows before a truncated end inherit its error",
        script="rl_games_time_outs.sh",
    )


def normaliser() -> Cell:
    """``normalize_input`` after one epoch of training."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        agent = agent_of(folder, one_hot=True, normalize_input=True)
        agent.train_epoch()
    found = agent.model.running_mean_std
    counted = found.running_mean * found.count
    rows = [row for step in PLAN.rows(STEPS) for row in step]
    last = [(row.env, row.episode, row.step + 1) for row in rows if row.done]
    tally = Tally()
    for key, right in counts_are_right(PLAN, counted.numpy(), [row.key for row in rows], last):
        tally.check(key, right, "not counted once")
    return tally.cell("not counted once")


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return the fixtures that rl_games has parts for."""
    return {
        "truncated_end": truncated_end,
        "both_ends": both_ends,
        "advantages": gae,
        "normaliser": normaliser,
    }
