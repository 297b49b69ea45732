"""What is built holds the package and nothing else, and works away from the repository."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from flatroll.benchmarks.shape import imports

ROOT = Path(__file__).parents[1]
ROOMS = set(imports.ROOMS) - {"trainers"}
FOLDERS = ROOMS | {"trainers", "examples", "benchmarks"}
SOURCE_FILES = {f"src/flatroll/{name}" for name in ("__init__.py", "__main__.py", "export.py", "py.typed")}


def run(*command: str | Path, cwd: Path) -> str:
    # Without PYTHONPATH, which may lead to a checkout instead of what is installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and sees the dependencies, not the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=folder)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def tracked(folder: str) -> set[str]:
    """The Python files of a folder at the root, as the wheel should name them."""
    return {f"flatroll/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}


def test_links_folders_and_build_lists_agree(project: dict[str, Any]) -> None:
    links = {path.name for path in (ROOT / "src" / "flatroll").iterdir() if path.is_symlink()}
    targets = project["tool"]["hatch"]["build"]["targets"]
    assert links == FOLDERS
    assert set(targets["wheel"]["only-include"]) == SOURCE_FILES | FOLDERS
    assert targets["wheel"]["sources"] == {"src/flatroll": "flatroll"} | {
        name: f"flatroll/{name}" for name in FOLDERS
    }
    assert set(targets["sdist"]["only-include"]) >= SOURCE_FILES | FOLDERS | {"tests"}
    assert set(project["tool"]["pyright"]["include"]) >= FOLDERS


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_a_link_is_relative_and_leads_to_the_real_folder(name: str) -> None:
    link = ROOT / "src" / "flatroll" / name
    assert os.readlink(link) == f"../../{name}"
    assert (link / "__init__.py").is_file()
    assert not (ROOT / name).is_symlink()


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)
    package = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    expected = {f"flatroll/{Path(name).name}" for name in SOURCE_FILES}
    assert package == expected.union(*(tracked(folder) for folder in FOLDERS))


def test_the_wheel_names_its_license_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        information = next(name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        assert f"{information}/licenses/LICENSE" in archive.namelist()
        assert "flatroll = flatroll.__main__:main" in archive.read(f"{information}/entry_points.txt").decode()


def test_the_sdist_holds_what_a_build_and_a_reader_need(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert not [member.name for member in members if member.issym()]
    assert names >= SOURCE_FILES | {f"{folder}/__init__.py" for folder in FOLDERS}
    assert names >= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"}
    assert names >= {"constraints.txt", "tests/test_packaging.py", "CITATION.cff", "mkdocs.yml"}
    assert not [name for name in names if name.startswith(".venv")]


def test_the_installed_wheel_imports_from_another_directory(installed: Path, tmp_path: Path) -> None:
    program = "; ".join(
        [
            "import flatroll",
            *(f"import flatroll.{name}" for name in sorted(FOLDERS)),
            "print(flatroll.__file__)",
        ]
    )
    printed = run(installed, "-c", program, cwd=tmp_path)
    assert Path(printed.strip()).is_relative_to(installed.parents[1])


def test_the_installed_wheel_adds_one_top_level_name(installed: Path) -> None:
    site = next((installed.parents[1] / "lib").glob("python*/site-packages"))
    added = {path.name for path in site.iterdir() if path.name != "dependencies.pth"}
    assert {name for name in added if not name.endswith(".dist-info")} == {"flatroll"}


def test_the_installed_commands_run(installed: Path, tmp_path: Path, project: dict[str, Any]) -> None:
    import flatroll

    version = f"flatroll {flatroll.__version__}\n"
    assert run(installed, "-m", "flatroll", "--version", cwd=tmp_path) == version
    assert run(installed.parent / "flatroll", "--version", cwd=tmp_path) == version


def test_constraints_pin_versions_and_name_no_place() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert not [line for line in lines if not line.partition("==")[2] or "/" in line or "@" in line]


def test_all_is_every_user_extra_but_those_whose_pins_clash(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = everything.removeprefix("flatroll[").removesuffix("]").split(",")
    assert set(named) == set(extras) - {"all", "dev", "docs", "rl-games", "tianshou", "torchrl"}
