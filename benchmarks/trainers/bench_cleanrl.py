"""PPO on CartPole in CleanRL's shape, with the storage, rollout and GAE of a plain loop and with flatroll's.

``python -m flatroll bench cleanrl``: lines of code, processor seconds and returns. Networks and updates are the same.
"""

import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, distributions, nn

from benchmarks.measure.timing import table
from flatroll.estimators import GAE
from flatroll.rollouts import Collector

Categorical: Any = distributions.Categorical  # untyped to mypy
ENVS, STEPS, ITERATIONS, SEEDS = 4, 128, 24, (1, 2)
GAMMA, LAMBDA = 0.99, 0.95


def net(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Agent:
    """Actor, critic, and one PPO update of both."""

    def __init__(self) -> None:
        self.actor, self.critic = net(2), net(1)
        weights = [*self.actor.parameters(), *self.critic.parameters()]
        self.weights, self.optimizer = weights, torch.optim.Adam(weights, lr=1e-3, eps=1e-5)

    @torch.no_grad()
    def choose(self, obs: Tensor) -> Tensor:
        action: Tensor = Categorical(logits=self.actor(obs), validate_args=False).sample()
        return action

    @torch.no_grad()
    def log_prob(self, obs: Tensor, action: Tensor) -> Tensor:
        found: Tensor = Categorical(logits=self.actor(obs), validate_args=False).log_prob(action)
        return found

    def update(
        self, obs: Tensor, action: Tensor, log_prob: Tensor, advantage: Tensor, returns: Tensor
    ) -> None:
        for _ in range(4):
            for rows in torch.randperm(len(obs)).chunk(4):
                policy = Categorical(logits=self.actor(obs[rows]), validate_args=False)
                ratio = (policy.log_prob(action[rows]) - log_prob[rows]).exp()
                gain = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std() + 1e-8)
                clipped = torch.min(gain * ratio, gain * ratio.clamp(0.8, 1.2)).mean()
                error = (self.critic(obs[rows]).squeeze(-1) - returns[rows]).square().mean()
                self.optimizer.zero_grad()
                (0.25 * error - clipped - 0.01 * policy.entropy().mean()).backward()
                nn.utils.clip_grad_norm_(self.weights, 0.5)
                self.optimizer.step()


def make_env() -> Any:
    return gym.make_vec("CartPole-v1", ENVS, "sync")


def plain(agent: Agent, env: Any, seed: int) -> None:
    obs = torch.zeros(STEPS, ENVS, 4)
    action = torch.zeros(STEPS, ENVS, dtype=torch.int64)
    log_prob, reward, done, value, advantage = torch.zeros(5, STEPS, ENVS)
    next_obs, next_done = torch.as_tensor(env.reset(seed=seed)[0]), torch.zeros(ENVS)
    for _ in range(ITERATIONS):
        for step in range(STEPS):
            obs[step], done[step] = next_obs, next_done
            with torch.no_grad():
                policy = Categorical(logits=agent.actor(next_obs), validate_args=False)
                action[step] = policy.sample()
                log_prob[step] = policy.log_prob(action[step])
                value[step] = agent.critic(next_obs).squeeze(-1)
            shown, rewards, terminated, truncated, _ = env.step(action[step].numpy())
            reward[step] = torch.as_tensor(rewards)
            next_obs, next_done = torch.as_tensor(shown), torch.as_tensor(terminated | truncated).float()
        with torch.no_grad():
            next_value, trace = agent.critic(next_obs).squeeze(-1), torch.zeros(ENVS)
        for step in reversed(range(STEPS)):
            last = step == STEPS - 1
            goes_on = 1 - (next_done if last else done[step + 1])
            following = next_value if last else value[step + 1]
            trace = reward[step] + GAMMA * goes_on * (following + LAMBDA * trace) - value[step]
            advantage[step] = trace
        returns = (advantage + value).flatten()
        agent.update(obs.flatten(0, 1), action.flatten(), log_prob.flatten(), advantage.flatten(), returns)


def ours(agent: Agent, env: Any, seed: int) -> None:
    critic = TensorDictModule(agent.critic, ["observation"], ["state_value"])
    gae = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic, shifted=True)
    frames = STEPS * ENVS
    policy = (
        agent.choose
    )  # a TensorDictModule could store log-probabilities; here the batch gets them at once
    for batch in Collector(env, policy, frames_per_batch=frames, total_frames=frames * ITERATIONS, seed=seed):
        gae(batch)
        obs, action = batch["observation"], batch["action"]
        log_prob = agent.log_prob(obs, action)
        agent.update(obs, action, log_prob, batch["advantage"].flatten(), batch["value_target"].flatten())


Run = Callable[[Agent, Any, int], None]


def lines_of(run: Run) -> int:
    """Lines of its body."""
    return len(inspect.getsource(run).splitlines()) - 1


def played(run: Run, seed: int) -> tuple[float, float]:
    """Train; return processor seconds and the mean return of the last 50 episodes."""
    torch.manual_seed(seed)
    env = gym.wrappers.vector.RecordEpisodeStatistics(make_env(), buffer_length=50)
    began = time.process_time()
    run(Agent(), env, seed)
    return time.process_time() - began, float(statistics.mean(env.return_queue))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    runs: dict[str, Run] = {"plain loop": plain, "flatroll": ours}
    turns = [{name: played(run, seed) for name, run in runs.items()} for seed in SEEDS]
    rows = []
    for name, run in runs.items():
        seconds, returns = zip(*(turn[name] for turn in turns), strict=True)
        shown = ", ".join(f"{value:.0f}" for value in returns)
        rows.append([name, str(lines_of(run)), f"{min(seconds):.1f}", shown])
    print(
        table(
            ["", "lines", "processor s", f"return after {ITERATIONS * STEPS * ENVS:,} frames, seeds 1 and 2"],
            rows,
        )
    )


if __name__ == "__main__":
    main()
