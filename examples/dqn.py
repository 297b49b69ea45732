"""DQN on vector observations, with the settings of CleanRL's ``dqn``.

``python -m flatroll run dqn`` trains on CartPole. It samples single transitions from a replay buffer, which is part of
the checkpoint; each save writes only new rows. To resume a run that was stopped or killed, repeat the command.
"""

import argparse
from typing import Any

import torch

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.estimators import DQNLoss, HardUpdate, update_step
from flatroll.examples.common import Run, make_env, parse
from flatroll.modules import q_network, set_epsilon
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum

OPTIONS = {
    "env": ("CartPole-v1", "a Gymnasium id, or envpool:ID"),
    "frames": (500_000, "number of frames"),
    "num_envs": (1, "number of envs"),
    "start": (10_000, "frames before the first update"),
    "train_every": (10, "frames between two updates"),
    "target_every": (500, "frames between two copies of the weights to the target network"),
    "capacity": (10_000, "capacity of the buffer, in rows"),
    "batch_size": (128, "rows per update"),
    "lr": (2.5e-4, "initial learning rate"),
    "last_lr": (1.0, "final learning rate as a fraction of the initial one; it falls linearly"),
    "gamma": (0.99, "discount"),
    "last_epsilon": (0.05, "final probability of random actions"),
    "exploration": (0.5, "fraction of the frames in which that probability falls from 1"),
    "double": (False, "double DQN: the network chooses the next action, the target network evaluates it"),
}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume where there is a checkpoint, evaluate; return the result."""
    torch.manual_seed(args.seed)
    env = RewardSum(make_env(args.env, args.num_envs, args.seed))
    net = q_network(env, hidden=(120, 84), norm=False, epsilon=1.0, device=args.device)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(args.capacity, device=args.device), batch_size=args.batch_size
    )
    loss = DQNLoss(net, loss_function="l2", double_dqn=args.double, diagnostics=False)
    loss.make_value_estimator(gamma=args.gamma)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr, fused=True)
    target = HardUpdate(loss, value_network_update_interval=args.target_every // args.train_every)
    precision = torch.bfloat16 if args.bfloat16 else None
    step = update_step(loss, optimizer, updater=target, compile=args.compile, autocast=precision)

    total = -(-args.frames // args.train_every) * args.train_every
    collector = Collector(
        env,
        net,
        frames_per_batch=args.train_every,
        total_frames=total,
        device=args.device,
        seed=args.reset_seed,
    )
    test_env = make_env(args.env, args.episodes, args.seed + 1)
    run = Run(args, net, test_env, collector, policy=loss, optimizer=optimizer, target=target, buffer=buffer)

    losses: dict[str, Any] = {}
    for batch in collector:
        frames = collector.frames
        buffer.extend(batch)
        optimizer.param_groups[0]["lr"] = args.lr * (1 - (1 - args.last_lr) * frames / total)
        if frames >= args.start:
            losses = step(buffer.sample())
        epsilon = max(args.last_epsilon, 1 - (1 - args.last_epsilon) * frames / (args.exploration * total))
        set_epsilon(net, epsilon)
        stop = run.note(batch, frames, lr=optimizer.param_groups[0]["lr"], epsilon=epsilon, **losses)
        run.save(frames, len(batch), now=stop or frames == total)
        if stop:
            break
    return run.finish(lambda: make_env(args.env, 1, render_mode="rgb_array"))


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    train(parse("dqn", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
