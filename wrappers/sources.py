"""Sources: one small class for each family of vector environments, all with the same five methods.

A source speaks its env's own dialect and returns arrays the caller may keep. Boundaries, autoreset and the
true next observation are no business of a source: `flatroll.wrappers.stream` has the one rule for them.
"""

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from flatroll.wrappers.arrays import Array, Tree, map_tree, own
from flatroll.wrappers.spaces import mend_bounds

Step = tuple[Tree, Array, Array, Array, dict[str, Any]]


@dataclass(frozen=True)
class Capabilities:
    """What an adapted env can do.

    Attributes:
        device: where its arrays live.
        framework: ``"numpy"`` or ``"torch"``.
        hides_final_obs: whether a SAME_STEP env may keep the last observation of an episode to itself.
        partial_reset: whether chosen rows can be reset alone.
        reuses_buffers: whether its arrays had to be copied because the env writes into them again.
        fork_safe: whether it survives a fork (envpool hangs in a forked child).
        both_flags: whether an env may report terminated and truncated in one step (envpool reports only
            truncated then, so such an end is bootstrapped).
        seedable: whether ``reset(seed=...)`` has an effect.
        checks_range: whether the env itself refuses discrete actions outside its space.
        exact_flags: whether reward is float32 and flags are bool, all ``(E,)``, as they come.
    """

    device: torch.device
    framework: Literal["numpy", "torch"]
    hides_final_obs: bool = False
    partial_reset: bool = True
    reuses_buffers: bool = False
    fork_safe: bool = True
    both_flags: bool = True
    seedable: bool = True
    checks_range: bool = True
    exact_flags: bool = False


class GymSource:
    """A Gymnasium vector env (Sync, Async, native, custom), possibly under Gymnasium's own wrappers."""

    def __init__(self, env: VectorEnv[Any, Any, Any], mode: AutoresetMode, own_buffers: bool | str) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.single_observation_space: spaces.Space[Any] = env.single_observation_space
        self.single_action_space: spaces.Space[Any] = env.single_action_space
        base = env.unwrapped
        gymnasiums_own = all(type(layer).__module__.startswith("gymnasium.") for layer in layers(env))
        fresh = gymnasiums_own and getattr(base, "copy", True) is not False
        self._copies = not fresh if own_buffers == "auto" else bool(own_buffers)
        known_base = isinstance(base, (SyncVectorEnv, AsyncVectorEnv))
        self._checks_reuse = mode is AutoresetMode.SAME_STEP and known_base and own_buffers == "auto"
        self._proven = np.zeros(self.num_envs, dtype=bool)
        # A worker of AsyncVectorEnv(shared_memory=False) keeps its pending autoreset through a reset, and
        # resets once more at the next step.
        self._flush = isinstance(base, AsyncVectorEnv) and not base.shared_memory
        self._pending = np.zeros(self.num_envs, dtype=bool)
        self._mode = mode
        partial = known_base or mode is AutoresetMode.DISABLED
        self.capabilities = Capabilities(
            torch.device("cpu"),
            "numpy",
            hides_final_obs=mode is AutoresetMode.SAME_STEP and not known_base,
            partial_reset=partial and not (self._flush and mode is AutoresetMode.NEXT_STEP),
            reuses_buffers=self._copies,
        )

    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Tree, dict[str, Any]]:
        if self._flush and self._mode is AutoresetMode.NEXT_STEP and self._pending.any():
            self.env.step(self.env.action_space.sample())
        self._pending[:] = False
        obs, info = self.env.reset(seed=seed, options=options)
        return self._owned(obs), dict(info)

    def reset_rows(
        self, mask: Array, options: dict[str, Any] | None = None, seed: Any = None
    ) -> tuple[Tree, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options={**(options or {}), "reset_mask": mask})
        return self._owned(obs), dict(info)

    def step(self, actions: Tree) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(actions)
        if self._copies:
            obs, info = map_tree(own, obs), dict(info)
            reward, terminated, truncated = own(reward), own(terminated), own(truncated)
        if self._flush:
            self._pending = np.asarray(terminated) | np.asarray(truncated)
        return obs, reward, terminated, truncated, info

    def final_obs(self, info: dict[str, Any], obs: Tree, done: Array) -> Tree | None:
        """Gymnasium's object array of final observations as one dense tree, or None where it gave none."""
        given = info.get("final_obs", info.get("final_observation"))
        return None if given is None else self.dense(given, obs, done)

    def dense(self, given: Any, obs: Tree, done: Array) -> Tree:
        """Final observations as Gymnasium (object array) or others (dense) give them, dense and owned."""
        if isinstance(given, np.ndarray) and given.dtype == object:
            rows = np.flatnonzero(done)
            if self._checks_reuse:
                self._refuse_reused(given, obs, rows)
            return map_rows(obs, rows, [given[i] for i in rows])
        return self._owned(given)

    def close(self) -> None:
        self.env.close()

    def _owned(self, obs: Tree) -> Tree:
        return map_tree(own, obs) if self._copies else obs

    def _refuse_reused(self, given: Array, obs: Tree, rows: Array) -> None:
        """SAME_STEP keeps the final observation by reference: an env that reuses its array overwrites it.

        Sync shows the reset observations themselves: do they share memory? From an Async worker only values
        come back: until one ended episode of an env differs from what follows it, equal ones are refused.
        """
        resets = getattr(self.env.unwrapped, "_env_obs", None)
        if resets is not None:
            reused = any(shares_memory(given[i], resets[i]) for i in rows)
        else:
            rows = [i for i in rows if not self._proven[i]]
            equal = [same_values(given[i], map_tree(lambda x, i=i: x[i], obs)) for i in rows]
            self._proven[rows] = True
            reused = any(equal)
        if reused:
            raise ValueError(
                "the env writes each observation into the same array, and autoreset_mode=SAME_STEP then loses "
                "the final ones (final_obs is the reset observation). Make the vector env with "
                "autoreset_mode='NextStep' or 'Disabled'; if its final and reset observations really are "
                "equal, pass own_buffers=False to as_vector_env to skip this check"
            )


def shares_memory(a: Tree, b: Tree) -> bool:
    """Whether any array leaf of two equally nested trees lies in the memory of its partner."""
    found: list[bool] = []
    map_tree(lambda x, y: found.append(isinstance(x, np.ndarray) and np.shares_memory(x, y)), a, b)
    return any(found)


def same_values(a: Tree, b: Tree) -> bool:
    """Whether all leaves of two equally nested trees are equal."""
    found: list[bool] = []
    map_tree(lambda x, y: found.append(bool(np.array_equal(x, y))), a, b)
    return all(found)


def map_rows(obs: Tree, rows: Array, values: list[Any]) -> Tree:
    """A copy of the batched tree ``obs`` whose ``rows`` hold the single observations ``values``."""
    if isinstance(obs, dict):
        return {key: map_rows(child, rows, [value[key] for value in values]) for key, child in obs.items()}
    if isinstance(obs, tuple):
        return tuple(map_rows(child, rows, [value[i] for value in values]) for i, child in enumerate(obs))
    dense = np.array(obs)
    if len(rows):
        dense[rows] = np.stack(values)
    return dense


class EnvPoolSource:
    """envpool in sync mode. Its arrays are fresh at each step, its autoreset is strictly NEXT_STEP."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.num_envs = int(env.config["num_envs"]) if hasattr(env, "config") else int(env.num_envs)
        batch = (
            int(env.config.get("batch_size") or self.num_envs) if hasattr(env, "config") else self.num_envs
        )
        if batch != self.num_envs:
            raise ValueError(
                f"env must be an envpool in sync mode (batch_size == num_envs), got batch_size={batch} and "
                f"num_envs={self.num_envs}: an async pool returns other rows at every step"
            )
        with warnings.catch_warnings():
            # envpool makes its bounds from float64 numbers, and Gymnasium warns of the cast.
            warnings.filterwarnings("ignore", message=".*precision lowered by casting", category=UserWarning)
            # envpool's observation_space and action_space are the single ones.
            self.single_observation_space = mend_bounds(env.observation_space)
            self.single_action_space = mend_bounds(env.action_space)
        self.capabilities = Capabilities(
            torch.device("cpu"),
            "numpy",
            fork_safe=False,
            both_flags=False,
            seedable=False,
            checks_range=False,
            exact_flags=True,
        )
        self._last: Tree = None
        # Discrete observations arrive as int32 where the space says int64.
        self._casts = any(
            isinstance(leaf, spaces.Discrete) for leaf in _leaf_spaces(self.single_observation_space)
        )

    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Tree, dict[str, Any]]:
        self._warn_of(seed)
        if options:
            raise ValueError(f"envpool takes no reset options but reset_mask, got {sorted(options)}")
        obs, info = self.env.reset()
        self._last = self._cast(obs)
        return self._last, info

    def reset_rows(
        self, mask: Array, options: dict[str, Any] | None = None, seed: Any = None
    ) -> tuple[Tree, dict[str, Any]]:
        """envpool returns only the rows it reset; the others keep what they showed last."""
        self._warn_of(seed)
        if options:
            raise ValueError(f"envpool takes no reset options but reset_mask, got {sorted(options)}")
        rows = np.flatnonzero(mask)
        part, info = self.env.reset(options={"reset_mask": mask})

        def scatter(whole: Array, some: Array) -> Array:
            whole = np.array(whole)
            whole[rows] = some
            return whole

        self._last = map_tree(scatter, self._last, self._cast(part))
        return self._last, {"env_id": np.arange(self.num_envs), **_scattered(info, rows, self.num_envs)}

    def step(self, actions: Tree) -> Step:
        if not (isinstance(actions, np.ndarray) and actions.flags.c_contiguous):
            actions = map_tree(np.ascontiguousarray, actions)
        obs, reward, terminated, truncated, info = self.env.step(actions)
        self._last = obs = self._cast(obs)
        return obs, reward, terminated, truncated, info

    def final_obs(self, info: dict[str, Any], obs: Tree, done: Array) -> Tree | None:
        return None

    def dense(self, given: Any, obs: Tree, done: Array) -> Tree:
        return given

    def _warn_of(self, seed: Any) -> None:
        if seed is not None:
            warnings.warn(
                "envpool takes its seed when it is made (envpool.make_gymnasium(..., seed=...)): "
                f"reset(seed={seed!r}) has no effect",
                stacklevel=5,
            )

    def _cast(self, obs: Tree) -> Tree:
        return _cast_discrete(obs, self.single_observation_space) if self._casts else obs

    def close(self) -> None:
        self.env.close()


def _leaf_spaces(space: spaces.Space[Any]) -> list[spaces.Space[Any]]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return [leaf for child in children for leaf in _leaf_spaces(child)]
    return [space]


def _cast_discrete(obs: Tree, space: spaces.Space[Any]) -> Tree:
    if isinstance(space, spaces.Dict):
        return {key: _cast_discrete(obs[key], child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_cast_discrete(obs[i], child) for i, child in enumerate(space.spaces))
    return obs.astype(space.dtype, copy=False) if isinstance(space, spaces.Discrete) else obs


def _scattered(info: dict[str, Any], rows: Array, size: int) -> dict[str, Any]:
    """Per-row entries of a partial reset's info, spread over all rows with Gymnasium's ``_key`` masks."""
    out: dict[str, Any] = {}
    for key, value in info.items():
        if key == "env_id" or not isinstance(value, np.ndarray) or value.shape[:1] != (len(rows),):
            continue
        dense = np.zeros((size, *value.shape[1:]), dtype=value.dtype)
        dense[rows] = value
        mask = np.zeros(size, dtype=bool)
        mask[rows] = True
        out[key], out[f"_{key}"] = dense, mask
    return out


def layers(env: Any) -> list[Any]:
    """The env and everything it wraps, outermost first."""
    found = [env]
    while isinstance(env, VectorWrapper):
        env = env.env
        found.append(env)
    return found
