"""An envpool in async mode: each step is one of the envs that are done first, and each env's stream stays its own."""

from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.keys import NestedKey
from flatroll.rollouts.arguments import Devices
from flatroll.rollouts.batch_columns import DEAD
from flatroll.rollouts.policies import Columns, refuse_memory
from flatroll.rollouts.random_actions import RandomActions
from flatroll.rollouts.window import Window
from flatroll.wrappers.arrays import Array, Tree, map_tree
from flatroll.wrappers.markers import TrajId, find_wrapper
from flatroll.wrappers.pool_rows import PoolRows

#: A `Runner`; imported it would lengthen the chain of imports.
Part: TypeAlias = Any


class PoolRunner:
    """Has a `Runner` step B rows at a time, whose envs are others at every step, with its interface over all E envs.

    The runner acts for the rows that have come, sends the actions, awaits the next rows and records what they say of
    their envs' last actions. Its window has a place in each env's column (`PoolWindow`), its wrappers and states
    are gathered by env (`PoolRows`). Between batches the steps of E - B envs stay under way.
    """

    def __init__(self, part: Part) -> None:
        self.num_envs, self.env, self.envs = part.num_envs, part.env, part.envs
        self.device, self.keys, self.asks_compact = part.device, part.keys, part.asks_compact
        self._part = part
        self._rows = part.env = PoolRows(part.env)
        part.num_envs = self._rows.batch_size
        part.set_version(0)
        self._states: Columns = {}  # [E, ...]; the runner has the rows that it steps
        self._ages = np.zeros(self.num_envs, np.int64)
        self._ahead: list[Any] = []  # random actions of all envs that not every env has taken
        self._taken = np.zeros(self.num_envs, np.int64)  # how many of them each env has taken

    def start(
        self,
        policy: Any,
        steps: int,
        *,
        devices: Devices,
        seed: int | None,
        recurrent: bool = True,
        state_stride: int = 1,
    ) -> None:
        """Set the policy, and create a window with room for ``steps`` steps of each env; see `Runner.start`."""
        refuse_memory(policy, "with an envpool in async mode", "take a pool in sync mode")
        part = self._part
        part.start(
            policy,
            steps,
            devices=devices,
            seed=0,
            recurrent=recurrent,
            state_stride=state_stride,
        )
        self.random = RandomActions(part.random.space, self.num_envs, self.device, seed)
        part.draw = self._draw
        self.window = part.window = PoolWindow(self.keys, self._rows, steps)

    @property
    def started(self) -> bool:
        """Whether the env has been reset."""
        return bool(self._part.started)

    def reset(self, seed: int | None = None) -> None:
        """Drop what is under way and reset all envs; see `Runner.reset`."""
        self._part.reset(seed)

    def forget(self) -> None:
        """Discard the recorded transitions; the next step needs a reset first."""
        self._part.forget()
        self._ahead.clear()
        self._taken[:] = 0

    def step(self, random: bool = False) -> None:
        """Act for the envs whose rows have come last, and await B rows."""
        part, ids = self._part, self._rows.ids
        for key, state in part.states.items():
            if (
                key in self._states
            ):  # envs without a state yet begin an episode, and so start from the default
                part.states[key] = self._states[key][torch.from_numpy(ids)]
            else:
                self._states[key] = state.new_zeros(self.num_envs, *state.shape[1:])
        part.age = self._ages[ids]
        part.step(random)
        acted = self._rows.acted  # others than `ids` if the env had to be reset first
        for key, state in part.states.items():
            self._states[key][torch.from_numpy(acted)] = state
        self._ages[acted] = part.age

    def lay_out(self, mask: Array, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """Build a flat batch of the transitions where bool ``mask`` ``[steps, E]`` is True, env after env."""
        batch: tuple[TensorDict, TensorDict | None] = self._part.lay_out(mask, compact)
        return batch

    def open_ids(self) -> Tensor:
        """Return the ids of trajectories that go on or have transitions that no batch has taken."""
        under_way = find_wrapper(self._rows, TrajId)._ids
        return torch.cat([self._part.open_ids(), torch.from_numpy(under_way)])

    def prime(self, states: Columns) -> None:
        """Also carry these recurrent states, see `Runner.prime`."""
        self._part.prime(states)

    def set_version(self, version: int) -> None:
        """Set the version of the policy in the steps that follow."""
        self._part.set_version(version)

    def _draw(self) -> Tree:
        """The next random actions of the B envs: an env's k-th one is that of a sync pool's k-th step."""
        ids, taken, ahead = self._rows.ids, self._taken, self._ahead
        while len(ahead) <= taken[ids].max():
            ahead.append(self.random())
        drawn = map_tree(lambda *leaves: torch.stack(leaves)[taken[ids], ids], *ahead)
        taken[ids] += 1
        done = int(taken.min())
        del ahead[:done]
        taken -= done
        return drawn


def of_pool(part: Part) -> Any:
    """The runner itself, or a `PoolRunner` of it if its env is an envpool in async mode."""
    return part if part.stream.capabilities.batch_size is None else PoolRunner(part)


class PoolWindow(Window):
    """A window in which each env has a step of its own: columns ``[steps, E, ...]``, written at ``[step of e, e]``.

    What is put goes to the envs of the rows that have come last. An env's *open* cell has what the policy saw, or is
    about to see; it becomes a transition when the env's next row comes.
    """

    def __init__(self, keys: Any, rows: PoolRows, steps: int) -> None:
        super().__init__(
            keys, rows.num_envs, steps, device=torch.device("cpu"), same_step=False, dense_finals=False
        )
        self._rows = rows
        self._all = np.arange(self.num_envs)
        self._open = np.zeros(self.num_envs, np.int64)  # step of each env's open cell
        self._resets = 0
        #: Envs whose last transitions came with the last rows, in the order in which they came.
        self._late: Array = self._all[:0]
        self._count = 0

    def put(self, keys: Any, values: Any) -> None:
        """Record values ``[B, ...]``, one for each key, in the open cells of the envs whose rows came last."""
        if self._rows.resets != self._resets:
            self._cut()
        ids = self._rows.ids
        steps = self._open[ids]
        for key, value in zip(keys, values):  # noqa: B905 (as in Window.put)
            column = self.columns.get(key)
            if column is None:
                column = self._allocate(key, value)
            if isinstance(column, Tensor):
                column[torch.from_numpy(steps), torch.from_numpy(ids)] = torch.as_tensor(value).to(
                    column.dtype
                )
            else:
                column[steps, ids] = value

    def put_loose(self, key: NestedKey, value: Any) -> None:
        """Record a value whose dtype may change between steps; None is recorded as 0."""
        if value is not None:
            super().put_loose(key, value)
        elif (column := self.columns.get(key)) is not None:
            self.put((key,), (column[0, self._rows.ids] * 0,))

    def put_final(self, key: NestedKey, envs: Array, values: Array, step: int) -> None:
        """Record what the rows that came last show; a reset follows, which moves the open cells on."""
        self.put((key,), (values,))

    def advance(self) -> None:
        """Finish the open cells of the envs whose rows have come, and make room for the next ones."""
        ids = self._rows.ids
        self._open[ids] += 1
        self._late = ids[~self._rows.stream.first]  # rows on which the env only resets are none
        self._count += len(self._late)
        if self._open[ids].max() > self.steps:
            super().advance()

    def _cut(self) -> None:
        """After a reset no open cell becomes a transition; if there are steps it holds a next observation."""
        self._resets = self._rows.resets
        if self.steps:
            self.columns[DEAD][self._open, self._all] = True
            self._open += 1
            if self._open.max() > self.steps:
                super().advance()

    def count(self) -> int:
        """Count the recorded transitions that no batch has taken."""
        return self._count

    def valid(self) -> Array:
        """Return which recorded cells are transitions that no batch has taken; bool ``[steps, E]``."""
        if not self.steps:
            return np.zeros((0, self.num_envs), bool)
        return (np.arange(self.steps)[:, None] < self._open) & ~self.columns[DEAD][: self.steps]

    def first_cells(self, count: int) -> tuple[Array, Any]:
        """Select the ``count`` transitions that came first: bool ``[steps, E]``, and the envs with another one left."""
        mask = self.valid()
        left = self._late[len(self._late) - (self._count - count) :]
        mask[self._open[left] - 1, left] = False
        return mask, left

    def restart(self, surplus_from: Any, keep: bool = False) -> None:
        """Clear the window, but for the open cells, and before them the last transitions of the envs that are left.

        A number instead of an array of envs: also of these.
        """
        left = surplus_from if isinstance(surplus_from, np.ndarray) else self._all[:0]
        ends = self._open
        self._open, self._late, self._count = np.zeros_like(ends), left, len(left)
        starts = ends.copy()
        starts[left] -= 1
        self._open[left] = 1
        for column in self.columns.values():
            # The open cells behind the transitions left are filled when their envs, which have not acted, act or reset.
            column[0] = column[starts, self._all]
        self.steps = int(len(left) > 0)

    def _allocate(self, key: NestedKey, value: Any) -> Array:
        """A new column of zeros for values ``[B, ...]`` like this one."""
        if not isinstance(value, Tensor):
            value = np.asarray(value)
        if tuple(value.shape[:1]) != (self._rows.batch_size,):
            raise TypeError(
                f"column {key!r} must have one row for each of the {self._rows.batch_size} envs of a step, got shape "
                f"{tuple(value.shape)}"
            )
        shape = self.num_envs, *value.shape[1:]
        wide = value[:1].expand(shape) if isinstance(value, Tensor) else np.broadcast_to(value[:1], shape)
        return super()._allocate(key, wide)
