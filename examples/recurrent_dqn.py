"""Recurrent double DQN on CartPole with hidden velocities, trained on slices from a replay buffer.

``python -m flatroll run recurrent_dqn`` trains it. The parts are those of R2D2: the network also sees the last action,
runs over each slice from the state stored in its first row, uses the first rows only for burn-in, and has two heads,
for the state's value and the actions' advantages. Every 7,500 frames, the greedy policy plays 20 episodes in another
env, and the best weights are kept. To resume a run, repeat the command.
"""

import argparse
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import DQNLoss, SoftUpdate, update_step
from flatroll.examples import common
from flatroll.examples.last_action import LastAction
from flatroll.examples.recurrent_ppo import look, make_env
from flatroll.modules import q_network, set_epsilon
from flatroll.rollouts import Collector

OPTIONS = {
    "env": ("CartPole-v1", "a Gymnasium id, or envpool:ID"),
    "frames": (150_000, "number of frames"),
    "num_envs": (16, "number of envs"),
    "rows": (256, "rows per batch"),
    "start": (5_000, "frames before the first update"),
    "updates": (12, "updates per batch"),
    "capacity": (
        30_000,
        "capacity of the buffer, in rows; states in older rows come from outdated weights",
    ),
    "slice_len": (20, "maximum rows of a slice"),
    "burn_in": (4, "first rows of a slice, which only warm up the recurrent state"),
    "batch_size": (640, "rows per update"),
    "hidden": (64, "width of the networks"),
    "lr": (1e-3, "initial learning rate"),
    "last_lr": (0.05, "final learning rate as a fraction of the initial one; it falls linearly"),
    "gamma": (0.99, "discount"),
    "tau": (0.05, "update rate of the target network"),
    "explore": (20_000, "frames in which the probability of random actions falls from 1 to 0.01"),
    "eval_every": (7_500, "frames between two evaluations"),
    "save_every": (30_000, "frames between two checkpoints"),
    "compile": None,  # samples differ in their number of rows and would be recompiled each time
}


class Heads(nn.Module):
    """The value of the state, plus each action's advantage over the mean of all."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.value, self.advantage = (
            nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, size)) for size in (1, actions)
        )

    def forward(self, features: Tensor) -> Tensor:
        advantage: Tensor = self.advantage(features)
        value: Tensor = self.value(features)
        return value + advantage - advantage.mean(-1, keepdim=True)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume where there is a checkpoint, evaluate the best weights; return the result."""
    torch.manual_seed(args.seed)
    env = LastAction(make_env(args.env, args.num_envs, args.seed))
    body: Any = {"hidden": 2 * (args.hidden,), "activation": nn.Tanh, "recurrent": "gru", "norm": False}
    net = q_network(env, **body, epsilon=1.0)
    linear = net[2]  # computes action values; encoder and memory come before it
    net.module[2] = TensorDictModule(Heads(args.hidden, 2), linear.in_keys, linear.out_keys)
    net.to(args.device)
    total = -(-args.frames // args.rows) * args.rows
    collected: Any = {"frames_per_batch": args.rows, "total_frames": total, "device": args.device}
    collector = Collector(env, net, seed=args.reset_seed, **collected)
    # Slices may extend beyond an episode's end. Otherwise its last row, which has a lower reward, would be in
    # few slices.
    span = (False, args.slice_len - args.burn_in - 1)
    sampler = SliceSampler(slice_len=args.slice_len, by="start", span=span, fill=False)
    storage = LazyTensorStorage(args.capacity, compact_obs=True, device=args.device)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=args.batch_size)
    options: Any = {"loss_function": "smooth_l1", "burn_in": args.burn_in, "diagnostics": False}
    loss = DQNLoss(net, double_dqn=True, **options).make_value_estimator(gamma=args.gamma)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr, fused=True)
    precision = torch.bfloat16 if args.bfloat16 else None
    step = update_step(
        loss, optimizer, max_grad_norm=10.0, updater=SoftUpdate(loss, tau=args.tau), autocast=precision
    )
    test_env = LastAction(look(args.env, args.episodes, args.seed + 1))
    run = common.Run(args, net, test_env, collector, policy=loss, optimizer=optimizer, buffer=buffer)

    losses: dict[str, Any] = {}
    for batch in collector:
        frames = collector.frames
        buffer.extend(batch)
        optimizer.param_groups[0]["lr"] = args.lr * (1 - (1 - args.last_lr) * frames / total)
        for _ in range(args.updates if len(buffer) >= args.start else 0):
            losses = step(buffer.sample())
        epsilon = max(0.01, 1 - frames / args.explore)
        set_epsilon(net, epsilon)
        stop = run.note(batch, frames, lr=optimizer.param_groups[0]["lr"], epsilon=epsilon, **losses)
        run.save(frames, len(batch), now=stop or frames == total)
        if stop:
            break
    if run.check.best_weights is not None:
        net.load_state_dict(run.check.best_weights)
    return run.finish(
        lambda: LastAction(look(args.env, 1, render_mode="rgb_array")),
        episodes=5 * args.episodes,
    )


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    train(common.parse("recurrent_dqn", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
