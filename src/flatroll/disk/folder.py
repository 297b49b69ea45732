"""`Folder`: rows and versions on disk, as they survive a crash."""

import secrets
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import NoReturn, Self, TypeVar

from torch import Tensor

from flatroll.disk import files, tensor_file
from flatroll.disk.columns import Column, Schema, byte_count, check_columns, difference, schema_of
from flatroll.disk.listing import Listing, Lock, lock_folder, remove_all_but
from flatroll.disk.loading import (
    LoadedVersion,
    ReadOptions,
    load_version,
    newest_whole,
    recover_rows,
    whole_manifests,
)
from flatroll.disk.manifest import Json, Manifest, Version, read_manifest
from flatroll.disk.merging import Size, first_to_merge
from flatroll.disk.names import LOCK, MOST_ROWS, FileRecord, RowsName, manifest_name, state_name
from flatroll.disk.segments import Segment, encode_segment, read_range
from flatroll.disk.tensor_file import DamagedFileError
from flatroll.layout.checks import whole_number

T = TypeVar("T")


class Folder:
    """Rows and versions of a state in a folder: each save is there whole or not at all, by whatever it is interrupted.

    Rows are a log: row r is the r-th that was ever written. `append` publishes rows as one immutable file, a
    *segment*; `publish` writes a version, which names the segments, and holds a state: JSON and tensors. A writer has
    the folder for itself; any number of readers may look meanwhile.

    Args:
        path: of the folder. A writer makes it if it is missing.
        write: whether to write; the folder is locked until `close`.
        sync: return from `append` and `publish` once the data are on the disk, safe from a power loss. With False they
            are safe from the end of the process only. Default True.
        log: whether rows are safe when `append` returns, for `recover`. With False they are when `publish` does, which
            syncs the names of all files at once. Default True.
        keep: number of versions that stay. Default 2.
        overwrite: begin anew in a folder that holds rows or versions, which go as new versions come. Default False: a
            writer goes on from what it has loaded.
        resume: the version that this run loaded or published last, so that it may go on from there without `load`.
        segment_bytes: segments below this are merged as they gather. Default 32 MiB.
        segment_rows: segments of so many rows are not short, whatever their bytes. Default: no limit.
        max_bytes: refuse to load a version whose files have more. Default: no limit.

    Raises:
        FileNotFoundError: there is no such folder to read.
        BlockingIOError: another writer has it.
        ValueError: it holds other files and none of its own.

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
    #: Number of the row to come.
    end: int
    #: What was loaded or published last; None if nothing was.
    version: Version | None
    _segments: list[Segment]
    _columns: Schema
    _kept: list[Manifest]  # the versions whose files stay, the newest first
    _line: str  # the word in names of files by which runs that do not know each other never mix

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        write: bool = False,
        sync: bool = True,
        log: bool = True,
        keep: int = 2,
        overwrite: bool = False,
        resume: Version | None = None,
        segment_bytes: int = 32 << 20,
        segment_rows: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.path = Path(path)
        self._write, self._sync, self._log, self._overwrite = write, sync, log, overwrite
        self._unsettled = False  # whether names of published rows may not be on the disk yet
        self._keep = whole_number("keep", keep)
        self._segment_bytes = whole_number("segment_bytes", segment_bytes)
        self._segment_rows = MOST_ROWS if segment_rows is None else whole_number("segment_rows", segment_rows)
        self._options = ReadOptions(mapped=not write, max_bytes=max_bytes)
        self._turn = threading.RLock()
        self._lock: Lock | None = None
        self._damaged: set[int] = set()  # versions that could not be read
        self._begin_anew()
        if write:
            files.make_folder(self.path, synced=sync)
            Listing.of(self.path).check_own(self.path)
            self._lock = lock_folder(self.path)
        try:
            listing = Listing.of(self.path)
            if not write:
                listing.check_own(self.path)
            newest = whole_manifests(self.path, listing.versions, 1)
            if resume is not None and [manifest.version for manifest in newest] == [resume]:
                self._go_on_from(newest[0])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Folder stays in its process: open the path anew in the other one")

    def close(self) -> None:
        """Give the lock back; what was published stays."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The files of rows, end to end, as this process knows them; each has ``first``, ``end`` and ``columns``."""
        return tuple(self._segments)

    @property
    def columns(self) -> Schema:
        """What the columns hold, by name; empty without rows."""
        return dict(self._columns)

    def stats(self) -> dict[str, int]:
        """Numbers of rows, of segments, and of bytes in them."""
        sizes = [segment.size for segment in self._segments]
        return {"rows": self.end - self.head, "segments": len(sizes), "bytes": sum(sizes)}

    def rows_per_segment(self, row_bytes: int) -> int:
        """How many rows of so many bytes make a whole segment: save many rows in pieces of that size."""
        return max(1, min(self._segment_rows, -(-self._segment_bytes // max(row_bytes, 1))))

    def versions(self) -> list[int]:
        """Numbers of the versions in the folder, the newest first, damaged ones included."""
        return Listing.of(self.path).versions

    def load(self, number: int | None = None, *, strict: bool = False) -> LoadedVersion:
        """Read the newest version, or the one of this number: its state, and where its rows are (`read_rows`).

        Args:
            number: of the version. Default: the newest.
            strict: raise if the newest version is damaged. Default False: warn, and read the one before it.

        Raises:
            FileNotFoundError: there is no version, or not this one; the text lists those there are.
            DamagedFileError: all versions are damaged, or one with ``strict``; the text names the files.
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
            result, found, lost = newest_whole(
                self.path,
                number,
                lambda version: use(self._go_on_from(read_manifest(self.path, version))),
                self._damaged,
                strict=strict,
            )
            if lost:
                warnings.warn(
                    f"{self.path}: version {found} (rows {self.head} to {self.end - 1}) was loaded, since newer ones "
                    f"are damaged and lost: {'; '.join(lost)}",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return result

    def recover(self) -> range:
        """Take all rows that were published, whether a version names them or not, and return their numbers.

        Rows after the newest version are found by the names of their files, up to the first hole.
        """
        with self._turn:
            found = recover_rows(self.path, self._options)
            if found.manifest is None:
                self._begin_anew()
            else:
                self._take(found.manifest, [])
            self._line, self._segments = found.line or self._line, found.segments
            if found.segments:
                self._columns, self.end = found.segments[-1].schema, found.segments[-1].end
                self.head = max(self.head, found.segments[0].first)
            self._loaded, self._admitted, self._cleared = True, False, False
            return range(self.head, self.end)

    def read_rows(self, first: int | None = None, end: int | None = None) -> dict[str, Column]:
        """Read rows ``[first, end)`` into new memory, with checksums.

        Args:
            first: number of a row. Default: `head`.
            end: number of a row. Default: `end`.

        Raises:
            IndexError: the folder does not have all of them.
            DamagedFileError: they are not those that were written; the text names the file.
        """
        first, end = self.head if first is None else first, self.end if end is None else end
        if not self.head <= first <= end <= self.end:
            raise IndexError(f"rows [{first}, {end}) asked for, there are [{self.head}, {self.end})")
        return read_range(self._segments, self._columns, first, end)

    def append(self, columns: Mapping[str, Column], first: int | None = None) -> None:
        """Publish rows ``[first, first + N)`` as one segment: all of them or none, also if the process is killed.

        Short segments before them are merged into it once enough have gathered, so that the number of files stays
        small. The tensors must not change before the call returns.

        Args:
            columns: name (`column_name` makes one of a nested key) to a tensor ``[N, ...]`` or `Ragged`. All rows have
                the columns of the first ones, with their dtypes and shapes.
            first: number of the first row: `end`, or any if the folder has no rows. Default: `end`.

        Raises:
            ValueError: ``first`` leaves a hole, a column does not fit, or the folder is open for reading.
            TypeError: a dtype that files cannot hold.
            FileExistsError: the folder holds what this run has not loaded.
            OSError: the disk is full or failed; the rows before stand.
        """
        with self._turn:
            self._admit()
            first = self.end if first is None else first
            count = check_columns(columns)
            if first < 0 or (self._segments and first != self.end):
                raise ValueError(f"first must be {self.end}, the number of the row to come, got {first}")
            if self._segments:
                self._check_schema(columns)
            if count == 0:
                return
            self._clear_once()
            self._append(columns, first, first + count)

    def publish(
        self,
        state: Json,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        head: int | None = None,
        extra: Json = None,
    ) -> Version:
        """Publish a version: the rows appended so far, and a state. Older versions than ``keep`` go.

        Args:
            state: what JSON can say; floats come back exactly.
            tensors: the other part of the state, of any shapes.
            head: number of the version's first row. Default: `head`.
            extra: anything else for JSON, which `flatroll inspect` shows.

        Returns:
            the number and line of the version: what ``resume`` takes.

        Raises:
            TypeError, ValueError: ``state`` is no JSON, or a dtype cannot be stored.
            FileExistsError: the folder holds what this run has not loaded.
            OSError: the disk is full or failed; the version before stands.
        """
        with self._turn:
            self._admit()
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
            self._clear_once()
            try:
                if record is not None:
                    files.publish(self.path, record.name, chunks, synced=self._sync, named=False)
                self._settle(record is not None)
                files.publish(self.path, manifest_name(version.number), [text], synced=self._sync)
                self._kept, self.version = [manifest, *self._kept][: self._keep], version
            finally:
                self._remove_unused()  # versions that are too old; the new state, if its manifest failed
            return version

    def replace(self, columns: Mapping[str, Column], first: int) -> None:
        """Write rows anew that were edited; they count once a version is published.

        Args:
            columns: as for `append`.
            first: number of the first row. The rows must be all those of one or several segments.

        Raises:
            ValueError: they are not, or a column does not fit.
            OSError: the disk is full or failed; the rows before stand.
        """
        with self._turn:
            self._admit()
            end = first + check_columns(columns)
            firsts = [segment.first for segment in self._segments]
            ends = [segment.end for segment in self._segments]
            if first not in firsts or end not in ends:
                raise ValueError(f"rows [{first}, {end}) are not whole segments, which begin at {firsts}")
            self._check_schema(columns)
            self._clear_once()
            self._publish_rows([columns], slice(firsts.index(first), ends.index(end) + 1), first, end)

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Take the rows of another folder's segments for this one's, without writing those that are on the same disk.

        Segments of the same rows and checksums stay, the others go, once a version is published: until then the one
        before stands, and `recover` finds its rows.

        Args:
            segments: end to end, as `segments` of the other folder gives them.

        Raises:
            OSError: the disk is full or failed; the rows before stand.
        """
        with self._turn:
            self._admit()
            self._clear_once()
            own = {segment.contents: segment for segment in self._segments}
            adopted: list[Segment] = []
            line = secrets.token_hex(4)  # of its own: rows of the version before may have the same numbers
            for segment in segments:
                name = RowsName(segment.first, segment.end, line, 0)
                adopted.append(own.get(segment.contents) or segment.share(self.path, name, synced=self._sync))
            self._unsettled, self._line, self._segments = True, line, adopted
            self._columns = adopted[-1].schema if adopted else {}
            self.head, self.end = (adopted[0].first, adopted[-1].end) if adopted else (0, 0)

    def drop_before(self, row: int) -> None:
        """Forget the rows before this one. Segments that lie wholly before it go, once no kept version names them.

        Args:
            row: from 0 on. After `end`, the folder has no rows, and the next ones begin there.
        """
        with self._turn:
            self._admit()
            if whole_number("row", row, 0) <= self.head:
                return
            self._clear_once()
            self.head, self.end = row, max(row, self.end)
            if self._segments and self._segments[0].end <= row:
                self._segments = [segment for segment in self._segments if segment.end > row]
                self._remove_unused()

    def _check_schema(self, columns: Mapping[str, Column]) -> None:
        if schema_of(columns) != self._columns:
            text = difference(self._columns, schema_of(columns))
            raise ValueError(f"the columns must be those of the folder: {text}; write them to another folder")

    def _begin_anew(self) -> None:
        """Know of no rows and no versions."""
        self._segments = []
        self._columns = {}
        self._kept = []
        self.head = self.end = 0
        self.version = None
        self._line = secrets.token_hex(4)
        self._number = 1  # of the next file of rows
        self._loaded = self._admitted = self._cleared = False

    def _admit(self) -> None:
        """Refuse to write to what is open for reading, and to what holds something that this run has not loaded."""
        if self._lock is None:
            state = "closed" if self._write else "open for reading: Folder(path, write=True) writes"
            raise ValueError(f"{self.path} is {state}")
        if self._admitted:
            return
        listing = Listing.of(self.path)
        # Newer versions that this run found damaged are not unknown to it.
        known = 0 if self.version is None else self.version.number
        newer = [version for version in listing.versions if version > known and version not in self._damaged]
        unknown = bool(whole_manifests(self.path, newer)) or not (self._loaded or listing.is_empty)
        if unknown and not self._overwrite:
            there = f"version {listing.versions[0]}" if listing.versions else "rows"
            raise FileExistsError(
                f"{self.path} holds {there}, which this run has neither loaded nor published: load it first, write to "
                "another folder, or begin anew with overwrite=True"
            )
        if unknown:
            self._line = secrets.token_hex(4)
            self._kept = whole_manifests(self.path, listing.versions, self._keep)
        self._number = 1 + max((name.number for name in listing.rows), default=0)
        self._admitted = True

    def _clear_once(self) -> None:
        """Before the first change, remove what this run does not go on from: rows after the version that it loaded."""
        if not self._cleared:
            self._remove_unused()
            self._cleared = True

    def _append(self, columns: Mapping[str, Column], first: int, end: int) -> None:
        """Write rows as a segment, together with the short ones before them if it is time for that."""
        sizes = [Size(segment.rows, segment.data_bytes) for segment in self._segments]
        sizes.append(Size(end - first, byte_count(columns)))
        merged = first_to_merge(sizes, Size(self._segment_rows, self._segment_bytes))
        try:
            parts: list[Mapping[str, Column]] = [segment.read() for segment in self._segments[merged:]]
        except DamagedFileError as error:  # merging would give wrong rows a right checksum
            warnings.warn(f"{self.path}: {error}; it is left as it is", RuntimeWarning, stacklevel=4)
            merged, parts = len(self._segments), []
        begin = self._segments[merged].first if parts else first
        self._publish_rows([*parts, columns], slice(merged, None), begin, end)

    def _publish_rows(self, parts: list[Mapping[str, Column]], old: slice, first: int, end: int) -> None:
        """Write a segment that takes the place of some old ones."""
        name = RowsName(first, end, self._line, self._number)
        self._number += 1
        header, chunks = encode_segment(name, parts)
        files.publish(self.path, str(name), chunks, synced=self._sync, named=self._log)
        self._unsettled |= not self._log
        segment, unused = Segment(self.path, name, header), self._segments[old]
        head, reached = self.head if self._segments else first, end if old.stop is None else self.end
        # All at once, without a call that Ctrl-C could end, and before files go: no row is published twice.
        self._segments[old], self._columns, self.head, self.end = [segment], segment.schema, head, reached
        if unused:
            self._remove_unused()

    def _settle(self, more: bool = False) -> None:
        """Sync the names of published rows, and with ``more`` of other files."""
        if self._sync and (more or self._unsettled):
            try:
                files.sync_folder(self.path)
            except OSError:
                # The system may forget what a failed sync did not write: another writer must write these rows anew.
                if self._unsettled:
                    self.close()
                raise
        self._unsettled = False

    def _remove_unused(self) -> None:
        """Remove what no kept version names and this run does not need, once what takes its place is on the disk."""
        if self._lock is None:
            return
        self._settle()
        own = {LOCK, *(str(segment.name) for segment in self._segments)}
        remove_all_but(self.path, own.union(*(manifest.names for manifest in self._kept)), synced=self._sync)

    def _go_on_from(self, manifest: Manifest) -> LoadedVersion:
        """Read a version and take it for what this run has: what it writes comes after."""
        loaded = load_version(self.path, manifest, self._options)
        self._take(manifest, loaded.segments)
        return loaded

    def _take(self, manifest: Manifest, segments: Iterable[Segment]) -> None:
        older = [version for version in self.versions() if version < manifest.version.number]
        self._segments, self._columns = list(segments), dict(manifest.columns)
        self._kept = [manifest, *whole_manifests(self.path, older, self._keep - 1)]
        self.version, self._line = manifest.version, manifest.version.line
        self.head, self.end = manifest.head, manifest.end
        self._loaded, self._admitted, self._cleared = True, False, False
