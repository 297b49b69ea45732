"""Builds the import graph of the source files, and finds its longest chain and its cycles.

Imports in functions and under ``TYPE_CHECKING`` count, too. A name that a room's ``__init__`` re-exports counts as
imported from the file that defines it.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGE = "flatroll"
#: Room -> the rooms that it may import.
ARROWS: dict[str, tuple[str, ...]] = {
    "layout": (),
    "sharing": ("layout",),
    "kernels": (),
    "disk": ("layout", "kernels"),
    "specs": ("layout",),
    "wrappers": ("layout", "specs"),
    "rollouts": ("layout", "specs", "sharing", "wrappers"),
    "buffers": ("layout", "kernels", "specs", "sharing", "disk"),
    "modules": ("layout", "kernels"),
    "estimators": ("layout", "kernels", "modules"),
    "trees": ("layout", "kernels", "specs", "buffers"),
    "datasets": ("layout", "sharing", "disk", "specs", "wrappers", "rollouts", "buffers"),
    "text": ("layout", "buffers"),
    "deploy": ("layout", "disk", "wrappers", "modules"),
    "trainers": ("layout", "kernels", "specs", "wrappers", "rollouts", "buffers", "modules", "estimators"),
}
ROOMS = tuple(ARROWS)
#: The outer ring: these rooms, and in core rooms the folders for Ray, Triton, JAX and games.
OUTER_ROOMS = ("trees", "datasets", "text", "trainers", "deploy", "export")
OUTER_FOLDERS = (
    "buffers.on_ray",
    "kernels.recurrent",
    "modules.backends.on_triton",
    "rollouts.games",
    "rollouts.workers.on_ray",
    "sharing.on_ray",
    "wrappers.atari",
    "wrappers.games",
    "wrappers.on_jax",
)
ROOT = Path(__file__).resolve().parents[2]  # of the checkout

Graph = Mapping[str, set[str]]  # file -> the files that it imports, as dotted names without the package's


def is_outer(file: str) -> bool:
    """Return whether a file belongs to the outer ring; ``file`` is its dotted name."""
    if file.split(".")[0] in OUTER_ROOMS:
        return True
    return any(file == folder or file.startswith(f"{folder}.") for folder in OUTER_FOLDERS)


def files_of(room: str, root: Path = ROOT) -> Iterator[Path]:
    """List the Python files of a room, subfolders included; three rooms are links to folders at the root."""
    yield from sorted((root / "src" / PACKAGE / room).rglob("*.py"))


def dotted(file: Path, root: Path = ROOT) -> str:
    """Return a file's module name: ``src/flatroll/buffers/index/ring.py`` is ``"buffers.index.ring"``."""
    parts = file.relative_to(root / "src" / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(node: ast.AST) -> list[str]:
    """The full names that an import statement makes available, ``from a import b`` as ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return which file imports which; an import through ``__init__`` counts for the defining file."""
    trees = {
        dotted(file, root): ast.parse(file.read_text()) for room in ROOMS for file in files_of(room, root)
    }
    passed_on = {  # what each file offers under its own name though another defines it
        f"{file}.{alias.asname or alias.name}": f"{node.module}.{alias.name}".removeprefix(f"{PACKAGE}.")
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{PACKAGE}.")
        for alias in node.names
    }

    def definer(name: str) -> str | None:
        """Return the file that defines a dotted name; None if it is outside the library."""
        while name in passed_on and name not in trees:
            name = passed_on[name]
        while name and name not in trees:
            name = name.rpartition(".")[0]
        return name or None

    folders = {file.rpartition(".")[0] for file in trees}
    graph: dict[str, set[str]] = {}
    for file, tree in trees.items():
        if file in folders:  # an __init__ only passes names on
            continue
        names = [name for node in ast.walk(tree) for name in imported_names(node)]
        targets = {definer(n.removeprefix(f"{PACKAGE}.")) for n in names if n.startswith(f"{PACKAGE}.")}
        graph[file] = {target for target in targets if target is not None} - {file} - folders
    return graph


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest chain of files in which each imports the next, ignoring edges that close a cycle."""
    closing = {(circle[-2], circle[-1]) for circle in circles(graph)}

    @cache
    def chain(file: str) -> tuple[str, ...]:
        return (file, *longest(target for target in graph[file] if (file, target) not in closing))

    def longest(files: Iterable[str]) -> tuple[str, ...]:
        best: tuple[str, ...] = ()
        for file in sorted(files):
            best = max(best, chain(file), key=len)
        return best

    return list(longest(graph))


def circles(graph: Graph) -> list[list[str]]:
    """List the import cycles, one for each edge that closes one in a depth-first search."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(file: str, path: list[str]) -> None:
        if file in path:
            found.append([*path[path.index(file) :], file])
        elif file not in done:
            for target in sorted(graph.get(file, ())):
                walk(target, [*path, file])
            done.add(file)

    for file in sorted(graph):
        walk(file, [])
    return found


def grouped(graph: Graph, depth: int) -> dict[str, set[str]]:
    """Return the graph between folders: ``depth`` 1 for top-level folders, 2 for their subfolders."""

    def folder(file: str) -> str:
        return ".".join(file.split(".")[:depth])

    arrows: dict[str, set[str]] = {}
    for file, targets in graph.items():
        arrows.setdefault(folder(file), set()).update(map(folder, targets))
    return {name: targets - {name} for name, targets in arrows.items()}
