"""PPO for continuous control, with the settings of CleanRL's ``ppo_continuous_action``.

``python -m flatroll run ppo_continuous --env HalfCheetah-v5`` trains on MuJoCo (``pip install "gymnasium[mujoco]"``),
``--env envpool:HalfCheetah-v4`` on envpool. The networks normalise observations, the estimator scales rewards, and the
rows stay raw. To resume a run that was stopped or killed, repeat the command.
"""

import argparse
from typing import Any

import torch
from gymnasium.wrappers.vector import ClipAction

from flatroll.estimators import GAE, ClipPPOLoss, RewardScale, update_step
from flatroll.examples.common import Run, make_env, parse
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum

OPTIONS = {
    "env": ("HalfCheetah-v5", "a Gymnasium id, or envpool:ID"),
    "frames": (1_000_000, "number of frames"),
    "num_envs": (1, "number of envs"),
    "steps": (2048, "rows per env in a batch"),
    "epochs": (10, "passes over a batch"),
    "minibatches": (32, "minibatches per pass"),
    "lr": (3e-4, "initial learning rate; it falls linearly to 0"),
    "gamma": (0.99, "discount"),
    "lmbda": (0.95, "lambda of GAE"),
    "clip": (0.2, "clipping range of probability ratios and values"),
    "entropy": (0.0, "weight of the entropy"),
    "max_grad_norm": (0.5, "maximum norm of the gradients"),
}
READ = ("observation", "action", "action_log_prob", "advantage", "value_target", "state_value")


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume where there is a checkpoint, evaluate; return the result."""
    torch.manual_seed(args.seed)
    env = ClipAction(RewardSum(make_env(args.env, args.num_envs, args.seed)))
    policy = actor(env, hidden=(64, 64), squash=False, device=args.device)
    value = critic(env, hidden=(64, 64), actor=policy, device=args.device)  # with the actor's statistics
    norm: Any = policy[0]
    scale = RewardScale(gamma=args.gamma, device=args.device)
    gae = GAE(gamma=args.gamma, lmbda=args.lmbda, value_network=value, reward_scale=scale)
    loss = ClipPPOLoss(
        policy,
        value,
        clip_epsilon=args.clip,
        entropy_bonus=args.entropy > 0,
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
        env,
        policy,
        frames_per_batch=rows,
        total_frames=total,
        device=args.device,
        seed=args.reset_seed,
    )
    test_env = ClipAction(make_env(args.env, args.episodes, args.seed + 1))
    run = Run(args, policy, test_env, collector, policy=loss, optimizer=optimizer, scale=scale)

    for batch in collector:
        frames = collector.frames
        optimizer.param_groups[0]["lr"] = args.lr * (1 - (frames - rows) / total)
        scale.update(batch)
        data = gae(batch).select(*READ)
        losses = step.epochs(data, epochs=args.epochs, minibatch=-(-rows // args.minibatches))[-1]
        norm.update(batch)  # after the epochs, because ratios compare with the policy that acted
        stop = run.note(batch, frames, lr=optimizer.param_groups[0]["lr"], **losses)
        run.save(frames, rows, now=stop or frames == total)
        if stop:
            break
    return run.finish(lambda: ClipAction(make_env(args.env, 1, render_mode="rgb_array")))


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    train(parse("ppo_continuous", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
