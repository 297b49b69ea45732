"""Benchmarks the checks that rows follow one another: ``extend`` and a recurrent module, with and without them.

The check looks at up to 64 rows of a batch. Contenders alternate in one process, so the ratio is that of one machine
at one time.

``python -m flatroll bench order``
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.measure.timing import Timing, ratio, table, take_turns
from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.buffers.storages import column_storage
from flatroll.modules import GRUModule, stateful

TURNS, CALLS = 25, 20
ROWS, EPISODE = 200_000, 500
SHAPES = {"17 floats": (17,), "4 x 84 x 84": (4, 84, 84)}


def batches(envs: int, steps: int, shape: tuple[int, ...]) -> Iterator[TensorDict]:
    """Yield a few batches over and over: windows of ``steps`` steps of each env, without step counts."""
    env = torch.arange(envs)[:, None]
    dtype = torch.uint8 if len(shape) > 1 else torch.float32
    made = []
    for first in range(0, 8 * steps, steps):
        t = (first + torch.arange(steps + 1) + 37 * env) % EPISODE  # [envs, steps + 1]
        values = torch.randn(EPISODE + 1, *shape).mul(50).to(dtype)
        root, later = values[t[:, :-1]], values[t[:, :-1] + 1]
        rows = envs * steps
        done = (t[:, :-1] == EPISODE - 1).reshape(rows, 1)
        batch = TensorDict({"observation": root.reshape(rows, *shape)}, [rows])
        batch["action"] = torch.zeros(rows, 6)
        batch["is_init"] = (t[:, :-1] == 0).reshape(rows, 1)
        batch["collector"] = {"traj_ids": env.expand(-1, steps).reshape(rows).clone()}
        batch["next"] = {
            "observation": later.reshape(rows, *shape),
            "reward": torch.zeros(rows, 1),
            "done": done,
            "terminated": done.clone(),
        }
        # Each batch is cut from the one before: the ids are new.
        batch["collector", "traj_ids"] += first * envs
        made.append(batch)
    for turn in itertools.count():
        for batch in made:
            batch["collector", "traj_ids"] += 10_000_000 * (turn > 0)
            yield batch


@contextmanager
def without(module: Any, name: str) -> Iterator[None]:
    """Replace a function of a module by one that does nothing."""
    kept = getattr(module, name)
    setattr(module, name, lambda *arguments: None)
    try:
        yield
    finally:
        setattr(module, name, kept)


def compared(module: Any, name: str, run: Callable[[], object]) -> tuple[Timing, Timing]:
    """Time ``run`` with a check, the function ``name`` of ``module``, and without it."""

    def checked() -> None:  # with the same detour
        with without(module, "__doc__"):
            run()

    def unchecked() -> None:
        with without(module, name):
            run()

    times = take_turns({"checked": checked, "unchecked": unchecked}, TURNS, CALLS)
    return times["checked"], times["unchecked"]


def extends() -> str:
    """Time ``extend`` of windows."""
    lines = []
    for (name, shape), compact, (envs, steps) in itertools.product(
        SHAPES.items(), (False, True), ((1, 64), (8, 64), (64, 16), (64, 64))
    ):
        rows = ROWS if len(shape) == 1 else 4 * envs * steps
        storage = LazyTensorStorage(max(rows, 2 * envs * steps), compact_obs=compact)
        buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=8), batch_size=64)
        given = batches(envs, steps, shape)
        check = "check_tails" if compact else "check_followed"

        def extend(buffer: ReplayBuffer = buffer, given: Iterator[TensorDict] = given) -> None:
            buffer.extend(next(given))

        with_check, alone = compared(column_storage, check, extend)
        kind = "compact" if compact else "full"
        cells = [f"{envs} x {steps}", f"{alone.median * 1e6:,.1f}", f"{with_check.median * 1e6:,.1f}"]
        lines.append([f"{name}, {kind}", *cells, f"{ratio(with_check, alone):.3f} x"])
    return table(["rows", "envs x steps", "extend without, µs", "with the check, µs", "ratio"], lines)


def modules() -> str:
    """Time a GRU over a flat batch, forward and backward, where the check runs (one call in 16)."""
    lines = []
    for envs, steps in ((8, 16), (64, 32)):
        batch = next(batches(envs, steps, (17,)))
        gru = GRUModule(17, 64, in_key="observation", out_key="out", state="zero")
        gru.default_recurrent_mode = True

        def update(gru: Any = gru, batch: TensorDict = batch) -> None:
            gru._calls = -1  # the next call is checked
            gru(batch.copy())["out"].square().mean().backward()
            gru.zero_grad()

        with_check, alone = compared(stateful, "check_runs_in_order", update)
        cells = [f"{alone.median * 1e6:,.0f}", f"{with_check.median * 1e6:,.0f}"]
        lines.append([f"{envs} x {steps}", *cells, f"{1 + (ratio(with_check, alone) - 1) / 16:.4f} x"])
    return table(["envs x steps", "update without, µs", "with the check, µs", "ratio of all calls"], lines)


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"**Extend, without step counts**\n\n{extends()}\n")
    print(f"**GRU, forward and backward**\n\n{modules()}")


if __name__ == "__main__":
    main()
