"""What an adapter says when its trainer is missing, or of a version that is not supported."""

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from flatroll.trainers import versions

ROOT = Path(__file__).parents[2]
# File of trainers: (extra, distribution on PyPI, package).
ADAPTERS = {
    "rl_games": ("rl-games", "rl-games", "rl_games"),
    "rsl_rl": ("rsl-rl", "rsl-rl-lib", "rsl_rl"),
    "sb3": ("sb3", "stable-baselines3", "stable_baselines3"),
    "sb3_buffer": ("sb3", "stable-baselines3", "stable_baselines3"),
    "sb3_recurrent": ("sb3", "sb3-contrib", "sb3_contrib"),
    "skrl": ("skrl", "skrl", "skrl"),
    "tianshou": ("tianshou", "tianshou", "tianshou"),
    "torchrl": ("torchrl", "torchrl", "torchrl"),
}


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import an adapter as if for the first time."""

    def load(name: str) -> Any:
        monkeypatch.delitem(sys.modules, f"flatroll.trainers.{name}", raising=False)
        return import_module(f"flatroll.trainers.{name}")

    return load


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_unsupported_version_is_named_with_the_range(
    name: str, monkeypatch: pytest.MonkeyPatch, anew: Any
) -> None:
    extra, distribution, _ = ADAPTERS[name]
    monkeypatch.setattr(versions, "version", lambda asked: {distribution: "0.9.1"}[asked])
    supported = rf"{distribution}>=[\d.]+,<[\d.]+ is supported, but version 0\.9\.1 is installed"
    with pytest.raises(ImportError, match=rf"{supported}\): pip install 'flatroll\[{extra}\]'"):
        anew(name)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_trainer_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch, anew: Any) -> None:
    extra, _, package = ADAPTERS[name]
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]  # None: importing it is an error
    with pytest.raises(ImportError, match=rf"is needed .*{package}.*: pip install 'flatroll\[{extra}\]'"):
        anew(name)


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_range_is_that_of_the_extra(name: str) -> None:
    extra, distribution, _ = ADAPTERS[name]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (declared,) = (
        line for line in project["optional-dependencies"][extra] if line.startswith(f"{distribution}>=")
    )
    text = (ROOT / "src" / "flatroll" / "trainers" / f"{name}.py").read_text()
    called = re.search(r'trainer_imports\("(.+?)", "(.+?)", "(.+?)", "(.+?)"', text)
    assert called is not None
    assert (declared, extra) == ("{}>={},<{}".format(*called.groups()[:3]), called[4])


@pytest.mark.parametrize(
    ("installed", "good"),
    [("2.1", True), ("2.1.0rc1", True), ("2.13.0+cpu", True), ("2.0.9", False), ("3.0", False), ("3", False)],
)
def test_versions_are_compared_as_numbers(
    installed: str, good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", lambda asked: installed)
    if good:
        versions.require_version("trainer", "2.1", "3")
    else:
        with pytest.raises(ImportError, match=re.escape(f"version {installed} is installed")):
            versions.require_version("trainer", "2.1", "3")
