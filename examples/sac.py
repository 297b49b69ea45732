"""Soft actor-critic for continuous control, trained on single transitions from a replay buffer.

``python -m flatroll run sac`` trains on Pendulum. For MuJoCo, use the settings of CleanRL's ``sac_continuous_action``:
``--env HalfCheetah-v5 --num-envs 1 --lr 3e-4 --start 5000 --frames 1000000``. One Adam optimizer minimises the sum of
the three losses, because each loss has gradients only for its own networks. To resume a run that was stopped or killed,
repeat the command.
"""

import argparse
from typing import Any

import torch
from torch import nn

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.estimators import SACLoss, SoftUpdate, update_step
from flatroll.examples.common import Run, make_env, parse
from flatroll.modules import actor, q_network
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum

OPTIONS = {
    "env": ("Pendulum-v1", "a Gymnasium id, or envpool:ID"),
    "frames": (20_000, "number of frames"),
    "num_envs": (4, "number of envs; there is one update per row"),
    "start": (1_000, "frames with random actions, before the first update"),
    "capacity": (1_000_000, "capacity of the buffer, in rows"),
    "batch_size": (256, "rows per update"),
    "lr": (1e-3, "initial learning rate of actor and temperature"),
    "q_lr": (1e-3, "initial learning rate of the critics"),
    "last_lr": (1.0, "final learning rates as a fraction of the initial ones; they fall linearly"),
    "gamma": (0.99, "discount"),
    "norm": (False, "the networks normalise observations by their running mean and deviation"),
    "tau": (0.005, "update rate of the target networks"),
    "save_every": (10_000, "frames between two checkpoints"),
    "eval_every": (10_000, "frames between two evaluations"),
}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume where there is a checkpoint, evaluate; return the result."""
    torch.manual_seed(args.seed)
    env = RewardSum(make_env(args.env, args.num_envs, args.seed))
    body: Any = {"hidden": (256, 256), "activation": nn.ReLU, "norm": args.norm, "device": args.device}
    policy = actor(env, std="dependent", **body)  # tanh squashes actions into the bounds of the space
    critic: Any = q_network(env, **body)
    norm: Any = policy[0]
    if args.norm:
        critic[0].statistics = norm.statistics  # one update serves both; rows in the buffer stay unnormalised
    loss = SACLoss(policy, critic, loss_function="l2", diagnostics=False)
    loss.make_value_estimator(gamma=args.gamma)
    groups: Any = [
        {"params": [*policy.parameters(), loss.log_alpha], "lr": args.lr},
        {"params": loss.qvalue_network.parameters(), "lr": args.q_lr},
    ]
    optimizer = torch.optim.Adam(groups, fused=True)
    precision = torch.bfloat16 if args.bfloat16 else None
    step = update_step(
        loss, optimizer, updater=SoftUpdate(loss, tau=args.tau), compile=args.compile, autocast=precision
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(args.capacity, device=args.device), batch_size=args.batch_size
    )

    total = -(-args.frames // args.num_envs) * args.num_envs
    collector = Collector(
        env,
        policy.select_out_keys("action"),
        frames_per_batch=args.num_envs,
        total_frames=total,
        init_random_frames=args.start,
        device=args.device,
        seed=args.reset_seed,
    )
    test_env = make_env(args.env, args.episodes, args.seed + 1)
    run = Run(args, policy, test_env, collector, policy=loss, optimizer=optimizer, buffer=buffer)

    losses: dict[str, Any] = {}
    for batch in collector:
        frames = collector.frames
        buffer.extend(batch)
        if args.norm:
            norm.update(batch)
        left = 1 - (1 - args.last_lr) * frames / total
        for group, first in zip(optimizer.param_groups, (args.lr, args.q_lr), strict=True):
            group["lr"] = left * first
        for _ in range(len(batch) if frames >= args.start else 0):
            losses = step(buffer.sample())
        stop = run.note(batch, frames, lr=left * args.lr, **losses)
        run.save(frames, len(batch), now=stop or frames == total)
        if stop:
            break
    return run.finish(lambda: make_env(args.env, 1, render_mode="rgb_array"))


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    train(parse("sac", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
