"""The runner: one env, one policy, one window; the loop that `rollout` and `Collector` share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorObservationWrapper, VectorRewardWrapper
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.keys import ACTION, HAS_STATE, NEXT_KNOWN, REWARD, TERMINATED, TRUNCATED, next_key
from flatroll.rollouts.arguments import check_writer
from flatroll.rollouts.batch_columns import ColumnKeys, tree_leaves
from flatroll.rollouts.flat import FlatLayout
from flatroll.rollouts.policies import Act, Columns, ModulePolicy, as_act, state_key
from flatroll.rollouts.random_actions import RandomPolicy
from flatroll.rollouts.window import DEAD, Window
from flatroll.wrappers.adapt_env import find_stream
from flatroll.wrappers.arrays import (
    ActionCheck,
    Array,
    Tree,
    fill_rows,
    full,
    leaf_at,
    map_tree,
    own,
    select,
    to_torch,
)
from flatroll.wrappers.as_vector_env import as_vector_env
from flatroll.wrappers.compact import CompactObs, final_of, true_next
from flatroll.wrappers.markers import InitTracker, MarkerWrapper, RecurrentPrimer, TrajId, find_wrapper
from flatroll.wrappers.source import layers
from flatroll.wrappers.stream import VectorStream


class Runner:
    """Steps an env with a policy and lays the transitions out.

    Args:
        env: anything `as_vector_env` takes, or a stack of wrappers; InitTracker and TrajId are added where
            the stack lacks them.
        info_keys: entries of ``info`` to store: ``key`` as it came with the observation, ``("next", key)`` as
            it came with the step.
        track_traj_ids: whether to add TrajId.
        writer: the number of this writer, for ids that are unique over all that write into one buffer.
    """

    def __init__(
        self, env: Any, *, info_keys: Sequence[str] = (), track_traj_ids: bool = True, writer: int = 0
    ) -> None:
        env = as_vector_env(env)
        if find_wrapper(env, InitTracker) is None:
            env = InitTracker(env)
        check_writer(writer, track_traj_ids, find_wrapper(env, TrajId))
        if track_traj_ids and find_wrapper(env, TrajId) is None:
            env = TrajId(env, writer=writer)
        stream = find_stream(env)
        assert stream is not None
        self.env = env
        self.stream: VectorStream = stream
        self.num_envs: int = env.num_envs
        self.device = stream.capabilities.device
        self.keys = ColumnKeys(env, info_keys)
        self.asks_compact = find_wrapper(env, CompactObs) is not None
        space = env.single_action_space
        # The adapted env checks its actions and keeps them; a wrapper in between may take others.
        self._check_actions = (
            None
            if _actions_pass(env)
            else ActionCheck(space, self.num_envs, stream.capabilities.framework, self.device)
        )
        self._leaves, self._roots, self._nexts = self.keys.leaves, self.keys.roots, self.keys.nexts
        self._infos = self.keys.infos
        self._one_action = not isinstance(space, spaces.Dict | spaces.Tuple)
        # A SAME_STEP env returns the reset observation in an ended row; the final one has to be kept apart.
        self._keeps_finals = self._never_invalid = stream.same_step
        self._on_host = stream.capabilities.framework == "numpy"
        self._dense_finals = self._keeps_finals and not self._on_host
        self.layout = FlatLayout(self.keys, self.num_envs, self.device, self._dense_finals)
        self.window = self._new_window(1)
        self.states: Columns = {}
        self._defaults: Columns = {}
        self._act: Act | None = None
        self._stride = 1
        self._age: Array = None  # steps since the episode's first row
        self._obs: Tree = None
        self._info: dict[str, Any] = {}
        self._infos_seen: set[str] = set()

    def start(
        self,
        policy: Any,
        steps: int,
        *,
        device: torch.device | str | None = None,
        seed: int | None = None,
        blocking: bool = True,
        recurrent: bool = True,
        state_stride: int = 1,
    ) -> None:
        """Set the policy and the window's first size.

        Args:
            policy: a tensordict module, a callable from observation to action, or None for random actions.
            steps: vector steps to have room for.
            device: where the policy wants its input. Default: where the env's arrays are.
            seed: of random actions.
            blocking: wait for copies between devices.
            recurrent: wire the recurrent states that the policy declares.
            state_stride: keep them in every so many rows of a trajectory, and in the first rows of runs.
        """
        space = self.env.single_action_space
        self.random = RandomPolicy(space, self.num_envs, self.device, seed)
        if policy is not None:
            act = as_act(
                policy,
                space,
                self.num_envs,
                self.device,
                device=device,
                blocking=blocking,
                recurrent=recurrent,
                primed=None if (primer := find_wrapper(self.env, RecurrentPrimer)) is None else primer.states,
            )
            self.keys.claim("the policy", *act.writes)
            self._act = act
            self._carry(act.defaults)
        if state_stride > 1:
            if not self.states:
                raise ValueError(
                    f"state_stride={state_stride} needs a recurrent policy, one with parts that have "
                    "make_tensordict_primer(): this one has no state to keep"
                )
            self.keys.claim("state_stride", HAS_STATE)
            self.keys.strided = True
        self._stride = state_stride
        self.window, self._steps = self._new_window(steps), steps

    def prime(self, states: Columns) -> None:
        """Carry these states too, as far as the policy writes them under ``"next"``.

        Raises:
            RuntimeError: the env has been stepped without them.
        """
        if not isinstance(self._act, ModulePolicy):
            return
        before = set(self._act.defaults)
        self._act.prime(states)
        fresh = {key: value for key, value in self._act.defaults.items() if key not in before}
        if fresh and self.started:
            raise RuntimeError(
                f"the recurrent states {sorted(map(repr, fresh))} are new, and rows were collected without them: "
                "set them before the first batch"
            )
        self._carry(fresh)

    def _carry(self, defaults: Columns) -> None:
        """From now on, hand these states from step to step."""
        self.keys.claim("the policy's recurrent state", *defaults)
        self.keys.states += defaults
        for key, value in defaults.items():
            self._defaults[key] = value.expand(self.num_envs, *value.shape).contiguous()
            self.states[key] = self._defaults[key]

    def reset(self, seed: int | None = None) -> None:
        """Reset the env: every open trajectory is cut here."""
        window = self.window
        if window.steps and not self._dense_finals:
            # Rows that wait in the window lose the next step, which has held their next observations.
            waiting = ~self.stream.ended if self.stream.same_step else self.stream.ended | True
            envs = np.flatnonzero(to_torch(waiting).numpy(force=True))
            for key, path in self._leaves:
                values = to_torch(leaf_at(self._obs, path)).numpy(force=True)[envs]
                window.put_final(key, envs, values, step=window.steps - 1)
        self._obs, self._info = self.env.reset(seed=seed)

    def _new_window(self, steps: int) -> Window:
        return Window(self.num_envs, steps, self.keys.float32)

    @property
    def started(self) -> bool:
        """Whether the env has been reset."""
        return self._obs is not None

    def forget(self) -> None:
        """Drop what waits in the window; the next step needs a reset first."""
        self.window = self._new_window(self._steps)
        self._infos_seen.clear()
        self._obs = None

    def step(self, random: bool = False) -> None:
        """One vector step: record what the policy sees, act, step, record what came of it."""
        window, stream = self.window, self.stream
        self._record_roots()
        if self.states:
            self._restart_states()
        action = self._action(random)
        if self._check_actions is not None:
            action = self._check_actions(action)
        obs, reward, terminated, truncated, info = self.env.step(action)
        taken = stream.actions if self._check_actions is None else action
        actions = [(ACTION, taken)] if self._one_action else tree_leaves(ACTION, taken)
        window.put_all((REWARD, reward), (TERMINATED, terminated), (TRUNCATED, truncated), *actions)
        if not self._never_invalid:
            window.put(DEAD, stream.first)
        if self._nexts:
            window.put_named(self._nexts, info)
        if self._keeps_finals:
            self._record_finals(obs, info)
        if self._infos:
            self._record_infos(info)
        self._obs, self._info = obs, info
        window.advance()

    def _record_roots(self) -> None:
        window, obs, info = self.window, self._obs, self._info
        for key, path in self._leaves:
            window.put(key, leaf_at(obs, path) if path else obs)
        window.put_named(self._roots, info)
        for name in self._infos:
            window.put_loose(name, self._array(info.get(name)))

    def _restart_states(self) -> None:
        """Restart the states of episodes that begin, and say which rows are to keep theirs."""
        if self._stride > 1:
            age = (
                full(self.stream.first, self.num_envs, 0, torch.int64) if self._age is None else self._age + 1
            )
            if self.stream.any_first is not False:
                fill_rows(age, self.stream.first, 0)
            self._age = age
            self.window.put(HAS_STATE, age % self._stride == 0)
        for key, state in self.states.items():
            if self.stream.any_first is not False:
                state = select(to_torch(self.stream.first), self._defaults[key], state)
                self.states[key] = state

    def _action(self, random: bool) -> Any:
        if self._act is None:
            return self.random()
        obs = self._obs
        seen = torch.from_numpy(obs) if isinstance(obs, np.ndarray) else map_tree(to_torch, obs)
        action, written = self._act(self._policy_columns, seen)
        for key, value in written.items():
            carried = state_key(key)
            if carried is not None and carried in self.states:
                self.states[carried] = value
            self.window.put(key, value)
        return self.random() if random else action

    def _policy_columns(self) -> Columns:
        columns: Columns = {key: to_torch(leaf_at(self._obs, path)) for key, path in self._leaves}
        for key, name in self._roots:
            value = to_torch(self._info[name])
            columns[key] = value.unsqueeze(-1) if key in self.keys.trailing else value
        for name in self._infos:
            if name in self._info:
                columns[name] = to_torch(self._array(self._info[name]))
        columns.update(self.states)
        return columns

    def _record_finals(self, obs: Tree, info: dict[str, Any]) -> None:
        """Keep the true next observations of ended rows: dense on a device, only their rows on the host."""
        stream, window = self.stream, self.window
        if stream.hides_final_obs:
            known = stream.known
            window.put(NEXT_KNOWN, stream.ended | True if known is None else known)
        if self._dense_finals:
            following = true_next(obs, info, stream)
            for key, path in self._leaves:
                window.put(next_key(key), leaf_at(following, path))
        elif stream.any_ended and (final := final_of(info, stream)) is not None:
            envs = np.flatnonzero(stream.ended)
            for key, path in self._leaves:
                window.put_final(key, envs, leaf_at(final, path)[envs])

    def _record_infos(self, info: dict[str, Any]) -> None:
        """Entries of the step just made; Gymnasium moves those of ended SAME_STEP rows to ``final_info``."""
        window = self.window
        final = info.get("final_info") if self._keeps_finals else None
        for name in self._infos:
            value = self._array(info.get(name))
            if isinstance(final, dict) and name in final:
                last = self._array(final[name])
                value = last if value is None else select(self.stream.ended, last, value)
            elif final is not None and value is not None and value.shape[:1] == (self.num_envs,):
                value = fill_rows(
                    own(value), self.stream.ended, False
                )  # it belongs to the next episode's reset
            window.put_loose(next_key(name), value)
            if value is not None and name not in self._infos_seen:
                self._infos_seen.add(name)
                if name not in window.columns:  # it came with no observation yet: all batches have both
                    zeros = torch.zeros_like(value) if isinstance(value, Tensor) else np.zeros_like(value)
                    window.put_loose(name, zeros)

    def _array(self, value: Any) -> Array | None:
        """An entry of ``info`` where the env's arrays are."""
        if value is None:
            return None
        if self._on_host:
            return value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
        return to_torch(value, self.device)

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

    def waiting_ids(self) -> Tensor:
        """The trajectories of the transitions that wait in the window."""
        window = self.window
        if not window.steps:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return window.gather(self.keys.traj, torch.from_numpy(window.cells(self.valid())).to(self.device))

    def take(self, frames: int, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """The first ``frames`` transitions in order of time as a flat batch; the rest stay."""
        mask, reached = self.window.first_cells(self.valid(), frames)
        batch = self.lay_out(mask, compact)
        self.window.restart(reached)
        return batch

    def lay_out(self, mask: Array, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """The True cells as one flat batch, trajectory after trajectory, and its *final* if compact."""
        for key, path in self._leaves:  # what follows the last step
            self.window.put(key, leaf_at(self._obs, path))
        self._check_infos()
        return self.layout.lay_out(self.window, mask, compact)

    def _check_infos(self) -> None:
        missing = [name for name in self._infos if name not in self._infos_seen]
        if missing:
            there = sorted(key for key in self._info if not key.startswith("_"))
            raise KeyError(
                f"info_keys={missing} were in no step's info; the last one had {there}. An entry that comes only "
                "now and then must come in the first batch: take more frames_per_batch"
            )


def _actions_pass(env: Any) -> bool:
    """Whether actions reach the adapted env as they are."""
    harmless = (VectorStream, MarkerWrapper, VectorObservationWrapper, VectorRewardWrapper)
    return all(isinstance(layer, harmless) for layer in layers(env))


__all__ = ["Runner"]
