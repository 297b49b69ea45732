"""Counts how dense the code of each room is: ``python -m benchmarks.shape.density [CHECKOUT]`` prints the table.

Only lines of code count: docstrings, comments and blank lines are left out, except for the blank lines inside
functions, which have a column of their own.
"""

import ast
import sys
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from benchmarks.measure.timing import table
from benchmarks.shape.imports import PACKAGE, ROOMS, ROOT, files_of
from benchmarks.shape.sizes import docstring_lines, sizes_of

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
    ast.Assert,
)
#: Functions above this cyclomatic complexity are counted.
COMPLEX = 15


@dataclass(frozen=True)
class Density:
    """What is counted in some files."""

    code_lines: int = 0
    tokens: int = 0
    parallel_assignments: int = 0
    conditional_expressions: int = 0
    blank_lines_in_functions: int = 0
    functions: int = 0
    complex_functions: int = 0

    def __add__(self, other: "Density") -> "Density":
        """Return the counts of both."""
        return Density(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def cells(self) -> list[str]:
        """Return code lines, tokens and complex functions as they are, the other counts per 1,000 lines of code."""
        per_1000 = 1000 / self.code_lines
        return [
            f"{self.code_lines:,}",
            f"{self.tokens:,}",
            f"{self.tokens * per_1000:,.0f}",
            f"{self.parallel_assignments * per_1000:.1f}",
            f"{self.conditional_expressions * per_1000:.1f}",
            f"{self.blank_lines_in_functions * per_1000:.1f}",
            f"{self.functions * per_1000:.0f}",
            f"{self.complex_functions}",
        ]


def is_parallel(node: ast.AST) -> bool:
    """Return whether a node is an assignment ``a, b = x, y``."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def complexity(function: ast.AST) -> int:
    """Return the cyclomatic complexity of a function, with those of the functions in it."""
    count = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1

    return count


def density_of(file: Path) -> Density:
    """Count one file."""
    sizes = sizes_of(file)
    source = file.read_text()
    lines = source.splitlines()
    nodes = list(ast.walk(ast.parse(source)))
    documented = {line for node in nodes for line in docstring_lines(node)}

    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    in_functions: set[int] = set()
    for function in functions:
        in_functions.update(range(function.lineno, (function.end_lineno or function.lineno) + 1))
    blank = [line for line in in_functions - documented if not lines[line - 1].strip()]

    return Density(
        code_lines=sizes.code,
        tokens=sizes.tokens,
        parallel_assignments=sum(map(is_parallel, nodes)),
        conditional_expressions=sum(isinstance(node, ast.IfExp) for node in nodes),
        blank_lines_in_functions=len(blank),
        functions=len(functions),
        complex_functions=sum(complexity(function) > COMPLEX for function in functions),
    )


def total(files: Iterable[Path]) -> Density:
    """Count several files together."""
    return sum(map(density_of, files), Density())


def densities(root: Path = ROOT) -> Mapping[str, Density]:
    """Return the counts of each room, of the files beside the rooms (``"-"``), and of all."""
    found = {room: total(files_of(room, root)) for room in ROOMS}
    found["-"] = total((root / "src" / PACKAGE).glob("*.py"))
    found["all"] = sum(found.values(), Density())
    return found


def density_table(root: Path = ROOT) -> str:
    """Return the table, a row for each room."""
    head = [
        "room",
        "code lines",
        "tokens",
        "tokens per 1,000 lines",
        "parallel assignments",
        "conditional expressions",
        "blank lines in functions",
        "functions",
        f"of complexity above {COMPLEX}",
    ]
    return table(head, [[room, *density.cells()] for room, density in densities(root).items()])


if __name__ == "__main__":
    print(density_table(*(Path(word).resolve() for word in sys.argv[1:])))
