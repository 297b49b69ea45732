"""The rooms stand in one order and import only what lies below them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.shape.imports import (
    ARROWS,
    OUTER_FOLDERS,
    circles,
    files_of,
    grouped,
    import_graph,
    imported_names,
    is_outer,
    longest_chain,
)

ROOT = Path(__file__).parents[1]

# Sub-rooms, each below those behind it: an import goes to an earlier one of its line.
SUB_ROOMS: dict[str, list[str]] = {
    "buffers": [
        "index",
        "columns",
        "storages",
        "samplers",
        "transforms",
        "steps",
        "remote",
        "checkpointers",
        "replay_buffer",
        "ensemble",
    ],
    "estimators": ["masked", "distributions", "functional", "values", "losses"],
    "kernels": ["compiled", "rows", "slices"],
    "layout": ["keys", "boundaries", "inspect"],
    "modules": ["backends", "networks", "recurrent"],
    "rollouts": ["runner", "collector", "workers"],
    "wrappers": ["arrays", "source", "stream", "adapt_env", "testing"],
}


@cache
def modules_of(room: str) -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(), filename=str(path))) for path in files_of(room)]


graph_of_rooms = cache(import_graph)


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def forbidden_arrows(room: str, tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    allowed = {*ARROWS[room], room, "__version__"}  # the last is no room
    for node in ast.walk(tree):
        for name in imported_names(node):
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if package == "flatroll" and target not in allowed:
                yield node, f"{room} imports {name}"


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
        return node.attr in {"environ", "environb", "getenv", "getenvb"}
    return any(
        name.startswith("os.") and name.rpartition(".")[2] in {"environ", "getenv"}
        for name in imported_names(node)
    )


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    found = [
        f"{place(path, node)} {text}"
        for path, tree in modules_of(room)
        for node, text in forbidden_arrows(room, tree)
    ]
    assert not found


@pytest.mark.parametrize("room", ARROWS)
def test_the_page_for_contributors_says_what_a_room_may_import(room: str) -> None:
    (row,) = re.findall(rf"^\| `{room}/` \|.*", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert row.split("|")[3].strip() == ", ".join(ARROWS[room])


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_has_no_relative_import(room: str) -> None:
    found = [
        place(path, node)
        for path, tree in modules_of(room)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert not found


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_does_not_import_torchrl(room: str) -> None:
    """But for the adapter to it."""
    found = [
        place(path, node)
        for path, tree in modules_of(room)
        if (room, path.name) != ("trainers", "torchrl.py")
        for node in ast.walk(tree)
        if any(name.partition(".")[0] == "torchrl" for name in imported_names(node))
    ]
    assert not found


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_reads_no_environment_variable(room: str) -> None:
    found = [
        place(path, node)
        for path, tree in modules_of(room)
        for node in ast.walk(tree)
        if reads_environment(node)
    ]
    assert not found


@pytest.mark.parametrize("depth", [1, 2, 4], ids=["rooms", "sub-rooms", "files"])
def test_arrows_go_one_way(depth: int) -> None:
    """Between rooms, between the sub-rooms of a room and the files beside them, and between files."""
    assert circles(grouped(graph_of_rooms(), depth)) == []


def test_the_core_imports_nothing_of_the_outer_ring() -> None:
    """It asks registries, which the ``__init__`` of rooms fill: the graph leaves these out."""
    core = {file: targets for file, targets in graph_of_rooms().items() if not is_outer(file)}
    found = {file: outer for file, targets in core.items() if (outer := set(filter(is_outer, targets)))}
    assert found == {}


@pytest.mark.parametrize("folder", OUTER_FOLDERS)
def test_a_folder_of_the_outer_ring_is_there(folder: str) -> None:
    assert any(file.startswith(f"{folder}.") for file in graph_of_rooms())


@pytest.mark.parametrize("room", SUB_ROOMS)
def test_a_sub_room_imports_only_those_below_it(room: str) -> None:
    arrows = grouped(graph_of_rooms(), 2)
    order = [f"{room}.{name}" for name in SUB_ROOMS[room]]
    assert set(order) <= set(arrows), "a name of SUB_ROOMS is gone"
    assert not [(name, above) for i, name in enumerate(order) for above in order[i:] if above in arrows[name]]


@pytest.mark.parametrize(
    ("graph", "chain", "circle"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, ["a", "b", "c"], []),
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, ["a", "b", "c"], []),
        ({"a": {"b"}, "b": {"a"}}, ["a", "b"], [["a", "b", "a"]]),
        ({"a": {"a"}}, ["a"], [["a", "a"]]),
    ],
)
def test_chains_and_circles_are_found(
    graph: dict[str, set[str]], chain: list[str], circle: list[list[str]]
) -> None:
    assert longest_chain(graph) == chain
    assert circles(graph) == circle


def test_the_import_graph_looks_through_what_rooms_pass_on(tmp_path: Path) -> None:
    sources = {
        "layout/__init__.py": "from flatroll.layout.keys import KEY",
        "layout/keys.py": "KEY = 'key'",
        "layout/parts/__init__.py": "",
        "layout/parts/one.py": "from flatroll.layout import KEY",
        "kernels/scan.py": "def late():\n    from flatroll.layout.parts import one",
    }
    for name, source in sources.items():
        file = tmp_path / "src" / "flatroll" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    assert import_graph(tmp_path) == {
        "layout.keys": set(),
        "layout.parts.one": {"layout.keys"},
        "kernels.scan": {"layout.parts.one"},
    }


def test_the_arrows_form_no_cycle() -> None:
    order = list(ARROWS)
    assert all(
        order.index(below) < order.index(room) for room, allowed in ARROWS.items() for below in allowed
    )


@pytest.mark.parametrize(
    ("source", "violation"),
    [
        ("from flatroll.buffers import ReplayBuffer", "wrappers imports flatroll.buffers.ReplayBuffer"),
        ("import flatroll.rollouts.collector", "wrappers imports flatroll.rollouts.collector"),
        ("from flatroll import kernels", "wrappers imports flatroll.kernels"),
        ("def late():\n    from flatroll.examples import demo", "wrappers imports flatroll.examples.demo"),
        ("import flatroll", "wrappers imports flatroll"),
    ],
)
def test_the_arrow_check_sees_every_form_of_import(source: str, violation: str) -> None:
    assert [text for _, text in forbidden_arrows("wrappers", ast.parse(source))] == [violation]


@pytest.mark.parametrize(
    "source", ["from flatroll.layout import run_ends", "import flatroll.wrappers.source", "import os"]
)
def test_the_arrow_check_passes_what_is_allowed(source: str) -> None:
    assert not list(forbidden_arrows("wrappers", ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["os.environ['A']", "os.getenv('A')", "from os import environ", "from os import getenv"]
)
def test_the_environment_check_sees_every_form(source: str) -> None:
    assert any(reads_environment(node) for node in ast.walk(ast.parse(source)))
