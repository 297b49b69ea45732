"""PPO on CartPole in CleanRL's shape: the storage, rollout and GAE of a plain loop and those of flatroll.

``python -m flatroll bench cleanrl``: lines of code, processor seconds and returns. In the first table networks and
updates are the same, too. In the second one flatroll's side is README's program, the other side a plain loop of the
same networks and settings.
"""

import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, distributions, nn

from benchmarks.measure.timing import table
from flatroll.estimators import GAE, ClipPPOLoss, update_step
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum

Categorical: Any = distributions.Categorical  # untyped to mypy
SEEDS = (1, 2)


@dataclass
class Settings:
    """Of PPO; minibatches of a quarter of a batch, four epochs."""

    envs: int
    steps: int
    iterations: int
    gamma: float
    lmbda: float
    rate: float
    anneal: bool

    @property
    def frames(self) -> int:
        return self.envs * self.steps * self.iterations


FILE = Settings(envs=4, steps=128, iterations=24, gamma=0.99, lmbda=0.95, rate=1e-3, anneal=False)
README = Settings(envs=32, steps=32, iterations=40, gamma=0.98, lmbda=0.8, rate=3e-3, anneal=True)


def net(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Agent:
    """Actor, critic, and one PPO update of both."""

    def __init__(self, rate: float) -> None:
        self.actor, self.critic = net(2), net(1)
        weights = [*self.actor.parameters(), *self.critic.parameters()]
        self.weights, self.optimizer = weights, torch.optim.Adam(weights, lr=rate, eps=1e-5)

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


def make_env(envs: int) -> Any:
    return gym.make_vec("CartPole-v1", envs, "sync")


def plain(settings: Settings, env: Any, seed: int) -> None:
    agent, steps, envs = Agent(settings.rate), settings.steps, settings.envs
    obs = torch.zeros(steps, envs, 4)
    action = torch.zeros(steps, envs, dtype=torch.int64)
    log_prob, reward, done, value, advantage = torch.zeros(5, steps, envs)
    next_obs, next_done = torch.as_tensor(env.reset(seed=seed)[0]), torch.zeros(envs)
    for iteration in range(settings.iterations):
        if settings.anneal:
            agent.optimizer.param_groups[0]["lr"] = settings.rate * (1 - iteration / settings.iterations)
        for step in range(steps):
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
            next_value, trace = agent.critic(next_obs).squeeze(-1), torch.zeros(envs)
        for step in reversed(range(steps)):
            last = step == steps - 1
            goes_on = 1 - (next_done if last else done[step + 1])
            following = next_value if last else value[step + 1]
            delta = reward[step] + settings.gamma * goes_on * following - value[step]
            trace = delta + settings.gamma * settings.lmbda * goes_on * trace
            advantage[step] = trace
        returns = (advantage + value).flatten()
        agent.update(obs.flatten(0, 1), action.flatten(), log_prob.flatten(), advantage.flatten(), returns)


def ours(settings: Settings, env: Any, seed: int) -> None:
    agent, batch_size = Agent(settings.rate), settings.envs * settings.steps
    value = TensorDictModule(agent.critic, ["observation"], ["state_value"])
    gae = GAE(gamma=settings.gamma, lmbda=settings.lmbda, value_network=value, shifted=True)
    collector = Collector(
        env, agent.choose, frames_per_batch=batch_size, total_frames=settings.frames, seed=seed
    )
    for batch in collector:
        gae(batch)
        obs, action = batch["observation"], batch["action"]
        log_prob = agent.log_prob(obs, action)  # a module as policy could store it at each step
        agent.update(obs, action, log_prob, batch["advantage"].flatten(), batch["value_target"].flatten())


def readme(settings: Settings, env: Any, seed: int) -> None:
    env = RewardSum(env)
    policy, value = actor(env, norm=False), critic(env, norm=False)
    gae = GAE(gamma=settings.gamma, lmbda=settings.lmbda, value_network=value)
    loss = ClipPPOLoss(policy, value, entropy_coeff=0.01, normalize_advantage=True)
    step = update_step(loss, torch.optim.Adam(loss.parameters()), max_grad_norm=0.5)
    batch_size = settings.envs * settings.steps
    collector = Collector(env, policy, frames_per_batch=batch_size, total_frames=settings.frames, seed=seed)
    returns = []
    for batch in collector:
        step.optimizer.param_groups[0]["lr"] = settings.rate * (1 - collector.frames / settings.frames)
        returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
        step.epochs(gae(batch), epochs=4, minibatch=batch_size // 4)


Run = Callable[[Settings, Any, int], None]


def lines_of(run: Run) -> int:
    """Lines of its body."""
    return len(inspect.getsource(run).splitlines()) - 1


def played(run: Run, settings: Settings, seed: int) -> tuple[float, float]:
    """Train; return processor seconds and the mean return of the last 50 episodes."""
    torch.manual_seed(seed)
    env = gym.wrappers.vector.RecordEpisodeStatistics(make_env(settings.envs), buffer_length=50)
    began = time.process_time()
    run(settings, env, seed)
    return time.process_time() - began, float(statistics.mean(env.return_queue))


def show(settings: Settings, runs: dict[str, Run]) -> None:
    """Print a table; the runs take turns, after one iteration of each."""
    for run in runs.values():
        played(run, replace(settings, iterations=1), 0)

    turns = [{name: played(run, settings, seed) for name, run in runs.items()} for seed in SEEDS]
    first = next(iter(runs))
    rows = []
    for name, run in runs.items():
        seconds, returns = zip(*(turn[name] for turn in turns), strict=True)
        ratio = statistics.median(turn[name][0] / turn[first][0] for turn in turns)
        shown = ", ".join(f"{value:.0f}" for value in returns)
        rows.append([name, str(lines_of(run)), f"{min(seconds):.1f}", f"{ratio:.2f}", shown])
    header = [
        "",
        "lines",
        "processor s",
        "of the first",
        f"return after {settings.frames:,} frames, seeds 1 and 2",
    ]
    print(table(header, rows))


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    print("The storage, rollout and GAE, 4 envs:\n")
    show(FILE, {"plain loop": plain, "flatroll": ours})
    print("\nREADME's program, 32 envs:\n")
    show(README, {"plain loop": plain, "flatroll": readme})


if __name__ == "__main__":
    main()
