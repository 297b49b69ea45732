"""Trains PPO and SAC at stable-baselines3's settings, with it and with flatroll, and compares the time.

``python -m benchmarks.peers.sb3 ppo sac --seeds 1 2 3``; without names all tasks. Both have the same
frames, layers and hyperparameters, and one torch thread. They take turns, seed by seed. A finished policy is judged
by the mean return of 20 episodes of its most probable actions.

"floor" is the same number of updates in plain torch, written by hand: one batch of random rows, no env, no buffer.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure.timing import table
from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.estimators import GAE, ClipPPOLoss, SACLoss, SoftUpdate
from flatroll.modules import actor as make_actor
from flatroll.modules import critic as make_critic
from flatroll.modules import q_network
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum, as_vector_env

EPISODES = 20  # of the mean return, while training and afterwards


class Task(NamedTuple):
    """An env, the settings under which both libraries learn it, and a return that counts as learned."""

    env: str
    frames: int
    num_envs: int
    target: float
    options: dict[str, Any]  # in stable-baselines3's words

    @property
    def updates(self) -> int:
        """Number of updates in a whole training."""
        how = self.options
        if "n_steps" not in how:
            return self.frames - int(how["learning_starts"])
        rows = self.num_envs * how["n_steps"]
        return int(-(-self.frames // rows) * how["n_epochs"] * -(-rows // how["batch_size"]))


#: "zoo": the settings that the peer's own collection of tuned hyperparameters has for the env; else the defaults of
#: its class. Falling settings are given as pairs (first, "falls") and reach 0 with the last frame.
TASKS = {
    "ppo": Task(
        "CartPole-v1",
        50_000,
        1,
        475.0,
        {
            "n_steps": 2048,
            "batch_size": 64,
            "n_epochs": 10,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "learning_rate": 3e-4,
            "clip_range": 0.2,
        },
    ),
    "ppo-zoo": Task(
        "CartPole-v1",
        100_000,
        8,
        475.0,
        {
            "n_steps": 32,
            "batch_size": 256,
            "n_epochs": 20,
            "gamma": 0.98,
            "gae_lambda": 0.8,
            "learning_rate": (1e-3, "falls"),
            "clip_range": (0.2, "falls"),
        },
    ),
    "sac": Task(
        "Pendulum-v1",
        4_000,
        1,
        -200.0,
        {"learning_rate": 3e-4, "batch_size": 256, "learning_starts": 100, "gamma": 0.99, "tau": 0.005},
    ),
}


READ = ("observation", "action", "action_log_prob", "advantage", "value_target", "state_value")


class Progress:
    """Episode returns as they come, and when the mean of the last 20 first reached the target."""

    def __init__(self, target: float) -> None:
        self.target, self.start = target, time.perf_counter()
        self.returns: list[float] = []
        self.reached = float("nan")  # s

    def add(self, returns: list[float]) -> None:
        for one in returns:
            self.returns.append(one)
            recent = self.returns[-EPISODES:]
            if self.reached != self.reached and len(recent) == EPISODES and np.mean(recent) >= self.target:
                self.reached = time.perf_counter() - self.start


Act = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def mean_return(name: str, act: Act) -> float:
    """Mean return of the first episode of each of 20 envs."""
    env = gym.make_vec(name, num_envs=EPISODES, vectorization_mode="sync")
    seen, _ = env.reset(seed=10_000)
    total, running = np.zeros(EPISODES), np.ones(EPISODES, np.bool_)
    while running.any():
        seen, reward, terminated, truncated, _ = env.step(act(seen))
        total += reward * running
        running &= ~(terminated | truncated)
    env.close()
    return float(total.mean())


def now(setting: Any, left: float) -> Any:
    """The value of a setting when the share ``left`` of the frames is still to come."""
    return setting[0] * left if isinstance(setting, tuple) else setting


# -- flatroll ------------------------------------------------------------------------------------------------------


def ppo_ours(task: Task, seed: int, progress: Progress) -> Act:
    """Train with PPO; return the greedy policy."""
    how, rows = task.options, task.num_envs * task.options["n_steps"]
    env: Any = RewardSum(as_vector_env(gym.make_vec(task.env, num_envs=task.num_envs)))
    actor = make_actor(env, norm=False)
    critic = make_critic(env, norm=False)
    total = -(-task.frames // rows) * rows
    parts: Any = actor
    logits: Any = nn.Sequential(parts[0].module, parts[1].module)

    def act(observation: Tensor) -> Tensor:  # a plain function costs less per step than a tensordict module
        probability: Tensor = logits(observation).softmax(-1)
        return probability.multinomial(1).squeeze(-1)

    collector = Collector(env, act, frames_per_batch=rows, total_frames=total, seed=seed)
    gae = GAE(gamma=how["gamma"], lmbda=how["gae_lambda"], value_network=critic)
    loss = ClipPPOLoss(
        actor,
        critic,
        entropy_bonus=False,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
        diagnostics=False,
    )
    weights = list(loss.parameters())
    optimizer = torch.optim.Adam(weights, lr=now(how["learning_rate"], 1.0), eps=1e-5, fused=True)
    for batch in collector:
        progress.add(batch["next", "episode_reward"][batch["next", "done"]].tolist())
        left = 1.0 - (collector.frames - rows) / total
        optimizer.param_groups[0]["lr"] = now(how["learning_rate"], left)
        loss.clip_epsilon = now(how["clip_range"], left)
        with torch.no_grad():  # of all rows at once: the weights are still those that acted
            batch["action_log_prob"] = actor.get_dist(batch).log_prob(batch["action"])
        data = gae(batch).select(*READ)
        for _ in range(how["n_epochs"]):
            for some in data[torch.randperm(rows)].split(how["batch_size"]):
                losses = loss(some)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(weights, 0.5, foreach=True)
                optimizer.step()
    collector.shutdown()
    return lambda seen: logits(torch.from_numpy(seen)).argmax(-1).numpy()


def sac_ours(task: Task, seed: int, progress: Progress) -> Act:
    """Train with SAC; return the greedy policy."""
    how = task.options
    env: Any = RewardSum(as_vector_env(gym.make_vec(task.env, num_envs=task.num_envs)))
    body: Any = {"hidden": (256, 256), "activation": nn.ReLU, "norm": False}
    actor, critic = make_actor(env, std="dependent", **body), q_network(env, **body)
    parts: Any = actor
    head: Any = nn.Sequential(parts[0].module, parts[1].module)  # means and deviations
    limit = float(env.single_action_space.high[0])

    def act(observation: Tensor) -> Tensor:  # a plain function costs less per step than a tensordict module
        return limit * torch.normal(*head(observation)).tanh()

    collector = Collector(
        env,
        act,
        frames_per_batch=1,
        total_frames=task.frames,
        init_random_frames=how["learning_starts"],
        seed=seed,
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(task.frames), batch_size=how["batch_size"])
    loss = SACLoss(actor, critic, loss_function="l2", diagnostics=False)
    loss.make_value_estimator(gamma=how["gamma"])
    optimizer = torch.optim.Adam(loss.parameters(), lr=how["learning_rate"], fused=True)
    updater = SoftUpdate(loss, tau=how["tau"])
    for batch in collector:
        progress.add(batch["next", "episode_reward"][batch["next", "done"]].tolist())
        buffer.extend(batch)
        if collector.frames <= how["learning_starts"]:
            continue
        losses = loss(buffer.sample())
        optimizer.zero_grad()
        (losses["loss_actor"] + 0.5 * losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        optimizer.step()
        updater.step()
    collector.shutdown()
    return lambda seen: limit * head(torch.from_numpy(seen))[0].tanh().numpy()


# -- stable-baselines3 ---------------------------------------------------------------------------------------------


def theirs(task: Task, seed: int, progress: Progress) -> Act:
    """Train with stable-baselines3; return the greedy policy."""
    peer = import_module("stable_baselines3")
    base: Any = import_module("stable_baselines3.common.callbacks").BaseCallback
    make: Any = import_module("stable_baselines3.common.env_util").make_vec_env

    class Returns(base):
        """Records the return of every episode."""

        def _on_step(self) -> bool:
            progress.add([float(info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info])
            return True

    def schedule(setting: Any) -> Any:
        return (lambda left: now(setting, left)) if isinstance(setting, tuple) else setting

    kind = peer.PPO if "n_steps" in task.options else peer.SAC
    options = {name: schedule(setting) for name, setting in task.options.items()}
    if kind is peer.SAC:
        options["buffer_size"] = task.frames
    env = make(task.env, n_envs=task.num_envs, seed=seed)
    model = kind("MlpPolicy", env, seed=seed, device="cpu", **options)
    progress.start = time.perf_counter()
    model.learn(task.frames, callback=Returns())
    return lambda seen: model.predict(seen, deterministic=True)[0]


# -- the updates alone, by hand ------------------------------------------------------------------------------------


def mlp(inputs: int, outputs: int, width: int, activation: type[nn.Module]) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        *(
            nn.Linear(inputs, width),
            activation(),
            nn.Linear(width, width),
            activation(),
            nn.Linear(width, outputs),
        )
    )


def ppo_floor(task: Task) -> Callable[[], None]:
    """One update of PPO in plain torch."""
    rows = task.options["batch_size"]
    policy, critic = mlp(4, 2, 64, nn.Tanh), mlp(4, 1, 64, nn.Tanh)
    weights = [*policy.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(weights, lr=1e-5, eps=1e-5, fused=True)
    seen, advantage, aim = torch.randn(rows, 4), torch.randn(rows), torch.randn(rows)
    action, old = torch.randint(2, (rows, 1)), torch.full((rows,), -0.7)

    def update() -> None:
        log_prob = policy(seen).log_softmax(-1).gather(-1, action).squeeze(-1)
        ratio = (log_prob - old).exp()
        scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        objective = torch.min(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled).mean()
        loss = 0.5 * F.mse_loss(critic(seen).squeeze(-1), aim) - objective
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 0.5, foreach=True)
        optimizer.step()

    return update


def sac_floor(task: Task) -> Callable[[], None]:
    """One update of SAC in plain torch."""
    rows = task.options["batch_size"]
    policy = mlp(3, 2, 256, nn.ReLU)
    critics = nn.ModuleList([mlp(4, 1, 256, nn.ReLU) for _ in range(2)])
    targets, log_alpha = deepcopy(critics).requires_grad_(False), torch.zeros((), requires_grad=True)
    weights = [*policy.parameters(), *critics.parameters(), log_alpha]
    optimizer = torch.optim.Adam(weights, lr=1e-5, fused=True)
    followed = [weight.detach() for weight in critics.parameters()]
    seen, action, after, reward = (torch.randn(rows, size) for size in (3, 1, 3, 1))

    def act(observation: Tensor) -> tuple[Tensor, Tensor]:
        loc, log_scale = policy(observation).chunk(2, -1)
        noise = torch.randn_like(loc)
        raw = loc + log_scale.clamp(-5.0, 2.0).exp() * noise
        slope = 2.0 * (0.6931 - raw - F.softplus(-2.0 * raw))  # log of the derivative of tanh
        return raw.tanh(), (-0.5 * noise.square() - log_scale - slope).sum(-1, keepdim=True)

    def least(networks: nn.ModuleList, observation: Tensor, by: Tensor) -> Tensor:
        read = torch.cat([observation, by], -1)
        first, second = (network(read) for network in networks)
        return torch.minimum(first, second)

    def update() -> None:
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            next_action, surprise = act(after)
            aim = reward + 0.99 * (least(targets, after, next_action) - alpha * surprise)
        read = torch.cat([seen, action], -1)
        of_critics = F.mse_loss(critics[0](read), aim) + F.mse_loss(critics[1](read), aim)
        new_action, surprise = act(seen)
        critics.requires_grad_(False)
        of_actor = (alpha * surprise - least(critics, seen, new_action)).mean()
        critics.requires_grad_(True)
        of_alpha = -(log_alpha * (surprise.detach() - 1.0)).mean()
        optimizer.zero_grad()
        loss: Tensor = 0.5 * of_critics + of_actor + of_alpha
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch._foreach_lerp_(list(targets.parameters()), followed, 0.005)  # pyright: ignore[reportPrivateImportUsage]

    return update


def floor(task: Task) -> float:
    """Processor seconds of all updates of a training, by the median of up to a hundred."""
    update = ppo_floor(task) if "n_steps" in task.options else sac_floor(task)
    times = []
    for _ in range(min(100, task.updates)):
        start = time.thread_time()
        update()
        times.append(time.thread_time() - start)
    return statistics.median(times) * task.updates


# -- all of it -----------------------------------------------------------------------------------------------------


def outcome(task: Task, seed: int, train: Callable[[Task, int, Progress], Act]) -> dict[str, float]:
    """Train once; seconds of the wall and the processor, and returns."""
    torch.manual_seed(seed)
    progress, processor = Progress(task.target), time.process_time()
    act = train(task, seed, progress)
    found = {"s": time.perf_counter() - progress.start, "cpu s": time.process_time() - processor}
    with torch.no_grad():
        found["return"] = mean_return(task.env, act)
    return {**found, "s to target": progress.reached}


def main(argv: list[str] | None = None) -> None:
    """Train all, seed by seed and in turn, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", help=f"any of {', '.join(TASKS)}; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--frames", type=int, help="instead of those of the task")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.tasks) - set(TASKS))
    if unknown:
        parser.error(f"no task named {', '.join(unknown)}; there are {', '.join(TASKS)}")
    torch.set_num_threads(1)
    import_module("stable_baselines3")  # with all that it imports, before either is timed
    rows = []
    for name in args.tasks or TASKS:
        task = TASKS[name]._replace(frames=args.frames or TASKS[name].frames)
        runs = {
            "flatroll": ppo_ours if "n_steps" in task.options else sac_ours,
            "stable-baselines3": theirs,
        }
        found: dict[str, list[dict[str, float]]] = {who: [] for who in runs}
        floors = []
        for seed in args.seeds:
            for who, train in runs.items():
                found[who].append(outcome(task, seed, train))
                shown = ", ".join(f"{key} {value:,.1f}" for key, value in found[who][-1].items())
                print(f"{name}, {who}, seed {seed}: {shown}", flush=True)
            floors.append(floor(task))
        for who, outcomes in found.items():
            rows.append(
                [name if who == "flatroll" else "", who, f"{task.frames:,}", *summary(outcomes, found)]
            )
        rows.append(
            ["", "floor", f"{task.updates:,} updates", "", "", f"{statistics.median(floors):,.1f}", "", ""]
        )
    header = [
        "task",
        "",
        "frames",
        "s",
        "of the peer's",
        "processor s",
        "of the peer's",
        "s to target",
        "returns",
    ]
    print("\n" + table(header, rows))


def summary(outcomes: list[dict[str, float]], found: dict[str, list[dict[str, float]]]) -> list[str]:
    """Cells of the table: medians over the seeds; ratios to the peer are of the same seed's turns."""
    peers, cells = found["stable-baselines3"], []
    for key in ("s", "cpu s"):
        ratio = statistics.median(a[key] / b[key] for a, b in zip(outcomes, peers, strict=True))
        cells += [f"{statistics.median(run[key] for run in outcomes):,.1f}", f"{ratio:.2f}"]
    reached = [run["s to target"] for run in outcomes]
    shown = ", ".join("-" if s != s else f"{s:,.0f}" for s in reached)
    return [*cells, shown, ", ".join(f"{run['return']:,.0f}" for run in outcomes)]


if __name__ == "__main__":
    main()
