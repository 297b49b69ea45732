"""A batch as a picture: its runs as ribbons, with marks where and how they begin and end."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDictBase

from flatroll.layout.inspect.timeline_lanes import (
    BEGINS,
    RESUMES,
    Ints,
    Lanes,
    Runs,
    find_runs,
    lay_out,
    to_numpy,
)
from flatroll.layout.keys import TRAJ_IDS, NestedKey, as_tuple, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Marks take Okabe and Ito's colours, which colour-blind readers tell apart; their shapes differ as well.
INK, MUTED, TRACK, PAPER = "#37424d", "#7d8791", "#f6f8fa", "#ffffff"
RIBBONS = ("#c3d1df", "#d9e2ea")
TINTS = ("#9dc3e0", "#f0c987", "#a3d5bf", "#e3b1cd", "#c9c6e6", "#efb399", "#cfd8a0", "#b9c4cc")
MARKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("episode begins", {"marker": "|", "c": INK, "linewidths": 1.8}),
    ("begins in mid-episode", {"marker": ">", "facecolors": PAPER, "edgecolors": INK, "linewidths": 0.9}),
    ("terminated", {"marker": "s", "c": "#d55e00", "linewidths": 0}),
    ("truncated", {"marker": "D", "c": "#0072b2", "linewidths": 0}),
    ("cut", {"marker": "o", "facecolors": PAPER, "edgecolors": INK, "linewidths": 0.9}),
)
SIDE = (1.1, 0.58, 0.55, 0.5, 0.55)  # of a mark, as a part of the ribbon's height
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

    Up to 48 runs get a lane each, along the steps of their episode. More are laid end to end in lines, as the
    rows of the batch are. The numbers at the left are row numbers, for `explain`.

    Args:
        batch: ``[N]`` or ``[*B, T]`` with one boundary marker at least; padding by its mask is left out.
        ax: matplotlib axes to draw in. Default: those of a new figure.
        max_runs: draw the first so many runs, and say so. Default 400.
        title: default: how many rows and runs there are.
        color_by: a numeric column with one value per row, shown as colour (reward, an advantage); or the
            key of the trajectory ids, for one tint per trajectory, so that slices of one trajectory are
            seen.

    Raises:
        ImportError: matplotlib is missing; the text names the extra.
        KeyError: no boundary marker, or no column ``color_by``.
        ValueError: the batch is empty, ``max_runs`` is below 1, or ``color_by`` has more than one value per
            row.

    Example::

        timeline(batch).figure.savefig("batch.png")
    """
    if max_runs < 1:
        raise ValueError(f"max_runs must be at least 1, got {max_runs}")
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        text = 'timeline draws with matplotlib, which is not installed: pip install "flatroll[plot]"'
        raise ImportError(text) from error
    runs, rows = find_runs(batch)
    if len(runs) == 0:
        raise ValueError("batch has no rows to draw")
    shown = runs.head(max_runs)
    lanes = lay_out(shown)
    if ax is None:
        height = min(max(0.2 * lanes.count + 1.1, 1.8), 8.5)
        ax = plt.subplots(figsize=(9.0, height), layout="constrained")[1]
    _frame(ax, lanes, rows, title or _title(runs, shown))
    _ribbons(ax, lanes, shown, _colours(batch, rows, color_by))
    _marks(ax, lanes, shown)
    return ax


def _title(runs: Runs, shown: Runs) -> str:
    rows = f"{int(runs.length.sum()):,} rows in {len(runs):,} run{'s' if len(runs) != 1 else ''}"
    return rows if len(shown) == len(runs) else f"{rows}, the first {len(shown):,} shown"


def _frame(ax: "Axes", lanes: Lanes, rows: Ints, title: str) -> None:
    right = int((lanes.x + lanes.width).max())
    left = int(lanes.x.min())
    left = 0 if 2 * left < right else left
    margin = 0.012 * (right - left)
    ax.set_xlim(left - margin, right + margin)
    ax.set_ylim(lanes.count - 0.4, -0.6)
    every = max(1, -(-lanes.count // 24))
    ax.set_yticks(np.arange(lanes.count)[::every], [f"{row:,}" for row in rows[lanes.heads[::every]]])
    ax.set_ylabel("first row", color=MUTED, fontsize=8.5)
    ax.set_xlabel(lanes.xlabel, color=MUTED, fontsize=8.5)
    ax.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    ax.grid(axis="x", color="#eef1f4", linewidth=0.8)
    ax.set_axisbelow(True)
    for lane in range(lanes.count):  # a faint track, so that the eye finds from a short ribbon to its number
        ax.axhspan(lane - HALF, lane + HALF, color=TRACK, linewidth=0, zorder=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title(title, loc="left", fontsize=11, color=INK, pad=26)


@dataclass(frozen=True)
class _Colours:
    """A colour per run, or a value per row for the colour bar."""

    per_run: npt.NDArray[Any] | None = None
    per_row: npt.NDArray[Any] | None = None
    name: str = ""


def _colours(batch: TensorDictBase, rows: Ints, key: NestedKey | None) -> _Colours:
    if key is None:
        return _Colours()
    column = require(batch, key)
    if column.numel() != batch.batch_size.numel():
        raise ValueError(
            f"color_by={key!r} must have one value per row, got shape {tuple(column.shape)} in a batch of "
            f"{tuple(batch.batch_size)}"
        )
    values = to_numpy(column)[rows]
    if as_tuple(key)[-1] == TRAJ_IDS[-1]:
        return _Colours(per_run=np.unique(values, return_inverse=True)[1])
    return _Colours(per_row=values.astype(float), name=".".join(as_tuple(key)))


def _ribbons(ax: "Axes", lanes: Lanes, runs: Runs, colours: _Colours) -> None:
    from matplotlib.collections import PolyCollection

    if colours.per_row is not None:
        of = np.repeat(np.arange(len(lanes.run)), lanes.width)
        place = np.arange(len(of)) - np.repeat(np.cumsum(lanes.width) - lanes.width, lanes.width)
        boxes = _boxes(lanes.x[of] + place, np.ones(len(of)), lanes.lane[of])
        values = colours.per_row[runs.first[lanes.run[of]] + lanes.skipped[of] + place]
        ribbons = PolyCollection(boxes, array=values, cmap="cividis", linewidths=0)
        ax.add_collection(ribbons)
        bar = ax.figure.colorbar(ribbons, ax=ax, pad=0.01, aspect=30, shrink=0.9)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=8, labelcolor=MUTED)
        bar.set_label(colours.name, color=MUTED, fontsize=8.5)
        return
    if colours.per_run is not None:
        kind = colours.per_run[runs.first][lanes.run]
        faces = [TINTS[k % len(TINTS)] for k in kind]
    else:
        faces = [RIBBONS[k % 2 if lanes.continuous else 0] for k in lanes.run]
    ax.add_collection(
        PolyCollection(_boxes(lanes.x, lanes.width, lanes.lane), facecolors=faces, linewidths=0)
    )


def _boxes(x: npt.NDArray[Any], width: npt.NDArray[Any], lane: Ints) -> list[npt.NDArray[Any]]:
    left, right, top, bottom = x, x + width, lane - HALF, lane + HALF
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    return list(np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1))


def _marks(ax: "Axes", lanes: Lanes, runs: Runs) -> None:
    from matplotlib.transforms import ScaledTranslation

    every = np.arange(len(runs))
    lane_points = ax.get_window_extent().height * 72 / ax.figure.dpi / lanes.count
    ribbon = min(2 * HALF * lane_points, 13.0)
    left = lanes.at(every, np.zeros_like(every))
    right = lanes.at(every, runs.length - 1)
    for kind, (name, style) in enumerate(MARKS):
        starts = kind in (BEGINS, RESUMES)
        chosen = (runs.begin if starts else runs.end) == kind
        if not chosen.any():
            continue
        x, lane = left if starts else right
        side = max(ribbon * SIDE[kind], 2.5)
        # Inside the run and flush with its edge, so that marks of neighbours do not cover each other.
        inward = 0.0 if kind == BEGINS else (0.5 if starts else -0.5) * (side + 2.0)
        moved = ax.transData + ScaledTranslation(inward / 72, 0, ax.figure.dpi_scale_trans)
        edge = x[chosen] + (-0.5 if starts else 0.5)
        label = f"{name} ({chosen.sum():,})"
        ax.scatter(edge, lane[chosen], s=side**2, label=label, zorder=3, transform=moved, **style)
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
