"""PPO with a second value head for new observations: random network distillation (RND), on a sparse task.

``python -m flatroll run rnd_ppo`` trains in four rooms in a row, with the only reward at the end of the last one.
``--intrinsic 0`` is PPO without RND. ``--env`` takes any other env. To resume a run, repeat the command.
"""

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from flatroll.estimators import GAE, ClipPPOLoss, LossModule, update_step
from flatroll.examples.common import Run, make_env, parse
from flatroll.modules import RND, actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum

OPTIONS = {
    "env": ("flatroll/FourRooms-v0", "a Gymnasium id, or envpool:ID"),
    "frames": (100_000, "number of frames"),
    "num_envs": (16, "number of envs"),
    "steps": (128, "rows per env in a batch"),
    "epochs": (4, "passes over a batch"),
    "minibatches": (4, "minibatches per pass"),
    "lr": (1e-3, "learning rate"),
    "gamma": (0.99, "discount of the env's rewards"),
    "intrinsic_gamma": (0.99, "discount of the rewards for new observations"),
    "lmbda": (0.95, "lambda of GAE"),
    "extrinsic": (2.0, "weight of the advantages of the env's rewards"),
    "intrinsic": (1.0, "weight of the advantages of new observations; 0: without RND"),
    "proportion": (0.5, "share of the rows that the predictor learns from"),
    "entropy": (0.01, "weight of the entropy"),
    "max_grad_norm": (0.5, "maximum norm of the gradients"),
    "film": None,
}


class FourRooms(gym.Env[Any, Any]):
    """Four rooms of 5 x 5 places in a row, with doors: the last corner of the last room gives 1; 100 steps."""

    size = np.array([5, 23])
    moves = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])
    observation_space: spaces.Space[Any] = spaces.Box(0, 1, (5, 23), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(4)

    def __init__(self) -> None:
        self.walls = np.zeros(self.size, bool)
        self.walls[:, 5::6] = True
        self.walls[[0, 4, 0], [5, 11, 17]] = False

    def seen(self) -> Any:
        """The observation: 1 at the place where the agent is."""
        place = np.zeros(self.size, np.float32)
        place[tuple(self.at)] = 1
        return place

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.at = np.array([2, 0])
        self.left = 100
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        to = (self.at + self.moves[action]).clip(0, self.size - 1)
        if not self.walls[tuple(to)]:
            self.at = to
        self.left -= 1
        found = bool((self.at == self.size - 1).all())
        return self.seen(), float(found), found, self.left == 0, {}


gym.register("flatroll/FourRooms-v0", f"{__name__}:FourRooms")


class TwoHeadsLoss(LossModule):
    """PPO's losses, the squared error of a second critic, and the loss of RND."""

    def __init__(self, ppo: ClipPPOLoss, inner: Any, rnd: RND) -> None:
        super().__init__()
        self.ppo = ppo
        self.inner = inner
        self.rnd = rnd
        self.in_keys = [*ppo.in_keys, *rnd.in_keys, "intrinsic_target"]

    def forward(self, batch: TensorDictBase) -> TensorDict:
        losses: TensorDict = self.ppo(batch)
        value = self.inner(batch.select(*self.inner.in_keys))["intrinsic_value"]
        losses["loss_intrinsic_critic"] = 0.5 * (value - batch["intrinsic_target"]).square().mean()
        losses["loss_rnd"] = self.rnd.loss(batch)
        return losses


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume where there is a checkpoint, evaluate; return the result."""
    torch.manual_seed(args.seed)
    env = RewardSum(make_env(args.env, args.num_envs, args.seed))
    options: Any = {"norm": False, "device": args.device}
    policy = actor(env, **options)
    value = critic(env, **options)
    inner = critic(env, out_key="intrinsic_value", **options)
    rnd = RND(env, gamma=args.intrinsic_gamma, proportion=args.proportion).to(args.device)

    gae = GAE(gamma=args.gamma, lmbda=args.lmbda, value_network=value)
    inner_gae = GAE(gamma=args.intrinsic_gamma, lmbda=args.lmbda, value_network=inner, episodic=False)
    inner_gae.set_keys(reward="intrinsic_reward", value="intrinsic_value")
    inner_gae.set_keys(advantage="intrinsic_advantage", value_target="intrinsic_target")

    options = {"entropy_coeff": args.entropy, "critic_coeff": 0.5}
    ppo = ClipPPOLoss(policy, value, normalize_advantage=True, diagnostics=False, **options)
    loss = TwoHeadsLoss(ppo, inner, rnd)
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr, eps=1e-5, fused=True)
    precision = torch.bfloat16 if args.bfloat16 else None
    step = update_step(
        loss, optimizer, max_grad_norm=args.max_grad_norm, compile=args.compile, autocast=precision
    )

    rows = args.steps * args.num_envs
    total = -(-args.frames // rows) * rows
    collected: Any = {"frames_per_batch": rows, "total_frames": total, "device": args.device}
    collector = Collector(env, policy, seed=args.reset_seed, track_envs=True, **collected)
    test_env = make_env(args.env, args.episodes, args.seed + 1)
    run = Run(args, policy, test_env, collector, policy=loss, optimizer=optimizer)

    for batch in collector:
        frames = collector.frames
        rnd.update(batch)
        inner_gae(gae(batch))
        extrinsic = args.extrinsic * batch["advantage"]
        batch["advantage"] = extrinsic + args.intrinsic * batch["intrinsic_advantage"]
        losses = step.epochs(batch, epochs=args.epochs, minibatch=-(-rows // args.minibatches))[-1]
        stop = run.note(batch, frames, lr=args.lr, **losses)
        run.save(frames, rows, now=stop or frames == total)
        if stop:
            break
    return run.finish()


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    train(parse("rnd_ppo", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
