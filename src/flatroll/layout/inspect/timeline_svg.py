"""The timeline of a batch as SVG with a tooltip for each run: no dependency, no script."""

from collections.abc import Iterable
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDictBase

from flatroll.layout.inspect.text import Text
from flatroll.layout.inspect.timeline import (
    BEGINS,
    IS_CUT,
    MARKS,
    RESUMES,
    TERMINATES,
    TRUNCATES,
    Ints,
    Placement,
    RunTable,
    colour_values,
    plan_drawing,
    to_numpy,
)
from flatroll.layout.keys import TRAJ_IDS, NestedKey, flat_column

# of the picture and its margins, in pixels
WIDTH = 900
LEFT = 58
RIGHT = 12
TOP = 46
BOTTOM = 34
# Colours of medium lightness, visible on light and dark pages; text has the page's own colour.
PLAIN = ("#8fa9c2", "#b4c5d5")
MUTED = "#8a949e"
TINTS = ("#6fa8d6", "#dfa94e", "#6db48e", "#cf87ad", "#9d97d3", "#dd8f68", "#a8b45f", "#8d9da9")
SCALE = (
    "#31557f",
    "#56708c",
    "#76889a",
    "#959f9f",
    "#b3b295",
    "#ccc27e",
    "#e0d05f",
    "#f2df3b",
)  # low to high
MARK_STYLES = (
    'fill="none" stroke="currentColor"',
    'fill="#fff" stroke="#333"',
    'fill="#e0631a"',
    'fill="#2489d0"',
    'fill="#fff" stroke="#333"',
)
MARK_PATHS = {  # from the edge of the run inwards: beginnings extend to the right, ends to the left
    BEGINS: "v{h}",
    RESUMES: "m1-4l6 4l-6 4z",
    TERMINATES: "m-8-3.5h7v7h-7z",
    TRUNCATES: "m-9 0l4.5-4.5l4.5 4.5l-4.5 4.5z",
    IS_CUT: "m-8 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0",
}


def timeline_svg(
    batch: TensorDictBase,
    *,
    max_runs: int = 400,
    title: str | None = None,
    color_by: NestedKey | None = None,
) -> str:
    """Return the picture of `timeline` as SVG text, which notebooks display.

    A tooltip on each run shows its rows, trajectory, steps and end. It needs no package and contains no script. The
    text can be written to a ``.svg`` file.

    Args:
        batch: ``[N]`` or ``[*B, T]`` with one boundary marker at least; padding by its mask is left out.
        max_runs: draw at most this many runs, and say so. Default 400.
        title: default: the number of rows and runs.
        color_by: a numeric column with one value per row, in eight shades from its lowest to its highest value; or the
            key of the trajectory ids, for one tint per trajectory.

    Raises:
        KeyError: no boundary marker, or no column ``color_by``.
        ValueError: the batch is empty, ``max_runs`` is below 1, or ``color_by`` has more than one value per
            row.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> done = torch.tensor([[False], [True], [False]])
    >>> svg = timeline_svg(TensorDict({"next": {"done": done, "terminated": done}}, [3]))
    >>> svg[:4], svg.count("<title>"), "rows 0..1 (2): episode begins, terminated" in svg
    ('<svg', 2, True)
    """
    runs, placed, rows, title = plan_drawing(batch, max_runs, title)
    name, values = colour_values(batch, rows, color_by)

    pitch = min(22.0, max(12.0, 560 / placed.count))  # height of a lane
    height = TOP + placed.count * pitch + BOTTOM
    picture = _Picture(runs, placed, rows, pitch)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'style="width:100%;max-width:{WIDTH}px" font-family="sans-serif" font-size="11" fill="currentColor">',
        f'<text x="{LEFT}" y="16" font-size="14">{escape(title)}</text>',
        *picture.legend(),
        *picture.axes(height),
        *picture.ribbons(name, values),
        *picture.marks(),
        *picture.tooltips(_trajectories(batch, rows, runs)),
        "</svg>",
    ]

    svg = "\n".join(parts)
    return Svg(svg, html=svg)


class Svg(Text):
    """SVG text that a notebook shows as a picture, and a terminal as one line."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"<a timeline, {len(self):,} characters of SVG>")


def _trajectories(batch: TensorDictBase, rows: Ints, runs: RunTable) -> Ints | None:
    """The trajectory id of each run; None if the batch has none."""
    column = batch.get(TRAJ_IDS, None)
    if column is None:
        return None
    return to_numpy(flat_column(column, batch, TRAJ_IDS))[rows][runs.first]


class _Picture:
    """Draws the placed runs; each method returns lines of SVG."""

    def __init__(self, runs: RunTable, placed: Placement, rows: Ints, pitch: float) -> None:
        self.runs = runs
        self.placed = placed
        self.rows = rows
        self.pitch = pitch
        self.thick = 0.68 * pitch

        right = int((placed.x + placed.width).max())
        left = int(placed.x.min())
        # the step or row at the left edge
        self.first = 0 if 2 * left < right else left
        self.last = right

        self.scale = (WIDTH - LEFT - RIGHT) / (right - self.first)

    def x(self, at: npt.NDArray[Any] | float) -> Any:
        """Return the x position of a step or row, in pixels, rounded to a tenth."""
        return np.round(LEFT + (at - self.first) * self.scale, 1)

    def y(self, lane: npt.NDArray[Any] | float) -> Any:
        """Return the y position of the middle of a lane, in pixels, rounded to a tenth."""
        return np.round(TOP + (lane + 0.5) * self.pitch, 1)

    def legend(self) -> list[str]:
        """Return the legend: each mark that occurs, its name and its count."""
        lines = []
        x = float(LEFT)
        for kind, (name, _) in enumerate(MARKS):
            count = int((self.runs.begin == kind).sum() + (self.runs.end == kind).sum())
            if count:
                label = f"{name} ({count:,})"
                shift = 3 if kind in (BEGINS, RESUMES) else 10
                y = 27 if kind == BEGINS else 32
                lines.append(self._mark_path(kind, f"M{x + shift:g} {y}", 10))
                lines.append(f'<text x="{x + 15:g}" y="36">{label}</text>')
                x += 32 + 6.2 * len(label)
        return lines

    def axes(self, height: float) -> list[str]:
        """Row numbers at the left, steps below, and a faint track in each lane."""
        placed = self.placed
        every = max(1, -(-placed.count // 24))  # at most 24 lanes get a number
        tracks = "".join(f"M{LEFT} {self.y(lane):g}H{WIDTH - RIGHT}" for lane in range(placed.count))
        numbers = "".join(
            f'<text x="{LEFT - 6}" y="{self.y(lane) + 4:g}">{self.rows[placed.heads[lane]]:,}</text>'
            for lane in range(0, placed.count, every)
        )

        span = self.last - self.first
        power = 10.0 ** np.floor(np.log10(max(span / 6, 1)))
        tick = max(1, int(next(k * power for k in (1, 2, 5, 10) if k * power >= span / 6)))
        ticks = range(-(-self.first // tick) * tick, self.last + 1, tick)

        steps = "".join(f'<text x="{self.x(at):g}" y="{height - 20:g}">{at:,}</text>' for at in ticks)
        return [
            f'<path d="{tracks}" stroke="{MUTED}" stroke-opacity=".13" stroke-width="{self.thick:g}"/>',
            f'<g fill="{MUTED}" text-anchor="end">{numbers}<text x="{LEFT - 6}" y="{TOP - 4}">first row</text></g>',
            f'<g fill="{MUTED}" text-anchor="middle">{steps}'
            f'<text x="{(WIDTH + LEFT - RIGHT) / 2:g}" y="{height - 5:g}">{placed.xlabel}</text></g>',
        ]

    def ribbons(self, name: str, values: npt.NDArray[Any] | None) -> list[str]:
        """One path per colour, a stroke as thick as the ribbon."""
        placed = self.placed
        runs = self.runs
        x = placed.x
        width = placed.width
        lane = placed.lane
        colours: tuple[str, ...] = TINTS
        note: list[str] = []

        if name and values is not None:
            # adjacent rows of one piece and one shade form one stroke
            piece, place, row = placed.rows(runs)
            shade, note = self._shades(name, values)
            shades = shade[row]
            new_piece = np.diff(piece, prepend=-1).astype(bool)
            new_shade = np.diff(shades, prepend=-1).astype(bool)
            heads = np.flatnonzero(new_piece | new_shade)

            colours = SCALE
            colour = shades[heads]
            x = (placed.x[piece] + place)[heads]
            lane = placed.lane[piece[heads]]
            width = np.diff(heads, append=len(piece))
        elif values is not None:
            colour = values[runs.first][placed.run] % len(TINTS)
        else:
            colours = PLAIN
            colour = placed.run % 2
            if not placed.continuous:
                colour = np.zeros_like(colour)

        lines = []
        for number in np.unique(colour):
            chosen = colour == number
            strokes = zip(
                self.x(x[chosen]).tolist(),
                self.y(lane[chosen]).tolist(),
                self.x((x + width)[chosen]).tolist(),
                strict=True,
            )
            path = "".join(f"M{start:g} {y:g}H{stop:g}" for start, y, stop in strokes)
            lines.append(f'<path d="{path}" stroke="{colours[number]}" stroke-width="{self.thick:g}"/>')
        return lines + note

    def _shades(self, name: str, values: npt.NDArray[Any]) -> tuple[Ints, list[str]]:
        """The shade of each real row, and the scale at the upper right; NaN has the lowest shade."""
        finite = values[np.isfinite(values)]
        low = 0.0
        high = 0.0
        if len(finite):
            low = float(finite.min())
            high = float(finite.max())
        parts = np.nan_to_num((values - low) / ((high - low) or 1.0), nan=0.0, posinf=1.0, neginf=0.0)
        shade = np.minimum((parts * len(SCALE)).astype(np.int64), len(SCALE) - 1)

        highest = f"{high:.4g}"
        x = WIDTH - RIGHT - 14 * len(SCALE) - 6.5 * len(highest) - 6
        boxes = "".join(
            f'<rect x="{x + 14 * k:g}" y="8" width="14" height="10" fill="{c}"/>' for k, c in enumerate(SCALE)
        )

        label = f'<text x="{x - 6:g}" y="17" text-anchor="end">{escape(name)} {low:.4g}</text>'
        return shade, [
            boxes,
            label,
            f'<text x="{WIDTH - RIGHT}" y="17" text-anchor="end">{highest}</text>',
        ]

    def marks(self) -> list[str]:
        """One path per kind of mark."""
        runs = self.runs
        every = np.arange(len(self.runs.first))
        left = self.placed.at(every, np.zeros_like(every))
        right = self.placed.at(every, runs.length - 1)

        lines = []
        for kind in range(len(MARKS)):
            starts = kind in (BEGINS, RESUMES)
            chosen = runs.with_mark(kind)
            if not chosen.any():
                continue

            at, lane = left if starts else right
            side = -0.5 if starts else 0.5
            x = self.x(at[chosen] + side)
            y = self.y(lane[chosen])
            if kind == BEGINS:
                y -= self.thick / 2  # the line of a beginning goes down from the upper edge of the ribbon
            points = [f"M{a:g} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True)]
            lines.append(self._mark_path(kind, points, self.thick))
        return lines

    def _mark_path(self, kind: int, points: str | Iterable[str], height: float) -> str:
        mark = MARK_PATHS[kind].replace("{h}", f"{height:g}")
        if isinstance(points, str):
            points = [points]
        path = "".join(point + mark for point in points)
        return f'<path d="{path}" {MARK_STYLES[kind]}/>'

    def tooltips(self, trajectories: Ints | None) -> list[str]:
        """Draw an invisible stroke with a tooltip over each run (all its pieces)."""
        runs = self.runs
        placed = self.placed
        first_piece = np.searchsorted(placed.run, np.arange(len(runs.first) + 1)).tolist()
        x = self.x(placed.x).tolist()
        y = self.y(placed.lane).tolist()
        end = self.x(placed.x + placed.width).tolist()

        lines = [f'<g stroke="#000" stroke-opacity="0" stroke-width="{self.thick:g}">']
        for run in range(len(runs.first)):
            pieces = range(first_piece[run], first_piece[run + 1])
            path = "".join(f"M{x[k]:g} {y[k]:g}H{end[k]:g}" for k in pieces)
            lines.append(f'<path d="{path}"><title>{self._tooltip(run, trajectories)}</title></path>')
        return [*lines, "</g>"]

    def _tooltip(self, run: int, trajectories: Ints | None) -> str:
        """Return the tooltip text of a run."""
        runs = self.runs
        first = int(runs.first[run])
        length = int(runs.length[run])
        text = f"rows {self.rows[first]}..{self.rows[first + length - 1]} ({length})"
        if trajectories is not None:
            text += f", trajectory {trajectories[run]}"
        if len(runs.step):
            text += f", steps {runs.step[run]}..{runs.step[run] + length - 1}"
        return f"{text}: {MARKS[runs.begin[run]][0]}, {MARKS[runs.end[run]][0]}"
