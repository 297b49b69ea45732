"""Compares the memories on three tasks of POPGym's kind: PPO, the same settings for all, several seeds.

``python -m benchmarks.memory_tasks out/memory_tasks`` trains what the folder does not have yet (81 runs, about 25
minutes of one core) and prints the table. With ``--page docs/memory_tasks.md`` it also writes the table into the page,
between the lines ``<!-- memory tasks -->``, and the curves into ``docs/img/memory_tasks.png``.

Each run is ``python -m flatroll run memory_ppo`` with the options of `options_of`.
"""

import argparse
import functools
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure.timing import table
from flatroll.examples import common, memory_ppo
from flatroll.examples.curves import over_seeds
from flatroll.layout.checks import optional_package

MARK = "<!-- memory tasks -->\n"
CAPTION = "Mean returns of training episodes over the seeds, a panel for each task and a line for each memory"
#: Names of the rows, by the value of ``recurrent=``.
MEMORIES = {
    "gru": "GRU",
    "lstm": "LSTM",
    "mingru": "minGRU",
    "linear": "linear unit",
    "lru": "LRU",
    "s6": "S6",
    "ffm": "FFM",
    "deltanet": "DeltaNet",
    "transformer": "transformer, context 64",
}
COLOURS = ("#000000", "#7F7F7F", "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7", "#6A3D9A")


class Task(NamedTuple):
    """A task with its title, and the number of its envs, so that batches have about 3,000 rows."""

    name: str
    title: str
    num_envs: int


TASKS = [
    Task("RepeatPrevious", "RepeatPrevious", 64),
    Task("Autoencode12", "Autoencode, 12 cards", 128),
    Task("CountRecall", "CountRecall", 64),
]


class Finished(NamedTuple):
    """What a run came to: frames, mean return of an evaluation, processor seconds, and its log."""

    frames: int
    evaluation: float
    seconds: float
    log: Path


#: The runs of the seeds, by memory and task.
Runs = dict[tuple[str, Task], list[Finished]]


def options_of(memory: str, task: Task, seed: int, frames: int) -> list[str]:
    """The options of a run. The others keep their defaults: two layers of width 64, 4 passes over each batch."""
    line = f"--env {task.name} --memory {memory} --seed {seed} --frames {frames} --num-envs {task.num_envs}"
    return f"{line} --log-every 1 --eval-every 1000000000 --episodes 256".split()


@functools.cache
def warm_up(memory: str) -> None:
    """Train on one batch, so that kernels are loaded before anything is timed."""
    with tempfile.TemporaryDirectory() as scratch:
        options = [*options_of(memory, TASKS[1], 0, 1), "--folder", scratch]
        memory_ppo.train(common.parse("memory_ppo", options))


def run_once(memory: str, task: Task, seed: int, frames: int, folder: Path) -> Finished:
    """Train, unless the folder has such a run; one that did not finish begins anew."""
    result, cost = folder / "result.json", folder / "processor_seconds.json"
    if not cost.exists() or json.loads(result.read_text())["frames"] < frames:
        warm_up(memory)
        shutil.rmtree(folder, ignore_errors=True)
        begun = time.process_time()
        options = [*options_of(memory, task, seed, frames), "--folder", str(folder)]
        memory_ppo.train(common.parse("memory_ppo", options))
        cost.write_text(json.dumps(time.process_time() - begun))
        shutil.rmtree(folder / "checkpoint")
    found = json.loads(result.read_text())
    return Finished(found["frames"], found["evaluation"], json.loads(cost.read_text()), folder / "log.csv")


def run_all(out: Path, memories: Sequence[str], seeds: Sequence[int], frames: int) -> Runs:
    """Train all, seed after seed, so that an early end leaves whole tables of fewer seeds."""
    found: Runs = {}
    for seed in seeds:
        for task in TASKS:
            for memory in memories:
                folder = out / memory / f"{task.name}-seed{seed}"
                found.setdefault((memory, task), []).append(run_once(memory, task, seed, frames, folder))
    return found


def rows_of(runs: Runs) -> str:
    """The table: means over the seeds with the worst and the best, and processor seconds of one run."""
    memories = list(dict.fromkeys(memory for memory, _ in runs))
    rows = []
    for memory in memories:
        cells = [MEMORIES[memory]]
        for task in TASKS:
            returns = [run.evaluation for run in runs[memory, task]]
            spread = ""
            if len(returns) > 1:
                spread = f" [{min(returns):.2f}, {max(returns):.2f}]"
            cells.append(f"{sum(returns) / len(returns):.2f}{spread}")
        seconds = [run.seconds for task in TASKS for run in runs[memory, task]]
        rows.append([*cells, f"{sum(seconds) / len(seconds):.0f}"])
    seeds = len(runs[memories[0], TASKS[0]])
    frames = [runs[memories[0], task][0].frames for task in TASKS]
    titles = [f"{task.title}, {count:,} frames" for task, count in zip(TASKS, frames, strict=True)]
    return table([f"memory, seeds: {seeds}", *titles, "processor seconds"], rows)


def picture(runs: Runs) -> Any:
    """A panel of training returns for each task, and the legend in the place of a fourth one."""
    figure = optional_package("matplotlib.figure", "plot", "the curves").Figure(
        (8, 6.4), layout="constrained"
    )
    panels = [figure.add_subplot(2, 2, place) for place in range(1, len(TASKS) + 1)]
    for axes, task in zip(panels, TASKS, strict=True):
        for (memory, name), colour in zip(MEMORIES.items(), COLOURS, strict=True):
            if (memory, task) not in runs:
                continue
            curve = over_seeds([run.log for run in runs[memory, task]])
            frames = [count / 1000 for count in curve.frames]
            axes.plot(frames, curve.mean, label=name, color=colour, linewidth=2)
        axes.set_title(task.title, loc="left", fontsize=13)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=12)
    handles, labels = panels[-1].get_legend_handles_labels()
    last = figure.add_subplot(2, 2, 4)
    last.axis("off")
    last.legend(handles, labels, frameon=False, fontsize=13, loc="center")
    figure.supxlabel("thousand frames", fontsize=13)
    figure.supylabel("mean return", fontsize=13)
    return figure


def write_page(page: Path, runs: Runs) -> None:
    """Put the table and the curves in the place between the marks of a page."""
    before, _, after = page.read_text().split(MARK)
    image = page.parent / "img" / "memory_tasks.png"
    page.write_text(f"{before}{MARK}\n{rows_of(runs)}\n\n![{CAPTION}](img/{image.name})\n\n{MARK}{after}")
    picture(runs).savefig(image, dpi=110)


def main(argv: list[str] | None = None) -> int:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "out", type=Path, nargs="?", default=Path("out/memory_tasks"), help="folder of the runs"
    )
    parser.add_argument("--memories", nargs="+", choices=MEMORIES, default=list(MEMORIES))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=100_000, help="of each run (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="write the table into this page, the curves beside it")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    runs = run_all(args.out, args.memories, range(1, args.seeds + 1), args.frames)
    print(rows_of(runs))
    if args.page is not None:
        write_page(args.page, runs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
