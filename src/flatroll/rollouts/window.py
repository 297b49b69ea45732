"""The window: records vector steps, and builds flat batches from them, run after run.

Every column is an array ``[steps, E, ...]`` written in place, one row per vector step. Nothing is dropped, joined or
sorted while stepping; `Window.lay_out` does so once per batch. A *cell* is the row of one env in one step; its number
is ``step * E + env``.

For a torch env that resets ended rows in the same step, wide columns are env-major in memory: if every cell is a row
of the batch, the batch takes over that memory and the window allocates new memory. Narrow columns are time-major:
writing a few bytes to many places of a large array takes longer than transposing once.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

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
    ENV,
    ENV_STEP,
    GAME,
    GAME_STEP,
    HAS_STATE,
    ID_BITS,
    NEXT_KNOWN,
    NUM_AGENTS,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
)
from flatroll.layout.tensordict_seam import nest
from flatroll.layout.transfers import upload
from flatroll.rollouts.batch_columns import DEAD, ColumnKeys
from flatroll.wrappers.arrays import Array, select, to_torch
from flatroll.wrappers.plain_state import copy_plain

#: For up to this many rows NumPy is faster (1 µs, torch 10 µs); for more, torch copies with all cores.
_FEW_ROWS = 1024

#: Minimum bytes per env and step for an env-major column.
_WIDE = 64

#: From this size on NumPy requests huge pages and torch does not, which makes the first write five times faster.
_HUGE = 1 << 22


class Window:
    """Growing columns ``[steps, E, ...]`` of recorded vector steps, from which flat batches are built."""

    def __init__(
        self,
        keys: ColumnKeys,
        num_envs: int,
        steps: int,  # initial capacity
        *,
        device: torch.device,
        same_step: bool,  # every cell is a transition; otherwise the column DEAD marks the others
        dense_finals: bool,
        framework: str = "numpy",  # array type of the env
        agents: tuple[Array, Array] | None = None,  # agent and game of each env, int64 [E]
    ) -> None:
        # With dense_finals the true next observations have their own columns (on a device, where selecting
        # the ended rows would sync). Otherwise the next observation is the observation one step later, unless
        # put_final was called for it.
        self.num_envs = num_envs
        #: Vector steps in the window.
        self.steps = 0

        #: Cells of step 0 with env numbers below this are in an earlier batch.
        self.taken = 0
        #: Vector steps before the window.
        self.before = 0
        #: Index of env 0 in the pool that the envs are a part of.
        self.first_env = 0
        #: Rows that each env has in earlier batches, int64 ``[E]``.
        self._env_steps = np.zeros(num_envs, np.int64)
        self.columns: dict[NestedKey, Array] = {}
        self._keys = keys
        self._device = device
        self._on_cpu = device.type == "cpu"

        #: Whether ended envs are reset in the same step: then every cell is a transition.
        self.same_step = same_step
        self._dense_finals = dense_finals

        #: Whether one call writes all values of a step, into per-step views ``[E, ...]`` of each column.
        self._at_once = dense_finals and framework == "torch"
        self._by_step: dict[NestedKey, Sequence[Array]] = {}
        self._given: set[NestedKey] = set()  # columns whose memory the last batch took over
        self._loose: set[NestedKey] = set()
        self._tells_known = False  # whether NEXT_KNOWN exists ...
        self._unknown = False  # ... and may contain False

        self._agents: tuple[Tensor, Tensor] | None = None
        self._games = 0
        if agents is not None:
            agent, game = (torch.as_tensor(numbers, device=device) for numbers in agents)
            self._agents = agent, game
            self._games = int(agents[1].max()) + 1

        # Extra steps for what follows the last one. With dense finals none is needed, and a full window is a batch.
        self._beyond = 0 if dense_finals else 1
        self._room = steps + 2 * self._beyond
        self._not_gathered: set[NestedKey] = {DEAD, NEXT_KNOWN, *(keys.next_of[key] for key in keys.obs)}
        #: Next observations that the next step does not contain, on the host: key -> (cell numbers, values).
        self._finals: dict[NestedKey, list[tuple[Array, Array]]] = {}

    def put(self, keys: Sequence[NestedKey], values: Sequence[Array]) -> None:
        """Record values ``[E, ...]`` of the current step, one per key."""
        step = self.steps
        if step == self._room:  # only happens with dense finals, see advance
            self._grow()
        if not self._at_once:
            columns = self.columns
            for key, value in zip(keys, values):  # noqa: B905 (strict costs as much as a column)
                try:
                    columns[key][step] = value
                except KeyError:
                    self._allocate(key, value)[step] = value

            return

        if not keys:
            return

        rows = self._by_step
        try:
            # One call for all columns is three times faster than separate calls.
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [rows[key][step] for key in keys], list(values)
            )
        except (KeyError, TypeError):  # a new column, or one in NumPy
            for key, value in zip(keys, values, strict=True):
                if key not in rows:
                    self._allocate(key, value)
                rows[key][step][...] = value

    def put_ended(
        self,
        keys: Sequence[NestedKey],
        values: Sequence[Array],
        next_keys: Sequence[NestedKey],
        next_obs: Sequence[Tensor],
        ended: Tensor,
        finals: Sequence[Tensor],
    ) -> None:
        """Record values and next observations, using the rows of ``finals`` where bool ``[E]`` ``ended`` is True."""
        if not self._on_cpu:
            self.put(keys, values)
            for key, leaf, final in zip(next_keys, next_obs, finals, strict=True):
                self._put_where(key, ended, final, leaf)
            return

        # On the CPU reading the flags needs no sync, and writing a few rows is much faster than torch.where.
        self.put((*keys, *next_keys), (*values, *next_obs))
        (envs,) = ended.numpy().nonzero()
        if not len(envs):
            return

        places = torch.from_numpy(envs)

        for key, leaf, final in zip(next_keys, next_obs, finals, strict=True):
            row = self._by_step[key][self.steps]
            try:
                row.index_copy_(0, places, final.index_select(0, places).to(row.dtype))
            except NotImplementedError:  # unsigned integers, float8
                self._put_where(key, ended, final, leaf)

    def _put_where(self, key: NestedKey, mask: Tensor, chosen: Tensor, other: Tensor) -> None:
        """Record rows of ``chosen`` where the mask is True, else of ``other``; no host sync."""
        if key in self._by_step:
            row = self._by_step[key][self.steps]
        else:
            row = None

        if (
            row is not None
            and chosen.shape == other.shape == row.shape
            and chosen.dtype is other.dtype is row.dtype
        ):
            torch.where(mask.view(-1, *(1,) * (row.ndim - 1)), chosen, other, out=row)
        else:
            self.put((key,), (select(mask, chosen, other),))

    def put_known(self, known: Array | None) -> None:
        """Record in which envs the true next observation is known; None for all."""
        self._tells_known = True
        if known is not None and not self._unknown:
            self._unknown = True
            self.put((NEXT_KNOWN,), (known,))
            self.columns[NEXT_KNOWN][: self.steps] = True  # earlier steps did not record it
        elif known is not None:
            self.put((NEXT_KNOWN,), (known,))
        elif self._unknown:
            self.columns[NEXT_KNOWN][self.steps] = True

    def put_loose(self, key: NestedKey, value: Array | None) -> None:
        """Record a value whose dtype may change between steps; None is recorded as 0."""
        self._loose.add(key)
        column = self.columns.get(key)
        if value is None:
            if column is not None:
                column[self.steps] = 0
            return

        if not isinstance(value, Tensor):
            value = np.asarray(value)
        if column is not None and column.dtype != value.dtype:
            # An int 0 at reset must not truncate later floats.
            if isinstance(column, Tensor):
                self._set(key, column.to(torch.promote_types(column.dtype, to_torch(value).dtype)))
            else:
                self._set(key, column.astype(np.promote_types(column.dtype, np.asarray(value).dtype)))

        self.put((key,), (value,))

    def put_final(self, key: NestedKey, envs: Array, values: Array, step: int) -> None:
        """Record the true next observations of the envs ``envs`` at step ``step``."""
        self._finals.setdefault(key, []).append((envs + step * self.num_envs, values))

    def advance(self) -> None:
        """Finish the current step and make room for the next one."""
        self.steps += 1
        # With dense finals the next step grows the window, unless a batch is taken before it.
        if not self._dense_finals and self.steps + 1 >= self._room:
            self._grow()

    def _grow(self) -> None:
        """Make room for more steps."""
        self._room += max(8, self._room // 4)
        for key, column in self.columns.items():
            long = self._zeros(column[0])
            long[: len(column)] = column
            self._set(key, long)

    @property
    def env_steps(self) -> int:
        """The highest number that an env's next row may have so far."""
        return int(self._env_steps.max())

    def skip_env_steps(self, steps: int) -> None:
        """Leave out a number behind ``steps``, so that no row seems to follow an earlier one, if there is any."""
        self._env_steps[:] = steps
        if steps:
            self._env_steps += 1

    def clear(self) -> None:
        """Drop all columns."""
        self.restart(self.num_envs)
        self.skip_env_steps(self.env_steps)
        self.columns.clear()
        self._by_step.clear()

    def get_snapshot(self) -> dict[str, Any]:
        """Return what the next batch needs of the steps so far, between two batches."""
        # Without a step, too: a column keeps its dtype.
        kept = max(self.steps, 1)
        return {
            "steps": self.steps,
            "taken": self.taken,
            "before": self.before,
            "env_steps": self._env_steps.copy(),
            "unknown": self._unknown,
            "tells_known": self._tells_known,
            "loose": list(self._loose),
            "columns": {key: copy_plain(column[:kept]) for key, column in self.columns.items()},
            "finals": {key: copy_plain(parts) for key, parts in self._finals.items()},
        }

    def set_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Go on from a `get_snapshot`."""
        self.clear()
        for key, saved in copy_plain(snapshot["columns"], self._device).items():
            while self._room < len(saved) + self._beyond:
                self._grow()
            column = self._set(key, self._zeros(saved[0]))
            column[: len(saved)] = saved

        self.steps = snapshot["steps"]
        self.taken = snapshot["taken"]
        self.before = snapshot["before"]
        self._env_steps[:] = snapshot["env_steps"]
        self._unknown = snapshot["unknown"]
        self._tells_known = snapshot["tells_known"]
        self._loose = set(snapshot["loose"])
        self._finals = copy_plain(snapshot["finals"])

    def count(self) -> int:
        """Count the recorded transitions not yet in a batch; may synchronise with the device."""
        if not self.steps:
            return 0
        if self.same_step:
            return self.steps * self.num_envs - self.taken
        return int(np.count_nonzero(self.valid()))

    def valid(self) -> Array:
        """Return which recorded cells are transitions not yet in a batch; bool ``[steps, E]``, NumPy."""
        if self.same_step:
            mask = np.ones((self.steps, self.num_envs), dtype=bool)
        else:
            dead = self.columns[DEAD][: self.steps]
            if isinstance(dead, Tensor):
                dead = dead.cpu().numpy()
            mask = ~dead

        mask[0, : self.taken] = False
        return mask

    def first_cells(self, count: int) -> tuple[Array, int]:
        """Select the oldest ``count`` transitions; return bool ``[steps, E]`` and a number of envs.

        The number says how many envs of the last step are selected; all remaining transitions come after it.
        """
        mask = self.valid()
        last = self.steps - 1
        if self.same_step:
            reached = self.num_envs - (mask.size - self.taken - count)
        else:
            wanted = count - int(np.count_nonzero(mask[:last]))
            in_last = np.flatnonzero(mask[last])
            if wanted == len(in_last):
                reached = self.num_envs
            else:
                reached = int(in_last[wanted])

        mask[last, reached:] = False
        return mask, reached

    def lay_out(self, mask: Array, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """Build a flat batch ``[N]`` of the True cells, run after run, and its ``final`` if compact."""
        keys = self._keys
        rows = _RowGatherer(self, mask)
        left_out = self._not_gathered
        if compact or keys.strided:  # the state of the next row, or zeros
            left_out = left_out.union(map(next_key, keys.states))

        columns = {key: rows.of(key) for key in self.columns if key not in left_out}
        if self._unknown:
            columns[NEXT_KNOWN] = rows.of(NEXT_KNOWN)
        elif self._tells_known:
            columns[NEXT_KNOWN] = torch.ones(rows.count, dtype=torch.bool, device=self._device)

        columns[DONE] = columns[TERMINATED] | columns[TRUNCATED]
        if self._agents is not None:
            self._add_agents(rows, columns, self._agents)
        if keys.tracks_envs:
            self._add_envs(mask, columns)
        if not keys.has_ids and self.num_envs > 1:
            # Without ids, nothing else separates a continuing row from the cut row of another env before it.
            starts = torch.from_numpy(np.diff(rows.host_cells % self.num_envs, prepend=-1) != 0)
            columns[keys.init] |= upload(starts, self._device).unsqueeze(-1)

        next_obs = self._gather_next(rows, columns)
        for key in keys.deltas:
            self._add_delta(key, columns, next_obs.pop(key))
        if not compact:
            columns |= {keys.next_of[key]: columns[key] + 1 for key in keys.counts}
            columns |= {keys.next_of[key]: column for key, column in next_obs.items()}

        batch = nest(columns, rows.count)
        if keys.strided:
            self._clear_states(batch)
        if compact:
            final = gather_final(batch, keys, next_obs)
        else:
            final = None
        return batch, final

    def _add_agents(
        self, rows: "_RowGatherer", columns: dict[NestedKey, Tensor], agents: tuple[Tensor, Tensor]
    ) -> None:
        """Add the agent and the game of each row, with the game's step and how many of its agents acted."""
        keys = self._keys
        envs = rows.cells % self.num_envs
        steps = rows.cells // self.num_envs
        agent, game = (numbers[envs] for numbers in agents)

        # One number per game and vector step, with the writer bits of the trajectory ids.
        game_step = (steps + self.before) * self._games + game
        if keys.has_ids:
            game_step = (columns[keys.traj] >> ID_BITS << ID_BITS) + game_step

        columns |= {AGENT: agent, GAME: game, GAME_STEP: game_step}
        columns[NUM_AGENTS] = self._count_agents()[steps, game]

    def _add_envs(self, mask: Array, columns: dict[NestedKey, Tensor]) -> None:
        """Add the env of each row, and the number of its row."""
        counts = mask.sum(0)  # rows of each env, which stand next to each other
        env = np.repeat(np.arange(self.num_envs), counts)
        # The row number in the batch, minus that of the env's first row, plus the env's earlier rows.
        first = counts.cumsum() - counts
        step = np.arange(len(env)) + np.repeat(self._env_steps - first, counts)
        self._env_steps += counts

        writer = columns[self._keys.traj] >> ID_BITS << ID_BITS
        columns[ENV] = writer + upload(torch.from_numpy(env + self.first_env), self._device)
        columns[ENV_STEP] = upload(torch.from_numpy(step), self._device)

    def _add_delta(self, key: NestedKey, columns: dict[NestedKey, Tensor], next_obs: Tensor) -> None:
        """Add the difference of an observation's next one to it."""
        delta = encode_delta(columns[key], next_obs, self._keys.delta_dtype)
        check_delta(delta, columns[key], next_obs, key)
        columns[*DELTA, *as_tuple(key)] = delta

    def _clear_states(self, batch: TensorDict) -> None:
        """Zero the states of rows that do not store theirs. The first rows of runs always store them."""
        keys = self._keys
        starts = run_starts(batch, is_init_key=keys.init, traj_key=keys.traj)
        has_state = batch.get(HAS_STATE) | starts
        batch.set(HAS_STATE, has_state)
        for key in keys.states:
            state = batch.get(key)
            state.masked_fill_(~has_state.view(-1, *(1,) * (state.ndim - 1)), 0)

    def take(self, key: NestedKey, mask: Array) -> Tensor:
        """Return a column's values in the True cells, in `lay_out`'s order; later steps may overwrite them."""
        rows = _RowGatherer(self, mask).of(key)
        self._given.discard(key)
        return rows

    def _count_agents(self) -> Tensor:
        """Count the agents that acted in each game and step, in the batch or not: int64 ``[steps, games]``."""
        assert self._agents is not None
        acts = torch.ones(self.steps, self.num_envs, dtype=torch.int64, device=self._device)
        if not self.same_step:
            acts.masked_fill_(to_torch(self.columns[DEAD][: self.steps]), 0)
        return acts.new_zeros(self.steps, self._games).index_add_(1, self._agents[1], acts)

    def _gather_next(self, rows: "_RowGatherer", columns: dict[NestedKey, Tensor]) -> dict[NestedKey, Tensor]:
        """Return the true next observation of each row; NaN or the row's own observation where the env hides it."""
        next_obs: dict[NestedKey, Tensor] = {}
        known = columns.get(NEXT_KNOWN) if self._unknown else None

        for key in self._keys.obs:
            if self._dense_finals:
                column = rows.of(self._keys.next_of[key])
            else:
                # Where finals were stored, the value one step later belongs to a reset.
                column = rows.of(key, after=1)
                if self._finals.get(key):
                    self._patch_finals(self._finals[key], rows, column)

            if known is not None and column.is_floating_point():
                column.masked_fill_(~known.view(-1, *(1,) * (column.ndim - 1)), torch.nan)
            elif known is not None:
                column = select(known, column, columns[key])
            next_obs[key] = column

        return next_obs

    def _patch_finals(self, finals: list[tuple[Array, Array]], of: "_RowGatherer", gathered: Tensor) -> None:
        """Write the stored final observations into the gathered next observations ``[N, ...]``, in place."""
        numbers = np.concatenate([number for number, _ in finals])
        values = np.concatenate([value for _, value in finals])
        if of.whole:
            rows = numbers % self.num_envs * self.steps + numbers // self.num_envs
        else:
            # Map each cell to its row in the batch; -1 if it is not in the batch.
            row_of_cell = np.full(self.steps * self.num_envs, -1)
            row_of_cell[of.host_cells] = np.arange(of.count)
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

        With ``keep`` step 0 is always kept, marked as taken if no cell is left over.
        """
        last = self.steps - 1
        first = last * self.num_envs  # number of the last step's first cell
        self.before += self.steps
        self.steps = self.taken = 0
        finals = self._finals
        self._finals = {}
        given = self._given
        self._given = set()
        kept_step = surplus_from < self.num_envs or keep

        for key in given:
            old = self.columns[key]
            # Old values need not be cleared: each step writes all columns except the loose ones.
            if key in self._loose:
                new = self._zeros(old[0])
            else:
                new = _empty_like(old)

            if kept_step:
                new[last] = old[last]
            self._set(key, new)

        if not kept_step:
            self._unknown = False
            return

        self.before -= 1
        for column in self.columns.values():
            column[0] = column[last]
        for key, kept in finals.items():
            for numbers, values in kept:
                if len(numbers) and numbers[0] >= first:
                    self._finals.setdefault(key, []).append((numbers - first, values))

        self.steps = 1
        self.taken = surplus_from

    def _allocate(self, key: NestedKey, value: Array) -> Array:
        """Allocate a column of zeros for values like this one."""
        if not hasattr(value, "dtype"):
            value = np.asarray(value)
        is_number = isinstance(value, Tensor) or value.dtype.kind in "biufc"
        if not is_number or tuple(value.shape[:1]) != (self.num_envs,):
            raise TypeError(
                f"column {key!r} must be numbers with one row for each of {self.num_envs} envs, got "
                f"{value.dtype} of shape {tuple(value.shape)}"
            )

        if key in self._keys.float32:  # values written later are cast
            if isinstance(value, Tensor):
                value = value.float()
            else:
                value = value.astype(np.float32)

        return self._set(key, self._zeros(value))

    def _set(self, key: NestedKey, column: Array) -> Array:
        """Set a column's array ``[room, E, ...]``."""
        self.columns[key] = column
        if self._at_once:
            self._by_step[key] = column.unbind(0) if isinstance(column, Tensor) else list(column)
        return column

    def _zeros(self, value: Array) -> Array:
        """Return zeros ``[room, E, ...]`` for values like this one."""
        if not isinstance(value, Tensor):
            return np.zeros((self._room, *value.shape), dtype=value.dtype)
        if self._dense_finals and value[0].numel() * value.element_size() >= _WIDE:
            return value.new_zeros(self.num_envs, self._room, *value.shape[1:]).transpose(0, 1)
        return value.new_zeros(self._room, *value.shape)


class _RowGatherer:
    """Gathers the rows of a batch from a window's columns: the True cells, run after run."""

    def __init__(self, window: Window, mask: Array) -> None:
        self._window = window
        self._mask = mask  # mask of cells, bool [steps, E]
        self.count = int(np.count_nonzero(mask))
        #: Whether every cell is a row.
        self.whole = self.count == mask.size

    @cached_property
    def host_cells(self) -> Array:
        """The cell numbers, env after env, in time order: int64 ``[N]``, NumPy."""
        mask = self._mask
        numbers = np.arange(mask.size).reshape(mask.shape).T
        if self.whole:
            return numbers.ravel()
        return numbers[mask.T]

    @cached_property
    def cells(self) -> Tensor:
        """The same on the window's device."""
        return upload(torch.from_numpy(self.host_cells), self._window._device)

    def of(self, key: NestedKey, after: int = 0) -> Tensor:
        """Return a column's values, ``after`` steps later, as a tensor ``[N, ...]`` that the batch may own."""
        window = self._window
        column = window.columns[key]
        if self.whole:
            rows = self._transpose(key, column[after : after + window.steps])
        else:
            rows = None

        if rows is None:
            rows = self._gather(column, after)
        if rows.ndim == 1 and key in window._keys.trailing:
            return rows.unsqueeze(-1)
        return rows

    def _transpose(self, key: NestedKey, column: Array) -> Tensor | None:
        """Transpose a whole column ``[steps, E, *S]``; None if gathering is faster."""
        rows: Tensor
        if isinstance(column, Tensor):
            rows = column.transpose(0, 1).flatten(0, 1)
            if rows.data_ptr() != column.data_ptr():
                return rows
            # Nothing was copied: the batch and the window share memory that only one of them may own.
            if not self._window._dense_finals:
                return rows.clone()
            self._window._given.add(key)
            return rows

        shape = column.shape[2:]
        if self.count <= _FEW_ROWS:
            flat = column.swapaxes(0, 1).reshape(self.count, *shape)
            if np.may_share_memory(flat, column):
                owned = flat.copy()
            else:
                owned = flat
            return torch.from_numpy(owned)

        if shape and column[0, 0].nbytes != 16:
            return None
        like = torch.from_numpy(column)
        if shape:  # move each value as one 16-byte number: [steps, E]
            like = torch.from_numpy(column.reshape(*column.shape[:2], -1).view(np.complex128)[..., 0])

        rows = like.T.flatten()
        if rows.data_ptr() == like.data_ptr():
            rows = rows.clone()
        if shape:
            return rows.unsqueeze(-1).view(torch.from_numpy(column).dtype).view(-1, *shape)
        return rows

    def _gather(self, column: Array, after: int) -> Tensor:
        """Gather the rows of a column ``[room, E, ...]``."""
        window = self._window
        trailing = column.shape[2:]
        further = after * window.num_envs

        if not isinstance(column, Tensor):
            # [room, E, ...] -> [room * E, ...]; -1 is not possible where a row has no numbers.
            flat = column.reshape(len(column) * window.num_envs, *trailing)
            if self.count <= _FEW_ROWS:
                return torch.from_numpy(flat.take(self.host_cells + further, 0))
            column = torch.from_numpy(column)

        cells = self.cells + further if further else self.cells
        if column.is_contiguous():
            flat = column.flatten(0, 1)
        else:  # env-major: [E, room, ...] in memory
            flat = column.transpose(0, 1).flatten(0, 1)
            cells = cells % window.num_envs * len(column) + cells // window.num_envs

        out = _empty(flat, len(cells), *trailing)
        return torch.index_select(flat, 0, cells, out=out)


def _empty_like(column: Tensor) -> Tensor:
    """Return an empty column with the memory order (time-major or env-major) of this one."""
    if column.is_contiguous():
        return _empty(column, *column.shape)
    steps, envs, *trailing = column.shape
    return _empty(column, envs, steps, *trailing).transpose(0, 1)


def _empty(like: Tensor, *shape: int) -> Tensor:
    """New memory, contiguous."""
    size = math.prod(shape) * like.element_size()
    if size < _HUGE or not like.is_cpu:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(size, np.uint8)).view(like.dtype).view(shape)


def gather_final(batch: TensorDict, keys: ColumnKeys, next_obs: dict[NestedKey, Tensor]) -> TensorDict:
    """Return the *final* of a compact batch: the next observations that no later row holds."""
    ends = run_ends(batch, is_init_key=keys.init, traj_key=keys.traj)
    known = batch.get(NEXT_KNOWN, None)
    if known is None:
        cut = ends
    else:
        cut = ends & known
    rows = cut.nonzero().squeeze(-1)
    columns: dict[NestedKey, Tensor] = {"row": rows}
    columns |= {next_key(key): column.index_select(0, rows) for key, column in next_obs.items()}

    return nest(columns, len(rows))


def compact_batch(batch: TensorDict, keys: ColumnKeys) -> tuple[TensorDict, TensorDict]:
    """Drop the next observations that later rows hold; return the batch and the others as ``final``."""
    next_obs = {key: batch.get(next_key(key)) for key in keys.obs if key not in keys.deltas}
    repeated = [next_key(key) for key in (*keys.obs, *keys.counts, *keys.states)]
    return batch.exclude(*repeated), gather_final(batch, keys, next_obs)
