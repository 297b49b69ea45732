"""Benchmarks compressed replay buffers on a game that is played well: ours beside sb3-extra-buffers'.

``python -m flatroll bench played``, in a short form ``python -m benchmarks.trainers.bench_played --quick``. It needs
ale-py and opencv (``pip install ale-py opencv-python-headless``). sb3-extra-buffers is optional (``pip install
sb3-extra-buffers isal zstd``).

`benchmarks.trainers.mspacman` plays the games first; all buffers get the same rows. Each buffer is alone in its
process, which has all frames in memory before. The first table has bytes and processor time. The second shows what
happens if one thread samples while another one writes: each row's reward is its number, so that each sampled
observation can be compared with the one that was written.
"""

import argparse
import importlib
import importlib.util
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.measure.resident import alone, resident_growth
from benchmarks.measure.timing import table
from benchmarks.trainers.bench_atari import make_peer
from benchmarks.trainers.mspacman import STACK, Stream, load_all, play, play_all
from flatroll.buffers import LazyTensorStorage, ReplayBuffer

ENVS, WINDOW = 8, 16
SAMPLE, SAMPLES = 128, 60
WARM_UP = 8  # windows
RANDOM_STEPS = 1500
ACTIONS = 9
FRAMES = {"compact_obs": True, "frame_stack": {"observation": STACK}}
COMPRESSED = {**FRAMES, "codec": {"observation": "zstd"}}
SHARED = {"optimize_memory_usage": True, "handle_timeout_termination": False}
BASE = "sb3-extra-buffers, igzip1"


class Sizes(NamedTuple):
    """How much is played and stored."""

    steps: int = 3072  # of each env
    seconds: float = 6.0  # of two threads
    beside: int = 512  # steps of each env that the writer of the threads repeats


QUICK = Sizes(steps=256, seconds=1.5, beside=128)


class Rows(NamedTuple):
    """A window of rows as they are written: steps of each env, env after env."""

    observation: Tensor  # uint8 [N, 4, 84, 84]
    later: Tensor  # their next observations
    action: Tensor  # int64 [N]
    reward: Tensor  # float32 [N]
    done: Tensor  # bool [N]
    game: Tensor  # int64 [N], unique over envs


class Contender(Protocol):
    """A buffer of N rows."""

    def write(self, rows: Rows) -> float:
        """Write a window; return the seconds of processor time that the buffer's own calls took."""
        ...

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return observations, next observations and rewards ``[128]`` of random rows."""
        ...


class Flat:
    """Our buffer; ``extend`` takes a window."""

    def __init__(self, options: dict[str, Any], rows: int) -> None:
        self.buffer = ReplayBuffer(storage=LazyTensorStorage(rows, **options), batch_size=SAMPLE)

    def write(self, rows: Rows) -> float:
        begins = torch.ones_like(rows.done)
        begins[1:] = rows.done[:-1]
        of_env = begins.view(ENVS, WINDOW)
        of_env[:, 0] = False  # ids tell where a game begins at the start of a window
        done = rows.done[:, None]
        after = {"observation": rows.later, "reward": rows.reward[:, None]}
        flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
        root = {"observation": rows.observation, "action": rows.action, "is_init": begins[:, None]}
        ids = {"traj_ids": rows.game}
        batch = TensorDict({**root, "next": {**after, **flags}, "collector": ids}, [len(done)])

        begun = time.thread_time()
        self.buffer.extend(batch)
        return time.thread_time() - begun

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.buffer.sample()
        return rows["observation"], rows["next", "observation"], rows["next", "reward"].view(-1)


class Steps:
    """A buffer of Stable-Baselines3's kind; ``add`` takes one step of all envs."""

    def __init__(self, make: Callable[..., Any], rows: int) -> None:
        space = gym.spaces.Box(0, 255, (STACK, 84, 84), np.uint8)
        self.buffer = make(rows, space, gym.spaces.Discrete(ACTIONS), "cpu", ENVS)

    def write(self, rows: Rows) -> float:
        of_envs = [column.numpy().reshape(ENVS, WINDOW, *column.shape[1:]) for column in rows[:-1]]
        infos: list[dict[str, Any]] = [{}] * ENVS
        seconds = 0.0
        for step in range(WINDOW):
            obs, later, action, reward, done = (np.ascontiguousarray(column[:, step]) for column in of_envs)
            begun = time.thread_time()
            self.buffer.add(obs, later, action, reward, done, infos)
            seconds += time.thread_time() - begun
        return seconds

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.buffer.sample(SAMPLE)
        return rows.observations, rows.next_observations, rows.rewards.view(-1)


def make_ours(*args: Any) -> Any:
    """Create our buffer for Stable-Baselines3, compressed."""
    ours: Any = importlib.import_module("flatroll.trainers.sb3_buffer")
    return ours.FlatReplayBuffer(*args, frame_stack=STACK, codec="zstd")


def contenders() -> dict[str, Callable[[int], Contender]]:
    """Return what makes each buffer, by name."""
    made: dict[str, Callable[[int], Contender]] = {}
    if importlib.util.find_spec("sb3_extra_buffers"):
        made[BASE] = partial(Steps, partial(make_peer, "igzip1"))
        made[f"{BASE}, optimize_memory_usage"] = partial(Steps, partial(make_peer, "igzip1", **SHARED))
        made["sb3-extra-buffers, zstd-3"] = partial(Steps, partial(make_peer, "zstd-3"))
    made["ours, frames"] = partial(Flat, FRAMES)
    made["ours, frames + zstd"] = partial(Flat, COMPRESSED)
    if importlib.util.find_spec("stable_baselines3"):
        made["ours, frames + zstd, for Stable-Baselines3"] = partial(Steps, make_ours)
    return made


def windows(streams: list[Stream], steps: int) -> Iterator[Rows]:
    """Yield the first ``steps`` steps of each env, a window at a time."""
    games = [np.concatenate([[0], np.cumsum(stream.done)[:-1]]) for stream in streams]
    for begin in range(0, steps, WINDOW):
        at = slice(begin, begin + WINDOW)
        count = ENVS * WINDOW
        numbers = torch.arange(count) + begin * ENVS
        yield Rows(
            joined(stream.stacks(at) for stream in streams),
            joined(stream.stacks(at, later=1) for stream in streams),
            joined(stream.action[at] for stream in streams),
            numbers.float(),
            joined(stream.done[at] for stream in streams),
            joined(game[at] * ENVS + env for env, game in enumerate(games)),
        )


def joined(parts: Iterator[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate(list(parts)))


# --- bytes and processor time ----------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What was measured of a buffer: bytes a row, µs a row and ms a sample."""

    standing: float
    trimmed: float
    write: float
    sample: float


def measure(make: Callable[[int], Contender], folder: Path, steps: int) -> Found:
    """Fill a buffer with ``steps`` steps of each env, and draw samples."""
    torch.set_num_threads(1)
    streams = load_all(folder)

    def fill(steps: int) -> tuple[Contender, list[float]]:
        buffer = make(steps * ENVS)
        return buffer, [buffer.write(rows) for rows in windows(streams, steps)]

    fill(WARM_UP * WINDOW)[0].sample()  # code that is loaded once, kernels, workspaces
    (buffer, seconds), growth = resident_growth(lambda: fill(steps))

    times = []
    for _ in range(SAMPLES):
        begun = time.process_time()
        buffer.sample()
        times.append(time.process_time() - begun)

    rows = steps * ENVS
    sample = statistics.median(times)
    return Found(growth.bytes / rows, growth.trimmed / rows, 1e6 * sum(seconds) / rows, 1e3 * sample)


def costs(folder: Path, sizes: Sizes) -> str:
    """Return the table of bytes and processor time."""
    found = {name: alone(measure, make, folder, sizes.steps) for name, make in contenders().items()}
    base = found.get(BASE)
    lines = []
    for name, one in found.items():
        shares = ["-"] * 3
        if base is not None:
            pairs = ((one.trimmed, base.trimmed), (one.write, base.write), (one.sample, base.sample))
            shares = [f"{own / other:.2f} x" for own, other in pairs]
        lines.append(
            [
                name,
                f"{one.standing:,.0f}",
                f"{one.trimmed:,.0f}",
                shares[0],
                f"{one.write:,.1f}",
                shares[1],
                f"{one.sample:,.2f}",
                shares[2],
            ]
        )

    of_base = f"of {BASE.rpartition(' ')[2]}"
    header = ["buffer", "bytes per row, of the process", "trimmed", of_base]
    header += ["write, µs a row", of_base, f"sample({SAMPLE}), ms", of_base]
    return table(header, lines)


# --- two threads -----------------------------------------------------------------------------------------------------


class Beside(NamedTuple):
    """What was counted of two threads; rates are per second within the calls."""

    written_alone: float
    written: float
    sampled_alone: float
    sampled: float
    rows: int
    torn: int


def read_beside(make: Callable[[int], Contender], folder: Path, sizes: Sizes) -> Beside:
    """Sample in one thread while another one writes, and compare each sampled row with the one of its number."""
    torch.set_num_threads(1)
    given = list(windows(load_all(folder), sizes.beside))
    observations, later = (torch.cat([rows[column] for rows in given]) for column in (0, 1))
    total = len(observations)
    buffer = make(total * 3 // 4)
    stop = threading.Event()

    def write(until: Callable[[], bool]) -> list[float]:
        """Write windows again and again, each time with numbers and games of their own."""
        seconds: list[float] = []
        while True:
            for rows in given:
                if until():
                    return seconds
                begun = time.perf_counter()
                buffer.write(rows)
                seconds.append(time.perf_counter() - begun)
                rows.reward.add_(total)
                rows.game.add_(total)

    def read(until: Callable[[], bool]) -> tuple[list[float], int]:
        """Sample; return the seconds of each call, and the number of rows that are not what was written."""
        seconds: list[float] = []
        torn = 0
        while not until():
            begun = time.perf_counter()
            now, after, reward = buffer.sample()
            seconds.append(time.perf_counter() - begun)
            source = reward.long() % total
            equal = (now == observations[source]) & (after == later[source])
            torn += SAMPLE - int(equal.flatten(1).all(1).sum())
        return seconds, torn

    write(counted(2 * len(given)))
    buffer.sample()
    alone_seconds = write(for_seconds(sizes.seconds / 3))
    sampled_alone, torn_alone = read(for_seconds(sizes.seconds / 3))
    assert torn_alone == 0

    written: list[list[float]] = []
    writer = threading.Thread(target=lambda: written.append(write(stop.is_set)))
    writer.start()
    try:
        sampled, torn = read(for_seconds(sizes.seconds))
    finally:
        stop.set()
        writer.join()

    count = WINDOW * ENVS
    return Beside(
        count * rate(alone_seconds),
        count * rate(written[0]),
        rate(sampled_alone),
        rate(sampled),
        SAMPLE * len(sampled),
        torn,
    )


def counted(count: int) -> Callable[[], bool]:
    """Return what is true from the call with this number on."""
    calls = iter(range(count))
    return lambda: next(calls, None) is None


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Return what is true after some seconds."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def mean(scores: Sequence[float]) -> str:
    if not scores:
        return "-"
    return f"{statistics.fmean(scores):,.0f}"


def rate(seconds: list[float]) -> float:
    return len(seconds) / sum(seconds)


def threads(folder: Path, sizes: Sizes) -> str:
    """Return the table of two threads."""
    lines = []
    for name, make in contenders().items():
        if "optimize" in name or "Stable-Baselines3" in name:
            continue  # the first is wrong at ends of games, the second is written and sampled by one thread
        found = alone(read_beside, make, folder, sizes)
        rates = (found.written_alone, found.written, found.sampled_alone, found.sampled)
        lines.append([name, *(f"{each:,.0f}" for each in rates), f"{found.rows:,}", f"{found.torn:,}"])

    header = ["buffer", "rows written per s, alone", "beside", "samples per s, alone", "beside"]
    return table([*header, "rows sampled beside", "torn"], lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a short form, whose numbers say little")
    sizes = QUICK if parser.parse_args().quick else Sizes()
    missing = [name for name in ("ale_py", "cv2", "zstandard") if not importlib.util.find_spec(name)]
    if missing:
        print(f"{', '.join(missing)} not installed: nothing is compared.")
        return
    if importlib.util.find_spec("sb3_extra_buffers") is None:
        print("sb3-extra-buffers is not installed: no comparison (pip install sb3-extra-buffers isal zstd)\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scores = play_all(folder, ENVS, sizes.steps)
        at_random = alone(play, 0, RANDOM_STEPS, plans=False).scores.tolist()
        print(
            f"MsPacman, {ENVS} envs, {sizes.steps * ENVS:,} rows of 4 x 84 x 84 bytes, one thread. Games that ended: "
            f"{len(scores)}, mean score {mean(scores)} (at random: {mean(at_random)})\n",
            flush=True,
        )
        print(costs(folder, sizes), flush=True)
        print(f"\nOne thread samples {SAMPLE} rows at a time, one writes\n")
        print(threads(folder, sizes))


if __name__ == "__main__":
    main()
