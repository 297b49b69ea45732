"""Where the runs of a batch stand in its picture: one per lane, or end to end in lines."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase

from flatroll.layout.boundaries import run_ends
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    MASK,
    STEP_COUNT,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    flat_column,
    marker,
)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Up to this many runs stand one per lane; more are laid end to end in lines, like words in a text.
MOST_LANES = 48
MOST_LINES = 30


BEGINS, RESUMES, TERMINATES, TRUNCATES, IS_CUT = range(5)


@dataclass(frozen=True)
class Runs:
    """Runs in order: first row, length, step of the first row (0 if unknown), kind of begin and of end."""

    first: Ints
    length: Ints
    step: Ints
    begin: Ints
    end: Ints
    counted: bool  # whether the batch counts steps

    def head(self, most: int) -> "Runs":
        """The first ``most`` runs."""
        first, length, step = self.first[:most], self.length[:most], self.step[:most]
        return Runs(first, length, step, self.begin[:most], self.end[:most], self.counted)

    def __len__(self) -> int:
        return len(self.first)


def find_runs(batch: TensorDictBase) -> tuple[Runs, Ints]:
    """The runs of the real rows, and the numbers of those rows."""
    n = batch.batch_size.numel()
    ends = to_numpy(run_ends(batch))
    rows = np.arange(n) if batch.get(MASK, None) is None else np.flatnonzero(to_numpy(marker(batch, MASK)))
    ends = ends[rows]
    last = np.flatnonzero(ends)
    first = np.concatenate([[0], last[:-1] + 1]).astype(np.int64)[: len(last)]
    has_step, has_init = batch.get(STEP_COUNT, None) is not None, batch.get(IS_INIT, None) is not None
    step, begins = np.zeros(len(first), np.int64), np.ones(len(first), np.bool_)
    if has_step:
        step = to_numpy(flat_column(batch.get(STEP_COUNT), batch, STEP_COUNT))[rows][first]
        begins = step == 0
    elif has_init:
        begins = to_numpy(marker(batch, IS_INIT))[rows][first]
    terminated, truncated, done = (_flag(batch, key, n)[rows][last] for key in (TERMINATED, TRUNCATED, DONE))
    # Done for no reason given is drawn as truncated: consumers bootstrap there.
    end = np.select([terminated, truncated | done], [TERMINATES, TRUNCATES], IS_CUT)
    return Runs(first, last - first + 1, step, np.where(begins, BEGINS, RESUMES), end, has_step), rows


def _flag(batch: TensorDictBase, key: NestedKey, n: int) -> Bools:
    return np.zeros(n, bool) if batch.get(key, None) is None else to_numpy(marker(batch, key))


def to_numpy(column: torch.Tensor) -> npt.NDArray[Any]:
    """One value per row, on the host."""
    return column.detach().reshape(-1).cpu().numpy()


@dataclass(frozen=True)
class Lanes:
    """Where runs are drawn: pieces of runs (run, row within it, lane, x, width), and the axes around them."""

    count: int
    run: Ints
    skipped: Ints
    lane: Ints
    x: Ints
    width: Ints
    xlabel: str
    heads: Ints  # which real row each lane begins with
    continuous: bool = False

    def at(self, runs: Ints, rows: Ints) -> tuple[npt.NDArray[Any], Ints]:
        """x (of its middle) and lane of row ``rows[k]`` of run ``runs[k]``."""
        key = self.run * (1 << 40) + self.skipped
        piece = np.searchsorted(key, runs * (1 << 40) + rows, side="right") - 1
        return self.x[piece] + (rows - self.skipped[piece]) + 0.5, self.lane[piece]


def one_per_lane(runs: Runs) -> Lanes:
    """One lane per run, along the steps of the episode unless that would shrink the runs to dots."""
    far = int((runs.step + runs.length).max()) > 20 * float(np.median(runs.length))
    every, zero = np.arange(len(runs)), np.zeros(len(runs), np.int64)
    if runs.counted and not far:
        return Lanes(len(runs), every, zero, every, runs.step, runs.length, "step of the episode", runs.first)
    return Lanes(len(runs), every, zero, every, zero, runs.length, "row within the run", runs.first)


def end_to_end(runs: Runs) -> Lanes:
    """Runs end to end, broken into lines of one width."""
    total = int(runs.length.sum())
    width = _round_up(total / MOST_LINES)
    start = runs.first - runs.first[0]
    pieces = (start + runs.length - 1) // width - start // width + 1
    run = np.repeat(np.arange(len(runs)), pieces)
    nth = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    lane = start[run] // width + nth
    left = np.maximum(start[run], lane * width)
    right = np.minimum(start[run] + runs.length[run], (lane + 1) * width)
    count = -(-total // width)
    skipped, x, heads = left - start[run], left - lane * width, np.arange(count) * width
    return Lanes(count, run, skipped, lane, x, right - left, "row within the line", heads, continuous=True)


def lay_out(runs: Runs) -> Lanes:
    """A lane for each of a few runs, many end to end."""
    return one_per_lane(runs) if len(runs) <= MOST_LANES else end_to_end(runs)


def _round_up(x: float) -> int:
    """The next round number (1, 1.5, 2, 2.5, 3, 4, 5, 6 or 8 times a power of ten), at least 20."""
    power = 10.0 ** np.floor(np.log10(max(x, 1.0)))
    return max(20, int(next(k * power for k in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if k * power >= x)))
