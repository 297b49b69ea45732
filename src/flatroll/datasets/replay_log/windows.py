"""The windows of a log: what is stored of each batch, and an index of them."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatroll.datasets.replay_log.actions import join_bytes
from flatroll.datasets.replay_log.digests import Words
from flatroll.disk.folder import Folder
from flatroll.disk.segments import Column, Ragged
from flatroll.disk.tensor_file import DamagedFileError

Ints = npt.NDArray[np.int64]

#: Instead of the seed of a reset: the env was reset without one, or was new and had been seeded when it was made.
UNSEEDED = -1
NEW = -2
#: Numbers of a restart: env, row of the env in the window, trajectory id, four words of the generator, one of its
#: buffered half word, and the bytes of the env's own save.
RESTART = 9
_CACHED = 64  # windows whose rows stay in memory


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
        restarts: int64 ``[m, RESTART]``, states from which an episode can be begun.
        saves: the envs' own saves of these, end to end.
    """

    counts: Ints
    checksums: Words
    digests: npt.NDArray[np.uint8]
    actions: list[bytes]
    outputs: bytes = b""
    kept: bytes = b""
    events: Ints = field(default_factory=lambda: np.zeros((0, 1), np.int64))
    restarts: Ints = field(default_factory=lambda: np.zeros((0, RESTART), np.int64))
    saves: bytes = b""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.counts.sum())

    def to_columns(self) -> dict[str, Column]:
        """Return it as one row of a folder."""
        envs = len(self.counts)
        columns: dict[str, Column] = {
            "counts": torch.from_numpy(self.counts.astype(np.int32)).view(1, envs),
            "checksums": torch.from_numpy(self.checksums.view(np.int64)).view(1, envs),
            "digests": _ragged(torch.from_numpy(self.digests)),
            "events": _ragged(torch.from_numpy(self.events.reshape(-1, 1 + 2 * envs))),
            "restarts": _ragged(torch.from_numpy(self.restarts)),
        }
        texts = {"outputs": self.outputs, "kept": self.kept, "saves": self.saves}
        texts |= {f"action{i}": packed for i, packed in enumerate(self.actions)}
        for name, text in texts.items():
            columns[name] = Ragged(*join_bytes([text]))
        return columns


def _ragged(values: Tensor) -> Ragged:
    """Return the values of one row."""
    return Ragged(values.contiguous(), torch.tensor([len(values)]))


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
        generator: state of the env's generator, a `numpy.random.PCG64`.
        save: the env's own save; empty if it has none.
    """

    row: int
    traj: int
    generator: dict[str, object]
    save: bytes


class Windows:
    """The windows of a log, in order; the rows of most are on disk.

    Args:
        folder: the log's folder.
        num_envs: E.
        parts: number of parts of the action.
    """

    def __init__(self, folder: Folder, num_envs: int, parts: int) -> None:
        self._folder = folder
        self._num_envs = num_envs
        self._parts = parts
        self._recent: OrderedDict[int, Window] = OrderedDict()

        #: Rows up to the end of each window; and rows of each env, int64 ``[E]``.
        self.ends: list[int] = []
        self.env_ends: list[Ints] = []
        self.kept: list[bool] = []
        self.events: list[Event] = []
        self.restarts: list[list[Restart]] = [[] for _ in range(num_envs)]

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
        return np.zeros(self._num_envs, np.int64)

    def add(self, window: Window) -> None:
        """Enter the next window into the index."""
        number = len(self)
        before = self.env_begins(number)
        first = self.rows
        envs = self._num_envs

        for event in window.events:
            local = event[1 : 1 + envs]
            self.events.append(Event(number, int(event[0]), local, before + local, event[1 + envs :]))

        at = 0
        for restart in window.restarts:
            env = int(restart[0])
            save = window.saves[at : at + int(restart[8])]
            at += int(restart[8])
            generator = _generator_state(restart[3:8])
            self.restarts[env].append(
                Restart(int(before[env] + restart[1]), int(restart[2]), generator, save)
            )

        self.ends.append(first + window.rows)
        self.env_ends.append(before + window.counts)
        self.kept.append(bool(window.kept))
        self._remember(number, window)

    def pop(self) -> None:
        """Take the last window out of the index again."""
        number = len(self) - 1
        begins = self.env_begins(number)
        self._recent.pop(number, None)
        self.ends.pop()
        self.env_ends.pop()
        self.kept.pop()
        while self.events and self.events[-1].window == number:
            self.events.pop()
        for restarts, begin in zip(self.restarts, begins.tolist(), strict=True):
            while restarts and restarts[-1].row >= begin:
                restarts.pop()

    def append(self, window: Window) -> None:
        """Write the next window."""
        self._folder.append(window.to_columns())
        self.add(window)

    def load(self) -> None:
        """Enter all windows of the folder."""
        for first in range(len(self), self._folder.end, _CACHED):
            end = min(first + _CACHED, self._folder.end)
            columns = self._folder.read_rows(first, end)
            for place in range(end - first):
                self.add(self._parse(columns, place))

    def get(self, number: int) -> Window:
        """Return a window."""
        window = self._recent.get(number)
        if window is None:
            window = self._parse(self._folder.read_rows(number, number + 1), 0)
            self._remember(number, window)
        else:
            self._recent.move_to_end(number)
        return window

    def _remember(self, number: int, window: Window) -> None:
        self._recent[number] = window
        if len(self._recent) > _CACHED:
            self._recent.popitem(last=False)

    def _parse(self, columns: Mapping[str, Column], place: int) -> Window:
        """Return the window in a row of the folder; DamagedFileError if it is none."""
        envs = self._num_envs
        try:
            counts = _row(columns["counts"], place).numpy().astype(np.int64)
            window = Window(
                counts=counts,
                checksums=_row(columns["checksums"], place).numpy().view(np.uint64),
                digests=_row(columns["digests"], place).numpy(),
                actions=[_text(columns[f"action{i}"], place) for i in range(self._parts)],
                outputs=_text(columns["outputs"], place),
                kept=_text(columns["kept"], place),
                events=_row(columns["events"], place).numpy(),
                restarts=_row(columns["restarts"], place).numpy(),
                saves=_text(columns["saves"], place),
            )
            _check(window, envs)
        except (KeyError, TypeError, IndexError, RuntimeError) as error:
            raise DamagedFileError(f"it is not the folder of a replay log: {str(error)[:200]}") from None
        return window


def _row(column: Column, place: int) -> Tensor:
    """Return the values of one row of a column."""
    if not isinstance(column, Ragged):
        return column[place]
    end = int(column.lengths[: place + 1].sum())
    return column.values[end - int(column.lengths[place]) : end]


def _text(column: Column, place: int) -> bytes:
    return _row(column, place).numpy().tobytes()


def _check(window: Window, envs: int) -> None:
    """Raise DamagedFileError if the parts of a window do not fit together."""
    counts = window.counts
    problem = None
    if counts.shape != (envs,) or window.checksums.shape != (envs,):
        problem = f"counts of {counts.shape} envs, expected {envs}"
    elif counts.min() < 0 or window.digests.shape != (counts.sum(),) or window.digests.dtype != np.uint8:
        problem = "its numbers of rows do not agree"
    elif window.events.dtype != np.int64 or window.events.shape[1:] != (1 + 2 * envs,):
        problem = "events of another form"
    elif window.restarts.dtype != np.int64 or window.restarts.shape[1:] != (RESTART,):
        problem = "restarts of another form"
    else:
        local = window.events[:, 1 : 1 + envs]
        restarts = window.restarts
        if len(local) and (local.min() < 0 or (local > counts).any() or (np.diff(local, axis=0) < 0).any()):
            problem = "events outside of its rows"
        elif len(restarts) and (restarts[:, 0].min() < 0 or restarts[:, 0].max() >= envs):
            problem = "restarts of envs that it does not have"
        elif len(restarts) and ((restarts[:, 1] < 0) | (restarts[:, 1] >= counts[restarts[:, 0]])).any():
            problem = "restarts outside of its rows"
        elif restarts[:, 8].min(initial=0) < 0 or restarts[:, 8].sum() != len(window.saves):
            problem = "saves of another length"
    if problem is not None:
        raise DamagedFileError(f"a window of the log has {problem}")


def generator_words(state: Mapping[str, object]) -> list[int] | None:
    """Return the state of a `numpy.random.PCG64` as five signed words; None for another generator."""
    if state.get("bit_generator") != "PCG64":
        return None
    inner: object = state["state"]
    assert isinstance(inner, Mapping)
    has_half = state["has_uint32"]
    half = state["uinteger"]
    assert isinstance(has_half, int) and isinstance(half, int)

    numbers: Sequence[int] = [inner["state"], inner["inc"]]
    words = []
    for number in numbers:
        words += [number >> 64, number & (2**64 - 1)]
    # The half word has 32 bits; the flag is above it.
    words.append((has_half << 32) | half)
    return [word - 2**64 if word >= 2**63 else word for word in words]


def _generator_state(words: Ints) -> dict[str, object]:
    """Invert `generator_words`."""
    high, low, inc_high, inc_low, half = (int(word) % 2**64 for word in words)
    return {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": inc_high << 64 | inc_low},
        "has_uint32": half >> 32 & 1,
        "uinteger": half & 0xFFFFFFFF,
    }
