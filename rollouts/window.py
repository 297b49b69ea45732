"""The window: what the last vector steps gave, time-major as it came, and its flat batches, run after run.

Every column is one array ``[steps, E, ...]`` written in place, one row for each vector step. Nothing is dropped,
joined or sorted while stepping; `Window.rows` and `Window.gather` do it once for each batch.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatroll.layout.keys import NestedKey
from flatroll.wrappers.arrays import Array, to_torch

#: Column of the rows on which the env only reset; never in a batch.
DEAD = ("collector", "_dead")


class Window:
    """Columns ``[steps, E, ...]`` that grow, and a selection of their cells in env-major order.

    Args:
        num_envs: E.
        steps: how many vector steps to have room for at first (one more is kept, for what follows the last).
        float32: columns that are float32 whatever numbers come.
    """

    def __init__(self, num_envs: int, steps: int, float32: Collection[NestedKey] = ()) -> None:
        self.num_envs = num_envs
        self.steps = 0
        self.columns: dict[NestedKey, Array] = {}
        self._room = steps + 2
        self._float32 = float32
        #: Next observations that the next step does not hold, on the host: key -> (cell numbers, values).
        self._finals: dict[NestedKey, list[tuple[Array, Array]]] = {}
        #: Cells of step 0 that an earlier batch has taken: all envs below this number.
        self.taken = 0

    def put(self, key: NestedKey, value: Array) -> None:
        """Write ``value`` ``[E, ...]`` at the current step."""
        try:
            self.columns[key][self.steps] = value
        except KeyError:
            self._allocate(key, value)[self.steps] = value

    def put_loose(self, key: NestedKey, value: Any) -> None:
        """`put` for a value that may change its dtype between steps, or be None: then the cells become 0."""
        column = self.columns.get(key)
        if value is None:
            if column is not None:
                column[self.steps] = 0
            return
        if not isinstance(value, Tensor):
            value = np.asarray(value)
        if column is not None and column.dtype != value.dtype:
            self.columns[key] = _widened(column, value)
        self.put(key, value)

    def put_all(self, *entries: tuple[NestedKey, Array]) -> None:
        """`put` for several columns: less overhead for what every step writes."""
        columns, step = self.columns, self.steps
        for key, value in entries:
            try:
                columns[key][step] = value
            except KeyError:
                self.put(key, value)

    def put_named(self, names: Sequence[tuple[NestedKey, str]], values: dict[str, Any]) -> None:
        """`put` for entries of ``values``: which name goes into which column."""
        columns, step = self.columns, self.steps
        for key, name in names:
            value = values[name]
            try:
                columns[key][step] = value
            except KeyError:
                self.put(key, value)

    def put_final(self, key: NestedKey, envs: Array, values: Array, step: int | None = None) -> None:
        """Keep the true next observations of the given envs at a step, the current one by default."""
        first = (self.steps if step is None else step) * self.num_envs
        self._finals.setdefault(key, []).append((envs + first, values))

    def advance(self) -> None:
        """The current step is complete."""
        self.steps += 1
        if self.steps + 1 >= self._room:
            self._grow()

    def valid(self, never_invalid: bool) -> Array:
        """Which cells are transitions not yet taken: bool ``[steps, E]`` on the host."""
        if never_invalid:
            mask = np.ones((self.steps, self.num_envs), dtype=bool)
        else:
            dead = self.columns[DEAD][: self.steps]
            mask = ~(dead.cpu().numpy() if isinstance(dead, Tensor) else dead)
        mask[0, : self.taken] = False
        return mask

    def first_cells(self, mask: Array, count: int) -> tuple[Array, int]:
        """The first ``count`` True cells in order of time, and how many envs of the last step they reach.

        All the other True cells lie in the last step.
        """
        last = self.steps - 1
        wanted = count - int(np.count_nonzero(mask[:last]))
        in_last = np.flatnonzero(mask[last])
        reached = self.num_envs if wanted == len(in_last) else int(in_last[wanted])
        mask = mask.copy()
        mask[last, reached:] = False
        return mask, reached

    def cells(self, mask: Array) -> Array:
        """Numbers ``step * E + env`` of the True cells, env after env, each in order of time (int64 ``[N]``)."""
        cells: Array = np.arange(mask.size).reshape(mask.shape).T[mask.T]
        return cells

    def gather(self, key: NestedKey, cells: Tensor, shift: int = 0) -> Tensor:
        """Rows of a column at the cells (``shift`` steps later), in new memory."""
        column = to_torch(self.columns[key])
        flat = column.reshape(-1, *column.shape[2:])
        return flat.index_select(0, cells + shift * self.num_envs if shift else cells)

    def patch_finals(self, key: NestedKey, cells: Array, gathered: Tensor) -> None:
        """Put the kept final observations into the gathered next observations."""
        kept = self._finals.get(key)
        if not kept:
            return
        numbers = np.concatenate([number for number, _ in kept])
        values = np.concatenate([value for _, value in kept])
        position = np.full(self.steps * self.num_envs, -1)
        position[cells] = np.arange(len(cells))
        at = position[numbers]
        there = at >= 0
        if gathered.device.type == "cpu":
            gathered.numpy()[at[there]] = values[there]  # torch cannot index unsigned integers
            return
        rows, rows_values = torch.from_numpy(at[there]), torch.from_numpy(values[there])
        gathered[rows.to(gathered.device)] = rows_values.to(gathered.device)

    def restart(self, surplus_from: int) -> None:
        """Begin anew. The cells of the last step from this env on stay, as step 0."""
        last = self.steps - 1
        surplus = surplus_from < self.num_envs
        kept: dict[NestedKey, list[tuple[Array, Array]]] = {}
        if surplus:
            for column in self.columns.values():
                column[0] = column[last]
            first = last * self.num_envs
            for key, finals in self._finals.items():
                tail = [
                    (numbers - first, values)
                    for numbers, values in finals
                    if len(numbers) and numbers[0] >= first
                ]
                if tail:
                    kept[key] = tail
        self._finals = kept
        self.steps = 1 if surplus else 0
        self.taken = surplus_from if surplus else 0

    def _allocate(self, key: NestedKey, value: Array) -> Array:
        if not hasattr(value, "dtype"):
            value = np.asarray(value)
        is_number = isinstance(value, Tensor) or value.dtype.kind in "biufc"
        if not is_number or tuple(value.shape[:1]) != (self.num_envs,):
            raise TypeError(
                f"column {key!r} must be numbers with one row for each of {self.num_envs} envs, got "
                f"{value.dtype} of shape {tuple(value.shape)}"
            )
        shape = (self._room, *value.shape)
        column: Any
        if key in self._float32:  # later rows are cast as they are written
            value = value.float() if isinstance(value, Tensor) else value.astype(np.float32)
        if isinstance(value, Tensor):
            column = torch.zeros(shape, dtype=value.dtype, device=value.device)
        else:
            column = np.zeros(shape, dtype=value.dtype)
        self.columns[key] = column
        return column

    def _grow(self) -> None:
        self._room += max(8, self._room // 4)
        for key, column in self.columns.items():
            shape = (self._room, *column.shape[1:])
            wide: Any = (
                torch.zeros(shape, dtype=column.dtype, device=column.device)
                if isinstance(column, Tensor)
                else np.zeros(shape, dtype=column.dtype)
            )
            wide[: len(column)] = column
            self.columns[key] = wide


def _widened(column: Array, value: Array) -> Array:
    """The column in a dtype that holds the value too: an int 0 at reset must not truncate the floats after it."""
    if isinstance(column, Tensor):
        return column.to(torch.promote_types(column.dtype, to_torch(value).dtype))
    return column.astype(np.promote_types(column.dtype, np.asarray(value).dtype))
