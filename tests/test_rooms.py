"""The rooms stand in one order and import only what lies below them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Room: the rooms that it may import.
ARROWS: dict[str, set[str]] = {
    "layout": set(),
    "kernels": set(),
    "wrappers": {"layout"},
    "rollouts": {"layout", "wrappers"},
    "buffers": {"layout", "kernels"},
    "modules": {"layout", "kernels"},
    "estimators": {"layout", "kernels", "modules"},
}


def modules_of(room: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / room).rglob("*.py")):
        yield path, ast.parse(path.read_text(), filename=str(path))


def imported_names(node: ast.AST) -> list[str]:
    """The full names that an import statement makes available, ``from a import b`` as ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def forbidden_arrows(room: str, tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    allowed = ARROWS[room] | {room}
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
    found = [
        place(path, node)
        for path, tree in modules_of(room)
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
    "source", ["from flatroll.layout import run_ends", "import flatroll.wrappers.spaces", "import os"]
)
def test_the_arrow_check_passes_what_is_allowed(source: str) -> None:
    assert not list(forbidden_arrows("wrappers", ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["os.environ['A']", "os.getenv('A')", "from os import environ", "from os import getenv"]
)
def test_the_environment_check_sees_every_form(source: str) -> None:
    assert any(reads_environment(node) for node in ast.walk(ast.parse(source)))
