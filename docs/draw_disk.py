"""Draws the pictures of the page on disk: ``python docs/draw_disk.py``."""

import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flatroll.__main__ import main as command
from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.rollouts import Collector

IMAGES = Path(__file__).parent / "img"
BLUE, AMBER, GREEN, GREY = "#A9D0EA", "#FCE3B6", "#CDEBDD", "#E8E8E8"


def draw_folder() -> Figure:
    """A folder with two versions, what they name, and the steps of a save."""
    figure = Figure(figsize=(11.4, 6.2), layout="constrained")
    axes = figure.add_subplot()

    def box(x: float, y: float, width: float, colour: str, title: str, text: str = "", **style: Any) -> None:
        look: dict[str, Any] = {"facecolor": colour, "edgecolor": "0.4"} | style
        axes.add_patch(Rectangle((x, y), width, 0.9, **look))
        axes.text(x + width / 2, y + 0.62, title, weight="bold", size=9.5, ha="center", va="center")
        axes.text(x + width / 2, y + 0.25, text, size=8.5, ha="center", va="center")

    def arrow(start: tuple[float, float], end: tuple[float, float], colour: str = "0.3") -> None:
        look = {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.3}
        axes.annotate("", end, start, arrowprops=look)

    axes.text(0, 6.6, "The folder: rows are a log, a version names files", weight="bold", size=11.5)
    for x, number in ((0.4, 1), (6.0, 2)):
        box(x, 5.35, 2.6, GREEN, f"manifest {number}", f"version {number}: names, checksums")
        box(x + 3.0, 5.35, 1.8, AMBER, f"state {number}", "tables, weights")
        arrow((x + 2.6, 5.8), (x + 3.0, 5.8))
    box(0.4, 3.4, 4.2, BLUE, "rows 0 to 499", "a file, never changed")
    box(4.7, 3.4, 2.6, BLUE, "rows 500 to 799", "a file, never changed")
    box(7.4, 3.4, 1.7, BLUE, "800 to 899", "a file")
    box(9.2, 3.4, 1.6, "white", "in memory", "not saved yet", linestyle="--")
    for start, end in (((1.4, 5.35), (2.4, 4.3)), ((1.9, 5.35), (5.4, 4.3))):
        arrow(start, end, "#4C9A78")
    for start, end in (((6.6, 5.35), (3.4, 4.3)), ((7.2, 5.35), (6.4, 4.3)), ((7.8, 5.35), (8.2, 4.3))):
        arrow(start, end, "#2F6FA3")
    axes.text(10.8, 6.6, "lock: one process writes", size=9, ha="right", color="0.35")

    axes.text(0, 2.55, "A save: whatever stops it, the version before it stands", weight="bold", size=11.5)
    steps = [
        ("new rows", "other name, sync, rename", BLUE),
        ("state", "other name, sync, rename", AMBER),
        ("manifest", "other name, sync, rename", GREEN),
        ("tidy", "old versions go", GREY),
    ]
    for number, (title, text, colour) in enumerate(steps):
        x = 0.4 + 2.7 * number
        box(x, 1.3, 2.3, colour, title, text)
        if number < 3:
            arrow((x + 2.3, 1.75), (x + 2.7, 1.75))
    axes.plot([8.3, 8.3], [0.75, 2.35], color="#d55e00", linewidth=1.8, linestyle="--")
    axes.text(8.15, 0.8, "stopped before this line: the old version", size=9, ha="right", color="#b34700")
    axes.text(8.45, 0.8, "after it: the new one", size=9, color="#b34700")
    axes.set(xlim=(-0.1, 11.2), ylim=(0.5, 6.95))
    axes.axis("off")
    return figure


def save_inspected(file: Path) -> None:
    """Save a buffer of CartPole three times, and the picture that ``flatroll inspect`` draws of it."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(20_000, compact_obs=True), batch_size=32)
    env = gym.make_vec("CartPole-v1", num_envs=8)
    with tempfile.TemporaryDirectory() as home:
        for rows in Collector(env, frames_per_batch=4000, total_frames=12_000, seed=0):
            buffer.extend(rows)
            buffer.dumps(f"{home}/cartpole")
        command(["inspect", f"{home}/cartpole", "--picture", str(file)])


if __name__ == "__main__":
    draw_folder().savefig(IMAGES / "disk.png", dpi=100, bbox_inches="tight")
    save_inspected(IMAGES / "inspect.png")
