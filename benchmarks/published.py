"""Puts the returns of the programs beside published ones: a table over seeds, and the curves.

``python -m benchmarks.published`` prints the commands of all runs; ``python -m benchmarks.published out`` reads the
finished ones below a folder and prints the table. With ``--page docs/benchmarks/learning.md`` it also writes the table
into the page, between the lines ``<!-- published -->``, and the curves into ``docs/img/published.png``.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure.timing import table
from flatroll.examples.curves import draw, over_seeds
from flatroll.layout.checks import optional_package
from flatroll.rollouts import interquartile_mean

MARK = "<!-- published -->\n"
SEEDS = (1, 2, 3)


class Task(NamedTuple):
    """Runs of a program that differ in the seed alone, and what others published of the task: a mean and deviation."""

    program: str
    env: str
    frames: int
    options: str = ""
    training: str = ""  # of training episodes
    evaluation: str = ""  # of a deterministic policy

    @property
    def name(self) -> str:
        return self.env.rpartition(":")[2].removeprefix("popgym-")

    def command(self, seed: int | str) -> str:
        words = ["python -m flatroll run", self.program, "--env", self.env, f"--frames {self.frames}"]
        return " ".join([*words, *filter(None, [self.options]), f"--seed {seed}"])


MUJOCO_SAC = "--num-envs 1 --lr 3e-4 --start 5000"
MEMORY = "--num-envs 128 --minibatches 8 --hidden 128 --gamma 0.5 --scale 1"
LABELS = {"ppo_continuous": "PPO", "recurrent_ppo": "GRU", "sac": "SAC"}  # of the panels
TASKS = [
    Task("ppo_continuous", "envpool:HalfCheetah-v4", 1_000_000, "", "1,443 ± 46", "5,819 ± 664"),
    Task("ppo_continuous", "envpool:Hopper-v4", 1_000_000, "", "2,383 ± 272", "2,410 ± 10"),
    Task("ppo_continuous", "envpool:Walker2d-v4", 1_000_000, "", "2,288 ± 572", "3,479 ± 822"),
    Task(
        "recurrent_ppo",
        "popgym:popgym-RepeatPreviousEasy-v0",
        300_000,
        MEMORY + " --steps 51",
        "1.000 ± 0.000",
    ),
    Task(
        "recurrent_ppo",
        "popgym:popgym-CountRecallEasy-v0",
        1_000_000,
        MEMORY + " --steps 51",
        "0.177 ± 0.005",
    ),
    Task(
        "recurrent_ppo",
        "popgym:popgym-AutoencodeEasy-v0",
        1_000_000,
        MEMORY + " --steps 103",
        "-0.283 ± 0.029",
    ),
    Task("sac", "envpool:Pendulum-v1", 20_000, "", "", "-157 ± 89"),
    Task("sac", "envpool:HalfCheetah-v4", 50_000, MUJOCO_SAC),
]
CAPTION = "Returns of training episodes over the seeds; the dashed line is the published mean at the end of training"


def finished(folders: list[Path]) -> dict[Task, list[dict[str, Any]]]:
    """The results of the finished runs of each task, by seed; shorter runs and other seeds do not count."""
    found: dict[Task, dict[int, dict[str, Any]]] = {}
    for file in sorted({file for folder in folders for file in folder.rglob("result.json")}):
        result = json.loads(file.read_text())
        for task in TASKS:
            same = (task.program, task.env) == (result["program"], result["env"])
            if same and result["seed"] in SEEDS and result["frames"] >= task.frames:
                found.setdefault(task, {})[result["seed"]] = {**result, "log": file.with_name("log.csv")}
    return {task: [found[task][seed] for seed in sorted(found[task])] for task in TASKS if task in found}


def rows_of(runs: dict[Task, list[dict[str, Any]]]) -> str:
    """The table: interquartile means over the seeds, with their intervals."""

    def mean(results: list[dict[str, Any]], name: str) -> str:
        found = interquartile_mean([result[name] for result in results])
        form = "{:,.0f} [{:,.0f}, {:,.0f}]" if abs(found.value) > 10 else "{:.3f} [{:.3f}, {:.3f}]"
        return form.format(*found)

    rows = []
    for task, results in runs.items():
        cells = [
            f"`{task.program}`",
            task.name,
            f"{task.frames:,}",
            str(len(results)),
            mean(results, "return"),
        ]
        rows.append([*cells, task.training, mean(results, "evaluation"), task.evaluation])
    header = ["program", "task", "frames", "seeds", "training", "published", "evaluation", "published"]
    return table(header, rows)


def picture(runs: dict[Task, list[dict[str, Any]]]) -> Any:
    """A panel of training returns for each task; a dashed line is the published mean of training episodes."""
    columns, lines = min(3, len(runs)), -(-len(runs) // 3)
    figure = optional_package("matplotlib.figure", "plot", "the curves").Figure(
        (8, 0.4 + 2.3 * lines), layout="constrained"
    )
    for at, (task, results) in enumerate(runs.items(), 1):
        axes = figure.add_subplot(lines, columns, at)
        curve = over_seeds([result["log"] for result in results])
        draw({"flatroll": curve._replace(frames=[frames / 1000 for frames in curve.frames])}, axes=axes)
        if task.training:
            mean = float(task.training.partition(" ")[0].replace(",", ""))
            axes.axhline(mean, color="0.4", linestyle="--", label="published")
        title = f"{LABELS[task.program]} {task.name.rpartition('-')[0]}"
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel="", ylabel="")
        axes.legend(frameon=False).set_visible(at == 1)
    figure.supxlabel("thousand frames")
    return figure


def main(argv: list[str] | None = None) -> int:
    """Print the commands or the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="of finished runs; none: print the commands")
    parser.add_argument("--page", type=Path, help="write the table into this page, the curves beside it")
    args = parser.parse_args(argv)
    if not args.folders:
        print("\n".join(task.command(seed) for task in TASKS for seed in SEEDS))
        return 0
    runs = finished(args.folders)
    if not runs:
        parser.error(f"no finished run of a task below {', '.join(map(str, args.folders))}")
    shown = rows_of(runs)
    print(shown)
    if args.page is not None:
        before, _, after = args.page.read_text().split(MARK)
        image = f"![{CAPTION}](../img/published.png)"
        args.page.write_text(f"{before}{MARK}\n{shown}\n\n{image}\n\n{MARK}{after}")
        picture(runs).savefig(args.page.parents[1] / "img" / "published.png", dpi=110)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
