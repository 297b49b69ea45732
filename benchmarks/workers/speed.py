"""Frames per second of one and of two workers, and of the peer's."""

import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import torch

from benchmarks.workers.finding import Finding
from flatroll.rollouts import Collector, MultiCollector
from flatroll.sharing import Nursery

WORKERS, TURNS, SLOTS = 2, 3, 2


class Slow(gym.Env[Any, Any]):
    """Each step takes a millisecond: asleep, or at work."""

    observation_space: Any = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space: Any = gym.spaces.Discrete(2)

    def __init__(self, at_work: bool, seconds: float = 1e-3) -> None:
        self.at_work, self.seconds = at_work, seconds
        self._observed = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._observed, {}

    def step(self, action: Any) -> Any:
        if self.at_work:  # by the processor's clock: what other programs take does not count as work
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        else:
            time.sleep(self.seconds)
        return self._observed, 0.0, False, False, {}


def policy() -> torch.nn.Sequential:
    """4 -> 64 -> 2 and the best of both."""
    return torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2), Best())


class Best(torch.nn.Module):
    """The greatest entry's number."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.argmax(-1)


def rate(collector: Any, windows: int, ahead: int) -> float:
    """Return the frames per second over some batches, after ``ahead`` batches that may have been ready before."""
    for _ in range(ahead):
        next(collector)
    start, rows = time.perf_counter(), 0
    for _ in range(windows):
        rows += next(collector).numel()
    return rows / (time.perf_counter() - start)


def many_over_one(env: Callable[[], Any], sync: bool, nursery: Nursery, rows: int, windows: int) -> float:
    """Frames per second of two workers over those of one, in turns: the median."""
    found = []
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(
                MultiCollector(
                    env, policy(), num_workers=count, sync=sync, frames_per_batch=rows, slots=SLOTS
                )
            )
            for count in (1, WORKERS)
        )
        for turn in range(TURNS + 1):
            ahead = 1 if sync else (SLOTS + 1) * WORKERS
            rates = []
            for collector in (one, two):
                time.sleep(2e-3 * rows * (SLOTS + 1))  # until the other's workers have filled their slots
                rates.append(rate(collector, windows, ahead))
            if turn:
                found.append(rates[1] / rates[0])
    return statistics.median(found)


def measure_scaling() -> list[Finding]:
    """Two workers against one, envs that sleep or work for a millisecond."""
    findings = []
    with Nursery(preload=("flatroll.rollouts", __name__)) as nursery:
        for text, at_work, least in (("sleeping", False, 1.9), ("working", True, 1.8)):
            for sync in (False, True):
                found = many_over_one(partial(Slow, at_work), sync, nursery, rows=50, windows=8)
                mode = "sync" if sync else "async"
                findings.append(
                    Finding(f"frames/s of 2 workers over 1, env {text} 1 ms, {mode}", found, least=least)
                )
    return findings


def measure_ours(sync: bool) -> dict[str, float]:
    """Frames per second on CartPole with two workers; seconds to the first batch and to shut down; MB of a worker."""
    start = time.perf_counter()
    made = MultiCollector(
        partial(gym.make, "CartPole-v1"), policy(), num_workers=WORKERS, sync=sync, frames_per_batch=200
    )
    return _measured(made, start, sync)


def measure_peer(sync: bool) -> dict[str, float]:
    """The same of TorchRL's collector."""
    warnings.simplefilter("ignore")
    from tensordict.nn import TensorDictModule
    from torchrl import collectors
    from torchrl.envs import Compose, GymEnv, InitTracker, StepCounter, TransformedEnv

    def make() -> Any:
        markers: list[Any] = [InitTracker(), StepCounter()]
        return TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), Compose(*markers))

    kind = collectors.MultiSyncCollector if sync else collectors.MultiAsyncCollector
    start = time.perf_counter()
    acting = TensorDictModule(policy(), ["observation"], ["action"])
    made = kind([make] * WORKERS, acting, frames_per_batch=200, total_frames=-1)
    return _measured(made, start, sync)


def _measured(made: Any, start: float, sync: bool) -> dict[str, float]:
    collector = iter(made)
    next(collector)
    first = time.perf_counter() - start
    rates = [rate(collector, 15, ahead=1 if sync else (SLOTS + 1) * WORKERS) for _ in range(TURNS)]
    everyone = psutil.Process().children(recursive=True)
    memory = max(process.memory_full_info().uss / 2**20 for process in _leaves(everyone))
    start = time.perf_counter()
    made.shutdown()
    end = time.perf_counter() - start
    return {"rate": statistics.median(rates), "first": first, "shutdown": end, "MB": memory}


def _leaves(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not started others: workers, and not what started them."""
    return [process for process in processes if not process.children()]


def has_peer() -> bool:
    """Whether TorchRL is installed."""
    return importlib.util.find_spec("torchrl") is not None


def compare(mode: str, ours: dict[str, float], peer: dict[str, float]) -> list[Finding]:
    """The findings about both."""
    per = f"{ours['rate']:,.0f} against {peer['rate']:,.0f} frames/s"
    return [
        Finding(
            f"frames/s over torchrl's, CartPole, 2 workers, {mode}",
            ours["rate"] / peer["rate"],
            least=2,
            note=per,
        ),
        *(
            Finding(f"{what}, {mode}", ours[name], unit, note=f"torchrl: {peer[name]:,.1f} {unit}")
            for what, name, unit in (
                ("from the call to the first batch, 2 workers", "first", "s"),
                ("shutdown", "shutdown", "s"),
                ("private memory of the largest worker", "MB", "MB"),
            )
        ),
    ]


def measure_single() -> list[Finding]:
    """Frames per second of one process, for comparison."""
    collector = Collector(partial(gym.make, "CartPole-v1"), policy(), frames_per_batch=200)
    next(collector)
    found = statistics.median(rate(collector, 10, 0) for _ in range(TURNS))
    return [Finding("frames/s of one `Collector`, CartPole", found, "frames/s")]
