"""The windows of a log: what is stored of each batch, and an index of them."""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from flatroll.datasets.replay_log.actions import join_bytes
from flatroll.datasets.replay_log.digests import Words
from flatroll.datasets.replay_log.varints import Bytes, Ints, decode_varints, encode_varints
from flatroll.disk.folder import Folder
from flatroll.disk.segments import Column, Ragged
from flatroll.disk.tensor_file import DamagedFileError

#: Instead of the seed of a reset: the env was reset without one, or was new and had been seeded when it was made.
UNSEEDED = -1
NEW = -2
#: Numbers of a restart: env, row of the env in the window, trajectory id, four words of the generator and one of its
#: buffered half word.
RESTART = 8
#: Numbers of a saved state: env, -1 for all; rows of the env (of all) in the window before it; bytes; number of the
#: window with the reset after which the state is that which this one is stored as a difference from, -1 for none.
SAVE = 4
#: Rows of an env in a window at most, and bytes of a saved state.
_MOST = 2**31 - 1
_PARTS = 6  # of a window's bytes, besides those of the action
#: Windows that stay in memory, and their bytes if they are more than one.
_CACHED = 64
_CACHED_BYTES = 64 << 20
#: A window is one row of a folder: numbers that are always in memory, and the rest.
_INDEX = "index"
_BODY = "body"


@dataclass
class Window:
    """What a log stores of a batch.

    Attributes:
        counts: rows of each env, int64 ``[E]``. The rows lie one env after the other.
        checksums: of the rows of each env, uint64 ``[E]``; see `flatroll.datasets.replay_log.digests`.
        digests: 8 bits of the digest of each row, uint8 ``[N]``.
        actions: the codes of the parts of the action.
        outputs: the columns that the policy wrote, packed; empty if there are none.
        kept: the env's columns, packed, if the rows are kept; else empty.
        events: resets of all envs, int64 ``[k, 1 + 2 E]``: the seed, the rows of each env in this window before it,
            and the id of each env's trajectory after it.
        restarts: int64 ``[m, RESTART]``, states of generators from which an episode can be begun.
        saves: int64 ``[s, SAVE]``, which states were saved, each before a row of its env.
        states: the saved states end to end, see `flatroll.datasets.replay_log.state_code`.
        marks: where trajectories begin and end, see `flatroll.datasets.replay_log.marks`.
    """

    counts: Ints
    checksums: Words
    digests: npt.NDArray[np.uint8]
    actions: list[bytes]
    outputs: bytes = b""
    kept: bytes = b""
    events: Ints = field(default_factory=lambda: np.zeros((0, 1), np.int64))
    restarts: Ints = field(default_factory=lambda: np.zeros((0, RESTART), np.int64))
    saves: Ints = field(default_factory=lambda: np.zeros((0, SAVE), np.int64))
    states: bytes = b""
    marks: bytes = b""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.counts.sum())

    @property
    def bytes(self) -> int:
        """Number of bytes of what is packed."""
        return len(self.outputs) + len(self.kept) + len(self.states) + sum(map(len, self.actions))

    def to_columns(self) -> dict[str, Column]:
        """Return it as one row of a folder."""
        index = Index(self.counts, self.events, self.restarts, self.saves, bool(self.kept))
        parts = [
            self.checksums.tobytes(),
            self.digests.tobytes(),
            self.outputs,
            self.kept,
            self.states,
            self.marks,
            *self.actions,
        ]
        lengths = encode_varints([len(part) for part in parts])
        return {
            _INDEX: Ragged(*join_bytes([index.encode()])),
            _BODY: Ragged(*join_bytes([b"".join([lengths, *parts])])),
        }


class Index(NamedTuple):
    """What of a window is always in memory.

    Args:
        counts, events, restarts, saves: see `Window`.
        is_kept: whether the rows are kept.
    """

    counts: Ints
    events: Ints
    restarts: Ints
    saves: Ints
    is_kept: bool

    def encode(self) -> bytes:
        """Return it as bytes."""
        tables = [self.events, self.restarts, self.saves]
        lengths = [len(table) for table in tables]
        flat = [table.reshape(-1) for table in tables]
        return encode_varints(np.concatenate([[self.is_kept], self.counts, lengths, *flat]))

    @classmethod
    def decode(cls, data: Bytes, envs: int) -> "Index":
        """Invert `encode`; DamagedFileError for anything else."""
        numbers, _ = decode_varints(data)
        at = 0

        def take(size: int) -> Ints:
            nonlocal at
            if not 0 <= size <= len(numbers) - at:
                raise DamagedFileError("a window of the log is shorter than it says")
            at += size
            return numbers[at - size : at]

        (is_kept,) = take(1)
        counts = take(envs)
        lengths = take(3).tolist()
        events, restarts, saves = (
            take(length * width).reshape(length, width)
            for length, width in zip(lengths, (1 + 2 * envs, RESTART, SAVE), strict=True)
        )
        if at != len(numbers):
            raise DamagedFileError("a window of the log is longer than it says")
        index = cls(counts, events, restarts, saves, bool(is_kept))
        problem = index.problem()
        if problem is not None:
            raise DamagedFileError(f"a window of the log has {problem}")
        return index

    def problem(self) -> str | None:
        """Return which part names rows or envs that the window does not have; None if all are right."""
        counts = self.counts
        envs = len(counts)
        if counts.min() < 0 or not counts.any() or counts.max() > _MOST:
            return f"{int(counts.sum()):,} rows"

        local = self.events[:, 1 : 1 + envs]
        if len(local) and (local.min() < 0 or (local > counts).any() or (np.diff(local, axis=0) < 0).any()):
            return "events outside of its rows"
        if (self.events[:, 0] < NEW).any():
            return "events with a negative seed"

        if len(self.restarts):
            (env, row) = self.restarts[:, :2].T
            if env.min() < 0 or env.max() >= envs:
                return "restarts of envs that it does not have"
            if ((row < 0) | (row >= counts[env])).any():
                return "restarts outside of its rows"

        if len(self.saves):
            (env, row, size) = self.saves[:, :3].T
            if env.min() < -1 or env.max() >= envs or size.min() < 0 or size.max() > _MOST:
                return "saved states of envs that it does not have, or of no size"
            most = np.where(env < 0, counts.sum(), counts[env])
            if ((row < 0) | (row > most)).any():
                return "saved states outside of its rows"
        return None


class Event(NamedTuple):
    """A reset of all envs.

    Args:
        window: in whose rows it is.
        seed: of the reset; `UNSEEDED`, or `NEW`.
        local: rows of each env in the window before it, int64 ``[E]``.
        rows: rows of each env in the log before it, int64 ``[E]``.
        ids: of the trajectories after it, int64 ``[E]``.
    """

    window: int
    seed: int
    local: Ints
    rows: Ints
    ids: Ints


class Restart(NamedTuple):
    """A state before the reset that begins an episode of one env.

    Args:
        row: number of the episode's first row among the rows of the env.
        traj: id of the trajectory.
        words: state of the env's generator, int64 ``[5]``, see `generator_words`.
    """

    row: int
    traj: int
    words: Ints


class Save(NamedTuple):
    """A saved state, before a row of one env or before a window of all.

    Args:
        row: of the env: number of its row that follows, whose observation is not known: rows after it can be made. Of
            all envs: number of the first window that can be made.
        window: that it is stored with.
        place: its number there.
        base: number of the window whose first reset gives the state that it is a difference from; -1 for none.
    """

    row: int
    window: int
    place: int
    base: int


class Windows:
    """The windows of a log, in order; the rows of most are on disk.

    Args:
        folder: the log's folder.
        num_envs: E.
        parts: number of parts of the action.
    """

    def __init__(self, folder: Folder, num_envs: int, parts: int) -> None:
        self._folder = folder
        self.num_envs = num_envs
        self._parts = parts
        self._recent: OrderedDict[int, Window] = OrderedDict()
        self._recent_bytes = 0
        self._added: dict[int, Window] = {}

        #: Rows up to the end of each window; and rows of each env, int64 ``[E]``.
        self.ends: list[int] = []
        self.env_ends: list[Ints] = []
        self.kept: list[bool] = []
        self.events: list[Event] = []
        #: Those of them that have a seed, or were the first of a new env.
        self.seeds: list[Event] = []
        self.restarts: list[list[Restart]] = [[] for _ in range(num_envs)]
        self.saves: list[list[Save]] = [[] for _ in range(num_envs)]
        #: Those of all envs together.
        self.saves_of_all: list[Save] = []

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.ends[-1] if self.ends else 0

    def begins(self, window: int) -> int:
        """Return the number of the first row of a window."""
        return self.ends[window - 1] if window else 0

    def env_begins(self, window: int) -> Ints:
        """Return how many rows each env has before a window, int64 ``[E]``."""
        if window:
            return self.env_ends[window - 1]
        return np.zeros(self.num_envs, np.int64)

    def counts(self, window: int) -> Ints:
        """Return how many rows each env has in a window, int64 ``[E]``."""
        return self.env_ends[window] - self.env_begins(window)

    def events_in(self, window: int) -> list[Event]:
        """Return the resets in a window."""
        first = bisect_left(self.events, window, key=attrgetter("window"))
        end = bisect_right(self.events, window, key=attrgetter("window"))
        return self.events[first:end]

    def add(self, window: Window) -> None:
        """Enter the next window, which is not on disk."""
        self._added[len(self)] = window
        self._enter(Index(window.counts, window.events, window.restarts, window.saves, bool(window.kept)))

    def load(self) -> None:
        """Enter all windows of the folder; only the columns of the index are read."""
        for segment in self._folder.segments:
            first = max(len(self), segment.first)
            if first >= segment.end:
                continue
            for row in self._read(first, segment.end, (_INDEX,)):
                self._enter(Index.decode(row[_INDEX], self.num_envs))

    def get(self, number: int) -> Window:
        """Return a window."""
        if number in self._added:
            return self._added[number]
        if number in self._recent:
            self._recent.move_to_end(number)
            return self._recent[number]

        # A file is read as a whole: take what follows out of it, too.
        segment = next(one for one in self._folder.segments if number < one.end)
        end = min(segment.end, len(self), number + _CACHED // 2)
        for place, row in enumerate(self._read(number, end)):
            self._remember(number + place, self._parse(row))
            if place and self._recent_bytes > _CACHED_BYTES // 2:
                break
        return self._recent[number]

    def state(self, save: Save) -> bytes:
        """Return a saved state, encoded."""
        window = self.get(save.window)
        ends = np.cumsum(window.saves[:, 2])
        return window.states[int(ends[save.place] - window.saves[save.place, 2]) : int(ends[save.place])]

    def _enter(self, index: Index) -> None:
        """Enter the next window into the index."""
        number = len(self)
        before = self.env_begins(number)
        envs = self.num_envs

        for event in index.events:
            local = event[1 : 1 + envs]
            found = Event(number, int(event[0]), local, before + local, event[1 + envs :])
            self.events.append(found)
            if found.seed != UNSEEDED:
                self.seeds.append(found)
        for restart in index.restarts:
            env = int(restart[0])
            row = int(before[env] + restart[1])
            self.restarts[env].append(Restart(row, int(restart[2]), restart[3:]))
        for place, (env, local, _, base) in enumerate(index.saves.tolist()):
            if env < 0:
                # A state in the middle of a window's rows serves the next one.
                self.saves_of_all.append(Save(number + (local > 0), number, place, base))
            else:
                self.saves[env].append(Save(int(before[env]) + local, number, place, base))

        self.ends.append(self.rows + int(index.counts.sum()))
        self.env_ends.append(before + index.counts)
        self.kept.append(index.is_kept)

    def _remember(self, number: int, window: Window) -> None:
        """Keep a window in memory; forget those that were used longest ago."""
        if (known := self._recent.pop(number, None)) is not None:
            self._recent_bytes -= known.bytes
        self._recent[number] = window
        self._recent_bytes += window.bytes
        while len(self._recent) > 1 and (len(self._recent) > _CACHED or self._recent_bytes > _CACHED_BYTES):
            self._recent_bytes -= self._recent.popitem(last=False)[1].bytes

    def _read(
        self, first: int, end: int, names: Sequence[str] = (_INDEX, _BODY)
    ) -> Iterator[dict[str, Bytes]]:
        """Read windows ``[first, end)``: the bytes of each column."""
        try:
            columns = self._folder.read_rows(first, end, names)
        except KeyError as error:
            raise DamagedFileError(f"it is not the folder of a replay log: no {error}") from None

        split: dict[str, list[Bytes]] = {}
        for name, column in columns.items():
            if (
                not isinstance(column, Ragged)
                or column.values.dtype != torch.uint8
                or column.values.ndim != 1
            ):
                raise DamagedFileError(f"it is not the folder of a replay log: {name!r} is no bytes")
            ends = column.lengths.cumsum(0).tolist()
            begins = [0, *ends[:-1]]
            data: Bytes = column.values.numpy()
            split[name] = [data[begin:end] for begin, end in zip(begins, ends, strict=True)]
        for place in range(end - first):
            yield {name: values[place] for name, values in split.items()}

    def _parse(self, row: Mapping[str, Bytes]) -> Window:
        """Return the window in a row of the folder; DamagedFileError if it is none."""
        index = Index.decode(row[_INDEX], self.num_envs)
        body = row[_BODY]
        lengths, at = decode_varints(body, _PARTS + self._parts)
        if lengths.min() < 0 or lengths.max() > len(body) or at + lengths.sum() != len(body):
            raise DamagedFileError("a window of the log has another length than its parts")
        ends = at + np.cumsum(lengths)
        parts = [body[begin:end] for begin, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]
        checksums, digests, outputs, kept, states, marks, *actions = parts

        counts = index.counts
        if len(checksums) != 8 * self.num_envs or len(digests) != counts.sum():
            raise DamagedFileError("a window of the log has checksums of another number of rows")
        if index.saves[:, 2].sum() != len(states):
            raise DamagedFileError("a window of the log has saved states of another length")
        if bool(len(kept)) != index.is_kept:
            raise DamagedFileError("a window of the log does not have the rows that it keeps")
        return Window(
            counts=counts,
            checksums=np.frombuffer(checksums.tobytes(), np.uint64),
            digests=digests,
            actions=[part.tobytes() for part in actions],
            outputs=outputs.tobytes(),
            kept=kept.tobytes(),
            events=index.events,
            restarts=index.restarts,
            saves=index.saves,
            states=states.tobytes(),
            marks=marks.tobytes(),
        )
