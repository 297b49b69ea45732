"""Draws a batch: runs as ribbons, with marks for how they begin and end."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase

from flatroll.layout.boundaries import run_ends
from flatroll.layout.checks import check_keys, check_rows, check_type, check_whole_number
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    MASK,
    STEP_COUNT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    flat_column,
    optional_marker,
    require,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Ints = npt.NDArray[np.int64]

# Up to this many runs get a lane each; more are wrapped into lines, like words in a text.
MOST_LANES = 48
MOST_LINES = 30

# How a run begins and ends, as indices into MARKS.
BEGINS, RESUMES, TERMINATES, TRUNCATES, IS_CUT = range(5)

# The marks use Okabe and Ito's colours, which colour-blind readers can tell apart; their shapes differ as well.
INK = "#37424d"
MUTED = "#7d8791"
TRACK = "#f6f8fa"
PAPER = "#ffffff"
RIBBONS = ("#c3d1df", "#d9e2ea")
TINTS = ("#9dc3e0", "#f0c987", "#a3d5bf", "#e3b1cd", "#c9c6e6", "#efb399", "#cfd8a0", "#b9c4cc")
MARKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("episode begins", {"marker": "|", "c": INK, "linewidths": 1.8}),
    ("begins in mid-episode", {"marker": ">", "facecolors": PAPER, "edgecolors": INK, "linewidths": 0.9}),
    ("terminated", {"marker": "s", "c": "#d55e00", "linewidths": 0}),
    ("truncated", {"marker": "D", "c": "#0072b2", "linewidths": 0}),
    ("cut", {"marker": "o", "facecolors": PAPER, "edgecolors": INK, "linewidths": 0.9}),
)
SIDE = (1.1, 0.58, 0.55, 0.5, 0.55)  # size of each mark relative to the ribbon's height
HALF = 0.34  # half a ribbon's height, in lanes


def timeline(
    batch: TensorDictBase,
    ax: "Axes | None" = None,
    *,
    max_runs: int = 400,
    title: str | None = None,
    color_by: NestedKey | None = None,
) -> "Axes":
    """Draw the runs of a batch as ribbons, marked where an episode begins, terminates, is truncated or cut.

    Up to 48 runs get a lane each, along the steps of their episode. More are wrapped into lines in row order. The
    numbers at the left are row numbers, for `explain`.

    Args:
        batch: ``[N]`` or ``[*B, T]`` with one boundary marker at least; padding by its mask is left out.
        ax: matplotlib axes to draw in. Default: those of a new figure.
        max_runs: draw at most this many runs, and say so. Default 400.
        title: default: the number of rows and runs.
        color_by: a numeric column with one value per row, shown as colour (reward, an advantage); or the
            key of the trajectory ids, for one tint per trajectory.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
        KeyError: no boundary marker, or no column ``color_by``.
        ValueError: the batch is empty, ``max_runs`` is below 1, or ``color_by`` has more than one value per
            row.

    ```python
    timeline(batch).figure.savefig("batch.png")
    ```
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        text = 'timeline draws with matplotlib, which is missing: pip install "flatroll[plot]", or use timeline_svg'
        raise ImportError(text) from error

    shown, placed, rows, title = plan_drawing(batch, max_runs, title)
    if ax is None:
        height = min(max(0.2 * placed.count + 1.1, 1.8), 8.5)
        ax = plt.subplots(figsize=(9.0, height), layout="constrained")[1]

    _draw_frame(ax, placed, rows, title)
    _draw_ribbons(ax, placed, shown, *colour_values(batch, rows, color_by))
    _draw_marks(ax, placed, shown)
    return ax


def plan_drawing(
    batch: TensorDictBase, max_runs: int, title: str | None
) -> tuple["RunTable", "Placement", Ints, str]:
    """Return the shown runs, their placement, the numbers of the real rows, and the title.

    Raises:
        ValueError: ``max_runs`` is below 1, or there are no rows.
    """
    check_whole_number("max_runs", max_runs)
    if title is not None:
        check_type("title", title, str, "a string or None")
    check_rows(batch, values=True)

    runs, rows = find_runs(batch)
    if not len(runs.first):
        raise ValueError("batch has no rows to draw")

    shown = RunTable(*(column[:max_runs] for column in runs))
    if not title:
        count = len(runs.first)
        title = f"{int(runs.length.sum()):,} rows in {count:,} run{'s' * (count != 1)}"
        if max_runs < count:
            title += f", the first {max_runs:,} shown"
    return shown, lay_out(shown), rows, title


class RunTable(NamedTuple):
    """The R runs of a batch in order, a column ``[R]`` of int64 for each property."""

    first: Ints  # first row, counted among the real rows
    length: Ints
    step: Ints  # step of the first row; empty if the batch does not count steps
    begin: Ints  # BEGINS or RESUMES
    end: Ints  # TERMINATES, TRUNCATES or IS_CUT

    def with_mark(self, kind: int) -> npt.NDArray[np.bool_]:
        """Return which runs have this mark at their beginning or end, bool ``[R]``."""
        edges = self.begin if kind in (BEGINS, RESUMES) else self.end
        marked: npt.NDArray[np.bool_] = edges == kind
        return marked


def find_runs(batch: TensorDictBase) -> tuple[RunTable, Ints]:
    """Return the runs of the rows that are not padding, and the numbers of these rows."""
    mask = optional_marker(batch, MASK)
    if mask is None:
        rows = np.arange(batch.batch_size.numel())
    else:
        rows = np.flatnonzero(to_numpy(mask))

    last = np.flatnonzero(to_numpy(run_ends(batch))[rows])
    # each run begins one row after the last row of the run before
    first = np.concatenate([[0], last[:-1] + 1]).astype(np.int64)[: len(last)]

    step = np.zeros(0, np.int64)
    begins = np.ones(len(first), np.bool_)
    is_init = optional_marker(batch, IS_INIT)
    if batch.get(STEP_COUNT, None) is not None:
        step = to_numpy(flat_column(batch.get(STEP_COUNT), batch, STEP_COUNT))[rows][first]
        begins = step == 0
    elif is_init is not None:
        begins = to_numpy(is_init)[rows][first]

    flags = []
    for key in (TERMINATED, TRUNCATED, DONE):
        flag = optional_marker(batch, key)
        if flag is None:
            flags.append(np.zeros(len(last), bool))
        else:
            flags.append(to_numpy(flag)[rows][last])
    terminated, truncated, done = flags

    # Done without a reason is drawn as truncated, because consumers bootstrap there. The first true condition counts.
    end = np.select([terminated, truncated | done], [TERMINATES, TRUNCATES], IS_CUT)
    return RunTable(first, last - first + 1, step, np.where(begins, BEGINS, RESUMES), end), rows


def to_numpy(column: torch.Tensor) -> npt.NDArray[Any]:
    """Return one value per row, on the host."""
    return column.detach().reshape(-1).cpu().numpy()


@dataclass(frozen=True)
class Placement:
    """The placement of runs: P pieces (several for a run wrapped across lines), each in a lane.

    ``run``, ``skipped``, ``lane``, ``x`` and ``width`` are int64 ``[P]``.
    """

    count: int  # lanes
    run: Ints  # run of each piece
    skipped: Ints  # rows of its run before the piece
    lane: Ints
    x: Ints  # its left edge
    width: Ints  # its rows
    xlabel: str
    heads: Ints  # int64 [count], the first real row of each lane
    continuous: bool = False  # whether runs are drawn end to end

    def at(self, runs: Ints, rows: Ints) -> tuple[npt.NDArray[Any], Ints]:
        """Return the x position and the lane of row ``rows[k]`` of run ``runs[k]``."""
        # pieces are in order of run, then of row: the last piece that begins at or before the row holds it
        key = self.run * (1 << 40) + self.skipped
        piece = np.searchsorted(key, runs * (1 << 40) + rows, side="right") - 1
        return self.x[piece] + (rows - self.skipped[piece]) + 0.5, self.lane[piece]

    def rows(self, runs: RunTable) -> tuple[Ints, Ints, Ints]:
        """Return each drawn row's piece, its place in that piece, and its number among the real rows."""
        piece = np.repeat(np.arange(len(self.run)), self.width)
        place = np.arange(len(piece)) - np.repeat(np.cumsum(self.width) - self.width, self.width)
        return piece, place, runs.first[self.run[piece]] + self.skipped[piece] + place


def lay_out(runs: RunTable) -> Placement:
    """Plan the drawing: one lane per run if they are few, else all runs end to end, wrapped into lines."""
    count = len(runs.first)
    if count > MOST_LANES:
        return _end_to_end(runs)

    # by step of the episode, unless that would shrink the runs to dots
    every = np.arange(count)
    zero = np.zeros(count, np.int64)
    x = zero
    xlabel = "row within the run"
    if len(runs.step) and int((runs.step + runs.length).max()) <= 20 * float(np.median(runs.length)):
        x = runs.step
        xlabel = "step of the episode"
    return Placement(count, every, zero, every, x, runs.length, xlabel, runs.first)


def _end_to_end(runs: RunTable) -> Placement:
    total = int(runs.length.sum())
    # width of a line: at least 20, rounded up to a round number from what MOST_LINES lines need
    least = total / MOST_LINES
    power = 10.0 ** np.floor(np.log10(max(least, 1.0)))
    width = max(20, int(next(k * power for k in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if k * power >= least)))

    # a run has a piece in each line from that of its first row to that of its last row
    start = runs.first - runs.first[0]
    pieces = (start + runs.length - 1) // width - start // width + 1

    run = np.repeat(np.arange(len(start)), pieces)
    # number of the piece within its run: its own number minus that of the run's first piece
    nth = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    # a piece spans from the start of its line or of its run to the end of the line or of the run, whichever
    # is shorter
    lane = start[run] // width + nth
    left = np.maximum(start[run], lane * width)
    right = np.minimum(start[run] + runs.length[run], (lane + 1) * width)

    count = -(-total // width)  # rounded up
    skipped = left - start[run]
    x = left - lane * width
    heads = np.arange(count) * width
    return Placement(
        count, run, skipped, lane, x, right - left, "row within the line", heads, continuous=True
    )


def _draw_frame(ax: "Axes", placed: Placement, rows: Ints, title: str) -> None:
    right = int((placed.x + placed.width).max())
    left = int(placed.x.min())
    if 2 * left < right:
        left = 0
    margin = 0.012 * (right - left)
    ax.set_xlim(left - margin, right + margin)
    ax.set_ylim(placed.count - 0.4, -0.6)

    # at most 24 lanes get a number
    every = max(1, -(-placed.count // 24))
    ax.set_yticks(np.arange(placed.count)[::every], [f"{row:,}" for row in rows[placed.heads[::every]]])
    ax.set_ylabel("first row", color=MUTED, fontsize=8.5)
    ax.set_xlabel(placed.xlabel, color=MUTED, fontsize=8.5)
    ax.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    ax.grid(axis="x", color="#eef1f4", linewidth=0.8)
    ax.set_axisbelow(True)

    for lane in range(placed.count):  # a faint track that leads the eye from a short ribbon to its number
        ax.axhspan(lane - HALF, lane + HALF, color=TRACK, linewidth=0, zorder=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title(title, loc="left", fontsize=11, color=INK, pad=26)


def colour_values(
    batch: TensorDictBase, rows: Ints, key: NestedKey | None
) -> tuple[str, npt.NDArray[Any] | None]:
    """Return name and values of the colour column: floats for a colour bar, integers for a tint per trajectory."""
    if key is None:
        return "", None
    check_keys(color_by=key)
    column = require(batch, key)
    if column.numel() != batch.batch_size.numel():
        raise ValueError(
            f"color_by={key!r} must have one value per row, got shape {tuple(column.shape)} in a batch of "
            f"{tuple(batch.batch_size)}"
        )
    values = to_numpy(column)[rows]
    if as_tuple(key)[-1] == TRAJ_IDS[-1]:
        return "", np.unique(values, return_inverse=True)[1]
    return ".".join(as_tuple(key)), values.astype(float)


def _draw_ribbons(
    ax: "Axes", placed: Placement, runs: RunTable, name: str, values: npt.NDArray[Any] | None
) -> None:
    from matplotlib.collections import PolyCollection

    if name and values is not None:
        piece, place, row = placed.rows(runs)
        boxes = _boxes(placed.x[piece] + place, np.ones(len(piece)), placed.lane[piece])
        of_rows = values[row]
        ribbons = PolyCollection(boxes, array=of_rows, cmap="cividis", linewidths=0)
        ax.add_collection(ribbons)
        bar = ax.figure.colorbar(ribbons, ax=ax, pad=0.01, aspect=30, shrink=0.9)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=8, labelcolor=MUTED)
        bar.set_label(name, color=MUTED, fontsize=8.5)
        return
    if values is not None:
        faces = [TINTS[k % len(TINTS)] for k in values[runs.first][placed.run]]
    else:
        colours = 2 if placed.continuous else 1
        faces = [RIBBONS[k % colours] for k in placed.run]

    boxes = _boxes(placed.x, placed.width, placed.lane)
    ax.add_collection(PolyCollection(boxes, facecolors=faces, linewidths=0))


def _boxes(x: npt.NDArray[Any], width: npt.NDArray[Any], lane: Ints) -> list[npt.NDArray[Any]]:
    """Corners of the boxes from ``x`` to ``x + width`` in their lanes, each ``[4, 2]``."""
    left = x
    right = x + width
    top = lane - HALF
    bottom = lane + HALF
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    return list(np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1))


def _draw_marks(ax: "Axes", placed: Placement, runs: RunTable) -> None:
    from matplotlib.transforms import ScaledTranslation

    every = np.arange(len(runs.first))
    # the ribbon's height in points, which sets the size of the marks
    lane_points = ax.get_window_extent().height * 72 / ax.figure.dpi / placed.count
    ribbon = min(2 * HALF * lane_points, 13.0)
    left = placed.at(every, np.zeros_like(every))
    right = placed.at(every, runs.length - 1)
    for kind, (name, style) in enumerate(MARKS):
        starts = kind in (BEGINS, RESUMES)
        chosen = runs.with_mark(kind)
        if not chosen.any():
            continue

        x, lane = left if starts else right
        edge = -0.5 if starts else 0.5
        side = max(ribbon * SIDE[kind], 2.5)
        # Inside the run and flush with its edge, so that marks of neighbours do not cover each other.
        inward = 0.0 if kind == BEGINS else -edge * (side + 2.0)
        moved = ax.transData + ScaledTranslation(inward / 72, 0, ax.figure.dpi_scale_trans)

        label = f"{name} ({chosen.sum():,})"
        ax.scatter(x[chosen] + edge, lane[chosen], s=side**2, label=label, zorder=3, transform=moved, **style)

    legend = ax.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=5,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handletextpad=0.2,
        columnspacing=1.4,
        borderaxespad=0.2,
        borderpad=0.2,
    )
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_sizes([36.0])  # type: ignore[attr-defined]
