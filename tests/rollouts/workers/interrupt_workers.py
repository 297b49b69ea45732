"""Press Ctrl-C while workers start, make their envs, collect, and end; see what is printed and what is left.

``python tests/rollouts/workers/interrupt_workers.py`` prints a line for each place, and fails if one went wrong.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

PROGRAM = """
import gymnasium, sys, time
from flatroll.rollouts import MultiAsyncCollector, MultiSyncCollector

place = sys.argv[1]

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self):
        if place == "making envs": time.sleep(100)
    def reset(self, **options):
        return self.observation_space.sample(), {}
    def step(self, action):
        time.sleep(0.01)
        return self.observation_space.sample(), 0.0, False, False, {}
    def close(self):
        if place == "ending": time.sleep(3)

print("begun", flush=True)
kind = MultiAsyncCollector if place == "async" else MultiSyncCollector
collector = kind(Env, num_workers=2, frames_per_batch=10**6 if place == "in a batch" else 4)
next(collector) if place != "in a batch" else None
print("made", flush=True)
if place == "ending":
    collector.shutdown()
while True:
    next(collector)
"""
#: Place: after which line, and how many seconds later.
PLACES = {
    "starting": ("begun", 0.5),
    "making envs": ("begun", 6.0),
    "in a batch": ("made", 0.5),
    "async": ("made", 0.5),
    "ending": ("made", 0.5),
}


def interrupt(place: str, line: str, seconds: float) -> bool:
    """Run the program, interrupt its group, print what was found; whether it is as it should be."""
    command = [sys.executable, "-c", PROGRAM, place]
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert program.stdout is not None
    while program.stdout.readline().strip() != line:
        assert program.poll() is None, program.communicate()
    time.sleep(seconds)
    children = psutil.Process(program.pid).children(recursive=True)
    began = time.monotonic()
    os.killpg(program.pid, signal.SIGINT)
    try:
        _, errors = program.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        _, errors = program.communicate()
    took = time.monotonic() - began
    time.sleep(0.3)
    left = [child.pid for child in children if Path(f"/proc/{child.pid}").exists()]
    printed = errors.count("Traceback")
    print(
        f"{place}: exit {program.returncode} after {took:.1f} s, {printed} traceback, processes left: {left}"
    )
    return program.returncode == -signal.SIGINT and printed == 1 and not left


if __name__ == "__main__":
    went_well = [interrupt(place, *when) for place, when in PLACES.items()]
    sys.exit(not all(went_well))
