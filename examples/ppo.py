"""PPO on vector observations and discrete actions: only the training loop.

``python -m flatroll.examples.ppo`` trains on CartPole. The programs of ``python -m flatroll run`` also log, evaluate,
checkpoint and resume; for continuous actions, use ``ppo_continuous``.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from flatroll.estimators import GAE, ClipPPOLoss, update_step
from flatroll.examples.common import make_env
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum

ROWS, MINIBATCHES, EPOCHS, LR = 1024, 4, 4, 5e-4
READ = ("observation", "action", "action_log_prob", "advantage", "value_target", "state_value")


def train(
    name: str, frames: int, seed: int, num_envs: int = 32, *, compile: bool = False
) -> dict[str, float]:
    """Train for ``frames`` frames; return the mean return of the last 100 episodes and the seconds.

    With ``compile``, the updates are compiled, which takes 5 to 15 s and pays from some 200,000 frames on.
    """
    torch.manual_seed(seed)
    env = RewardSum(make_env(name, num_envs, seed))
    policy, value = actor(env, norm=False), critic(env, norm=False)
    total = -(-frames // ROWS) * ROWS
    own_seed = None if name.startswith("envpool:") else seed  # an envpool already has its seed
    collector = Collector(env, policy, frames_per_batch=ROWS, total_frames=total, seed=own_seed)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=value)
    critic_options: Any = {"critic_coeff": 0.25, "loss_critic_type": "l2", "clip_value": 0.2}
    loss = ClipPPOLoss(policy, value, entropy_coeff=0.01, normalize_advantage=True, **critic_options)
    optimizer = torch.optim.Adam(loss.parameters(), lr=LR, eps=1e-5, fused=True)
    step = update_step(loss, optimizer, max_grad_norm=0.5, compile=compile)
    returns: list[float] = []
    start = time.perf_counter()
    for batch in tqdm(collector, total=total // ROWS, unit=" batches", disable=None):
        returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
        step.epochs(gae(batch).select(*READ), epochs=EPOCHS, minibatch=ROWS // MINIBATCHES)
        optimizer.param_groups[0]["lr"] = LR * (1 - collector.frames / (total + ROWS))
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
    parser.add_argument(
        "--env", default="CartPole-v1", help="a Gymnasium id, or envpool:ID (default: %(default)s)"
    )
    parser.add_argument("--num-envs", type=int, default=32, help="number of envs (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=500_000, help="number of frames (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, actions and envs (%(default)s)")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the updates (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    result = train(args.env, args.frames, args.seed, args.num_envs, compile=args.compile)
    shown = ", ".join(f"{key} {value:,.1f}".removesuffix(".0") for key, value in result.items())
    print(f"{args.env}, seed {args.seed}: {shown}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
