"""A griffe extension: the package's docstrings as the site's renderer wants them, the sources stay as they are.

* A ``>>>`` example becomes a fenced block; without a fence, Markdown reads ``[1.0, 2.0]`` in its output as a link.
* ``a, b: text`` under ``Args:`` becomes an entry for each name; the renderer looks each up in the signature.
* The text under ``Returns:`` or ``Yields:`` stays whole; the renderer takes what stands before a colon for a type.
* `` `Name` `` of a public name that has an entry becomes a link to it; ``:class:`` and the like are taken off before.
* A ``#:`` comment becomes the docstring of the name in its line, or in the line below.
* A function that has the name of its file is the function, not the file.
* The fields of the options named by ``@takes_options(Options)`` stand in a signature instead of its ``**options``.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *\n).+)*", re.M)
SECTION = re.compile(r"^( *)(?:Args|Attributes):\n((?:\1 +.*\n?|\n)+)", re.M)
ENTRY = re.compile(r"^( *)(\w+(?:, \w+)+)(: .*(?:\n\1 +.*)*)", re.M)
RESULT = re.compile(r"^( *(?:Returns|Yields):\n +)(?=\S)", re.M)
ROLE = re.compile(r":(?:class|func|meth|attr):`~?(?:[\w.]+\.)?(\w+)`")
NAME = re.compile(r"(?<![`\[])`([A-Za-z]\w+)`(?![`\]])")


class SiteDocstrings(griffe.Extension):
    """Mends the docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        rooms = [module for module in modules_of(pkg) if module.exports]
        owners = list(objects_of(pkg))  # those in shadowed files, too
        for room in rooms:
            unshadow(room)
        pages = {page.stem for page in (Path(__file__).parents[1] / "api").glob("*.md")}
        documented = [
            room for room in rooms if room.path.split(".")[1:2] and room.path.split(".")[1] in pages
        ]
        public = {str(name): room.path for room in reversed(documented) for name in room.exports or ()}
        for owner in owners:
            if owner.is_attribute and owner.docstring is None and (comment := comment_of(owner)):
                owner.docstring = griffe.Docstring(comment, lineno=owner.lineno, parent=owner)
            if isinstance(owner, griffe.Function):
                spell_out_options(owner)
            if owner.docstring is not None:
                owner.docstring.value = mended(owner.docstring.value, public, owner.name)


def modules_of(module: griffe.Module) -> Iterator[griffe.Module]:
    """The module and all below it, each before what it holds."""
    yield module
    for below in module.modules.values():
        if not below.is_alias:
            yield from modules_of(below)


def objects_of(owner: griffe.Object) -> Iterator[griffe.Object]:
    yield owner
    for member in owner.members.values():
        if isinstance(member, griffe.Object):
            yield from objects_of(member)


def unshadow(room: griffe.Module) -> None:
    """Put functions and classes in the place of the files they share a name with."""
    for name in map(str, room.exports or ()):
        member = room.members.get(name)
        if isinstance(member, griffe.Module) and name in member.members:
            room.set_member(name, member.members[name])


def spell_out_options(function: griffe.Function) -> None:
    """Show the options of ``@takes_options(Options)`` by name, type and default, as `inspect.signature` does."""
    for decorator in function.decorators:
        call = decorator.value
        if not isinstance(call, griffe.ExprCall) or str(call.function) != "takes_options":
            continue

        options: Any = function.module[str(call.arguments[0])]
        if options.is_alias:
            options = options.final_target
        own = [one for one in function.parameters if one.kind is not griffe.ParameterKind.var_keyword]
        function.parameters = griffe.Parameters(*own, *fields_of(options))


def fields_of(options: griffe.Class) -> list[griffe.Parameter]:
    """The fields of a dataclass as keyword parameters, those of subclasses before those of their bases."""
    found: dict[str, griffe.Parameter] = {}
    for owner in (options, *options.mro()):
        for field in owner.members.values():
            if isinstance(field, griffe.Attribute) and field.name not in found:
                found[field.name] = griffe.Parameter(
                    field.name,
                    annotation=field.annotation,
                    kind=griffe.ParameterKind.keyword_only,
                    default=field.value,
                )
    return list(found.values())


def comment_of(attribute: griffe.Object) -> str:
    """What the ``#:`` comment of an attribute says: behind it, or in the lines above it."""
    file = attribute.filepath
    if not attribute.lineno or not isinstance(file, Path):  # a list where a package has several folders
        return ""
    lines = attribute.lines_collection[file]
    if "#: " in (line := lines[attribute.lineno - 1]):
        return line.partition("#: ")[2]
    first = attribute.lineno - 1
    while first and lines[first - 1].startswith("#: "):
        first -= 1
    return " ".join(line.removeprefix("#: ") for line in lines[first : attribute.lineno - 1])


def mended(text: str, public: dict[str, str], own_name: str) -> str:
    """The docstring with fenced examples, one entry for each argument, and links to public names."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        linked = name in public and name != own_name and not (name.islower() and "_" not in name)
        return f"[`{name}`][{public[name]}.{name}]" if linked else match[0]

    def entries(match: re.Match[str]) -> str:
        return "\n".join(f"{match[1]}{name}{match[3]}" for name in match[2].split(", "))

    def section(match: re.Match[str]) -> str:
        return ENTRY.sub(entries, match[0])

    def fence(match: re.Match[str]) -> str:
        code = re.sub(r"  # doctest: .*", "", match[0])
        return f"{match[1]}```pycon\n{code}\n{match[1]}```"

    parts, end = [], 0
    for match in EXAMPLE.finditer(text):
        parts += [text[end : match.start()], fence(match)]
        end = match.end()
    parts.append(text[end:])
    parts[::2] = [NAME.sub(link, ROLE.sub(r"`\1`", SECTION.sub(section, prose))) for prose in parts[::2]]
    return RESULT.sub(r"\1: ", "".join(parts))
