"""How soon workers start, deliver, fail and end, what memory they take, and what weights cost."""

import ast
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import psutil
import torch

from benchmarks.measure.timing import ratio, take_turns
from benchmarks.workers.finding import Finding, copy_all
from benchmarks.workers.speed import Slow, policy
from flatroll.rollouts import MultiAsyncCollector, MultiSyncCollector
from flatroll.sharing import Nursery, SharedWeights, WorkerDied

PRELOADED = ("flatroll.rollouts", "benchmarks.workers.speed")
KILLS = Path(__file__).resolve().parents[2] / "tests" / "support" / "kill_workers.py"


class Clock(Slow):
    """Sleeps, and shows when its step ended, by the clock that all processes have in common."""

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float64)

    def step(self, action: Any) -> Any:
        super().step(action)
        self._observed = np.array([time.monotonic()])
        return self._observed, 0.0, False, False, {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1), {}


def measure_latency(workers: int = 8, batches: int = 60) -> list[Finding]:
    """From the end of the slowest worker's last step until the batch of all is there."""
    late = []
    with MultiSyncCollector(
        partial(Clock, False, 5e-3), num_workers=workers, frames_per_batch=2 * workers
    ) as collector:
        for _ in range(batches):
            batch = next(collector)
            late.append(1000 * (time.monotonic() - float(batch["next", "observation"].max())))
    late = late[5:]
    text = f"batch of {workers} workers after the slowest one's last step"
    return [Finding(text, statistics.median(late), "ms", most=5, note=f"median; {max(late):.1f} at most")]


def measure_ends(repeats: int = 5) -> list[Finding]:
    """Seconds that `shutdown` takes with workers in the middle of steps, and from a worker's death to the error."""
    ends, deaths = [], []
    with Nursery(preload=PRELOADED) as nursery:
        for _ in range(repeats):
            collector = MultiAsyncCollector(
                partial(Slow, False, 1e-2), num_workers=4, frames_per_batch=1000, nursery=nursery
            )
            time.sleep(0.1)  # in mid-window
            start = time.perf_counter()
            collector.shutdown()
            ends.append(time.perf_counter() - start)

            collector = MultiAsyncCollector(
                partial(Slow, False, 1e-2), num_workers=4, frames_per_batch=1000, nursery=nursery
            )
            killed: list[float] = []

            def kill(pid: int = nursery.workers[-1].pid, killed: list[float] = killed) -> None:
                killed.append(time.perf_counter())
                os.kill(pid, signal.SIGKILL)

            timer = threading.Timer(0.1, kill)
            timer.start()
            try:
                next(collector)
            except WorkerDied:
                deaths.append(time.perf_counter() - killed[0])
            timer.join()
    return [
        Finding("`shutdown()`, 4 workers in steps of 10 ms", max(ends), "s", most=0.5, note="slowest of 5"),
        Finding("a worker killed until the error is raised", max(deaths), "s", most=0.5, note="slowest of 5"),
    ]


def measure_starts() -> list[Finding]:
    """Processor time of a worker to its first window, prepared or spawned; its memory; late starts over early ones."""
    used: dict[str, float] = {}
    memory = 0.0
    ways: tuple[Literal["fork", "spawn"], ...] = "fork", "spawn"
    for way in ways:
        with (
            Nursery(way, preload=PRELOADED) as nursery,
            MultiSyncCollector(
                partial(gym.make, "CartPole-v1"), policy(), frames_per_batch=64, nursery=nursery
            ) as collector,
        ):
            next(collector)
            worker = psutil.Process(nursery.workers[-1].pid)
            used[way] = sum(worker.cpu_times()[:2])
            if way == "fork":
                memory = worker.memory_full_info().uss / 2**20
    walls = []
    with Nursery(preload=PRELOADED) as nursery:
        for _ in range(12):
            start = time.perf_counter()
            nursery.start(_greet).receive("greeting")
            walls.append(time.perf_counter() - start)
    walls = walls[1:]  # the first one waits for the process that forks
    note = f"{used['fork']:.2f} over {used['spawn']:.2f} s"
    last = statistics.median(walls[-3:]) / statistics.median(walls[:3])
    return [
        Finding("prepared worker's CPU to its first window, over a spawned one's", used["fork"] / used["spawn"],
                most=0.05, note=note),
        Finding("private memory of a worker with CartPole", memory, "MB", most=30),
        Finding("start of workers 9 to 11 over that of 1 to 3", last, most=1.5, note=f"{walls[-1] * 1e3:.0f} ms"),
    ]  # fmt: skip


def _greet(channel: Any) -> None:
    channel.send("greeting")
    channel.receive("the end")


def measure_weights() -> list[Finding]:
    """Time publishing and fetching relative to one copy of the same number of bytes."""
    findings = []
    for megabytes, width in ((0.03, 60), (8.5, 1024), (135, 4096)):
        layers = [torch.rand(width, width), *(torch.rand(width) for _ in range(8))]
        if megabytes > 1:
            layers.append(torch.rand(width, width))
        state = {str(i): layer for i, layer in enumerate(layers)}
        shared, fetched = SharedWeights(state), {name: value.clone() for name, value in state.items()}
        flat = torch.cat([value.flatten() for value in layers])
        place = flat.clone()
        turns = take_turns(
            {
                "publish": partial(shared.publish, state),
                "fetch": partial(shared.fetch_into, fetched),
                "memcpy": partial(copy_all, [flat], [place]),
            },
            turns=15,
            calls=100 if megabytes < 1 else 3,
            clock=time.thread_time,
        )
        for way in ("publish", "fetch"):
            over = ratio(turns[way], turns["memcpy"])
            note = f"{turns[way].median * 1e6:,.0f} over {turns['memcpy'].median * 1e6:,.0f} µs"
            # A small network's time is that of the calls for its ten tensors.
            findings.append(
                Finding(f"{way} {megabytes:g} MB of weights, over memcpy", over, most=1.5, note=note)
            )
    return findings


def measure_kills(kills: int = 200) -> list[Finding]:
    """What is wrong after many kills, with the program of the tests, where they are."""
    if not KILLS.exists():
        return []
    command = [sys.executable, str(KILLS), str(kills)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    found = ast.literal_eval(ran.stdout[: ran.stdout.index("}") + 1])
    left = sum(max(0, found[name]) for name in ("wrong", "workers", "segments", "processes"))
    # Two for each block of three workers that may not have sent it yet when files were first counted.
    left += max(0, found["descriptors"] - 6)
    note = f"{found['rows']:,} rows, {found['descriptors']} more open files"
    return [
        Finding(
            f"rows wrong or missing, processes, files, segments after {kills} kills",
            left,
            "",
            most=0,
            note=note,
        )
    ]
