"""Recurrent double DQN on CartPole with hidden velocities, trained on slices from a replay buffer.

``python -m flatroll.examples.recurrent_dqn`` trains it. Its parts are those of R2D2: the network also sees the last
action, runs over each slice from the state stored in its first row, whose first rows only warm the memory up, and has
two heads, of the state's value and of the actions' advantages. Every 7,500 frames the greedy policy plays 20 episodes
apart from the training; the weights that did best are kept.
"""

import argparse
import time
from copy import deepcopy
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from tqdm.auto import tqdm

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import DQNLoss, SoftUpdate
from flatroll.examples.envs.last_action import LastAction
from flatroll.examples.recurrent_ppo import make_env
from flatroll.modules import GRUModule
from flatroll.rollouts import Collector, rollout

NUM_ENVS, FRAMES_PER_BATCH, START = 16, 256, 5_000
KEPT = 30_000  # the newest rows: the states stored in older ones are those of weights long gone
SLICE, ROWS, BURN_IN = 20, 640, 4
UPDATES = 12  # after each batch
STATE: Any = ("next", "recurrent_state")


class EpsilonGreedy(nn.Module):
    """Selects the best action or, with probability ``epsilon``, a random one."""

    epsilon = 1.0

    def forward(self, value: Tensor) -> Tensor:
        best = value.argmax(-1)
        other = torch.randint_like(best, value.shape[-1])
        return torch.where(torch.rand(best.shape) < self.epsilon, other, best)


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


def make_networks(hidden: int, choose: nn.Module) -> tuple[TensorDictSequential, TensorDictSequential]:
    """Create the Q-network and the policy that ``choose`` makes of it."""
    encoder = nn.Sequential(nn.Linear(3, hidden), nn.Tanh())
    parts: list[Any] = [
        TensorDictModule(encoder, ["observation"], ["embedding"]),
        GRUModule(hidden, hidden, in_key="embedding", out_key="features"),
        TensorDictModule(Heads(hidden, 2), ["features"], ["action_value"]),
    ]
    acting = [*parts, TensorDictModule(choose, ["action_value"], ["action"])]
    return TensorDictSequential(*parts), TensorDictSequential(*acting).select_out_keys("action", STATE)


def mean_return(name: str, policy: Any, episodes: int, seed: int) -> float:
    """Mean return of the first episode of so many envs; each step is worth 1, and 500 are the most."""
    batch = rollout(LastAction(make_env(name, episodes, seed)), policy, 500, seed=seed)
    return int((batch["collector", "traj_ids"] < episodes).sum()) / episodes


def train(frames: int, seed: int, name: str = "CartPole-v1", hidden: int = 64) -> dict[str, float]:
    """Train for ``frames`` frames; return the greedy returns of the kept and the last weights, and the seconds."""
    torch.manual_seed(seed)
    greedy = EpsilonGreedy()
    network, policy = make_networks(hidden, greedy)
    total = -(-frames // FRAMES_PER_BATCH) * FRAMES_PER_BATCH
    env = LastAction(make_env(name, NUM_ENVS, seed))
    collector = Collector(env, policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=total, seed=seed)
    # Slices may hang over the end of an episode: else its last row, the one that pays less, would be in few of them.
    sampler = SliceSampler(slice_len=SLICE, by="start", span=(False, SLICE - BURN_IN - 1), fill=False)
    buffer = ReplayBuffer(storage=LazyTensorStorage(KEPT, compact_obs=True), sampler=sampler, batch_size=ROWS)
    loss = DQNLoss(
        network, double_dqn=True, loss_function="smooth_l1", burn_in=BURN_IN, diagnostics=False
    ).make_value_estimator(gamma=0.99)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    updater = SoftUpdate(loss, tau=0.05)
    best, weights, judged = -1.0, deepcopy(network.state_dict()), 0
    start = time.perf_counter()
    for batch in tqdm(collector, total=total // FRAMES_PER_BATCH, unit=" batches", disable=None):
        buffer.extend(batch)
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - 0.95 * collector.frames / total)
        for _ in range(UPDATES if len(buffer) >= START else 0):
            optimizer.zero_grad()
            loss(buffer.sample())["loss"].backward()
            nn.utils.clip_grad_norm_(network.parameters(), 10.0, foreach=True)
            optimizer.step()
            updater.step()
        if collector.frames // 7500 > judged or collector.frames == total:
            judged, greedy.epsilon = collector.frames // 7500, 0.0
            found = mean_return(name, policy, 20, seed=10_000 + judged)
            if found > best:
                best, weights = found, deepcopy(network.state_dict())
        greedy.epsilon = max(0.01, 1 - collector.frames / 20_000)
    collector.shutdown()
    seconds, greedy.epsilon = time.perf_counter() - start, 0.0
    last = mean_return(name, policy, 100, seed=20_000)
    network.load_state_dict(weights)
    return {
        "return": mean_return(name, policy, 100, seed=20_000),
        "last": last,
        "frames": total,
        "s": seconds,
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
