"""Soft actor-critic on Pendulum, collected in this process, in several processes, or by actors of a Ray cluster.

    python -m flatroll.examples.many_workers here
    python -m flatroll.examples.many_workers processes --workers 4
    python -m flatroll.examples.many_workers ray --workers 4

Only `make_collector` depends on where the envs run. In each case this process learns, with one update per row, and
publishes the policy's new weights after each window. Meanwhile, processes and actors collect with weights that are some
windows old; the program prints this lag.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from torch import nn

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.estimators import SACLoss, SoftUpdate, update_step
from flatroll.modules import actor, q_network
from flatroll.rollouts import Collector, MultiAsyncCollector, rollout
from flatroll.wrappers import RewardSum, as_vector_env

PLACES = "here", "processes", "ray"
WINDOW, START, SAMPLE = 40, 1000, 256  # rows per window, random rows, rows per update


def pendulums(count: int = 4) -> RewardSum:
    """Create envs that record returns. Each worker calls this for its own envs."""
    return RewardSum(as_vector_env(gym.make_vec("Pendulum-v1", num_envs=count)))


def make_collector(place: str, workers: int, policy: Any, **arguments: Any) -> Any:
    """Create the collector, which yields windows and accepts new weights."""
    if place == "here":
        return Collector(pendulums, policy, **arguments)
    if place == "processes":
        return MultiAsyncCollector(pendulums, policy, num_workers=workers, **arguments)
    from flatroll.rollouts import RayCollector  # needs the extra "ray"

    return RayCollector(pendulums, policy, num_collectors=workers, **arguments)


def make_update(buffer: ReplayBuffer, actor: Any, critic: Any) -> Callable[[], object]:
    """Return a function that draws a sample and takes one step of all three losses."""
    loss = SACLoss(actor, critic, loss_function="l2").make_value_estimator(gamma=0.99)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True)
    step = update_step(loss, optimizer, updater=SoftUpdate(loss, tau=0.005))
    return lambda: step(buffer.sample())


def train(place: str, workers: int, frames: int, seed: int) -> dict[str, Any]:
    """Train and return the result.

    Returns:
        ``return``, the mean of 16 episodes of the policy learned; ``frames``; ``s``, the seconds of collecting and
        learning; ``start``, those before, in which workers were started; ``lag`` and ``most lag``, mean and maximum
        over rows.
    """
    torch.manual_seed(seed)
    body: Any = {"hidden": (256, 256), "activation": nn.ReLU, "norm": False}
    spaces = pendulums(1)
    agent = actor(spaces, std="dependent", **body)
    buffer = ReplayBuffer(storage=LazyTensorStorage(frames), batch_size=SAMPLE)
    update = make_update(buffer, agent, q_network(spaces, **body))
    policy = agent.select_out_keys("action")
    lag, most = 0.0, 0
    asked = time.perf_counter()
    with make_collector(
        place,
        workers,
        policy,
        frames_per_batch=WINDOW,
        total_frames=frames,
        init_random_frames=START,
        track_policy_version=True,
        seed=seed,
    ) as collector:
        begun = time.perf_counter()
        for batch in collector:
            # Versions behind, int64 [N].
            behind = collector.policy_version - batch["collector", "policy_version"]
            lag, most = lag + float(behind.sum()), max(most, int(behind.max()))
            buffer.extend(batch)
            if len(buffer) < START:
                continue
            for _ in range(len(batch)):
                update()
            collector.update_policy_weights_()
        done = time.perf_counter()
    steps = rollout(pendulums(16), policy, num_steps=200, seed=1000 + seed)  # whole episodes
    return {
        "return": float(steps["next", "episode_reward"][steps["next", "done"]].mean()),
        "frames": len(buffer),
        "s": done - begun,
        "start": begun - asked,
        "lag": lag / len(buffer),
        "most lag": most,
    }


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "place", choices=PLACES, nargs="?", default="here", help="where the envs run (%(default)s)"
    )
    parser.add_argument("--workers", type=int, default=4, help="number of processes or actors (%(default)s)")
    parser.add_argument("--frames", type=int, default=10_000, help="number of rows (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, actions and envs (%(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = train(args.place, args.workers, args.frames, args.seed)
    print(
        f"{args.place}: return {found['return']:,.0f} after {found['frames']:,} frames, {found['s']:.1f} s "
        f"and {found['start']:.1f} s to start; lag {found['lag']:.1f} windows, {found['most lag']} at most"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
