"""Measures collectors with many workers against their budgets, beside TorchRL's where it is installed.

``python -m flatroll bench workers`` takes two to three minutes, four at most. Each part runs in a separate process
with a time limit; parts that exceed it are listed below the table. Ratios are of times measured in turns. The last
column is the number of cores left free by other programs: speed-ups need one core per process.

``python -m benchmarks.bench_workers --learn`` trains SAC on Pendulum in one process, and with two workers
beside the learner, in turns (`flatroll.examples.many_workers`): returns, seconds, and how old the weights were.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import psutil
import torch

from benchmarks.measure.timing import table
from benchmarks.workers import life, speed, windows
from benchmarks.workers.finding import Finding, Load
from flatroll.examples import many_workers

#: Parts: what gives their findings, or numbers; and the seconds that they may take.
PARTS: dict[str, tuple[Callable[[], Any], int]] = {
    "windows": (windows.measure_all, 60),
    "scaling": (speed.measure_scaling, 75),
    "latency": (life.measure_latency, 30),
    "ends": (life.measure_ends, 30),
    "starts": (life.measure_starts, 45),
    "weights": (life.measure_weights, 30),
    "kills": (life.measure_kills, 60),
    "one process": (speed.measure_single, 40),
    "ours, sync": (lambda: speed.measure_ours(True), 30),
    "ours, async": (lambda: speed.measure_ours(False), 30),
    "torchrl, sync": (lambda: speed.measure_peer(True), 60),
    "torchrl, async": (lambda: speed.measure_peer(False), 60),
}
IN_ALL = 235  # seconds
HEADER = ["what", "budget", "measured", "", "", "cores free of other programs"]


def in_a_process(part: str, seconds: float) -> tuple[Any, str]:
    """What a part gave within these seconds (None: nothing), and the cores that were free meanwhile."""
    command = [sys.executable, "-m", "benchmarks.bench_workers", "--part", part]
    with Load.measured() as load, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            return None, ""
    return (json.loads(printed.splitlines()[-1]) if process.returncode == 0 else None), load.text()


def show(findings: list[Finding], cores: str) -> None:
    """Print rows of the table as soon as they are known."""
    for finding in findings:
        print(table([], [[*finding.cells(), cores]]).splitlines()[-1], flush=True)


def measure_budgets() -> None:
    """Run all parts and print the table."""
    print(table(HEADER, []), flush=True)
    numbers: dict[str, dict[str, float]] = {}
    missing, end = [], time.monotonic() + IN_ALL
    for part in PARTS:
        if part.startswith("torchrl") and not speed.has_peer():
            continue
        seconds = min(PARTS[part][1], max(1.0, end - time.monotonic()))
        found, cores = in_a_process(part, seconds)
        if found is None:
            missing.append(f"{part} ({seconds:.0f} s)")
        elif isinstance(found, dict):
            numbers[part] = found
        else:
            show([Finding(**each) for each in found], cores)
        mode = part.partition(", ")[2]
        if part.startswith("torchrl") and {part, f"ours, {mode}"} <= numbers.keys():
            show(speed.compare(mode, numbers[f"ours, {mode}"], numbers[part]), cores)
    if missing:
        print(f"\nFailed, or not done in so many seconds: {', '.join(missing)}.")


def learn(frames: int, seeds: list[int], workers: int) -> None:
    """Train here and with workers, in turns, and print the table."""
    rows, ratios = [], []
    with Load.measured() as load:
        for seed in seeds:
            runs = {
                "one process": many_workers.train("here", 0, frames, seed),
                f"{workers} workers": many_workers.train("processes", workers, frames, seed),
            }
            for who, run in runs.items():
                cells = [f"{run['return']:.0f}", f"{run['s']:.1f}"]
                lag = f"{run['lag']:.1f} ({run['most lag']})"
                rows.append([f"{seed}", who, *cells, f"{run['start']:.1f}", lag])
                print(
                    f"seed {seed}, {who}: return {cells[0]} after {cells[1]} s", file=sys.stderr, flush=True
                )
            one, many = runs.values()
            ratios.append(many["s"] / one["s"])
    header = ["seed", "", "return, 16 episodes", "s", "s to start", "lag, mean (most)"]
    print(table(header, rows))
    print(
        f"\n{frames:,} frames each. Seconds with workers over those of one process: median "
        f"{statistics.median(ratios):.2f}. Cores free of other programs: {load.text()}."
    )


def main(argv: list[str] | None = None) -> None:
    """Print the table of budgets, or that of training runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list(PARTS), help="print what one part gives, as JSON")
    parser.add_argument("--learn", action="store_true", help="train, instead")
    parser.add_argument("--frames", type=int, default=10_000, help="with --learn (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="with --learn (1 2 3)")
    parser.add_argument("--workers", type=int, default=2, help="with --learn (%(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.part is not None:
        logging.getLogger("flatroll.rollouts").setLevel(
            logging.ERROR
        )  # no word of few cores, or of workers killed
        found = PARTS[args.part][0]()
        print(json.dumps(found if isinstance(found, dict) else [asdict(each) for each in found]))
    elif args.learn:
        learn(args.frames, args.seeds, args.workers)
    else:
        begun = time.perf_counter()
        measure_budgets()
        print(f"\n{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
