"""Benchmarks prioritized sampling against cpprb and TorchRL, over capacities, and for slices.

``python -m flatroll bench prioritized``
"""

import importlib
import importlib.util
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.bench_slices import LENGTH, SLICES, micros, rows_of, stream
from benchmarks.measure.timing import Timing, ratio, table, take_turns
from flatroll.buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
)
from flatroll.buffers.index.ring import Ring

ROWS, BATCH, ALPHA, BETA = 1_000_000, 256, 0.6, 0.4
OBS, ACT = 17, 6
TURNS, CALLS = 21, 20
Run = Callable[[], object]


def priorities() -> Callable[[], torch.Tensor]:
    """Return random batches of new priorities, generated in advance."""
    made = itertools.cycle([torch.rand(BATCH) + 0.1 for _ in range(64)])
    return lambda: next(made)


def transitions(rows: int) -> dict[str, torch.Tensor]:
    """Return the columns that off-policy algorithms store."""
    now, after = torch.rand(rows, OBS), torch.rand(rows, OBS)
    flat = {"obs": now, "act": torch.rand(rows, ACT), "rew": torch.rand(rows, 1), "next_obs": after}
    return {**flat, "done": torch.zeros(rows, 1)}


def of_ours(columns: list[str]) -> dict[str, Run]:
    """Return the calls "sample" and "sample and update" of flatroll's buffer."""
    sampler = PrioritizedSampler(ROWS, ALPHA, BETA)
    buffer = ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler, batch_size=BATCH)
    new = priorities()
    for _ in range(20):
        made = transitions(ROWS // 20)
        rows = buffer.extend(TensorDict({name: made[name] for name in columns}, [ROWS // 20]))
        buffer.update_priority(rows, torch.rand(len(rows)) + 0.1)

    def both() -> None:
        _, info = buffer.sample(return_info=True)
        buffer.update_priority(info["index"], new(), info["index_generation"])

    return {"sample": lambda: buffer.sample(return_info=True), "sample + update": both}


def of_cpprb(columns: list[str]) -> dict[str, Run]:
    """Return the same calls of cpprb; empty if it is not installed."""
    if not importlib.util.find_spec("cpprb"):
        return {}
    made = transitions(ROWS // 20)
    shapes = {name: {"shape": made[name].shape[1]} for name in columns}
    peer = importlib.import_module("cpprb").PrioritizedReplayBuffer(ROWS, shapes, alpha=ALPHA)
    for _ in range(20):
        made = transitions(ROWS // 20)
        peer.add(
            **{name: made[name].numpy() for name in columns}, priorities=np.random.rand(ROWS // 20) + 0.1
        )
    new = priorities()

    def both() -> None:
        sample = peer.sample(BATCH, beta=BETA)
        peer.update_priorities(sample["indexes"], new().numpy())

    return {"sample": lambda: peer.sample(BATCH, beta=BETA), "sample + update": both}


def of_torchrl(columns: list[str]) -> dict[str, Run]:
    """Return the same calls of TorchRL; empty if its extension does not load."""
    if not importlib.util.find_spec("torchrl"):
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.data import LazyTensorStorage as PeerStorage
        from torchrl.data import PrioritizedSampler as PeerSampler
        from torchrl.data import TensorDictReplayBuffer

        try:
            sampler = PeerSampler(ROWS, ALPHA, BETA)
        except RuntimeError:  # SumSegmentTreeFp32 is not available
            return {}
    peer = TensorDictReplayBuffer(storage=PeerStorage(ROWS), sampler=sampler, batch_size=BATCH)
    new = priorities()
    for _ in range(20):
        made = transitions(ROWS // 20)
        rows = peer.extend(TensorDict({name: made[name] for name in columns}, [ROWS // 20]))
        peer.update_priority(rows, torch.rand(len(rows)) + 0.1)

    def both() -> None:
        peer.update_priority(peer.sample()["index"], new())

    return {"sample": peer.sample, "sample + update": both}


def against_the_peers() -> str:
    """Time samples of 256 rows out of a million in each library."""
    table_rows = []
    for what, columns in (("5 columns", ["obs", "act", "rew", "next_obs", "done"]), ("1 number", ["rew"])):
        ours = of_ours(columns)
        peers = {"cpprb": of_cpprb(columns), "torchrl": of_torchrl(columns)}
        for step, run in ours.items():
            times = take_turns(
                {"ours": run, **{name: peer[step] for name, peer in peers.items() if peer}}, TURNS, CALLS
            )
            cells = [f"{what}: {step}", micros(times["ours"])]
            for name in peers:
                if name in times:
                    cells += [micros(times[name]), f"{ratio(times[name], times['ours']):.1f} x"]
                else:
                    cells += ["not available", ""]
            table_rows.append(cells)
    return table(
        ["rows of", "ours, µs", "cpprb, µs", "ours faster", "torchrl, µs", "ours faster"], table_rows
    )


def by_capacity() -> str:
    """Time the sampler alone, without reading rows, for several capacities."""
    table_rows = []
    base: Timing | None = None
    for rows in (100_000, 1_000_000, 10_000_000):
        sampler, ring, new = PrioritizedSampler(rows, ALPHA, BETA), Ring(rows), priorities()
        sampler.claimed(ring, ring.claim(rows), rows)
        ring.publish(rows)
        sampler.entered(ring, 0, rows)
        for slots in torch.chunk(torch.randperm(rows), 10):
            sampler.update_priority(ring, slots, torch.rand(len(slots)) + 0.1, None)

        def draw(sampler: Any = sampler, ring: Ring = ring) -> Any:
            return sampler.draw(ring, BATCH, None, False)

        def both(sampler: Any = sampler, ring: Ring = ring, new: Any = new, draw: Any = draw) -> None:
            drawn = draw()
            sampler.update_priority(ring, drawn.slots, new(), drawn.info["index_generation"])

        def write(sampler: Any = sampler, ring: Ring = ring) -> None:
            first = ring.claim(64)
            sampler.claimed(ring, first, 64)
            ring.publish(64)
            sampler.entered(ring, first, 64)

        times = take_turns({"draw": draw, "both": both, "write": write}, TURNS, CALLS)
        base = base or times["both"]
        table_rows.append(
            [
                f"{rows:,}",
                micros(times["draw"]),
                micros(times["both"]),
                f"{times['both'].median / base.median:.2f} x",
                micros(times["write"]),
                f"{sampler.priorities.nbytes / rows:.1f}",
            ]
        )
    header = [
        "rows",
        "draw 256, µs",
        "draw + update, µs",
        "of 100,000 rows",
        "64 new rows, µs",
        "bytes per row, stated",
    ]
    return table(header, table_rows)


def slices() -> str:
    """Time slices by their first row's priority beside slices of uniform trajectories, on a million rows."""
    table_rows = []
    for envs, window in ((1, 64), (64, 16), (64, 1)):
        buffers = {
            "uniform": ReplayBuffer(
                storage=LazyTensorStorage(ROWS),
                sampler=SliceSampler(slice_len=LENGTH),
                batch_size=SLICES * LENGTH,
            ),
            "by priority": ReplayBuffer(
                storage=LazyTensorStorage(ROWS),
                sampler=PrioritizedSliceSampler(ROWS, ALPHA, BETA, slice_len=LENGTH),
                batch_size=SLICES * LENGTH,
            ),
        }
        batches = stream(envs, window, 50_000)
        while len(buffers["uniform"]) < ROWS:
            batch = next(batches)
            for buffer in buffers.values():
                buffer.extend(batch)
        buffers["by priority"].update_priority(torch.arange(ROWS), torch.rand(ROWS))
        alone = take_turns({name: buffer.sample for name, buffer in buffers.items()}, TURNS, CALLS)
        small = list(itertools.islice(stream(envs, window, 64), CALLS))

        def written(buffer: ReplayBuffer, made: Any) -> Run:
            def run() -> object:
                buffer.extend(next(made))
                return buffer.sample()

            return run

        both = take_turns(
            {name: written(buffer, itertools.cycle(small)) for name, buffer in buffers.items()}, TURNS, CALLS
        )
        table_rows.append(
            [
                f"{envs} x {window}",
                micros(alone["uniform"]),
                micros(alone["by priority"]),
                f"{ratio(alone['by priority'], alone['uniform']):.2f} x",
                micros(both["uniform"]),
                micros(both["by priority"]),
                f"{ratio(both['by priority'], both['uniform']):.2f} x",
            ]
        )
    header = ["envs x window", "uniform, µs", "by priority, µs", "of uniform"]
    return table([*header, "extend + uniform, µs", "extend + by priority, µs", "of uniform"], table_rows)


def unequal_trajectories() -> str:
    """Time 5,000 trajectories of one row and one of 20,000, which padding would turn into 10^8 numbers."""
    lengths = torch.tensor([1] * 5000 + [20_000])
    traj = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    step = torch.cat([torch.zeros(5000, dtype=torch.int64), torch.arange(20_000)])
    sampler = PrioritizedSliceSampler(len(traj), ALPHA, BETA, slice_len=LENGTH)
    storage = LazyTensorStorage(len(traj))
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=SLICES * LENGTH)
    buffer.extend(rows_of(step, traj))
    times = take_turns({"sample": buffer.sample}, TURNS, CALLS)
    return table(["", "µs"], [[f"{SLICES} slices of {LENGTH} rows", micros(times["sample"])]])


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)  # on a busy machine a second thread that waits is timed, not the work
    torch.manual_seed(0)
    print(f"{BATCH} rows of {ROWS:,} with priorities, one thread\n")
    print(against_the_peers())
    print("\nThe sampler alone\n")
    print(by_capacity())
    print(f"\n{SLICES} slices of {LENGTH} rows of {ROWS:,}, all columns of the layout\n")
    print(slices())
    print("\nTrajectories of very different lengths\n")
    print(unequal_trajectories())


if __name__ == "__main__":
    main()
