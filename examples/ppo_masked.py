"""PPO with a Dict observation, a MultiDiscrete action and masks of legal actions.

``python -m flatroll run ppo_masked`` trains a robot in a warehouse, which chooses in each step a direction, and whether
to pick up. Walls and empty cells make choices illegal. The networks read the mask, so no illegal action is ever
sampled. ``--env`` takes any other env whose Dict observation has an ``"action_mask"``. To resume a run, repeat the
command.
"""

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from flatroll.estimators import GAE, ClipPPOLoss, update_step
from flatroll.examples.common import Run, make_env, parse
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum

OPTIONS = {
    "env": ("flatroll/Warehouse-v0", "a Gymnasium id, or envpool:ID"),
    "frames": (200_000, "number of frames"),
    "num_envs": (16, "number of envs"),
    "steps": (64, "rows per env in a batch"),
    "epochs": (4, "passes over a batch"),
    "minibatches": (4, "minibatches per pass"),
    "lr": (1e-3, "initial learning rate; it falls linearly to 0"),
    "gamma": (0.95, "discount"),
    "lmbda": (0.95, "lambda of GAE"),
    "clip": (0.2, "clipping range of probability ratios"),
    "entropy": (0.01, "weight of the entropy, over legal actions"),
    "max_grad_norm": (0.5, "maximum norm of the gradients"),
}


class Warehouse(gym.Env[Any, Any]):
    """A floor of 5 x 5 cells with one parcel at a time: picking it up gives 1, and the next appears; 50 steps."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    moves = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])
    observation_space: spaces.Space[Any] = spaces.Dict(
        {
            "robot": spaces.MultiDiscrete([5, 5]),
            "parcel": spaces.MultiDiscrete([5, 5]),
            "action_mask": spaces.MultiBinary(4 + 2),  # 4 directions, leave and pick up
        }
    )
    action_space: spaces.Space[Any] = spaces.MultiDiscrete([4, 2])

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def seen(self) -> dict[str, Any]:
        """The observation."""
        to = self.robot + self.moves
        legal = [*((to >= 0) & (to < 5)).all(1), True, (self.robot == self.parcel).all()]
        mask = np.array(legal, np.int8)
        return {"robot": self.robot.copy(), "parcel": self.parcel.copy(), "action_mask": mask}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.robot, self.parcel = self.np_random.integers(5, size=(2, 2))
        self.left = 50
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        direction, picks = action
        if not self.seen()["action_mask"][[direction, 4 + picks]].all():
            raise ValueError(f"action {action} is illegal")
        if picks:
            self.parcel = self.np_random.integers(5, size=2)
        self.robot = self.robot + self.moves[direction]
        self.left -= 1
        return self.seen(), float(picks), False, self.left == 0, {}

    def render(self) -> Any:
        floor = np.zeros((5, 5, 3), np.uint8)
        floor[tuple(self.parcel)], floor[tuple(self.robot)] = (255, 200, 0), (0, 160, 255)
        return floor.repeat(16, 0).repeat(16, 1)


gym.register("flatroll/Warehouse-v0", f"{__name__}:Warehouse")


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume where there is a checkpoint, evaluate; return the result."""
    torch.manual_seed(args.seed)
    env = RewardSum(make_env(args.env, args.num_envs, args.seed))
    policy = actor(env, device=args.device)
    value = critic(env, actor=policy, device=args.device)
    gae = GAE(gamma=args.gamma, lmbda=args.lmbda, value_network=value)
    options: Any = {"clip_epsilon": args.clip, "entropy_coeff": args.entropy, "critic_coeff": 0.5}
    loss = ClipPPOLoss(policy, value, normalize_advantage=True, diagnostics=False, **options)
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr, eps=1e-5, fused=True)
    precision = torch.bfloat16 if args.bfloat16 else None
    step = update_step(
        loss, optimizer, max_grad_norm=args.max_grad_norm, compile=args.compile, autocast=precision
    )

    rows = args.steps * args.num_envs
    total = -(-args.frames // rows) * rows
    collected: Any = {"frames_per_batch": rows, "total_frames": total, "device": args.device}
    collector = Collector(env, policy, seed=args.reset_seed, **collected)
    test_env = make_env(args.env, args.episodes, args.seed + 1)
    run = Run(args, policy, test_env, collector, policy=loss, optimizer=optimizer)

    for batch in collector:
        frames = collector.frames
        optimizer.param_groups[0]["lr"] = args.lr * (1 - (frames - rows) / total)
        data = gae(batch).exclude("next")
        losses = step.epochs(data, epochs=args.epochs, minibatch=-(-rows // args.minibatches))[-1]
        stop = run.note(batch, frames, lr=optimizer.param_groups[0]["lr"], **losses)
        run.save(frames, rows, now=stop or frames == total)
        if stop:
            break
    return run.finish(lambda: make_env(args.env, 1, render_mode="rgb_array"))


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    train(parse("ppo_masked", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
