"""Counts hops: the functions and files of flatroll that one call enters, which a reader has to follow.

``python -m benchmarks.shape.hops`` prints the table; ``... hops GAE`` lists the functions that GAE enters.
Comprehensions and generator expressions count as part of their function. Every call is counted the second time it is
made, when kernels are compiled and storages allocated.
"""

import gc
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

import flatroll
from benchmarks.measure.timing import table
from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import InitTracker, StepCounter, TrajId

PACKAGE = Path(flatroll.__file__).parent
NOT_PRODUCT = {"benchmarks", "examples", "tests"}
ENVS, STEPS = 8, 64


class Function(NamedTuple):
    """A function that was entered: its file within the package, its first line, its name."""

    file: str
    line: int
    name: str


def call_watched(call: Callable[[], object], note: Callable[[FrameType, str, Any], None]) -> None:
    """Make a call; pass each function that it enters to ``note``, but none that garbage calls as it goes."""
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()


def entered(call: Callable[[], object]) -> set[Function]:
    """Return flatroll's functions that a call enters in this thread."""
    found: set[Function] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE):
            return
        file = path.relative_to(PACKAGE)
        if file.parts[0] not in NOT_PRODUCT and not code.co_name.endswith(("comp>", "<genexpr>")):
            found.add(Function(str(file), code.co_firstlineno, code.co_qualname))

    call_watched(call, note)
    return found


def marked_env() -> gym.vector.VectorEnv[Any, Any, Any]:
    """Create CartPole with all three marker wrappers."""
    return InitTracker(StepCounter(TrajId(gym.make_vec("CartPole-v1", num_envs=ENVS))))


def make_calls() -> dict[str, Callable[[], object]]:
    """Return the calls to count by name; each can be made repeatedly, and draws the same numbers in each process."""
    torch.manual_seed(0)
    parts: list[Any] = [
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=torch.distributions.Categorical, return_log_prob=True
        ),
    ]
    actor = ProbabilisticTensorDictSequential(*parts)
    critic = TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(actor, critic)
    batch = rollout(marked_env(), actor, num_steps=STEPS, seed=0)
    with_advantage = gae(batch.clone())

    # One vector step a batch: what is entered once for each batch is counted with the step.
    batches = iter(Collector(marked_env(), actor, frames_per_batch=ENVS, total_frames=100 * ENVS, seed=0))

    def buffer(compact_obs: bool) -> ReplayBuffer:
        storage = LazyTensorStorage(10_000, compact_obs=compact_obs)
        made = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=8), batch_size=64)
        made.extend(batch)
        return made

    plain, compact = buffer(False), buffer(True)
    folder = TemporaryDirectory()
    saved, loaded = buffer(True), buffer(True)
    saved.dumps(f"{folder.name}/0")
    numbers = itertools.count(1)

    def loads() -> None:
        """Load what was saved at first; the folder lives as long as this function."""
        loaded.loads(f"{folder.name}/0")

    return {
        "GAE": lambda: gae(batch.clone()),
        "ClipPPOLoss": lambda: loss(with_advantage),
        "extend": lambda: plain.extend(batch),
        "extend, compact": lambda: compact.extend(batch),
        "sample slices": plain.sample,
        "sample slices, compact": compact.sample,
        "collector step": lambda: next(batches),
        "dumps": lambda: saved.dumps(f"{folder.name}/{next(numbers)}"),
        "loads": loads,
    }


def count_hops() -> dict[str, set[Function]]:
    """The functions that each call enters when it is made for the second time."""
    found = {}
    for name, call in make_calls().items():
        call()
        found[name] = entered(call)
    return found


def main(names: list[str]) -> None:
    """Print the table, or the functions that the named calls enter."""
    found = count_hops()
    for name in names:
        for function in sorted(found[name]):
            print(f"{function.file}:{function.line} {function.name}")
    if not names:
        rows = [[k, str(len(v)), str(len({f.file for f in v}))] for k, v in found.items()]
        print(table(["call", "functions", "files"], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
