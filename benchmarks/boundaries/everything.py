"""Runs every library in an environment of its own, and writes the page: ``make boundaries``.

``requirements/MODULE.txt`` holds what a library's environment holds; it lies under ``.venv-versions/boundaries-MODULE``
and is made again when that file changes. A library that cannot be installed is skipped with pip's reason.

``python -m benchmarks.boundaries.everything [--libraries NAME ...] [--json FILE] [--keep-page]``
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.boundaries.page import write_page
from benchmarks.boundaries.rows import ROOT, Entry, packages, run_row, skipped
from benchmarks.boundaries.text import as_text

REQUIREMENTS = Path(__file__).parent / "requirements"
ENVIRONMENTS = ROOT / ".venv-versions"
CORES = 2
DEFAULT_JSON = ROOT / "out/bench/boundaries.json"


def interpreter(name: str) -> tuple[str, str]:
    """Return the interpreter of a library's environment, which is made if need be, and why there is none.

    Ours runs in the environment of this process. The other ones hold ``requirements/MODULE.txt``.
    """
    wanted = REQUIREMENTS / f"{name}.txt"
    if not wanted.is_file():
        return sys.executable, ""

    folder = ENVIRONMENTS / f"boundaries-{name}"
    python = folder / "bin/python"
    ready = folder / ".ready"
    if ready.is_file() and ready.read_text() == wanted.read_text():
        return str(python), ""

    print(f"-- {name}: making its environment", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-r", str(wanted)]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return "", f"does not install: {(errors or ['pip failed'])[-1].removeprefix('ERROR: ')[:200]}"

    ready.write_text(wanted.read_text())
    return str(python), ""


def run_everything(names: list[str]) -> dict[str, Entry]:
    """Run the rows of packages, each in its environment, two at a time."""
    known = packages()

    def run(package: str) -> Entry:
        python, reason = interpreter(known[package])
        if reason:
            return skipped(reason)

        begun = time.perf_counter()
        row = run_row(package, known[package], python)
        print(f"-- {package}: {time.perf_counter() - begun:.0f} s", flush=True)
        return row

    with ThreadPoolExecutor(CORES) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def main() -> int:
    """Run the table; return 1 if our own row is not zero."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--libraries", nargs="+", metavar="NAME", help="packages to run (default: all)")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, metavar="FILE")
    parser.add_argument("--keep-page", action="store_true", help="do not write the page")
    arguments = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that it starts: the networks are tiny
    rows = run_everything(arguments.libraries or list(packages()))
    print(as_text(rows))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if not arguments.keep_page and arguments.libraries is None:
        write_page(rows)

    ours = rows.get("flatroll", {"fixtures": {}})["fixtures"].values()
    return int(any(cell["wrong"] for cell in ours))


if __name__ == "__main__":
    sys.exit(main())
