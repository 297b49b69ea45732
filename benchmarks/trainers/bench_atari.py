"""Benchmarks compressed replay buffers for Stable-Baselines3 on Atari games: ours beside sb3-extra-buffers'.

``python -m flatroll bench atari``. sb3-extra-buffers is optional (``pip install sb3-extra-buffers isal zstd``): without
it, the table has our buffers and SB3's only. Its buffers compress each stack of frames, by igzip level 1 or by zstd
level -3, as its pages recommend.

Each buffer is filled alone in a process of its own, with the same frames: those of a game that a random policy plays.
Consecutive observations of an env make a row. "Of the process" is by how much its resident memory grows, everything
included, such as the steps that wait to be stored.
"""

import contextlib
import importlib
import importlib.util
import io
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch

from benchmarks.bench_images import ENVS, windows_of
from benchmarks.measure.resident import alone, resident_growth
from benchmarks.measure.timing import table

GAMES = ("Pong-v5", "Breakout-v5", "MsPacman-v5", "Seaquest-v5")
STEPS, WARM_UP = 6400, 128  # of each env
SB3_STEPS = 400  # SB3's own buffer takes 56 kB a row
SAMPLE, SAMPLES = 128, 60
SPACES = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6)
PEER = "sb3-extra-buffers"


class Found(NamedTuple):
    """What was measured of a buffer: bytes and µs a row, and µs a sample."""

    standing: float
    trimmed: float
    add: float
    sample: float


def make_sb3(rows: int) -> Any:
    """Create SB3's own buffer."""
    return importlib.import_module("stable_baselines3.common.buffers").ReplayBuffer(
        rows, *SPACES, "cpu", ENVS
    )


def make_peer(method: str, *args: Any, **options: Any) -> Any:
    """Create a buffer of sb3-extra-buffers, as its examples do, from the arguments of SB3's own."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints which methods it has
        compressed: Any = importlib.import_module("sb3_extra_buffers.compressed")
    space = args[1]
    dtypes = compressed.find_buffer_dtypes(
        obs_shape=space.shape, elem_dtype=space.dtype, compression_method=method
    )
    return compressed.CompressedReplayBuffer(*args, dtypes=dtypes, compression_method=method, **options)


def make_peer_here(method: str, rows: int) -> Any:
    """Create one for the games here."""
    return make_peer(method, rows, *SPACES, "cpu", ENVS)


def make_ours(options: dict[str, Any], rows: int) -> Any:
    """Create our buffer."""
    ours: Any = importlib.import_module("flatroll.trainers.sb3_buffer")
    return ours.FlatReplayBuffer(rows, *SPACES, "cpu", ENVS, **options)


def frames_of(game: str, steps: int) -> Iterator[Any]:
    """Yield observations ``[ENVS, 4, 84, 84]``."""
    for window in windows_of(game, steps, 16):
        yield from window.numpy()


def measure(game: str, make: Callable[[int], Any], steps: int) -> Found:
    """Fill a buffer with ``steps`` steps of each env, and draw samples."""
    torch.set_num_threads(1)
    rows = steps * ENVS
    frames = frames_of(game, steps + WARM_UP + 32)
    random = np.random.default_rng(0)
    seconds = 0.0

    def fill(count: int) -> Any:
        nonlocal seconds
        buffer = make(count * ENVS)
        seconds = 0.0
        now = next(frames)
        for _ in range(count):
            later = next(frames)
            action = random.integers(6, size=ENVS)
            reward = np.zeros(ENVS)
            done = np.zeros(ENVS, np.bool_)

            begun = time.thread_time()
            buffer.add(now, later, action, reward, done, [{}] * ENVS)
            seconds += time.thread_time() - begun
            now = later
        return buffer

    fill(WARM_UP).sample(SAMPLE)  # code that is loaded once, kernels, workspaces
    buffer, growth = resident_growth(lambda: fill(steps))
    added = seconds

    times = []
    for _ in range(SAMPLES):
        begun = time.process_time()
        buffer.sample(SAMPLE)
        times.append(time.process_time() - begun)

    sampled = float(np.median(times))
    return Found(growth.bytes / rows, growth.trimmed / rows, 1e6 * added / rows, 1e6 * sampled)


def contenders() -> dict[str, tuple[Callable[[int], Any], int]]:
    """Return what makes each buffer, and the steps it is filled with, by name."""
    made: dict[str, tuple[Callable[[int], Any], int]] = {"stable-baselines3": (make_sb3, SB3_STEPS)}
    if importlib.util.find_spec("sb3_extra_buffers"):
        for method in ("igzip1", "zstd-3"):
            made[f"{PEER}, {method}"] = partial(make_peer_here, method), STEPS
    ours = {"frame_stack": 4, "codec": "zstd"}
    made["ours, frames + zstd"] = partial(make_ours, ours), STEPS
    return made


def compare(game: str) -> list[list[str]]:
    """Return the lines of a game's table."""
    found = {name: alone(measure, game, *how) for name, how in contenders().items()}
    peers = [one.standing for name, one in found.items() if name.startswith(PEER)]

    lines = []
    for name, one in found.items():
        share = ""
        if peers:
            share = f"{one.standing / min(peers):.2f} x"
        sizes = [f"{size:,.0f}" for size in (one.standing, one.trimmed)]
        lines.append([game, name, *sizes, share, f"{one.add:,.0f}", f"{one.sample / 1e3:.2f}"])
    return lines


def main() -> None:
    """Print the table."""
    missing = [
        name for name in ("stable_baselines3", "envpool", "zstandard") if not importlib.util.find_spec(name)
    ]
    if missing:
        print(f"{', '.join(missing)} not installed: nothing is compared.")
        return
    if importlib.util.find_spec("sb3_extra_buffers") is None:
        print(f"{PEER} is not installed: no comparison (pip install sb3-extra-buffers isal zstd)\n")

    print(
        f"4 x 84 x 84 bytes, {ENVS} envs, {STEPS * ENVS:,} rows ({SB3_STEPS * ENVS:,} of stable-baselines3), "
        "one thread\n"
    )
    header = ["game", "buffer", "bytes per row, of the process", "trimmed", f"of {PEER}'s best"]
    header += ["add, µs a row", f"sample({SAMPLE}), ms"]
    print(table(header, []), flush=True)
    for game in GAMES:
        lines = compare(game)
        print(table(header, lines).split("\n", 2)[2], flush=True)  # a game takes a minute or more


if __name__ == "__main__":
    main()
