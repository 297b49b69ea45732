"""Draws the pictures of these pages: ``python docs/make_pictures.py`` (trains the demo twice, a few minutes).

``python docs/make_pictures.py first`` draws only the learning curves of the README's first training and the tree of a
search, with ``tree`` only the latter, with ``text`` those of text rollouts.
"""

import argparse
import csv
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flatroll.examples import recurrent_ppo
from flatroll.examples.text import emit_a_token
from flatroll.examples.tree_search import tree_of_first_move
from flatroll.layout import timeline
from flatroll.rollouts import rollout

IMAGES = Path(__file__).parent / "img"
README = Path(__file__).parents[1] / "README.md"


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


def first_training(seed: int) -> list[float]:
    """Returns of all episodes, in order, of the README's first training."""
    script = re.search(r"```python\n([^`]*ClipPPOLoss[^`]*)```", README.read_text())
    assert script is not None
    space: dict[str, list[float]] = {}
    exec(script[1].replace("seed(0)", f"seed({seed})").replace("seed=0", f"seed={seed}"), space)
    return space["returns"]


def draw_first_training(seeds: range) -> Figure:
    """Its learning curves, with one line per seed."""
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for seed in seeds:
        returns = np.array(first_training(seed))
        # An episode of CartPole gives a reward of 1 per frame, so its return is its number of frames.
        frames = returns.cumsum()[99:] / 1000
        axes.plot(frames, np.convolve(returns, np.full(100, 0.01), "valid"), color="#0072B2", alpha=0.6)
    axes.axhline(475, color="0.6", linewidth=1, linestyle=":")
    axes.set(xlabel="thousand frames", ylabel="mean return of 100 episodes", ylim=(0, 520))
    axes.set_title(f"The script above, {len(seeds)} seeds, each until 475", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_timeline() -> Figure:
    """Four envs of 100 steps under random actions."""
    batch = rollout(gym.make_vec("CartPole-v1", num_envs=4), num_steps=100, seed=3)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    timeline(batch, ax=figure.add_subplot(), title="CartPole, 4 envs of 100 steps: 400 rows")
    return figure


def draw_text_rollout(texts: int = 3) -> Figure:
    """The flat rows of some short texts with their marks, and the same as a padded batch."""
    result = emit_a_token.train(updates=1, texts=6, tokens=7, seed=27)
    batch, words = result["batch"], [word.replace("Ġ", " ") for word in result["words"]]
    text, step = (batch[key].flatten() for key in (("collector", "traj_ids"), "step_count"))
    rows = int((text < text[0] + texts).sum())
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.add_subplot()
    colours = ("#9ecae1", "#fdd0a2", "#c7e9c0")
    for row in range(rows):
        number = int(text[row] - text[0])
        ends = [key for key in ("terminated", "truncated") if batch["next", key][row]]
        for x, y in ((row, 4.5), (int(step[row]), 2 - number)):
            axes.add_patch(Rectangle((x, y), 1, 0.8, facecolor=colours[number], edgecolor="white"))
            axes.text(x + 0.5, y + 0.4, words[row], ha="center", va="center", fontsize=8)
        if not step[row]:
            axes.plot([row, row], [4.4, 5.5], color="black", linewidth=2)
        for key in ends:
            axes.text(row + 1, 5.4, f"{key} ", ha="right", va="bottom", fontsize=8)
    for number in range(texts):
        length = int((text == text[0] + number).sum())
        for x in range(length, 7):
            axes.add_patch(
                Rectangle((x, 2 - number), 1, 0.8, facecolor="0.93", edgecolor="white", hatch="///")
            )
    axes.text(
        0, 6.1, "flat: [N] rows, one for each generated token; prompts stand once, beside it", fontsize=10
    )
    axes.text(0, 3.1, "padded: [B, T], with the whole text repeated at each token", fontsize=10)
    axes.set(xlim=(-0.2, rows + 0.2), ylim=(-0.2, 6.6))
    axes.axis("off")
    return figure


def main() -> None:
    """Train, and save the pictures under docs/img."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the runs")
    parser.add_argument(
        "which", nargs="?", choices=["first", "tree", "text", "all"], default="all", help="default: all"
    )
    args = parser.parse_args()
    out: Path = args.out
    IMAGES.mkdir(exist_ok=True)
    if args.which in ("text", "all"):
        emit_a_token.save_curve(emit_a_token.train(), IMAGES / "text_curve.png")
        draw_text_rollout().savefig(IMAGES / "text.png", dpi=90)
    if args.which == "text":
        return
    axes = tree_of_first_move(maze=0, simulations=60).plot()
    axes.figure.savefig(IMAGES / "tree.png", dpi=90)
    if args.which == "tree":
        return
    draw_first_training(range(5)).savefig(IMAGES / "first_training.png", dpi=110)
    if args.which == "first":
        return
    runs = {"GRU": out / "memory", "the same sizes without memory": out / "memoryless"}
    recurrent_ppo.main(["--out", str(runs["GRU"]), "--quiet"])
    recurrent_ppo.main(["--memoryless", "--out", str(list(runs.values())[1]), "--quiet"])
    draw_curves(runs).savefig(IMAGES / "learning_curve.png", dpi=110)
    draw_timeline().savefig(IMAGES / "timeline.png", dpi=110)


if __name__ == "__main__":
    main()
