"""The runner: one env, one policy, one window; the loop that `rollout` and `Collector` share."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.boundaries import run_ends
from flatroll.layout.delta import check_delta, encode_delta
from flatroll.layout.keys import (
    ACTION,
    DELTA,
    DONE,
    IS_INIT,
    NEXT_KNOWN,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
)
from flatroll.rollouts.policies import Columns, RandomPolicy, state_key
from flatroll.rollouts.window import DEAD, Window
from flatroll.wrappers.adapt import as_vector_env, find_stream
from flatroll.wrappers.arrays import Array, Tree, leaf_at, select, to_torch
from flatroll.wrappers.compact import CompactObs, NextObservationDelta, true_next
from flatroll.wrappers.markers import InitTracker, MarkerWrapper, StepCounter, TrajId, find_wrapper
from flatroll.wrappers.sources import layers
from flatroll.wrappers.spaces import ActionCheck, observation_leaves
from flatroll.wrappers.stream import VectorStream

#: From (the columns a policy may read, made when asked; the observation tree) to (action, further columns).
Act = Callable[[Callable[[], Columns], Any], tuple[Any, Columns]]


class Runner:
    """Steps an env with a policy and lays the transitions out.

    Args:
        env: anything `as_vector_env` takes, or a stack of wrappers; InitTracker and TrajId are added where
            the stack lacks them.
        info_keys: entries of ``info`` to store: ``key`` as it came with the observation, ``("next", key)`` as
            it came with the step.
        track_traj_ids: whether to add TrajId.
        writer: the number of this writer, for ids that are unique over processes.
    """

    def __init__(
        self, env: Any, *, info_keys: Sequence[str] = (), track_traj_ids: bool = True, writer: int = 0
    ) -> None:
        env = as_vector_env(env)
        if find_wrapper(env, InitTracker) is None:
            env = InitTracker(env)
        if track_traj_ids and find_wrapper(env, TrajId) is None:
            env = TrajId(env, writer=writer)
        stream = find_stream(env)
        assert stream is not None
        self.env = env
        self.stream: VectorStream = stream
        self.num_envs: int = env.num_envs
        self.device = stream.capabilities.device
        markers = [layer for layer in layers(env) if isinstance(layer, MarkerWrapper)]
        plain = [m for m in markers if not isinstance(m, CompactObs | NextObservationDelta)]
        self._roots = [(m.key, m.info_name) for m in plain if not m.describes_step]
        self._nexts = [(next_key(m.key), m.info_name) for m in plain if m.describes_step]
        self._counts = [m.key for m in plain if isinstance(m, StepCounter)]
        self.traj_key: NestedKey = next((m.key for m in plain if isinstance(m, TrajId)), TRAJ_IDS)
        self.init_key: NestedKey = next((m.key for m in plain if isinstance(m, InitTracker)), IS_INIT)
        self._delta = find_wrapper(env, NextObservationDelta)
        self.asks_compact = find_wrapper(env, CompactObs) is not None
        self.info_keys = tuple(info_keys)
        # The adapted env checks its actions; an action wrapper in between takes others, and those are stored.
        space = env.single_action_space
        self._check_actions = (
            None
            if space is stream.single_action_space
            else ActionCheck(space, self.num_envs, stream.capabilities.framework, self.device)
        )
        self._one_action = not isinstance(space, spaces.Dict | spaces.Tuple)
        self._leaves = observation_leaves(env.single_observation_space)
        self.obs_keys: list[NestedKey] = [key for key, _ in self._leaves]
        self._delta_keys: set[NestedKey] = set() if self._delta is None else set(self._delta.keys)
        # A SAME_STEP env returns the reset observation in an ended row; the final one has to be kept apart.
        self._keeps_finals = self._never_invalid = stream.same_step
        self._on_host = stream.capabilities.framework == "numpy"
        self.random: RandomPolicy | None = None
        self.window = Window(self.num_envs, 1)
        self.states: Columns = {}
        self._defaults: Columns = {}
        self._obs: Tree = None
        self._info: dict[str, Any] = {}
        self._infos_seen: set[str] = set()

    def start(self, act: Act, defaults: Columns, steps: int) -> None:
        """Set the policy, the states it starts an episode with, and the window's first size."""
        self._act = act
        self._defaults = {
            key: value.expand(self.num_envs, *value.shape).contiguous() for key, value in defaults.items()
        }
        self.states = dict(self._defaults)
        self.window = Window(self.num_envs, steps)

    def reset(self, seed: int | None = None) -> None:
        """Reset the env: every open trajectory is cut here."""
        if self.window.steps:  # rows that wait lose the step that held their next observations
            waiting = ~self.stream.ended if self.stream.same_step else self.stream.ended | True
            envs = np.flatnonzero(to_torch(waiting).cpu().numpy())
            for key, path in self._leaves:
                values = to_torch(leaf_at(self._obs, path)).cpu().numpy()[envs]
                self.window.put_final(key, envs, values, step=self.window.steps - 1)
        self._obs, self._info = self.env.reset(seed=seed)

    @property
    def started(self) -> bool:
        """Whether the env has been reset."""
        return self._obs is not None

    def forget(self) -> None:
        """Drop what waits in the window; the next step needs a reset first."""
        self.window = Window(self.num_envs, 1)
        self._obs = None

    def step(self, random: bool = False) -> None:
        """One vector step: record what the policy sees, act, step, record what came of it."""
        window, stream = self.window, self.stream
        self._record_roots()
        for key in self.states:
            self._restart_state(key)
            window.put(key, self.states[key])
        action = self._action(random)
        if self._check_actions is not None:
            action = self._check_actions(action)
        obs, reward, terminated, truncated, info = self.env.step(action)
        taken = stream.actions if self._check_actions is None else action
        if self._one_action:
            window.put(ACTION, taken)
        else:
            for key, leaf in tree_leaves(ACTION, taken):
                window.put(key, leaf)
        window.put(REWARD, reward)
        window.put(TERMINATED, terminated)
        window.put(TRUNCATED, truncated)
        if not self._never_invalid:
            window.put(DEAD, stream.first)
        for key, name in self._nexts:
            window.put(key, info[name])
        if self._keeps_finals:
            self._record_finals(obs, info)
        if self.info_keys:
            self._record_infos(info)
        self._obs, self._info = obs, info
        window.advance()

    def _record_roots(self) -> None:
        window, obs, info = self.window, self._obs, self._info
        for key, path in self._leaves:
            window.put(key, leaf_at(obs, path) if path else obs)
        for key, name in self._roots:
            window.put(key, info[name])
        for name in self.info_keys:
            if name in info:
                window.put(name, info[name])

    def _restart_state(self, key: NestedKey) -> None:
        if self.stream.any_first is not False:
            first = to_torch(self.stream.first)
            self.states[key] = select(first, self._defaults[key], self.states[key])

    def _action(self, random: bool) -> Any:
        action, written = self._act(self._policy_columns, tensors(self._obs))
        for key, value in written.items():
            carried = state_key(key)
            if carried is not None and carried in self.states:
                self.states[carried] = value
            self.window.put(key, value)
        if random:
            assert self.random is not None
            action = self.random()
        return action

    def _policy_columns(self) -> Columns:
        columns: Columns = {key: to_torch(leaf_at(self._obs, path)) for key, path in self._leaves}
        for key, name in self._roots:
            value = to_torch(self._info[name])
            columns[key] = value if key == self.traj_key else value.unsqueeze(-1)
        for name in self.info_keys:
            if name in self._info:
                columns[name] = to_torch(self._info[name])
        columns.update(self.states)
        return columns

    def _record_finals(self, obs: Tree, info: dict[str, Any]) -> None:
        """Keep the true next observations of ended rows: dense on a device, only their rows on the host."""
        stream, window = self.stream, self.window
        if stream.hides_final_obs:
            known = stream.known
            window.put(NEXT_KNOWN, stream.ended | True if known is None else known)
        if not self._on_host:
            following = true_next(obs, info, stream)
            for key, path in self._leaves:
                window.put(next_key(key), leaf_at(following, path))
        elif stream.any_ended and "final_obs" in info:
            envs = np.flatnonzero(stream.ended)
            for key, path in self._leaves:
                window.put_final(key, envs, leaf_at(info["final_obs"], path)[envs])

    def _record_infos(self, info: dict[str, Any]) -> None:
        """Entries of the step just made; Gymnasium moves those of ended SAME_STEP rows to ``final_info``."""
        final = info.get("final_info") if self._keeps_finals else None
        for name in self.info_keys:
            value = info.get(name)
            if isinstance(final, dict) and name in final:
                last = final[name]
                value = last if value is None else select(self.stream.ended, last, value)
            if value is not None:
                self._infos_seen.add(name)
                self.window.put(next_key(name), value)

    def count(self) -> int:
        """How many transitions wait in the window. Waits for the device only if the env has dead rows."""
        window = self.window
        if not window.steps:
            return 0
        if self._never_invalid:
            return window.steps * self.num_envs - window.taken
        return int(np.count_nonzero(window.valid(False)))

    def valid(self) -> Array:
        """Which cells of the window are transitions not yet taken: bool ``[steps, E]`` on the host."""
        return self.window.valid(self._never_invalid)

    def take(self, frames: int, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """The first ``frames`` transitions in order of time as a flat batch; the rest stay."""
        mask, reached = self.window.first_cells(self.valid(), frames)
        batch = self.lay_out(mask, compact)
        self.window.restart(reached)
        return batch

    def lay_out(self, mask: Array, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """The True cells as one flat batch, trajectory after trajectory, and its *final* if compact."""
        window = self.window
        for key, path in self._leaves:  # what follows the last step
            window.put(key, leaf_at(self._obs, path))
        missing = [name for name in self.info_keys if name not in self._infos_seen]
        if missing:
            there = sorted(key for key in self._info if not key.startswith("_"))
            raise KeyError(f"info_keys={missing} were in no step's info; the last one had {there}")
        host_cells = window.cells(mask)
        cells = torch.from_numpy(host_cells).to(self.device, non_blocking=True)
        columns = self._gather_columns(cells)
        following = {key: self._next_obs(key, cells, host_cells, columns) for key in self.obs_keys}
        batch = TensorDict({}, batch_size=[len(host_cells)], device=None)
        for key, column in columns.items():
            batch.set(key, column)
        for key in self._counts:
            batch.set(next_key(key), columns[key] + 1)
        for key, column in following.items():
            if key in self._delta_keys:
                delta = encode_delta(columns[key], column, self._delta.delta_dtype)
                check_delta(delta, columns[key], column, key)
                batch.set((*DELTA, *as_tuple(key)), delta)
        if compact:
            return self.compact(batch, following)
        for key, column in following.items():
            if key not in self._delta_keys:
                batch.set(next_key(key), column)
        return batch, None

    def compact(self, batch: TensorDict, following: Columns | None = None) -> tuple[TensorDict, TensorDict]:
        """The batch without what its own later rows say, and its *final*: the observations no row holds."""
        if following is None:
            keys = [key for key in self.obs_keys if key not in self._delta_keys]
            following = {key: batch.get(next_key(key)) for key in keys}
        ends = run_ends(batch, is_init_key=self.init_key, traj_key=self.traj_key)
        known = batch.get(NEXT_KNOWN, None)
        rows = (ends if known is None else ends & known).nonzero().squeeze(-1)
        final = TensorDict({"row": rows}, batch_size=[len(rows)])
        for key, column in following.items():
            final.set(next_key(key), column.index_select(0, rows))
        repeated = [*self.obs_keys, *self._counts, *self.states]
        return batch.exclude(*(next_key(key) for key in repeated)), final

    def _gather_columns(self, cells: Tensor) -> Columns:
        """All columns but the next observations, in the shapes of the layout contract."""
        window = self.window
        columns: Columns = {}
        skipped: set[NestedKey] = {DEAD, *(next_key(key) for key in self.obs_keys)}
        trailing: set[NestedKey] = {REWARD, TERMINATED, TRUNCATED, *(key for key, _ in self._nexts)}
        trailing |= {key for key, _ in self._roots if key != self.traj_key}
        for key in window.columns:
            if key in skipped:
                continue
            column = window.gather(key, cells)
            columns[key] = column.unsqueeze(-1) if key in trailing else column
        columns[DONE] = columns[TERMINATED] | columns[TRUNCATED]
        return columns

    def _next_obs(self, key: NestedKey, cells: Tensor, host_cells: Array, columns: Columns) -> Tensor:
        window = self.window
        if self._keeps_finals and not self._on_host:
            column = window.gather(next_key(key), cells)
        else:
            column = window.gather(key, cells, shift=1)
            window.patch_finals(key, host_cells, column)
        if NEXT_KNOWN in columns:
            known = columns[NEXT_KNOWN]
            lost = torch.full_like(column, torch.nan) if column.is_floating_point() else columns[key]
            column = select(known, column, lost)
        return column


def tree_leaves(key: NestedKey, tree: Any) -> list[tuple[NestedKey, Array]]:
    """The leaves of a tree under a key."""
    if isinstance(tree, (dict, tuple)):
        items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [leaf for name, child in items for leaf in tree_leaves((*as_tuple(key), str(name)), child)]
    return [(key, tree)]


def tensors(tree: Tree) -> Any:
    """The tree with tensors for leaves (views of NumPy memory)."""
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, dict):
        return {key: tensors(child) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(tensors(child) for child in tree)
    return to_torch(tree)


__all__ = ["Runner"]
