"""Recurrent double DQN on CartPole with hidden velocities, trained on slices from a replay buffer.

``python -m flatroll.examples.recurrent_dqn`` trains it. The network and its delayed copy run once over each slice,
from the state stored in its first row; the first rows of a slice only warm the memory up.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from tqdm.auto import tqdm

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import DQNLoss, SoftUpdate
from flatroll.examples.recurrent_ppo import make_env
from flatroll.modules import GRUModule
from flatroll.rollouts import Collector

NUM_ENVS, FRAMES_PER_BATCH = 16, 256
SLICE, ROWS, BURN_IN = 32, 1024, 8
UPDATES = 16  # after each batch


class EpsilonGreedy(nn.Module):
    """Selects the best action or, with probability ``epsilon``, a random one."""

    def __init__(self, first: float, last: float, frames: int) -> None:
        super().__init__()
        self.first, self.last, self.frames = first, last, frames
        self.epsilon = first

    def advance(self, frame: int) -> None:
        """Set ``epsilon`` for a frame count, by linear decay from ``first`` to ``last``."""
        self.epsilon = max(self.last, self.first + (self.last - self.first) * frame / self.frames)

    def forward(self, value: Tensor) -> Tensor:
        best = value.argmax(-1)
        return torch.where(
            torch.rand(best.shape) < self.epsilon, torch.randint_like(best, value.shape[-1]), best
        )


def make_networks(hidden: int, greedy: EpsilonGreedy) -> tuple[TensorDictSequential, TensorDictSequential]:
    """Create the Q-network and the epsilon-greedy policy that uses it."""
    encoder = nn.Sequential(nn.Linear(2, hidden), nn.Tanh())
    parts: list[Any] = [
        TensorDictModule(encoder, ["observation"], ["embedding"]),
        GRUModule(hidden, hidden, in_key="embedding", out_key="features"),
        TensorDictModule(nn.Linear(hidden, 2), ["features"], ["action_value"]),
    ]
    acting = [*parts, TensorDictModule(greedy, ["action_value"], ["action"])]
    policy = TensorDictSequential(*acting)
    return TensorDictSequential(*parts), policy.select_out_keys("action", ("next", "recurrent_state"))


def train(frames: int, seed: int, name: str = "CartPole-v1", hidden: int = 64) -> dict[str, float]:
    """Train for ``frames`` frames; return the mean return of the last 100 episodes and the seconds."""
    torch.manual_seed(seed)
    greedy = EpsilonGreedy(1.0, 0.01, frames // 8)
    network, policy = make_networks(hidden, greedy)
    total = -(-frames // FRAMES_PER_BATCH) * FRAMES_PER_BATCH
    env = make_env(name, NUM_ENVS, seed)
    collector = Collector(env, policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=total, seed=seed)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100_000, compact_obs=True),
        sampler=SliceSampler(
            slice_len=SLICE, by="start", fill=False
        ),  # short episodes: small updates at first
        batch_size=ROWS,
    )
    loss = DQNLoss(network, double_dqn=True, loss_function="smooth_l1", burn_in=BURN_IN)
    loss.make_value_estimator("td_lambda", gamma=0.99, lmbda=0.7)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    updater = SoftUpdate(loss, tau=0.005)
    returns: list[float] = []
    start = time.perf_counter()
    for batch in tqdm(collector, total=total // FRAMES_PER_BATCH, unit=" batches", disable=None):
        returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
        buffer.extend(batch)
        greedy.advance(collector.frames)
        if len(buffer) < 10 * ROWS:
            continue
        for _ in range(UPDATES):
            optimizer.zero_grad()
            loss(buffer.sample())["loss"].backward()
            nn.utils.clip_grad_norm_(network.parameters(), 10.0)
            optimizer.step()
            updater.step()
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - 0.9 * collector.frames / total)
    collector.shutdown()
    return {
        "return": float(np.mean(returns[-100:] or [0.0])),
        "frames": total,
        "s": time.perf_counter() - start,
    }


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=150_000, help="frames to learn from (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights, actions and envs (%(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gives
    result = train(args.frames, args.seed)
    print(
        f"seed {args.seed}: "
        + ", ".join(f"{key} {value:,.1f}".removesuffix(".0") for key, value in result.items())
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
