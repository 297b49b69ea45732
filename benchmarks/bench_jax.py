"""Benchmarks the collector on a JAX simulator against a hand-written loop that stores the same columns.

The loop is timed twice: up to its time-major columns ``[T, E, ...]``, and with the flat rows ``[E * T, ...]`` that the
collector's batch has and that losses and buffers accept.

``python -m flatroll bench jax``, where gymnax is installed (`make simulators` has an environment with it:
``.venv-versions/simulators-jax/bin/python -m flatroll bench jax``)
"""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.rollouts import Collector
from flatroll.wrappers import InitTracker, StepCounter, TrajId, as_vector_env

#: Vector steps of a batch.
STEPS = {64: 256, 4096: 32}


def hand_written(num_envs: int, flat: bool) -> Callable[[], object]:
    """gymnax's CartPole in one jitted function, with true last observations, and preallocated time-major columns.

    If ``flat`` they are transposed once for each batch.
    """
    import gymnax  # pyright: ignore[reportMissingImports]
    import jax  # pyright: ignore[reportMissingImports]
    from jax import numpy as jnp  # pyright: ignore[reportMissingImports]

    env, params = gymnax.make("CartPole-v1")
    steps, rng = STEPS[num_envs], np.random.default_rng(0)

    def all_first(key: Any) -> Any:
        return jax.vmap(env.reset_env, (0, None))(jax.random.split(key, num_envs), params)

    def one(key: Any, state: Any, action: Any) -> Any:
        obs, state, reward, terminated, _ = env.step_env(key, state, action, params)
        return obs, state, reward, terminated, env.is_truncated(state, params)

    def step_all(key: Any, state: Any, action: Any) -> Any:
        key, stepping, resetting = jax.random.split(key, 3)
        last, state, reward, terminated, truncated = jax.vmap(one)(
            jax.random.split(stepping, num_envs), state, action
        )
        ended = terminated | truncated
        first, fresh = all_first(resetting)
        state = jax.tree.map(lambda new, old: jnp.where(ended, new, old), fresh, state)
        return key, state, jnp.where(ended[:, None], first, last), last, reward, terminated, truncated

    step = jax.jit(step_all)
    key = jax.random.PRNGKey(0)
    first, start = jax.jit(all_first)(key)
    start = jax.tree.map(jnp.asarray, start)
    columns: dict[str, Any] = {
        name: np.zeros((steps, num_envs, *shape), dtype)
        for name, shape, dtype in [
            ("obs", (4,), np.float32),
            ("next", (4,), np.float32),
            ("action", (), np.int64),
            ("reward", (), np.float32),
            ("terminated", (), bool),
            ("truncated", (), bool),
            ("done", (), bool),
            ("first", (), bool),
            ("count", (), np.int64),
            ("next_count", (), np.int64),
            ("ids", (), np.int64),
        ]
    }
    now: dict[str, Any] = {
        "key": key,
        "state": start,
        "obs": np.asarray(first),
        "first": np.ones(num_envs, bool),
        "count": np.zeros(num_envs, np.int64),
        "ids": np.arange(num_envs),
    }

    def run() -> dict[str, torch.Tensor]:
        key, state, o, first, n, ids = (
            now[name] for name in ("key", "state", "obs", "first", "count", "ids")
        )
        c = columns
        for t in range(steps):
            c["obs"][t] = o
            c["first"][t] = first
            c["count"][t] = n
            c["ids"][t] = ids
            a = rng.integers(0, 2, num_envs)
            c["action"][t] = a
            key, state, *arrays = step(key, state, a.astype(np.int32))
            o, last, reward, terminated, truncated = map(np.asarray, arrays)
            c["next"][t] = last
            c["reward"][t] = reward
            c["terminated"][t] = terminated
            c["truncated"][t] = truncated
            c["done"][t] = first = terminated | truncated
            c["next_count"][t] = n = n + 1
            if first.any():
                n[first] = 0
                ids = ids + first * num_envs
        now.update(key=key, state=state, obs=o, first=first, count=n, ids=ids)
        tensors = {name: torch.from_numpy(column) for name, column in c.items()}
        return {name: x.transpose(0, 1).flatten(0, 1) if flat else x for name, x in tensors.items()}

    return run


def ours(num_envs: int, framework: str) -> Callable[[], object]:
    """A collector of the same columns, with the same random actions' cost."""
    import gymnax  # pyright: ignore[reportMissingImports]

    env = as_vector_env(gymnax.make("CartPole-v1")[0], num_envs=num_envs, framework=framework)
    env = InitTracker(StepCounter(TrajId(env)))
    batches = iter(Collector(env, frames_per_batch=STEPS[num_envs] * num_envs, total_frames=-1))
    return lambda: next(batches)


def against_loop(clock: Callable[[], float]) -> str:
    """Median µs a vector step, and either loop's time over the collector's."""
    rows = []
    for num_envs, steps in STEPS.items():
        contenders = {"loop": hand_written(num_envs, False), "flat": hand_written(num_envs, True)}
        contenders |= {framework: ours(num_envs, framework) for framework in ("numpy", "torch")}
        result = take_turns(contenders, turns=25, clock=clock)
        cells = [f"{result[name].median / steps * 1e6:,.0f}" for name in contenders]
        ratios = [
            f"{ratio(result['flat'], result[name]):.2f} ({ratio(result['loop'], result[name]):.2f})"
            for name in ("numpy", "torch")
        ]
        rows.append([f"{num_envs:,}", *cells, *ratios])
    header = ["envs", "time-major loop, µs", "loop with flat rows, µs", "collector, µs"]
    header += [
        'with framework="torch", µs',
        "ratio to the flat loop (to the time-major one)",
        "the same, torch",
    ]
    return table(header, rows)


def main() -> None:
    """Print the table."""
    if importlib.util.find_spec("gymnax") is None:
        print("gymnax is not installed: nothing to step")
        return
    torch.set_num_threads(1)
    print("Collector on gymnax's CartPole against a hand-written loop that stores the same columns\n")
    print(against_loop(time.perf_counter))
    print("\nThe same in processor time of all threads\n")
    print(against_loop(time.process_time))


if __name__ == "__main__":
    main()
