"""Prints what a reader of the code has to know, before and after: ``python -m benchmarks.shape.house OTHER``.

``OTHER`` is a checkout of the version before; without it the table has one column. The lines, functions, private
names and annotations are read from the sources; the functions that a call enters are counted while it runs, in a
process for each checkout. A second table shows how dense the lines of each room are here.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import flatroll
from benchmarks.measure.timing import table
from benchmarks.shape.density import density_table
from benchmarks.shape.hops import count_hops
from benchmarks.shape.imports import PACKAGE, ROOMS, ROOT, files_of
from benchmarks.shape.sizes import sizes_of
from flatroll.buffers import ReplayBuffer

PUBLIC_IN_NAMEDTUPLES = {"_replace", "_asdict", "_fields", "_make"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def product_files(checkout: Path) -> list[Path]:
    """List the files of the library, without benchmarks, examples and tests."""
    beside = [checkout / "src" / PACKAGE / name for name in ("__init__.py", "__main__.py", "export.py")]
    return [file for room in ROOMS for file in files_of(room, checkout)] + beside


def reads_private(node: ast.AST) -> bool:
    """Return whether a node is ``other._name``: a private attribute of anything but ``self``, ``cls``, ``super()``."""
    if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    own = ast.unparse(node.value) in ("self", "cls", "super()")
    return not own and node.attr not in PUBLIC_IN_NAMEDTUPLES


def parameters(node: ast.AST) -> list[ast.arg]:
    """List the parameters of a function."""
    if not isinstance(node, Function):
        return []
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [parameter for parameter in every if parameter is not None]


def is_any(parameter: ast.arg) -> bool:
    """Return whether a parameter has the type ``Any``."""
    return isinstance(parameter.annotation, ast.Name) and parameter.annotation.id == "Any"


def read_sources(checkout: Path) -> dict[str, str]:
    """Return the figures that the sources of a checkout show."""
    files = product_files(checkout)
    sizes = [sizes_of(file) for file in files]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    code, functions = sum(size.code for size in sizes), sum(size.functions for size in sizes)
    return {
        "files": f"{len(files):,}",
        "files with fewer than 60 lines of code": f"{sum(size.code < 60 for size in sizes)}",
        "code-only lines": f"{code:,}",
        "lines of a file, median": f"{median(size.lines for size in sizes):.0f}",
        "lines of a file, longest": f"{max(size.lines for size in sizes):,}",
        "functions": f"{functions:,}",
        "functions per 1,000 code-only lines": f"{1000 * functions / code:.0f}",
        "lines of the longest function": f"{max(size.longest_function for size in sizes)}",
        "accesses to another object's privates": f"{sum(map(reads_private, nodes))}",
        "parameters typed `Any`": f"{sum(is_any(p) for node in nodes for p in parameters(node))}",
    }


def watch_calls() -> dict[str, str]:
    """Return the figures that this process's flatroll shows when it runs."""
    own = [cls for cls in ReplayBuffer.__mro__ if cls.__module__.startswith(f"{PACKAGE}.")]
    found = {"classes in the inheritance of `ReplayBuffer`": f"{len(own)}"}
    for call, functions in count_hops().items():
        found[f"functions / files entered: {call}"] = f"{len(functions)} / {len({f.file for f in functions})}"
    return found


def figures(checkout: Path) -> dict[str, str]:
    """Return all figures of a checkout; its code runs in a separate process."""
    path = os.pathsep.join([str(checkout / "src"), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--watch"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    seen: dict[str, str] = json.loads(done.stdout)
    assert Path(seen.pop("package")).is_relative_to(checkout / "src")
    return read_sources(checkout) | seen


def main(words: list[str]) -> None:
    """Print the table."""
    if words == ["--watch"]:
        print(json.dumps({"package": flatroll.__file__, **watch_calls()}))
        return
    after = figures(ROOT)
    before = figures(Path(words[0]).resolve()) if words else {}
    rows = [[name, *([before[name]] if words else []), value] for name, value in after.items()]
    print(table(["", "before", "after"] if words else ["", "now"], rows))
    print(f"\nPer 1,000 lines of code:\n\n{density_table()}")


if __name__ == "__main__":
    main(sys.argv[1:])
