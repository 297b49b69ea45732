"""What a window costs on its way from a worker into a replay buffer."""

import multiprocessing
import pickle
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

from benchmarks.workers.finding import Finding, copy_all, cpu_of
from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.rollouts import Collector, MultiAsyncCollector
from flatroll.rollouts.workers.transport import Note
from flatroll.sharing.channel import Channel
from flatroll.sharing.mailbox import Inbox, Outbox

TURNS, ENVS = 7, 64
BATCHES = 8  # in turn: a window that was just collected is in no cache near the processor
SHAPES = {
    "4,096 rows of 56 B": (4096, 7, 30),
    "256 rows of 56 kB": (256, 14_000, 10),
}  # rows, floats, windows


class Cheap(gym.vector.VectorEnv[Any, Any, Any]):
    """Envs with prepared observations and episodes of 64 steps."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, floats: int) -> None:
        self.num_envs = ENVS
        self.single_observation_space = gym.spaces.Box(0, 1, (floats,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, ENVS)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, ENVS)
        self._observed = np.random.default_rng(0).random((ENVS, floats), np.float32)
        self._steps, self._none = 0, np.zeros(ENVS, bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._steps = 0
        return self._observed, {}

    def step(self, actions: Any) -> Any:
        self._steps += 1
        ended = np.full(ENVS, self._steps % 64 == 0)
        info = {"final_obs": self._observed, "_final_obs": ended} if ended[0] else {}
        return self._observed, np.ones(ENVS, np.float32), ended, self._none, info


def buffer_of(rows: int) -> ReplayBuffer:
    """A buffer with a trajectory index that is full after eight windows."""
    return ReplayBuffer(
        storage=LazyTensorStorage(8 * rows), sampler=SliceSampler(slice_len=16), batch_size=256
    )


def work(pipe: Connection, channel: Channel, batches: list[TensorDict]) -> None:
    """The worker's part: sends windows in the requested way and reports the processor time."""
    torch.set_num_threads(1)
    outbox = Outbox(channel)
    tables: list[dict[Any, Any]] = [dict(batch.items(True, True)) for batch in batches]
    places = [value.clone() for value in tables[0].values()]
    ways: dict[str, Callable[[int], None]] = {
        "slot": lambda i: outbox.put(
            tables[i], note=Note(0, len(batches[i]), tuple(batches[i].shape), 0, 0.0, None)
        ),
        "queue": lambda i: pipe.send_bytes(pickle.dumps(batches[i])),
        "memcpy": lambda i: copy_all(list(tables[i].values()), places),
    }
    while True:
        way, count = pipe.recv()
        start = time.process_time()
        for i in range(count):
            ways[way](i % BATCHES)
            channel.feed()  # as a worker does before each window
        pipe.send((time.process_time() - start) / count)


class Owner:
    """Processor time of a buffer's owner per window, in µs, one number per turn.

    Attributes:
        taken: of storing a worker's window, including the receipt of its message.
        after: of ``extend`` of a batch that this process has just collected.
        tight: of ``extend`` in a loop of nothing else, where all its code and tables are in the nearest cache.
    """

    def __init__(self, env: Callable[[], Any], local: list[TensorDict], count: int) -> None:
        rows = len(local[0])
        remote, home = buffer_of(rows), buffer_of(rows)
        self.taken, self.after, self.tight = list[float](), list[float](), list[float]()
        alone = Collector(env, frames_per_batch=rows)
        with MultiAsyncCollector(env, frames_per_batch=rows, replay_buffer=remote) as collector:
            for turn in range(TURNS + 1):
                found = (
                    cpu_of(lambda _: next(collector), [None], count),
                    sum(cpu_of(home.extend, [next(alone)], 1) for _ in range(count)) / count,
                    cpu_of(home.extend, local, count),
                )
                if turn:  # the first one warms up
                    for times, value in zip((self.taken, self.after, self.tight), found, strict=True):
                        times.append(value * 1e6)

    def over(self, times: list[float]) -> float:
        """The median over turns of what a worker's window takes, over these times."""
        return statistics.median(a / b for a, b in zip(self.taken, times, strict=True))


def measure(shape: str) -> list[Finding]:
    """The findings about windows of one shape."""
    rows, floats, count = SHAPES[shape]
    collected = Collector(Cheap(floats), frames_per_batch=rows)
    batches = [next(collected) for _ in range(BATCHES)]
    owner = Owner(lambda: Cheap(floats), batches, count)

    here, there = Channel.pair()
    pipe, theirs = multiprocessing.get_context("fork").Pipe()
    arguments = theirs, there, batches
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments, daemon=True)
    process.start()
    inbox, slots, queued = Inbox(here), buffer_of(rows), buffer_of(rows)

    def from_slots() -> None:
        for _ in range(count):
            with inbox.take() as window:
                slots.extend(TensorDict(window.tables[0], window.note.shape))

    def from_queue() -> None:
        for _ in range(count):
            queued.extend(pickle.loads(pipe.recv_bytes()))

    def both(way: str, meanwhile: Callable[[], None]) -> tuple[float, float]:
        pipe.send((way, count))
        start = time.thread_time()
        meanwhile()
        return (time.thread_time() - start) / count, pipe.recv()

    turns: list[tuple[float, float, float]] = []
    for turn in range(TURNS + 1):
        slot, queue = both("slot", from_slots), both("queue", from_queue)
        _, memcpy = both("memcpy", lambda: None)
        if turn:
            turns.append((slot[1], memcpy, sum(slot) / sum(queue)))
    process.kill()
    process.join()
    put, memcpy, over_queue = (statistics.median(each) for each in zip(*turns, strict=True))
    return [
        Finding(
            f"owner's CPU per window, {shape}, over `extend` of a batch that the owner just collected",
            owner.over(owner.after),
            most=1.3,
            note=f"{statistics.median(owner.taken):,.0f} over {statistics.median(owner.after):,.0f} µs",
        ),
        Finding(
            "the same over `extend` in a loop of only `extend`",
            owner.over(owner.tight),
            most=1.3,
            note=f"{statistics.median(owner.tight):,.0f} µs",
        ),
        Finding(
            f"worker's CPU per window, {shape}, beyond `Collector`",
            put * 1e6,
            "µs",
            most=round(2.5 * memcpy * 1e6 + 100),
            note=f"budget 2.5 x memcpy ({memcpy * 1e6:,.0f} µs) + 100 µs",
        ),
        Finding(f"both, {shape}, over a queue of pickled TensorDicts", over_queue, most=0.25),
    ]


def measure_all() -> list[Finding]:
    """The findings about all shapes."""
    return [finding for shape in SHAPES for finding in measure(shape)]
