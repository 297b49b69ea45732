"""The demo's options and its report: result, time per part, bytes per transition, two pictures."""

import argparse
from pathlib import Path
from typing import Any

#: Rows of a batch in the timeline.
_ROWS = 512


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the demo's command line."""
    parser = argparse.ArgumentParser(
        prog="flatroll demo",
        description="Recurrent PPO on CartPole with hidden velocities: with the GRU the mean return passes 450 of 500, "
        "without it (--memoryless) it stays near 50.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--env", default="CartPole-v1", help="an id, or envpool:ID")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures")
    parser.add_argument("--frames", type=int, default=1_000_000, help="stop after so many frames")
    parser.add_argument("--target", type=float, default=450, help="stop at this mean return of 100 episodes")
    parser.add_argument("--memoryless", action="store_true", help="the same sizes without the GRU")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--num-envs", type=int, default=64, help="environments")
    parser.add_argument("--steps", type=int, default=128, help="rows of a batch for each environment")
    parser.add_argument("--epochs", type=int, default=4, help="times each row is learnt from, on average")
    parser.add_argument("--hidden", type=int, default=64, help="width of the networks")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate at the beginning")
    parser.add_argument("--seed", type=int, default=0, help="of weights, actions and environments")
    return parser.parse_args(argv)


def summary(result: dict[str, Any]) -> str:
    """Return the report: the result, a table of where time went, and bytes per transition."""
    frames, mean_return = result["curve"][-1]
    batch, wall = result["last"], result["wall"]
    lines = [
        "",
        f"mean return of the last 100 episodes: {mean_return:.0f} after {frames:,} frames, {wall:.0f} s "
        f"({frames / wall:,.0f} frames/s)",
        "",
        f"{'where the time went':<22}{'s':>7}{'%':>6}{'µs/frame':>11}",
    ]
    for name, seconds in result["seconds"].items():
        lines.append(f"{name:<22}{seconds:>7.1f}{100 * seconds / wall:>6.0f}{1e6 * seconds / frames:>11.2f}")
    lines += ["", f"{'bytes per transition':<40}"]
    for key in sorted(batch.keys(True, True), key=str):
        column = batch[key]
        shown = key if isinstance(key, str) else ", ".join(key)
        lines.append(f"{shown:<40}{column.element_size() * column[0].numel():>6}")
    lines.append(f"{'all':<40}{batch.bytes() // len(batch):>6}")
    return "\n".join(lines)


def save_pictures(result: dict[str, Any], folder: Path) -> list[Path]:
    """Save the learning curve (PNG and CSV) and the timeline of the first and last batch's first rows."""
    from matplotlib.figure import Figure

    from flatroll.layout import timeline

    folder.mkdir(parents=True, exist_ok=True)
    points = "".join(f"{frames},{value:.1f}\n" for frames, value in result["curve"])
    (folder / "learning_curve.csv").write_text("frames,mean_return\n" + points)
    curve = Figure(figsize=(7, 4), layout="constrained")
    axes = curve.add_subplot()
    axes.plot([frames / 1e6 for frames, _ in result["curve"]], [value for _, value in result["curve"]])
    axes.axhline(500, color="0.7", linewidth=1, linestyle=":")
    axes.set(
        xlabel="million frames",
        ylabel="mean return of 100 episodes",
        title="Recurrent PPO, CartPole without velocities",
        ylim=(0, 520),
    )
    axes.spines[["top", "right"]].set_visible(False)
    rows = Figure(figsize=(9, 8), layout="constrained")
    for which, axes in zip(("first", "last"), rows.subplots(2, 1), strict=True):
        some = result[which][:_ROWS]
        timeline(some, ax=axes, title=f"The {which} batch: {len(some)} of {len(result[which]):,} rows")
    paths = [folder / "learning_curve.png", folder / "timeline.png"]
    for figure, path in zip((curve, rows), paths, strict=True):
        figure.savefig(path, dpi=150)
    return paths
