"""`Folder`: crash-safe rows and versions on disk."""

import errno
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import NamedTuple, NoReturn, Self, TypeVar

from torch import Tensor

from flatroll.disk import files, tensor_file
from flatroll.disk.manifest import (
    MANIFEST,
    STATE,
    Json,
    Manifest,
    Version,
    manifest_name,
    read_manifest,
    state_name,
)
from flatroll.disk.segments import (
    MOST_ROWS,
    Column,
    FileRecord,
    RowsName,
    Schema,
    Segment,
    Size,
    chain_of_names,
    check_columns,
    damaged_rows,
    difference,
    encode_segment,
    make_schema,
    read_range,
)
from flatroll.disk.tensor_file import DamagedFileError, MissingFileError
from flatroll.layout.checks import check_flags, check_path, check_type, check_whole_number

T = TypeVar("T")
LOCK = "lock"
#: Parts are merged once the result has this many times the rows of the largest part. A row is rewritten each time its
#: segment has grown by this factor: twice in total if parts are larger than 1/32 of a full segment.
FAN_IN = 32


class Listing(NamedTuple):
    """The names in a folder.

    Args:
        rows: names of files of rows.
        versions: numbers of the manifests, the newest first.
        others: all other files that belong to such a folder: states, temporaries, the lock.
        foreign: files that do not belong to it.
    """

    rows: frozenset[RowsName]
    versions: list[int]
    others: list[str]
    foreign: list[str]

    @classmethod
    def of(cls, path: Path) -> "Listing":
        """List a folder; FileNotFoundError or NotADirectoryError if it is not a folder."""
        rows = []
        versions = []
        others = []
        foreign = []

        for name in files.names(path):
            final = name.removesuffix(files.TEMPORARY)
            rows_name = RowsName.parse(final)
            manifest = MANIFEST.fullmatch(final)

            if final == LOCK or STATE.fullmatch(final) or (final != name and (rows_name or manifest)):
                others.append(name)
            elif rows_name is not None:
                rows.append(rows_name)
            elif manifest is not None:
                versions.append(int(manifest[1]))
            elif not name.endswith("/"):
                foreign.append(name)

        return cls(frozenset(rows), sorted(versions, reverse=True), others, foreign)

    @property
    def is_empty(self) -> bool:
        """Whether the folder has neither rows nor versions."""
        return not self.rows and not self.versions


class LoadedVersion(NamedTuple):
    """A published version.

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


class Folder:
    """Rows and versions of a state in a folder, with atomic saves.

    Rows are a log: row r is the r-th that was ever written. `append` publishes rows as one immutable file, a
    *segment*; `publish` writes a version, which names the segments and holds a state: JSON and tensors. One writer has
    exclusive access; any number of readers may read meanwhile.

    Args:
        path: the folder. A writer creates it if it is missing.
        write: whether to write; the folder is locked until `close`.
        sync: flush to disk before `append` and `publish` return, safe from a power loss. If False, data survive only
            the end of the process. Default True.
        log: whether rows are safe when `append` returns, for `recover`. If False, they are safe when `publish` returns,
            which syncs the names of all files at once. Default True.
        keep: number of versions to keep. Default 2.
        overwrite: start over in a folder with rows or versions; new versions replace them. Default False: a writer
            continues from what it has loaded.
        resume: the version that this run loaded or published last, to continue from it without `load`; or the closed
            `Folder` that did so, in which case nothing is read again.
        segment_bytes: smaller segments are merged over time. Default 32 MiB.
        segment_rows: segments with this many rows are full, whatever their bytes. Default: no limit.
        max_bytes: refuse to load a version with larger files. Default: no limit.

    Raises:
        FileNotFoundError: the folder to read does not exist.
        BlockingIOError: another writer has it open.
        ValueError: it contains other files only.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as path:
    ...     with Folder(path, write=True) as folder:
    ...         folder.append({"reward": torch.arange(3.0)}, first=0)
    ...         folder.append({"reward": torch.arange(2.0)}, first=3)
    ...         version = folder.publish({"step": 5}, {})
    ...     reader = Folder(path)
    ...     loaded = reader.load()
    ...     loaded.json, (loaded.head, loaded.end), reader.read_rows(1, 4)["reward"]
    ({'step': 5}, (0, 5), tensor([1., 2., 0.]))
    """

    #: Number of the first row.
    head: int
    #: Number of the next row.
    end: int
    #: The version loaded or published last, or None.
    version: Version | None
    _segments: list[Segment]
    _columns: Schema
    _kept: list[Manifest]  # versions whose files are kept, newest first
    _named: list[Segment]  # row files of the newest one
    _line: str  # random word in file names that separates independent runs

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        write: bool = False,
        sync: bool = True,
        log: bool = True,
        keep: int = 2,
        overwrite: bool = False,
        resume: "Version | Folder | None" = None,
        segment_bytes: int = 32 << 20,
        segment_rows: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.path = check_path("path", path).absolute()  # the working directory may change
        check_flags(write=write, sync=sync, log=log, overwrite=overwrite)

        if resume is not None:
            check_type("resume", resume, (Version, Folder), "a Version, a Folder or None")
        if max_bytes is not None:
            check_whole_number("max_bytes", max_bytes, 0)

        self._write = write
        self._sync = sync
        self._log = log
        self._overwrite = overwrite
        self._unsettled = False  # whether names of published rows may not be synced yet

        self._keep = check_whole_number("keep", keep)
        most_rows = MOST_ROWS if segment_rows is None else check_whole_number("segment_rows", segment_rows)
        self._whole = Size(most_rows, check_whole_number("segment_bytes", segment_bytes))
        self._max_bytes = max_bytes

        self._turn = threading.RLock()
        self._lock: tuple[int, int] | None = None  # descriptor, and the process that locked it
        self._damaged: set[int] = set()  # unreadable versions
        self._known: set[Version] = set()  # versions that this run knows

        self._kept = []
        self._named = []
        self.version = None
        self._loaded = False
        self.forget_rows()

        if self.path.is_dir() or not write:
            listing = Listing.of(self.path)
            if listing.foreign and not (listing.rows or listing.versions or listing.others):
                shown = ", ".join(listing.foreign[:3])
                if len(listing.foreign) > 3:
                    shown += ", ..."
                raise ValueError(
                    f"path must be a folder of rows and versions, or an empty or new one; {self.path} holds other "
                    f"files: {shown}"
                )

        if write:
            files.make_folder(self.path, synced=sync)
            self._lock = _lock(self.path), os.getpid()
            try:
                self._resume(resume)
            except BaseException:
                self.close()
                raise
        elif resume is not None:
            self._resume(resume)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Release the lock of a folder that nobody closed."""
        if hasattr(self, "_lock"):
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Folder cannot be used in another process: open the path there")

    def close(self) -> None:
        """Release the lock; published versions stay."""
        if self._lock is not None:
            (descriptor, process) = self._lock
            self._lock = None
            try:
                # Unlock even if processes forked in the meantime also have the descriptor.
                if process == os.getpid():
                    files.unlock(descriptor)
            finally:
                files.close(descriptor)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The contiguous files of rows known to this process; each has ``first``, ``end`` and ``columns``."""
        return tuple(self._segments)

    @property
    def columns(self) -> Schema:
        """The schema of the columns, by name; empty without rows."""
        return dict(self._columns)

    def stats(self) -> dict[str, int]:
        """Numbers of rows, of segments, and of bytes in them."""
        sizes = [segment.size for segment in self._segments]
        return {"rows": self.end - self.head, "segments": len(sizes), "bytes": sum(sizes)}

    def rows_per_segment(self, row_bytes: int) -> int:
        """Return the rows per full segment, given the bytes per row: save many rows in pieces of this size."""
        return max(1, min(self._whole.rows, -(-self._whole.bytes // max(row_bytes, 1))))

    def versions(self) -> list[int]:
        """The numbers of all versions in the folder, including damaged ones, newest first."""
        return Listing.of(self.path).versions

    def load(self, number: int | None = None, *, strict: bool = False) -> LoadedVersion:
        """Read the newest version, or the one of this number: its state, and where its rows are (`read_rows`).

        Args:
            number: number of the version. Default: the newest.
            strict: raise if the newest version is damaged. Default False: warn and read the previous one.

        Raises:
            FileNotFoundError: there is no version, or not this one; the message lists the existing ones.
            DamagedFileError: all versions are damaged, or one with ``strict``; the message names the files.
            ValueError: a later version of the package is needed, or the files have more than ``max_bytes``.
        """
        return self.load_with(lambda loaded: loaded, number, strict=strict)

    def load_with(
        self, use: Callable[[LoadedVersion], T], number: int | None = None, *, strict: bool = False
    ) -> T:
        """Return ``use(version)`` for the newest version for which it does not raise DamagedFileError.

        `load` checks the state and the headers of the rows' files. A function that reads the rows (`read_rows`) finds
        what is damaged in them, too, and then is called with the version before.

        Args, errors: as for `load`.
        """
        with self._turn:
            if number is not None:
                there = self.versions()
                if check_whole_number("version", number) not in there:
                    listed = "none"
                    if there:
                        listed = f"versions {', '.join(map(str, there))}"
                    raise FileNotFoundError(f"{self.path} has no version {number}; there are: {listed}")

            damage: dict[int, str] = {}
            while True:
                # List again each time: a writer may publish and remove versions.
                candidates = [number] if number else self.versions()
                untried = [version for version in candidates if version not in damage]
                if not untried:
                    break

                found = untried[0]

                try:
                    manifest = read_manifest(self.path, found)
                    loaded = self._read_version(manifest)
                    self._take(manifest, loaded.segments)  # what this run writes comes after
                    result = use(loaded)
                except DamagedFileError as error:
                    damage[found] = f"version {found}: {error}"
                    self._damaged.add(found)
                    # Otherwise a writer has published a newer version and removed this one.
                    if strict and max(self.versions(), default=0) <= found:
                        raise DamagedFileError(f"{self.path}, {damage[found]}") from None
                    continue
                except ValueError as error:
                    if len(text := str(error)) > 1000:  # a name in it may be of any length
                        error.args = (f"{text[:1000]} ...",)
                    error.add_note(f"while version {found} of {self.path} was read")
                    raise

                if lost := [text for version, text in damage.items() if version > found]:
                    warnings.warn(
                        f"{self.path}: version {found} (rows {self.head} to {self.end - 1}) was loaded, since newer "
                        f"ones are damaged and lost: {'; '.join(lost)}",
                        RuntimeWarning,
                        stacklevel=3,
                    )
                return result

            if damage:
                raise DamagedFileError(f"{self.path} has no complete version: {'; '.join(damage.values())}")
            raise FileNotFoundError(f"{self.path} holds no version")

    def recover(self, *, verify: bool = False) -> range:
        """Load all published rows, whether or not a version names them, and return their numbers.

        Rows after the newest version are found by the names of their files, up to the first hole.

        Args:
            verify: read all rows once and check them. Default False: the headers of their files alone, and rows that
                are lost are a warning.

        Raises:
            DamagedFileError: with ``verify``, rows are damaged or lost; the message names the files.
        """
        with self._turn:
            before: Listing | None = None
            while True:
                listing = Listing.of(self.path)
                try:
                    manifest, line, segments = self._find_rows(
                        listing, settled=listing == before, strict=verify
                    )
                    break
                except MissingFileError:
                    if listing == before:
                        raise
                before = listing  # a writer may have merged or dropped files meanwhile: list them again
            if verify and (damage := damaged_rows(segments)):
                raise DamagedFileError(f"{self.path} holds damaged rows: {'; '.join(damage)}")

            if manifest is None:
                self._kept = []
                self._named = []
                self.version = None
                self.forget_rows()
            else:
                self._take(manifest, [])

            # In pairs: an interrupt must not come between what belongs together.
            self._line, self._segments = line or self._line, segments
            if segments:
                self._columns, self.end = segments[-1].schema, segments[-1].end
                self.head = max(self.head, segments[0].first)

            self._loaded = True
            self._admitted = False
            self._begun = False

            return range(self.head, self.end)

    def read_rows(
        self, first: int | None = None, end: int | None = None, names: Collection[str] | None = None
    ) -> dict[str, Column]:
        """Read rows ``[first, end)`` into new memory, with checksums.

        Args:
            first: number of a row. Default: `head`.
            end: number of a row. Default: `end`.
            names: read only these columns, and nothing else from disk. Default: all.

        Raises:
            IndexError: the folder does not have all of them.
            KeyError: it does not have one of the columns.
            DamagedFileError: they are not those that were written; the message names the file.
        """
        if first is None:
            first = self.head
        if end is None:
            end = self.end

        if not self.head <= first <= end <= self.end:
            raise IndexError(f"rows [{first}, {end}) requested, available are [{self.head}, {self.end})")
        schema = self._columns
        if names is not None:
            schema = {name: schema[name] for name in names}
        return read_range(self._segments, schema, first, end)

    def append(self, columns: Mapping[str, Column], first: int | None = None) -> None:
        """Publish rows ``[first, first + N)`` as one segment, atomically.

        Short segments before them are merged into it once enough have gathered, so that the number of files stays
        small. The tensors must not change before the call returns.

        Args:
            columns: name (`column_name` makes one of a nested key) to a tensor ``[N, ...]`` or `Ragged`. All rows have
                the columns of the first ones, with their dtypes and shapes.
            first: number of the first row: `end`, or any if the folder has no rows. Default: `end`.

        Raises:
            ValueError: ``first`` leaves a hole, a column does not fit, or the folder is open for reading.
            TypeError: files cannot store a dtype.
            FileExistsError: the folder has data that this run has not loaded.
            OSError: the disk is full or failed; existing rows are intact.
        """
        with self._turn:
            self._begin_change(change=False)
            if first is None:
                first = self.end
            size = check_columns(columns)
            if first < 0 or (self._segments and first != self.end):
                raise ValueError(f"first must be {self.end}, the number of the next row, got {first}")
            if self._segments and make_schema(columns) != self._columns:
                raise self._other_columns_error(columns)
            if not size.rows:
                return

            self._begin_change()
            # Together with the short ones before them if a merge is due.
            sizes = [
                Size(segment.rows, sum(entry.size for entry in segment.header.entries.values()))
                for segment in self._segments
            ]

            merged = first_to_merge([*sizes, size], self._whole)
            try:
                parts: list[Mapping[str, Column]] = [segment.read() for segment in self._segments[merged:]]
            except DamagedFileError as error:  # merging would give damaged rows a valid checksum
                warnings.warn(f"{self.path}: {error}; it is left as it is", RuntimeWarning, stacklevel=2)
                merged = len(self._segments)
                parts = []

            begin = self._segments[merged].first if parts else first
            self._publish_rows([*parts, columns], slice(merged, None), begin, first + size.rows)

    def publish(
        self,
        state: Json,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        head: int | None = None,
        extra: Json = None,
    ) -> Version:
        """Publish a version with the rows appended so far and a state, and remove all but ``keep`` versions.

        Args:
            state: JSON values; floats are restored exactly.
            tensors: the rest of the state, tensors of any shapes.
            head: number of the version's first row. Default: `head`.
            extra: further JSON values, which `flatroll inspect` shows.

        Returns:
            the number and line of the version, for ``resume``.

        Raises:
            TypeError, ValueError: ``state`` is not JSON, or a dtype cannot be stored.
            FileExistsError: the folder has data that this run has not loaded.
            OSError: the disk is full or failed; the previous version is intact.
        """
        with self._turn:
            self._begin_change(change=False)
            if head is not None:
                self.drop_before(head)

            version = Version(max(self.versions(), default=0) + 1, self._line)
            whole = {name: [value] for name, value in (tensors or {}).items()}
            header, chunks = tensor_file.encode(whole, {})
            record = None
            if tensors:
                record = FileRecord(state_name(*version), header.size, header.checksum)

            manifest = Manifest(
                version=version,
                head=self.head,
                end=self.end,
                rows=tuple(segment.record for segment in self._segments),
                state=record,
                columns=self._columns,
                tree=state,
                extra=extra,
                needs=tuple(sorted(header.needs.union(*(segment.needs for segment in self._segments)))),
            )

            text = manifest.encode()
            self._begin_change()

            try:
                if record is not None:
                    files.publish(self.path, record.name, chunks, synced=self._sync, named=False)
                self._settle(record is not None)
                # Before publishing: if Ctrl-C interrupts it, this run still knows the version as its own.
                self._known.add(version)
                files.publish(self.path, manifest_name(version.number), [text], synced=self._sync)
                self._kept, self._named = [manifest, *self._kept][: self._keep], [*self._segments]
                self.version = version
            finally:
                self._remove_unused()  # versions that are too old; also the new state if its manifest failed
            return version

    def replace(self, columns: Mapping[str, Column], first: int) -> None:
        """Rewrite edited rows; they count once a version is published.

        Args:
            columns: as for `append`.
            first: number of the first row. The rows must be all those of one or several segments.

        Raises:
            ValueError: they are not, or a column does not fit.
            OSError: the disk is full or failed; existing rows are intact.
        """
        with self._turn:
            self._begin_change(change=False)
            end = first + check_columns(columns).rows
            firsts = [segment.first for segment in self._segments]
            ends = [segment.end for segment in self._segments]

            if first not in firsts or end not in ends:
                raise ValueError(f"rows [{first}, {end}) are not whole segments, which begin at {firsts}")
            if make_schema(columns) != self._columns:
                raise self._other_columns_error(columns)

            self._begin_change()
            self._publish_rows([columns], slice(firsts.index(first), ends.index(end) + 1), first, end)

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Use another folder's segments as this folder's rows; files on the same disk are linked, not copied.

        Own segments with the same rows and checksums are kept; the others are removed once a version is published.
        Until then the previous version is valid, and `recover` finds its rows.

        Args:
            segments: consecutive segments, from `segments` of the other folder.

        Raises:
            OSError: the disk is full or failed; existing rows are intact.
        """
        with self._turn:
            self._begin_change()
            own = {segment.contents: segment for segment in self._segments}
            adopted: list[Segment] = []
            line = secrets.token_hex(4)  # a new line: rows of the previous version may have the same numbers
            for segment in segments:
                name = RowsName(segment.first, segment.end, line, 0)
                adopted.append(own.get(segment.contents) or segment.share(self.path, name, synced=self._sync))

            self._unsettled = True
            self._line = line
            self._segments = adopted
            if adopted:
                self._columns = adopted[-1].schema
                self.head, self.end = adopted[0].first, adopted[-1].end
            else:
                self._columns = {}
                self.head, self.end = 0, 0

    def drop_before(self, row: int) -> None:
        """Drop the rows before this one. Segments entirely before it are removed once no kept version names them.

        Args:
            row: from 0 on. After `end`, the folder has no rows, and the next ones begin there.
        """
        with self._turn:
            self._begin_change(change=False)
            if check_whole_number("row", row, 0) <= self.head:
                return
            self._begin_change()
            self.head, self.end = row, max(row, self.end)  # together: an interrupt must not come between
            if self._segments and self._segments[0].end <= row:
                self._segments = [segment for segment in self._segments if segment.end > row]
                self._remove_unused()

    def forget_rows(self) -> None:
        """Start over: the next version has only rows appended from now on. Older versions are kept as usual."""
        self._segments = []
        self._columns = {}
        self.head = 0
        self.end = 0
        self._line = secrets.token_hex(4)
        self._number = 1  # of the next file of rows
        self._admitted = False
        self._begun = False

    def _other_columns_error(self, columns: Mapping[str, Column]) -> ValueError:
        text = difference(self._columns, make_schema(columns))
        return ValueError(f"the columns must be those of the folder: {text}; write them to another folder")

    def _begin_change(self, *, change: bool = True) -> None:
        """Before the first change, raise an error if the folder is open only for reading, or holds something that this
        run has not loaded; with ``change`` also remove the rows after the version that this run continues from."""
        if self._lock is None:
            if self._write:
                state = "closed"
            else:
                state = "open for reading: Folder(path, write=True) writes"
            raise ValueError(f"{self.path} is {state}")

        if not self._admitted:
            listing = Listing.of(self.path)
            # Newer versions that this run found damaged are known.
            known = 0 if self.version is None else self.version.number
            newer = [
                version for version in listing.versions if version > known and version not in self._damaged
            ]

            # Where rows count only as part of a version, rows without one are left over from an interrupted save.
            left_over = not self._log and not listing.versions
            not_loaded = not (self._loaded or left_over) and (listing.rows or listing.versions)
            unknown = self._whole_manifests(newer) or not_loaded

            if unknown and not self._overwrite:
                there = "rows"
                if listing.versions:
                    there = f"version {listing.versions[0]}"
                raise FileExistsError(
                    f"{self.path} holds {there}, which this run has neither loaded nor published: load it first, write "
                    "to another folder, or start again with overwrite=True"
                )
            if unknown:
                self._line = secrets.token_hex(4)
                self._kept = self._whole_manifests(listing.versions, self._keep)

            self._number = 1 + max((name.number for name in listing.rows), default=0)
            self._admitted = True

        if change and not self._begun:
            self._remove_unused()
            self._begun = True

    def _publish_rows(self, parts: list[Mapping[str, Column]], old: slice, first: int, end: int) -> None:
        """Write a segment that replaces some old ones."""
        name = RowsName(first, end, self._line, self._number)
        self._number += 1
        header, chunks = encode_segment(name, parts)
        files.publish(self.path, str(name), chunks, synced=self._sync, named=self._log)
        self._unsettled |= not self._log

        segment = Segment(self.path, name, header)
        unused = self._segments[old]
        head = self.head if self._segments else first
        reached = end if old.stop is None else self.end
        # One assignment, which Ctrl-C cannot split, and before files are removed: no row is published twice.
        self._segments[old], self._columns, self.head, self.end = [segment], segment.schema, head, reached

        if unused:
            self._remove_unused()

    def _settle(self, more: bool = False) -> None:
        """Sync the names of published files of rows, and if ``more``, the names of other files, too."""
        if self._sync and (more or self._unsettled):
            try:
                files.sync_folder(self.path)
            except OSError:
                # The system may drop data after a failed sync: these rows must be written again.
                if self._unsettled:
                    self.close()
                raise
        self._unsettled = False

    def _remove_unused(self) -> None:
        """Remove files that no kept version names and this run does not need, once their replacement is synced.

        What cannot be removed now stays. Rows are found by listing, up to the first hole. So that no crash leaves a
        hole before rows that are needed, files inside larger ones go first, and the others from the lowest on, each for
        good before the next.
        """
        if self._lock is None:
            return

        self._settle()
        needed = {LOCK, *(str(segment.name) for segment in self._segments)}
        needed = needed.union(*(manifest.names for manifest in self._kept))

        listing = Listing.of(self.path)
        unused = {name for name in listing.rows if str(name) not in needed}
        inside = find_covered(unused, listing.rows) if unused else set()

        # Remove manifests before their files, so that a kill leaves no version with missing files. A power loss may
        # leave one, but only of versions that are not kept; therefore no extra sync is needed.
        loose = [
            name for name in (*map(manifest_name, listing.versions), *listing.others) if name not in needed
        ]
        steps = [inside, *({name} for name in sorted(unused - inside))]

        with suppress(OSError):
            for name in loose:
                files.remove(self.path / name)
            for step in filter(None, steps):
                for rows_name in sorted(step):
                    files.remove(self.path / str(rows_name))
                if self._sync:
                    files.sync_folder(self.path)

    # -- reading -----------------------------------------------------------------------------------------------

    def _resume(self, before: "Version | Folder | None") -> None:
        """Go on from the newest version, if this run has loaded or published it; ValueError if a later version of the
        package wrote it."""
        listing = Listing.of(self.path)

        if isinstance(before, Folder):
            self._known = before._known
            newest = next(iter(before._kept), None)
            present = {*map(str, listing.rows), *listing.others}
            if newest is not None and newest.version.number == next(iter(listing.versions), None):
                records = newest.names - {manifest_name(newest.version.number)}

                # These names are unique because of the random word, so nothing needs to be read.
                if records and records <= present and self._keep <= before._keep:
                    kept = [
                        one for one in before._kept[: self._keep] if one.version.number in listing.versions
                    ]
                    # Drop the reader's maps, which keep removed files alive.
                    named = [Segment(self.path, segment.name, segment.header) for segment in before._named]
                    self._take(newest, named, kept)
                    return
        elif before is not None:
            self._known = {before}

        newest = next(iter(self._whole_manifests(listing.versions, 1)), None)
        if newest is None or newest.version not in self._known:
            return

        try:
            self._take(newest, self._open_rows(newest))
        except DamagedFileError as error:
            warnings.warn(f"{self.path}: {error}; all rows are rewritten", RuntimeWarning, stacklevel=5)
            self._take(newest, [])
            self.forget_rows()

    def _whole_manifests(self, numbers: Iterable[int], most: int | None = None) -> list[Manifest]:
        """Return the manifests of the newest undamaged versions, at most ``most``."""
        found: list[Manifest] = []
        for number in numbers:
            if most is None or len(found) < most:
                with suppress(DamagedFileError):
                    found.append(read_manifest(self.path, number))
        return found

    def _open_rows(self, manifest: Manifest) -> list[Segment]:
        """Open the segments of a version and check their headers; a reader maps them, before a writer removes them.

        Raises:
            DamagedFileError: a file is missing, or not the one that the version names.
            ValueError: the version has more bytes than it may have.
        """
        if self._max_bytes is not None and manifest.size > self._max_bytes:
            raise ValueError(
                f"version {manifest.version.number} of {self.path} has {manifest.size:,} bytes, max_bytes is "
                f"{self._max_bytes:,}"
            )

        segments = []
        for record in manifest.rows:
            name = RowsName.parse(record.name)
            assert name is not None  # the manifest was checked
            segment = Segment.open(self.path, name, record, mapped=not self._write)
            if segment.schema != manifest.columns:
                raise DamagedFileError(f"{name}: {difference(manifest.columns, segment.schema)}")
            segments.append(segment)
        return segments

    def read_version(self, number: int) -> LoadedVersion:
        """Read a version: its state, and the headers of its rows' files. The state of this object does not change.

        Raises:
            DamagedFileError: a file is missing or damaged.
            ValueError: the version has more bytes than ``max_bytes``, or a later version of the package is needed.
        """
        return self._read_version(read_manifest(self.path, number))

    def _read_version(self, manifest: Manifest) -> LoadedVersion:
        """Read and check all files that a manifest names."""
        segments = tuple(self._open_rows(manifest))
        if manifest.state:
            tensors = tensor_file.read_all(self.path, *manifest.state)
        else:
            tensors = {}

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

    def _take(
        self, manifest: Manifest, segments: Iterable[Segment], kept: list[Manifest] | None = None
    ) -> None:
        """Make a published version the one that the next save extends."""
        if kept is None:
            older = [version for version in self.versions() if version < manifest.version.number]
            kept = [manifest, *self._whole_manifests(older, self._keep - 1)]
        # In pairs: an interrupt must not come between what belongs together.
        self._kept, self._named = kept, list(segments)
        self._segments, self._columns = [*self._named], dict(manifest.columns)
        self.version, self._line = manifest.version, manifest.version.line
        self._known.add(manifest.version)
        self.head, self.end = manifest.head, manifest.end

        self._loaded = True
        self._admitted = False
        self._begun = False

    def _find_rows(
        self, listing: Listing, *, settled: bool, strict: bool
    ) -> tuple[Manifest | None, str, list[Segment]]:
        """Find the newest version, the line of the files, and the segments of all published rows, in order.

        These are the rows of that version and those in files after them. A missing file is lost if ``settled``, else a
        MissingFileError; losses are a warning, or a DamagedFileError if ``strict``.
        """

        def lose(text: str) -> None:
            if strict:
                raise DamagedFileError(f"{self.path}: {text}")
            warnings.warn(f"{self.path}: {text}", RuntimeWarning, stacklevel=4)

        manifest = next(iter(self._whole_manifests(listing.versions, 1)), None)
        named = [] if manifest is None else self._open_rows(manifest)
        known = {segment.name: segment for segment in named}
        if manifest is None:
            line = _longest_line(listing.rows)
            candidates = {name for name in listing.rows if name.line == line}
            first = None
            schema: Schema = {}
        else:
            line = manifest.version.line
            schema = manifest.columns
            # A merged file may begin within the version's rows; a file that ends within them adds nothing.
            later = {name for name in listing.rows if name.line == line and name.end > manifest.end}
            candidates = {*known, *later}
            first = named[0].first if named else manifest.end

        segments: list[Segment] = []
        end = first or 0
        total = 0

        for name in chain_of_names(candidates, first):
            try:
                segment = known.get(name) or Segment.open(self.path, name, mapped=not self._write)
                if schema and segment.schema != schema:
                    raise DamagedFileError(f"{name}: {difference(schema, segment.schema)}")
            except DamagedFileError as error:
                if isinstance(error, MissingFileError) and not settled:
                    raise
                lose(f"{error}; rows from {name.first} on are lost")
                break
            segments.append(segment)
            total += segment.size
            if self._max_bytes is not None and total > self._max_bytes:
                raise ValueError(
                    f"loading from {self.path} would read {total:,} bytes, max_bytes is {self._max_bytes:,}"
                )
            schema = segment.schema
            end = segment.end

        behind = min((name.first for name in candidates if name.first > end), default=None)
        if behind is not None:
            lose(
                f"rows {end} to {behind - 1} are missing; those after them are removed once rows are appended"
            )

        return manifest, line, segments


def _longest_line(names: Set[RowsName]) -> str:
    """Return the line with the most reachable rows; "" without files."""

    def reach(line: str) -> tuple[int, str]:
        """Return the number of reachable rows of a line, and its name to break ties."""
        chain = chain_of_names(name for name in names if name.line == line)
        return sum(name.end - name.first for name in chain), line

    return max({name.line for name in names}, key=reach, default="")


def _lock(path: Path) -> int:
    """Lock a folder for a writer; return the descriptor that has the lock.

    Raises:
        BlockingIOError: another writer has it.
        PermissionError: the folder cannot be written to.
    """
    try:
        return files.lock(path / LOCK)
    except BlockingIOError:
        text = f"another writer has {path}: close it first, or write to another folder"
        raise BlockingIOError(errno.EWOULDBLOCK, text) from None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        text = f"{path} cannot be written to ({error.strerror}): choose another folder"
        raise PermissionError(error.errno, text) from None


def find_covered(names: Set[RowsName], present: Set[RowsName]) -> set[RowsName]:
    """Return the ``names`` whose rows are also in another file of ``present`` that is larger or not in ``names``.

    >>> a, b, c = (RowsName(*rows, "0badcafe", 1) for rows in [(0, 9), (0, 4), (9, 12)])
    >>> find_covered({b, c}, {a, b, c}) == {b}
    True
    """
    found = set()
    largest: RowsName | None = None
    # Sorted by first row, longest first, and among equals the files that stay first: a file comes after those
    # that cover it, and if any earlier file covers it, the one that ends last does.
    for name in sorted(present, key=lambda name: (name.first, -name.end, name in names, name)):
        if largest is not None and name.end <= largest.end:
            if name in names:
                found.add(name)
        else:
            largest = name
    return found


def first_to_merge(sizes: Sequence[Size], whole: Size) -> int:
    """Return the position from which all segments should be merged; the last position if none should be.

    Segments of at least ``whole.rows`` rows or ``whole.bytes`` bytes are not merged. The shorter ones at the end are
    all merged once they form a whole segment together; until then, as many as have `FAN_IN` times the bytes of the
    largest of them.

    Args:
        sizes: sizes of all segments in order; the last one is about to be written.
        whole: size of a whole segment.

    >>> part, whole = Size(10, 100), Size(10_000, 100_000)
    >>> first_to_merge([whole, *[part] * 31], whole), first_to_merge([whole, *[part] * 32], whole)
    (31, 1)
    >>> first_to_merge([whole, Size(9_000, 90_000), Size(1_000, 10_000)], whole)
    1
    """
    last = len(sizes) - 1
    first = last
    rows = 0
    total = 0
    largest = 0

    for position in range(last, -1, -1):
        size = sizes[position]
        if size.rows >= whole.rows or size.bytes >= whole.bytes:
            break
        rows = rows + size.rows
        total = total + size.bytes
        largest = max(largest, size.bytes)
        if position < last and total >= FAN_IN * largest:
            first = position
        if rows >= whole.rows or total >= whole.bytes:
            return position
    return first
