"""PPO on a JAX simulator: gymnax's CartPole, stepped by one compiled call, with updates in torch.

``python -m flatroll.examples.jax_ppo --picture out/jax_ppo.png`` needs gymnax (``pip install gymnax``).
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatroll.estimators import GAE, ClipPPOLoss, update_step
from flatroll.examples.ppo import READ
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum, as_vector_env


def train(
    env: Any,  # a JAX env that as_vector_env takes
    frames: int = 200_000,
    seed: int = 0,
    *,
    num_envs: int = 64,
    rows: int = 1024,
) -> list[tuple[int, float]]:
    """Train; after each batch the frames so far and the mean return of the last 100 episodes."""
    torch.manual_seed(seed)
    vector = RewardSum(as_vector_env(env, num_envs=num_envs))
    policy, value = actor(vector, norm=False), critic(vector, norm=False)
    total = -(-frames // rows) * rows
    collector = Collector(vector, policy, frames_per_batch=rows, total_frames=total, seed=seed)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=value)
    loss = ClipPPOLoss(
        policy, value, entropy_coeff=0.01, critic_coeff=0.25, loss_critic_type="l2", normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=5e-4, eps=1e-5, fused=True)
    step = update_step(loss, optimizer, max_grad_norm=0.5)
    returns: list[float] = []
    curve = []
    for batch in collector:
        returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
        curve.append((collector.frames, float(np.mean(returns[-100:] or [0.0]))))
        step.epochs(gae(batch).select(*READ), epochs=4, minibatch=-(-rows // 4))
        optimizer.param_groups[0]["lr"] = 5e-4 * (1 - collector.frames / (total + rows))
    return curve


def draw(curve: list[tuple[int, float]], name: str, path: Path) -> None:
    """Save the learning curve as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([frames / 1000 for frames, _ in curve], [reached for _, reached in curve])
    axes.set(xlabel="thousand frames", ylabel="mean return of 100 episodes", title=f"PPO on {name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    """Train once, print the result, and draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--env", default="CartPole-v1", help="gymnax's name of the env (default: %(default)s)"
    )
    parser.add_argument("--frames", type=int, default=200_000, help="number of frames (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, actions and envs (default: %(default)s)"
    )
    parser.add_argument("--picture", type=Path, help="where to draw the learning curve")
    args = parser.parse_args(argv)
    import gymnax  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    start = time.perf_counter()
    curve = train(gymnax.make(args.env)[0], args.frames, args.seed)
    frames, reached = curve[-1]
    print(f"{args.env}: return {reached:.1f} after {frames:,} frames, {time.perf_counter() - start:.0f} s")
    if args.picture is not None:
        draw(curve, f"gymnax {args.env}", args.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
