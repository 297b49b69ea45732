"""Collects from an envpool in async mode: each step returns the envs that finish first; rows are kept per env."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import create_empty_array
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.keys import NestedKey
from flatroll.rollouts.batch_columns import DEAD, ColumnKeys
from flatroll.rollouts.env_facts import EnvFacts
from flatroll.rollouts.policies import Columns, Policy, refuse_memory
from flatroll.rollouts.random_actions import RandomActions
from flatroll.rollouts.runner import Runner, RunnerOptions
from flatroll.rollouts.window import Window
from flatroll.wrappers.adapt_env import find_stream
from flatroll.wrappers.arrays import Array, Tree, map_tree, select
from flatroll.wrappers.envpool_source import AsyncPoolSource
from flatroll.wrappers.markers import MarkerWrapper, TrajId, find_wrapper
from flatroll.wrappers.source import Info, Seed, Step, layers
from flatroll.wrappers.stream import VectorStream


class PoolRunner:
    """Runs a `Runner` on B rows at a time, different envs in every step, with its interface over all E envs.

    The runner acts for the received rows, sends the actions, waits for the next rows and records them as results of
    those envs' previous actions. Its window keeps a separate position in each env's column (`PoolWindow`); wrapper
    and recurrent states are gathered by env (`PoolRows`). Between batches E - B envs keep running.
    """

    def __init__(self, facts: EnvFacts, policy: Policy | None, steps: int, options: RunnerOptions) -> None:
        refuse_memory(policy, "with an envpool in async mode", "take a pool in sync mode")
        self.num_envs = facts.num_envs
        self.env = facts.env
        self.envs = [facts.env]
        self.device = facts.device
        self.keys = facts.keys

        self._rows = PoolRows(facts.env)
        rows = replace(facts, env=self._rows, num_envs=self._rows.batch_size)
        self._part = part = Runner(rows, policy, steps, replace(options, seed=0))
        self.window = part.window = PoolWindow(self.keys, self._rows, steps)

        #: Random actions of all envs, as of a sync pool.
        self.random = RandomActions(part.random.space, self.num_envs, self.device, options.seed)
        part.draw = self._draw
        self._states: Columns = {}  # [E, ...]; the runner holds those of the rows that it steps
        self._carried: Columns = {}  # likewise
        self._ages = np.zeros(self.num_envs, np.int64)
        self._ahead: list[Any] = []  # random actions [E, ...] that some envs have not used yet
        self._taken = np.zeros(self.num_envs, np.int64)  # number of them used by each env

    @property
    def started(self) -> bool:
        """Whether the env has been reset."""
        return self._part.started

    def reset(self, seed: int | None = None) -> None:
        """Drop pending steps and reset all envs; see `Runner.reset`."""
        self._part.reset(seed)

    def forget(self) -> None:
        """Discard the recorded transitions; the next step needs a reset first."""
        self._part.forget()
        self._ahead.clear()
        self._taken[:] = 0

    def step(self, random: bool = False) -> None:
        """Act for the envs whose rows arrived last, and wait for B rows."""
        part = self._part
        ids = self._rows.ids
        for own, whole in ((part.states, self._states), (part.carried, self._carried)):
            for key, state in own.items():
                # Envs without a state begin an episode and use the initial values.
                if key in whole:
                    own[key] = whole[key][torch.from_numpy(ids)]
                else:
                    whole[key] = state.new_zeros(self.num_envs, *state.shape[1:])

        part.age = self._ages[ids]
        part.step(random)
        stepped = self._rows.stepped  # differs from `ids` if the env had to be reset first
        for own, whole in ((part.states, self._states), (part.carried, self._carried)):
            for key, state in own.items():
                whole[key] = _with_shape(whole[key], state.shape[1:])
                whole[key][torch.from_numpy(stepped)] = state
        self._ages[stepped] = part.age

    def lay_out(self, mask: Array, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """Build a flat batch of the transitions where bool ``mask`` ``[steps, E]`` is True, env after env."""
        return self._part.lay_out(mask, compact)

    def open_ids(self) -> Tensor:
        """Return the ids of trajectories that continue or have transitions not yet in a batch."""
        marker = find_wrapper(self._rows, TrajId)
        assert marker is not None  # only used where trajectories are joined by id
        return torch.cat([self._part.open_ids(), torch.from_numpy(marker.ids)])

    def prime(self, states: Columns) -> None:
        """Also carry these recurrent states, see `Runner.prime`."""
        self._part.prime(states)

    def snapshot_problem(self) -> str | None:
        """Return why the episodes cannot be saved: envs keep running between batches."""
        return "an envpool does not show its state"

    def get_snapshot(self) -> dict[str, Any] | None:
        """Return None, see `snapshot_problem`."""
        return None

    def set_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Refuse: the episodes of a pool cannot be set."""
        raise ValueError(f"the episodes cannot be set: {self.snapshot_problem()}")

    def set_version(self, version: int) -> None:
        """Set the version of the policy in the steps that follow."""
        self._part.set_version(version)

    def _draw(self) -> Tree:
        """Return the next random actions of the B envs: an env's k-th action is that of a sync pool's k-th step."""
        ids = self._rows.ids
        taken = self._taken
        ahead = self._ahead
        while len(ahead) <= taken[ids].max():
            ahead.append(self.random())
        drawn = map_tree(lambda *leaves: torch.stack(leaves)[taken[ids], ids], *ahead)
        taken[ids] += 1
        done = int(taken.min())
        del ahead[:done]
        taken -= done

        return drawn


def _with_shape(whole: Tensor, shape: torch.Size) -> Tensor:
    """Return values ``[E, ...]`` as rows of this shape: themselves, or in the first places of zeros if it has grown."""
    if whole.shape[1:] == shape:
        return whole
    grown = whole.new_zeros(len(whole), *shape)
    grown[tuple(map(slice, whole.shape))] = whole
    return grown


def make_runner(
    facts: EnvFacts, policy: Policy | None, steps: int, options: RunnerOptions
) -> "Runner | PoolRunner":
    """Make a `Runner`, or a `PoolRunner` if the env is an envpool in async mode."""
    if facts.stream.capabilities.batch_size is None:
        return Runner(facts, policy, steps, options)
    return PoolRunner(facts, policy, steps, options)


class PoolWindow(Window):
    """A window with a step counter per env: columns ``[steps, E, ...]``, written at ``[step of e, e]``.

    Values are recorded for the envs of the last rows. An env's *open* cell holds the policy's input; it becomes a
    transition when the env's next row arrives.
    """

    def __init__(self, keys: ColumnKeys, rows: "PoolRows", steps: int) -> None:
        super().__init__(
            keys, rows.num_envs, steps, device=torch.device("cpu"), same_step=False, dense_finals=False
        )
        self._rows = rows
        self._all = np.arange(self.num_envs)
        self._open = np.zeros(self.num_envs, np.int64)  # step of each env's open cell
        self._resets = 0

        #: Envs whose transitions were completed by the last rows, in order of arrival.
        self._late: Array = self._all[:0]
        self._count = 0

    def put(self, keys: Iterable[NestedKey], values: Iterable[Array]) -> None:
        """Record values ``[B, ...]``, one per key, in the open cells of the envs whose rows arrived last."""
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

    def put_loose(self, key: NestedKey, value: Array | None) -> None:
        """Record a value whose dtype may change between steps; None is recorded as 0."""
        if value is not None:
            super().put_loose(key, value)
        elif (column := self.columns.get(key)) is not None:
            self.put((key,), (column[0, self._rows.ids] * 0,))

    def put_final(self, key: NestedKey, envs: Array, values: Array, step: int) -> None:
        """Record the observations of the last rows; a reset follows, which advances the open cells."""
        self.put((key,), (values,))

    def advance(self) -> None:
        """Complete the open cells of the envs whose rows arrived, and make room for the next ones."""
        ids = self._rows.ids
        self._open[ids] += 1
        self._late = ids[~self._rows.stream.first]  # a row on which the env only resets is not a transition
        self._count += len(self._late)
        if self._open[ids].max() > self.steps:
            super().advance()

    def _cut(self) -> None:
        """After a reset no open cell becomes a transition; it may hold the next observation of the step before."""
        self._resets = self._rows.resets
        if self.steps:
            self.columns[DEAD][self._open, self._all] = True
            self._open += 1
            if self._open.max() > self.steps:
                super().advance()

    def count(self) -> int:
        """Count the recorded transitions that are not yet in a batch."""
        return self._count

    def valid(self) -> Array:
        """Return which recorded cells are transitions not yet in a batch; bool ``[steps, E]``."""
        if not self.steps:
            return np.zeros((0, self.num_envs), bool)
        return (np.arange(self.steps)[:, None] < self._open) & ~self.columns[DEAD][: self.steps]

    def first_cells(self, count: int) -> tuple[Array, Any]:
        """Select the ``count`` oldest transitions: bool ``[steps, E]``, and the envs that have further ones."""
        mask = self.valid()
        left = self._late[len(self._late) - (self._count - count) :]
        mask[self._open[left] - 1, left] = False
        return mask, left

    def restart(self, surplus_from: Array, keep: bool = False) -> None:
        """Clear the window except for the open cells and the remaining transitions of the given envs.

        ``surplus_from`` is int64, numbers of envs; any number instead keeps the open cells only.
        """
        if isinstance(surplus_from, np.ndarray):
            left = surplus_from
        else:
            left = self._all[:0]

        ends = self._open
        self._open, self._late, self._count = np.zeros_like(ends), left, len(left)
        starts = ends.copy()
        starts[left] -= 1
        self._open[left] = 1

        for column in self.columns.values():
            # The open cells after the kept transitions are filled when their envs next act or reset.
            column[0] = column[starts, self._all]
        self.steps = int(len(left) > 0)

    def _allocate(self, key: NestedKey, value: Array) -> Array:
        """Allocate a column of zeros for values ``[B, ...]`` like this one."""
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


class PoolRows(VectorWrapper):
    """Wraps a stack over an async pool: swaps per-env state in and out with the env's rows.

    `reset` and `step` return rows ``[B, ...]`` of the envs `ids`; the stream's flags and ``actions`` refer to the
    same rows. In each step the markers of the stack see the rows ``[B]`` of their arrays ``[E]`` that belong to these
    envs. An env's first row after a reset arrives with the steps of other envs; it gets the markers of the reset.

    Args:
        env: a stack of markers over an adapted async pool.

    Raises:
        ValueError: the stack has another wrapper, a marker without ``row_state``, or a view of the pool as tensors.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        stream = find_stream(env)
        assert stream is not None
        self.stream: VectorStream = stream
        source: Any = stream.source
        while not isinstance(source, AsyncPoolSource):  # a view of its observations
            source = source.source
        if stream.capabilities.framework != "numpy":
            raise ValueError(
                "an envpool in async mode stays in NumPy: leave framework='torch' out, policies get tensors anyway"
            )

        self._source: AsyncPoolSource = source
        source.led = True
        self._markers = [layer for layer in layers(env) if isinstance(layer, MarkerWrapper)]

        for layer in layers(env):
            if not isinstance(layer, VectorStream) and getattr(layer, "row_state", None) is None:
                raise ValueError(
                    f"{type(layer).__name__} does not work with an envpool in async mode: only flatroll's markers do, "
                    "and your own if row_state names the arrays [E] they keep. Use postproc, or a pool in sync mode"
                )

        assert source.capabilities.batch_size is not None
        #: B, the number of rows per step.
        self.batch_size = source.capabilities.batch_size

        #: Number of resets of the pool through this object.
        self.resets = 0
        #: The envs of the last step's actions, int64 ``[B]``.
        self.stepped: Array = np.zeros(0, np.int64)
        self._actions: Tree = create_empty_array(env.single_action_space, self.num_envs, np.zeros)
        self._ended = np.zeros(self.num_envs, bool)  # the env's next row is the first of an episode ...
        self._awaited = np.zeros(self.num_envs, bool)  # ... and comes from the pool's reset
        self._reset_info: Info = {}  # the markers' entries [E] of the last reset
        self._lent: list[tuple[MarkerWrapper, str, Array]] = []  # arrays [E] that [B] ones replace

    def __del__(self) -> None:
        """Gymnasium before 1.3 closes the env on deletion; it belongs to the caller."""

    @property
    def ids(self) -> Array:
        """The envs whose rows were returned last, int64 ``[B]``, in order of arrival."""
        return self._source.ids

    def reset(self, *, seed: Seed = None, options: Info | None = None) -> tuple[Tree, Info]:
        """Reset all envs; return the first B rows. The others arrive with later steps."""
        self._give_back()
        env: Any = self.env
        obs, info = env.reset(seed=seed, options=options)
        self.resets += 1
        self._ended[:] = self._awaited[:] = True
        self._reset_info = {
            marker.info_name: info[marker.info_name] for marker in self._markers if marker.info_name in info
        }
        self._begin(info, np.ones(self.batch_size, bool))
        stream = self.stream
        stream.first, stream.ended = np.ones(self.batch_size, bool), np.zeros(self.batch_size, bool)
        self._ended[self.ids] = False

        return obs, info

    def step(self, actions: Tree) -> Step:
        """Step the envs of the rows returned last; return the next B rows."""
        self._give_back()
        stream = self.stream
        source = self._source
        self.stepped = stepped = source.ids
        sent = stream.send(actions)
        map_tree(lambda whole, part: whole.__setitem__(stepped, part), self._actions, sent)
        source.receive()
        ids = source.ids
        stream.ended = self._ended[ids]  # the flags of the previous step determine which rows are first
        stream.any_ended = bool(stream.ended.any())

        for marker in self._markers:
            for name in marker.row_state or ():
                whole = getattr(marker, name)
                self._lent.append((marker, name, whole))
                setattr(marker, name, whole[ids])

        result: Step = self.env.step(sent)
        self._ended[ids] = stream.ended
        stream.actions = map_tree(lambda whole: whole[ids], self._actions)
        new = self._awaited[ids]
        for marker, name, whole in self._lent:
            whole[ids[~new]] = getattr(marker, name)[~new]
        self._give_back()
        if new.any():
            self._begin(result[4], new)
        return result

    def _begin(self, info: Info, new: Array) -> None:
        """Put the reset's entries into the rows where bool ``new`` ``[B]`` is True, and mark them as received."""
        ids = self.ids
        for name, whole in self._reset_info.items():
            if isinstance(whole, np.ndarray):
                rows = whole[ids]
                info[name] = rows if new.all() else select(new, rows, info[name])
        self._awaited[ids] = False

    def _give_back(self) -> None:
        """Give the markers their arrays ``[E]`` back."""
        while self._lent:
            marker, name, whole = self._lent.pop()
            setattr(marker, name, whole)
