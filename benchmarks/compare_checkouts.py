"""Times two checkouts of flatroll: ``python -m benchmarks.compare_checkouts OTHER [WORD...]``.

One process per checkout prepares the cases; they take turns. Times are the processor time of one thread. The minimum
over all turns is least disturbed by other programs. Each round uses new processes, since a process keeps the memory
pages that it happened to get. Cases use public names only, so both checkouts run this file.
"""

import itertools
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical, Normal

from flatroll.buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
)
from flatroll.estimators import GAE, ClipPPOLoss, DQNLoss, SACLoss, TDLambdaEstimator, VTrace
from flatroll.modules import GRUModule, LSTMModule, set_recurrent_mode
from flatroll.rollouts import Collector
from flatroll.wrappers import InitTracker, StepCounter, TrajId

SECONDS = 0.04  # that a turn of a case takes
TURNS = 40
ROUNDS = 3
SOURCE = Path(__file__).resolve()
CAPACITY = 100_000
ENTRY_POINT: Any = "vector_entry_point"

Case: TypeAlias = tuple[str, Callable[[], object]]


def rows(count: int) -> TensorDict:
    """Create a batch of runs of 50 rows on average, in a collector's layout."""
    done = torch.rand(count, 1) < 0.02
    start = torch.cat([torch.ones(1, 1, dtype=torch.bool), done[:-1]])
    observation = torch.randn(count, 4)
    # Inside a run the next row's observation is the next observation: a compact storage relies on it.
    next_observation = torch.where(done, torch.randn(count, 4), observation.roll(-1, 0))
    flags = {"terminated": done, "truncated": torch.zeros_like(done), "done": done}
    entries: dict[str, Any] = {
        "observation": observation,
        "action": torch.randint(2, (count,)),
        "is_init": start,
        "next": {"observation": next_observation, "reward": torch.randn(count, 1), **flags},
        "collector": {"traj_ids": start.flatten().cumsum(0)},
    }
    return TensorDict(entries, [count])


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, outputs))


def policy(last: nn.Module, keys: list[str], distribution: type) -> ProbabilisticTensorDictSequential:
    """Create a stochastic policy whose network writes the distribution's parameters."""
    names: Any = keys
    sample = ProbabilisticTensorDictModule(
        names, ["action"], distribution_class=distribution, return_log_prob=True
    )
    parts: list[Any] = [TensorDictModule(last, ["observation"], names), sample]
    return ProbabilisticTensorDictSequential(*parts)


def apply(module: Any, batch: TensorDict) -> None:
    """Call a module on a shallow copy of ``batch``, so that the batch stays unchanged."""
    module(batch.copy())


def estimator_cases() -> Iterator[Case]:
    critic = TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])
    actor = policy(network(4, 2), ["logits"], Categorical)
    settings: dict[str, Any] = {"gamma": 0.99, "value_network": critic}
    estimators = {
        "GAE": GAE(lmbda=0.95, **settings),
        "GAE shifted": GAE(lmbda=0.95, shifted=True, **settings),
        "TD(lambda)": TDLambdaEstimator(lmbda=0.95, **settings),
        "V-trace": VTrace(actor_network=actor, **settings),
    }
    for count in (256, 10_000, 200_000):
        with torch.no_grad():
            batch = actor(rows(count))
        for name, estimator in estimators.items():
            yield f"{name} {count:,}", partial(apply, estimator, batch)


def loss_cases() -> Iterator[Case]:
    """Return the cases of losses: forward and backward on 256 rows."""
    critic = TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])
    actor = policy(network(4, 2), ["logits"], Categorical)
    parts: list[Any] = [
        TensorDictModule(network(4, 2), ["observation"], ["action_value"]),
        TensorDictModule(lambda q: q.argmax(-1), ["action_value"], ["action"]),
    ]
    values = TensorDictSequential(*parts)
    normal = policy(nn.Sequential(network(4, 4), NormalParamExtractor()), ["loc", "scale"], Normal)
    with torch.no_grad():
        acted = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(actor(rows(256)))
    moved = rows(256).set("action", torch.randn(256, 2))

    def both_ways(loss: nn.Module, batch: TensorDict) -> None:
        losses = loss(batch.copy())
        total: Any = sum(value for key, value in losses.items() if key.startswith("loss"))
        total.backward()

    yield "PPO", partial(both_ways, ClipPPOLoss(actor, critic), acted)
    yield "DQN", partial(both_ways, DQNLoss(values), rows(256))
    qvalue = TensorDictModule(nn.Bilinear(4, 2, 1), ["observation", "action"], ["state_action_value"])
    yield "SAC", partial(both_ways, SACLoss(normal, qvalue, target_entropy=-2.0), moved)


def filled(sampler: Any, batch_size: int, compact_obs: bool = False) -> ReplayBuffer:
    """Create a full buffer."""
    storage = LazyTensorStorage(CAPACITY, compact_obs=compact_obs)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
    for _ in range(25):
        buffer.extend(rows(4096))
    return buffer


def buffer_cases() -> Iterator[Case]:
    for name, compact in (("", False), (", compact", True)):
        for count in (64, 4096):
            buffer = filled(SliceSampler(slice_len=32), 2048, compact)
            yield f"extend {count:,}{name}", partial(buffer.extend, rows(count))
        for way, fill in (("", True), (", unfilled", False)):
            sampler = SliceSampler(slice_len=32, fill=fill)
            yield f"sample slices 2,048{way}{name}", filled(sampler, 2048, compact).sample
        yield f"sample rows 256{name}", filled(RandomSampler(), 256, compact).sample
    yield "sample priorities 256", filled(PrioritizedSampler(CAPACITY, alpha=0.6, beta=0.4), 256).sample


def disk_cases() -> Iterator[Case]:
    """Return saves and loads of 100,000 rows: whole, of 64 new rows, and loads into a buffer of the same kind."""
    folder = tempfile.TemporaryDirectory()  # removed with the process, since the cases keep it
    numbers = itertools.count()
    for name, compact in (("", False), (", compact", True)):
        buffer, other = (filled(SliceSampler(slice_len=32), 2048, compact) for _ in range(2))

        def save(buffer: ReplayBuffer = buffer) -> None:
            path = f"{folder.name}/{next(numbers)}"
            buffer.dumps(path, sync=False)
            shutil.rmtree(path)

        def save_more(buffer: ReplayBuffer = buffer, path: str = f"{folder.name}/more{name}") -> None:
            buffer.extend(rows(64))
            buffer.dumps(path, sync=False)

        buffer.dumps(f"{folder.name}/saved{name}", sync=False)
        yield f"dumps, whole{name}", save
        yield f"dumps, 64 new rows{name}", save_more
        yield f"loads{name}", partial(other.loads, f"{folder.name}/saved{name}")


def recurrent_cases() -> Iterator[Case]:
    """Return the recurrent cases: forward and backward over the runs of 2,048 rows."""
    batch = rows(2048)

    def both_ways(module: Any) -> None:
        with set_recurrent_mode(True):
            module(batch.copy())["features"].sum().backward()

    yield (
        "GRU 2,048",
        partial(both_ways, GRUModule(4, 64, in_key="observation", out_key="features", state="zero")),
    )
    yield (
        "LSTM 2,048",
        partial(both_ways, LSTMModule(4, 64, in_key="observation", out_key="features", state="zero")),
    )


def collector_cases() -> Iterator[Case]:
    """Return the collector cases: batches of 1 and of 16 vector steps with three markers."""
    for steps, envs, compact in (
        (1, 1, False),
        (1, 1, True),
        (16, 1, False),
        (16, 64, False),
        (16, 1024, False),
    ):
        env = InitTracker(
            StepCounter(TrajId(gym.make_vec("CartPole-v1", envs, vectorization_mode=ENTRY_POINT)))
        )
        chooser = TensorDictModule(lambda x: (x[..., 2] > 0).long(), ["observation"], ["action"])
        options: Any = {"frames_per_batch": steps * envs, "total_frames": 1 << 40, "compact_obs": compact}
        name = f"collect {steps} x {envs:,}" + (", compact" if compact else "")
        yield name, partial(next, iter(Collector(env, chooser, **options)))


KINDS = (estimator_cases, loss_cases, buffer_cases, disk_cases, recurrent_cases, collector_cases)


def serve(kind: int) -> None:
    """Run the worker: print the names of the cases; for each line with a name and a count, print its seconds."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cases = dict(KINDS[kind]())
    print("\t".join(cases), flush=True)
    for line in sys.stdin:
        name, count = line.rstrip("\n").split("\t")
        start = time.thread_time()
        for _ in range(int(count)):
            cases[name]()
        print(time.thread_time() - start, flush=True)


class Worker:
    """A process that runs the cases of a kind with one checkout on its path."""

    def __init__(self, checkout: Path, kind: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SOURCE), "--serve", str(kind)],
            env={"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names = self._line().split("\t")

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with exit code {self.process.wait()}")
        return line.rstrip("\n")

    def seconds(self, name: str, count: int) -> float:
        """Return the processor time of ``count`` calls."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\t{count}\n")
        self.process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def main(other: Path, wanted: list[str]) -> None:
    """Print a row per case: the least time of a call in either checkout, and this checkout's over the other's."""
    print("| case | before, us | after, us | after / before |\n|---|---|---|---|")
    for kind in range(len(KINDS)):
        least: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            workers = Worker(other, kind), Worker(SOURCE.parents[1], kind)
            names = [name for name in workers[0].names if not wanted or any(word in name for word in wanted)]
            for name in names:
                for worker in workers:
                    worker.seconds(name, 3)
                count = max(1, round(SECONDS / (workers[0].seconds(name, 3) / 3)))
                best = least.setdefault(name, [math.inf, math.inf])
                for _ in range(TURNS):
                    for i, worker in enumerate(workers):
                        best[i] = min(best[i], 1e6 * worker.seconds(name, count) / count)
            for worker in workers:
                worker.close()
            if not names:
                break
        for name, (before, after) in least.items():
            print(f"| {name} | {before:,.1f} | {after:,.1f} | {after / before:.3f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(int(sys.argv[2]))
    else:
        main(Path(sys.argv[1]).resolve(), sys.argv[2:])
