"""Draws learning curves over seeds: the interquartile mean of the runs of a program, and its 95 % interval.

``python -m flatroll.examples.curves out/ppo_continuous --out curves.png`` reads each ``ENV-seedN/log.csv`` in this
folder and draws a line for each program and env (``pip install "flatroll[plot]"``).
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flatroll.layout.checks import optional_package
from flatroll.rollouts import interquartile_mean


class Curve(NamedTuple):
    """An interquartile mean over seeds, with the ends of its interval, at some numbers of frames."""

    frames: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def find_logs(folders: Sequence[str | Path]) -> dict[str, list[Path]]:
    """The logs of all seeds of each program and env below some folders, by ``"PROGRAM ENV"``."""
    found = defaultdict(list)
    for file in sorted({file for folder in folders for file in Path(folder).rglob("log.csv")}):
        found[f"{file.parent.parent.name} {file.parent.name.rpartition('-seed')[0]}".strip()].append(file)
    return dict(found)


def over_seeds(logs: Sequence[Path], name: str = "return", points: int = 100) -> Curve:
    """Read one number from the logs of several seeds, interpolated between the lines of each log.

    The curve covers the frames that all seeds have.

    Raises:
        ValueError: there is no log, or one has no such number.
    """
    runs = []
    for log in logs:
        with log.open() as file:
            rows = [row for row in csv.DictReader(file) if row["name"] == name]
        if not rows:
            raise ValueError(f"name must be a number in every log, got {name!r}, which is not in {log}")
        runs.append(([float(row["frames"]) for row in rows], [float(row["value"]) for row in rows]))
    if not runs:
        raise ValueError("logs must be at least one log.csv, got none")
    grid = np.linspace(max(x[0] for x, _ in runs), min(x[-1] for x, _ in runs), points)
    table = torch.tensor(np.stack([np.interp(grid, *run) for run in runs]))
    found = [interquartile_mean(column) for column in table.unbind(1)]
    columns = ([getattr(point, end) for point in found] for end in ("value", "low", "high"))
    return Curve(grid.tolist(), *columns)


def draw(curves: Mapping[str, Curve], label: str = "return", axes: Any = None) -> Any:
    """Draw a line for each curve, and its interval as a band, in a new matplotlib figure or in ``axes``."""
    if axes is None:
        figure = optional_package("matplotlib.figure", "plot", "curves").Figure((7, 4), layout="constrained")
        axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot(curve.frames, curve.mean, label=name)
        axes.fill_between(curve.frames, curve.low, curve.high, alpha=0.25, linewidth=0)
    axes.set(xlabel="frames", ylabel=label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return axes.figure


def main(argv: list[str] | None = None) -> int:
    """Draw the curves, and print where each ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", help="folders of the runs")
    parser.add_argument(
        "--name", default="return", help="name of the number in the logs (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="default: %(default)s")
    args = parser.parse_args(argv)
    curves = {}
    for name, logs in find_logs(args.folders).items():
        curves[f"{name}, {len(logs)} seeds"] = curve = over_seeds(logs, args.name)
        last = curve.frames[-1], curve.mean[-1], curve.low[-1], curve.high[-1]
        print("{}, {} seeds: at {:,.0f} frames {:.6g} [{:.6g}, {:.6g}]".format(name, len(logs), *last))
    draw(curves, args.name).savefig(args.out, dpi=110)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
