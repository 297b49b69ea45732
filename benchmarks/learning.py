"""Measures the examples' returns and speed over seeds, beside stable-baselines3 if installed.

``python -m benchmarks.learning ppo-cartpole sac-pendulum --seeds 1 2 3`` runs some, without names all. One run
after the other, each on one thread, ours and the peer's in turn: about an hour in all. The peer has the same frames,
envs, networks and hyperparameters, but for PPO the usual minibatches, of 128 rows at 2.5e-4 on CartPole and of 64 at
3e-4 on HalfCheetah; ours are twice as large, at 5e-4. It has no recurrent Q-learning: its DQN sees the last four
observations instead, with the settings that its own collection of tuned hyperparameters has for CartPole. Returns are
those of the last training episodes; of the recurrent DQN (the kept weights) and of SAC those of the policy without
exploration.
"""

import argparse
import importlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure.timing import table
from benchmarks.peers import learning as peers
from flatroll.examples import ppo
from flatroll.examples.common import parse

Outcome = dict[str, float]
CHEETAH = {"env": "envpool:HalfCheetah-v4", "num-envs": 16, "steps": 128, "minibatches": 16, "lr": 5e-4}


def program(name: str, frames: int, seed: int, **more: Any) -> Outcome:
    """Run a program of the examples; PPO's return is that of the training, others' of the evaluation at the end."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"frames": frames, "seed": seed, "folder": folder, "save-every": 2 * frames, **more}
        words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
        found = importlib.import_module(f"flatroll.examples.{name}").train(parse(name, words))
    result = found["return" if name == "ppo_continuous" else "evaluation"]
    return {"return": result, "frames": found["frames"], "s": found["seconds"]}


#: Our runs, by task: from (frames, seed) to the outcome; and the frames.
OURS: dict[str, tuple[Callable[[int, int], Outcome], int]] = {
    "ppo-cartpole": (lambda frames, seed: ppo.train("CartPole-v1", frames, seed), 500_000),
    "ppo-cheetah": (lambda frames, seed: program("ppo_continuous", frames, seed, **CHEETAH), 500_000),
    "dqn-memory": (lambda frames, seed: program("recurrent_dqn", frames, seed), 150_000),
    "sac-pendulum": (
        lambda frames, seed: program("sac", frames, seed),
        15_000,
    ),
}


def peer(task: str) -> Callable[[int, int], Outcome]:
    """Return a function that learns the same task with stable-baselines3."""
    return lambda frames, seed: peers.run(task, frames, seed)


def outcome(run: Callable[[int, int], Outcome], frames: int, seed: int, who: str) -> Outcome:
    begun = time.process_time()
    found = run(frames, seed)
    found["cpu s"] = time.process_time() - begun
    shown = ", ".join(f"{name} {value:,.1f}" for name, value in found.items())
    print(f"  {who}, seed {seed}: {shown}", flush=True)
    return found


def row(task: str, who: str, found: list[Outcome]) -> list[str]:
    returns = [run["return"] for run in found]
    spread = f"{min(returns):,.0f} to {max(returns):,.0f}"
    seconds = [f"{statistics.median(run[name] for run in found):,.0f}" for name in ("s", "cpu s")]
    return [task, who, f"{found[0]['frames']:,.0f}", f"{statistics.median(returns):,.0f}", spread, *seconds]


def main(argv: list[str] | None = None) -> None:
    """Run all tasks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", help=f"any of {', '.join(OURS)}; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--frames", type=int, help="instead of those of the task")
    parser.add_argument("--alone", action="store_true", help="leave the peer out")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.tasks) - set(OURS))
    if unknown:
        parser.error(f"no task named {', '.join(unknown)}; there are {', '.join(OURS)}")
    torch.set_num_threads(1)
    compared = not args.alone and importlib.util.find_spec("stable_baselines3") is not None
    if compared:  # with all that it imports, before either is timed
        importlib.import_module("stable_baselines3")
    rows = []
    for task in args.tasks or OURS:
        run, usual = OURS[task]
        frames = args.frames or usual
        runs = {"flatroll": run} | ({"stable-baselines3": peer(task)} if compared else {})
        found: dict[str, list[Outcome]] = {who: [] for who in runs}
        print(task, flush=True)
        for seed in args.seeds:
            for who, train in runs.items():
                found[who].append(outcome(train, frames, seed, who))
        rows += [row(task, who, outcomes) for who, outcomes in found.items()]
    header = ["task", "", "frames", "return, median", "of the seeds", "s, median", "of the processor"]
    print("\n" + table(header, rows))


if __name__ == "__main__":
    main()
