"""Finds the rows of a folder: those that a version names, and those that were published since."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import Tensor

from flatroll.disk.columns import Schema, difference
from flatroll.disk.listing import Listing
from flatroll.disk.manifest import Json, Manifest, Version, read_manifest
from flatroll.disk.names import RowsName
from flatroll.disk.segments import Segment, chain_of_names
from flatroll.disk.tensor_file import DamagedFileError, MissingFileError, read_all
from flatroll.layout.checks import whole_number

T = TypeVar("T")


class LoadedVersion(NamedTuple):
    """A version as it was published.

    Args:
        version: its number and line.
        json: the JSON part of its state.
        tensors: the tensors of its state.
        head: number of its first row.
        end: number of its last row, plus 1.
        columns: what its columns hold, by name.
        segments: its files of rows, end to end; the first may begin before ``head``.
        extra: what else its writer noted.
    """

    version: Version
    json: Json
    tensors: dict[str, Tensor]
    head: int
    end: int
    columns: Schema
    segments: tuple[Segment, ...]
    extra: Json


class ReadOptions(NamedTuple):
    """How files of rows are opened.

    Args:
        mapped: map them at once, before a writer removes them.
        max_bytes: refuse versions with more, None for no limit.
    """

    mapped: bool
    max_bytes: int | None

    def check_bytes(self, path: Path, total: int) -> None:
        """Raise ValueError if files have too many bytes."""
        if self.max_bytes is not None and total > self.max_bytes:
            raise ValueError(
                f"what is to be loaded from {path} has {total:,} bytes, max_bytes is {self.max_bytes:,}"
            )


class Recovered(NamedTuple):
    """The rows of a folder that can be reached.

    Args:
        manifest: of the newest version, if any.
        line: of the files.
        segments: end to end.
    """

    manifest: Manifest | None
    line: str
    segments: list[Segment]


def whole_manifests(path: Path, numbers: Iterable[int], most: int | None = None) -> list[Manifest]:
    """The manifests of the first versions that are not damaged, of ``most`` at most."""

    def whole() -> Iterator[Manifest]:
        for number in numbers:
            with suppress(DamagedFileError):
                yield read_manifest(path, number)

    return list(islice(whole(), most))


def open_rows(path: Path, manifest: Manifest, options: ReadOptions) -> list[Segment]:
    """Open the segments of a version and check their headers.

    Raises:
        DamagedFileError: a file is missing, or not the one that the version names.
        ValueError: the version has more bytes than it may have.
    """
    total = manifest.size
    if options.max_bytes is not None and total > options.max_bytes:
        number = manifest.version.number
        raise ValueError(
            f"version {number} of {path} has {total:,} bytes, max_bytes is {options.max_bytes:,}"
        )
    segments = []
    for record in manifest.rows:
        name = RowsName.parse(record.name)
        assert name is not None  # the manifest was checked
        segment = Segment.open(path, name, record, mapped=options.mapped)
        if segment.schema != manifest.columns:
            raise DamagedFileError(f"{name}: {difference(manifest.columns, segment.schema)}")
        segments.append(segment)
    return segments


def load_version(path: Path, manifest: Manifest, options: ReadOptions) -> LoadedVersion:
    """Open the rows of a version and read its state.

    Raises:
        DamagedFileError: a file is missing or damaged.
        ValueError: the version has more bytes than it may have.
    """
    segments = tuple(open_rows(path, manifest, options))
    tensors = read_all(path, *manifest.state) if manifest.state else {}
    return LoadedVersion(
        manifest.version,
        manifest.tree,
        tensors,
        manifest.head,
        manifest.end,
        dict(manifest.columns),
        segments,
        manifest.extra,
    )


def newest_whole(
    path: Path, only: int | None, use: Callable[[int], T], damaged: set[int], *, strict: bool
) -> tuple[T, int, list[str]]:
    """Return ``use(number)`` for the newest version for which it does not raise DamagedFileError, the number, and what
    is wrong with newer ones.

    Args:
        path: of the folder.
        only: number of the one version to read, None for any.
        use: reads a version.
        damaged: the numbers of damaged versions are added to it.
        strict: raise if the newest version is damaged.

    Raises:
        FileNotFoundError: there is no version, or not that one.
        DamagedFileError: all are damaged, or the newest one with ``strict``.
    """

    def present() -> list[int]:  # listed anew each time: a writer may publish and remove
        return Listing.of(path).versions if only is None else [only]

    if only is not None:
        there = Listing.of(path).versions
        if whole_number("version", only) not in there:
            listed = f"versions {', '.join(map(str, there))}" if there else "none"
            raise FileNotFoundError(f"{path} has no version {only}; there are: {listed}")
    damage: dict[int, str] = {}
    while untried := [version for version in present() if version not in damage]:
        number = untried[0]
        try:
            result = use(number)
        except DamagedFileError as error:
            damage[number] = f"version {number}: {error}"
            damaged.add(number)
            # Else a writer has published a newer one, and removed this.
            if strict and max(Listing.of(path).versions, default=0) <= number:
                raise DamagedFileError(f"{path}, {damage[number]}") from None
        else:
            return result, number, [text for version, text in damage.items() if version > number]
    if damage:
        raise DamagedFileError(f"{path} has no version that is whole: {'; '.join(damage.values())}")
    raise FileNotFoundError(f"{path} holds no version")


def recover_rows(path: Path, options: ReadOptions) -> Recovered:
    """Find all rows that were published: those of the newest version, and those in files listed after them.

    Args:
        path: of the folder.
        options: how files are opened.

    Raises:
        DamagedFileError: a file of the version is damaged.
    """
    before: Listing | None = None
    while True:
        listing = Listing.of(path)
        try:
            return _recover(path, listing, options, settled=listing == before)
        except MissingFileError:
            if listing == before:
                raise
        before = listing  # a writer may have merged or dropped files meanwhile: look again


def _recover(path: Path, listing: Listing, options: ReadOptions, *, settled: bool) -> Recovered:
    """`recover_rows` with these names; a file that is gone is lost if ``settled``, else a MissingFileError."""
    manifest = next(iter(whole_manifests(path, listing.versions, 1)), None)
    named = [] if manifest is None else open_rows(path, manifest, options)
    known = {segment.name: segment for segment in named}
    if manifest is None:
        line = max({name.line for name in listing.rows}, key=lambda line: _reach(listing, line), default="")
        candidates, first = {name for name in listing.rows if name.line == line}, None
        schema: Schema = {}
    else:
        line, schema = manifest.version.line, manifest.columns
        # A merged file may begin within the rows of the version; one that ends within them adds nothing.
        later = {name for name in listing.rows if name.line == line and name.end > manifest.end}
        candidates, first = {*known, *later}, named[0].first if named else manifest.end
    segments: list[Segment] = []
    end = first or 0
    for name in chain_of_names(candidates, first):
        try:
            segment = known.get(name) or Segment.open(path, name, mapped=options.mapped)
            if schema and segment.schema != schema:
                raise DamagedFileError(f"{name}: {difference(schema, segment.schema)}")
        except MissingFileError as error:
            if not settled:
                raise
            _warn(f"{path}: {error}; rows from {name.first} on are lost")
            break
        except DamagedFileError as error:
            _warn(f"{path}: {error}; rows from {name.first} on are lost")
            break
        segments.append(segment)
        options.check_bytes(path, sum(segment.size for segment in segments))
        schema, end = segment.schema, segment.end
    behind = min((name.first for name in candidates if name.first > end), default=None)
    if behind is not None:
        _warn(f"{path}: rows {end} to {behind - 1} are missing; those after them go once rows are appended")
    return Recovered(manifest, line, segments)


def _reach(listing: Listing, line: str) -> tuple[int, str]:
    """How many rows of a line can be reached, and its name, which decides between equal ones."""
    chain = chain_of_names(name for name in listing.rows if name.line == line)
    return sum(name.end - name.first for name in chain), line


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=6)
