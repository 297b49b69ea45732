"""The contents of a checkpoint of trajectories: its rows, and the share that a rank loads."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from flatroll.buffers.columns.column import RowForm
from flatroll.datasets.trajectories.rlinf_folder import RlinfFolder
from flatroll.datasets.trajectories.rows import (
    DONE,
    LANE,
    LEFT,
    MOST_NUMBERS,
    PLACE,
    TrajectoryRecord,
    check_marks,
    check_numbers,
    find_differing,
    find_form,
    find_records,
    from_trajectories,
    shift_numbers,
)
from flatroll.disk import DamagedFileError, Folder, Ragged, Version, column_key, column_name
from flatroll.disk.folder import Listing
from flatroll.layout.checks import check_whole_number

NOTES = "trajectories"  # the entry of the folder's notes with the state of the buffer
RANKS = "ranks"  # the entry of the manifest with the versions of several ranks
LOADING = "loading"  # the folder, inside a run's folder, with the data that is about to replace its rows
_MARKS = {LANE: "int64", PLACE: "int32", LEFT: "int32", DONE: "bool"}


class State(NamedTuple):
    """The state of a buffer besides its rows.

    Args:
        records: a line per trajectory.
        counter: number of the next one.
        generator: the state of the random generator, in hexadecimal digits; empty to leave it.
        end: number of the row after the last in the folder, by which one knows whether the state is of its rows.
    """

    records: list[TrajectoryRecord]
    counter: int
    generator: str
    end: int

    def to_json(self) -> Any:
        """Return what :meth:`from_json` reads."""
        return [[list(record) for record in self.records], self.counter, self.generator, self.end]

    @classmethod
    def from_json(cls, noted: Any, path: Path) -> "State":
        """Read the state in a folder; DamagedFileError if it is invalid."""
        try:
            records, counter, generator, end = noted
            kinds = tuple(TrajectoryRecord.__annotations__.values())
            made = [TrajectoryRecord(*record) for record in records]
            if any(tuple(map(type, record)) != kinds for record in made) or type(end) is not int:
                raise ValueError("records")

            check_numbers(made)
            if (
                type(counter) is not int
                or not all(r.number < counter for r in made)
                or counter > MOST_NUMBERS
            ):
                raise ValueError("counter")

            if generator:
                restore(torch.Generator(), generator)
            return cls(made, counter, generator, end)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DamagedFileError(
                f"{path}: the state of the trajectories cannot be read ({error!r:.200})"
            ) from None


def restore(generator: torch.Generator, digits: str) -> None:
    """Set a generator to a state in the form that `State` stores."""
    generator.set_state(torch.frombuffer(bytearray(bytes.fromhex(digits)), dtype=torch.uint8))


class OwnFolder:
    """Trajectories in a folder of rows.

    Args:
        path: of the folder.
        version: the version to read; None for all rows that are there.

    Attributes:
        records: records of the trajectories.
        counter: number of the next trajectory.
        state: state saved with these rows, or None.
        version: the version that was read, or None.
    """

    version: Version | None = None

    def __init__(self, path: Path, version: Version | None) -> None:
        self.folder = Folder(path)
        self.state = None
        self.counter = 0
        state: State | None = None
        if version is not None or self.folder.versions():
            number = None if version is None else version.number
            loaded = self.folder.load(number)
            self.version = loaded.version
            if version not in (None, self.version):
                raise DamagedFileError(
                    f"{path}: version {self.version.number} belongs to another run than the others"
                )

            if isinstance(loaded.json, dict) and NOTES in loaded.json:
                state = State.from_json(loaded.json[NOTES], path)
                self.counter = state.counter

        if version is None:
            self.folder.recover()  # also rows written since that version

        self.first = self.folder.head
        rows = self.folder.end - self.folder.head
        if (
            state is not None
            and sum(record.rows for record in state.records) == rows
            and state.end == self.folder.end
        ):
            self.state = state
            self.records = state.records
        else:
            skipped, self.records = self._find_records()
            self.first += skipped

        self.counter = max([self.counter, *(record.number + 1 for record in self.records)])

    def _find_records(self) -> tuple[int, list[TrajectoryRecord]]:
        """The trajectories by the marks of the rows, which are all that is read."""
        for key, dtype in _MARKS.items():
            column = self.folder.columns.get(column_name(key))
            if self.folder.segments and (column is None or tuple(column) != (dtype, (), False)):
                raise ValueError(
                    f"{self.folder.path} holds no trajectories: its rows have no {column_name(key)!r}"
                )

        marks: list[Any] = []
        for key in (LANE, PLACE, LEFT):
            columns: list[Any] = [segment.columns[column_name(key)] for segment in self.folder.segments]
            skip = 0
            if columns:
                skip = self.folder.head - self.folder.segments[0].first
            marks.append(torch.cat([torch.zeros(0, dtype=torch.int64), *columns])[skip:])

        try:
            return find_records(*marks)
        except ValueError as error:
            raise DamagedFileError(f"{self.folder.path}: {error}") from None

    def read(self, first: int, stop: int) -> Iterator[TensorDictBase]:
        """Yield the rows of the trajectories at positions ``first`` to ``stop - 1``, checked."""
        counts = [record.rows for record in self.records]
        begin = self.first + sum(counts[:first])
        low = begin
        high = low + sum(counts[first:stop])
        while low < high:
            # One file at a time, so that each is read once.
            segment = next(segment for segment in self.folder.segments if segment.first <= low < segment.end)
            end = min(high, segment.end)

            columns = self.folder.read_rows(low, end)
            if any(isinstance(column, Ragged) for column in columns.values()):
                raise ValueError(f"{self.folder.path} holds rows that are not in the form of trajectories")
            rows = TensorDict({column_key(name): values for name, values in columns.items()}, [end - low])

            form = find_form(rows)
            if any(form.get(key) != (getattr(torch, dtype), torch.Size([])) for key, dtype in _MARKS.items()):
                raise ValueError(f"{self.folder.path} holds no trajectories: its rows have no marks")

            try:
                check_marks(rows, self.records[first:stop], low - begin)
            except ValueError as error:
                raise DamagedFileError(f"{self.folder.path}, {segment.name}: {error}") from None

            yield rows
            low = end


class RlinfSource(OwnFolder):
    """Trajectories in a folder that RLinf has written."""

    def __init__(self, path: Path, pickled: bool) -> None:
        self._files = RlinfFolder(path, pickled)
        self.records = [
            TrajectoryRecord(number, rows, 1)
            for number, rows in zip(self._files.numbers, self._files.rows, strict=True)
        ]
        self.state = None
        self.counter = self._files.counter

    def read(self, first: int, stop: int) -> Iterator[TensorDictBase]:
        for position, fields in enumerate(self._files.read(first, stop), first):
            record = self.records[position]
            try:
                rows, records = from_trajectories([fields], record.number)
            except (TypeError, ValueError) as error:
                raise DamagedFileError(f"{self._files.path}: trajectory {record.number}: {error}") from None

            found = sum(one.rows for one in records)
            if rows is None or found != record.rows:
                raise DamagedFileError(
                    f"{self._files.path}: trajectory {record.number} has {found} rows, its index says {record.rows}"
                )
            self.records[position] = records[0]
            yield rows


class SavedTrajectories:
    """What a buffer is to load: a folder of rows, those of several ranks, or one that RLinf has written.

    Args:
        path: of the folder.
        pickled: whether to read RLinf's ``.pkl`` files.

    Attributes:
        sources: the folders.
        version: of the folder, None if it has none.
        chosen: which of the trajectories to load, at first all.
        is_whole: whether these are not the share of a rank.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the folder is of another kind, or damaged.
    """

    def __init__(self, path: Path, pickled: bool) -> None:
        self.sources: list[OwnFolder] = []
        self.path = path
        self.is_whole = True
        self.version: Version | None = None

        if not path.is_dir():
            raise FileNotFoundError(f"there is no folder {path}: save_checkpoint({str(path)!r}) makes one")
        # Our own folders have such an index as well.
        if RlinfFolder.is_one(path) and not Listing.of(path).versions:
            self.sources = [RlinfSource(path, pickled)]
        elif is_loading(path):  # left by a run that was killed while it loaded
            self.sources = [OwnFolder(path / LOADING, None)]
        else:
            self._open()
        self.chosen = range(len(self.rows))

    def _open(self) -> None:
        folder = Folder(self.path)
        if not folder.versions():
            ranks = sorted(child.name for child in self.path.glob("rank-*-of-*"))
            why = ""
            if ranks:
                why = f": its ranks {', '.join(ranks)} did not all finish the save"
            raise FileNotFoundError(f"{self.path} holds no checkpoint of trajectories{why}")

        loaded = folder.load()
        versions = rank_versions(loaded.json)
        if versions is None:
            self.sources = [OwnFolder(self.path, None)]
        else:
            for rank, version in enumerate(versions):
                self.sources.append(OwnFolder(rank_folder(self.path, rank, len(versions)), version))
        self.version = loaded.version

    @property
    def rows(self) -> list[int]:
        """How many rows each trajectory has."""
        return [record.rows for source in self.sources for record in source.records]

    def take_share(self, rank: int, ranks: int) -> None:
        """Choose the trajectories of one of several ranks, as `share` does."""
        self.chosen = share(self.rows, rank, ranks)
        self.is_whole = ranks == 1

    def take_last(self, most: int) -> None:
        """Keep the last chosen trajectories, with at most ``most`` rows; ValueError if the last one has more."""
        rows = self.rows
        first = self.chosen.stop
        while first > self.chosen.start and rows[first - 1] <= most:
            first -= 1
            most -= rows[first]
        if first == self.chosen.stop > self.chosen.start:
            raise ValueError(
                f"the last trajectory of {self.path} has {rows[first - 1]} rows, more than max_size={most}: "
                "pass a larger max_size"
            )
        self.chosen = range(first, self.chosen.stop)

    @property
    def counter(self) -> int:
        """The number of the next trajectory if there is one source; 0 if each rank has its own numbers."""
        if len(self.sources) == 1:
            return self.sources[0].counter
        return 0

    @property
    def generator(self) -> str:
        """The generator state to resume from; empty if there is none."""
        state = None
        if len(self.sources) == 1 and self.is_whole:
            state = self.sources[0].state
        if state is None:
            return ""
        return state.generator

    def check(self, form: RowForm) -> None:
        """Read the chosen trajectories; ValueError if damaged, or if rows differ in form (from ``form`` if given)."""
        others = "those of the buffer" if form else "its first ones"
        for rows, _ in self.read():
            found = find_form(rows)
            form = form or found
            if names := find_differing(form, found):
                raise ValueError(
                    f"{self.path} has rows that differ from {others} in the entries {names}: all must have the "
                    "same entries, dtypes and shapes. Nothing was loaded"
                )

    def read(self) -> Iterator[tuple[TensorDictBase, list[TrajectoryRecord]]]:
        """Yield the rows of the chosen trajectories, and the records of those that begin with them.

        Several ranks may have the same numbers: those of a later one are shifted behind those of the others.
        """
        before = 0
        free = 0
        for source in self.sources:
            first = max(self.chosen.start - before, 0)
            stop = min(self.chosen.stop - before, len(source.records))
            first_record = first
            shift = max(0, free - min((record.number for record in source.records), default=0))
            pieces = source.read(first, stop) if first < stop else ()

            for rows in pieces:
                begun = int((rows[PLACE] == 0).sum())
                # Looked up only now: a source may complete its records while it reads.
                records = [
                    record._replace(number=record.number + shift)
                    for record in source.records[first_record : first_record + begun]
                ]
                check_numbers(records)  # the shift may have made the numbers too large
                if shift:
                    rows = shift_numbers(rows, shift)
                yield rows, records
                first_record += begun

            before += len(source.records)
            free = max([free, source.counter + shift])


def is_loading(path: Path) -> bool:
    """Whether a run's folder holds staged rows that are to replace its own."""
    folder = path / LOADING
    return folder.is_dir() and not folder.is_symlink() and bool(Folder(folder).versions())


def rank_versions(noted: object) -> list[Version] | None:
    """Return the versions of several ranks that a manifest names; None if it names none.

    Raises:
        DamagedFileError: they are invalid.
    """
    if not isinstance(noted, dict) or RANKS not in noted:
        return None
    try:
        versions = [
            Version(check_whole_number("version", number), str(line)) for number, line in noted[RANKS]
        ]
    except (TypeError, ValueError) as error:
        raise DamagedFileError(f"the versions of the ranks cannot be read ({error})") from None
    return versions


def rank_folder(path: Path, rank: int, ranks: int) -> Path:
    """The folder in which one of several ranks saves; ValueError if it is a link."""
    folder = path / f"rank-{rank}-of-{ranks}"
    if folder.is_symlink():
        raise ValueError(f"{folder} must be a folder: links are not followed")
    return folder


def share(rows: Sequence[int], rank: int, ranks: int) -> range:
    """Choose the trajectories of a rank: a contiguous run of whole ones, at least one, balanced by rows.

    Args:
        rows: how many each has.
        rank: from 0 on.
        ranks: how many there are.

    Raises:
        ValueError: there are more ranks than trajectories, or no such rank.

    >>> [list(share([5, 1, 1, 1, 4], rank, 3)) for rank in range(3)]
    [[0], [1, 2, 3], [4]]
    """
    check_whole_number("world_size", ranks)
    check_whole_number("local_rank", rank, 0)
    if rank >= ranks:
        raise ValueError(f"local_rank must be below world_size={ranks}, got {rank}")

    if len(rows) < ranks:
        if rows:
            most = f"use a world_size of at most {len(rows)}"
        else:
            most = "there is nothing to load"
        raise ValueError(
            f"{len(rows)} trajectories cannot be divided among {ranks} ranks, at least one for each: {most}"
        )

    ends = [0, *accumulate(rows)]  # ends[i] rows precede trajectory i
    bounds = [0]
    for number in range(1, ranks):
        # The boundary nearest to an equal share of rows that leaves at least one trajectory for each other rank.
        possible = range(bounds[-1] + 1, len(rows) - (ranks - number) + 1)
        bounds.append(min(possible, key=lambda at: abs(ends[at] * ranks - number * ends[-1])))
    bounds.append(len(rows))
    return range(bounds[rank], bounds[rank + 1])
