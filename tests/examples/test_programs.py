"""The programs of `python -m flatroll run`: each in small, and killed and resumed."""

import csv
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch

from flatroll.__main__ import main
from flatroll.disk import Checkpoint
from flatroll.disk.checkpoint import read_tree
from flatroll.disk.folder import Folder
from flatroll.examples import ppo_masked
from flatroll.examples.common import Log, parse, programs

#: Of each program: options that make it small.
SMALL = {
    "dqn": "--frames 320 --start 100 --capacity 200 --target-every 20",
    "grpo": "--frames 320 --prompts 4 --answers 4 --hidden 8 --epochs 1",
    "memory_ppo": "--frames 320 --num-envs 2 --hidden 8 --layers 1 --context 4 --epochs 1 --minibatches 1",
    "multi_agent": "--env flatroll.wrappers.testing:ScriptedGame --frames 144 --games 2 --steps 8 --eval-every 48 "
    "--save-every 48",
    "offline_iql": "--frames 60 --eval-every 30 --save-every 30 --episodes-made 4 --batch-size 32",
    "ppo_continuous": "--env Pendulum-v1 --frames 256 --steps 64 --epochs 1 --minibatches 2",
    "ppo_masked": "--frames 320 --num-envs 2 --steps 16 --epochs 1 --minibatches 2",
    "ppo_pixels": "--frames 48 --num-envs 2 --steps 8 --epochs 1 --minibatches 1 --max-steps 4 --eval-every 16 "
    "--save-every 16",
    "recurrent_dqn": "--frames 320 --num-envs 4 --rows 32 --start 100 --capacity 200 --updates 1 --batch-size 40",
    "recurrent_ppo": "--frames 320 --num-envs 4 --steps 16 --hidden 8 --epochs 1 --target 1000 --quiet",
    "rnd_ppo": "--frames 320 --num-envs 2 --steps 16 --epochs 1 --minibatches 2",
    "sac": "--frames 320 --start 280 --batch-size 32 --num-envs 2",
    "tool_use": "--frames 320 --texts 16 --hidden 8 --epochs 1",
}
SHARED = "--episodes 2 --log-every 1 --eval-every 200 --save-every 100"
#: Packages that some need, besides those of every installation.
NEEDS = {
    "grpo": ("transformers",),
    "offline_iql": ("minari", "torchrl"),
    "ppo_pixels": ("envpool",),
    "tool_use": ("transformers",),
}
#: One program of each family, on rows and on sequences, on and off the policy: these are killed in the quick form, too.
FAMILIES = ("ppo_masked", "recurrent_ppo", "dqn")
#: Those whose envs take a seed at each reset.
DETERMINISTIC = [
    "dqn",
    "grpo",
    "memory_ppo",
    "offline_iql",
    "ppo_continuous",
    "ppo_masked",
    "recurrent_dqn",
    "recurrent_ppo",
    "rnd_ppo",
    "sac",
    "tool_use",
]


def options_of(name: str, folder: Path) -> list[str]:
    return [*SHARED.split(), *SMALL[name].split(), "--folder", str(folder)]


def test_every_program_is_tested() -> None:
    assert sorted(SMALL) == list(programs())


@pytest.mark.parametrize("name", SMALL)
def test_each_is_short_enough_to_read(name: str) -> None:
    source = (Path(__file__).parents[2] / "examples" / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 150


def test_run_alone_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(programs())
    assert all(len(line.split()) > 3 for line in lines)


def test_an_unknown_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "chess"]) == 2
    assert capsys.readouterr().err.startswith("flatroll run: no program named chess; there are: ")


def test_their_help_imports_nothing_of_them() -> None:
    program = """
import sys
from flatroll.__main__ import main
for name in sys.argv[1:]:
    try:
        main(["run", name, "--help"])
    except SystemExit as stopped:
        assert stopped.code == 0
assert not {"torch", "numpy", "gymnasium"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program, *SMALL], capture_output=True, text=True, check=True)
    assert done.stdout.count("usage: ") == done.stdout.count("--save-every INT ") == len(SMALL)


def log_of(folder: Path) -> list[dict[str, str]]:
    """The lines of a log, without the seconds."""
    with (folder / "log.csv").open() as file:
        return [{key: row[key] for key in ("frames", "name", "value")} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that runs a program, once, and returns its folder."""
    top = tmp_path_factory.mktemp("runs")

    def run(name: str) -> Path:
        for package in NEEDS.get(name, ()):
            pytest.importorskip(package)
        if not (top / name).exists():
            assert main(["run", name, *options_of(name, top / name)]) == 0
        return top / name

    return run


@pytest.mark.parametrize("name", SMALL)
def test_it_logs_saves_and_evaluates(
    name: str, finished: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished(name)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((folder / "result.json").read_text())
    assert result["program"] == name and result["interval"][0] <= result["evaluation"]
    log = log_of(folder)
    assert {"lr", "evaluation"} <= {row["name"] for row in log}
    assert int(log[-1]["frames"]) == result["frames"]
    assert Checkpoint(folder / "checkpoint").versions()


class Echo(gym.Env[Any, Any]):
    """Shows a flag and a card, as POPGym's tasks do; the right action is the card before."""

    observation_space = gym.spaces.Tuple((gym.spaces.Discrete(2), gym.spaces.Discrete(4)))
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.cards = self.np_random.integers(0, 4, 9).tolist()
        self.at = 0
        return (0, self.cards[0]), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        reward = 0.0 if self.at == 1 else (1.0 if action == self.cards[self.at - 2] else -1.0) / 7
        return (1, self.cards[self.at]), reward, self.at == 8, False, {}


def test_recurrent_ppo_takes_envs_whose_observations_are_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind: Any = Echo
    gym.register("Echo-v0", kind)
    small = "--frames 7680 --num-envs 64 --steps 8 --gamma 0.5 --scale 1 --minibatches 2 --quiet"
    assert main(["run", "recurrent_ppo", "--env", "Echo-v0", *small.split(), "--folder", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert -1 <= result["return"] <= 1 and result["evaluation"] > 0.2  # guesses return -0.5


def weights_after(folder: Path) -> dict[str, torch.Tensor]:
    """The state of the loss with all its networks, in the newest version."""
    tree = Folder(folder / "checkpoint").load_with(lambda loaded: read_tree(loaded, 1000), None, strict=True)
    state: dict[str, torch.Tensor] = tree["others"]["parts"]["policy"]
    return state


def run_and_die(name: str, options: list[str]) -> None:
    """Run a program, and die of kill -9 when it logs a batch after its first checkpoint."""
    write = Log.__call__

    def write_or_die(self: Log, *args: Any, **numbers: Any) -> None:
        if Checkpoint(self.args.folder / "checkpoint").versions():
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, *args, **numbers)

    Log.__call__ = write_or_die  # type: ignore[method-assign]
    torch.set_num_threads(1)  # threads of the parent are not in this process
    import_module(f"flatroll.examples.{name}").main(options)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.long) for name in SMALL]
)
def test_a_killed_run_goes_on_and_ends_at_the_same_weights(
    name: str, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    other, options = finished(name), options_of(name, tmp_path)
    tmp_path.joinpath("log.csv").write_text(
        "frames,seconds,name,value\n7,1.0,lr,1\n"
    )  # of a run without checkpoints
    process = multiprocessing.get_context("fork").Process(target=run_and_die, args=(name, options))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    import_module(f"flatroll.examples.{name}").main(options)
    assert [row["frames"] for row in log_of(other)] == [row["frames"] for row in log_of(tmp_path)]
    if name not in DETERMINISTIC:
        return
    whole, resumed = weights_after(other), weights_after(tmp_path)
    assert list(whole) == list(resumed) and all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert log_of(other) == log_of(tmp_path)


@pytest.mark.parametrize("name", ["ppo_masked", "sac"])
def test_a_finished_run_goes_on_with_more_frames(
    name: str, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(finished(name), tmp_path, dirs_exist_ok=True)
    before = log_of(tmp_path)
    assert main(["run", name, *options_of(name, tmp_path), "--frames", "384"]) == 0
    after = log_of(tmp_path)
    assert after[: len(before)] == before and int(after[-1]["frames"]) == 384


@pytest.mark.skipif(importlib.util.find_spec("mujoco") is not None, reason="mujoco is there")
def test_a_missing_simulator_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ppo_continuous", "--folder", str(tmp_path)]) == 1
    assert 'pip install "gymnasium[mujoco]"' in capsys.readouterr().err


def test_the_networks_of_sac_share_statistics_of_what_the_env_showed(tmp_path: Path) -> None:
    options = [
        "--frames",
        "40",
        "--start",
        "32",
        "--batch-size",
        "8",
        "--eval-every",
        "1000",
        "--episodes",
        "1",
    ]
    assert main(["run", "sac", "--norm", *options, "--folder", str(tmp_path)]) == 0
    counts = [value for key, value in weights_after(tmp_path).items() if key.endswith("statistics.count")]
    assert len(counts) == 5  # actor, two critics, and the copies that follow them
    assert {float(count) for count in counts} == {
        44.0
    }  # of four envs, ten observations and the last one each


def test_a_film_is_a_gif(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    options = [*options_of("ppo_masked", tmp_path), "--frames", "32", "--film", str(tmp_path / "film.gif")]
    assert main(["run", "ppo_masked", *options, "--tensorboard"]) == 0
    with image.open(tmp_path / "film.gif") as film:
        assert film.n_frames > 10 and film.size == (80, 80)
    assert list(tmp_path.glob("events.out.tfevents*"))


def test_an_evaluation_stops_the_training(tmp_path: Path) -> None:
    result = ppo_masked.train(parse("ppo_masked", [*options_of("ppo_masked", tmp_path), "--stop-at", "-1"]))
    assert result["frames"] == 224 and result["evaluation"] >= 0
