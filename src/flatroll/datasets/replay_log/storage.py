"""`ReplayLogStorage`: a read-only storage whose rows a log makes when they are sampled."""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import After, Columns, RowForm
from flatroll.buffers.columns.read_only import ReadOnlyColumn, Take
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.buffers.index.ring import Array, Draw, Follow, Ring
from flatroll.buffers.index.top_k_ring import RankedRing
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.buffers.storages.item_kinds import TensorDicts
from flatroll.buffers.storages.records import Links, Rows
from flatroll.datasets.replay_log.log import ReplayLog
from flatroll.datasets.replay_log.marks import Markers
from flatroll.datasets.replay_log.recorder import unchanged_generators
from flatroll.layout.checks import check_type, check_whole_number
from flatroll.layout.keys import NestedKey
from flatroll.layout.tensordict_seam import get_entry, leaves

#: Number of a window, and an env there; None for the rows of all envs.
_Name: TypeAlias = tuple[int, int | None]


class ReplayLogStorage(ColumnStorage):
    """The rows of a `ReplayLog` as the storage of a `ReplayBuffer`: they are made again when they are sampled.

    Rows cannot be written. Each sample steps the envs of its rows from a state before them and proves the rows by their
    checksums; those of one env in one batch stay in memory, up to ``cache_bytes``. Where envs cannot be stepped alone
    (envpool, simulators), a sample steps all of them from the last seed or saved state up to its last row: fill an
    ordinary buffer with the rows instead (see the page "A replay log").

    Making the buffer makes the rows of the first batch. Where trajectories begin and end is in the log.

    Args:
        log: the log, which must stay open.
        cache_bytes: bytes of rows that stay in memory. Default 256 MiB.

    Raises:
        ValueError: the log has no rows.
        ReplayMismatchError: while the buffer is made or sampled: the env makes other rows.

    >>> import gymnasium as gym, tempfile
    >>> from flatroll.buffers import ReplayBuffer, SliceSampler
    >>> from flatroll.rollouts import Collector
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     env = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    ...     collector = Collector(env, frames_per_batch=20, total_frames=40, seed=0, log=f"{folder}/run.replay")
    ...     batches = list(collector)
    ...     with ReplayLog(f"{folder}/run.replay") as log:
    ...         storage = ReplayLogStorage(log)
    ...         buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=4), batch_size=8)
    ...         sample = buffer.sample()
    >>> len(buffer), sample.batch_size
    (40, torch.Size([8]))
    """

    def __init__(self, log: ReplayLog, *, cache_bytes: int = 256 << 20) -> None:
        self._log = check_type("log", log, ReplayLog, "an open ReplayLog(path)")
        if not len(log):
            raise ValueError(f"{log.path} has no rows: collect some with Collector(..., log=path)")
        super().__init__(len(log))

        self._most = check_whole_number("cache_bytes", cache_bytes, 0)
        self._pieces: OrderedDict[_Name, TensorDict] = OrderedDict()
        self._bytes = 0
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards the envs and the pieces
        self._ends: Array = np.array(log._windows.ends, np.int64)
        self._ring: Ring | None = None
        self._boundaries: BoundaryKeys | None = None
        self.structure = TensorDicts(torch.Size([]))

        take: weakref.WeakMethod[Take] = weakref.WeakMethod(self._take)
        self.columns = {
            key: ReadOnlyColumn(take, key, column.dtype, column.shape[1:], _no_writes_error)
            for key, column in leaves(log._no_rows()).items()
        }

    # -- reading ---------------------------------------------------------------------------------------------------

    @override
    def read_rows(
        self, slots: Tensor, follow: Follow | None = None, *, keys: frozenset[NestedKey] | None = None
    ) -> Columns:
        return self._take(slots, keys)

    def _take(self, slots: Tensor, keys: Collection[NestedKey] | None) -> Columns:
        """Return these rows of the columns ``keys``, of all if that is None."""
        rows = slots.numpy(force=True)
        columns = {
            key: torch.empty(len(rows), *column.shape, dtype=column.dtype)
            for key, column in self.columns.items()
            if keys is None or key in keys
        }
        if not columns:
            return columns

        with self._lock:
            self._copy(rows, columns)
        return columns

    def _copy(self, rows: Array, columns: Columns) -> None:
        """Copy rows into columns: those in memory first, then those to be made."""
        windows = self._log._windows
        numbers = np.searchsorted(self._ends, rows, side="right")
        missing: dict[int, list[int]] = {}
        places: dict[int, Array] = {}

        for number in np.unique(numbers).tolist():
            at = np.flatnonzero(numbers == number)
            local = rows[at] - windows.begins(number)
            envs = np.searchsorted(self._env_ends(number), local, side="right")
            for env in np.unique(envs).tolist():
                piece = self._find(number, env)
                if piece is None:
                    missing.setdefault(number, []).append(env)
                    places[number] = at
                else:
                    mine = envs == env
                    self._copy_from(*piece, rows, at[mine], columns)

        if not missing:
            return
        with _generators_kept():
            for number, env, piece in self._log._make_replayer().pieces(missing):
                self._keep((number, env), piece)
                at = places[number]
                begin, end = self._span(number, env)
                inside = at[(rows[at] >= begin) & (rows[at] < end)]
                self._copy_from((number, env), piece, rows, inside, columns)

    def _env_ends(self, number: int) -> Array:
        """Return the number of rows in a window up to the end of each env, int64 ``[E]``."""
        ends: Array = np.cumsum(self._log._windows.counts(number))
        return ends

    def _span(self, number: int, env: int | None) -> tuple[int, int]:
        """Return the numbers of the first row of a piece and of the row after its last."""
        begin = self._log._windows.begins(number)
        if env is None:
            return begin, int(self._ends[number])

        ends = self._env_ends(number)
        first = int(ends[env - 1]) if env else 0
        return begin + first, begin + int(ends[env])

    def _copy_from(self, name: _Name, piece: TensorDict, rows: Array, at: Array, columns: Columns) -> None:
        """Copy the rows at the places ``at``, all of which the piece has."""
        begin, _ = self._span(*name)
        local = torch.from_numpy(rows[at] - begin)
        places = torch.from_numpy(at)
        for key, column in columns.items():
            column[places] = get_entry(piece, key)[local]

    # -- what stays in memory --------------------------------------------------------------------------------------

    def _find(self, number: int, env: int) -> tuple[_Name, TensorDict] | None:
        """Return the piece in memory that has the rows of an env in a window."""
        names: tuple[_Name, _Name] = ((number, env), (number, None))
        for name in names:
            piece = self._pieces.get(name)
            if piece is not None:
                self._pieces.move_to_end(name)
                return name, piece
        return None

    def _keep(self, name: _Name, piece: TensorDict) -> None:
        """Keep a piece, in the place of those that were not used for the longest time."""
        # Parts of one batch would keep the memory of all of it.
        own = piece if name[1] is None else piece.clone()
        self._pieces[name] = own
        self._bytes += _bytes_of(own)
        while self._bytes > self._most:
            self._bytes -= _bytes_of(self._pieces.popitem(last=False)[1])

    # -- for the buffer --------------------------------------------------------------------------------------------

    @override
    def fill(self, write: Callable[[TensorDictBase, None], Any]) -> None:
        """Register all rows with the buffer: the first batch is made, and tells which columns there are.

        Of the others only the markers are needed, which the log has; their rows are made once if the buffer knows
        trajectories by other columns.
        """
        self.check_free()
        self.filling = True
        try:
            layout = self._log._layout
            markers = Markers(self._log._windows, layout.init, layout.traj, layout.counts)
            first = 0
            for number, end in enumerate(self._ends.tolist()):
                marked = markers.next()
                if number and not isinstance(self._ring, TrajectoryIndex):
                    write(TensorDict({}, [len(self._log) - first]), None)
                    break
                if number and self._knows(markers.keys):
                    write(marked, None)
                else:
                    with self._lock:
                        batch = self._log.rows(first, end)
                    write(batch, None)
                first = end
        finally:
            self.filling = False

    def _knows(self, keys: Collection[NestedKey]) -> bool:
        """Return whether these columns are all by which the buffer knows trajectories."""
        names = self._boundaries
        if names is None:
            return False
        read = {names.is_init, names.done, names.traj, names.step_count, *names.more_done}
        return not (read & set(self.columns)) - set(keys)

    @override
    def prepare(
        self, batch: Any, final: TensorDictBase | None, keys: BoundaryKeys | None, whole: bool = False
    ) -> Rows:
        if not self.filling:
            raise _no_writes_error()

        self._boundaries = keys
        fragments = None
        if keys is not None:
            fragments = Fragments.read(batch, keys)
        return Rows(len(batch), {}, fragments)

    @override
    def link(self, ring: Ring, rows: Rows, keys: BoundaryKeys | None) -> Links | None:
        if not isinstance(ring, TrajectoryIndex) or rows.fragments is None:
            return None
        return Links(*ring.link(rows.fragments)[0])

    @override
    def check_removable(self) -> None:
        raise _no_writes_error()

    @override
    def use_ring(self, ring: Ring, alone: str | None, first: bool = False) -> None:
        if isinstance(ring, RankedRing):
            raise TypeError(
                "ReplayLogStorage keeps rows in the order in which they came: extend a buffer of another storage "
                "with log.rows(first, end) to rank them"
            )
        if not first:  # the buffer is emptied, or gets another state
            raise _no_writes_error()
        super().use_ring(ring, alone, first)
        self._ring = ring

    @property
    @override
    def bytes_per_row(self) -> int:
        return self.nbytes // len(self._log)

    @property
    @override
    def nbytes(self) -> int:
        return self._log.stats()["bytes"]

    @property
    @override
    def bytes_saved(self) -> int:
        return 0

    # -- what it refuses -------------------------------------------------------------------------------------------

    @override
    def write(self, slot: int, rows: Rows, after: After | None = None) -> NoReturn:
        raise _no_writes_error()

    @override
    def put(self, slots: Tensor, rows: Rows, at: Tensor | None = None) -> NoReturn:
        raise _no_writes_error()

    @override
    def write_drawn(self, draw: Draw, data: object, shape: torch.Size, keys: BoundaryKeys | None) -> NoReturn:
        raise _no_writes_error()

    @override
    def _allocate(self, like: RowForm) -> NoReturn:
        raise _no_writes_error()

    @override
    def state_dict(self, rows: int, pool_rows: int = 0) -> NoReturn:
        raise self._no_state_error()

    @override
    def tables(self, pool_rows: int) -> NoReturn:
        raise self._no_state_error()

    @override
    def check_tables(self, state: dict[str, Any], ring: Ring) -> NoReturn:
        raise ValueError(str(self._no_state_error()))  # the error of a state that does not fit

    @override
    def enter_process(self) -> None:
        if self._process != os.getpid():
            raise self._no_process_error()

    def __getstate__(self) -> NoReturn:
        raise self._no_process_error()

    def _no_state_error(self) -> RuntimeError:
        """Return the error for saving or loading a buffer."""
        return RuntimeError(
            f"the rows of a ReplayLogStorage are in its log: keep {self._log.path}, and make the buffer again from "
            "ReplayLog(path). To save rows, extend a buffer of another storage with log.rows(first, end)"
        )

    def _no_process_error(self) -> TypeError:
        """Return the error for the use of the envs in another process."""
        return TypeError(
            f"a ReplayLogStorage and its envs belong to one process: open {self._log.path} in the other one, "
            "ReplayLogStorage(ReplayLog(path))"
        )


def _generators_kept() -> AbstractContextManager[None]:
    """Return a context that restores the global random generators, in the main thread.

    Another thread would take back what the main thread draws meanwhile.
    """
    if threading.current_thread() is threading.main_thread():
        return unchanged_generators()
    return nullcontext()


def _bytes_of(piece: TensorDict) -> int:
    """Return the bytes of a batch's columns."""
    return sum(column.nbytes for column in leaves(piece).values())


def _no_writes_error() -> RuntimeError:
    """Return the error for a change of the rows."""
    return RuntimeError(
        "the rows of a ReplayLogStorage are those of its log and cannot be changed: extend a buffer of another "
        "storage, such as LazyTensorStorage(max_size), with log.rows(first, end), and write to that one"
    )
