"""Collectors with workers at their limits: tiny and huge windows, no room in /dev/shm, a REPL and a notebook.

``python tests/support/extremes.py`` measures all of it in full size and prints what was found.
"""

import gc
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
from gymnasium import spaces
from kill_workers import descriptors
from worker_envs import Seeded

from flatroll.rollouts import MultiAsyncCollector
from flatroll.sharing import Nursery

IDS = ("collector", "traj_ids")


def tiny_windows(nursery: Nursery, windows: int) -> dict[str, Any]:
    """Windows of one row each, none lost or doubled; what they leave behind in memory and descriptors."""
    steps: dict[int, int] = {}
    wrong = 0
    process = psutil.Process()
    with MultiAsyncCollector(Seeded, num_workers=2, frames_per_batch=1, nursery=nursery) as collector:
        for number in range(windows):
            batch = next(collector)
            id, step = int(batch[IDS]), int(batch["observation"][0, 2])
            wrong += step != steps.pop(id, -1) + 1
            if not batch["next", "done"]:
                steps[id] = step
            if number == windows // 10:
                before, memory, began = descriptors(), process.memory_info().rss, time.monotonic()
        rate = (windows - windows // 10) / (time.monotonic() - began)
        opened, grown = descriptors() - before, process.memory_info().rss - memory
    return {
        "windows": windows,
        "wrong": wrong,
        "descriptors": opened,
        "MB": grown >> 20,
        "windows/s": round(rate),
    }


class Wide(gym.Env[Any, Any]):
    """Observations of ``size`` float32, all of them the number of the step; episodes of 7 steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, size: int) -> None:
        self.observation_space = spaces.Box(0, 1e9, (size,), np.float32)
        self.size, self.count = size, 0

    def observed(self) -> Any:
        return np.full(self.size, self.count, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count += 1
        return self.observed(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observed(), 0.0, self.count % 8 == 0, False, {}


def large_windows(nursery: Nursery, megabytes: int, windows: int = 6) -> dict[str, Any]:
    """Windows of so many MB of observations; the memory is given back at the end."""
    rows, size = 40, megabytes * 2**20 // 40 // 4
    memory = psutil.Process().memory_info().rss
    began = time.monotonic()
    with MultiAsyncCollector(
        lambda: Wide(size), frames_per_batch=rows, slots=1, compact_obs=True, nursery=nursery
    ) as collector:
        wrong, count = 0, 0.0
        for _ in range(windows):
            obs = next(collector)["observation"]
            first = obs[:, 0]
            wrong += int((obs != first[:, None]).any(1).sum()) + int((first.diff() <= 0).sum())
            wrong += int(first[0] <= count)
            count = float(first[-1])
            bytes_of_window = obs.nbytes
        del obs, first
        seconds = (time.monotonic() - began) / windows
    gc.collect()
    left = (psutil.Process().memory_info().rss - memory) >> 20
    return {"MB": bytes_of_window >> 20, "wrong": wrong, "s/window": round(seconds, 2), "MB left": left}


SESSION = """
import gymnasium as gym
from flatroll.rollouts import MultiSyncCollector
class Mine(gym.Env):
    observation_space, action_space, at = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Discrete(2), 0.0
    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample() * 0, {}
    def step(self, action):
        return self.observation_space.sample() * 0 + OFFSET, 0.0, False, False, {}

OFFSET = 4
def policy(obs):
    return (obs[:, 0] > 1).long()

collector = MultiSyncCollector([Mine, lambda: Mine()], policy, frames_per_batch=6)
batch = next(collector)
print("found", batch["action"].tolist())
collector.shutdown()
"""
FOUND = "found [0, 1, 1, 0, 1, 1]"


def repl() -> str:
    """What an interactive Python prints for classes, functions and variables that were typed there."""
    run = [sys.executable, "-i", "-q", "-W", "ignore"]
    typed = SESSION.replace("{}\n\n", "{}\n\n\n")
    done = subprocess.run(run, input=typed, capture_output=True, text=True, timeout=600, check=False)
    return done.stdout + ("" if FOUND in done.stdout else done.stderr)


def notebook(folder: Path) -> str:
    """The same in a notebook."""
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(cell) for cell in SESSION.split("\n\n")]
    made = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(made, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return "".join(output.get("text", "") for cell in made.cells for output in cell.outputs)


def without_shared_folder() -> str | None:
    """What a program prints where /dev/shm is full; None where this system lets nobody mount one for a try."""
    program = textwrap.dedent("""
        mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 77
        dd if=/dev/zero of=/dev/shm/full bs=1k count=100 2>/dev/null
        "$1" -W ignore -c "$2"
    """)
    run = ["unshare", "-m", "sh", "-c", program, "sh", sys.executable, SESSION]
    try:
        done = subprocess.run(run, capture_output=True, text=True, timeout=600, check=False)
    except FileNotFoundError:
        return None
    if done.returncode in (1, 77) and "found" not in done.stdout and "Traceback" not in done.stderr:
        return None
    return done.stdout + ("" if FOUND in done.stdout else done.stderr)


if __name__ == "__main__":
    with Nursery(preload=("flatroll.rollouts", "worker_envs")) as started:
        print("tiny windows:", tiny_windows(started, 10**5), flush=True)
        print("large windows:", large_windows(started, 200), flush=True)
    print("full /dev/shm:", without_shared_folder(), flush=True)
    print("REPL:", repl(), flush=True)
    print("notebook:", notebook(Path(os.getcwd())), flush=True)
