"""Importing the rooms loads nothing heavy and changes nothing; what they export is documented."""

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import interpreters
import pytest

from benchmarks.shape import imports

ROOMS = [*(room for room in imports.ROOMS if room != "trainers"), "export"]
HEAVY = {
    "datasets",
    "envpool",
    "gymnax",
    "h5py",
    "jax",
    "matplotlib",
    "minari",
    "numba",
    "pandas",
    "pyarrow",
    "ray",
    "sklearn",
    "torchrl",
    "tqdm",
    "transformers",
    "triton",
}
HEAVY |= {"zstandard"}
TRAINERS = {"stable_baselines3", "sb3_contrib", "skrl", "rsl_rl", "rl_games", "tianshou"}
SOURCE = Path(__file__).parents[1] / "src"

SEED = "import random, numpy, torch; torch.manual_seed(0), numpy.random.seed(0), random.seed(0)"
REPORT = """
import json, logging, multiprocessing, os, sys, warnings
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "start method": multiprocessing.get_start_method(allow_none=True),
    "environment": dict(os.environ),
    "threads": torch.get_num_threads(),
    "default dtype": str(torch.get_default_dtype()),
    "gradients": torch.is_grad_enabled(),
    "random state": [torch.rand(1).item(), numpy.random.random(), random.random()],
    "warning filters": [repr(entry) for entry in warnings.filters],
    "log handlers": [repr(entry) for entry in logging.getLogger().handlers],
}))
"""


def states_after(*imports: str) -> list[dict[str, Any]]:
    """What a new interpreter, not a forked one, looks like after each line of imports."""
    program = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
    for line in imports:
        program += f"{SEED}\n{line}\n{REPORT}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def states() -> list[dict[str, Any]]:
    """After the imports of the dependencies, and after those of the rooms behind them."""
    dependencies = "import torch, tensordict, tensordict.nn, gymnasium, gymnasium.vector"
    rooms = "import flatroll, " + ", ".join(f"flatroll.{room}" for room in [*ROOMS, "trainers"])
    return states_after(dependencies, rooms)


@pytest.fixture(scope="module")
def before(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The dependencies alone: what they load and change is theirs."""
    return states[0]


@pytest.fixture(scope="module")
def after(states: list[dict[str, Any]]) -> dict[str, Any]:
    return states[1]


def test_importing_the_rooms_loads_nothing_heavy(before: dict[str, Any], after: dict[str, Any]) -> None:
    loaded = set(after["modules"]) - set(before["modules"])
    assert "flatroll" in loaded
    assert not loaded & (HEAVY | TRAINERS)


def test_a_trainer_s_file_loads_that_trainer_alone() -> None:
    pytest.importorskip("stable_baselines3")
    program = (
        "from flatroll.trainers import sb3_buffer; import json, sys; print(json.dumps(list(sys.modules)))"
    )
    done = interpreters.run([sys.executable, "-c", program], kind=interpreters.OfLibraries, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert TRAINERS & loaded == {"stable_baselines3"}


@pytest.mark.parametrize(
    "part",
    [
        "start method",
        "environment",
        "threads",
        "default dtype",
        "gradients",
        "random state",
        "warning filters",
        "log handlers",
    ],
)
def test_importing_the_rooms_changes_nothing(
    part: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert after[part] == before[part]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_exports_each_name_once(room: str) -> None:  # ruff's RUF022 holds their order
    names = importlib.import_module(f"flatroll.{room}").__all__
    assert names
    assert len(names) == len(set(names))


@pytest.mark.parametrize("room", ROOMS)
def test_the_exports_of_a_room_resolve(room: str) -> None:
    module = importlib.import_module(f"flatroll.{room}")
    assert not [name for name in module.__all__ if not hasattr(module, name)]


def test_every_public_name_that_there_ever_was_can_still_be_imported() -> None:
    """A name leaves ``public_names.txt`` only with a release that says so."""
    names = Path(__file__).with_name("public_names.txt").read_text().split()
    places = [(name, *name.rsplit(".", 1)) for name in names]
    assert not [name for name, place, last in places if not hasattr(importlib.import_module(place), last)]


@pytest.mark.parametrize("room", ROOMS)
def test_the_exports_of_a_room_are_documented(room: str) -> None:
    module = importlib.import_module(f"flatroll.{room}")
    exports = {name: getattr(module, name) for name in module.__all__}
    assert module.__doc__
    assert not [name for name, value in exports.items() if is_code(value) and not own_docstring(value)]


def is_code(value: object) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)


def own_docstring(value: Any) -> str:
    """The docstring written for a class or function, not the signature that a dataclass puts in its place."""
    text = value.__doc__ or ""
    return "" if text.startswith(f"{value.__name__}(") else text
