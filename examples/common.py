"""Helpers shared by the programs: options, envs, evaluations, log, checkpoints, films.

A program is a file in this folder with a table ``OPTIONS``: name, default and meaning of each option. `parse` reads the
table without importing the program, so ``python -m flatroll run NAME --help`` prints before torch is loaded.
"""

import argparse
import ast
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
#: Options of every program. A program may change a default, or set an option to None to remove it.
SHARED: dict[str, tuple[Any, str]] = {
    "seed": (1, "seed of weights, actions and envs"),
    "folder": (
        "",
        "log, checkpoints and result (default: out/PROGRAM/ENV-seedN); the run resumes from a checkpoint there",
    ),
    "log_every": (1_000, "frames between two lines of the log, at least one batch"),
    "save_every": (100_000, "frames between two checkpoints"),
    "eval_every": (100_000, "frames between two evaluations"),
    "episodes": (20, "episodes per evaluation, with the most probable actions"),
    "stop_at": (None, "stop early at this mean return of an evaluation"),
    "film": ("", "save the first episode of the trained policy as this .gif (needs pillow)"),
    "device": ("cpu", "device of networks and batches"),
    "bfloat16": (False, "mixed precision in the losses"),
    "compile": (False, "torch.compile the updates: loss, gradients and optimizer step"),
    "tensorboard": (False, "also write the log for TensorBoard"),
}


def programs() -> dict[str, str]:
    """Return the names of the programs, with the first line of each docstring."""
    found = {}
    for file in sorted(FOLDER.glob("*.py")):
        source = file.read_text()
        if "\nOPTIONS = {" in source:
            found[file.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def parse(name: str, argv: list[str] | None = None, **more: tuple[Any, str]) -> argparse.Namespace:
    """Parse the command line of a program; ``more`` adds options to those of its table."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    tables = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "OPTIONS"
    ]
    own: dict[str, tuple[Any, str] | None] = ast.literal_eval(tables[0])
    parser = argparse.ArgumentParser(
        prog=f"flatroll run {name}",
        description=ast.get_docstring(tree),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    table = {**own, **more, **{option: row for option, row in SHARED.items() if option not in own}}
    for option, row in table.items():
        if row is None:
            continue
        default, meaning = row
        flag, shown = "--" + option.replace("_", "-"), meaning.replace("%", "%%")
        if default is False:
            parser.add_argument(flag, action="store_true", help=shown)
            continue
        kind = float if default is None else type(default)
        shown += "" if default in (None, "") else " (default: %(default)s)"
        parser.add_argument(flag, type=kind, default=default, metavar=kind.__name__.upper(), help=shown)
    args = parser.parse_args(argv)
    args.program = name
    # Seeds of resets in training and in evaluations. envpool accepts a seed only at creation.
    pool = args.env.startswith("envpool:")
    args.reset_seed, args.test_seed = (None, None) if pool else (args.seed, args.seed + 10_000)
    place = f"{args.env}-seed{args.seed}".replace(":", "-").replace("/", "-")
    args.folder = Path(args.folder or Path("out") / name / place)
    return args


def make_env(name: str, num_envs: int, seed: int | None = None, **options: Any) -> Any:
    """Create a vector env with float32 observations from a Gymnasium id, or from ``envpool:ID``, which is seeded here.

    With ``render_mode=`` it is always Gymnasium's: envpool draws nothing.
    """
    import gymnasium as gym
    import torch

    from flatroll.wrappers import as_vector_env

    if not name.startswith("envpool:") or "render_mode" in options:
        name = name.removeprefix("envpool:")
        if "render_mode" in options:
            options["vectorization_mode"] = "sync"  # CartPole's own vector env draws different start states
        try:
            made: Any = gym.make_vec(name, num_envs=num_envs, **options)
        except gym.error.DependencyNotInstalled as error:  # the message says what to install
            raise ImportError(str(error)) from error
        return as_vector_env(made, dtype=torch.float32)
    try:
        import envpool
    except ImportError as error:
        raise ImportError(f'--env {name} needs envpool: pip install "flatroll[envpool]"') from error
    name = name.removeprefix("envpool:")
    made = envpool.make_gymnasium(name, num_envs=num_envs, seed=seed, **options)
    return as_vector_env(made, dtype=torch.float32)


class Log:
    """Writes numbers to ``log.csv`` in the run's folder, and the result to ``result.json``.

    It is part of the checkpoint: a run that resumes drops the lines behind the checkpoint, which it writes again.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.file = args, args.folder / "log.csv"
        self.frames, self.seconds, self._since = 0, 0.0, time.perf_counter()
        self.returns: list[float] = []  # of the last 100 episodes
        self.ended: list[float] = []  # returns of the episodes since the last lines
        self._first: list[str] = ["frames,seconds,name,value\n"]  # the header, or the lines of an earlier run
        self._writer: Any = None
        args.folder.mkdir(parents=True, exist_ok=True)
        if args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(args.folder)

    def __call__(self, batch: Any, frames: int, check: Any = None, **numbers: Any) -> None:
        """Record the episodes that ended in a batch; at regular intervals write their mean return and the numbers.

        What an `Evaluator` has just found is written at once. Without a batch (None) a frame is an update.
        """
        ended: list[float] = []
        if batch is not None:
            ended = batch["next", "episode_reward"][batch["next", "done"]].tolist()
        self.frames, self.returns, self.ended = frames, [*self.returns, *ended][-100:], [*self.ended, *ended]
        if check is not None and check.history and check.history[-1][0] == frames:
            numbers["evaluation"] = check.history[-1][1].mean
        elif frames % self.args.log_every >= (1 if batch is None else len(batch)):
            return
        if self.ended:
            numbers["return"] = sum(self.ended) / len(self.ended)
            self.ended = []
        with self.file.open("w" if self._first else "a") as file:
            file.writelines(self._first)
            self._first = []
            for name, value in numbers.items():
                number = float(value.detach() if hasattr(value, "detach") else value)
                file.write(f"{frames},{self.elapsed():.2f},{name},{number:.6g}\n")
                if self._writer is not None:
                    self._writer.add_scalar(name, number, frames)

    def elapsed(self) -> float:
        """Return the seconds of this run and of the runs that it resumes."""
        return self.seconds + time.perf_counter() - self._since

    def finish(self, found: Any) -> dict[str, Any]:
        """Write and print the result: the last 100 episodes of the training, and an `Evaluation`."""
        seconds, mean = self.elapsed(), found.interval
        result = {
            "program": self.args.program,
            "env": self.args.env,
            "seed": self.args.seed,
            "frames": self.frames,
            "return": sum(self.returns) / max(len(self.returns), 1),
            "evaluation": mean.value,
            "interval": [mean.low, mean.high],
            "seconds": round(seconds, 1),
        }
        (self.args.folder / "result.json").write_text(json.dumps(result) + "\n")
        print(json.dumps(result))
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the frames, the seconds and the returns."""
        numbers = {"frames": self.frames, "seconds": self.elapsed()}
        return {**numbers, "returns": self.returns, "ended": self.ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self.frames, self.returns, self.ended = state["frames"], list(state["returns"]), list(state["ended"])
        self.seconds, self._since = state["seconds"], time.perf_counter()
        if self.file.exists():
            _, *lines = self.file.read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            self._first += [line for line in whole if int(line.partition(",")[0]) <= self.frames]


class Run:
    """What all training programs share: evaluations, log, checkpoints and resuming.

    Args:
        args: of `parse`.
        policy: what is evaluated, with the most probable actions.
        env: for the evaluations.
        collector: gives the batches. Default None: there is none.
        parts: what else a run needs to continue.
    """

    def __init__(
        self, args: argparse.Namespace, policy: Any, env: Any, collector: Any = None, /, **parts: Any
    ) -> None:
        from flatroll.disk import Checkpoint

        self.args, self.policy, self.env, self._collector = args, policy, env, collector
        self.judged: Any = {"episodes": args.episodes, "seed": args.test_seed, "policy_device": args.device}
        self.check = self.make_check()
        self.log = Log(args)
        if collector is not None:
            parts["collector"] = collector
        parts |= {"check": self.check, "log": self.log}
        self._checkpoint = Checkpoint(args.folder / "checkpoint", **parts)
        if self._checkpoint.versions():
            self._checkpoint.load()

    def make_check(self) -> Any:
        """Return the `Evaluator` of the run."""
        from flatroll.rollouts import Evaluator

        every: Any = {"every": self.args.eval_every, "stop_at": self.args.stop_at}
        return Evaluator(self.env, self.policy, **every, **self.judged)

    def evaluate(self, **options: Any) -> Any:
        """Return an `Evaluation` of the policy; ``options`` are those of `evaluate`."""
        from flatroll.rollouts import evaluate

        return evaluate(self.env, self.policy, **{**self.judged, **options})

    def note(self, batch: Any, frames: int, **numbers: Any) -> bool:
        """Evaluate and log if it is time; return whether to stop, since an evaluation has reached ``--stop-at``."""
        stop: bool = self.check(frames)
        self.log(batch, frames, self.check, **numbers)
        return stop

    def save(self, frames: int, rows: int, now: bool) -> None:
        """Save a checkpoint if it is due, or now."""
        if now or frames % self.args.save_every < rows:
            self._checkpoint.save()
            if self._collector is not None:
                # Start new episodes, as a restart would: a run that was killed then ends with the same weights.
                self._collector.load_state_dict(self._collector.state_dict())

    def finish(self, drawn: Callable[[], Any] | None = None, **options: Any) -> dict[str, Any]:
        """Evaluate the policy, and return the result; with ``--film`` save one episode as a GIF of 30 frames a second.

        Args:
            drawn: makes the env of the film, with ``render_mode="rgb_array"``.
            options: of the evaluation, as for `evaluate`.
        """
        if self._collector is not None:
            self._collector.shutdown()
        found = self.evaluate(**options)
        if drawn is not None and self.args.film:
            from PIL import Image

            from flatroll.rollouts import evaluate

            one = {**self.judged, "episodes": 1}
            frames: Any = evaluate(drawn(), self.policy, film="first", **one).film
            first, *others = map(Image.fromarray, frames.numpy())
            first.save(self.args.film, save_all=True, append_images=others, duration=33, loop=0)
        return self.log.finish(found)
