"""`FunctionalEnv`, an env of pure JAX functions, and `as_functional`, which converts a simulator's env to one.

This module does not import JAX: a caller with a JAX env has imported it already.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from flatroll.wrappers.source import qualified_name

#: A JAX array, or a pytree of them.
Pytree: TypeAlias = Any


@dataclass(frozen=True)
class FunctionalEnv:
    """An environment of two pure JAX functions, which `as_vector_env` compiles for any number of envs.

    Both functions handle one env, without a batch dimension. They must not reset ended episodes: the adapter does, so
    that it sees the last observation of each episode.

    Args:
        reset: ``reset(key) -> (observation, state)``.
        step: ``step(key, state, action) -> (observation, state, reward, terminated, truncated, info)``; ``info`` is a
            dict of arrays. ``state`` is any pytree of arrays, of the same shapes as that of ``reset``.
        action_space: action space of one env; a Gymnasium space or a JAX simulator's.
        observation_space: default None: inferred from ``reset``, unbounded. Observations may be dicts, named tuples
            and dataclasses, which become dicts, and tuples.
        max_episode_steps: truncate episodes after this many steps. Default None: only ``step`` ends them.
        name: name of the env in errors.

    >>> def reset(key):
    ...     return {"at": key[:1] % 3}, key[0] % 3
    >>> def step(key, state, action):
    ...     state = state + action
    ...     return {"at": state[None]}, state, 1.0, state > 9, False, {}
    >>> FunctionalEnv(reset, step, spaces.Discrete(2), max_episode_steps=20).max_episode_steps
    20
    """

    reset: Callable[[Any], tuple[Pytree, Pytree]]
    step: Callable[[Any, Pytree, Any], tuple[Pytree, Pytree, Any, Any, Any, dict[str, Any]]]
    action_space: object
    observation_space: spaces.Space[Any] | None = None
    max_episode_steps: int | None = None
    name: str = "FunctionalEnv"


def as_functional(
    env: object, *, params: object = None, max_episode_steps: int | None = None
) -> FunctionalEnv:
    """Convert a JAX simulator's env to a `FunctionalEnv`; `as_vector_env` does so itself.

    Call it to set other parameters or a step limit.

    Args:
        env: an env of gymnax, craftax, brax, MuJoCo playground, jumanji or navix, or a Gymnasium functional env
            (``FuncEnv``, ``phys2d``), without wrappers that batch or reset envs.
        params: parameters of a gymnax or craftax env. Default None: its ``default_params``.
        max_episode_steps: truncate episodes after this many steps. Default None: the env's own limit.

    Raises:
        TypeError: the simulator is not supported, or the env is wrapped.

    ``as_functional(gymnax_env, params=params)``
    """
    family = find_family(env)
    if family is None:
        raise TypeError(
            "env must be from gymnax, craftax, brax, MuJoCo playground, jumanji or navix, or a FuncEnv of gymnasium, "
            f"got {qualified_name(env)}: write its two functions, flatroll.wrappers.FunctionalEnv(reset, step, ...)"
        )
    if params is not None and family is not _convert_gymnax:
        raise TypeError(f"params= is for envs of gymnax and craftax, got {type(env).__name__}")

    reset, step, action_space = family(env, params) if family is _convert_gymnax else family(env)
    if max_episode_steps is None and family is _convert_gymnasium_vector:
        # jumanji keeps its own entries of these names.
        max_episode_steps = getattr(env, "time_limit", None) or None

    name = str(getattr(env, "name", None) or type(getattr(env, "unwrapped", env)).__name__)
    return FunctionalEnv(reset, step, action_space, None, max_episode_steps, name)


def find_family(env: object) -> Callable[..., tuple[Any, Any, object]] | None:
    """Return the converter for the simulator that defines the env's class, or None; imports nothing.

    Raises:
        TypeError: the env is in a wrapper that batches or resets it, or hides the inner env.
    """
    kinds = {kind.__name__: kind.__module__.split(".")[0] for kind in type(env).__mro__}
    if kinds.get("FuncEnv") == "gymnasium":
        return _convert_gymnasium
    if kinds.get("FunctionalJaxVectorEnv") == "gymnasium":
        return _convert_gymnasium_vector

    # (playground's rsl_rl wrapper has num_envs, keeps its own states and returns tensors.)
    if isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv) or hasattr(env, "num_envs"):
        return None

    family = next((_FAMILIES[package] for package in kinds.values() if package in _FAMILIES), None)
    layer: Any = env
    while family is not None and layer is not None:
        module = type(layer).__module__
        name = type(layer).__name__
        resets = "AutoReset" in name and "NoAutoReset" not in name
        if resets or "Vmap" in name or "gymnax.wrappers" in module:
            raise TypeError(
                f"env is inside the wrapper {name}, but flatroll batches and resets envs itself (and keeps "
                "their last observations): pass the env without it (brax.envs.create(..., auto_reset=False), "
                "craftax: auto_reset=False)"
            )

        inside = vars(layer)
        layer = inside.get("env", inside.get("_env"))
    return family


def _convert_gymnax(env: Any, params: Any) -> tuple[Any, Any, object]:
    """gymnax, and craftax, which has the same interface."""
    if params is None:
        params = env.default_params
    limit = next((n for n in ("max_steps_in_episode", "max_timesteps") if hasattr(params, n)), None)

    def step(key: Any, state: Pytree, action: Any) -> tuple[Any, ...]:
        obs, state, reward, done, info = env.step_env(key, state, action, params)
        if hasattr(env, "is_truncated"):
            return obs, state, reward, done, env.is_truncated(state, params), info
        if limit is None:
            return obs, state, reward, done, False, info

        # In gymnax before 1.0 and craftax `done` includes the time limit; a longer limit replaces it.
        terminated = done & env.is_terminal(state, params.replace(**{limit: np.iinfo(np.int32).max}))
        return obs, state, reward, terminated, done & ~terminated, info

    return lambda key: env.reset_env(key, params), step, env.action_space(params)


def _convert_brax(env: Any) -> tuple[Any, Any, object]:
    """brax and MuJoCo playground, with the time limit of brax's EpisodeWrapper."""

    def reset(key: Any) -> tuple[Pytree, Pytree]:
        state = env.reset(key)
        return state.obs, state

    def step(key: Any, state: Pytree, action: Any) -> tuple[Any, ...]:
        state = env.step(state, action)
        done = state.done.astype(bool)
        if "truncation" in state.info:
            truncated = state.info["truncation"].astype(bool)
        else:
            truncated = False
        return state.obs, state, state.reward, done & ~truncated, done & truncated, state.metrics

    return reset, step, spaces.Box(-1.0, 1.0, (int(env.action_size),))


def _convert_jumanji(env: Any) -> tuple[Any, Any, object]:
    def reset(key: Any) -> tuple[Pytree, Pytree]:
        state, first = env.reset(key)
        return first.observation, state

    def step(key: Any, state: Pytree, action: Any) -> tuple[Any, ...]:
        state, now = env.step(state, action)
        truncated = now.last() & (now.discount != 0)
        return now.observation, state, now.reward, now.last() & ~truncated, truncated, now.extras

    return reset, step, env.action_spec


def _convert_navix(env: Any) -> tuple[Any, Any, object]:
    def reset(key: Any) -> tuple[Pytree, Pytree]:
        first = env.reset(key)
        return first.observation, first

    def step(key: Any, state: Pytree, action: Any) -> tuple[Any, ...]:
        now = env._step(state, action)  # its step() resets in the step after an end
        return now.observation, now, now.reward, now.is_termination(), now.is_truncation(), now.info

    return reset, step, env.action_space


def _convert_gymnasium(env: Any) -> tuple[Any, Any, object]:
    # The functions of the class: those of the instance may be batched already.
    kind = type(env)

    def reset(key: Any) -> tuple[Pytree, Pytree]:
        state = kind.initial(env, key)
        return kind.observation(env, state, key), state

    def step(key: Any, state: Pytree, action: Any) -> tuple[Any, ...]:
        after = kind.transition(env, state, action, key)
        reward = kind.reward(env, state, action, after, key)
        info = kind.transition_info(env, state, action, after)
        return kind.observation(env, after, key), after, reward, kind.terminal(env, after, key), False, info

    return reset, step, env.action_space


def _convert_gymnasium_vector(env: Any) -> tuple[Any, Any, object]:
    return _convert_gymnasium(env.func_env)


_FAMILIES: dict[str, Callable[..., tuple[Any, Any, object]]] = {
    "gymnax": _convert_gymnax,
    "craftax": _convert_gymnax,
    "brax": _convert_brax,
    "mujoco_playground": _convert_brax,
    "jumanji": _convert_jumanji,
    "navix": _convert_navix,
}


def gym_space(space: Any) -> spaces.Space[Any]:
    """Convert a space (or spec) of a JAX simulator to a Gymnasium space."""
    if isinstance(space, spaces.Space):
        return space

    parts = getattr(space, "spaces", None)
    if isinstance(parts, dict):
        return spaces.Dict({key: gym_space(part) for key, part in parts.items()})
    if isinstance(parts, list | tuple):
        return spaces.Tuple([gym_space(part) for part in parts])

    count = getattr(space, "n", getattr(space, "num_values", None))
    if count is not None:
        count = np.asarray(count)
        if count.ndim:
            return spaces.MultiDiscrete(count)
        return spaces.Discrete(int(count))

    low, high = (
        getattr(space, a, getattr(space, b, None)) for a, b in (("low", "minimum"), ("high", "maximum"))
    )
    if low is None or high is None:
        raise TypeError(f"action_space must be a Gymnasium space, or have n, or low and high, got {space!r}")

    dtype = np.dtype(space.dtype)
    least, most = (np.broadcast_to(np.asarray(end, dtype), space.shape) for end in (low, high))
    return spaces.Box(least, most, dtype=dtype.type)
