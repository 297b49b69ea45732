"""The documentation site: its pages and links, the docstrings and notebooks as it shows them, CITATION.cff.

`make docs` builds the whole site, strictly; here are the parts that it is made with.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flatroll
import flatroll.rollouts

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def site_part(name: str) -> Any:
    """A module of docs/site, whose modules are no package and import one another by name."""
    sys.path.insert(0, str(DOCS / "site"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS / "site"))
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def hooks() -> Any:
    for needed in ("mkdocs", "jupytext", "nbclient"):
        pytest.importorskip(needed)
    return site_part("hooks")


@pytest.fixture(scope="module")
def docstrings() -> Any:
    pytest.importorskip("griffe")
    return site_part("docstrings")


def entry(key: str) -> str:
    """The value of a line ``key: value`` of CITATION.cff."""
    match = re.search(rf"^{key}: *(.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert match, f"CITATION.cff has no {key}"
    return match[1].strip('"')


def test_the_citation_names_this_version_and_license() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert entry("cff-version") == "1.2.0"
    assert entry("version") == flatroll.__version__
    assert f'license = "{entry("license")}"' in project
    assert f'name = "{entry("  - name")}"' in project
    assert entry("message") and entry("title").startswith("flatroll")


def test_every_page_stands_in_the_navigation() -> None:
    named = set(re.findall(r"^ +- (?:\w+: )?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - named == set()


def test_every_room_has_a_page_of_its_names() -> None:
    documented = set(
        re.findall(r"^::: (\S+)$", "\n".join(p.read_text() for p in DOCS.glob("api/*.md")), re.M)
    )
    public = {line.rpartition(".")[0] for line in (ROOT / "tests" / "public_names.txt").read_text().split()}
    public.remove("flatroll")  # its export_policy is that of flatroll.deploy
    assert documented == public | {"flatroll.trainers"}


def test_nothing_is_fetched_from_elsewhere(hooks: Any) -> None:
    assert "font: false" in (ROOT / "mkdocs.yml").read_text()
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    own = '<script src="../assets/a.js"></script><a href="https://example.org">there</a>'
    hooks.on_post_page(own, page=page)
    for foreign in ('<script defer src="https://cdn.example/a.js">', '<img alt="" src=//example.org/a.png>'):
        with pytest.raises(hooks.PluginError, match=r"page\.md loads from another host: <"):
            hooks.on_post_page(own + foreign, page=page)


@pytest.mark.parametrize(
    ("code", "marked"),
    [
        ("step_count", "step_|count"),
        ("disk/state_tree", "disk/|state_|tree"),
        ("rows_of_texts(step=&quot;turn&quot;)", "rows_|of_|texts(|step=|&quot;turn&quot;)"),
        ("policy.act(x[0])[&quot;a&quot;]", "policy.|act(|x[0])[|&quot;a&quot;]"),
        ("__init__(2.5, 10_000)", "__init__(2.5, 10_000)"),
    ],
)
def test_names_in_tables_have_marks_at_their_joints(hooks: Any, code: str, marked: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    elsewhere = f"<thead></thead><p><code>{code}</code></p><pre><span></span><code>{code}</code></pre>"
    shown = hooks.on_post_page(f'<td>{code}</td><td><a href="a_b.c">{code}</a></td>{elsewhere}', page=page)
    marked = marked.replace("|", "<wbr>")
    assert shown == f'<td>{marked}</td><td><a href="a_b.c">{marked}</a></td>{elsewhere}'


def test_long_code_in_a_text_has_marks_at_its_joints(hooks: Any) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    code = "policy.act(observation=observation[None])"
    block = f"<pre><span></span><code>{code}</code></pre>"
    shown = hooks.on_post_page(f"<p><code>{code}</code></p><td><code>{code}</code></td>{block}", page=page)
    marked = code.replace(".", ".<wbr>").replace("(", "(<wbr>").replace("=", "=<wbr>").replace("[", "[<wbr>")
    cell = f'<td class="long"><code>{marked}</code></td>'
    assert shown == f"<p><code>{marked}</code></p>{cell}{block}"


def test_options_of_commands_stay_in_one_piece(hooks: Any) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    block = "<pre><span></span><code>run --env A</code></pre>"
    shown = hooks.on_post_page(f"<p><code>run x--y --save-every 9</code> --env</p>{block}", page=page)
    assert shown == f'<p><code>run x--y <span class="option">--save-every</span> 9</code> --env</p>{block}'


def test_long_texts_of_tables_have_a_class(hooks: Any) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    short = '<td><a href="a_long_address_that_is_not_shown.html">short</a></td>'
    text = "a text that is too long for a thin column"
    output = f'{short}<th>{text}</th><td style="text-align: right;">{text}</td>'
    expected = f'{short}<th class="long">{text}</th><td style="text-align: right;" class="long">{text}</td>'
    assert hooks.on_post_page(output, page=page) == expected


@pytest.mark.parametrize(
    ("source", "uri", "link", "moved"),
    [
        ("docs/index.md", "index.md", "../examples/sac.py", "programs/sac.md"),
        ("docs/index.md", "index.md", "layout.md#the-keys", "layout.md#the-keys"),
        (
            "docs/howto/own_loss.md",
            "howto/own_loss.md",
            "../../examples/notebooks/markers.py",
            "../notebooks/markers.md",
        ),
        ("docs/howto/own_loss.md", "howto/own_loss.md", "../losses.md", "../losses.md"),
        ("CONTRIBUTING.md", "contributing.md", "docs/img/rooms.png", "img/rooms.png"),
        ("docs/gallery.md", "gallery.md", "../CONTRIBUTING.md#rooms", "contributing.md#rooms"),
        ("docs/index.md", "index.md", "https://example.org/docs/a.md", "https://example.org/docs/a.md"),
    ],
)
def test_links_lead_to_the_page_of_a_file(hooks: Any, source: str, uri: str, link: str, moved: str) -> None:
    assert hooks.site_links(f"[text]({link})", source, uri) == f"[text]({moved})"


def test_code_keeps_what_looks_like_a_link(hooks: Any) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"), is_homepage=False, meta={})
    code = "```python\nf[0](../CHANGELOG.md)\n```\n"
    text = f"[a](../CHANGELOG.md)\n\n<!-- not run -->\n{code}\n[b](../CHANGELOG.md)\n"
    shown = f"[a](changelog.md)\n\n{code}\n[b](changelog.md)\n"
    assert hooks.on_page_markdown(text, page=page) == shown


def test_the_navigation_leaves_out_what_is_missing_and_adds_examples(hooks: Any) -> None:
    nav = {"Part": ["layout.md", "no_such_page.md", {"Notebooks": ["notebooks/frames.md"]}]}
    part = hooks.whole(nav, DOCS)["Part"]
    assert part[0] == "layout.md"
    notebooks = part[1]["Notebooks"]
    assert notebooks[0] == "notebooks/frames.md"
    sources = {p.stem for p in (ROOT / "examples" / "notebooks").glob("[a-z]*.py")}
    assert sorted(notebooks) == sorted(f"notebooks/{name}.md" for name in sources)


def test_versions_are_listed_newest_first(hooks: Any, tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "assets"):
        (tmp_path / name).mkdir()
        if name != "assets":
            (tmp_path / name / "index.html").touch()
    hooks.documented.update((ROOT / "tests" / "public_names.txt").read_text().split())
    hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path / "0.10.0")))
    listed = (tmp_path / "versions.json").read_text()
    assert re.findall(r'"version": "(.*?)"', listed) == ["0.10.0", "0.9.0"]
    assert "url=0.10.0/" in (tmp_path / "index.html").read_text()
    hooks.documented.discard("flatroll.layout.audit")
    with pytest.raises(hooks.PluginError, match=r"the API pages lack flatroll\.layout\.audit$"):
        hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path / "0.10.0")))


def test_a_program_is_shown_below_its_first_sentence(hooks: Any) -> None:
    page = hooks.program_page("examples/a.py", '"""Trains."""\n\nx = 1\n')
    assert page == '# a.py\n\nTrains.\n\n```python\n"""Trains."""\n\nx = 1\n```\n'


def test_a_notebook_is_shown_with_its_outputs(hooks: Any) -> None:
    nbformat = pytest.importorskip("nbformat.v4")
    outputs = [
        nbformat.new_output("stream", text="\x1b[31mred\x1b[0m\n"),
        nbformat.new_output("display_data", data={"image/png": "AAEC", "text/plain": "<Figure>"}),
        nbformat.new_output("execute_result", data={"text/html": "<svg>\n\n</svg>", "text/plain": "svg"}),
        nbformat.new_output("execute_result", data={"text/plain": "3"}),
    ]
    cells = [nbformat.new_markdown_cell("# Title"), nbformat.new_code_cell("run()", outputs=outputs)]
    page, pictures = hooks.notebook_page(nbformat.new_notebook(cells=cells), "name")
    assert page.split("\n\n") == [
        "# Title",
        "```python\nrun()\n```",
        "```text\nred\n```",
        "![What the cell above draws](name-0.png)",
        '<div class="output"><svg> </svg></div>',
        "```text\n3\n```\n",
    ]
    assert pictures == {"name-0.png": b"\0\1\2"}


DOCSTRING = """Draws `rows` like `Sampler` or :class:`~flatroll.buffers.Ring`.

Args:
    a, b: numbers ``[2]``,
        both.
    c: another.

>>> draw(1)  # doctest: +ELLIPSIS
[1.0, `Ring`]

More, see `draw_rows`."""

MENDED = """Draws `rows` like `Sampler` or [`Ring`][flatroll.buffers.Ring].

Args:
    a: numbers ``[2]``,
        both.
    b: numbers ``[2]``,
        both.
    c: another.

```pycon
>>> draw(1)
[1.0, `Ring`]
```

More, see [`draw_rows`][flatroll.buffers.draw_rows]."""


def test_docstrings_are_made_fit_for_the_renderer(docstrings: Any) -> None:
    public = dict.fromkeys(("rows", "Sampler", "Ring", "draw_rows"), "flatroll.buffers")
    assert docstrings.mended(DOCSTRING, public, "Sampler") == MENDED


def test_a_text_of_what_is_returned_stays_whole(docstrings: Any) -> None:
    griffe = pytest.importorskip("griffe")
    text = 'Draws.\n\nReturns:\n    Texts, or none. ``"note: "`` begins those\n        of notes: two lines.\n'
    docstring = griffe.Docstring(docstrings.mended(text, {}, "draw"))
    options = {"returns_multiple_items": False, "returns_named_value": False, "warn_missing_types": False}
    assert all(f"{name}: false" in (ROOT / "mkdocs.yml").read_text() for name in options)

    _, section = docstring.parse("google", **options)
    (result,) = section.value
    assert result.annotation is None
    assert " ".join(result.description.split()) == (
        'Texts, or none. ``"note: "`` begins those of notes: two lines.'
    )


def luminance(colour: str) -> float:
    """Of a colour ``#rrggbb``, as WCAG 2 defines it: 0 of black, 1 of white."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_links_and_the_header_can_be_read() -> None:
    """White on the site's colour, and that colour on white and on the background of code."""
    style = (DOCS / "site" / "site.css").read_text()
    header = re.findall(r"--md-primary-fg-color: (#\w{6});", style)
    links = re.findall(r"--md-typeset-a-color: (#\w{6});", style)
    assert header == links and len(links) == 1
    for background in ("#ffffff", "#f5f5f5"):
        assert (luminance(background) + 0.05) / (luminance(links[0]) + 0.05) > 4.5


def test_a_function_is_not_hidden_by_its_file_and_comments_are_read(docstrings: Any) -> None:
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(docstrings.SiteDocstrings())
    package = griffe.load("flatroll.layout", search_paths=[ROOT / "src"], extensions=extensions)
    assert package["step_mdp"].is_function
    assert package["IS_INIT"].docstring.value == "Bool: the row is the first of its episode."
    assert package["RESERVED"].docstring.value.startswith("Root names that the package writes itself.")


def test_the_options_of_collectors_stand_in_their_signatures(docstrings: Any) -> None:
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(docstrings.SiteDocstrings())
    package = griffe.load("flatroll", search_paths=[ROOT / "src"], extensions=extensions)
    for name in ("Collector", "MultiCollector", "RayCollector"):
        shown = package["rollouts"][name].members["__init__"].parameters
        known = inspect.signature(getattr(flatroll.rollouts, name)).parameters
        assert [one.name for one in shown] == ["self", *known]
        assert {one.name for one in shown if one.default is None} == {
            "self",
            "create_env_fn",
            "frames_per_batch",
        }
        assert str(shown["state_stride"].annotation) == "int" and shown["state_stride"].default == "1"


def test_examples_beside_a_function_named_as_their_file_are_fenced(docstrings: Any, tmp_path: Path) -> None:
    griffe = pytest.importorskip("griffe")
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").write_text(
        'from room.draw import Drawer, draw\n\n__all__ = ["Drawer", "draw"]\n'
    )
    (tmp_path / "room" / "draw.py").write_text(
        'def draw() -> int:\n    """Draws.\n\n    >>> draw()\n    1\n    """\n\n\n'
        'class Drawer:\n    """Draws.\n\n    >>> Drawer()\n    1\n    """\n'
    )
    extensions = griffe.load_extensions(docstrings.SiteDocstrings())
    package = griffe.load("room", search_paths=[tmp_path], extensions=extensions)
    for name in ("draw", "Drawer"):
        assert package[name].docstring.value == f"Draws.\n\n```pycon\n>>> {name}()\n1\n```"
