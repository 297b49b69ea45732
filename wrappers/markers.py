"""Wrappers that add markers to ``info``: episode starts, step counts, trajectory ids, returns, primers.

Each is a `gymnasium.vector.VectorWrapper` that only adds entries to ``info``, so any trainer can use it. The entries
describe the observation returned with them; ``episode_reward`` describes the step. Markers are computed from the
flags of the adapted env, never from one another, so the order of stacking does not matter.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn

from flatroll.layout.checks import check_keys, check_whole_number, check_writer_number
from flatroll.layout.inspect.text import html_table
from flatroll.layout.keys import (
    EPISODE_REWARD,
    ID_BITS,
    IS_INIT,
    STEP_COUNT,
    TRAJ_IDS,
    NestedKey,
    as_tuple,
    next_key,
)
from flatroll.wrappers.adapt_env import adapt_env, find_stream, reset_in_same_step
from flatroll.wrappers.arrays import Array, Tree, copy_array, fill_rows, full_for, select
from flatroll.wrappers.source import EnvLike, Info, Seed, Step, layers
from flatroll.wrappers.stream import VectorStream

States = dict[NestedKey, Tensor]
Wrapper = TypeVar("Wrapper", bound=VectorWrapper)


class MarkerWrapper(VectorWrapper):
    """Base class of wrappers that add a marker to ``info``; subclass it to write your own.

    It finds or creates the adapted env, ``self.stream``, and refuses a second wrapper of its class. A subclass
    implements two methods. Each must put a new array with one row per env, ``[E]`` or ``[E, ...]``, into
    ``info[self.info_name]``:

    * ``_on_reset(obs, info, rows)``: the rows where bool ``[E]`` is True were reset: reset their state.
    * ``step(actions)``: call ``self.env.step(actions)``, add the entry to its info, and return all five.

    ``self.stream`` (a `VectorStream`) describes the step with flags, bool ``[E]`` each: ``first``, the returned
    observation is the first of an episode; ``ended``, the step was the last of one; ``valid``, the step was a
    transition (None: all are). In rows that ended, the returned ``obs`` and ``info`` may be those of the next episode:
    `VectorStream.true_next` and `VectorStream.step_info` give the step's own.

    A collector stores the entry under ``key``, ``[E]`` as ``[N, 1]`` and ``[E, ...]`` as ``[N, ...]``, in the row of
    the observation returned with it, or with ``describes_step = True`` under ``("next", key)``, like the reward.
    `flatroll.wrappers.testing.check_marker` compares the columns in the three autoreset modes.

    Args:
        env: anything `as_vector_env` takes, or a stack of wrappers around it.
        key: the column in which a collector stores the entry; its last part is the entry's name in ``info``.

    Raises:
        TypeError: the subclass lacks one of the two methods.
        ValueError: the stack already has a wrapper of this class.

    >>> import gymnasium as gym
    >>> class TimeLeft(MarkerWrapper):
    ...     def __init__(self, env):
    ...         super().__init__(env, "time_left")
    ...         self.left = 0
    ...     def _on_reset(self, obs, info, rows):
    ...         self.left = np.where(rows, 500, self.left)
    ...         info[self.info_name] = self.left.copy()
    ...     def step(self, actions):
    ...         result = self.env.step(actions)
    ...         self.left = np.where(self.stream.first, 500, self.left - 1)
    ...         result[4][self.info_name] = self.left.copy()
    ...         return result
    >>> env = TimeLeft(gym.make_vec("CartPole-v1", num_envs=2))
    >>> _ = env.reset(seed=0)
    >>> env.step([0, 1])[4]["time_left"]
    array([499, 499])
    """

    #: Whether the entry describes the step and not the returned observation.
    describes_step: ClassVar[bool] = False
    #: Whether a collector stores the entry as a column; if not, it is for hand-written loops.
    is_column: ClassVar[bool] = True
    #: Names of all attributes that hold state, arrays ``[E, ...]``. Needed in envpool's async mode, where each step
    #: covers only some envs, and to save open episodes, for which a class that derives from another marker names its
    #: own anew. None: neither is supported.
    row_state: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, env: EnvLike, key: NestedKey) -> None:
        kind = type(self)
        if kind._on_reset is MarkerWrapper._on_reset or (kind.is_column and kind.step is VectorWrapper.step):
            raise TypeError(
                f"{kind.__name__} must implement _on_reset(obs, info, rows) and step(actions): MarkerWrapper is "
                "the base of wrappers that do"
            )

        adapted = adapt_env(env)
        if any(type(layer) is type(self) for layer in layers(adapted)):
            name = type(self).__name__
            raise ValueError(f"{name} is already in this stack: use it once, in any place")

        super().__init__(adapted)
        stream = find_stream(adapted)
        assert stream is not None
        self.stream: VectorStream = stream
        self.key = key
        self.info_name = as_tuple(key)[-1]

    def __del__(self) -> None:
        """Gymnasium before 1.3 closes the env on deletion; it belongs to the caller."""

    def _repr_html_(self) -> str:
        """Show the stack in a notebook, outermost first, with the column that a collector makes of each marker."""
        rows = []
        for layer in layers(self):
            if isinstance(layer, VectorWrapper):
                name = type(layer).__name__
            else:
                name = repr(layer)

            column = ""
            if isinstance(layer, MarkerWrapper) and layer.is_column:
                key = layer.key
                if layer.describes_step:
                    key = next_key(key)
                column = repr(key)
            rows.append((name, column))
        return html_table(rows, ("stack", "column"))

    @property
    def action_spec(self) -> spaces.Space[Any]:
        """Alias of ``single_action_space``, as in ``RandomPolicy(env.action_spec)``."""
        return self.single_action_space

    def call(self, name: str, *args: object, **kwargs: object) -> tuple[Any, ...]:
        """Call a method of each sub-env, or get an attribute, as `VectorStream.call`."""
        return self.stream.call(name, *args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each sub-env."""
        return self.stream.get_attr(name)

    def set_attr(self, name: str, values: object) -> None:
        """Set an attribute of each sub-env to one value for all, or to its own from a list of E."""
        self.stream.set_attr(name, values)

    def reset(self, *, seed: Seed = None, options: Info | None = None) -> tuple[Tree, Info]:
        """Reset the env; add the markers of the sub-envs that were reset."""
        mask = (options or {}).get("reset_mask")
        env: Any = self.env  # Gymnasium annotates the seed of vector envs as an int only
        passed = dict(options) if options else None
        obs, info = env.reset(seed=seed, options=passed)

        like = self.stream.first
        if mask is None:
            rows = full_for(like, self.num_envs, True, torch.bool)
        else:
            rows = self.stream.as_mask(mask)

        self._on_reset(obs, info, rows)
        return obs, info

    def _on_reset(self, obs: Tree, info: Info, rows: Array) -> None:
        """Reset the state of the masked rows (bool ``[E]``) and add the entry to ``info``."""
        raise NotImplementedError


class InitTracker(MarkerWrapper):
    """Adds ``info["is_init"]``: bool ``(E,)``, True where the returned observation is an episode's first.

    A collector stores it as ``is_init`` ``[N, 1]``.

    Args:
        env: anything `as_vector_env` takes.
        init_key: another key to store it under. Default ``"is_init"``.

    >>> import gymnasium as gym
    >>> env = InitTracker(gym.make_vec("CartPole-v1", num_envs=2))
    >>> obs, info = env.reset(seed=0)
    >>> info["is_init"]
    array([ True,  True])
    """

    row_state = ()

    def __init__(self, env: EnvLike, init_key: NestedKey = IS_INIT) -> None:
        check_keys(init_key=init_key)
        super().__init__(env, init_key)

    def _on_reset(self, obs: Tree, info: Info, rows: Array) -> None:
        info[self.info_name] = copy_array(self.stream.first)

    def step(self, actions: Tree) -> Step:
        """Step the env; mark the sub-envs whose returned observation is an episode's first."""
        result = self.env.step(actions)
        result[4][self.info_name] = self.stream.first  # no copy: the stream makes a new array at each step
        return result


class StepCounter(MarkerWrapper):
    """Adds ``info["step_count"]``: int64 ``(E,)``, the steps taken in the episode of the returned observation.

    It is 0 in a first row. A collector stores it as ``step_count`` ``[N, 1]``, and one more as
    ``("next", "step_count")``.

    Args:
        env: anything `as_vector_env` takes.
        max_steps: truncate every episode after this many steps (``truncated`` is set, ``terminated`` stays; the
            row is reset in the same step, with its last observation in ``info["final_obs"]``). Default None: no limit.
        step_count_key: another key to store it under. Default ``"step_count"``.

    Raises:
        ValueError: ``max_steps`` < 1, the env cannot reset chosen rows, or an observation wrapper is between
            it and the adapted env.

    >>> import gymnasium as gym
    >>> env = StepCounter(gym.make("CartPole-v1"), max_steps=2)
    >>> _ = env.reset(seed=0)
    >>> for _ in range(3):
    ...     obs, reward, terminated, truncated, info = env.step([0])
    ...     print(info["step_count"], truncated)
    [1] [False]
    [0] [ True]
    [1] [False]
    """

    row_state = ("_count",)

    def __init__(
        self, env: EnvLike, max_steps: int | None = None, step_count_key: NestedKey = STEP_COUNT
    ) -> None:
        check_keys(step_count_key=step_count_key)
        super().__init__(env, step_count_key)
        if max_steps is not None:
            max_steps = check_whole_number("max_steps", max_steps)
            reset_in_same_step(self.env, max_steps)
        self.max_steps = max_steps
        self._count: Array = None

    def _on_reset(self, obs: Tree, info: Info, rows: Array) -> None:
        zero = full_for(self.stream.first, self.num_envs, 0, torch.int64)
        if self._count is None:
            self._count = zero
        else:
            self._count = select(rows, zero, self._count)
        # A copy: the caller may write into info.
        info[self.info_name] = copy_array(self._count)

    def step(self, actions: Tree) -> Step:
        """Step the env; count the steps of each running episode."""
        result = self.env.step(actions)
        count = self._count + 1

        if self.stream.any_first is not False:  # None on a device, where checking would sync
            fill_rows(count, self.stream.first, 0)
        self._count = count

        if not self.stream.lending.markers:
            count = copy_array(count)
        result[4][self.info_name] = count
        return result


class TrajId(MarkerWrapper):
    """Adds ``info["traj_ids"]``: int64 ``(E,)``, the id of the returned observation's episode.

    The id of the ``k``-th episode of env ``e`` is ``writer * 2**40 + k * E + e``: unique across envs and writers, and
    the same in every autoreset mode. A collector stores it as ``("collector", "traj_ids")`` ``[N]``.

    Args:
        env: anything `as_vector_env` takes.
        writer: number of this writer (worker process, run after a restart), 0 to 2**23 - 1. Default 0.
        traj_key: another key to store it under. Default ``("collector", "traj_ids")``.

    >>> import gymnasium as gym
    >>> env = TrajId(gym.make_vec("CartPole-v1", num_envs=3), writer=1)
    >>> obs, info = env.reset(seed=0)
    >>> info["traj_ids"] - 2**40
    array([0, 1, 2])
    """

    row_state = ("_ids",)

    def __init__(self, env: EnvLike, writer: int = 0, traj_key: NestedKey = TRAJ_IDS) -> None:
        check_keys(traj_key=traj_key)
        super().__init__(env, traj_key)
        self.writer = check_writer_number(writer)
        self._ids: Array = None
        self._episode = 0
        # Of the pool that these envs belong to.
        self._first = 0
        self._total = self.num_envs

    def _on_reset(self, obs: Tree, info: Info, rows: Array) -> None:
        if self._ids is None:
            first = self.stream.first
            numbers: Any = np.arange(self._first, self._first + self.num_envs)
            if isinstance(first, Tensor):
                numbers = torch.from_numpy(numbers).to(first.device)
            # The writer is in bits ID_BITS and up, episode * E + env below: adding E gives the id of the next episode.
            self._ids = numbers + (self.writer << ID_BITS) + self._episode * self._total
        else:
            self._ids = self._ids + rows * self._total  # a new array: the caller may keep the old one

        info[self.info_name] = copy_array(self._ids)

    def step(self, actions: Tree) -> Step:
        """Step the env; give a new id to each sub-env whose observation is an episode's first."""
        result = self.env.step(actions)
        if self.stream.any_first is not False:
            first = self.stream.first  # bool counts as 0 and 1
            if isinstance(first, Tensor):
                self._ids = torch.add(self._ids, first, alpha=self._total)
            else:
                self._ids = self._ids + first * self._total

        ids = self._ids
        if not self.stream.lending.markers:
            ids = copy_array(ids)
        result[4][self.info_name] = ids
        return result

    @property
    def ids(self) -> Array:
        """Return the id of each sub-env's episode, int64 ``(E,)``; None before the first reset."""
        return self._ids

    def number_in(self, first: int, total: int) -> None:
        """Number these envs as envs ``first``, ``first + 1``, ... of a pool of ``total`` envs.

        Raises:
            ValueError: the env was reset with a different numbering.
        """
        if (first, total) != (self._first, self._total) and self._ids is not None:
            raise ValueError(
                "the env's TrajId has already assigned ids, which the ids of the whole pool could repeat: make "
                "a new env"
            )
        self._first = first
        self._total = total

    def continue_with(self, ids: npt.NDArray[np.int64]) -> None:
        """Give each sub-env's next episode one of these ids, int64 ``(E,)``; a full reset must follow."""
        before: Any = ids - self._total  # a reset gives the id of the next episode
        device = self.stream.capabilities.device
        if self.stream.capabilities.framework == "torch":
            before = torch.from_numpy(before).to(device)
        self._ids = before

    def state_dict(self) -> dict[str, int]:
        """Return the highest episode number in use, so that ids continue above it after a restart."""
        if self._ids is None:
            return {"writer": self.writer, "episode": self._episode}
        top = int(self._ids.max()) - (self.writer << ID_BITS)  # episode * E + env of the newest episode
        return {"writer": self.writer, "episode": top // self._total + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue above the ids of a saved run; a full reset must follow before the next step."""
        # Together: a state that lacks an entry changes nothing.
        self.writer, self._episode, self._ids = state["writer"], state["episode"], None
        self.stream.moves.count += 1  # other collectors over this wrapper must reset, too


class RewardSum(MarkerWrapper):
    """Adds ``info["episode_reward"]``: float32 ``(E,)``, the return so far of the episode just stepped.

    In the last row of an episode it is the full return; the next step starts from 0. A collector stores it as
    ``("next", "episode_reward")`` ``[N, 1]``. (Gymnasium's RecordEpisodeStatistics supports only NumPy envs, and
    clears all rows at a masked reset.)

    Args:
        env: anything `as_vector_env` takes; a wrapper that changes the reward goes inside.
        out_key: another key to store it under ``"next"``. Default ``"episode_reward"``.

    >>> import gymnasium as gym
    >>> env = RewardSum(gym.make("CartPole-v1"))
    >>> _ = env.reset(seed=0)
    >>> [float(env.step([0])[4]["episode_reward"][0]) for _ in range(3)]
    [1.0, 2.0, 3.0]
    """

    describes_step = True
    row_state = ("_sum",)

    def __init__(self, env: EnvLike, out_key: NestedKey = EPISODE_REWARD) -> None:
        check_keys(out_key=out_key)
        super().__init__(env, out_key)
        self._sum: Array = None

    def _on_reset(self, obs: Tree, info: Info, rows: Array) -> None:
        zero = full_for(self.stream.first, self.num_envs, 0.0, torch.float32)
        if self._sum is None:
            self._sum = zero
        else:
            self._sum = select(rows, zero, self._sum)
        info[self.info_name] = copy_array(self._sum)

    def step(self, actions: Tree) -> Step:
        """Step the env; add the rewards of all transitions to the returns (a reset-only step is not a transition)."""
        result = self.env.step(actions)
        stream = self.stream

        reward = result[1]
        if reward.dtype != self._sum.dtype:  # an inner wrapper made it float64
            if isinstance(reward, Tensor):
                reward = reward.to(self._sum.dtype)
            else:
                reward = reward.astype(np.float32)

        total = self._sum + reward
        if not stream.same_step and stream.any_first is not False:
            fill_rows(total, stream.first, 0.0)  # an inner wrapper may have added a reward in the reset row

        # A new array: `total`, with the full returns of ended episodes, is passed on to the caller.
        if isinstance(total, Tensor):
            self._sum = total.masked_fill(stream.ended, 0.0)
        else:
            self._sum = copy_array(total)
            if stream.any_ended is not False:
                fill_rows(self._sum, stream.ended, 0.0)

        result[4][self.info_name] = total
        return result


class RecurrentPrimer(MarkerWrapper):
    """Adds a recurrent policy's initial states to the ``info`` of each reset, ``(E, ...)``.

    A state under a nested key is in nested dicts: ``info["agent"]["h"]`` for ``("agent", "h")``.

    For hand-written loops: the first step reads its states from ``info``, later steps read the states that the policy
    wrote under ``"next"``; recurrent modules reset them where ``is_init`` is set. A collector carries the states
    itself and uses these initial values only if its policy declares none. `set_recurrent_primers_from` adds this
    wrapper.

    Args:
        env: anything `as_vector_env` takes.
        policy: a policy with recurrent modules.

    Raises:
        ValueError: the policy has no recurrent modules.
    """

    is_column = False
    row_state = ()

    def __init__(self, env: EnvLike, policy: object) -> None:
        states = recurrent_states(policy)
        if not states:
            raise ValueError("policy has no recurrent part: no module of it has make_tensordict_primer()")
        super().__init__(env, next(iter(states)))
        self.states = states

    def _on_reset(self, obs: Tree, info: Info, rows: Array) -> None:
        device = self.stream.capabilities.device
        for key, value in self.states.items():
            # One row per env, [*S] -> [E, *S]; cloned, because the caller may write into them.
            primed = value.to(device).expand(self.num_envs, *value.shape).clone()

            *parents, name = as_tuple(key)
            place = info
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = primed


def find_wrapper(env: VectorEnv[Any, Any, Any], kind: type[Wrapper]) -> Wrapper | None:
    """Return the wrapper of class ``kind`` in the stack, or None."""
    return next((layer for layer in layers(env) if isinstance(layer, kind)), None)


def set_recurrent_primers_from(env: EnvLike, policy: object) -> VectorEnv[Any, Any, Any]:
    """Wrap ``env`` with InitTracker and RecurrentPrimer if the policy has recurrent modules.

    A second call changes nothing.

    Args:
        env: anything `as_vector_env` takes, or a stack of wrappers around it.
        policy: a module, or an object with ``make_tensordict_primer()``.

    Returns:
        The adapted env, with an InitTracker and a `RecurrentPrimer` added where they were missing.

    Raises:
        TypeError, ValueError: see `recurrent_states`; also if the stack has different initial values for a state.

    >>> import gymnasium as gym
    >>> from torch import nn
    >>> class Memory(nn.Module):
    ...     def make_tensordict_primer(self):
    ...         from types import SimpleNamespace
    ...         return SimpleNamespace(defaults={"state": torch.zeros(5)})
    >>> env = set_recurrent_primers_from(gym.make_vec("CartPole-v1", num_envs=2), Memory())
    >>> obs, info = env.reset(seed=0)
    >>> info["is_init"], info["state"].shape, set_recurrent_primers_from(env, Memory()) is env
    (array([ True,  True]), torch.Size([2, 5]), True)
    """
    adapted = adapt_env(env)
    states = recurrent_states(policy)
    if states and find_wrapper(adapted, InitTracker) is None:
        adapted = InitTracker(adapted)

    primer = find_wrapper(adapted, RecurrentPrimer)
    if primer is None:
        if states:
            return RecurrentPrimer(adapted, policy)
        return adapted
    for key, value in states.items():
        check_same(key, primer.states.get(key), value)
    primer.states |= states
    return adapted


def recurrent_states(policy: object) -> States:
    """Return the initial recurrent states of one env that ``policy``'s modules declare, by key.

    A recurrent module has ``make_tensordict_primer()``. Empty for a policy without one.

    Raises:
        TypeError: a module draws its initial states at random, so they cannot be recomputed.
        ValueError: two modules declare a state with different values, or two modules of a sequence declare the same
            state.

    >>> recurrent_states(nn.Linear(2, 2))
    {}
    """
    parts: Any = (policy,)
    in_order: set[Any] = set()
    if isinstance(policy, nn.Module):
        parts = policy.modules()
        in_order = set(_steps(policy))

    states: States = {}
    owners: dict[NestedKey, Any] = {}
    for part in parts:
        # Any object may have this method, not only nn.Module.
        primer: Any = getattr(part, "make_tensordict_primer", None)
        if primer is None:
            continue

        for key, value in _defaults(primer()):
            check_same(key, states.get(key), value)
            states[key] = value
            if part in in_order and owners.setdefault(key, part) is not part:
                raise ValueError(
                    f"two modules of the policy keep their recurrent state under {key!r}: each would continue "
                    "from the state of the other. Give each state its own keys (in_keys, out_keys)"
                )
    return states


def _steps(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a sequence of tensordict modules, in order."""
    if isinstance(module, TensorDictSequential):
        for part in module.module.children():
            yield from _steps(part)
    else:
        yield module


def _defaults(primer: Any) -> Iterator[tuple[NestedKey, Tensor]]:
    """Return a primer's defaults: ours has ``defaults``; torchrl's has specs and one number, or one per key."""
    if hasattr(primer, "defaults"):
        yield from primer.defaults.items()
        return

    for key in primer.primers.keys(True, True):
        default = primer.default_value
        spec = primer.primers[key]
        value = default.get(key, 0.0) if hasattr(default, "get") else default
        if primer.random or callable(value):
            raise TypeError(
                f"the recurrent state {key!r} must start from fixed values, but its primer draws them at random: "
                "pass the primer a default_value"
            )
        yield key, torch.as_tensor(value, dtype=spec.dtype).expand(spec.shape).clone()


def check_same(key: NestedKey, known: Tensor | None, value: Tensor) -> None:
    """Raise ValueError if a state is declared twice with different initial values."""
    if known is None:
        return

    if known.shape != value.shape or not torch.equal(known.to(value), value):
        raise ValueError(
            f"the recurrent state {key!r} is declared twice, with shapes {tuple(known.shape)} and "
            f"{tuple(value.shape)} per row, or with different values: give each recurrent module its own state "
            "keys (in_keys, out_keys)"
        )
