"""Benchmarks columns of stacked images: plain stacks, shared frames, compressed; speed and bytes per row.

``python -m flatroll bench images``
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure.resident import alone, resident_growth
from benchmarks.measure.timing import Timing, ratio, table, take_turns
from flatroll.buffers.columns.column import After, Column, TensorColumn
from flatroll.buffers.columns.frame_stack import FrameColumn
from flatroll.buffers.columns.zstd import ZstdColumn

ENVS, STEPS, WINDOW, STACK, SAMPLE = 16, 1280, 64, 4, 256
ROWS = ENVS * STEPS
TURNS, CALLS = 15, 20
KINDS = ("stacks", "frames", "stacks, zstd", "frames, zstd")
COMPRESSED = KINDS[2:]
PROCESS_STEPS = 5 * STEPS  # of each env, to measure the process


def windows_of(game: str, steps: int, window: int = WINDOW) -> Iterator[Tensor]:
    """Yield observations ``[window, ENVS, 4, 84, 84]`` of an Atari game played by a random policy."""
    import envpool

    env = envpool.make(game, env_type="gymnasium", num_envs=ENVS, seed=1)
    random = np.random.default_rng(0)
    now = env.reset()[0]
    for _ in range(0, steps, window):
        observations = torch.empty((window, ENVS, STACK, 84, 84), dtype=torch.uint8)
        for t in range(window):
            observations[t] = torch.from_numpy(now)
            now = env.step(random.integers(env.action_space.n, size=ENVS).astype(np.int32))[0]
        yield observations
    env.close()


def played(game: str) -> Tensor:
    """Return observations ``[STEPS, ENVS, 4, 84, 84]`` of an Atari game played by a random policy."""
    (observations,) = windows_of(game, STEPS, STEPS)
    return observations


def squares() -> Tensor:
    """Return synthetic observations, squares moving over a background, if envpool is not installed."""
    random = np.random.default_rng(0)
    frames: Any = np.broadcast_to(
        random.integers(0, 256, (84, 84), np.uint8), (STEPS + 3, ENVS, 84, 84)
    ).copy()
    for t, e in itertools.product(range(STEPS + 3), range(ENVS)):
        frames[t, e, t % 80 : t % 80 + 4, (t * (e + 1)) % 80 :][:, :4] = 255
    return torch.from_numpy(np.stack([frames[k : k + STEPS] for k in range(STACK)], 2))


def column_of(kind: str, rows: int = ROWS) -> Column:
    """Create an empty column of a kind, with room for all rows."""
    shape = torch.Size([STACK, 84, 84])
    if kind == "stacks":
        return TensorColumn(torch.from_numpy(np.empty((rows, *shape), np.uint8)))
    if kind == "stacks, zstd":
        return ZstdColumn(rows, shape, torch.uint8)
    return FrameColumn(rows, STACK, shape, torch.uint8, make=ZstdColumn if "zstd" in kind else None)


def filled(kind: str, observations: Tensor, window: int = WINDOW) -> Column:
    """Create a column and write all rows to it, in batches of ``window`` steps of each env, env after env."""
    column = column_of(kind)
    for t in range(0, STEPS, window):
        values = observations[t : t + window].transpose(0, 1).flatten(0, 1)
        column.write(t * ENVS, values, hint(t * ENVS, window))
    return column


def hint(slot: int, window: int = 1) -> After | None:
    """Return the hint that each env's rows continue its last row of the batch before."""
    rows = torch.arange(ENVS) * window
    return After(rows, slot - ENVS * window + rows + window - 1) if slot else None


def micros(timing: Timing) -> str:
    return f"{timing.median * 1e6:,.0f}"


def reading(columns: dict[str, Column]) -> str:
    """Time reading random rows, with and without the rows after them, relative to ``index_select``."""
    rows = itertools.cycle(list(torch.randint(ROWS - ENVS, (TURNS * CALLS, SAMPLE))))
    stacks = columns["stacks"]
    assert isinstance(stacks, TensorColumn)
    array, data = stacks.data.numpy(), stacks.data
    takes: dict[str, Callable[[Tensor], object]] = {
        "stacks": lambda slots: data.index_select(0, slots),
        "stacks, NumPy indexing (SB3)": lambda slots: torch.from_numpy(array[slots.numpy()]),
        **{kind: column.take for kind, column in columns.items() if kind != "stacks"},
    }
    one = take_turns({name: lambda t=t: t(next(rows)) for name, t in takes.items()}, TURNS, CALLS)  # type: ignore[misc]

    def both(take: Callable[[Tensor], object]) -> object:
        slots = next(rows)
        return take(slots), take(slots + 1)

    two = take_turns({name: lambda t=t: both(t) for name, t in takes.items()}, TURNS, CALLS)  # type: ignore[misc]
    base = "stacks"
    table_rows = []
    for name in takes:
        column = columns.get(name, stacks)
        of = [f"{ratio(times[name], times[base]):.2f} x" for times in (one, two)]
        table_rows.append(
            [name, f"{column.nbytes / ROWS:,.0f}", micros(one[name]), of[0], micros(two[name]), of[1]]
        )
    header = [
        "kept as",
        "bytes per row, stated",
        f"{SAMPLE} rows, µs",
        "of index_select",
        "with the next, µs",
        "of index_select",
    ]
    return table(header, table_rows)


def writing(observations: Tensor) -> str:
    """One env row by row, all envs step by step, and long windows."""
    flat, lone = observations.flatten(0, 1), observations[:, 0].contiguous()
    table_rows = []
    for kind in KINDS:
        column = column_of(kind)
        at = itertools.cycle(range(STEPS - 1))

        def row(column: Column = column, at: Any = at) -> None:
            t = next(at)
            column.write(t, lone[t : t + 1])

        def step(column: Column = column, at: Any = at) -> None:
            slot = next(at) * ENVS
            column.write(slot, flat[slot : slot + ENVS], hint(slot))

        def window(column: Column = column) -> None:
            column.write(0, lone)

        cells = []
        for run, rows, calls in ((row, 1, 200), (step, ENVS, 60), (window, STEPS, 1)):
            timing = take_turns({kind: run}, 5, calls)[kind]
            cells.append(f"{timing.median / rows * 1e6:.1f}")
        table_rows.append([kind, *cells])
    return table(
        ["kept as", "1 row, µs", f"step of {ENVS} envs, µs per row", f"{STEPS} rows, µs per row"], table_rows
    )


def sizes(games: list[str]) -> str:
    """Measure bytes per row for each game; plain stacks with next observations take 56,448."""
    table_rows = []
    for game in games:
        for kind in COMPRESSED:
            stated, standing, trimmed = alone(measure, game, kind)
            table_rows.append([game, kind, f"{stated:,.0f}", f"{standing:,.0f}", f"{trimmed:,.0f}"])
    return table(["", "kept as", "stated", "of the process", "trimmed"], table_rows)


def measure(game: str, kind: str) -> list[float]:
    """Fill a column; return the bytes per row as stated, of the process, and of the process once trimmed."""
    rows = PROCESS_STEPS * ENVS
    windows = windows_of(game, PROCESS_STEPS + 2 * WINDOW)

    def fill(steps: int) -> Column:
        column = column_of(kind, steps * ENVS)
        for t in range(0, steps, WINDOW):
            values = next(windows).transpose(0, 1).flatten(0, 1)
            column.write(t * ENVS, values, hint(t * ENVS, WINDOW))
        return column

    fill(2 * WINDOW)  # code that is loaded once, kernels, workspaces
    column, growth = resident_growth(lambda: fill(PROCESS_STEPS))
    return [size / rows for size in (column.nbytes, *growth)]


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)  # on a busy machine a second thread that waits is timed, not the work
    torch.manual_seed(0)
    if importlib.util.find_spec("envpool"):
        first, others = "Pong-v5", ["Breakout-v5", "Seaquest-v5"]
        observations = played(first)
    else:
        print("(envpool is not installed: squares that move)")
        first, others, observations = "squares", [], squares()
    print(f"{first}, random policy, {ENVS} envs, {ROWS:,} rows of 4 x 84 x 84 bytes, one thread\n")
    columns = {kind: filled(kind, observations) for kind in KINDS}
    print(reading(columns | {"frames, written step by step": filled("frames", observations, 1)}))
    print("\nWriting\n")
    print(writing(observations))
    if others:
        print(f"\nBytes per row, {PROCESS_STEPS * ENVS:,} rows, each column alone in its process\n")
        print(sizes([first, *others]))


if __name__ == "__main__":
    main()
