"""Trains beside stable-baselines3, an optional package, at the same settings, and compares time and returns.

``python -m benchmarks.peers.sb3 ppo-cheetah --seeds 1 2 3``; without names all tasks. Ours are the programs of
``examples/``; the peer has the same frames, envs, networks, minibatches, epochs and learning rates. They take turns,
seed by seed, in one process with one torch thread. Times are of whole trainings, our last evaluation included. With
``--compile``, ours train once more each, by compiled updates; the seconds that torch.compile takes for them, with its
cache on disk filled by an earlier training, are part of the times. Returns are those of the last 100 training episodes;
of SAC those of 20 episodes of the most probable actions.
"""

import argparse
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks.measure.timing import table
from flatroll.examples import ppo
from flatroll.examples.common import parse


class Task(NamedTuple):
    """A training by flatroll and by the peer: from (frames, seed), ours (compile, frames, seed), to a return."""

    frames: int
    ours: Callable[[bool, int, int], float]
    theirs: Callable[[int, int], float]


def program(name: str, result: str, frames: int, seed: int, compile: bool, **more: object) -> float:
    """Train with a program of the examples, without checkpoints and evaluations on the way."""
    with tempfile.TemporaryDirectory() as folder:
        never = 2 * frames
        options = {"frames": frames, "seed": seed, "folder": folder, "save-every": never, "eval-every": never}
        words = [
            word for option, value in {**options, **more}.items() for word in (f"--{option}", str(value))
        ] + ["--compile"] * compile
        found = importlib.import_module(f"flatroll.examples.{name}").train(parse(name, words))
    return float(found[result])


def part(module: str, name: str) -> Any:
    """Import an object of the optional package by name, hidden from type checkers."""
    return getattr(importlib.import_module(f"stable_baselines3.{module}".rstrip(".")), name)


def learn(model: Any, frames: int) -> float:
    """Train a model of the peer; return the mean return of the last 100 training episodes."""
    base: Any = part("common.callbacks", "BaseCallback")
    returns: list[float] = []

    class Returns(base):
        """Records the return of every episode."""

        def _on_step(self) -> bool:
            returns.extend(info["episode"]["r"] for info in self.locals["infos"] if "episode" in info)
            return True

    model.learn(frames, callback=Returns())
    return float(np.mean(returns[-100:] or [0.0]))


def cartpole(frames: int, seed: int) -> float:
    model = part("", "PPO")(
        "MlpPolicy",
        part("common.env_util", "make_vec_env")("CartPole-v1", n_envs=32, seed=seed),
        n_steps=ppo.ROWS // 32,
        batch_size=ppo.ROWS // ppo.MINIBATCHES,
        n_epochs=ppo.EPOCHS,
        learning_rate=lambda left: ppo.LR * left,
        ent_coef=0.01,
        clip_range_vf=0.2,
        seed=seed,
        device="cpu",
    )
    return learn(model, frames)


def from_envpool(name: str, num_envs: int, seed: int) -> Any:
    """Make an envpool env into a ``VecEnv`` of the peer that normalises observations and rewards."""
    import envpool

    vec_env = importlib.import_module("stable_baselines3.common.vec_env")
    base: Any = vec_env.VecEnv
    pool = envpool.make_gymnasium(name, num_envs=num_envs, seed=seed)

    class Pool(base):
        def __init__(self) -> None:
            seen = gym.spaces.Box(-np.inf, np.inf, pool.observation_space.shape, np.float32)
            super().__init__(num_envs, seen, pool.action_space)

        def reset(self) -> Any:
            return pool.reset()[0].astype(np.float32)

        def step_async(self, actions: Any) -> None:
            self.actions = actions

        def step_wait(self) -> Any:
            seen, reward, terminated, truncated, _ = pool.step(self.actions.astype(np.float64))
            done = terminated | truncated
            infos: list[dict[str, Any]] = [{} for _ in done]
            for i in np.flatnonzero(done):
                infos[i] = {"TimeLimit.truncated": bool(truncated[i]), "terminal_observation": seen[i]}
            if done.any():
                seen = seen.copy()
                seen[done] = pool.reset(np.flatnonzero(done))[0]
            return seen.astype(np.float32), reward.astype(np.float32), done, infos

        def close(self) -> None:
            pool.close()

        def get_attr(self, attr_name: str, indices: Any = None) -> Any:
            return [None] * num_envs

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any: ...

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Any:
            return [False] * num_envs

    return vec_env.VecNormalize(vec_env.VecMonitor(Pool()))


def cheetah(frames: int, seed: int) -> float:
    model = part("", "PPO")(
        "MlpPolicy",
        from_envpool("HalfCheetah-v4", 1, seed),
        n_steps=2048,
        batch_size=64,
        n_epochs=10,
        learning_rate=lambda left: 3e-4 * left,
        clip_range_vf=0.2,
        policy_kwargs={"net_arch": [64, 64], "activation_fn": nn.Tanh},
        seed=seed,
        device="cpu",
    )
    return learn(model, frames)


def pendulum(frames: int, seed: int) -> float:
    make = part("common.env_util", "make_vec_env")
    model = part("", "SAC")(
        "MlpPolicy",
        make("Pendulum-v1", n_envs=4, seed=seed),
        learning_rate=1e-3,
        learning_starts=1000,
        gradient_steps=4,
        seed=seed,
        device="cpu",
    )
    learn(model, frames)
    judged = make("Pendulum-v1", n_envs=20, seed=seed + 10_000)
    return float(part("common.evaluation", "evaluate_policy")(model, judged, n_eval_episodes=20)[0])


CHEETAH = "envpool:HalfCheetah-v4"
TASKS = {
    "ppo-cartpole": Task(
        100_000,
        lambda compile, frames, seed: ppo.train("CartPole-v1", frames, seed, compile=compile)["return"],
        cartpole,
    ),
    "ppo-cheetah": Task(
        50_000,
        lambda compile, frames, seed: program(
            "ppo_continuous", "return", frames, seed, compile, env=CHEETAH, episodes=1
        ),
        cheetah,
    ),
    "sac-pendulum": Task(
        5_000,
        lambda compile, frames, seed: program("sac", "evaluation", frames, seed, compile),
        pendulum,
    ),
}


def rows_of(name: str, frames: int, found: dict[str, list[tuple[float, float, float]]]) -> list[list[str]]:
    """Two rows of the table: medians over the seeds, ratios those of the same seed's turns."""
    rows = []
    for who, turns in found.items():
        cells = [name, who, f"{frames:,}"]
        for at in range(2):
            ratio = statistics.median(
                a[at] / b[at] for a, b in zip(turns, found["stable-baselines3"], strict=True)
            )
            cells += [f"{statistics.median(turn[at] for turn in turns):,.1f}", f"{ratio:.2f}"]
        rows.append([*cells, ", ".join(f"{turn[2]:,.0f}" for turn in turns)])
    return rows


def main(argv: list[str] | None = None) -> None:
    """Train all, seed by seed and in turn, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", help=f"any of {', '.join(TASKS)}; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--frames", type=int, help="instead of those of the task")
    parser.add_argument("--compile", action="store_true", help="train by compiled updates, too")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.tasks) - set(TASKS))
    if unknown:
        parser.error(f"no task named {', '.join(unknown)}; there are {', '.join(TASKS)}")
    torch.set_num_threads(1)
    rows = []
    for name in args.tasks or TASKS:
        task = TASKS[name]
        frames = args.frames or task.frames
        runs: dict[str, Callable[[int, int], float]] = {"flatroll": partial(task.ours, False)}
        if args.compile:
            runs["flatroll, compiled"] = partial(task.ours, True)
        runs["stable-baselines3"] = task.theirs
        found: dict[str, list[tuple[float, float, float]]] = {who: [] for who in runs}
        for train in runs.values():  # once untimed: imports, compiled kernels
            train(min(frames, 1100), 0)
        for seed in args.seeds:
            for who, train in runs.items():
                wall, processor = time.perf_counter(), time.process_time()
                reached = train(frames, seed)
                turn = time.perf_counter() - wall, time.process_time() - processor, reached
                found[who].append(turn)
                shown = "{:.1f} s, {:.1f} of the processor, return {:,.1f}".format(*turn)
                print(f"{name}, {who}, seed {seed}: {shown}", flush=True)
        rows += rows_of(name, frames, found)
    header = ["task", "", "frames", "s", "of the peer's", "processor s", "of the peer's", "returns"]
    print("\n" + table(header, rows))


if __name__ == "__main__":
    main()
