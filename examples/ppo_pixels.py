"""PPO from pixels, with the settings of CleanRL's ``ppo_atari_envpool``: a CNN on four stacked frames.

``python -m flatroll run ppo_pixels`` trains on envpool's Pong (``pip install "flatroll[envpool]"``), ``--env
ALE/Pong-v5`` on Gymnasium's (``pip install "gymnasium[atari]" opencv-python``). Actor and critic share the CNN. A batch
holds each stack once: next observations are read from the following row. To resume a run that was stopped or killed,
repeat the command.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from gymnasium.wrappers.vector import TransformReward
from torch import nn

from flatroll.estimators import GAE, ClipPPOLoss, update_step
from flatroll.examples.common import Run, make_env, parse
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum

OPTIONS = {
    "env": ("envpool:Pong-v5", "envpool:ID, or the Gymnasium id of an Atari game"),
    "frames": (10_000_000, "number of rows; each is four frames of the game"),
    "num_envs": (8, "number of envs"),
    "steps": (128, "rows per env in a batch"),
    "epochs": (4, "passes over a batch"),
    "minibatches": (4, "minibatches per pass"),
    "lr": (2.5e-4, "initial learning rate; it falls linearly to 0"),
    "gamma": (0.99, "discount"),
    "lmbda": (0.95, "lambda of GAE"),
    "clip": (0.1, "clipping range of probability ratios and values"),
    "entropy": (0.01, "weight of the entropy"),
    "max_grad_norm": (0.5, "maximum norm of the gradients"),
    "cnn": ("small", "small (Mnih et al.) or impala"),
    "max_steps": (27_000, "an evaluation cuts episodes after this many steps"),
    "episodes": (8, "episodes per evaluation, with the most probable actions"),
    "save_every": (500_000, "frames between two checkpoints"),
    "eval_every": (500_000, "frames between two evaluations"),
}
READ = ("observation", "action", "action_log_prob", "advantage", "value_target", "state_value")


def make_frames(name: str, num_envs: int, seed: int | None = None, **options: Any) -> Any:
    """Create envs that show four grey frames ``[4, 84, 84]``, as envpool's do by themselves."""
    if not name.startswith("envpool:") or "render_mode" in options:
        layers = [partial(AtariPreprocessing, noop_max=30), partial(FrameStackObservation, stack_size=4)]
        options |= {"wrappers": layers, "frameskip": 1}
    return make_env(name, num_envs, seed, **options)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume where there is a checkpoint, evaluate; return the result."""
    torch.manual_seed(args.seed)
    env = RewardSum(make_frames(args.env, args.num_envs, args.seed))
    body: Any = {"hidden": (512,), "activation": nn.ReLU, "cnn": args.cnn, "device": args.device}
    policy = actor(env, **body)
    value = critic(env, actor=policy, shared=True, device=args.device)
    gae = GAE(gamma=args.gamma, lmbda=args.lmbda, value_network=value)
    loss = ClipPPOLoss(
        policy,
        value[-1],  # only the head: it reads the features computed by the actor
        clip_epsilon=args.clip,
        entropy_coeff=args.entropy,
        critic_coeff=0.25,
        loss_critic_type="l2",
        clip_value=args.clip,
        normalize_advantage=True,
        diagnostics=False,
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr, eps=1e-5, fused=True)
    precision = torch.bfloat16 if args.bfloat16 else None
    step = update_step(
        loss, optimizer, max_grad_norm=args.max_grad_norm, compile=args.compile, autocast=precision
    )

    rows = args.steps * args.num_envs
    total = -(-args.frames // rows) * rows
    collector = Collector(
        TransformReward(env, np.sign),  # only for learning; the log has the game's score
        policy,
        frames_per_batch=rows,
        total_frames=total,
        compact_obs=True,
        device=args.device,
        seed=args.reset_seed,
    )
    test_env = make_frames(args.env, args.episodes, args.seed + 1, max_episode_steps=args.max_steps)
    run = Run(args, policy, test_env, collector, policy=loss, optimizer=optimizer)

    for batch in collector:
        frames = collector.frames
        optimizer.param_groups[0]["lr"] = args.lr * (1 - (frames - rows) / total)
        data = gae(batch, final=collector.final).select(*READ)
        losses = step.epochs(data, epochs=args.epochs, minibatch=-(-rows // args.minibatches))[-1]
        stop = run.note(batch, frames, lr=optimizer.param_groups[0]["lr"], **losses)
        run.save(frames, rows, now=stop or frames == total)
        if stop:
            break
    return run.finish(lambda: make_frames(args.env, 1, render_mode="rgb_array"))


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    train(parse("ppo_pixels", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
