"""The demo with a report: result, time per part, bytes per transition, two pictures."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flatroll.examples.common import parse

#: Number of rows shown in the timeline.
_ROWS = 512


def demo(argv: list[str] | None = None) -> int:
    """Train, print the tables, save the pictures; return 0 if the target was reached or none was expected."""
    with TemporaryDirectory() as folder:  # where the run is kept until the pictures are drawn
        args = parse(
            "recurrent_ppo", ["--folder", folder, *(argv or [])], out=("out", "folder for the pictures")
        )
        import torch

        from flatroll.examples import recurrent_ppo
        from flatroll.layout.checks import optional_package

        optional_package(
            "matplotlib", "plot", "the picture of the demo"
        )  # detected now and not after the training
        torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
        result = recurrent_ppo.train(args)
    print(summary(result), *(f"saved {path}" for path in save_pictures(result, Path(args.out))), sep="\n")
    return 0 if args.memoryless or result["curve"][-1][1] >= args.target else 1


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
