"""The adapter for Gymnasium's vector environments: Sync, Async, native and custom."""

import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_space
from typing_extensions import override

from flatroll.layout.spaces import widest_space
from flatroll.wrappers.arrays import Array, Tree, copy_array, map_tree
from flatroll.wrappers.source import Capabilities, Info, Seed, Step, VectorSource, info_dict, layers
from flatroll.wrappers.sub_env_returns import LastObservations, checked_returns, explain_observations

CLOSE_SECONDS = 5.0  # timeout of close() for workers in the middle of a step


class GymSource(VectorSource):
    """Adapts a Gymnasium vector env (Sync, Async, native, custom), with or without Gymnasium's wrappers."""

    def __init__(self, env: VectorEnv[Any, Any, Any], mode: AutoresetMode, own_buffers: bool | str) -> None:
        base = env.unwrapped
        known_base = isinstance(base, (SyncVectorEnv, AsyncVectorEnv))
        same_step = mode is AutoresetMode.SAME_STEP
        self._next_step = mode is AutoresetMode.NEXT_STEP
        self._sent = False  # whether a step is pending

        # Envs other than Gymnasium's own may write into the arrays they returned, so copy them at once.
        self._copies = bool(own_buffers)
        if own_buffers == "auto":
            gymnasiums_own = all(
                type(layer).__module__.startswith("gymnasium.") or isinstance(layer, AsyncPart)
                for layer in layers(env)
            )
            self._copies = not gymnasiums_own or getattr(base, "copy", True) is False

        self._checks_reuse = same_step and known_base and own_buffers == "auto"
        self._last = None
        if self._checks_reuse and isinstance(base, SyncVectorEnv):
            self._last = LastObservations(base)

        # Rows of an Async env whose final and reset observations were seen to differ; the number of ended episodes of
        # the other rows; whether their observations were seen to change within an episode.
        self._proven = np.zeros(env.num_envs, dtype=bool)
        self._equal_ends = 0
        self._changes = False

        # The observations before and after the last step, while an Async env is watched.
        self._watches = self._checks_reuse and isinstance(base, AsyncVectorEnv)
        self._seen: Tree = None
        self._shown: Tree = None

        # A worker of AsyncVectorEnv(shared_memory=False) keeps its pending autoreset through a reset and resets again
        # at the next step.
        self._keeps_pending = isinstance(base, AsyncVectorEnv) and not base.shared_memory
        self._pending = np.zeros(env.num_envs, dtype=bool)

        #: The methods whose first results are still to be checked, in a Sync env.
        self._unchecked: set[str] = set()
        if isinstance(base, SyncVectorEnv):
            self._unchecked = {"reset", "step"}
        if isinstance(base, AsyncVectorEnv):
            whole = base.whole if isinstance(base, AsyncPart) else base
            weakref.finalize(whole, _end_at_exit, weakref.ref(whole), os.getpid())

        partial = known_base or mode is AutoresetMode.DISABLED
        capabilities = Capabilities(
            torch.device("cpu"),
            "numpy",
            hides_final_obs=same_step and not known_base,
            partial_reset=partial and not (self._keeps_pending and self._next_step),
            reuses_buffers=self._copies,
            # A wrapper in between would miss step_async and step_wait.
            overlaps=env is base and hasattr(env, "step_async") and hasattr(env, "step_wait"),
        )

        # The single space of SyncVectorEnv(observation_mode="different") is that of the first env.
        observation_space = widest_space(
            env.single_observation_space, getattr(env, "observation_space", None)
        )
        super().__init__(env, env.num_envs, observation_space, env.single_action_space, capabilities)

    @override
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        if self._sent:
            self.step(None)
        if rows is not None:
            options = {**(options or {}), "reset_mask": rows}
        else:
            if self._keeps_pending and self._next_step and self._pending.any():
                self.env.step(self.env.action_space.sample())  # lets the workers do their pending autoresets
            self._pending[:] = False

        try:
            if "reset" in self._unchecked:
                reset = self._checked(self.env.reset)
            else:
                reset = self.env.reset
            obs, info = reset(seed=seed, options=options)
        except Exception as error:  # an env may raise anything
            self._explain(error)
            raise

        if self._copies:
            obs = map_tree(copy_array, obs)
        if self._watches:
            self._shown = obs
        return obs, info_dict(info, self.env)

    @override
    def step(self, actions: Tree) -> Step:
        try:
            if self._sent:
                self._sent = False
                obs, reward, terminated, truncated, info = self.env.step_wait()
            else:
                if "step" in self._unchecked:
                    step = self._checked(self.env.step)
                else:
                    step = self.env.step
                obs, reward, terminated, truncated, info = step(actions)
        except Exception as error:  # an env may raise anything
            self._explain(error)
            raise

        if self._copies:
            obs = map_tree(copy_array, obs)
            info = info_dict(info, self.env)
            reward = copy_array(reward)
            terminated = copy_array(terminated)
            truncated = copy_array(truncated)

        if self._watches:
            self._seen = self._shown
            self._shown = obs
        if self._keeps_pending:
            self._pending = np.asarray(terminated) | np.asarray(truncated)
        return obs, reward, terminated, truncated, info

    @override
    def send(self, actions: Tree) -> None:
        try:
            self.env.step_async(actions)
        except (EOFError, OSError) as error:
            self._end_dead_workers(error)
            raise
        self._sent = True

    @override
    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Tree | None = None) -> Tree | None:
        if given is None:
            given = info.get("final_obs", info.get("final_observation"))

        if isinstance(given, np.ndarray) and given.dtype == object:
            # Gymnasium gives an object array [E] with a tree in each ended row.
            rows = np.flatnonzero(ended)
            if self._checks_reuse:
                self._refuse_reused(given, obs, rows)
            return _put_rows(obs, rows, [given[i] for i in rows])

        if self._copies and given is not None:
            return map_tree(copy_array, given)
        return given

    @override
    def close(self) -> None:
        base = self.env.unwrapped
        if isinstance(base, AsyncVectorEnv) and not base.closed:
            # Gymnasium would wait forever for a dead worker's answer, or for one that was read already.
            answers = base._state is AsyncState.DEFAULT or base._poll_pipe_envs(CLOSE_SECONDS)
            if _dead_workers(base) or not answers:
                _kill_workers(base)
        super().close()

    def _checked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the env that also checks, this once, what its sub-envs return."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with checked_returns(self.env.unwrapped, method.__name__):
                result = method(*args, **kwargs)
            self._unchecked.discard(method.__name__)
            return result

        return call

    def _explain(self, error: Exception) -> None:
        """Raise a clear error, from the env's, for dead workers and for observations that do not fit their space."""
        base = self.env.unwrapped
        if isinstance(error, EOFError | OSError):
            self._end_dead_workers(error)
        elif isinstance(base, SyncVectorEnv):
            explain_observations(base, error)
        elif isinstance(base, AsyncVectorEnv) and _from_worker(error):
            error.add_note(
                "raised in a worker process of AsyncVectorEnv. If it is about what the env returned: a SyncVectorEnv "
                "of the same envs names the env and the entry"
            )

    def _end_dead_workers(self, error: Exception) -> None:
        """If worker processes have died, terminate the others, close the env and raise."""
        base = self.env.unwrapped
        if isinstance(base, AsyncVectorEnv) and (dead := _dead_workers(base)):
            _kill_workers(base)
            raise RuntimeError(
                f"worker processes {dead} of AsyncVectorEnv have died (killed, out of memory, or crashed), and the env "
                "is closed: make a new one"
            ) from error

    def _refuse_reused(self, given: Array, obs: Tree, rows: Array) -> None:
        """Raise ValueError if the env reuses its array and thereby overwrites the final observations.

        SAME_STEP keeps the final observation by reference. An array that the next first observation shares, too, may
        be a constant entry, such as a goal: only values that differ from those that the step returned are lost.
        """
        if self._last is None:
            self._refuse_equal(given, obs, rows)
            return

        resets = self.env.unwrapped._env_obs
        for i in rows:
            if not any(_compare(np.shares_memory, given[i], resets[i])):
                self._last.forget(i)
            elif self._last.copies[i] is None or not all(_compare(_same, given[i], self._last.copies[i])):
                raise ValueError(_REUSED)

    def _refuse_equal(self, given: Array, obs: Tree, rows: Array) -> None:
        """Raise ValueError if the final observations of an Async env are overwritten; warn if that cannot be known.

        Its workers return only values: two episodes whose final observation equals the next first one, in envs whose
        observations otherwise change, show it.
        """
        for i in rows:
            if self._proven[i]:
                continue

            first = map_tree(lambda leaf, i=i: leaf[i], obs)  # of the next episode
            if not all(_compare(_same, given[i], first)):
                self._proven[i] = True
                self._watches = not self._proven.all()
                continue

            self._equal_ends += 1
            if self._seen is not None:
                seen = map_tree(lambda leaf, i=i: leaf[i], self._seen)
                self._changes |= not all(_compare(_same, seen, first))

            if self._equal_ends == 2 and not self._changes:
                warnings.warn(
                    "the final observations of two episodes equal the first ones of the next episodes. That is right "
                    "if the env's observations never change; if it writes each observation into the same array, "
                    "SAME_STEP has lost the final ones: make it with autoreset_mode='NextStep' or 'Disabled' "
                    "(as_vector_env(own_buffers=False) skips this check)",
                    stacklevel=6,
                )

            if self._equal_ends >= 2 and self._changes:
                raise ValueError(_REUSED)


_REUSED = (
    "the env writes each observation into the same array, so SAME_STEP loses the final ones: make it with "
    "autoreset_mode='NextStep' or 'Disabled' (as_vector_env(own_buffers=False) skips this check)"
)


class AsyncPart(AsyncVectorEnv):
    """A range of envs of an AsyncVectorEnv, starting at ``first``; created by `split_async`."""

    def __init__(self, whole: AsyncVectorEnv, first: int, num_envs: int) -> None:
        vars(self).update(vars(whole))  # reuse its workers
        rows = slice(first, first + num_envs)
        self.num_envs = num_envs
        self.action_space = batch_space(whole.single_action_space, num_envs)
        self.single_observation_space = widest_space(whole.single_observation_space, whole.observation_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.env_fns = whole.env_fns[rows]
        self.parent_pipes = whole.parent_pipes[rows]
        self.processes = whole.processes[rows]

        # Views of the memory that the workers write to.
        self.observations = map_tree(lambda leaf: leaf[rows], whole.observations)

        self._first = first
        #: The env that was split.
        self.whole = whole

    @property
    def closed(self) -> bool:
        """Whether the whole env is closed; parts cannot be closed alone."""
        return bool(self.whole.closed)

    @closed.setter
    def closed(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.whole.closed = value

    def close(self, **kwargs: Any) -> None:
        """Close the whole env."""
        self.whole.close(**kwargs)

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        """Delegate to the whole env: errors carry its worker numbers."""
        successes = list(successes)
        if not all(successes):
            self._state = AsyncState.DEFAULT
            whole = self.whole
            rest = whole.num_envs - self._first - len(successes)
            whole._raise_if_errors([*[True] * self._first, *successes, *[True] * rest])

    def __del__(self) -> None:
        """Do nothing: the whole env owns the workers."""


def split_async(env: AsyncVectorEnv, parts: int) -> list[AsyncPart]:
    """Split the envs into ``parts`` ranges of almost equal length; do not step the env itself afterwards."""
    groups = np.array_split(np.arange(env.num_envs), parts)
    return [AsyncPart(env, int(group[0]), len(group)) for group in groups]


def _from_worker(error: Exception) -> bool:
    """Return whether Gymnasium raised an error that it received from a worker."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return frames[-1].f_code is AsyncVectorEnv._raise_if_errors.__code__


def _dead_workers(env: AsyncVectorEnv) -> list[int]:
    """Return the indices of the worker processes that have exited."""
    ended = wait([process.sentinel for process in env.processes], 0)
    return [i for i, process in enumerate(env.processes) if process.sentinel in ended]


def _kill_workers(env: AsyncVectorEnv) -> None:
    """Close the env without waiting for any worker."""
    for process in env.processes:
        process.kill()
    env._state = AsyncState.DEFAULT  # so that closing does not wait for answers
    env.close(terminate=True)


def _end_at_exit(env: "weakref.ref[AsyncVectorEnv]", owner: int) -> None:
    """Close an env at exit, before Gymnasium's own __del__ runs with half of its modules gone."""
    alive = env()  # None once garbage-collected
    if alive is not None and not alive.closed and os.getpid() == owner:
        _kill_workers(alive)


def _compare(test: Callable[[Array, Array], bool], one: Tree, other: Tree) -> list[bool]:
    """Apply ``test`` to each pair of leaves of two equally nested trees."""
    answers: list[bool] = []
    map_tree(lambda a, b: answers.append(bool(test(a, b))), one, other)
    return answers


def _same(one: Array, other: Array) -> bool:
    """Return whether two arrays have equal values; NaN equals NaN."""
    return np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind == "f")


def _put_rows(obs: Tree, rows: Array, values: list[Any]) -> Tree:
    """Return a copy of the batched tree ``obs`` with the single observations ``values`` in ``rows``."""
    if isinstance(obs, dict):
        return {key: _put_rows(child, rows, [value[key] for value in values]) for key, child in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_put_rows(child, rows, [value[i] for value in values]) for i, child in enumerate(obs))

    dense = np.array(obs)  # a copy, [E, ...]
    if len(rows):
        dense[rows] = np.stack(values)
    return dense
