"""Notebooks as pages: plain-text sources are executed and written as Markdown with their outputs."""

import base64
import hashlib
import html
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


def is_notebook(path: Path) -> bool:
    return path.read_text().startswith("# ---\n# jupyter:")


def executed(sources: Sequence[Path], cache: Path) -> dict[Path, Any]:
    """The notebooks with their outputs, two at a time.

    What ran is kept in ``cache`` under a name made of the notebook, the package's code and the installed versions:
    it runs again when one of them changes. The site and the tests keep theirs in one place, so each runs once.
    """
    package = hashlib.sha256(sys.version.encode())
    package.update(repr(sorted(f"{one.name} {one.version}" for one in distributions())).encode())
    for path in sorted((ROOT / "src" / "flatroll").glob("*/**/*.py")):
        if "examples" not in path.relative_to(ROOT).parts:
            package.update(path.read_bytes())
    cache.mkdir(parents=True, exist_ok=True)

    def run(source: Path) -> Any:
        key = hashlib.sha256(source.read_bytes() + package.digest()).hexdigest()
        kept = cache / f"{source.stem}-{key[:16]}.ipynb"
        if kept.exists():
            return nbformat.read(kept, as_version=4)
        notebook = jupytext.read(source)
        with TemporaryDirectory() as folder:
            place = {"metadata": {"path": folder}}
            quiet = ["--log-level=ERROR"]
            NotebookClient(notebook, timeout=300, resources=place, extra_arguments=quiet).execute()

        # Renamed once it is whole: another process may look for it now.
        with NamedTemporaryFile("w", dir=cache, suffix=".part", delete=False) as file:
            nbformat.write(notebook, file)
        Path(file.name).replace(kept)
        return notebook

    # One alone runs in this thread: what nbclient leaves in another, an event loop, is told of when that thread ends.
    if len(sources) == 1:
        return {sources[0]: run(sources[0])}

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(sources, threads.map(run, sources), strict=True))


def notebook_page(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """An executed notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(f"```python\n{cell.source}\n```")
            parts += [shown(output, name, pictures) for output in cell.outputs]
    return "\n\n".join(parts) + "\n", pictures


def shown(output: Any, name: str, pictures: dict[str, bytes]) -> str:
    """One output of a cell as Markdown; a picture is added to ``pictures``."""
    if output.output_type == "stream":
        return as_text(output.text)
    data = output.get("data", {})
    if "image/png" in data:
        file = f"{name}-{len(pictures)}.png"
        pictures[file] = base64.b64decode(data["image/png"])
        return f"![What the cell above draws]({file})"
    if "text/html" in data:
        # On one line: a blank line would end the block for Markdown.
        return f'<div class="output">{" ".join(data["text/html"].split())}</div>'
    return as_text(data.get("text/plain", ""))


def as_text(text: str) -> str:
    """Printed text as a block, without the codes that colour a terminal."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()
    return f'<pre class="output">{html.escape(plain)}</pre>' if "```" in plain else f"```text\n{plain}\n```"
