"""Benchmarks our replay buffer for Stable-Baselines3 beside its own: steps, samples, bytes, and whole runs.

``python -m flatroll bench sb3``. Without the extra ``sb3`` it prints a message and stops.
"""

import importlib
import importlib.util
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.bench_images import ENVS, played, squares, windows_of
from benchmarks.bench_steps import ACTION, OBSERVATION, SAMPLE, WINDOW, Steps
from benchmarks.measure.resident import alone, resident_growth
from benchmarks.measure.timing import ratio, table, take_turns

WINDOWS, TURNS = 40, 25
IMAGE_ENVS, IMAGE_STEPS, IMAGE_SAMPLE = 8, 640, 128
RUNS, DQN_STEPS, SAC_STEPS = 5, 3000, 250
PROCESS_STEPS = 6400  # of each env, to measure the process
THEIRS = "stable-baselines3"

Contenders = dict[str, Callable[..., Any]]  # each makes a buffer, given what SB3 gives


def contenders(**encodings: Any) -> Contenders:
    """Return SB3's buffer and ours, plain and with ``encodings``."""
    theirs: Any = importlib.import_module("stable_baselines3.common.buffers")
    ours: Any = importlib.import_module("flatroll.trainers.sb3_buffer").FlatReplayBuffer
    made: Contenders = {
        THEIRS: theirs.ReplayBuffer,
        "ours, full": partial(ours, compact=False),
        "ours, compact": ours,
    }
    if encodings:
        made |= {
            "ours, frames": partial(ours, frame_stack=encodings["frame_stack"]),
            "ours, frames + zstd": partial(ours, **encodings),
        }
    return made


def bytes_per_row(buffer: Any, rows: int) -> float:
    """Bytes of a full buffer per row; ours with the trajectory index, without the steps that wait."""
    if hasattr(buffer, "flat"):
        return float(buffer.flat.stats()["bytes"] / len(buffer.flat))
    arrays = [value for value in vars(buffer).values() if isinstance(value, np.ndarray)]
    return sum(array.nbytes for array in arrays) / rows


def vectors(num_envs: int) -> str:
    """Time steps and samples of 17 + 6 floats."""
    steps = WINDOW * WINDOWS
    spaces = [gym.spaces.Box(-1.0, 1.0, (size,), np.float32) for size in (OBSERVATION, ACTION)]
    buffers = {name: make(steps * num_envs, *spaces, "cpu", num_envs) for name, make in contenders().items()}
    sources = {name: Steps(num_envs) for name in buffers}
    infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(num_envs)]

    def write(name: str) -> None:
        step = sources[name].next()
        now, later = step["observation"], step["next", "observation"]
        done = step["next", "terminated"]
        buffers[name].add(now, later, step["action"], step["next", "reward"], done, infos)

    for name in buffers:
        for _ in range(steps + 2 * WINDOW - 1):  # with the warm-up call, windows end with the turns
            write(name)
    written = take_turns({name: partial(write, name) for name in buffers}, TURNS, WINDOW, time.thread_time)
    drawn = take_turns(
        {name: partial(b.sample, SAMPLE) for name, b in buffers.items()}, TURNS, 20, time.thread_time
    )
    rows = [
        [
            name,
            f"{min(written[name].turns) * 1e6:,.1f}",
            f"{min(drawn[name].turns) * 1e6:,.0f}",
            f"{min(drawn[name].turns) / min(drawn[THEIRS].turns):.2f} x",
            f"{bytes_per_row(buffer, steps * num_envs):,.1f}",
        ]
        for name, buffer in buffers.items()
    ]
    return table(["buffer", "add, µs", f"sample({SAMPLE}), µs", "of SB3's", "bytes per row, stated"], rows)


def images() -> str:
    """Time steps and samples of four stacked frames."""
    envpool = importlib.util.find_spec("envpool")
    frames = (played("Pong-v5") if envpool else squares())[: IMAGE_STEPS + 1, :IMAGE_ENVS].numpy()
    space, rows = gym.spaces.Box(0, 255, frames.shape[2:], np.uint8), IMAGE_STEPS * IMAGE_ENVS
    kinds = contenders(frame_stack=4, codec="zstd")
    if importlib.util.find_spec("zstandard") is None:
        del kinds["ours, frames + zstd"]
    reward, done, actions = np.zeros(IMAGE_ENVS), np.zeros(IMAGE_ENVS, bool), np.zeros(IMAGE_ENVS, np.int64)
    copies = [np.empty_like(frames[0]) for _ in range(2)]

    def copy_both(t: int) -> None:
        for target, source in zip(copies, frames[t : t + 2], strict=True):
            np.copyto(target, source)

    lines, samples = [["a copy of both stacks", *filling(copy_both, rows), "", "", ""]], {}
    for name, make in kinds.items():
        buffer = make(rows, space, gym.spaces.Discrete(6), "cpu", IMAGE_ENVS)

        def add(t: int, buffer: Any = buffer) -> None:
            buffer.add(frames[t], frames[t + 1], actions, reward, done, [{}] * IMAGE_ENVS)

        first, later = filling(add, rows)
        samples[name] = partial(buffer.sample, IMAGE_SAMPLE)
        stored = len(buffer.flat) if hasattr(buffer, "flat") else rows
        if stored < rows:
            raise RuntimeError(f"{name}: {stored} of {rows} rows are stored")
        lines.append([name, first, later, f"{bytes_per_row(buffer, rows):,.0f}"])
    drawn = take_turns(samples, TURNS, 2, time.process_time)  # of all threads: frames are decoded on several
    for line in lines[1:]:
        best, theirs = min(drawn[line[0]].turns), min(drawn[THEIRS].turns)
        line += [f"{best * 1e3:.2f}", f"{best / theirs:.2f} x"]
    game = "Pong" if envpool else "squares that move"
    header = [game, "add, µs a row, into new memory", "in the full ring", "bytes per row, stated"]
    header += [f"sample({IMAGE_SAMPLE}), ms", "of SB3's"]
    return table(header, lines)


def filling(add: Callable[[int], object], rows: int) -> list[str]:
    """Time ``add(step)`` for all steps: µs a row of processor time, at first and at best of three times later."""
    times = []
    for _ in range(4):
        begun = time.process_time()
        for t in range(IMAGE_STEPS):
            add(t)
        times.append(time.process_time() - begun)
    return [f"{seconds / rows * 1e6:,.1f}" for seconds in (times[0], min(times[1:]))]


def process_sizes() -> str:
    """Measure our buffer of compressed frames, alone in its process."""
    stated, standing, trimmed, waiting = alone(measure)
    rows = PROCESS_STEPS * ENVS
    sizes = [f"{size / rows:,.0f}" for size in (stated, standing, trimmed, trimmed - waiting)]
    header = ["bytes per row, stated", "of the process", "trimmed", "without the window", "the window, MB"]
    return table(header, [[*sizes, f"{waiting / 1e6:,.0f}"]])


def measure() -> list[float]:
    """Fill our buffer of compressed frames; return its bytes as stated, by how many the process grew, as it stands
    and trimmed, and the bytes of the window of steps that wait to be stored."""
    windows = windows_of("Pong-v5", PROCESS_STEPS + 2 * WINDOW, 16)
    frames = (frame for window in windows for frame in window.numpy())
    space, actions = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6)
    reward, done, action = np.zeros(ENVS), np.zeros(ENVS, bool), np.zeros(ENVS, np.int64)
    make = contenders(frame_stack=4, codec="zstd")["ours, frames + zstd"]

    def fill(steps: int) -> Any:
        buffer = make(steps * ENVS, space, actions, "cpu", ENVS)
        now = next(frames)
        for _ in range(steps):
            later = next(frames)
            buffer.add(now, later, action, reward, done, [{}] * ENVS)
            now = later
        return buffer

    fill(WINDOW)  # code that is loaded once, kernels, workspaces
    buffer, growth = resident_growth(lambda: fill(PROCESS_STEPS))
    waiting = 2 * buffer.writer.window * ENVS * math.prod(space.shape)
    return [buffer.flat.stats()["bytes"], *growth, waiting]


def run(algorithm: str, env: str, steps: int, make: Callable[..., Any], weights: list[Any]) -> None:
    """Train a model with the buffer that ``make`` makes, and leave its weights in ``weights``."""
    options = {"replay_buffer_class": getattr(make, "func", make)}
    options["replay_buffer_kwargs"] = getattr(make, "keywords", {})
    common = {"buffer_size": 10_000, "learning_starts": 100, "seed": 1, "device": "cpu"}
    peer = getattr(importlib.import_module("stable_baselines3"), algorithm)
    model = peer("MlpPolicy", env, **common, **options).learn(steps)
    weights[:] = [torch.nn.utils.parameters_to_vector(model.policy.parameters())]


def runs() -> str:
    """Time whole short runs, and compare the weights that they leave."""
    lines = []
    for what in (("DQN", "CartPole-v1", DQN_STEPS), ("SAC", "Pendulum-v1", SAC_STEPS)):
        makers = contenders()
        weights: dict[str, list[Any]] = {name: [] for name in makers}
        turns = {name: partial(run, *what, make, weights[name]) for name, make in makers.items()}
        times = take_turns(turns, RUNS, 1, time.process_time)
        for name in makers:
            best, theirs = min(times[name].turns), min(times[THEIRS].turns)
            share = [f"{best / theirs:.3f} x", f"{ratio(times[name], times[THEIRS]):.3f} x"]
            same = torch.equal(weights[name][0], weights[THEIRS][0])
            title = "{}, {}, {:,} steps".format(*what)
            lines.append([title, name, f"{best:.2f}", *share, "yes" if same else "no"])
    header = ["run", "buffer", "processor s", "of SB3's", "median of the turns", "weights as SB3's"]
    return table(header, lines)


def main() -> None:
    """Print the tables."""
    if importlib.util.find_spec("stable_baselines3") is None:
        print("stable-baselines3 is not installed: pip install 'flatroll[sb3]'")
        return
    torch.set_num_threads(1)
    for num_envs in (1, 8):
        print(f"**One step, envs: {num_envs}, 17 + 6 floats, processor time of one thread**\n")
        print(vectors(num_envs) + "\n")
    print(
        f"**Stacked frames, 4 x 84 x 84 bytes, {IMAGE_ENVS} envs, {IMAGE_STEPS * IMAGE_ENVS:,} rows**\n\n{images()}\n"
    )
    if importlib.util.find_spec("envpool") and importlib.util.find_spec("zstandard"):
        print(
            f"**Pong, frames + zstd, {PROCESS_STEPS * ENVS:,} rows, alone in its process**\n\n{process_sizes()}\n"
        )
    print(f"**Whole runs: the best of {RUNS} turns**\n\n{runs()}")


if __name__ == "__main__":
    main()
