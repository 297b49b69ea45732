"""Writes to a replay buffer one vector step at a time, for loops of third-party trainers."""

import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.column import Columns, TensorColumn, put_rows, take_rows
from flatroll.buffers.index.ring import Array, Draw
from flatroll.buffers.protocols import Buffer
from flatroll.buffers.steps.episodes import Episodes
from flatroll.buffers.steps.staging import StagedColumn, choose_window, entries
from flatroll.buffers.steps.stored import StepCopies, StepPositions
from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.buffers.storages.continuity import compared_keys
from flatroll.buffers.transforms.transform import (
    apply,
    changes_stored,
    lookahead,
    read_others,
    row_chooser,
)
from flatroll.layout.checks import check_whole_number, check_writer_number
from flatroll.layout.keys import (
    DONE,
    ID_BITS,
    IS_INIT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    plain_key,
)
from flatroll.layout.tensordict_seam import leaves, nest
from flatroll.layout.transfers import upload

if TYPE_CHECKING:
    from flatroll.kernels.rows.gather import HostColumns

Names: TypeAlias = tuple[NestedKey, ...] | None  # names of entries; None for all
Step: TypeAlias = Mapping[Any, Any] | TensorDictBase


class Overwritten(IndexError):
    """Rows were overwritten by another writer before they were read."""


class StepWriter:
    """Collects single steps of E envs and stores windows of L steps, env after env, with ``buffer.extend``.

    Rows wait in arrays ``[E, L, ...]`` until the window is full, so that an env's steps are adjacent in the storage: a
    compact one then stores each observation once, and stacked frames are shared. Trajectories continue across windows.
    :meth:`read` and :meth:`sample` also see waiting rows; ``buffer.sample`` only sees stored ones.

    Made by ``buffer.writer_for(num_envs)``; usable in ``with``, which closes it. One thread writes, others may read.

    Attributes:
        num_envs: number E of envs.
        window: number L of steps stored at a time.
        steps: steps written so far; the next one has this number.

    >>> import numpy as np
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    >>> with buffer.writer_for(2, window=2) as writer:
    ...     for t in range(3):  # env 1 begins its second episode at step 1
    ...         now = np.array([10 + t, [20, 30, 31][t]])
    ...         step = {"observation": now, ("next", "observation"): now + 1, ("next", "reward"): np.ones(2)}
    ...         writer.write({**step, ("next", "terminated"): np.array([False, t == 0])})
    ...     len(buffer), len(writer), writer.read([1, 2], 0)["observation"].tolist()
    (4, 6, [11, 12])
    >>> buffer[:]["observation"].tolist(), buffer[:]["collector", "traj_ids"].tolist()
    ([10, 11, 20, 30, 12, 31], [0, 0, 1, 3, 0, 3])
    """

    def __init__(self, buffer: Buffer, num_envs: int, *, window: int | None = None, writer: int = 0) -> None:
        self.buffer = buffer
        self.num_envs = check_whole_number("num_envs", num_envs)
        if not isinstance(buffer.storage, ColumnStorage) or buffer.storage.ndim > 1 or buffer.writer.chooses:
            raise TypeError(
                "a step writer needs a storage of columns with ndim=1 whose rows stay in order, such as "
                f"LazyTensorStorage(max_size), got {type(buffer.storage).__name__} (ndim={buffer.storage.ndim}) and "
                f"{type(buffer.writer).__name__}"
            )

        buffer.storage.compiled = True
        self.window = choose_window(buffer.storage.capacity, num_envs, window)
        self.writer = check_writer_number(writer)
        self.steps = 0
        self._closed = False
        self._positions = StepPositions(num_envs)
        self._episodes = Episodes(num_envs, writer)
        self._forget()
        buffer.step_writers.add(self)

    def _forget(self) -> None:
        """Reset to the state after the last stored row; the next step defines the entries."""
        self._staged: dict[NestedKey, StagedColumn] = {}
        self._copies: dict[Names, StepCopies] = {}
        self._tails: dict[Names, HostColumns[NestedKey]] = {}
        self._given: dict[NestedKey, StagedColumn] = {}  # entries of a step; the others are filled in
        self._filled = 0
        self._limit = self.window - self.steps % self.window
        self._marked = 0  # waiting steps whose markers are filled in
        self._begun = False  # whether there is a previous row that a step can be checked against
        self._episodes.begin((), ())
        self._lock = threading.Lock()

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, step: Step) -> None:
        """Add one step of all envs; the last one of a window stores the window.

        Args:
            step: tensors or arrays ``[E, ...]`` by key, nested or not: a dict or a tensordict ``[E]``. It needs
                ``("next", "terminated")``, ``("next", "truncated")`` or ``("next", "done")`` (bool); those of the
                three, ``"is_init"`` and ``("collector", "traj_ids")`` that are missing are filled in. Numbers per row
                may be ``[E]`` or ``[E, 1]``; rewards become float32. ``("next", "observation")`` is the true next
                observation: at the end of an episode the final one, not that of the reset.

        Raises:
            RuntimeError: the writer is closed.
            ValueError: the number of envs, entries or shapes differ from the first step.
            TypeError: dtypes differ from the first step, or flags are not bool.
            KeyError: no entry marks the end of episodes.

        Errors of ``extend`` are raised at the last step of a window; the window is kept, and the next call stores it.
        A row that does not continue the previous one (an env was reset in between) begins a new trajectory, with a
        warning unless ``"is_init"`` is set. These errors and this warning are raised before the step is added. An
        episode that seems to continue after its end is reported when markers are computed: at the end of a window, or
        by a read.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("this step writer is closed: buffer.writer_for makes a new one")
            if self._filled == self._limit:
                self._store()
            if not self._begun:
                self._begin(step)

            given = self._given
            row = self._filled
            values = step
            if not isinstance(values, dict) or values.keys() != given.keys():
                values = dict(entries(step))
                unknown = [key for key in values if key not in given]
                if unknown:
                    raise ValueError(f"the step has an entry {unknown[0]!r} that the first one did not have")
                missing = [key for key in given if key not in values]
                if missing:
                    raise ValueError(f"the step lacks the entry {missing[0]!r} that the first one had")

            for key, column in given.items():  # if a step fails half-way, its row is not read
                column.put(row, values[key])
            if self._episodes.check(given, row):
                self._mark(row + 1)

            self._begun = True
            self._filled = row + 1
            self.steps += 1
            if self._filled == self._limit:
                self._store()

    def _begin(self, step: Step) -> None:
        """Create the arrays for steps like this one."""
        staged = {
            key: StagedColumn.like(key, value, self.num_envs, self.window) for key, value in entries(step)
        }
        if not {TERMINATED, TRUNCATED, DONE} & staged.keys():
            raise KeyError(
                f"nothing in the step says where episodes end: it needs {TERMINATED!r}, {TRUNCATED!r} or {DONE!r}, "
                f"got {sorted(map(str, staged))}"
            )

        names = {as_tuple(key) for key in staged}
        inside = [name for name in names if any(name[:n] in names for n in range(1, len(name)))]
        if inside:
            raise ValueError(f"the step has {inside[0]!r}, but its parent is a tensor")

        given = staged.copy()
        flags: list[NestedKey] = [IS_INIT, DONE]
        if {TERMINATED, TRUNCATED} & staged.keys():
            flags += [TERMINATED, TRUNCATED]
        for key in flags:
            if key not in staged:
                staged[key] = StagedColumn(key, torch.bool, torch.Size([1]), self.num_envs, self.window)
        if TRAJ_IDS not in staged:
            staged[TRAJ_IDS] = StagedColumn(TRAJ_IDS, torch.int64, torch.Size([]), self.num_envs, self.window)

        kinds = {key: TensorColumn(column.data[0]) for key, column in staged.items()}
        self._episodes.begin(given, compared_keys(kinds, ()))

        storage = self.buffer.storage
        if storage.columns and not any(map(changes_stored, self.buffer.transforms)):
            # Raise now, and not when the window is full, if the step does not match the stored rows.
            blank = {key: torch.zeros_like(column.window(1)) for key, column in staged.items()}
            with self.buffer.write_lock:
                storage.prepare(nest(blank, self.num_envs), None, self.buffer.markers)

        self._staged = staged
        self._given = given
        self._copies = {}
        self._tails = {}

    def _mark(self, stop: int) -> None:
        """Fill in the markers of the first ``stop`` waiting steps."""
        if self._marked < stop:
            self._episodes.mark(self._staged, self._marked, stop)
            self._marked = stop

    def _store(self) -> None:
        """Store the waiting rows."""
        count = self._filled
        if not count:
            return

        self._mark(count)
        rows = count * self.num_envs
        columns = {key: column.window(count) for key, column in self._staged.items()}
        slots = self.buffer.extend(nest(columns, rows))  # if it fails, the rows keep waiting

        self._episodes.keep(self._staged, count - 1)
        self._marked = 0
        # The window after a flush is shorter, because windows end at multiples of L, where they fit the ring.
        # Both together: an interrupt must not come between.
        self._filled, self._limit = 0, self.window - self.steps % self.window

        if len(slots) != rows:
            self._positions = StepPositions(self.num_envs)
            raise ValueError(
                f"the inv of a transform of the buffer turned {rows} rows into {len(slots)}, so steps cannot "
                "be told apart. Leave that transform out, or write with extend"
            )

        self._positions.append(self.buffer.ring, self.steps - count, int(slots[0]), count)

    def flush(self) -> None:
        """Store the waiting rows now. Frequent calls make short windows, which take more memory."""
        with self._lock:
            self._store()

    def close(self) -> None:
        """Store the waiting rows and refuse further steps. :meth:`read` and :meth:`sample` still work."""
        self.flush()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"StepWriter({self.steps} steps of {self.num_envs} envs, in windows of {self.window})"

    # -- reading --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of rows that can be read by position, stored or waiting."""
        with self._lock:
            return (self.steps - self._oldest()) * self.num_envs

    @property
    def waiting(self) -> int:
        """Number of rows that wait to be stored."""
        return self._filled * self.num_envs

    @property
    def oldest(self) -> int:
        """Number of the oldest readable step; all from there to ``steps - 1`` are readable."""
        with self._lock:
            return self._oldest()

    def _oldest(self) -> int:
        first = None
        if self._positions.ring is self.buffer.ring:
            first = self._positions.oldest()
        if first is None:
            return self.steps - self._filled
        return first

    def read(self, steps: Any, envs: Any) -> TensorDict:
        """Return rows by position, stored or waiting, as ``buffer[...]`` would: transformed, not marked.

        n-step transforms also look ahead into waiting rows. If a transform's ``inv`` changes what is stored, waiting
        rows are stored first.

        Args:
            steps: step numbers, from :attr:`oldest` to ``steps - 1``: integers, an array or a tensor.
            envs: env numbers, 0 to E - 1; both are broadcast to N rows.

        Raises:
            IndexError: the step or env does not exist, or was overwritten.
        """
        with self._lock:
            return self._rows(self._places(steps, envs))

    def read_columns(self, steps: Any, envs: Any, keys: Iterable[NestedKey] | None = None) -> Columns:
        """Like :meth:`read`, but return a plain dict of tensors by key, which is faster.

        Args:
            steps, envs: as in :meth:`read`.
            keys: entries to read, default all; fewer are faster (unless there are transforms, which read all).

        Raises:
            KeyError: an entry does not exist.

        >>> import numpy as np
        >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
        >>> writer = ReplayBuffer(storage=LazyTensorStorage(64)).writer_for(num_envs=2)
        >>> writer.write({"action": np.array([3, 4]), ("next", "done"): np.array([False, True])})
        >>> writer.read_columns(0, [1, 0], ["action", ("next", "done")])
        {'action': tensor([4, 3]), ('next', 'done'): tensor([[ True],
                [False]])}
        """
        names = None if keys is None else tuple(keys)
        if names is not None and names not in self._copies:
            names = tuple(map(plain_key, names))

        with self._lock:
            places = self._places(steps, envs)
            if self.buffer.transforms:
                columns = leaves(self._rows(places))
            else:
                columns = self._take(places, names)

        if names is None:
            return columns
        missing = [name for name in names if name not in columns]
        if missing:
            raise KeyError(f"there is no entry {missing[0]!r} to read, only {sorted(map(str, columns))}")
        return {name: columns[name] for name in names}

    def _places(self, steps: Any, envs: Any) -> Tensor:
        """Return the places step * E + env of existing rows, int64 ``[N]``."""
        from flatroll.kernels.slices.steps import number_places  # numba

        step = steps
        env = envs
        if not (is_plain(step) and is_plain(env) and step.shape == env.shape):
            if not isinstance(step, np.ndarray):
                step = torch.as_tensor(step).numpy(force=True)
            if not isinstance(env, np.ndarray):
                env = torch.as_tensor(env).numpy(force=True)
            if any(part.size and part.dtype.kind not in "iu" for part in (step, env)):
                raise TypeError(f"steps and envs must be integers, got {step.dtype} and {env.dtype}")
            if step.shape != env.shape:
                # Copies: NumPy 1 warns about these views when Numba checks whether they are writable.
                step, env = map(np.array, np.broadcast_arrays(step, env))
            step, env = (np.ascontiguousarray(part, np.int64).reshape(-1) for part in (step, env))

        places: Array = np.empty(len(step), np.int64)
        oldest = self._oldest()
        if not number_places(step, env, self.num_envs, oldest, self.steps, places):
            first = int(step.min())
            last = int(step.max())
            if first < oldest or last >= self.steps:
                raise IndexError(
                    f"steps {first} to {last} were requested, {oldest} to {self.steps - 1} are available"
                )
            raise IndexError(
                f"envs must be from 0 to {self.num_envs - 1}, got {int(env.min())} to {int(env.max())}"
            )

        return torch.from_numpy(places)

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Draw this writer's rows, including waiting ones, uniformly with replacement; otherwise like :meth:`read`.

        Args:
            batch_size: number of rows, default the buffer's. The buffer's generator draws them.

        Raises:
            RuntimeError: no step was written.
            ValueError: the batch size is missing.
        """
        if batch_size is None:
            batch_size = self.buffer.batch_size
        size = check_whole_number("batch_size", batch_size)
        with self._lock:
            while True:
                first = self._oldest() * self.num_envs
                stop = self.steps * self.num_envs
                if first == stop:
                    raise RuntimeError("there is nothing to sample: write a step first")
                with self.buffer.lock:
                    places = torch.randint(first, stop, (size,), generator=self.buffer.generator)
                try:
                    return self._rows(places)
                except Overwritten:  # another writer has overwritten them: redraw from the rest
                    continue

    def _rows(self, places: Tensor) -> TensorDict:
        """Return the transformed rows at these places, step * E + env, int64 ``[N]``."""
        transforms = self.buffer.transforms
        if self._filled and any(map(changes_stored, transforms)):
            self._store()

        values = self._take(places)
        n = max(map(lookahead, transforms), default=0)
        ahead = None
        if n and len(places):
            ahead = places[:, None] + torch.arange(n) * self.num_envs
            ahead.masked_fill_(ahead >= self.steps * self.num_envs, -1)
            nearest = torch.where(ahead < 0, places[:, None], ahead)
            marks = self._take(nearest.view(-1), (TRAJ_IDS, IS_INIT))
            ids, init = (marks[key].cpu().view(-1, n) for key in (TRAJ_IDS, IS_INIT))
            init[:, 0] = False  # a row that begins a trajectory may come first
            beyond = (ids != ids[:, :1]) | init | (ahead < 0)
            ahead[beyond.cummax(1).values] = -1

        chosen = self._choose(places)
        read = None
        if chosen is not None:
            read = partial(self._take_goals, values[TRAJ_IDS][chosen[0]])
        values = read_others(transforms, values, ahead, chosen, self._take, read)

        data: Any = nest(values, *places.shape)
        for transform in transforms:
            data = apply(transform, data, partial(row_ends, places, self.num_envs))
        result: TensorDict = data
        return result

    def _choose(self, places: Tensor) -> Tensor | None:
        """Return rows chosen by a transform, int64 ``[2, M]``: indices in the places, and places; None without
        one."""
        buffer = self.buffer
        filled = self._filled
        chooser = row_chooser(buffer.transforms)
        if chooser is None:
            return None

        self._mark(filled)
        choose = partial(chooser.choose, generator=buffer.generator)
        if filled:
            marks = [self._staged[key].rows for key in (IS_INIT, TRAJ_IDS, DONE)]
        else:
            flags = np.zeros((1, 1), np.bool_)
            marks = [flags, np.zeros((1, 1), np.int64), flags]
        with buffer.lock:
            chosen = self._positions.choose(places, choose, buffer.ring, self.steps - filled, filled, marks)
        if chosen is None:
            raise Overwritten("another writer has overwritten rows whose goals were requested")
        return chosen

    def _take_goals(self, ids: Tensor, places: Tensor, keys: Iterable[NestedKey]) -> Columns:
        """Return copies of entries of the rows at these places, which must belong to the trajectories ``ids``."""
        rows = self._take(places, [*keys, TRAJ_IDS])
        if not torch.equal(rows.pop(TRAJ_IDS), ids):
            raise ValueError(
                f"an env reused the {TRAJ_IDS!r} of an earlier episode, so its goals cannot be found by step: set "
                f"{IS_INIT!r} in that step, or give each episode its own id"
            )
        return rows

    def _take(self, places: Tensor, keys: Iterable[NestedKey] | None = None) -> Columns:
        """Return copies of the entries ``keys`` (default: all) of the rows at these places; lock-free."""
        buffer = self.buffer
        storage = buffer.storage
        assert isinstance(storage, ColumnStorage)
        places = places.cpu()
        names = None if keys is None else tuple(keys)

        copies = self._copies.get(names)
        if copies is None or not copies.is_current(storage):
            staged = {key: column.flat for key, column in self._staged.items()}
            copies = StepCopies(storage, staged, self._given, names)
            self._copies[names] = copies
        if copies.marks:
            self._mark(self._filled)
        if len(places) > copies.rows:
            return self._take_unlocked(storage, places, names)

        with buffer.lock:
            where = self._positions.tables(buffer.ring, self.steps - self._filled, self.window)
            copied = copies.read(places, self.num_envs, where, buffer.ring)
        if copied is None:
            raise Overwritten("another writer has overwritten requested rows")
        return copied

    def _take_unlocked(self, storage: ColumnStorage, places: Tensor, names: Names) -> Columns:
        """Like `_take`, but copy without the buffer's lock, and again if rows were overwritten meanwhile."""
        buffer = self.buffer
        stored = self.steps - self._filled
        asked = None if names is None else frozenset(names)
        while True:
            with buffer.lock:
                ring = buffer.ring
                version = ring.version  # read first, because other processes may write meanwhile
                found = self._positions.find(places, ring, stored, self.window)
                if found is None:
                    raise Overwritten("another writer has overwritten requested rows")

                slots, (at, rows) = found
                if len(at) == len(places):
                    return self._read_waiting(rows, names)

                follow = None
                if storage.needs_follow(asked):
                    follow = ring.follow(slots)

            columns: Columns = storage.read_rows(slots, follow, keys=asked)
            with buffer.lock:
                if ring is buffer.ring and ring.unchanged_since(Draw(slots, follow=follow, version=version)):
                    break

        if len(at):  # waiting rows were read as arbitrary stored rows: replace those
            if storage.copies_bytes:
                self._tail(names).copy_into(columns, at, rows)
            else:
                for key, values in self._read_waiting(rows, names).items():
                    put_rows(columns[key], upload(torch.from_numpy(at), values.device), values)

        return columns

    def _read_waiting(self, rows: Array, names: Names) -> Columns:
        """Return copies of waiting rows, given as env * L + step, on the storage's device."""
        tail = self._tail(names)
        at = torch.from_numpy(rows)
        taken = tail.take(at)
        device = torch.device(getattr(self.buffer.storage, "device", "cpu"))

        columns = {}
        for key, column in tail.columns.items():
            values = taken[key] if key in taken else take_rows(column, at)
            columns[key] = upload(values, device)
        return columns

    def _tail(self, names: Names) -> "HostColumns[NestedKey]":
        """Return the waiting rows' entries (default: all), ``[E * L, ...]``."""
        if names not in self._tails:
            from flatroll.kernels.rows.gather import HostColumns  # numba

            staged = self._staged
            keys: Iterable[NestedKey] = staged
            if names is not None:
                keys = [name for name in names if name in staged]
            self._tails[names] = HostColumns({key: staged[key].flat for key in keys})
        return self._tails[names]

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """Store the waiting rows, and return the writer's number and next episode for a restart.

        The rows are in ``buffer.state_dict()``; call that afterwards.
        """
        self.flush()
        newest = int(self._episodes.ids.max()) - (self.writer << ID_BITS)  # episode * E + env
        return {"writer": self.writer, "episode": newest // self.num_envs + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume with new episodes, whose ids were unused when the :meth:`state_dict` was made.

        Earlier rows, and rows loaded into the buffer, cannot be read by step, only through the buffer; waiting rows
        are dropped.
        """
        self.writer = check_writer_number(state["writer"])
        episode = check_whole_number("episode", state["episode"], 0)
        self._episodes = Episodes(self.num_envs, self.writer, episode)
        self._positions = StepPositions(self.num_envs)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, including the buffer; the waiting rows are stored first."""
        with self._lock:
            self._store()
            state = self.__dict__.copy()
            if self._positions.ring is not self.buffer.ring:
                state["_positions"] = StepPositions(self.num_envs)
        for name in ("_lock", "_staged", "_given", "_copies", "_tails"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
        self._positions.ring = self.buffer.ring
        self.buffer.step_writers.add(self)


def is_plain(numbers: Any) -> bool:
    """Return whether ``numbers`` is a contiguous int64 array ``[N]``."""
    return (
        type(numbers) is np.ndarray
        and numbers.dtype == np.int64
        and numbers.ndim == 1
        and numbers.flags.c_contiguous
    )


def row_ends(places: Tensor, num_envs: int) -> Tensor:
    """Return bool ``[N]``, True at rows that the next one does not follow, given places step * num_envs + env.

    >>> row_ends(torch.tensor([0, 2, 4, 5]), num_envs=2)
    tensor([False, False,  True,  True])
    """
    ends = torch.ones(len(places), dtype=torch.bool)
    ends[:-1] = places[1:] != places[:-1] + num_envs
    return ends
