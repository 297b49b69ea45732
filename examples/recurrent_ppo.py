"""Recurrent PPO on CartPole with hidden velocities: all parts of flatroll, from env to pictures.

``python -m flatroll demo`` runs it. A pole can only be balanced by who knows how fast it falls, so the policy
needs a memory: with the GRU the mean return passes 450 (of 500), without it (``--memoryless``) it stays near 50.
"""

import argparse
import time
from collections import defaultdict
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictModule as Sampler
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from tqdm.auto import tqdm

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.examples.report import parse, save_pictures, summary
from flatroll.layout import run_starts
from flatroll.layout.export import optional_package
from flatroll.modules import GRUModule
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum, as_vector_env


class HideVelocities(gym.vector.VectorObservationWrapper):
    """Shows the positions of cart and pole, as shares of their limits, without the velocities."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.single_observation_space = gym.spaces.Box(-10, 10, (2,))
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, env.num_envs)

    def observations(self, observations: Any) -> Any:
        return observations[:, ::2] / np.array([2.4, 0.21], np.float32)


def make_env(name: str, num_envs: int, seed: int) -> gym.vector.VectorEnv[Any, Any, Any]:
    """CartPole from Gymnasium, or from envpool with ``envpool:CartPole-v1``."""
    if name.startswith("envpool:"):
        try:
            import envpool
        except ImportError as error:
            raise ImportError(f'--env {name} needs envpool: pip install "flatroll[envpool]"') from error
        env = as_vector_env(envpool.make_gymnasium(name[len("envpool:") :], num_envs=num_envs, seed=seed))
    else:
        env = as_vector_env(gym.make_vec(name, num_envs=num_envs))
    env = RewardSum(HideVelocities(env))
    return gym.wrappers.vector.TransformReward(env, lambda reward: 0.1 * reward)  # values near 10, not 100


def make_agent(hidden: int, memory: bool) -> tuple[Any, Any, Any]:
    """Create the actor, a value head on its features, and a stand-alone critic with the same weights."""
    encoder = nn.Sequential(nn.Linear(2, hidden), nn.Tanh())
    trunk: list[Any] = [TensorDictModule(encoder, ["observation"], ["embedding"])]
    if memory:
        trunk.append(GRUModule(hidden, hidden, in_key="embedding", out_key="features"))
    else:
        layer = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh())
        trunk.append(TensorDictModule(layer, ["embedding"], ["features"]))
    policy = TensorDictModule(nn.Linear(hidden, 2), ["features"], ["logits"])
    choose = Sampler(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True)
    head = TensorDictModule(nn.Linear(hidden, 1), ["features"], ["state_value"])
    act: list[Any] = [*trunk, policy, choose]
    judge: list[Any] = [*trunk, head]
    return ProbabilisticTensorDictSequential(*act), head, TensorDictSequential(*judge)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Collect, estimate, store, draw slices, update; returns what the report shows."""
    torch.manual_seed(args.seed)
    env = make_env(args.env, args.num_envs, args.seed)
    actor, head, critic = make_agent(args.hidden, memory=not args.memoryless)
    state = [] if args.memoryless else [("next", "recurrent_state")]
    acting = actor.select_out_keys("action", "action_log_prob", *state)  # what is worth a column
    frames = args.num_envs * args.steps
    total = -(-args.frames // frames) * frames
    seed = None if args.env.startswith("envpool:") else args.seed  # envpool has its seed already
    collector = Collector(
        env, acting, frames_per_batch=frames, total_frames=total, compact_obs=True, seed=seed
    )
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, shifted=True)
    loss = ClipPPOLoss(actor, head, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True)
    weights = list(dict.fromkeys([*actor.parameters(), *critic.parameters()]))
    optimizer = torch.optim.Adam(weights, lr=args.lr, eps=1e-5)
    sampler = SliceSampler(slice_len=args.steps, fill=False)  # samples of whole runs, long and short
    buffer = ReplayBuffer(storage=LazyTensorStorage(frames), sampler=sampler)
    curve: list[tuple[int, float]] = []
    returns: list[float] = []
    seconds: dict[str, float] = defaultdict(float)
    first: Any = None
    batch: Any = None
    clock = start = time.perf_counter()

    def spent(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name] += now - clock
        clock = now

    with tqdm(total=total, unit="frame", unit_scale=True, disable=args.quiet) as bar:
        bar.set_postfix_str("first batch; kernels are compiled, once")
        for batch in collector:
            spent("collect")
            gae(batch, final=collector.final)  # in recurrent mode by itself, like the loss
            spent("advantages")
            buffer.extend(batch)
            # A slice as long as a window is a whole run: drawing a quarter of the runs draws every row alike.
            quarter = max(1, int(run_starts(batch).sum()) // 4)
            for _ in range(4 * args.epochs):
                sample = buffer.sample(args.steps * quarter)
                spent("sample slices")
                losses = loss(sample)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(weights, 0.5)
                optimizer.step()
                spent("update")
            optimizer.param_groups[0]["lr"] = args.lr * (1 - collector.frames / (1.02 * total))
            first = batch if first is None else first
            returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
            curve.append((collector.frames, float(np.mean(returns[-100:] or [0.0]))))
            bar.update(frames)
            rate = collector.frames / (time.perf_counter() - start)
            bar.set_postfix_str(f"return {curve[-1][1]:.0f}, {rate:,.0f} steps/s")
            spent("rest")
            if len(returns) >= 100 and curve[-1][1] >= args.target:
                break
    collector.shutdown()
    return {"curve": curve, "first": first, "last": batch, "seconds": dict(seconds), "wall": clock - start}


def main(argv: list[str] | None = None) -> int:
    """Train, print the tables, save the pictures; 0 if the target was reached (or not to be expected)."""
    args = parse(argv)
    optional_package("matplotlib", "plot", "the picture of the demo")  # missed now, not after the training
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gives
    result = train(args)
    print(summary(result), *(f"saved {path}" for path in save_pictures(result, args.out)), sep="\n")
    return 0 if args.memoryless or result["curve"][-1][1] >= args.target else 1


if __name__ == "__main__":
    raise SystemExit(main())
