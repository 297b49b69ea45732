"""Kill workers at random times while rows come in, and check that nothing is lost but what they had not delivered.

``python tests/support/kill_workers.py 200`` prints what was found.
"""

import gc
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from worker_envs import ItsWeight, envs

from flatroll.rollouts import MultiAsyncCollector
from flatroll.sharing import Nursery

IDS = ("collector", "traj_ids")


def descriptors() -> int:
    """How many files this process has open."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def shared_names(pids: set[int]) -> set[str]:
    """The names in shared memory, but for those that torch gave to processes that are not among ``pids``."""
    names = set(os.listdir("/dev/shm"))
    return {name for name in names if not name.startswith("torch_") or int(name.split("_")[1]) in pids}


def kill_workers(nursery: Nursery, kills: int, seed: int = 0) -> dict[str, Any]:
    """Collect while workers are killed; return counts of what was wrong, and of what there was."""
    draw = random.Random(seed)
    pids = {os.getpid()}
    segments = shared_names(pids)
    steps: dict[int, int] = {}  # the last step seen of each trajectory
    wrong = rows = 0

    def take(collector: MultiAsyncCollector) -> set[int]:
        """Collect a batch and check it; return whose rows it holds."""
        nonlocal rows, wrong
        batch = next(collector)
        rows += len(batch)
        for id, (_, _, step) in zip(batch[IDS].tolist(), batch["observation"].tolist(), strict=True):
            wrong += step != steps.get(id, -1) + 1  # a gap, a row twice, or another's row
            steps[id] = int(step)
        return {id >> 40 for id in batch[IDS].tolist()}

    def settle(collector: MultiAsyncCollector) -> None:
        """Collect until each worker has delivered: its memory is here then, and that of the one before it is gone."""
        team: Any = collector._supply.gatherer.team
        heard: set[int] = set()
        while not heard >= {member.writer for member in team.members}:
            heard |= take(collector)

    with MultiAsyncCollector(
        envs(2), ItsWeight(), num_workers=3, frames_per_batch=16, on_failure="replace", max_failures=kills,
        compact_obs=True, nursery=nursery,
    ) as collector:  # fmt: skip
        before = 0
        for _ in range(kills):
            pids |= {worker.pid for worker in nursery.workers}
            os.kill(draw.choice(nursery.workers[-3:]).pid, signal.SIGKILL)
            failures = collector.stats()["failures"]
            while collector.stats()["failures"] == failures or draw.random() < 0.7:
                take(collector)
            if not before:  # from the first replacement on
                settle(collector)
                before = descriptors()
        settle(collector)
        opened = descriptors() - before
        writers = {id >> 40 for id in steps}
    left, deadline = shared_names(pids) - segments, time.monotonic() + 600
    while left and time.monotonic() < deadline:  # names of other programs come and go
        time.sleep(0.2)
        left &= shared_names(pids)
    return {
        "kills": kills,
        "rows": rows,
        "wrong": wrong,
        "writers": len(writers),
        "descriptors": opened,
        "segments": len(left),
        "workers": len(nursery.workers),
    }


if __name__ == "__main__":
    with Nursery(preload=("flatroll.rollouts", "worker_envs")) as started:
        began = time.monotonic()
        found = kill_workers(started, int(sys.argv[1]) if len(sys.argv) > 1 else 200)
        (helper,) = children(os.getpid())
        found["processes"] = len(children(helper))
        print(found, f"{time.monotonic() - began:.0f} s")
