"""Draws the pictures of these pages: ``python docs/make_pictures.py`` (trains the demo twice, a few minutes).

``python docs/make_pictures.py first`` draws only the learning curves of the README's script and the tree of a
search, with ``tree`` only the latter, with ``text`` those of text rollouts and of language models (a few minutes), with
``workers`` who owns what, with ``offline`` the curve of offline learning, over three seeds, with ``recall`` those of a
transformer and a GRU that have to remember for 100 steps, with ``exploration`` those of PPO with and without RND.
"""

import argparse
import contextlib
import csv
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flatroll.examples import grpo, memory_ppo, offline_iql, report, rnd_ppo, tool_use
from flatroll.examples.curves import draw, find_logs, over_seeds
from flatroll.examples.text import emit_a_token
from flatroll.examples.tree_search import tree_of_first_move
from flatroll.layout import timeline
from flatroll.rollouts import rollout

#: The memories of `draw_recall`.
RECALLING = {"transformer": "transformer", "gru": "GRU of the same width"}
#: The runs of `draw_exploration`: name, weight of the intrinsic advantages, colour.
EXPLORING = {"rnd": ("PPO with RND", 1.0, "#0072B2"), "plain": ("PPO alone", 0.0, "#D55E00")}
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
    """Returns of all episodes, in order, of the README's script."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    training = next(number for number, block in enumerate(blocks) if "ClipPPOLoss" in block)
    script = "".join(blocks[: training + 1])
    for fixed in ("torch.manual_seed({})", "total_frames=204_800, seed={}"):
        assert fixed.format(0) in script
        script = script.replace(fixed.format(0), fixed.format(seed))
    space: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # the script saves a picture
        exec(script, space)
    returns: list[float] = space["returns"]
    return returns


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
    axes.set_title(f"The script above, {len(seeds)} seeds", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_offline(out: Path, seeds: range = range(1, 4)) -> Figure:
    """The curve of offline_iql, beside the returns of its data; runs that are there already are taken."""
    folders = [out / "offline_iql" / f"Pendulum-v1-seed{seed}" for seed in seeds]
    for seed, folder in zip(seeds, folders, strict=True):
        offline_iql.main(["--seed", str(seed), "--folder", str(folder)])
    (logs,) = find_logs(folders).values()
    figure: Figure = draw(
        {f"IQL, {len(logs)} seeds": over_seeds(logs, "evaluation")}, "mean return of 20 episodes"
    )
    (axes,) = figure.axes
    data = float(np.mean([json.loads((folder / "result.json").read_text())["return"] for folder in folders]))
    axes.axhline(data, color="0.6", linewidth=1, linestyle=":", label="episodes of the data set")
    axes.set(xlabel="updates")
    axes.set_title("Pendulum, learnt from a data set", loc="left")
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_program(program: Any, out: Path, title: str, label: str, seeds: range = range(1, 4)) -> Figure:
    """The returns of a program that trains a language model; runs that are there already are taken."""
    name = program.__name__.rpartition(".")[2]
    folders = [out / name / f"{program.OPTIONS['env'][0]}-seed{seed}" for seed in seeds]
    for seed, folder in zip(seeds, folders, strict=True):
        program.main(["--seed", str(seed), "--folder", str(folder)])
    (logs,) = find_logs(folders).values()
    figure: Figure = draw({f"{len(logs)} seeds": over_seeds(logs)}, label)
    (axes,) = figure.axes
    axes.set(xlabel="tokens that the model wrote")
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_recall(out: Path, seeds: range = range(1, 4)) -> Figure:
    """The curves of memory_ppo on Recall, with a transformer and with a GRU; runs that are there already are taken."""
    sizes = {"layers": 1, "context": 128, "minibatches": 4, "frames": 300_000, "log-every": 1}
    options = ["--env", "Recall", *(f"--{name}={value}" for name, value in sizes.items())]
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for (memory, name), colour in zip(RECALLING.items(), ("#6A3D9A", "#000000"), strict=True):
        folders = [out / "recall" / memory / f"Recall-seed{seed}" for seed in seeds]
        for seed, folder in zip(seeds, folders, strict=True):
            if not (folder / "result.json").exists():
                words = ["--memory", memory, "--seed", str(seed), "--folder", str(folder)]
                memory_ppo.main([*options, *words])
        for folder in folders:
            curve = over_seeds([folder / "log.csv"])
            frames = [count / 1000 for count in curve.frames]
            axes.plot(
                frames, curve.mean, color=colour, linewidth=2, label=name if folder == folders[0] else ""
            )
    axes.axhline(-0.5, color="0.6", linewidth=1, linestyle=":")
    axes.set(ylim=(-1.05, 1.05))
    axes.set_xlabel("thousand frames", fontsize=13)
    axes.set_ylabel("mean return", fontsize=13)
    axes.set_title("Name at step 100 what was shown at step 0", loc="left", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=12, loc="center right", bbox_to_anchor=(1, 0.5))
    return figure


def draw_exploration(out: Path, seeds: range = range(1, 4)) -> Figure:
    """The curves of rnd_ppo, with RND and without; runs that are there already are taken."""
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for kind, (name, weight, colour) in EXPLORING.items():
        folders = [out / "exploration" / kind / f"FourRooms-seed{seed}" for seed in seeds]
        for seed, folder in zip(seeds, folders, strict=True):
            if not (folder / "result.json").exists():
                words = ["--intrinsic", str(weight), "--seed", str(seed), "--folder", str(folder)]
                rnd_ppo.main(words)
        for folder in folders:
            curve = over_seeds([folder / "log.csv"])
            frames = [count / 1000 for count in curve.frames]
            axes.plot(
                frames, curve.mean, color=colour, linewidth=2, label=name if folder == folders[0] else ""
            )
    axes.set(ylim=(-0.03, 1.05))
    axes.set_xlabel("thousand frames", fontsize=13)
    axes.set_ylabel("share of episodes at the goal", fontsize=13)
    axes.set_title("Four rooms, with a reward at the end of the last", loc="left", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=12, loc="center left")
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


def draw_workers() -> Figure:
    """Who owns what: processes as boxes, with the memory that they share between them."""
    figure = Figure(figsize=(12.6, 7.4), layout="constrained")
    axes = figure.add_subplot()

    def box(x: float, y: float, size: tuple[float, float], colour: str, title: str, text: str = "") -> None:
        axes.add_patch(Rectangle((x, y), *size, facecolor=colour, edgecolor="0.4"))
        axes.text(x + 0.12, y + size[1] - 0.12, title, weight="bold", size=10.5, va="top")
        axes.text(x + 0.12, y + size[1] - 0.48, text, size=8.5, va="top", linespacing=1.5)

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str = "", **style: Any) -> None:
        look = {"arrowstyle": "-|>", "color": "0.25", "shrinkA": 0, "shrinkB": 0, "linewidth": 1.3} | style
        axes.annotate("", end, start, arrowprops=look)
        axes.text(
            (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.08, text, size=8, ha="center", color="0.25"
        )

    def cells(x: float, y: float, names: dict[str, str]) -> None:
        for i, (name, colour) in enumerate(names.items()):
            axes.add_patch(Rectangle((x + 1.55 * i, y), 1.45, 0.62, facecolor=colour, edgecolor="0.4"))
            axes.text(x + 1.55 * i + 0.72, y + 0.31, name, size=8, ha="center", va="center")

    blue, amber, green, grey = "#A9D0EA", "#FCE3B6", "#CDEBDD", "#E8E8E8"
    axes.add_patch(Rectangle((-0.2, 1.55), 14.4, 6.85, facecolor="none", edgecolor="0.6", linestyle="--"))
    axes.text(14.1, 8.28, "one machine", size=9, ha="right", va="top", color="0.4")
    box(0, 1.8, (3.6, 6.3), "white", "owner", "the program that you start")
    box(0.2, 6.25, (3.2, 1.05), green, "learner", "policy, optimizer")
    box(
        0.2,
        4.2,
        (3.2, 1.75),
        blue,
        "MultiCollector",
        "waits on all sockets at once;\nreplaces workers that fail",
    )
    box(
        0.2,
        2.05,
        (3.2, 1.85),
        amber,
        "ReplayBuffer",
        "rows, index, priorities:\nonly this process writes them",
    )
    axes.add_patch(Rectangle((4.8, 1.8), 3.6, 6.3, facecolor="0.96", edgecolor="none"))
    axes.text(6.6, 7.8, "anonymous shared memory", weight="bold", size=10.5, ha="center", va="center")
    cells(5.1, 6.75, {"weights, v": "#9FDCC0", "v - 1": grey})
    arrow((3.4, 7.0), (5.1, 7.0), "publish")
    for i, y in enumerate((5.55, 4.15)):
        box(
            9.9,
            y - 0.28,
            (4.0, 1.18),
            "#CFE4F3",
            f"worker {i}: a Collector",
            "its envs, a copy of the policy",
        )
        cells(
            5.1,
            y,
            {"being read": "#F9C9B6", "being written": "#FCE3B6"}
            if i
            else {"free slot": "white", "being written": "#FCE3B6"},
        )
        arrow((9.9, y + 0.42), (8.1, y + 0.42), "rows, copied once")
        axes.plot([3.4, 9.9], [y - 0.17, y - 0.17], color="0.5", linewidth=1.2, linestyle=":")
    axes.text(
        6.65,
        5.17,
        "unnamed sockets: short messages, errors, ends",
        size=8,
        ha="center",
        color="0.35",
    )
    arrow(
        (8.1, 7.0), (11.9, 6.45), "all fetch, before a step", connectionstyle="angle,angleA=0,angleB=90,rad=0"
    )
    arrow((5.1, 4.32), (3.4, 3.5), "", connectionstyle="arc3")
    axes.text(4.25, 4.02, "extend", size=8, ha="center", color="0.25", rotation=25)
    cells(5.1, 2.2, {"being read": "#F9C9B6", "free slot": "white"})
    box(9.9, 1.85, (1.9, 1.4), amber, "any process", "buffer.handle():\nextend, sample")
    arrow((9.9, 2.51), (8.1, 2.51), "rows, answers", arrowstyle="<|-|>")
    arrow((5.1, 2.51), (3.4, 2.51), "", arrowstyle="<|-|>")
    box(12.0, 1.85, (1.9, 1.4), grey, "Nursery", "prepared process:\nforks, watches, ends")
    arrow((12.95, 3.25), (12.95, 3.87), "", linestyle="-", color="0.5")
    box(9.9, 0.0, (4.0, 1.2), "#F9C9B6", "Ray actor", "a Collector, or a whole MultiCollector")
    box(5.1, 0.0, (3.0, 1.2), grey, "Ray's object store", "a bounded number of windows")
    arrow((9.9, 0.6), (8.1, 0.6), "windows")
    arrow((5.1, 0.6), (1.8, 1.8), "", connectionstyle="angle,angleA=180,angleB=90,rad=0")
    axes.text(3.45, 0.68, "RayCollector copies them out", size=8, ha="center", color="0.25")
    axes.text(14.1, 1.43, "any machine", size=9, ha="right", va="top", color="0.4")
    axes.set(xlim=(-0.3, 14.3), ylim=(-0.1, 8.5))
    axes.set_aspect("equal")
    axes.axis("off")
    return figure


def main() -> None:
    """Train, and save the pictures under docs/img."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the runs")
    parser.add_argument(
        "which",
        nargs="?",
        choices=["first", "tree", "text", "workers", "offline", "recall", "exploration", "all"],
        default="all",
        help="default: all",
    )
    args = parser.parse_args()
    out: Path = args.out
    IMAGES.mkdir(exist_ok=True)
    if args.which in ("workers", "all"):
        draw_workers().savefig(IMAGES / "workers.png", dpi=100, bbox_inches="tight")
    if args.which == "workers":
        return
    if args.which in ("offline", "all"):
        draw_offline(out).savefig(IMAGES / "offline_iql.png", dpi=100)
    if args.which == "offline":
        return
    if args.which in ("recall", "all"):
        draw_recall(out).savefig(IMAGES / "recall.png", dpi=110)
    if args.which == "recall":
        return
    if args.which in ("exploration", "all"):
        draw_exploration(out).savefig(IMAGES / "exploration.png", dpi=110)
    if args.which == "exploration":
        return
    if args.which in ("text", "all"):
        emit_a_token.save_curve(emit_a_token.train(), IMAGES / "text_curve.png")
        draw_text_rollout().savefig(IMAGES / "text.png", dpi=90)
        titles: Any = {"title": "Digits in reverse order, by groups of eight answers", "label": "mean score"}
        draw_program(grpo, out, **titles).savefig(IMAGES / "grpo_curve.png", dpi=100)
        titles = {"title": "Questions to a tool, over one to four turns", "label": "mean return"}
        draw_program(tool_use, out, **titles).savefig(IMAGES / "tool_use_curve.png", dpi=100)
    if args.which == "text":
        return
    figure: Any = tree_of_first_move(maze=0, simulations=60).plot().figure
    figure.savefig(IMAGES / "tree.png", dpi=90)
    if args.which == "tree":
        return
    draw_first_training(range(5)).savefig(IMAGES / "first_training.png", dpi=110)
    if args.which == "first":
        return
    runs = {"GRU": out / "memory", "the same sizes without memory": out / "memoryless"}
    report.demo(["--out", str(runs["GRU"]), "--quiet"])
    report.demo(["--memoryless", "--out", str(list(runs.values())[1]), "--quiet"])
    draw_curves(runs).savefig(IMAGES / "learning_curve.png", dpi=110)
    draw_timeline().savefig(IMAGES / "timeline.png", dpi=110)


if __name__ == "__main__":
    main()
