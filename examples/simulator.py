"""PPO on a simulator that returns torch tensors: mjlab's Cartpole, on the CPU or a GPU.

Run ``pip install mjlab`` in a separate environment, then ``python -m flatroll.examples.simulator``. It prints the mean
reward per step (the maximum is 1) and saves its curve. mjlab hides the last observation of an episode unless
``auto_reset`` is off. Here it is off: flatroll resets the rows that ended, and GAE bootstraps from the true last
observations.
"""

import argparse
import csv
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gymnasium import spaces

from flatroll.estimators import GAE, ClipPPOLoss, update_step
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import as_vector_env

READ = ("actor", "critic", "action", "action_log_prob", "advantage", "value_target", "state_value")
STEPS, EPOCHS, MINIBATCHES = 32, 4, 8  # steps of each env in a batch


def make_env(task: str, num_envs: int, device: str, seconds: float = 10.0) -> Any:
    """Make mjlab's env with episodes of ``seconds``; it leaves the resets to flatroll."""
    # The first import registers the tasks.
    import mjlab.tasks.cartpole  # noqa: F401  # pyright: ignore[reportMissingImports]
    from mjlab.envs import ManagerBasedRlEnv  # pyright: ignore[reportMissingImports]
    from mjlab.tasks.registry import load_env_cfg  # pyright: ignore[reportMissingImports]

    cfg = load_env_cfg(task)
    cfg.scene.num_envs, cfg.auto_reset, cfg.episode_length_s = num_envs, False, seconds
    return ManagerBasedRlEnv(cfg, device=device)


def train(
    env: Any, frames: int, seed: int, step_reward: float = 1.0, episode: int = STEPS
) -> list[tuple[int, float]]:
    """Train on an env with observations ``"actor"`` and ``"critic"``; return frames and mean rewards per step.

    Rewards are shown and learnt from in units of ``step_reward``, the greatest of a step. Each mean is over the last
    ``episode`` steps: all envs begin together, and the first steps of an episode are the easiest.
    """
    torch.manual_seed(seed)
    env = as_vector_env(env)
    device, seen = env.capabilities.device, env.single_observation_space

    def part(key: str) -> Any:
        return SimpleNamespace(
            single_observation_space=spaces.Dict({key: seen[key]}),
            single_action_space=env.single_action_space,
        )

    policy = actor(part("actor"), squash=False, norm=False, device=device)
    value = critic(part("critic"), norm=False, device=device)
    collector = Collector(env, policy, frames_per_batch=STEPS * env.num_envs, total_frames=frames, seed=seed)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=value)
    loss = ClipPPOLoss(policy, value, entropy_coeff=0.0, normalize_advantage=True, critic_coeff=0.5)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    step = update_step(loss, optimizer, max_grad_norm=0.5)
    curve = []
    means: deque[float] = deque(maxlen=-(-episode // STEPS))
    for batch in collector:
        batch["next", "reward"] /= step_reward
        means.append(batch["next", "reward"].mean().item())
        if len(means) == means.maxlen:
            curve.append((collector.frames, sum(means) / len(means)))
        step.epochs(gae(batch).select(*READ), epochs=EPOCHS, minibatch=-(-len(batch) // MINIBATCHES))
    collector.shutdown()
    return curve


def save(curve: list[tuple[int, float]], folder: Path) -> None:
    """Save the curve as numbers and, if matplotlib is installed, as a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "simulator_curve.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("frames", "reward"), *curve])
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*curve, strict=True))
    axes.set(xlabel="frames", ylabel="mean reward of a step", ylim=(0, 1))
    figure.savefig(folder / "simulator_curve.png", dpi=110)


def main(argv: list[str] | None = None) -> int:
    """Train once, print the result and save the curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task", default="Mjlab-Cartpole-Balance", help="mjlab's name of the task (default: %(default)s)"
    )
    parser.add_argument("--num-envs", type=int, default=64, help="number of envs (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=100_000, help="number of frames (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="device of the simulator (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, actions and envs (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for the learning curve (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    env = make_env(args.task, args.num_envs, args.device)
    start = time.perf_counter()
    curve = train(env, args.frames, args.seed, env.step_dt, env.max_episode_length)
    seconds = time.perf_counter() - start
    save(curve, args.out)
    print(
        f"{args.task}, seed {args.seed}: reward {curve[-1][1]:.2f} (first episodes {curve[0][1]:.2f}), {seconds:,.0f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
