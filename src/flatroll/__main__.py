"""The command line: ``python -m flatroll demo | run [NAME ...] | inspect PATH | bench [NAME ...] | compile``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import flatroll

if TYPE_CHECKING:
    from tensordict import TensorDictBase

BENCH_PREFIX = "bench_"
POLICY_SUFFIXES = (".onnx", ".pt2")
CHECKOUT = Path(flatroll.__file__).resolve().parents[2]  # of an editable install; else see `find_checkout`


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 for success, 1 for a failure or a finding, 2 for wrong usage.

    Args:
        argv: the arguments after the program name. Default: ``sys.argv[1:]``.
    """
    if argv is None:
        argv = sys.argv[1:]
    words = list(argv)

    try:
        if words[:1] == ["demo"]:  # the program parses its own arguments, including --help
            from flatroll.examples.report import demo

            return demo(words[1:])
        if words[:1] == ["run"] and words[1:2] not in ([], ["-h"], ["--help"]):  # so do these programs
            return run_program(words[1], words[2:])

        arguments = build_parser().parse_args(words)
        return int(arguments.run(arguments))
    except CommandError as error:
        print(f"flatroll {words[0]}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the pipe, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return 1
    except ImportError as error:  # an optional package is missing; the message names the extra
        print(f"flatroll {words[0]}: {error}", file=sys.stderr)
        return 1


class CommandError(Exception):
    """Wrong usage that is found only after the arguments are parsed."""


def unknown_name_error(kind: str, names: Sequence[str], known: Iterable[str]) -> CommandError:
    """Return the error for unknown names; it lists the known names and the closest match."""
    known = list(known)
    near = get_close_matches(names[0], known, 1)  # not `checks.did_you_mean`: that would import torch
    meant = f"; did you mean {near[0]}?" if near else ""
    return CommandError(f"no {kind} named {', '.join(names)}; there are: {', '.join(known)}{meant}")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="flatroll", description="Reinforcement learning batches without padding."
    )
    parser.add_argument("--version", action="version", version=f"flatroll {flatroll.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    commands.add_parser("demo", help="train a recurrent policy with PPO (demo --help lists its options)")

    run = commands.add_parser("run", help="run a training program (run without a name lists them)")
    run.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the program; run NAME --help lists its options"
    )
    run.set_defaults(run=list_programs)

    look = commands.add_parser(
        "inspect", help="describe a saved buffer or batch and check it; describe an exported policy"
    )
    look.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="folder of a save, or written by TensorDict.memmap; file of export_policy",
    )
    look.add_argument(
        "--plot", type=Path, metavar="FILE", help="save a picture of a batch's trajectories to FILE"
    )
    look.add_argument("--verify", action="store_true", help="read and check all rows of a folder")
    look.add_argument("--picture", type=Path, metavar="FILE", help="save a folder's histograms to FILE")
    look.set_defaults(run=run_inspect)

    bench = commands.add_parser("bench", help="run benchmarks (in a checkout) and print their tables")
    bench.add_argument("names", nargs="*", metavar="NAME", help="names of benchmarks (default: all)")
    bench.add_argument("--list", action="store_true", help="print the names and exit")
    bench.add_argument("--out", type=Path, metavar="DIR", help="also write each table to DIR/NAME.txt")
    bench.add_argument("--libraries", nargs="+", metavar="NAME", help="packages that boundaries compares")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write the rows of boundaries to FILE")
    bench.set_defaults(run=run_bench)

    compiler = commands.add_parser("compile", help="compile the kernels ahead of time (once per machine)")
    compiler.set_defaults(run=run_compile)
    return parser


def list_programs(arguments: argparse.Namespace) -> int:
    """Print the name and a one-line summary of each program."""
    from flatroll.examples.common import programs

    print("\n".join(f"{name:<16} {line}" for name, line in programs().items()))
    return 0


def run_program(name: str, argv: list[str]) -> int:
    """Run one of the example programs with the given arguments."""
    from flatroll.examples.common import parse, programs

    if name not in (known := programs()):
        raise unknown_name_error("program", [name], known)
    parse(name, argv)  # --help and usage errors exit here, before torch is imported
    return int(import_module(f"flatroll.examples.{name}").main(argv))


def run_inspect(arguments: argparse.Namespace) -> int:
    """Describe the rows or the batch saved in a directory, or the policy in a file.

    Return 1 if a directory is damaged or a row breaks a rule.
    """
    path: Path = arguments.path
    if path.suffix in POLICY_SUFFIXES and not path.is_dir():
        return run_inspect_policy(path)
    if is_replay_log(path):
        return run_inspect_log(arguments)
    if not (path / "meta.json").is_file():
        return run_inspect_folder(arguments)

    from tensordict import TensorDict

    from flatroll import layout

    try:
        batch = TensorDict.load_memmap(path, allow_pickle=False)
    except RuntimeError as error:
        if "pickle" not in str(error):
            raise
        raise CommandError(
            f"{path} has pickled entries, which can run code chosen by their author: if you trust them, load them with "
            "TensorDict.load_memmap(PATH, allow_pickle=True) and call flatroll.layout.describe"
        ) from None

    print(layout.describe(batch))
    findings = layout.audit(batch)
    if findings:
        print(findings)
    print(f"audit: {len(findings)} findings in {batch.batch_size.numel()} rows")

    if arguments.plot is not None:
        save_timeline(batch, arguments.plot)

    if any(finding.severity == "error" for finding in findings):
        return 1
    return 0


def run_inspect_policy(path: Path) -> int:
    """Print what a file of `flatroll.export_policy` says about itself."""
    from flatroll.deploy import read_record

    try:
        print(read_record(path).as_text())
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None
    return 0


def is_replay_log(path: Path) -> bool:
    """Return whether a folder's newest version is that of a replay log."""
    from flatroll.disk import Folder

    try:
        folder = Folder(path)
        json = folder.load(strict=True).json if folder.versions() else None
    except (OSError, ValueError):  # `run_inspect_folder` says what is wrong
        return False
    return isinstance(json, list) and ["kind", "replay log"] in json[-1]


def run_inspect_log(arguments: argparse.Namespace) -> int:
    """Describe a replay log; with ``--verify`` make all its rows again. Return 1 if one differs."""
    from flatroll.datasets import ReplayLog, ReplayMismatchError
    from flatroll.datasets.replay_log.log import describe_log

    path: Path = arguments.path
    try:
        log = ReplayLog(path)
        print(describe_log(log, hint=not arguments.verify))
        if not arguments.verify:
            return 0
        with log:
            log.check()
    except ReplayMismatchError as error:
        print(f"\ndiffers: {error}")
        return 1
    except (OSError, ValueError, ImportError) as error:
        raise CommandError(str(error)) from None
    print("\nall rows were made again, and are equal")
    return 0


def run_inspect_folder(arguments: argparse.Namespace) -> int:
    """Describe a folder of rows and versions; return 1 if any part is damaged."""
    from flatroll.disk.inspect import inspect_folder, save_picture

    path: Path = arguments.path
    try:
        report = inspect_folder(path, verify=arguments.verify)
    except (OSError, ValueError) as error:
        if (reader := exported_by(path)) is not None:
            raise CommandError(
                f"{path} is in another library's format: flatroll.export.{reader}({str(path)!r}) reads it"
            ) from None
        raise CommandError(
            "PATH must be a folder of rows and versions, or a directory written by TensorDict.memmap (it holds "
            f"meta.json), got {path}: {error}"
        ) from None

    print(report.text)
    for line in report.damage:
        print(f"damaged: {line}")
    if arguments.verify:
        checked = "all rows were checked"
    else:
        checked = "--verify also checks the rows"
    print(f"{len(report.damage)} damaged; {checked}")

    if arguments.picture is not None:
        try:
            save_picture(report, arguments.picture)
        except ValueError as error:
            raise CommandError(f"--picture {arguments.picture}: {error}") from None
        print(f"histograms saved to {arguments.picture}")

    if report.damage:
        return 1
    return 0


def exported_by(path: Path) -> str | None:
    """Return the name of the `flatroll.export` function that reads a file or folder; None if there is none."""
    files = {".parquet": "import_parquet", ".arrow": "import_arrow", ".h5": "import_h5", ".hdf5": "import_h5"}
    if path.is_file():
        return files.get(path.suffix)
    folders = {
        "meta/info.json": "import_lerobot",
        "metadata.json": "import_minari",
        "data/metadata.json": "import_minari",
    }
    return next((reader for name, reader in folders.items() if (path / name).is_file()), None)


def save_timeline(batch: TensorDictBase, file: Path) -> None:
    """Save the picture of the trajectories of a batch."""
    from flatroll import layout

    try:  # fails without markers or rows, or if matplotlib does not know the file suffix
        axes = layout.timeline(batch)
        from matplotlib.figure import Figure  # already imported: timeline has drawn with it

        figure = axes.get_figure()
        assert isinstance(figure, Figure)  # a new figure made by timeline
        figure.savefig(file, bbox_inches="tight")
    except (KeyError, ValueError) as error:
        raise CommandError(f"--plot {file}: {error.args[0]}") from None
    print(f"timeline saved to {file}")


def run_bench(arguments: argparse.Namespace) -> int:
    """Run each benchmark module in its own process, one after another; return 1 if one fails."""
    known = benchmarks_by_name()
    names = [name.removeprefix(BENCH_PREFIX) for name in arguments.names] or list(known)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise unknown_name_error("benchmark", unknown, known)

    if arguments.list:
        print("\n".join(names))
        return 0

    options = boundary_options(arguments, names)
    commands = {name: [sys.executable, "-m", known[name], *options] for name in names}
    failed = [name for name, command in commands.items() if not run_and_keep(name, command, arguments.out)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    return 0


def boundary_options(arguments: argparse.Namespace, names: list[str]) -> list[str]:
    """Return the options that the benchmark ``boundaries`` is started with; no other one has any."""
    options: list[str] = []
    if arguments.libraries:
        options += ["--libraries", *arguments.libraries]
    if arguments.json is not None:
        options += ["--json", str(arguments.json.resolve())]
    if options and names != ["boundaries"]:
        raise CommandError(
            f"{options[0]} is an option of boundaries alone: flatroll bench boundaries {options[0]} ..."
        )
    return options


def run_compile(arguments: argparse.Namespace) -> int:
    """Compile and cache the Numba kernels by running each kind of buffer and estimator once on a few rows."""
    import torch

    begun = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # frames are read by a kernel only then
    try:
        use_batches()
        use_steps()
        use_memories()
    finally:
        torch.set_num_threads(threads)
    print(f"compiled in {time.perf_counter() - begun:.0f} s")
    return 0


def use_batches() -> None:
    """Fill buffers of each kind from a collector, sample them and estimate; save and load one of them."""
    import torch
    from tensordict.nn import TensorDictModule

    from flatroll import buffers, estimators
    from flatroll.rollouts import Collector
    from flatroll.trees import CountSampler
    from flatroll.wrappers import StepCounter
    from flatroll.wrappers.testing import Script, ScriptedVectorEnv

    sizes: dict[str, Any] = {"max_capacity": 64, "alpha": 0.6, "beta": 0.4}
    stack = {"compact_obs": True, "frame_stack": {"observation": 3}}
    parts: list[tuple[buffers.Sampler, dict[str, Any], dict[str, Any]]] = [
        (buffers.SliceSampler(slice_len=4, fill=False), {}, {}),
        (buffers.SliceSampler(slice_len=4, start_key="is_init"), {}, {}),
        (buffers.SliceSamplerWithoutReplacement(slice_len=4), {}, {}),
        (buffers.PrioritizedSampler(**sizes), {}, {}),
        (buffers.PrioritizedSliceSampler(slice_len=4, fill=False, **sizes), {}, {}),
        (buffers.RandomSampler(), {"compact_obs": True}, {}),
        (buffers.SliceSampler(slice_len=4, fill=False), stack, {}),
        (buffers.RandomSampler(), {}, {"transform": buffers.MultiStepTransform(3, 0.99)}),
        (CountSampler("observation"), {}, {}),
        (buffers.RandomSampler(), {}, {"writer": buffers.TensorDictMaxValueWriter(rank_key="step_count")}),
    ]

    critic = TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["state_value"])
    gae = estimators.GAE(gamma=0.99, lmbda=0.95, value_network=critic)

    many = torch.ones(2**16, 1)  # so many rows are summed by a kernel of their own
    each = torch.ones_like(many, dtype=torch.bool)
    estimators.generalized_advantage_estimate(0.99, 0.95, many, many, many, each)

    with TemporaryDirectory() as folder:
        for number, (sampler, options, others) in enumerate(parts):
            storage: buffers.Storage = buffers.LazyTensorStorage(64, **options)
            if number == 0:
                storage = buffers.DiskStorage(64, f"{folder}/rows")
            buffer = buffers.ReplayBuffer(storage=storage, sampler=sampler, batch_size=16, **others)
            env = StepCounter(ScriptedVectorEnv(Script(2, lengths=[5, 9])))
            for batch in Collector(env, frames_per_batch=40, total_frames=160):
                buffer.extend(batch)
                sample = buffer.sample()
                if number == 0:
                    gae(sample)
                if isinstance(sampler, buffers.PrioritizedSampler):
                    buffer.update_priority(torch.arange(3), torch.rand(3))
            buffer.dumps(f"{folder}/{number}")
            buffer.loads(f"{folder}/{number}")

    x = torch.rand(8, 1)
    ends = torch.ones(8, 1, dtype=torch.bool)
    estimators.td_lambda_return_estimate(0.99, 0.95, x, x, ends)
    estimators.vtrace_advantage_estimate(0.99, x, x, x, x, x, ends)
    estimators.reward2go(x, ends, 0.99)


def use_memories() -> None:
    """Run memories of real and of complex numbers over a few rows, forward and back; step a transformer."""
    import torch
    from tensordict import TensorDict

    from flatroll import modules

    rows = TensorDict({"observation": torch.rand(8, 3), "is_init": torch.arange(8) % 4 == 0}, [8])
    kinds: list[Any] = [
        modules.MinGRUModule,
        modules.LinearRecurrentModule,
        modules.LRUModule,
        modules.S6Module,
        modules.DeltaNetModule,
    ]
    for kind in kinds:
        memory = kind(3, 4, in_key="observation", out_key="features", state="zero")
        with modules.set_recurrent_mode("recurrent"):
            memory(rows.clone())["features"].sum().backward()

    transformer = modules.TransformerModule(3, 8, context=4, in_key="observation", out_key="features")
    first = rows.clone().set("is_init", torch.ones(8, dtype=torch.bool))
    with torch.no_grad():
        transformer(first)


def use_steps() -> None:
    """Write short episodes to buffers of each kind step by step, and read them; fill a forest; hash rows."""
    import torch
    from tensordict import TensorDict

    from flatroll import buffers
    from flatroll.kernels.rows.row_index import HashedRows
    from flatroll.kernels.rows.words import hash_words
    from flatroll.trees import MCTSForest

    hindsight = buffers.HindsightTransform(
        lambda achieved, desired, info: (achieved == desired).flatten(1).all(1).float(),
        goal_key="observation",
        achieved_goal_key="observation",
    )
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"compact_obs": True, "frame_stack": {"observation": 2}}, {}),
        ({"compact_obs": True}, {}),
        ({}, {"transform": hindsight}),
    ]

    for options, others in kinds:
        storage = buffers.LazyTensorStorage(64, **options)
        buffer = buffers.ReplayBuffer(storage=storage, batch_size=8, **others)
        writer = buffer.writer_for(2, window=8)
        for step in range(50):
            # Frames of 8 bytes, which are compared as one 64-bit integer, as most images are.
            frames = torch.arange(step, step + 2, dtype=torch.uint8) + 7 * (step // 2)
            stack = frames.view(1, 2, 1).repeat(2, 1, 8)
            later = {
                "observation": stack + 1,
                "reward": torch.zeros(2),
                "terminated": torch.full((2,), step % 2 == 1),
            }
            writer.write({"observation": stack, "action": torch.zeros(2), "next": later})
            writer.sample(4)
            writer.read_columns([step, writer.oldest], [0, 1])
        buffer.sample()

    forest = MCTSForest()
    for action in torch.zeros(2, dtype=torch.int64), torch.zeros(2):
        seen = torch.zeros(2, dtype=action.dtype)
        rows = {"observation": seen, "action": action, "next": {"observation": seen}}
        forest.extend(TensorDict(rows, [2]))
        forest = MCTSForest()

    hash_words(torch.zeros(2, 1, dtype=torch.int64))
    HashedRows(1).truncate(0)


def find_checkout() -> Path:
    """Return the folder of the repository: of an editable install, or the current folder."""
    for folder in (CHECKOUT, Path.cwd()):
        if (folder / "src/flatroll").is_dir() and (folder / "benchmarks").is_dir():
            return folder
    raise CommandError(
        "benchmarks are not part of the installed package: clone the repository, and run "
        "`python -m flatroll bench` in its folder"
    )


def benchmarks_by_name() -> dict[str, str]:
    """Map each benchmark's name, without the prefix, to its module in the checkout."""
    checkout = find_checkout()
    files = sorted((checkout / "benchmarks").rglob(f"{BENCH_PREFIX}*.py"), key=lambda file: file.name)
    return {
        file.stem.removeprefix(BENCH_PREFIX): ".".join(file.relative_to(checkout).with_suffix("").parts)
        for file in files
    }


def run_and_keep(name: str, command: list[str], out: Path | None) -> bool:
    """Run a command in the checkout; print its output and save it to ``out``. Return whether it succeeded."""
    print(f"== {name}", flush=True)
    begun = time.perf_counter()
    lines: list[str] = []
    with subprocess.Popen(command, cwd=find_checkout(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)

    print(f"== {name}: exit code {process.returncode} after {time.perf_counter() - begun:.1f} s", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.txt").write_text("".join(lines))
    return process.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
