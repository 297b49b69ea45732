"""What MkDocs does for the site besides rendering docs/: pages made of other files, links to them, versions.

Programs and notebooks of examples/, the changelog and the contributor's page become pages of the site. A link that
leads to such a file in the repository leads to its page in the site.
"""

import html
import json
import os.path
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import executed, is_notebook, notebook_page

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"(^(?P<fence>```+).*?^(?P=fence)[ \t]*$)", re.M | re.S)
LINK = re.compile(r"(\]\()([^)\s:#]+)")
COMMENT = re.compile(r"^<!-- (?:not run|run by .*?) -->\n", re.M)
CELL = re.compile(r"<(td|th)((?: [^>]*)?)>(.*?)</\1>", re.S)
TAG = re.compile(r"<[^>]*>")
# A tag, or what stands between two parts of a name, path or call: `_`, `.`, `=`, `,`, `/`, `(` or `[`.
TAG_OR_JOINT = re.compile(r"""<[^>]*>|(?<=[a-zA-Z0-9\])"';])[_.=,/(\[](?=[a-zA-Z"'&(\[])""")
# Code in a line of text or in a cell: a block of code stands in <pre>.
INLINE_CODE = re.compile(r"(?<!<pre>)(?<!<span></span>)<code>[^<]+</code>")
OPTION = re.compile(r"(?<![\w-])--[\w-]+")
WIDE = 32  # characters of code in a text, from which on it may need two lines of a phone
LONG = 40  # characters of a cell, from which on it is a text
FOREIGN = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>")

documented: set[str] = set()  # names that the pages of this build have anchors for

#: Page of the site -> file of the repository it shows.
SHOWN = (
    {"quickstart.md": "README.md"}
    | {f"{name.lower()}.md": f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "RELEASING", "SECURITY")}
    | {
        f"{'notebooks' if is_notebook(path) else 'programs'}/{path.stem}.md": str(path.relative_to(ROOT))
        for path in sorted((ROOT / "examples").rglob("*.py"))
        if path.stem not in ("__init__", "common", "last_action", "report")
    }
)
PAGES = {source: uri for uri, source in SHOWN.items()}


def version() -> str:
    match = re.search(r'__version__ = "(.*)"', (ROOT / "src" / "flatroll" / "__init__.py").read_text())
    assert match
    return match[1]


def on_config(config: MkDocsConfig) -> None:
    """Each version has a folder of its own, so that the chooser in the header can lead from one to another."""
    documented.clear()
    config.site_dir = os.path.join(config.site_dir, version())
    config.copyright = f"flatroll {version()}"
    config.nav = [whole(entry, Path(config.docs_dir)) for entry in config.nav or []]


def whole(entry: Any, docs: Path) -> Any:
    """A part of the navigation, without pages that do not exist, with all notebooks and programs."""
    if isinstance(entry, str):
        return entry
    ((title, below),) = entry.items()
    if isinstance(below, str):
        return entry
    kept = [part for part in below if not isinstance(part, str) or part in SHOWN or (docs / part).exists()]
    kept += [uri for uri in SHOWN if uri.startswith(f"{title.lower()}/") and uri not in kept]
    return {title: [whole(part, docs) for part in kept]}


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are made of files outside docs/."""
    notebooks = {uri: ROOT / source for uri, source in SHOWN.items() if uri.startswith("notebooks/")}
    ran = executed(list(notebooks.values()), ROOT / "out" / "notebooks")
    for uri, source in SHOWN.items():
        if uri in notebooks:
            text, pictures = notebook_page(ran[notebooks[uri]], Path(uri).stem)
            for name, content in pictures.items():
                files.append(File.generated(config, f"notebooks/{name}", content=content))
        else:
            text = (ROOT / source).read_text()
            text = program_page(source, text) if source.endswith(".py") else text
        files.append(File.generated(config, uri, content=text))


def program_page(source: str, code: str) -> str:
    """A program as a page: its first docstring as text, then the whole file."""
    summary = re.match(r'"""(.*?)"""', code, re.S)
    title = f"# {posixpath.basename(source)}\n\n"
    return f"{title}{summary[1] if summary else ''}\n\n```python\n{code}```\n"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    uri = page.file.src_uri
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # it stands alone in its part of the navigation
    source = SHOWN.get(uri, f"docs/{uri}")
    prose_and_code = FENCE.split(markdown)  # prose, block, its fence, prose, ...
    prose_and_code[::3] = [COMMENT.sub("", site_links(text, source, uri)) for text in prose_and_code[::3]]
    del prose_and_code[2::3]
    return "".join(prose_and_code)


def site_links(prose: str, source: str, uri: str) -> str:
    """Links relative to a file of the repository, relative to its page of the site."""

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        there = PAGES.get(target, target.removeprefix("docs/"))
        if there == target:
            return match[0]
        return match[1] + posixpath.relpath(there, posixpath.dirname(uri))

    return LINK.sub(moved, prose)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Refuse a page that loads something from another host, note the names it documents, mark where lines may end."""
    if foreign := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {foreign[0]}")
    documented.update(re.findall(r'id="(flatroll\.[\w.]+)"', output))
    return CELL.sub(marked_cell, INLINE_CODE.sub(marked_code, output))


def marked_code(match: re.Match[str]) -> str:
    """Code in a line of text: options in one piece, and the joints of what may be wider than a phone."""
    code = match[0]
    if len(html.unescape(TAG.sub("", code))) > WIDE:
        code = marked(code)
    return OPTION.sub(r'<span class="option">\g<0></span>', code)


def marked_cell(match: re.Match[str]) -> str:
    """A cell of a table with what site.css needs on phones: the joints of names, and a class for long texts."""
    name, attributes, content = match.groups()
    is_long = len(TAG.sub("", content)) > LONG
    content = marked(content)
    if is_long and "class=" not in attributes:
        attributes += ' class="long"'
    return f"<{name}{attributes}>{content}</{name}>"


def marked(content: str) -> str:
    """HTML with a mark behind each joint, at which a line may end."""
    return TAG_OR_JOINT.sub(lambda part: part[0] if part[0][0] == "<" else f"{part[0]}<wbr>", content)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse an API without one of the public names; write the list that the chooser of versions reads.

    Beside the versions a page leads to the newest.
    """
    public = (ROOT / "tests" / "public_names.txt").read_text().split()
    # A name of the package itself is documented with its room.
    of_rooms = {name for name in public if name.count(".") > 1}
    if missing := of_rooms - documented:
        raise PluginError(f"the API pages lack {', '.join(sorted(missing))}")
    folder = Path(config.site_dir).parent
    built = sorted((path.parent.name for path in folder.glob("*/index.html")), key=numbers, reverse=True)
    entries = [{"version": name, "title": name, "aliases": []} for name in built]
    (folder / "versions.json").write_text(json.dumps(entries, indent=1))
    newest = (
        f'<!doctype html><title>flatroll</title><meta http-equiv="refresh" content="0; url={built[0]}/">\n'
    )
    (folder / "index.html").write_text(newest)


def numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
