"""envpool at once, in two halves in turn, and in async mode: ``python -m benchmarks.pools.bench_pools``."""

import importlib.util
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.bench_collector import free_policy, spend
from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.rollouts import Collector


class SleepingPool(gym.vector.VectorEnv[Any, Any, Any]):
    """A pool of envs with one core each: a row is done a fixed number of seconds after its action was sent.

    Args:
        num_envs, batch_size, seed: as envpool's.
        seconds: a function from a generator and a number of steps to their durations.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,))
    action_space = gym.spaces.Discrete(2)

    def __init__(
        self, num_envs: int, batch_size: int, seed: int, seconds: Callable[[np.random.Generator, int], Any]
    ) -> None:
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        self.config = {"num_envs": num_envs, "batch_size": batch_size}
        self.num_envs, self.batch_size = num_envs, batch_size
        self._seconds, self._rng = seconds, np.random.default_rng(seed)
        self._done_at = np.full(num_envs, np.inf)
        self._obs = np.zeros((batch_size, 4), np.float32)

    def async_reset(self) -> None:
        self._done_at[:] = 0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.async_reset()
        obs, _, _, _, info = self.recv()
        return obs, info

    def send(self, actions: Any, env_id: Any = None) -> None:
        ids = np.arange(self.num_envs) if env_id is None else env_id
        self._done_at[ids] = time.perf_counter() + self._seconds(self._rng, len(ids))

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        ids = np.argsort(self._done_at, kind="stable")[: self.batch_size]
        time.sleep(max(0.0, float(self._done_at[ids[-1]]) - time.perf_counter()))
        self._done_at[ids] = np.inf
        none = np.zeros(self.batch_size, bool)
        return self._obs, none.astype(np.float32), none, none, {"env_id": ids.astype(np.int32)}


SleepingPool.__module__ = "envpool.sleeping"  # which determines its adapter


def even(rng: np.random.Generator, count: int) -> Any:
    """Steps of 4 ms."""
    return np.full(count, 0.004)


def uneven(rng: np.random.Generator, count: int) -> Any:
    """Steps of 4 ms in the mean: nine in ten take 1 ms, one takes 31."""
    return np.where(rng.random(count) < 0.1, 0.031, 0.001)


def envpools(name: str) -> Callable[[int, int, int], Any]:
    """Make envpool's pools of this task."""
    import envpool

    def make(num_envs: int, batch_size: int, seed: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return envpool.make_gymnasium(
                name, num_envs=num_envs, batch_size=batch_size, num_threads=2, seed=seed
            )

    return make


def act(action: Any, seconds: float, per_row: bool, num_envs: int, obs: torch.Tensor) -> torch.Tensor:
    """Work for this long, for all envs together or at each call, and choose the same actions."""
    spend(seconds * len(obs) / num_envs if per_row else seconds, works=seconds > 0)
    result: torch.Tensor = action[: len(obs)]
    return result


def compare(make: Callable[[int, int, int], Any], num_envs: int, policy: Any, steps: int) -> list[str]:
    """Transitions per second of the pool at once, and the others' over it."""
    half, frames = num_envs // 2, steps * num_envs
    envs: dict[str, Any] = {
        "sync": make(num_envs, num_envs, 0),
        "splits=2": [make(half, half, 0), make(half, half, half)],
        "half": make(num_envs, half, 0),
        "quarter": make(num_envs, num_envs // 4, 0),
    }
    runs = {
        name: Collector(env, policy, frames_per_batch=frames, splits=2 if name == "splits=2" else 1).rollout
        for name, env in envs.items()
    }
    result = take_turns(runs, turns=7)
    rate = f"{frames / result['sync'].median:,.0f}"
    return [rate, *(f"{ratio(result['sync'], result[name]):.2f}" for name in runs if name != "sync")]


HEADER = ["envs", "policy", "sync, transitions/s", "splits=2", "async, half a batch", "async, a quarter"]


def sleeping(num_envs: int = 16, steps: int = 12) -> str:
    """Create envs with one core each."""
    actions, rows = torch.zeros(num_envs, dtype=torch.int64), []
    for name, seconds in (("even", even), ("uneven", uneven)):
        make = partial(SleepingPool, seconds=seconds)
        for text, cost, per_row in (
            ("costs nothing", 0.0, False),
            ("4 ms for all rows", 0.004, True),
            ("4 ms each call", 0.004, False),
        ):
            policy = partial(act, actions, cost, per_row, num_envs)
            rows.append([name, text, *compare(make, num_envs, policy, steps)])
    return table(HEADER, rows)


def working(steps: int = 60) -> str:
    """envpool's envs, with two threads."""
    if not importlib.util.find_spec("envpool"):
        return "envpool is not installed"
    rows = []
    for name, num_envs in (("CartPole-v1", 64), ("HalfCheetah-v4", 32), ("Pong-v5", 16)):
        make = envpools(name)
        space = make(1, 1, 0).action_space
        discrete = isinstance(space, gym.spaces.Discrete)
        actions = (
            free_policy(num_envs)(torch.zeros(num_envs))
            if discrete
            else torch.zeros(num_envs, *space.shape, dtype=torch.float64)
        )
        for text, cost in (("costs nothing", 0.0), ("2 ms for all rows", 0.002)):
            policy = partial(act, actions, cost, True, num_envs)
            rows.append([f"{name} x {num_envs}", text, *compare(make, num_envs, policy, steps)])
    return table(HEADER, rows)


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    print("16 envs that each have a core of their own, 4 ms a step in the mean\n")
    print(sleeping())
    print("\nenvpool with two threads\n")
    print(working())


if __name__ == "__main__":
    main()
