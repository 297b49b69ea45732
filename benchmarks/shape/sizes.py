"""Counts lines, functions and comments of each folder, and finds the longest file and function.

``python -m benchmarks.shape.sizes [CHECKOUT]`` prints the table for this checkout or for another.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure.timing import table
from benchmarks.shape.imports import ROOMS, ROOT, files_of, import_graph, longest_chain

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT_TOKENS = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Sizes:
    """What is counted in one file; ``tokens`` and ``longest_function`` exclude docstrings."""

    lines: int
    code: int
    tokens: int
    comments: int
    functions: int
    longest_function: int


def docstring_lines(node: ast.AST) -> set[int]:
    """The line numbers of a node's own docstring."""
    if not isinstance(node, DOCUMENTED) or ast.get_docstring(node) is None:
        return set()
    text = node.body[0]
    return set(range(text.lineno, (text.end_lineno or text.lineno) + 1))


def sizes_of(file: Path) -> Sizes:
    """Count the lines of one file."""
    source = file.read_text()
    nodes = list(ast.walk(ast.parse(source)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    documented = {line for node in nodes for line in docstring_lines(node)}
    code: set[int] = set()
    comments: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in LAYOUT_TOKENS:
            code.update(range(token.start[0], token.end[0] + 1))
            tokens += not (token.type == tokenize.STRING and token.start[0] in documented)
    code -= documented
    lengths = [(f.end_lineno or f.lineno) - f.lineno + 1 - len(docstring_lines(f)) for f in functions]
    return Sizes(
        source.count("\n"), len(code), tokens, len(comments), len(functions), max(lengths, default=0)
    )


def main(root: Path = ROOT) -> None:
    """Print the table of the rooms and the longest import chain."""
    folders = Counter((room, file.parent) for room in ROOMS for file in files_of(room, root))
    sizes = {room: [sizes_of(file) for file in files_of(room, root)] for room in ROOMS}
    sizes["all"] = [size for room in ROOMS for size in sizes[room]]
    rows = []
    for room, files in sizes.items():
        lines, code = sum(f.lines for f in files), sum(f.code for f in files)
        numbers = [
            len(files),
            max(count for (name, _), count in folders.items() if room in ("all", name)),
            lines,
            f"{1000 * sum(f.functions for f in files) / lines:.0f}",
            f"{100 * sum(f.comments for f in files) / code:.1f}",
            max(f.lines for f in files),
            max(f.longest_function for f in files),
        ]
        rows.append([room, *map(str, numbers)])
    per = ["functions per 1,000 lines", "comments per 100 lines of code", "longest file", "longest function"]
    print(table(["room", "files", "in the widest folder", "lines", *per], rows))
    chain = longest_chain(import_graph(root))
    print(f"\nLongest import chain, {len(chain)} files: {' > '.join(chain)}")


if __name__ == "__main__":
    main(*(Path(word).resolve() for word in sys.argv[1:]))
