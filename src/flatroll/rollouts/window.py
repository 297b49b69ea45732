"""The window: records vector steps time-major, and builds flat batches from them, run after run.

Every column is one array ``[steps, E, ...]`` written in place, one row for each vector step. Nothing is dropped,
joined or sorted while stepping; `Window.lay_out` does it once for each batch. A *cell* is one row of one step; its
number is ``step * E + env``.
"""

from collections.abc import Iterable

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.boundaries import run_ends, run_starts
from flatroll.layout.delta import check_delta, encode_delta
from flatroll.layout.keys import (
    AGENT,
    DELTA,
    DONE,
    GAME,
    GAME_STEP,
    HAS_STATE,
    NEXT_KNOWN,
    NUM_AGENTS,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
)
from flatroll.layout.tensordict_seam import nest
from flatroll.rollouts.batch_columns import DEAD, ColumnKeys
from flatroll.wrappers.arrays import Array, select, to_torch

#: Up to this many rows NumPy is faster (1 µs, torch 10 µs); more rows torch copies with all cores.
_FEW_ROWS = 1024


class Window:
    """Growing columns ``[steps, E, ...]`` of recorded vector steps, from which flat batches are built."""

    def __init__(
        self,
        keys: ColumnKeys,
        num_envs: int,
        steps: int,  # to have room for at first
        *,
        device: torch.device,
        same_step: bool,  # every cell is a transition; else the column DEAD says which are not
        dense_finals: bool,
        agents: tuple[Array, Array] | None = None,  # the agent and the game of each env, int64 [E]
    ) -> None:
        # With dense_finals the true next observations have columns of their own (on a device, where picking the
        # ended rows would wait); else they are the observations one step later, but for those given to put_final.
        self.num_envs = num_envs
        #: Vector steps in the window.
        self.steps = 0
        #: Cells of step 0 that an earlier batch has taken: all envs below this number.
        self.taken = 0
        #: Vector steps before those in the window.
        self.before = 0
        self.columns: dict[NestedKey, Array] = {}
        self._keys = keys
        self._device = device
        #: Whether ended envs are reset in the same step: then every cell is a transition.
        self.same_step = same_step
        self._dense_finals = dense_finals
        self._agents = agents and tuple(torch.as_tensor(numbers, device=device) for numbers in agents)
        self._games = 0 if agents is None else int(agents[1].max()) + 1
        self._room = steps + 2  # one row is kept for what follows the last step
        self._not_gathered: set[NestedKey] = {DEAD, *(keys.next_of[key] for key in keys.obs)}
        #: Next observations that the next step does not hold, on the host: key -> (cell numbers, values).
        self._finals: dict[NestedKey, list[tuple[Array, Array]]] = {}

    def put(self, keys: Iterable[NestedKey], values: Iterable[Array]) -> None:
        """Record values ``[E, ...]`` of the current step, one for each key."""
        columns, step = self.columns, self.steps
        for key, value in zip(keys, values):  # noqa: B905 (strict costs as much as a column)
            try:
                columns[key][step] = value
            except KeyError:
                self._allocate(key, value)[step] = value

    def put_loose(self, key: NestedKey, value: Array | None) -> None:
        """Record a value whose dtype may change between steps; None is recorded as 0."""
        column = self.columns.get(key)
        if value is None:
            if column is not None:
                column[self.steps] = 0
            return
        if not isinstance(value, Tensor):
            value = np.asarray(value)
        if column is not None and column.dtype != value.dtype:
            # An int 0 at reset must not truncate the floats after it.
            if isinstance(column, Tensor):
                self.columns[key] = column.to(torch.promote_types(column.dtype, to_torch(value).dtype))
            else:
                self.columns[key] = column.astype(np.promote_types(column.dtype, np.asarray(value).dtype))
        self.put((key,), (value,))

    def put_final(self, key: NestedKey, envs: Array, values: Array, step: int) -> None:
        """Record the true next observations of the envs ``envs`` at step ``step``."""
        self._finals.setdefault(key, []).append((envs + step * self.num_envs, values))

    def advance(self) -> None:
        """Finish the current step and make room for the next one."""
        self.steps += 1
        if self.steps + 1 < self._room:  # one row is kept for what follows the last step
            return
        self._room += max(8, self._room // 4)
        for key, column in self.columns.items():
            wide = _zeros_like(column, (self._room, *column.shape[1:]))
            wide[: len(column)] = column
            self.columns[key] = wide

    def count(self) -> int:
        """Count the recorded transitions that no batch has taken; may synchronise with the device."""
        if not self.steps:
            return 0
        if self.same_step:
            return self.steps * self.num_envs - self.taken
        return int(np.count_nonzero(self.valid()))

    def valid(self) -> Array:
        """Return which recorded cells are transitions that no batch has taken; bool ``[steps, E]``, NumPy."""
        if self.same_step:
            mask = np.ones((self.steps, self.num_envs), dtype=bool)
        else:
            dead = self.columns[DEAD][: self.steps]
            mask = ~(dead.cpu().numpy() if isinstance(dead, Tensor) else dead)
        mask[0, : self.taken] = False
        return mask

    def first_cells(self, count: int) -> tuple[Array, int]:
        """Select the oldest ``count`` transitions: bool ``[steps, E]``, and how many envs of the last step.

        That is the number of envs of the last step that they reach; all transitions left over lie beyond it.
        """
        mask, last = self.valid(), self.steps - 1
        if self.same_step:
            reached = self.num_envs - (mask.size - self.taken - count)
        else:
            wanted = count - int(np.count_nonzero(mask[:last]))
            in_last = np.flatnonzero(mask[last])
            reached = self.num_envs if wanted == len(in_last) else int(in_last[wanted])
        mask[last, reached:] = False
        return mask, reached

    def lay_out(self, mask: Array, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """Build a flat batch ``[N]`` of the True cells, run after run, and its ``final`` if compact."""
        keys = self._keys
        # Numbers of the True cells, env after env, each in order of time: int64 [N].
        host_cells: Array = np.arange(mask.size).reshape(mask.shape).T[mask.T]
        cells = torch.from_numpy(host_cells).to(self._device, non_blocking=True)
        left_out = self._not_gathered
        if compact or keys.strided:  # the next row's state, or zeros
            left_out = left_out.union(map(next_key, keys.states))
        columns = {key: self.gather(key, cells, host_cells) for key in self.columns if key not in left_out}
        columns[DONE] = columns[TERMINATED] | columns[TRUNCATED]
        if self._agents is not None:
            agent, game = (numbers[cells % self.num_envs] for numbers in self._agents)
            # One number for each game and vector step; the writer's bits are those of the trajectory ids.
            step = (cells // self.num_envs + self.before) * self._games + game
            writer = columns[keys.traj] >> 40 << 40 if keys.has_ids else 0
            columns |= {AGENT: agent, GAME: game, GAME_STEP: writer + step}
            columns[NUM_AGENTS] = self._count_agents()[cells // self.num_envs, game]
        if not keys.has_ids and self.num_envs > 1:
            # Nothing else tells a row that goes on from another env's row that was cut.
            starts = torch.from_numpy(np.diff(host_cells % self.num_envs, prepend=-1) != 0)
            columns[keys.init] |= starts.to(self._device, non_blocking=True).unsqueeze(-1)
        next_obs = self._gather_next(cells, host_cells, columns)
        for key in keys.deltas:
            column = next_obs.pop(key)
            delta = encode_delta(columns[key], column, keys.delta_dtype)
            check_delta(delta, columns[key], column, key)
            columns[*DELTA, *as_tuple(key)] = delta
        if not compact:
            columns |= {keys.next_of[key]: columns[key] + 1 for key in keys.counts}
            columns |= {keys.next_of[key]: column for key, column in next_obs.items()}
        batch = nest(columns, len(host_cells))
        if keys.strided:
            # Zeros for the states of rows that are not to keep theirs; the first rows of runs always do.
            has_state = batch.get(HAS_STATE) | run_starts(batch, is_init_key=keys.init, traj_key=keys.traj)
            batch.set(HAS_STATE, has_state)
            for key in keys.states:
                state = batch.get(key)
                state.masked_fill_(~has_state.view(-1, *(1,) * (state.ndim - 1)), 0)
        return batch, final_of(batch, keys, next_obs) if compact else None

    def gather(self, key: NestedKey, cells: Tensor, host_cells: Array | None = None) -> Tensor:
        """Copy a column's values at ``cells`` (flat indices, int64 ``[N]``) into a new tensor, as a batch has them.

        ``host_cells`` are the same in NumPy, for speed.
        """
        column = self.columns[key]
        trailing = column.ndim == 2 and key in self._keys.trailing
        column = column.reshape(-1, *column.shape[2:])  # [steps, E, ...] -> [steps * E, ...]
        if not isinstance(column, Tensor):
            if host_cells is not None and len(host_cells) <= _FEW_ROWS:
                rows = torch.from_numpy(column.take(host_cells, 0))
                return rows.unsqueeze(-1) if trailing else rows
            column = torch.from_numpy(column)  # a view: index_select makes the copy
        rows = column.index_select(0, cells)
        return rows.unsqueeze(-1) if trailing else rows

    def _count_agents(self) -> Tensor:
        """How many agents acted in each game at each step, int64 ``[steps, games]``; a batch may have some of them."""
        assert self._agents is not None
        acts = torch.ones(self.steps, self.num_envs, dtype=torch.int64, device=self._device)
        if not self.same_step:
            acts.masked_fill_(to_torch(self.columns[DEAD][: self.steps]), 0)
        return acts.new_zeros(self.steps, self._games).index_add_(1, self._agents[1], acts)

    def _gather_next(
        self, cells: Tensor, host_cells: Array, columns: dict[NestedKey, Tensor]
    ) -> dict[NestedKey, Tensor]:
        """The true next observation of each cell; where the env hides it NaN, or the cell's own observation."""
        next_obs: dict[NestedKey, Tensor] = {}
        known = columns.get(NEXT_KNOWN)
        for key in self._keys.obs:
            if self._dense_finals:
                column = self.gather(self._keys.next_of[key], cells, host_cells)
            else:
                # One step later is E cells further on; a reset has overwritten it where finals were kept.
                column = self.gather(key, cells + self.num_envs, host_cells + self.num_envs)
                if self._finals.get(key):
                    self._patch_finals(self._finals[key], host_cells, column)
            if known is not None and column.is_floating_point():
                column.masked_fill_(~known.view(-1, *(1,) * (column.ndim - 1)), torch.nan)
            elif known is not None:
                column = select(known, column, columns[key])
            next_obs[key] = column
        return next_obs

    def _patch_finals(self, finals: list[tuple[Array, Array]], cells: Array, gathered: Tensor) -> None:
        """Write the kept final observations into the gathered next observations ``[N, ...]``, in place."""
        numbers = np.concatenate([number for number, _ in finals])
        values = np.concatenate([value for _, value in finals])
        # The row of each cell in the batch, -1 for cells that are not in it.
        row_of_cell = np.full(self.steps * self.num_envs, -1)
        row_of_cell[cells] = np.arange(len(cells))
        rows = row_of_cell[numbers]
        rows, values = rows[rows >= 0], values[rows >= 0]
        if gathered.device.type == "cpu":
            gathered.numpy()[rows] = values  # torch cannot index unsigned integers
        else:
            gathered[torch.from_numpy(rows).to(gathered.device)] = torch.from_numpy(values).to(
                gathered.device
            )

    def restart(self, surplus_from: int, keep: bool = False) -> None:
        """Clear the window, but keep the last step's cells from env ``surplus_from`` on as step 0.

        With ``keep`` there is a step 0 in any case, taken whole if no cell is left over.
        """
        last = self.steps - 1
        first = last * self.num_envs  # number of the last step's first cell
        self.before += self.steps
        self.steps = self.taken = 0
        finals, self._finals = self._finals, {}
        if surplus_from == self.num_envs and not keep:
            return
        self.before -= 1
        for column in self.columns.values():
            column[0] = column[last]
        for key, kept in finals.items():
            for numbers, values in kept:
                if len(numbers) and numbers[0] >= first:
                    self._finals.setdefault(key, []).append((numbers - first, values))
        self.steps, self.taken = 1, surplus_from

    def _allocate(self, key: NestedKey, value: Array) -> Array:
        """A new column of zeros for values like this one."""
        if not hasattr(value, "dtype"):
            value = np.asarray(value)
        is_number = isinstance(value, Tensor) or value.dtype.kind in "biufc"
        if not is_number or tuple(value.shape[:1]) != (self.num_envs,):
            raise TypeError(
                f"column {key!r} must be numbers with one row for each of {self.num_envs} envs, got "
                f"{value.dtype} of shape {tuple(value.shape)}"
            )
        if key in self._keys.float32:  # later rows are cast as they are written
            value = value.float() if isinstance(value, Tensor) else value.astype(np.float32)
        self.columns[key] = _zeros_like(value, (self._room, *value.shape))
        return self.columns[key]


def _zeros_like(array: Array, shape: tuple[int, ...]) -> Array:
    """Zeros of a shape, in the framework, dtype and place of ``array``."""
    if isinstance(array, Tensor):
        return torch.zeros(shape, dtype=array.dtype, device=array.device)
    return np.zeros(shape, dtype=array.dtype)


def final_of(batch: TensorDict, keys: ColumnKeys, next_obs: dict[NestedKey, Tensor]) -> TensorDict:
    """Return the *final* of a compact batch: of its next observations those that no later row of it holds."""
    ends = run_ends(batch, is_init_key=keys.init, traj_key=keys.traj)
    known = batch.get(NEXT_KNOWN, None)
    rows = (ends if known is None else ends & known).nonzero().squeeze(-1)
    columns: dict[NestedKey, Tensor] = {"row": rows}
    columns |= {next_key(key): column.index_select(0, rows) for key, column in next_obs.items()}
    return nest(columns, len(rows))


def compact_batch(batch: TensorDict, keys: ColumnKeys) -> tuple[TensorDict, TensorDict]:
    """Drop the next observations that later rows hold; return the batch, and the other ones as ``final``."""
    next_obs = {key: batch.get(next_key(key)) for key in keys.obs if key not in keys.deltas}
    repeated = [next_key(key) for key in (*keys.obs, *keys.counts, *keys.states)]
    return batch.exclude(*repeated), final_of(batch, keys, next_obs)
