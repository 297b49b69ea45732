"""What is built holds the package and nothing else, and works away from the repository."""

import importlib.util
import os
import shutil
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

from flatroll.examples.common import programs

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "flatroll"
LINKED = (
    "wrappers",
    "buffers",
    "estimators",
    "examples",
)  # folders at the root that the package reaches by links
SHIPPED_EXAMPLES = {"__init__.py", "common.py", "last_action.py", "report.py"}  # what the programs import
SHIPPED_EXAMPLES |= {"memory_tasks.py", "text_runs.py"}
SHIPPED_EXAMPLES.add("curves.py")  # and what draws their runs
SHIPPED_EXAMPLES |= {f"{name}.py" for name in programs()}  # what `flatroll run` and `flatroll demo` run


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


def package_files() -> set[str]:
    """The files that the wheel should hold, by their names in it."""
    real = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix in (".py", ".typed")]
    inside = {str(path.relative_to(PACKAGE.parent)) for path in real}
    inside -= {name for name in inside if name.split("/")[1] in LINKED}
    for folder in LINKED:
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")}
        inside |= {
            f"flatroll/{file}" for file in files if folder != "examples" or file.name in SHIPPED_EXAMPLES
        }
    return {
        name
        for name in inside
        if name.count("/") == 2 or not name.startswith("flatroll/examples/")  # no example of a subfolder
    }


@pytest.mark.parametrize("name", LINKED)
def test_a_link_is_relative_and_leads_to_the_real_folder(name: str) -> None:
    link = PACKAGE / name
    assert os.readlink(link) == f"../../{name}"
    assert (link / "__init__.py").is_file()
    assert not (ROOT / name).is_symlink()


def test_there_is_no_other_link_and_the_builds_leave_these_out(project: dict[str, Any]) -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_symlink()} == set(LINKED)
    for target in ("wheel", "sdist"):
        left_out = set(project["tool"]["hatch"]["build"]["targets"][target]["exclude"])
        assert left_out >= {f"/src/flatroll/{name}" for name in LINKED}


def test_no_folder_at_the_root_hides_a_package() -> None:
    """At the root of a checkout ``import datasets`` finds Hugging Face's package, or nothing."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    own = {*LINKED, "benchmarks", "tests", "docs", "findings", "src", "build", "dist", "out"}
    assert folders <= own
    if importlib.util.find_spec("datasets") is None:
        return
    found = run(sys.executable, "-c", "import datasets; print(datasets.__file__)", cwd=ROOT)
    assert not Path(found.strip()).is_relative_to(ROOT / "src")
    assert Path(found.strip()).parent.parent.name == "site-packages"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)
    package = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert package == package_files()
    assert len(package) > 250


def test_a_copy_whose_links_are_text_files_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """As in a checkout made without symbolic links: each link is a file that holds the path."""
    copy = tmp_path / "copy"
    for name in ("src", "wrappers", "buffers", "estimators", "examples"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in LINKED:
        link = copy / "src" / "flatroll" / name
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, copy, cwd=tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as built, zipfile.ZipFile(wheel) as expected:
        assert contents(built) == contents(expected)


def contents(archive: zipfile.ZipFile) -> dict[str, bytes]:
    return {name: archive.read(name) for name in archive.namelist()}


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
    assert names >= {f"{folder}/__init__.py" for folder in (*LINKED, "benchmarks")}
    assert names >= {f"src/{name}" for name in package_files() if name.split("/")[1] not in LINKED}
    assert not [name for name in names if "__pycache__" in name]
    assert names >= {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "Makefile",
    }
    assert names >= {"constraints.txt", "tests/test_packaging.py", "CITATION.cff", "mkdocs.yml"}
    assert not [name for name in names if name.startswith(".venv")]


def is_room(name: str) -> bool:
    return name.count("/") == 2 and name.endswith("/__init__.py")


def test_the_installed_wheel_imports_and_collects_in_another_directory(
    installed: Path, tmp_path: Path
) -> None:
    rooms = sorted(
        Path(name).parent.as_posix().replace("/", ".") for name in package_files() if is_room(name)
    )
    assert len(rooms) == 16  # 15 rooms and the examples
    smoke = """
import flatroll
from flatroll.layout import audit
from flatroll.modules import actor
from flatroll.rollouts import Collector
from flatroll.wrappers.testing import Script, ScriptedVectorEnv

env = ScriptedVectorEnv(Script(2, lengths=[3, 5]))
batches = list(Collector(env, actor(env, norm=False), frames_per_batch=20, total_frames=40))
assert [len(batch) for batch in batches] == [20, 20] and not any(map(audit, batches))
print(flatroll.__file__)
"""
    program = "".join(f"import {name}\n" for name in rooms) + smoke
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
    listed = run(installed.parent / "flatroll", "run", cwd=tmp_path)
    assert {line.split()[0] for line in listed.splitlines()} == set(programs())


def test_the_wheel_names_its_pythons_and_one_version_everywhere(wheel: Path, project: dict[str, Any]) -> None:
    import flatroll

    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().partition("\n\n")[0].splitlines()
    assert f"Version: {flatroll.__version__}" in lines and "Requires-Python: >=3.11" in lines
    pythons = {line.rpartition(" :: ")[2] for line in lines if "Python :: 3." in line}
    assert pythons == {"3.11", "3.12", "3.13", "3.14"}
    assert "Description-Content-Type: text/markdown" in lines
    assert f"version: {flatroll.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    heading = next(
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    )
    assert heading.split()[1] == flatroll.__version__


def test_constraints_pin_versions_and_name_no_place() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert not [line for line in lines if not line.partition("==")[2] or "/" in line or "@" in line]


def test_all_is_every_user_extra_but_those_whose_pins_clash(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = everything.removeprefix("flatroll[").removesuffix("]").split(",")
    assert set(named) == set(extras) - {"all", "dev", "docs", "rl-games", "test", "tianshou", "torchrl"}
