"""Recurrent PPO on a memory task: name the card suit shown three steps ago (popgym's RepeatPrevious).

``python -m flatroll.examples.repeat_previous`` trains a GRU, with ``--memoryless`` layers of the same sizes without
memory. Perfect memory gives a return of 1, guessing among four suits -0.5 on average.
"""

import argparse
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import ProbabilisticTensorDictModule as Sampler
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss, update_step
from flatroll.layout import run_starts
from flatroll.modules import GRUModule
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum

SUITS = 4


class RepeatPrevious(gym.vector.VectorEnv[Any, Any, Any]):
    """Shows a suit at every step, one-hot ``[4]``; the right action is the suit shown ``k`` steps ago.

    An episode has ``steps`` steps. From step ``k`` on, an action that is right gives 1 / (steps - k), and one that is
    not takes as much, so that returns lie between -1 and 1. All rows end together, and are reset in the same step.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  # gymnasium's form

    def __init__(self, num_envs: int, k: int = 3, steps: int = 48) -> None:
        self.num_envs, self.k, self.steps = num_envs, k, steps
        self.single_observation_space = gym.spaces.Box(0, 1, (SUITS,))
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.single_action_space = gym.spaces.Discrete(SUITS)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None or not hasattr(self, "deck"):
            self.random = np.random.default_rng(seed)
        self.at = 0
        self.deck = self.random.integers(0, SUITS, (self.steps + 1, self.num_envs))
        return self._show(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        reward: Any = np.zeros(self.num_envs, np.float32)
        if self.at >= self.k:
            right = np.asarray(actions) == self.deck[self.at - self.k]
            reward = np.where(right, 1, -1).astype(np.float32) / (self.steps - self.k)
        self.at += 1
        obs, info = self._show(), {}
        ended = np.full(self.num_envs, self.at == self.steps)
        if ended[0]:
            info = {"final_obs": obs, "_final_obs": ended}
            obs, _ = self.reset()
        return obs, reward, ended, np.zeros(self.num_envs, np.bool_), info

    def _show(self) -> Any:
        return np.eye(SUITS, dtype=np.float32)[self.deck[self.at]]


def make_agent(hidden: int, memory: bool) -> tuple[Any, Any, Any]:
    """Create the actor, a value head on its features, and a stand-alone critic with the same weights."""
    trunk: Any = GRUModule(SUITS, hidden, in_key="observation", out_key="features")
    if not memory:
        layers = nn.Sequential(nn.Linear(SUITS, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        trunk = TensorDictModule(layers, ["observation"], ["features"])
    policy = TensorDictModule(nn.Linear(hidden, SUITS), ["features"], ["logits"])
    choose = Sampler(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True)
    head = TensorDictModule(nn.Linear(hidden, 1), ["features"], ["state_value"])
    act: list[Any] = [trunk, policy, choose]
    judge: list[Any] = [trunk, head]
    return ProbabilisticTensorDictSequential(*act), head, TensorDictSequential(*judge)


def train(
    frames: int = 300_000,
    seed: int = 0,
    *,
    memory: bool = True,
    num_envs: int = 32,
    k: int = 3,
    hidden: int = 64,
) -> dict[str, float]:
    """Train; the mean return of the last 100 episodes, frames and seconds."""
    torch.manual_seed(seed)
    steps, began = 48, time.perf_counter()
    actor, head, critic = make_agent(hidden, memory)
    state = [("next", "recurrent_state")] if memory else []
    acting = actor.select_out_keys("action", "action_log_prob", *state)
    rows = num_envs * steps
    total = -(-frames // rows) * rows
    env = RewardSum(RepeatPrevious(num_envs, k, steps))
    collector = Collector(env, acting, frames_per_batch=rows, total_frames=total, compact_obs=True, seed=seed)
    gae = GAE(gamma=0.95, lmbda=0.9, value_network=critic, shifted=True)
    loss = ClipPPOLoss(actor, head, entropy_coeff=0.01, loss_critic_type="l2", normalize_advantage=True)
    weights = list(dict.fromkeys([*actor.parameters(), *critic.parameters()]))
    optimizer = torch.optim.Adam(weights, lr=2e-3, eps=1e-5)
    step = update_step(loss, optimizer, max_grad_norm=0.5)
    sampler = SliceSampler(slice_len=steps, fill=False)  # whole runs of any length
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler)
    returns: list[float] = []
    for batch in collector:
        gae(batch, final=collector.final)
        buffer.extend(batch)
        quarter = max(1, int(run_starts(batch).sum()) // 4)
        for _ in range(16):  # 4 epochs of 4 minibatches
            step(buffer.sample(steps * quarter))
        returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
    collector.shutdown()
    return {
        "return": float(np.mean(returns[-100:])),
        "frames": collector.frames,
        "seconds": time.perf_counter() - began,
    }


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--memoryless", action="store_true", help="use layers of the same sizes without memory"
    )
    parser.add_argument("--frames", type=int, default=300_000)
    parser.add_argument("--k", type=int, default=3, help="number of steps to remember")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = train(args.frames, args.seed, memory=not args.memoryless, k=args.k)
    frames, seconds = int(result["frames"]), result["seconds"]
    print(
        f"mean return of the last 100 episodes {result['return']:.2f} after {frames:,} frames, {seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
