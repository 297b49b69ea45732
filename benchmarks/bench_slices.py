"""Benchmarks slice sampling: against ``index_select``, over capacities, between writes, beside TorchRL.

``python -m flatroll bench slices``
"""

import importlib.util
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.measure.timing import Timing, ratio, table, take_turns
from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler, TrajectoryIndex
from flatroll.buffers.columns.column import TensorColumn

SLICES, LENGTH, EPISODE = 32, 64, 1000
OBS, ACT = 17, 6
TURNS, CALLS = 21, 20


def rows_of(steps: Tensor, traj: Tensor) -> TensorDict:
    """Create rows with all standard columns: row i is step ``steps[i]`` of trajectory ``traj[i]``."""
    n = len(steps)
    obs = (steps[:, None] * 64 + traj[:, None] * 7 + torch.arange(OBS)).float()
    done = (steps == EPISODE - 1)[:, None]
    after = {"observation": obs + 64, "step_count": steps[:, None] + 1, "reward": torch.rand(n, 1)}
    flags = {"done": done, "terminated": torch.zeros_like(done), "truncated": done.clone()}
    now = {"observation": obs, "action": torch.rand(n, ACT), "is_init": (steps == 0)[:, None]}
    root = {**now, "step_count": steps[:, None], "next": {**after, **flags}, "collector": {"traj_ids": traj}}
    return TensorDict(root, [n])


def stream(envs: int, window: int, size: int) -> Iterator[TensorDict]:
    """Yield endless batches of about ``size`` rows: ``window`` steps of each env, env after env."""
    repeat = max(1, size // (envs * window))
    env, step = torch.arange(envs)[:, None], torch.arange(window)
    for first in itertools.count(0, repeat):
        start = (torch.arange(first, first + repeat) * window)[:, None, None]
        t = start + step + env * 37  # envs are out of phase
        traj = (t // EPISODE) * envs + env
        yield rows_of((t % EPISODE).flatten(), traj.flatten())


def filled(
    rows: int, envs: int = 1, window: int = 64, compact: bool = False, device: str = "cpu"
) -> tuple[ReplayBuffer, Any]:
    """Return a full buffer, and the stream of batches that continues it."""
    sampler = SliceSampler(slice_len=LENGTH)
    storage = LazyTensorStorage(rows, compact_obs=compact, device=device)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=SLICES * LENGTH)
    batches = stream(envs, window, min(rows, 50_000))
    while len(buffer) < rows:
        buffer.extend(next(batches))
    small = stream(envs, window, envs * window)
    return buffer, small


def gathers(buffer: ReplayBuffer, draw: Callable[[], Tensor]) -> Callable[[], object]:
    """Return a call of one ``index_select`` per column of a sample, for rows drawn in advance."""
    index = itertools.cycle([draw() for _ in range(TURNS * CALLS)])
    one = buffer.sample(LENGTH)
    assert isinstance(buffer.storage, LazyTensorStorage)
    stored = buffer.storage.columns  # in a compact storage without next observations
    kept = [stored[k[1] if k not in stored else k] for k in one.keys(True, True)]
    columns = [column.data for column in kept if isinstance(column, TensorColumn)]

    def run() -> object:
        rows = next(index)
        return [column.index_select(0, rows) for column in columns]

    return run


def extended(buffer: Any, batches: Iterator[TensorDict]) -> Callable[[], object]:
    """Return a call that extends the buffer by 64 rows, made in advance, and samples."""
    made = itertools.cycle(list(itertools.islice(batches, TURNS * CALLS + 1)))

    def run() -> object:
        buffer.extend(next(made))
        return buffer.sample()

    return run


def micros(timing: Timing) -> str:
    return f"{timing.median * 1e6:.0f}"


def measured(buffer: ReplayBuffer, batches: Iterator[TensorDict]) -> dict[str, Timing]:
    """Time plain gathering, sampling, and extending plus sampling of one buffer."""
    index = buffer.index
    assert index is not None
    runs: dict[str, Callable[[], object]] = {
        "gather": gathers(buffer, lambda: index.draw(SLICES, LENGTH).slots),
        "sample": buffer.sample,
    }
    alone = take_turns(runs, TURNS, CALLS)
    both = take_turns({"sample alone": buffer.sample, "both": extended(buffer, batches)}, TURNS, CALLS)
    return alone | both


def by_size() -> str:
    """Time sampling for several capacities, with one env and episodes of 1,000 steps."""
    table_rows = []
    base: Timing | None = None
    for rows in (100_000, 1_000_000, 10_000_000):
        buffer, _ = filled(rows)
        times = measured(buffer, stream(1, 64, 64))
        base = base or times["sample"]
        table_rows.append(
            [
                f"{rows:,}",
                micros(times["gather"]),
                micros(times["sample"]),
                f"{ratio(times['sample'], times['gather']):.2f} x",
                f"{times['sample'].median / base.median:.2f} x",
                micros(times["both"]),
                f"{ratio(times['both'], times['sample alone']):.2f} x",
            ]
        )
    header = [
        "rows",
        "gather, µs",
        "sample, µs",
        "of gather",
        "of 100,000 rows",
        "extend 64 + sample, µs",
        "of sample",
    ]
    return table(header, table_rows)


def by_writers() -> str:
    """Time sampling from a million rows, for several interleavings of writes, full and compact storage."""
    table_rows = []
    for envs, window in ((1, 64), (64, 16), (64, 1)):
        for compact in (False, True):
            buffer, _ = filled(1_000_000, envs, window, compact)
            times = measured(buffer, stream(envs, window, 64))
            stats = buffer.stats()
            index = buffer.index
            table_rows.append(
                [
                    f"{envs} x {window}",
                    "compact" if compact else "full",
                    micros(times["gather"]),
                    micros(times["sample"]),
                    f"{ratio(times['sample'], times['gather']):.2f} x",
                    micros(times["both"]),
                    f"{stats['bytes'] / stats['capacity']:.1f}",
                    f"{(0 if index is None else index.nbytes) / stats['capacity']:.1f}",
                ]
            )
    header = ["envs x window", "storage", "gather, µs", "sample, µs", "of gather", "extend + sample, µs"]
    return table([*header, "bytes per row, stated", "of them index"], table_rows)


def short_stream(size: int) -> Iterator[TensorDict]:
    """Yield endless batches of ``size`` rows of one env, whose episodes end with a chance of 2 % at each step."""
    random = torch.Generator().manual_seed(1)
    begun = 0  # episodes
    while True:
        done = torch.rand(size, generator=random) < 0.02
        traj = begun + done.cumsum(0) - done.long()
        begun = int(traj[-1]) + 1
        first = torch.ones(size, dtype=torch.bool)
        first[1:] = done[:-1]
        at = torch.arange(size)
        steps = at - torch.where(first, at, 0).cummax(0).values
        batch = rows_of(steps, traj)
        batch["next", "done"] = done[:, None]
        batch["next", "terminated"] = done[:, None]
        batch["next", "truncated"] = torch.zeros_like(done)[:, None]
        yield batch


def short_episodes() -> str:
    """Time samples of episodes of 50 rows on average, shorter and longer than a slice, in full and compact storages."""
    table_rows = []
    for compact in (False, True):
        base: Timing | None = None
        for rows in (100_000, 1_000_000, 10_000_000):
            storage = LazyTensorStorage(rows, compact_obs=compact)
            buffer = ReplayBuffer(
                storage=storage, sampler=SliceSampler(slice_len=LENGTH), batch_size=SLICES * LENGTH
            )
            batches = short_stream(50_000)
            while len(buffer) < rows:
                buffer.extend(next(batches))

            runs: dict[str, Callable[[], object]] = {
                "gather": gathers(buffer, lambda buffer=buffer: buffer.sample(return_info=True)[1]["index"]),  # type: ignore[misc]
                "sample": buffer.sample,
            }
            times = take_turns(runs, TURNS, CALLS, time.thread_time)
            base = base or times["sample"]
            table_rows.append(
                [
                    f"{rows:,}",
                    "compact" if compact else "full",
                    micros(times["gather"]),
                    micros(times["sample"]),
                    f"{ratio(times['sample'], times['gather']):.2f} x",
                    f"{times['sample'].median / base.median:.2f} x",
                ]
            )
    return table(["rows", "storage", "gather, µs", "sample, µs", "of gather", "of 100,000 rows"], table_rows)


def draw_in_numpy(index: TrajectoryIndex, uniform: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Draw slices as `TrajectoryIndex.draw` does, with NumPy; for trajectories of full length only."""
    fragments, chains, state = index._fragments, index._chains, index._state[0]
    count = uniform.shape[1]

    def places_of(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        at = numbers - state["base"]
        places: np.ndarray[Any, Any] = np.where(at < len(fragments), at, at - len(fragments))
        return places

    live = np.flatnonzero(chains["total"] - chains["dropped"] >= LENGTH)
    chain = live[(uniform[0] * len(live)).astype(np.int64)]
    length = chains["total"][chain] - chains["dropped"][chain]
    offset = chains["dropped"][chain] + (uniform[1] * (length - LENGTH + 1)).astype(np.int64)
    number = chains["last"][chain].copy()
    while (late := fragments["offset"][places_of(number)] > offset).any():
        far = number - fragments["jump"][places_of(number)]
        live = (far < number) & (far >= state["first"])
        good = live & (fragments["offset"][places_of(np.where(live, far, number))] > offset)
        number = np.where(late, np.where(good, far, number - fragments["prev"][places_of(number)]), number)
    rows = np.empty((count, LENGTH), np.int64)
    at = np.arange(LENGTH)
    filled_to = np.zeros(count, np.int64)
    while (open_ := filled_to < LENGTH).any():
        f = fragments[places_of(number)]
        later = fragments["first"][places_of(np.minimum(number + 1, state["end"] - 1))]
        stop = np.where(number + 1 < state["end"], later, state["written"])
        first = f["first"] + offset + filled_to - f["offset"]
        here = open_[:, None] & (at >= filled_to[:, None])
        rows[here] = (first[:, None] + at - filled_to[:, None])[here]
        filled_to = np.where(open_, filled_to + stop - first, filled_to)
        number = np.where(filled_to < LENGTH, number + f["next"], number)
    slots: np.ndarray[Any, Any] = (rows % index.capacity).reshape(-1)
    return slots


def draws() -> str:
    """Time the drawing of slices alone: the compiled kernel beside NumPy."""
    table_rows = []
    for envs, window in ((1, 64), (64, 16), (64, 1)):
        index = filled(1_000_000, envs, window)[0].index
        assert index is not None
        runs: dict[str, Callable[[], object]] = {
            "numpy": lambda i=index: draw_in_numpy(i, torch.rand(2, SLICES, dtype=torch.float64).numpy()),  # type: ignore[misc]
            "kernel": lambda i=index: i.draw(SLICES, LENGTH),  # type: ignore[misc]
        }
        times = take_turns(runs, TURNS, CALLS)
        faster = f"{ratio(times['numpy'], times['kernel']):.1f} x"
        table_rows.append([f"{envs} x {window}", micros(times["numpy"]), micros(times["kernel"]), faster])
    return table(["envs x window", "NumPy, µs", "compiled, µs", "faster"], table_rows)


def random_rows() -> str:
    """Time samples of 256 single rows out of a million."""
    table_rows = []
    for compact in (False, True):
        buffer = ReplayBuffer(storage=LazyTensorStorage(1_000_000, compact_obs=compact), batch_size=256)
        batches = stream(1, 64, 50_000)
        while len(buffer) < 1_000_000:
            buffer.extend(next(batches))
        gather = gathers(buffer, lambda: torch.randint(1_000_000, (256,)))
        times = take_turns({"gather": gather, "sample": buffer.sample}, TURNS, CALLS)
        of = f"{ratio(times['sample'], times['gather']):.2f} x"
        name = "compact" if compact else "full"
        table_rows.append([name, micros(times["gather"]), micros(times["sample"]), of])
    return table(["storage", "gather, µs", "sample, µs", "of gather"], table_rows)


def against_the_peer() -> str:
    """Time samples of the same million rows in flatroll and in TorchRL."""
    if not importlib.util.find_spec("torchrl"):
        return "(torchrl is not installed)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.data import LazyTensorStorage as PeerStorage
        from torchrl.data import SliceSampler as PeerSampler
        from torchrl.data import TensorDictReplayBuffer

        peer = TensorDictReplayBuffer(
            storage=PeerStorage(1_000_000),
            sampler=PeerSampler(slice_len=LENGTH, traj_key=("collector", "traj_ids"), strict_length=False),
            batch_size=SLICES * LENGTH,
        )
        buffer, _ = filled(1_000_000)
        batches = stream(1, 64, 50_000)
        while len(peer) < 1_000_000:
            peer.extend(next(batches))
        pair: dict[str, Any] = {"ours": buffer, "peer": peer}
        alone = take_turns({name: b.sample for name, b in pair.items()}, turns=9, calls=10)
        both = take_turns(
            {name: extended(b, stream(1, 64, 64)) for name, b in pair.items()}, turns=9, calls=10
        )
    table_rows = [
        [name, micros(t["ours"]), micros(t["peer"]), f"{ratio(t['peer'], t['ours']):.0f} x"]
        for name, t in (("sample", alone), ("extend 64 + sample", both))
    ]
    return table(["", "ours, µs", "torchrl, µs", "faster"], table_rows)


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)  # on a busy machine a second thread that waits is timed, not the work
    torch.manual_seed(0)
    print(f"{SLICES} slices of {LENGTH} rows, {OBS} + {ACT} floats, all columns of the layout, one thread\n")
    print(by_size())
    print("\nOne million rows, by how they were written\n")
    print(by_writers())
    print("\nEpisodes of 50 rows on average; processor time\n")
    print(short_episodes())
    print("\nDrawing the row numbers alone\n")
    print(draws())
    print("\n256 random rows of one million\n")
    print(random_rows())
    print("\nAgainst the peer, one million rows\n")
    print(against_the_peer())


if __name__ == "__main__":
    main()
