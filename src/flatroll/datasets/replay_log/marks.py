"""Where trajectories begin and end, as few bytes, and the marker columns that follow from that."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from flatroll.datasets.replay_log.actions import expand, squeeze
from flatroll.datasets.replay_log.windows import Event, Ints, Windows
from flatroll.disk.tensor_file import DamagedFileError
from flatroll.layout.keys import DONE, NestedKey
from flatroll.layout.tensordict_seam import nest

Flags = npt.NDArray[np.bool_]


def encode_marks(init: Flags, done: Flags, counts: Ints) -> bytes:
    """Return which rows are the first and the last of episodes as bytes.

    Args:
        init: bool ``[N]``, rows one env after the other.
        done: bool ``[N]``.
        counts: rows of each env, int64 ``[E]``.

    >>> done = np.array([0, 0, 1, 0, 0, 1, 0, 0], bool)
    >>> init = np.array([1, 0, 0, 1, 0, 0, 0, 0], bool)
    >>> packed = encode_marks(init, done, np.array([5, 3]))
    >>> len(packed), [x.tolist() for x in decode_marks(packed, np.array([5, 3]))] == [init.tolist(), done.tolist()]
    (7, True)
    """
    # A row after the last of an episode is the first of the next one: the exceptions are stored.
    unexpected = init ^ _after(done, counts)
    numbers = []
    for flags in (done, unexpected):
        places = np.flatnonzero(flags)
        numbers += [len(places), *np.diff(places, prepend=0).tolist()]
    return squeeze(b"".join(map(_varint, numbers)))


def decode_marks(packed: bytes, counts: Ints) -> tuple[Flags, Flags]:
    """Invert `encode_marks`; DamagedFileError for anything else."""
    rows = int(counts.sum())
    data = expand(packed, 20 * (rows + 1))
    numbers = _numbers(data)
    found = []
    try:
        for _ in range(2):
            count = next(numbers)
            if count > rows:
                raise DamagedFileError("a window of the log has more ends than rows")
            places = np.cumsum([next(numbers) for _ in range(count)], dtype=np.int64)
            if count and not 0 <= places.min() <= places.max() < rows:
                raise DamagedFileError("a window of the log has ends outside of its rows")
            flags = np.zeros(rows, bool)
            flags[places] = True
            found.append(flags)
    except StopIteration:
        raise DamagedFileError("a window of the log lacks ends of trajectories") from None
    done, unexpected = found
    return unexpected ^ _after(done, counts), done


def _after(done: Flags, counts: Ints) -> Flags:
    """Return which rows follow, in their env, a row that is done; bool ``[N]``."""
    after = np.roll(done, 1)
    begins = np.cumsum(counts) - counts
    after[begins[counts > 0]] = False
    return after


def _varint(number: int) -> bytes:
    """Return a number as 7 bits a byte, the last ones first."""
    parts = []
    while number >= 128:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def _numbers(data: bytes) -> Iterator[int]:
    """Yield the numbers that `_varint` wrote end to end."""
    number = 0
    shift = 0
    for byte in data:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield number
            number = 0
            shift = 0
        elif shift >= 63:
            raise DamagedFileError("a window of the log has a number of more than 63 bits")


class Markers:
    """The marker columns of a log's windows, one after the other, without its rows.

    Args:
        windows: of the log.
        init: key of ``is_init``.
        traj: key of the trajectory ids.
        counts: keys of step counters.
    """

    def __init__(
        self, windows: Windows, init: NestedKey, traj: NestedKey, counts: Sequence[NestedKey]
    ) -> None:
        envs = windows.num_envs
        self._windows = windows
        self._init = init
        self._traj = traj
        self._counts = counts
        self._next = 0
        # Of each env's last row.
        self._ids = np.zeros(envs, np.int64)
        self._steps = np.zeros(envs, np.int64)

    @property
    def keys(self) -> set[NestedKey]:
        """The columns."""
        return {self._init, self._traj, DONE, *self._counts}

    def next(self) -> TensorDict:
        """Return the columns of the next window, flat ``[N]``."""
        number = self._next
        self._next += 1
        windows = self._windows
        counts = windows.counts(number)
        init, done = decode_marks(windows.get(number).marks, counts)

        ids, awaited = self._ids_of(init, counts, windows.events_in(number))
        steps = self._steps_of(init, counts)
        has_rows = counts > 0
        lasts = (np.cumsum(counts) - 1)[has_rows]
        self._ids[has_rows] = ids[lasts]
        self._steps[has_rows] = steps[lasts]
        for env, before in awaited.items():
            self._ids[env] = before

        columns: dict[NestedKey, torch.Tensor] = {
            self._init: torch.from_numpy(init)[:, None],
            DONE: torch.from_numpy(done)[:, None],
            self._traj: torch.from_numpy(ids),
        }
        for key in self._counts:
            columns[key] = torch.from_numpy(steps)[:, None]
        return nest(columns, len(init))

    def _ids_of(self, init: Flags, counts: Ints, events: Sequence[Event]) -> tuple[Ints, dict[int, int]]:
        """Return the id of each row's trajectory; and that before the next one, of envs that were reset since."""
        envs = len(counts)
        begins = np.cumsum(counts) - counts
        passed = np.cumsum(init)
        before = np.concatenate([[0], passed])[begins]
        ids: Ints = np.repeat(self._ids - envs * before, counts) + envs * passed
        awaited: dict[int, int] = {}

        for event in events:
            for env in range(envs):
                own = slice(begins[env] + event.local[env], begins[env] + counts[env])
                if own.start < own.stop:
                    # The first row after the reset has the event's id.
                    ids[own] += event.ids[env] - ids[own.start]
                else:
                    # Its first row is in a later window, and raises the id.
                    awaited[env] = int(event.ids[env]) - envs
        return ids, awaited

    def _steps_of(self, init: Flags, counts: Ints) -> Ints:
        """Return the number of steps in its episode before each row."""
        begins = np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.arange(len(init))
        first = np.maximum.accumulate(np.where(init, rows, -1))
        continued = np.repeat(self._steps + 1, counts) + rows - begins
        steps: Ints = np.where(first >= begins, rows - first, continued)
        return steps
