"""Recurrent PPO, by default on CartPole with hidden velocities: all parts of flatroll, from env to pictures.

``python -m flatroll run recurrent_ppo`` trains it, ``python -m flatroll demo`` also draws pictures. Without velocities
the policy needs memory: with the GRU the mean return exceeds 450 (of 500), without it (``--memoryless``) it stays near
50. For tasks of POPGym (``pip install popgym``), use ``--env popgym:popgym-RepeatPreviousEasy-v0`` and so on. To resume
a run that was stopped, repeat the command.
"""

import argparse
import time
from collections import defaultdict
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tqdm.auto import tqdm

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss, update_step
from flatroll.examples import common
from flatroll.layout import run_starts
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum

OPTIONS = {
    "env": ("CartPole-v1", "a Gymnasium id, or envpool:ID; for CartPole, velocities are hidden"),
    "frames": (1_000_000, "maximum number of frames"),
    "target": (450.0, "stop when the mean return of 100 training episodes reaches this"),
    "memoryless": (False, "use layers of the same sizes without the GRU"),
    "quiet": (False, "no progress bar"),
    "num_envs": (64, "environments"),
    "steps": (128, "rows per env in a batch"),
    "epochs": (4, "passes over a batch, on average"),
    "minibatches": (4, "minibatches per pass"),
    "gamma": (0.99, "discount"),
    "scale": (0.1, "scale of the rewards, for values of about 1 to 10"),
    "hidden": (64, "width of the networks"),
    "lr": (3e-3, "initial learning rate; it falls linearly"),
    "seed": (0, "seed of weights, actions and environments"),
    "compile": None,  # samples differ in their number of rows and would be recompiled each time
}


class HideVelocities(gym.vector.VectorObservationWrapper):
    """Shows the positions of cart and pole, as shares of their limits, without the velocities."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.single_observation_space = gym.spaces.Box(-10, 10, (2,))
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, env.num_envs)

    def observations(self, observations: Any) -> Any:
        return observations[:, ::2] / np.array([2.4, 0.21], np.float32)


def look(name: str, num_envs: int, seed: int | None = None, **options: Any) -> Any:
    """An env by its name; CartPole without its velocities."""
    env = common.make_env(name, num_envs, seed, **options)
    return HideVelocities(env) if "CartPole" in name else env


def make_env(name: str, num_envs: int, seed: int, scale: float = 0.1) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Create the training env, which records returns and scales rewards."""
    env = RewardSum(look(name, num_envs, seed))
    return gym.wrappers.vector.TransformReward(env, lambda reward: scale * reward)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Collect, estimate, store, draw slices, update; return the data of the report."""
    torch.manual_seed(args.seed)
    env = make_env(args.env, args.num_envs, args.seed, args.scale)
    body: Any = {"hidden": 2 * (args.hidden,), "recurrent": None if args.memoryless else "gru", "norm": False}
    policy = actor(env, **body, device=args.device)
    # Shares the actor's body, including the memory.
    value = critic(env, actor=policy, shared=True, device=args.device)
    rows = args.num_envs * args.steps
    total = -(-args.frames // rows) * rows
    collected: Any = {"frames_per_batch": rows, "total_frames": total, "compact_obs": True}
    collector = Collector(env, policy, seed=args.reset_seed, device=args.device, **collected)
    gae = GAE(gamma=args.gamma, lmbda=0.95, value_network=value, shifted=True)
    loss = ClipPPOLoss(policy, value[-1], critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True)
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr, eps=1e-5)
    precision = torch.bfloat16 if args.bfloat16 else None
    step = update_step(loss, optimizer, max_grad_norm=0.5, autocast=precision)
    sampler = SliceSampler(slice_len=args.steps, fill=False)  # whole runs of any length
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows, device=args.device), sampler=sampler)
    test_env = look(args.env, args.episodes, args.seed + 1)
    run = common.Run(args, policy, test_env, collector, policy=loss, optimizer=optimizer, buffer=buffer)
    log = run.log
    curve: list[tuple[int, float]] = []
    seconds: dict[str, float] = defaultdict(float)
    first = last = None  # batches
    losses: Any = {}
    clock = start = time.perf_counter()

    def spent(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name] += now - clock
        clock = now

    with tqdm(total=total, unit="frame", unit_scale=True, disable=args.quiet) as bar:
        bar.set_postfix_str("first batch; kernels are compiled, once")
        for batch in collector:
            spent("collect")
            gae(batch, final=collector.final)  # enters recurrent mode by itself, like the loss
            spent("advantages")
            buffer.extend(batch)
            # A slice as long as a window is a whole run: sampling runs uniformly gives every row the same
            # probability.
            share = max(1, int(run_starts(batch).sum()) // args.minibatches)
            for _ in range(args.minibatches * args.epochs):
                sample = buffer.sample(args.steps * share)
                spent("sample slices")
                losses = step(sample)
                spent("update")
            frames = collector.frames
            optimizer.param_groups[0]["lr"] = args.lr * (1 - frames / (1.02 * total))
            first, last = batch if first is None else first, batch
            stop = run.note(batch, frames, lr=optimizer.param_groups[0]["lr"], **losses)
            curve.append((frames, float(np.mean(log.returns or [0.0]))))
            bar.update(rows)
            bar.set_postfix_str(f"return {curve[-1][1]:.0f}, {frames / log.elapsed():,.0f} steps/s")
            stop = stop or (len(log.returns) >= 100 and curve[-1][1] >= args.target)
            run.save(frames, rows, now=stop or frames == total)
            spent("rest")
            if stop:
                break
    report = {"curve": curve, "first": first, "last": last, "seconds": dict(seconds), "wall": clock - start}
    return run.finish(lambda: look(args.env, 1, render_mode="rgb_array")) | report


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    train(common.parse("recurrent_ppo", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
