"""Writes a replay buffer one vector step at a time, as loops of third-party trainers do."""

import threading
from collections.abc import Mapping
from typing import Any, Self, TypeAlias

import torch
from tensordict import TensorDictBase
from typing_extensions import override

from flatroll.buffers.columns.column import TensorColumn
from flatroll.buffers.step_episodes import Episodes
from flatroll.buffers.step_reader import Buffer, StepReader, changes_stored
from flatroll.buffers.step_rows import StagedColumn, StepPositions, entries, window_of
from flatroll.buffers.storages.continuity import compared_keys
from flatroll.buffers.storages.item_kinds import nest
from flatroll.layout.checks import whole_number, writer_number
from flatroll.layout.keys import DONE, IS_INIT, TERMINATED, TRAJ_IDS, TRUNCATED, NestedKey, as_tuple

Step: TypeAlias = Mapping[Any, Any] | TensorDictBase


class StepWriter(StepReader):
    """Takes one step of E envs at a time, and stores windows of L steps, env after env, by ``buffer.extend``.

    Rows wait in arrays ``[E, L, ...]`` until the window is full. So an env's steps stand next to each other in the
    storage, where a compact one keeps each observation once, and stacked frames are shared. Trajectories go on from
    window to window. :meth:`read` and :meth:`sample` see the waiting rows, too; ``buffer.sample`` sees stored ones.

    Made by ``buffer.writer_for(num_envs)``; usable in ``with``, which closes it. One thread writes, others may read.

    Attributes:
        num_envs: number E of envs.
        window: number L of steps that are stored at a time.
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
        self.buffer, self.num_envs = buffer, whole_number("num_envs", num_envs)
        columns = hasattr(buffer.storage, "allocated")  # else a list, which would keep the arrays' own memory
        if not columns or buffer.storage.ndim > 1 or buffer.writer.chooses:
            raise TypeError(
                "a step writer needs a storage of columns with ndim=1 whose rows stay in order, such as "
                f"LazyTensorStorage(max_size), got {type(buffer.storage).__name__} (ndim={buffer.storage.ndim}) and "
                f"{type(buffer.writer).__name__}"
            )
        buffer.storage.compiled = True
        self.window = window_of(buffer.storage.capacity, num_envs, window)
        self.writer, self.steps, self._closed = writer_number(writer), 0, False
        self._positions = StepPositions(num_envs)
        self._episodes = Episodes(num_envs, writer)
        self._forget()
        buffer.step_writers.add(self)

    def _forget(self) -> None:
        """Begin as after the last stored row, with entries to be named by the next step."""
        self._staged, self._copies, self._tails = {}, {}, {}
        self._given: dict[NestedKey, StagedColumn] = {}  # entries of a step; the others are filled in
        self._filled, self._limit = 0, self.window - self.steps % self.window
        self._marked = 0  # waiting steps whose markers are filled in
        self._begun = False  # whether there is a row by which a step is checked
        self._episodes.begin((), ())
        self._lock = threading.Lock()

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, step: Step) -> None:
        """Take one step of all envs; the last one of a window stores the window.

        Args:
            step: tensors or arrays ``[E, ...]`` by key, nested or not: a dict or a tensordict ``[E]``. It needs
                ``("next", "terminated")``, ``("next", "truncated")`` or ``("next", "done")`` (bool); of the three,
                and of ``"is_init"`` and ``("collector", "traj_ids")``, those that are missing are filled in. Numbers
                per row may be ``[E]`` or ``[E, 1]``; rewards become float32. ``("next", "observation")`` is the true
                one: at the end of an episode its final observation, not that of the reset.

        Raises:
            RuntimeError: the writer is closed.
            ValueError: another number of envs, other entries or shapes than in the first step.
            TypeError: other dtypes than in the first step, or flags that are not bool.
            KeyError: nothing says where episodes end.

        Whatever ``extend`` raises comes at the last step of a window; the window then waits, and is stored by the next
        call. A row that does not continue the one before (an env reset in between) begins a new trajectory, with a
        warning, unless ``"is_init"`` says so. These errors and this warning come before the step is taken. That an
        episode seems to go on after its end is told when markers are needed: at the end of a window, or by a read.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(
                    "this step writer is closed: call buffer.writer_for(num_envs) for a new one"
                )
            if self._filled == self._limit:
                self._store()
            if not self._begun:
                self._begin(step)
            given, row, values = self._given, self._filled, step
            if not isinstance(values, dict) or values.keys() != given.keys():
                values = dict(entries(step))
                if unknown := [key for key in values if key not in given]:
                    raise ValueError(f"the step has an entry {unknown[0]!r} that the first one did not have")
                if missing := [key for key in given if key not in values]:
                    raise ValueError(f"the step lacks the entry {missing[0]!r} that the first one had")
            for key, column in given.items():  # nobody reads the row of a step that is refused half-way
                column.put(row, values[key])
            if self._episodes.check(given, row):
                self._mark(row + 1)
            self._begun, self._filled = True, row + 1
            self.steps += 1
            if self._filled == self._limit:
                self._store()

    def _begin(self, step: Step) -> None:
        """Make the arrays for steps like this one."""
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
            raise ValueError(
                f"the step has an entry {inside[0]!r}, and a tensor where that one's parent is to be"
            )
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
            # What does not go with the rows that are stored is an error now, not when the window is full.
            blank = {key: torch.zeros_like(column.window(1)) for key, column in staged.items()}
            with self.buffer.write_lock:
                storage.prepare(nest(blank, torch.Size([self.num_envs])), None, self.buffer.markers)
        self._staged, self._given, self._copies, self._tails = staged, given, {}, {}

    @override
    def _mark(self, stop: int) -> None:
        if self._marked < stop:
            self._episodes.mark(self._staged, self._marked, stop)
            self._marked = stop

    @override
    def _store(self) -> None:
        count = self._filled
        rows = count * self.num_envs
        if not count:
            return
        self._mark(count)
        columns = {key: column.window(count) for key, column in self._staged.items()}
        slots = self.buffer.extend(nest(columns, torch.Size([rows])))  # if it fails, the rows go on waiting
        self._episodes.keep(self._staged, count - 1)
        self._marked = 0
        # After a flush the next window is shorter: windows end at multiples of L, where they fit the ring.
        self._filled, self._limit = 0, self.window - self.steps % self.window
        if len(slots) != rows:
            self._positions = StepPositions(self.num_envs)
            raise ValueError(
                f"the inv of a transform of the buffer made {len(slots)} rows of {rows}: steps cannot be told apart "
                "then. Leave that transform out, or write with extend"
            )
        self._positions.append(self.buffer.ring, self.steps - count, int(slots[0]), count)

    def flush(self) -> None:
        """Store the waiting rows now, as before saving the buffer. Often, it makes short windows, which cost bytes."""
        with self._lock:
            self._store()

    def close(self) -> None:
        """Store the waiting rows; the writer takes no more. :meth:`read` and :meth:`sample` still work."""
        self.flush()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"StepWriter({self.steps} steps of {self.num_envs} envs, in windows of {self.window})"

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """Store the waiting rows, and return what a writer after a restart needs: its number and next episode.

        The rows are in ``buffer.state_dict()``, to be made afterwards.
        """
        self.flush()
        newest = int(self._episodes.ids.max()) - (self.writer << 40)  # episode * E + env
        return {"writer": self.writer, "episode": newest // self.num_envs + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with new episodes, whose ids none has had before the :meth:`state_dict` was made.

        Rows from before, and those that the buffer was loaded with, cannot be read by step, only through the buffer;
        rows that wait are given up.
        """
        self.writer = writer_number(state["writer"])
        episode = whole_number("episode", state["episode"], 0)
        self._episodes = Episodes(self.num_envs, self.writer, episode)
        self._positions = StepPositions(self.num_envs)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle or a copy holds: the waiting rows are stored first, and the buffer comes along."""
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
