"""What a checkpoint of trajectories is: where its rows are, and which share of them a rank loads."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from flatroll.datasets.trajectories.rlinf_folder import RlinfFolder
from flatroll.datasets.trajectories.rows import LANE, LEFT, PLACE, Record, records_of, rows_of
from flatroll.disk import DamagedFileError, Folder, Ragged, column_key, column_name
from flatroll.layout.checks import whole_number

NOTES = "trajectories"  # where the folder's notes have the state of the buffer
RANKS = "ranks"  # where the manifest of several ranks has their versions


class State(NamedTuple):
    """The state of a buffer besides its rows.

    Args:
        records: a line per trajectory.
        counter: number of the next one.
        generator: the state of the random generator, in hexadecimal digits.
    """

    records: list[Record]
    counter: int
    generator: str

    def to_json(self) -> Any:
        """Return what :meth:`from_json` reads."""
        return [[list(record) for record in self.records], self.counter, self.generator]

    @classmethod
    def from_json(cls, noted: Any) -> "State":
        """Read a state; DamagedFileError if it is none."""
        try:
            records, counter, generator = noted
            kinds = tuple(Record.__annotations__.values())
            made = [Record(*record) for record in records]
            if any(tuple(map(type, record)) != kinds or min(record[:3]) < 0 for record in made):
                raise ValueError("records")
            torch.Generator().set_state(_state_of(generator))
            return cls(made, int(counter), generator)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DamagedFileError(f"the state of the trajectories cannot be read ({error!r})") from None


def _state_of(digits: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(digits)), dtype=torch.uint8)


def restore(generator: torch.Generator, digits: str) -> None:
    """Set a generator to a state as `State` has it."""
    generator.set_state(_state_of(digits))


class OwnFolder:
    """Trajectories in a folder of rows.

    Args:
        path: of the folder.
        version: number of the version to read; None for all rows that are there.

    Attributes:
        records: of the trajectories.
        state: what was saved besides; None if only rows are there.
    """

    def __init__(self, path: Path, version: int | None) -> None:
        self.folder, self.state = Folder(path), None
        if version is not None or self.folder.versions():
            noted = self.folder.load(version).json
            if isinstance(noted, dict) and NOTES in noted:
                self.state = State.from_json(noted[NOTES])
        if version is None:
            self.folder.recover()  # those that were written since, too
        self.first = self.folder.head
        rows = self.folder.end - self.folder.head
        self.records = [] if self.state is None else self.state.records
        if sum(record.rows for record in self.records) != rows:
            skipped, self.records = self._found()
            self.first, self.state = self.first + skipped, None
        counter = 0 if self.state is None else self.state.counter
        self.counter = max([counter, *(record.number + 1 for record in self.records)])

    def _found(self) -> tuple[int, list[Record]]:
        """The trajectories by the marks of the rows, which are all that is read."""
        marks = []
        for key in (LANE, PLACE, LEFT):
            name = column_name(key)
            columns = [segment.columns.get(name) for segment in self.folder.segments]
            if not all(isinstance(column, torch.Tensor) for column in columns):
                raise ValueError(f"{self.folder.path} holds no trajectories: its rows have no {name!r}")
            skip = self.folder.head - self.folder.segments[0].first if columns else 0
            marks.append(torch.cat([torch.zeros(0, dtype=torch.int64), *columns])[skip:])  # type: ignore[list-item]
        return records_of(*marks)

    def read(self, first: int, stop: int) -> Iterator[TensorDictBase]:
        """Yield the rows of the trajectories from the ``first`` on, before the one at ``stop``; checked."""
        counts = [record.rows for record in self.records]
        low = self.first + sum(counts[:first])
        high = low + sum(counts[first:stop])
        while low < high:
            # Whole files at a time: each is read once.
            segment = next(segment for segment in self.folder.segments if segment.first <= low < segment.end)
            end = min(high, segment.end)
            columns = self.folder.read_rows(low, end)
            if any(isinstance(column, Ragged) for column in columns.values()):
                raise ValueError(f"{self.folder.path} holds rows in another form than trajectories have")
            yield TensorDict({column_key(name): values for name, values in columns.items()}, [end - low])
            low = end


class RlinfSource(OwnFolder):
    """Trajectories in a folder that RLinf has written."""

    def __init__(self, path: Path, pickled: bool) -> None:
        self._files = RlinfFolder(path, pickled)
        self.records = [
            Record(number, rows, 1)
            for number, rows in zip(self._files.numbers, self._files.rows, strict=True)
        ]
        self.state, self.counter = None, self._files.counter

    def read(self, first: int, stop: int) -> Iterator[TensorDictBase]:
        for position, fields in enumerate(self._files.read(first, stop), first):
            rows, records = rows_of([fields], self.records[position].number)
            found = sum(record.rows for record in records)
            if found != self.records[position].rows:
                raise DamagedFileError(
                    f"{self._files.path}: trajectory {self.records[position].number} has {found} rows, its index says "
                    f"{self.records[position].rows}"
                )
            if rows is not None:
                self.records[position] = records[0]
                yield rows


def sources_of(path: Path, pickled: bool) -> list[OwnFolder]:
    """Open a checkpoint: a folder of rows, those of several ranks, or one that RLinf has written.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is none of these, or damaged.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}: save_checkpoint({str(path)!r}) makes one")
    if RlinfFolder.is_one(path):
        return [RlinfSource(path, pickled)]
    folder = Folder(path)
    if not folder.versions():
        ranks = sorted(child.name for child in path.glob("rank-*-of-*"))
        why = f": its ranks {', '.join(ranks)} did not all finish the save" if ranks else ""
        raise FileNotFoundError(f"{path} holds no checkpoint of trajectories{why}")
    noted = folder.load().json
    if isinstance(noted, dict) and RANKS in noted:
        return [
            OwnFolder(rank_folder(path, rank, len(noted[RANKS])), whole_number("version", version))
            for rank, version in enumerate(noted[RANKS])
        ]
    return [OwnFolder(path, None)]


def rank_folder(path: Path, rank: int, ranks: int) -> Path:
    """The folder in which one of several ranks saves."""
    return path / f"rank-{rank}-of-{ranks}"


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
    whole_number("world_size", ranks)
    whole_number("local_rank", rank, 0)
    if rank >= ranks:
        raise ValueError(f"local_rank must be below world_size={ranks}, got {rank}")
    if len(rows) < ranks:
        raise ValueError(
            f"{len(rows)} trajectories cannot be shared out among {ranks} ranks, one at least for each: use a "
            f"world_size of at most {len(rows)}"
        )
    ends = [0, *accumulate(rows)]  # ends[i] rows stand before trajectory i
    bounds = [0]
    for number in range(1, ranks):
        # The bound next to the rank's part of the rows, which leaves one trajectory for each of the other ranks.
        possible = range(bounds[-1] + 1, len(rows) - (ranks - number) + 1)
        bounds.append(min(possible, key=lambda at: abs(ends[at] * ranks - number * ends[-1])))
    bounds.append(len(rows))
    return range(bounds[rank], bounds[rank + 1])
