"""A rollout, its advantages and its minibatches: flatroll's collector beside rsl_rl's storage and plain tensors.

All three step the same simulator with networks of the same sizes, estimate advantages by GAE and read all rows once,
shuffled, in four minibatches. rsl_rl's side calls its storage as its runner and its PPO do.
"""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Normal

from benchmarks.bench_torch_path import ACTION, OBSERVATION, STEPS, Simulator
from flatroll.estimators import GAE
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import as_vector_env

GAMMA, LMBDA = 0.99, 0.95
MINIBATCHES = 4
HIDDEN = (128, 128)

Loop = Callable[[], object]


def network(outputs: int, device: str) -> nn.Sequential:
    """An MLP like those of `actor` and `critic`."""
    first, second = HIDDEN
    layers = [nn.Linear(OBSERVATION, first), nn.Tanh(), nn.Linear(first, second), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(second, outputs)).to(device)


class Policy:
    """A Gaussian of independent deviation, and a value."""

    def __init__(self, device: str) -> None:
        self.mean, self.value = network(ACTION, device), network(1, device)
        self.scale = torch.ones(ACTION, device=device)

    def __call__(self, obs: Tensor) -> tuple[Tensor, ...]:
        """Action, its log-probability, mean, deviation and value."""
        mean = self.mean(obs)
        policy: Any = Normal(mean, self.scale.expand_as(mean), validate_args=False)
        action = policy.sample()
        return action, policy.log_prob(action).sum(-1), mean, policy.stddev, self.value(obs)


def advantages(values: Tensor, last: Tensor, rewards: Tensor, dones: Tensor) -> tuple[Tensor, Tensor]:
    """GAE step by step over ``[T, E, 1]``, as PPO programs write it; and the returns."""
    found = torch.zeros_like(rewards)
    trace = torch.zeros_like(last)
    for step in reversed(range(len(rewards))):
        following = last if step == len(rewards) - 1 else values[step + 1]
        goes_on = 1.0 - dones[step]
        delta = rewards[step] + goes_on * GAMMA * following - values[step]
        trace = delta + goes_on * GAMMA * LMBDA * trace
        found[step] = trace
    return found, found + values


def with_flatroll(envs: int, device: str) -> Loop:
    """A batch of the collector, GAE, minibatches by index."""
    env = as_vector_env(Simulator(envs, device=device), final_obs="final_obs")
    policy = actor(env, hidden=HIDDEN, norm=False, device=device)
    value = critic(env, hidden=HIDDEN, norm=False, device=device)
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=value, shifted=True)
    collector = Collector(env, policy, frames_per_batch=STEPS * envs, compact_obs=True, seed=0)
    batches = iter(collector)

    def run() -> object:
        batch = next(batches)
        with torch.no_grad():
            gae(batch, final=collector.final)
        order = torch.randperm(len(batch), device=device)
        return [batch[rows] for rows in order.chunk(MINIBATCHES)]

    return run


def with_rsl_rl(envs: int, device: str) -> Loop:
    """``add_transition`` at each step, the advantages of its PPO, ``mini_batch_generator``."""
    from rsl_rl.storage import RolloutStorage

    env, policy = Simulator(envs, device=device), Policy(device)
    env.reset()
    shown = TensorDict({"obs": env.shown}, [envs])  # the simulator writes into the same memory
    storage: Any = RolloutStorage("rl", envs, STEPS, shown, [ACTION], device)

    @torch.no_grad()
    def run() -> object:
        storage.clear()
        for _ in range(STEPS):
            row = RolloutStorage.Transition()
            row.observations = shown.clone()
            row.actions, row.actions_log_prob, mean, deviation, row.values = policy(env.shown)
            row.distribution_params = (mean, deviation)
            _, reward, terminated, truncated, _ = env.step(row.actions)
            row.rewards = reward + GAMMA * row.values.squeeze(1) * truncated  # a time limit is no end
            row.dones = terminated | truncated
            storage.add_transition(row)
        found = advantages(storage.values, policy.value(env.shown), storage.rewards, storage.dones.float())
        storage.advantages, storage.returns = found
        return list(storage.mini_batch_generator(MINIBATCHES, 1))

    return run


def by_hand(envs: int, device: str) -> Loop:
    """Tensors written in place."""
    env, policy = Simulator(envs, device=device), Policy(device)
    env.reset()
    sizes = {
        "obs": OBSERVATION,
        "action": ACTION,
        "log_prob": 1,
        "mean": ACTION,
        "value": 1,
        "reward": 1,
        "done": 1,
    }
    columns = {name: torch.zeros(STEPS, envs, size, device=device) for name, size in sizes.items()}

    @torch.no_grad()
    def run() -> object:
        for step in range(STEPS):
            columns["obs"][step] = env.shown
            action, log_prob, mean, _, value = policy(env.shown)
            _, reward, terminated, truncated, _ = env.step(action)
            given = {
                "action": action,
                "log_prob": log_prob[:, None],
                "mean": mean,
                "value": value,
                "reward": (reward + GAMMA * value.squeeze(1) * truncated)[:, None],
                "done": (terminated | truncated)[:, None],
            }
            for name, column in given.items():
                columns[name][step] = column
        found = advantages(columns["value"], policy.value(env.shown), columns["reward"], columns["done"])
        flat = [column.flatten(0, 1) for column in (*columns.values(), *found)]
        order = torch.randperm(STEPS * envs, device=device)
        return [[column[rows] for column in flat] for rows in order.chunk(MINIBATCHES)]

    return run
