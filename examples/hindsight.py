"""Hindsight experience replay on bit flipping (Andrychowicz et al. 2017): DQN that learns from any goal it reached.

``python -m flatroll.examples.hindsight`` trains with hindsight goals, with ``--without`` only on the env's own goals,
which random actions reach once in thousands of episodes. Each step flips one of n bits. The goal is another set of n
bits, and the reward is -1 until both are equal, which ends the episode.
"""

import argparse
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from flatroll.buffers import HindsightTransform, LazyTensorStorage, ReplayBuffer
from flatroll.estimators import DQNLoss, SoftUpdate, update_step
from flatroll.rollouts import Collector

NUM_ENVS, START, ROWS, EPSILON = 16, 1000, 256, 0.2


class BitFlip(gym.Env[Any, Any]):
    """n bits, a goal of n bits, and n steps to make them equal."""

    def __init__(self, n: int) -> None:
        bits = gym.spaces.Box(0.0, 1.0, (n,), np.float32)
        self.observation_space = gym.spaces.Dict({"achieved_goal": bits, "desired_goal": bits})
        self.action_space = gym.spaces.Discrete(n)
        self.n = n

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.bits, self.goal = self.np_random.integers(2, size=(2, self.n)).astype(np.float32)
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.bits[action] = 1 - self.bits[action]
        self.steps += 1
        done = bool((self.bits == self.goal).all())
        return self._observation(), float(done) - 1.0, done, self.steps >= self.n, {}

    def _observation(self) -> dict[str, Any]:
        return {"achieved_goal": self.bits.copy(), "desired_goal": self.goal}


def reached(achieved_goal: Tensor, desired_goal: Tensor, info: Any) -> Tensor:
    """Whether rows ``[M, n]`` reach their goals, bool ``[M]``: where episodes terminate."""
    return (achieved_goal == desired_goal).all(-1)


def reward(achieved_goal: Tensor, desired_goal: Tensor, info: Any) -> Tensor:
    """The env's reward for any goals, ``[M]``."""
    return reached(achieved_goal, desired_goal, info).float() - 1.0


class Values(nn.Module):
    """The Q-network: the value of flipping each bit, given the bits and the goal bits."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * n, 256), nn.ReLU(), nn.Linear(256, n))

    def forward(self, bits: Tensor, goal: Tensor) -> Tensor:
        values: Tensor = self.net(torch.cat([bits, goal], -1))
        return values


def explore(values: Tensor) -> Tensor:
    """The best action or, with probability EPSILON, a random one."""
    best = values.argmax(-1)
    return torch.where(torch.rand(best.shape) < EPSILON, torch.randint_like(best, values.shape[-1]), best)


def train(n: int, frames: int, seed: int, hindsight: bool = True) -> dict[str, float]:
    """Train for ``frames`` frames; return the share of the last 200 episodes that reached their goal."""
    torch.manual_seed(seed)
    value = TensorDictModule(Values(n), ["achieved_goal", "desired_goal"], ["action_value"])
    parts: list[Any] = [value, TensorDictModule(explore, ["action_value"], ["action"])]
    policy = TensorDictSequential(*parts)
    collector = Collector(
        SyncVectorEnv([lambda: BitFlip(n)] * NUM_ENVS),
        policy.select_out_keys("action"),
        frames_per_batch=NUM_ENVS,
        total_frames=frames,
        init_random_frames=START,
        seed=seed,
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(frames),
        transform=HindsightTransform(reward, terminated_fn=reached) if hindsight else None,
        batch_size=ROWS,
        generator=torch.Generator().manual_seed(seed),
    )
    loss = DQNLoss(value, diagnostics=False).make_value_estimator(gamma=0.98)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True)
    step = update_step(loss, optimizer, updater=SoftUpdate(loss, tau=0.05))
    outcomes: list[bool] = []
    start = time.process_time()
    for batch in collector:
        ended = batch["next", "done"]
        outcomes += batch["next", "terminated"][ended].tolist()
        buffer.extend(batch)
        if collector.frames < START:
            continue
        step(buffer.sample())
    collector.shutdown()
    return {"reached": float(np.mean(outcomes[-200:])), "frames": frames, "s": time.process_time() - start}


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=int, default=12, help="bits to flip, and steps (%(default)s)")
    parser.add_argument("--frames", type=int, default=40_000, help="number of frames (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, actions and envs (%(default)s)")
    parser.add_argument("--without", action="store_true", help="learn only from the env's own goals")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = train(args.bits, args.frames, args.seed, not args.without)
    print(
        f"{args.bits} bits, seed {args.seed}: {result['reached']:.0%} of the last 200 episodes reached their goal, "
        f"{result['frames']:,} frames, {result['s']:.1f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
