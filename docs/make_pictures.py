"""Draws the pictures of these pages: ``python docs/make_pictures.py`` (trains the demo twice, a few minutes)."""

import argparse
import csv
from pathlib import Path

import gymnasium as gym
from matplotlib.figure import Figure

from flatroll.examples import recurrent_ppo
from flatroll.layout import timeline
from flatroll.rollouts import rollout

IMAGES = Path(__file__).parent / "img"


def read_curve(folder: Path) -> tuple[list[float], list[float]]:
    """Million frames and mean returns of a demo run."""
    with (folder / "learning_curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [int(row["frames"]) / 1e6 for row in rows], [float(row["mean_return"]) for row in rows]


def draw_curves(runs: dict[str, Path]) -> Figure:
    """The learning curves of several runs."""
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.add_subplot()
    for (name, folder), colour in zip(runs.items(), ("#0072B2", "#D55E00"), strict=True):
        frames, returns = read_curve(folder)
        axes.plot(frames, returns, label=name, color=colour)
    axes.axhline(500, color="0.7", linewidth=1, linestyle=":")
    axes.set(xlabel="million frames", ylabel="mean return of 100 episodes", ylim=(0, 520))
    axes.set_title("CartPole with its velocities hidden", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right")
    return figure


def draw_timeline() -> Figure:
    """Four envs of 100 steps under random actions."""
    batch = rollout(gym.make_vec("CartPole-v1", num_envs=4), num_steps=100, seed=3)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    timeline(batch, ax=figure.add_subplot(), title="CartPole, 4 envs of 100 steps: 400 rows")
    return figure


def main() -> None:
    """Train, and save the pictures under docs/img."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the runs")
    out: Path = parser.parse_args().out
    runs = {"GRU": out / "memory", "the same sizes without memory": out / "memoryless"}
    recurrent_ppo.main(["--out", str(runs["GRU"]), "--quiet"])
    recurrent_ppo.main(["--memoryless", "--out", str(list(runs.values())[1]), "--quiet"])
    IMAGES.mkdir(exist_ok=True)
    draw_curves(runs).savefig(IMAGES / "learning_curve.png", dpi=110)
    draw_timeline().savefig(IMAGES / "timeline.png", dpi=110)


if __name__ == "__main__":
    main()
