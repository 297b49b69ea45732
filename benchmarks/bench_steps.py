"""Benchmarks writing one vector step at a time, and sampling, against plain NumPy arrays and stable-baselines3.

``python -m flatroll bench steps``
"""

import importlib
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.measure import hindsight
from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.buffers import LazyTensorStorage, ReplayBuffer

OBSERVATION, ACTION, EPISODE, SAMPLE = 17, 6, 200, 256
WINDOW, WINDOWS, TURNS = 64, 40, 25

Step = dict[Any, Any]
Write = Callable[[Step], object]
Sample = Callable[[], object]


class Steps:
    """Steps of E envs without end, in HalfCheetah's shapes; each call of ``next`` gives one."""

    def __init__(self, num_envs: int) -> None:
        random, steps = np.random.default_rng(0), WINDOW * 4
        self.at, flags = -1, np.zeros((steps, num_envs), np.bool_)
        flags[EPISODE - 1 :: EPISODE] = True
        resets = random.random((steps, num_envs, OBSERVATION), np.float32)
        now = random.random((steps, num_envs, OBSERVATION), np.float32)
        later = np.where(flags[:, :, None], resets, np.roll(now, -1, 0))
        self.steps = [
            {
                "observation": now[t],
                "action": random.random((num_envs, ACTION), np.float32),
                ("next", "observation"): later[t],
                ("next", "reward"): random.random(num_envs),
                ("next", "terminated"): flags[t],
                ("next", "truncated"): np.zeros_like(flags[t]),
            }
            for t in range(steps)
        ]

    def next(self) -> Step:
        self.at = (self.at + 1) % len(self.steps)
        return self.steps[self.at]


class Arrays:
    """A ring of plain arrays ``[steps, E, ...]``: the least that writing a step and drawing rows can cost."""

    def __init__(self, steps: int, example: Step) -> None:
        self.arrays = {key: np.zeros((steps, *value.shape), np.float32) for key, value in example.items()}
        self.steps, self.envs, self.at = steps, len(example["action"]), 0

    def write(self, step: Step) -> None:
        for key, value in step.items():
            self.arrays[key][self.at] = value
        self.at = (self.at + 1) % self.steps

    def sample(self) -> dict[Any, Any]:
        rows, envs = np.random.randint(0, self.steps, SAMPLE), np.random.randint(0, self.envs, SAMPLE)
        return {key: torch.from_numpy(array[rows, envs]) for key, array in self.arrays.items()}


def sb3(steps: int, num_envs: int) -> tuple[Write, Sample, float]:
    """Return how stable-baselines3's buffer writes and samples, and its bytes per row."""
    import gymnasium as gym

    theirs: Any = importlib.import_module("stable_baselines3.common.buffers")
    spaces = [gym.spaces.Box(-1.0, 1.0, (size,), np.float32) for size in (OBSERVATION, ACTION)]
    buffer = theirs.ReplayBuffer(steps * num_envs, *spaces, device="cpu", n_envs=num_envs)
    infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]

    def write(step: Step) -> None:
        now, later = step["observation"], step["next", "observation"]
        buffer.add(now, later, step["action"], step["next", "reward"], step["next", "terminated"], infos)

    parts = (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards, buffer.dones)
    size = sum(part.nbytes for part in (*parts, buffer.timeouts)) / (steps * num_envs)
    return write, lambda: buffer.sample(SAMPLE), size


def extended(buffer: ReplayBuffer, num_envs: int) -> Write:
    """Return what ``buffer.extend`` needs for one step: the markers, and a tensordict."""
    episode = np.arange(num_envs)
    fresh = np.ones(num_envs, np.bool_)

    def write(step: Step) -> None:
        nonlocal episode, fresh
        done = step["next", "terminated"] | step["next", "truncated"]
        later = {
            "observation": torch.from_numpy(step["next", "observation"]),
            "reward": torch.from_numpy(step["next", "reward"].astype(np.float32))[:, None],
            "terminated": torch.from_numpy(step["next", "terminated"])[:, None],
            "truncated": torch.from_numpy(step["next", "truncated"])[:, None],
            "done": torch.from_numpy(done)[:, None],
        }
        now = {key: torch.from_numpy(step[key]) for key in ("observation", "action")}
        marks = {
            "is_init": torch.from_numpy(fresh)[:, None],
            "collector": {"traj_ids": torch.from_numpy(episode)},
        }
        buffer.extend(TensorDict({**now, **marks, "next": later}, [num_envs]))
        fresh, episode = done, episode + done * num_envs

    return write


def bytes_per_row(buffer: ReplayBuffer) -> float:
    """Bytes of storage and index per row of a full buffer."""
    return buffer.stats()["bytes"] / len(buffer)


def step_of(source: Steps, write: Write) -> None:
    """Write the next step."""
    write(source.next())


def measure(num_envs: int) -> list[list[str]]:
    """Fill the buffers, then time a step of each, one window of steps at a time; rows of the table."""
    steps = WINDOW * WINDOWS
    writes: dict[str, Write] = {}
    samples: dict[str, Sample] = {}
    sizes: dict[str, Callable[[], float]] = {}
    arrays = Arrays(steps, Steps(num_envs).next())
    writes["NumPy arrays"], samples["NumPy arrays"] = arrays.write, arrays.sample
    sizes["NumPy arrays"] = lambda: sum(a.nbytes for a in arrays.arrays.values()) / (steps * num_envs)
    if importlib.util.find_spec("stable_baselines3") is not None:
        name = "stable-baselines3"
        writes[name], samples[name], size = sb3(steps, num_envs)
        sizes[name] = lambda: size
    for kind, compact in (("full", False), ("compact", True)):
        stepped, plain = (
            ReplayBuffer(storage=LazyTensorStorage(steps * num_envs, compact_obs=compact), batch_size=SAMPLE)
            for _ in range(2)
        )
        writer = stepped.writer_for(num_envs, window=WINDOW)
        for name, buffer, write, sample in (
            (f"step writer, {kind}", stepped, writer.write, writer.sample),
            (f"extend, {kind}", plain, extended(plain, num_envs), plain.sample),
        ):
            writes[name], samples[name] = write, sample
            sizes[name] = partial(bytes_per_row, buffer)
    sources = {name: Steps(num_envs) for name in writes}
    for name, write in writes.items():
        for _ in range(steps + 1):  # the writer's windows then end with the turns
            write(sources[name].next())
    contenders = {name: partial(step_of, sources[name], write) for name, write in writes.items()}
    written = take_turns(contenders, TURNS, WINDOW, time.thread_time)
    for name, write in writes.items():
        for _ in range(WINDOW // 2):  # samples then hold rows that wait
            write(sources[name].next())
    drawn = take_turns(samples, TURNS, 20, time.thread_time)
    floor = "NumPy arrays"
    return [
        [
            name,
            f"{min(written[name].turns) * 1e6:,.1f}",
            f"{ratio(written[name], written[floor]):.1f} x",
            f"{min(drawn[name].turns) * 1e6:,.0f}",
            f"{ratio(drawn[name], drawn[floor]):.1f} x",
            f"{sizes[name]():,.1f}",
        ]
        for name in writes
    ]


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    for num_envs in (1, 8):
        envs = "1 env" if num_envs == 1 else f"{num_envs} envs"
        print(f"**One step of {envs}, 17 + 6 floats, processor time of one thread**\n")
        header = ["buffer", "write a step, µs", "of the arrays", f"sample({SAMPLE}), µs", "of the arrays"]
        print(table([*header, "bytes per row, stated"], measure(num_envs)) + "\n")
    for num_envs in (1, 8):
        print(
            f"**Samples with hindsight goals, {num_envs} env(s), 10 + 3 + 3 + 4 floats, episodes of 50 steps**\n"
        )
        print(
            table(["buffer", f"sample({SAMPLE}), µs", "of the first"], hindsight.rows(num_envs, TURNS)) + "\n"
        )


if __name__ == "__main__":
    main()
