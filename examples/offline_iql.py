"""Implicit Q-learning from a Minari data set; an env is used only for the evaluation.

``python -m flatroll run offline_iql`` creates a data set of Pendulum with a controller that takes 60 % random actions,
stores it as a buffer on disk, and learns a better policy from it. ``--data`` uses your own set for the same ``--env``.
The loss is TorchRL's, on flat rows (``pip install "flatroll[minari,torchrl]"``). Frames are updates in this program. To
resume a run that was stopped or killed, repeat the command.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from gymnasium.wrappers.vector import ClipAction
from torch import Tensor, nn

from flatroll.datasets import MinariExperienceReplay
from flatroll.examples.common import Run, make_env, parse
from flatroll.export import export
from flatroll.modules import actor, critic, q_network
from flatroll.rollouts import Collector
from flatroll.trainers.versions import trainer_imports

OPTIONS = {
    "env": ("Pendulum-v1", "a Gymnasium id, for the evaluation"),
    "data": ("", "name of a Minari data set (default: one of Pendulum, created by this program)"),
    "episodes_made": (200, "episodes of the created data set"),
    "frames": (5_000, "number of updates"),
    "batch_size": (256, "rows per update"),
    "lr": (1e-3, "learning rate"),
    "gamma": (0.99, "discount"),
    "expectile": (
        0.8,
        "expectile of the values; near 1, the values are those of the best actions in the set",
    ),
    "temperature": (3.0, "weight of better actions, in units of the deviation of the rewards"),
    "tau": (0.005, "update rate of the target networks"),
    "save_every": (1_000, "updates between two checkpoints"),
    "eval_every": (500, "updates between two evaluations"),
}


def swing_up(seen: Tensor) -> Tensor:
    """Swing the pendulum up and balance it; six in ten actions are random instead."""
    cos, sin, speed = seen.unbind(-1)
    lacking = 5.0 - (speed.square() / 6.0 + 5.0 * cos)
    hold = -(8.0 * torch.atan2(sin, cos) + 2.0 * speed)
    action = torch.where(cos > 0.9, hold, 2.0 * speed * lacking).clamp(-2.0, 2.0)
    drawn = 4.0 * torch.rand_like(action) - 2.0
    return torch.where(torch.rand_like(action) < 0.6, drawn, action).unsqueeze(-1)


def make_set(args: argparse.Namespace, folder: Path) -> Path:
    """Write whole episodes of `swing_up` as a Minari data set in a folder; return its path."""
    env = make_env("Pendulum-v1", args.episodes_made)
    batch = Collector(env, swing_up, frames_per_batch=200 * args.episodes_made, seed=args.seed).rollout()
    spaces = {name: getattr(env, f"single_{name}") for name in ("observation_space", "action_space")}
    export(batch, folder / "data", "minari", progress=False, **spaces)
    return folder / "data"


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume where there is a checkpoint, evaluate; return the result."""
    with warnings.catch_warnings(action="ignore"), trainer_imports("torchrl", "0.14", "0.15", "torchrl"):
        from torchrl.objectives import IQLLoss, SoftUpdate  # warns about missing optional packages
    torch.manual_seed(args.seed)
    made: Any = {} if args.data else {"fetch": lambda name, folder: make_set(args, folder)}
    data = MinariExperienceReplay(
        args.data or "pendulum/noisy-v0", args.batch_size, root=args.folder / "rows", progress=False, **made
    )
    rows = data[:]  # the whole data set, for its returns
    rewards, ids = rows["next", "reward"].squeeze(-1), rows["collector", "traj_ids"]
    returns = torch.zeros(int(ids.max()) + 1).index_add_(0, ids, rewards).tolist()
    deviation = rewards.std()
    env = ClipAction(make_env(args.env, args.episodes))
    body: Any = {"hidden": (64, 64), "activation": nn.ReLU, "norm": False, "device": args.device}
    policy = actor(env, squash=False, **body)
    networks = policy, q_network(env, **body), critic(env, **body)
    loss = IQLLoss(*networks, expectile=args.expectile, temperature=args.temperature)
    loss.make_value_estimator(gamma=args.gamma)
    target = SoftUpdate(loss, tau=args.tau)
    compute: Any = torch.compile(loss) if args.compile else loss
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr, fused=True)

    args.test_seed = args.seed  # no training env uses it
    run = Run(args, policy, env, policy=loss, optimizer=optimizer)
    run.log.returns = run.log.returns or returns

    kind = torch.device(args.device).type
    while run.log.frames < args.frames:
        rows = data.sample().to(args.device)
        rows["next", "reward"] /= deviation
        with torch.autocast(kind, torch.bfloat16, args.bfloat16):
            losses = compute(rows)
        optimizer.zero_grad()
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_value"]).backward()
        optimizer.step()
        target.step()
        update = run.log.frames + 1
        stop = run.note(None, update, lr=args.lr, **losses)
        run.save(update, 1, now=stop or update == args.frames)
        if stop:
            break
    return run.finish(lambda: ClipAction(make_env(args.env, 1, render_mode="rgb_array")))


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    train(parse("offline_iql", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
